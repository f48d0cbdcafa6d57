"""How ``reshard train`` reports ranks that fail."""

from __future__ import annotations

import os
import signal

import pytest

from reshard.errors import ArgumentError, RemoteError
from reshard.scheduler.training.launch import run_locally, summarize_failures
from reshard.testing import LaunchError
from reshard.testing.processes import RankFailure
from tests.support.interpreters import run_interpreters


def _lose_rank_1(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RemoteError("rank 1 is gone: it closed its connection\nin 0B3, microbatch 3 of stage 0")


def test_a_killed_rank_is_named_without_tracebacks():
    with pytest.raises(RemoteError) as caught:
        run_locally(_lose_rank_1, 3)
    assert str(caught.value) == (
        "ranks 0,2: rank 1 is gone: it closed its connection\nrank 1: ended with exit code -9 (Killed)"
    )


def _fail(rank):
    raise ArgumentError("the same on all ranks") if rank < 2 else ValueError("a fault")


def test_ranks_that_raise_the_same_error_of_ours_raise_it():
    with pytest.raises(ArgumentError, match=r"^the same on all ranks$"):
        run_locally(_fail, 2)


def test_faults_keep_their_tracebacks():
    failures = [RankFailure(0, ArgumentError("x"), "traceback 0"), RankFailure(1, ValueError("y"), "traceback 1")]
    error = LaunchError(failures, {})
    assert summarize_failures(error) is error
    assert "traceback 1" in str(error)


_TRAIN_AS_ONE_RANK = """
import atexit, gc, os, sys
if os.environ["WITHOUT_TRITON"]:
    sys.modules["triton"] = None
atexit.register(lambda: print("frozen:", gc.get_freeze_count() > 0))
from reshard.cli.main import main
main("train gpt3-125m --shrink 64 --meshes 1x1 --steps 1 --batch 2 --autocast none --device cpu".split())
"""


@pytest.mark.nightly
@pytest.mark.parametrize("without_triton", ["1", ""])
def test_a_rank_of_torchrun_ends_without_a_search_for_cycles_or_a_report_of_leaks(
    tmp_path, monkeypatch, without_triton
):
    monkeypatch.setenv("WITHOUT_TRITON", without_triton)
    (tmp_path / "train_as_one_rank.py").write_text(_TRAIN_AS_ONE_RANK)
    output, errors = run_interpreters(tmp_path / "train_as_one_rank.py", 1)[0]
    assert "leaked" not in errors
    if without_triton:
        assert output.endswith("frozen: True\n"), output
