"""Start methods of the processes of ranks: a fork, or a server process where a fork could not use autograd or CUDA.

After a backward on a machine with GPUs, autograd refuses to run in forked processes, because its threads, one for each
device, are not copied. A build of torch for CUDA also makes these threads without a GPU, once a model was traced on
fake tensors. CUDA itself refuses forks after its first use. The server is that of :mod:`multiprocessing`: it imports
this package, runs nothing, and forks the ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

_replaces_main = threading.Lock()
#: Modules that the server imports once, if this process has imported them. Then the ranks need not import them.
_SLOW_IMPORTS = ("torch._dynamo", "torch.distributed.tensor", "transformers")


def find_start(
    run: Callable[[int, Connection, Callable[[Any], bytes]], None],
) -> Callable[[int, Connection], BaseProcess]:
    """Choose how ranks start. They are forked if forked processes can use all of torch, or if ``run`` does not pickle.

    Args:
        run: called in each new process as ``run(rank, pipe, dumps)``, where ``dumps`` pickles what a rank sends back.

    Returns:
        ``start(rank, pipe)``, which starts a process and returns it.
    """
    call = None if can_fork() else _pickle((run, dict(os.environ), str(Path.cwd())))
    if call is None:
        fork = multiprocessing.get_context("fork")

        def start_fork(rank: int, pipe: Connection) -> BaseProcess:
            process = fork.Process(target=run, args=(rank, pipe, pickle.dumps), name=f"rank-{rank}")
            start_forked(process)
            return process

        return start_fork

    server = multiprocessing.get_context("forkserver")
    heavy = [name for name in _SLOW_IMPORTS if name in sys.modules]
    server.set_forkserver_preload([__name__, "reshard.api.call", *heavy])  # without effect if the server runs

    def start_from_server(rank: int, pipe: Connection) -> BaseProcess:
        outputs = [Connection(os.dup(number), readable=False) for number in (1, 2)]
        process = server.Process(target=_run_pickled, args=(call, rank, pipe, outputs), name=f"rank-{rank}")
        # A main module without a file is not imported by the new process, so a script needs no guard against that.
        with _replaces_main:
            main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
            try:
                process.start()
            finally:
                sys.modules["__main__"] = main
        for output in outputs:
            output.close()
        return process

    return start_from_server


def start_forked(process: BaseProcess) -> None:
    """Start a process that is a fork, without a warning if this process has threads, such as those of torch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        process.start()


def can_fork() -> bool:
    """Whether a process that is forked from this one could use autograd and CUDA."""
    return not torch.cuda.is_initialized() and not any(map(_is_of_autograd, Path("/proc/self/task").glob("*/comm")))


def _is_of_autograd(path: Path) -> bool:
    """Whether the file with the name of a thread names one that autograd started for a device."""
    try:
        return path.read_text().startswith("pt_autograd")
    except OSError:  # the thread has ended
        return False


def _pickle(value: Any) -> bytes | None:
    """The value as bytes; None if it does not pickle, or if ``cloudpickle`` is not installed."""
    try:
        import cloudpickle

        pickled: bytes = cloudpickle.dumps(value)
    except Exception:  # pickling may raise anything
        return None
    return pickled


def _run_pickled(call: bytes, rank: int, pipe: Connection, outputs: list[Connection]) -> None:
    import cloudpickle

    for number, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), number)
        output.close()
    run, environment, folder = pickle.loads(call)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    run(rank, pipe, cloudpickle.dumps)
