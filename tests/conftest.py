"""A fixed hypothesis profile, so that every run tests the same cases, and fixtures of several test files."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.devices import HAS_GPU
from tests.support.nccl.build import build_standin
from tests.support.own_package import find_wrong_package

settings.register_profile(
    "fixed", derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
#: For runs that only need to know whether a test fails, and not the smallest failing case.
settings.register_profile("unshrunk", settings.get_profile("fixed"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("fixed")


#: The checkout, in which pytest looks for modules first, because of ``pythonpath`` in pyproject.toml.
ROOT = str(Path(__file__).resolve().parent.parent)


def _import_the_installed_package():
    """Import ``reshard`` from where it is installed, such as from a wheel, in this process and in those that it starts."""
    sys.path[:] = [place for place in sys.path if place not in ("", ROOT)]
    if importlib.util.find_spec("reshard") is None:
        sys.path.insert(0, ROOT)
    else:
        sys.path.append(ROOT)


_import_the_installed_package()


def pytest_configure():
    """Set environment variables that the ranks of all tests inherit, and refuse to test another package.

    Torch, which tests import later, uses one thread: several ranks share few cores, and idle threads spin. Its store
    looks up the name of each peer; a lost query is repeated after 1 s instead of 5 s. Shells let jobs in the background
    ignore SIGINT, and tests raise it.
    """
    spec = importlib.util.find_spec("reshard")
    if spec is not None and spec.origin is not None and (wrong := find_wrong_package(spec.origin, ROOT)):
        raise pytest.UsageError(wrong)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """Hide the objects of this process from the garbage collector: in a forked rank, it would copy all their pages.

    Autograd starts its threads for devices at the first backward. Without a GPU, let it do so before a test traces a
    model, because builds of torch for CUDA then add devices, and autograd does not run in forks of a process with such
    threads. With a GPU, the first backward would start one.
    """
    if (torch := sys.modules.get("torch")) and not HAS_GPU:
        torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Show them to the collector again, because extension modules report objects that are never freed as leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def standin(tmp_path_factory):
    """The path of a library with the C interface of NCCL, on host memory."""
    # The names of its sockets must be short, so they are not in a folder of pytest.
    with tempfile.TemporaryDirectory(prefix="nccl-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_STANDIN_FOLDER", folder)
        yield build_standin(tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def device(monkeypatch, standin):
    """CPU tensors take the path of CUDA tensors, with threads as streams and the stand-in for NCCL."""
    from tests.support.nccl.streams import use_streams

    use_streams(monkeypatch, standin)
