"""Waiting for a message under way: it comes, it fails, or it is too late."""

from __future__ import annotations

import time

import pytest

from reshard import TransferTimeoutError
from reshard.runtime.transport import BrokenConnectionError, wait_for


class _Failing:
    """A work that fails when it is waited for, after some seconds."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def wait(self, timeout):
        self.timeout = timeout.total_seconds()
        time.sleep(min(self.seconds, timeout.total_seconds()))
        raise RuntimeError("reset by peer")


def test_what_fails_before_its_time_is_over_is_a_broken_connection():
    with pytest.raises(BrokenConnectionError, match="message 3 failed: reset by peer") as caught:
        wait_for(_Failing(), time.monotonic() + 0.5, lambda: None, 1, 2, "message 3")
    assert caught.value.peer == 2


@pytest.mark.parametrize("left", [-1.0, 0.05])
def test_what_does_not_end_in_time_is_late(left):
    work = _Failing(seconds=5)
    with pytest.raises(TransferTimeoutError, match="rank 1: message 3 did not finish in time"):
        wait_for(work, time.monotonic() + left, lambda: None, 1, 2, "message 3")
    assert 0 < work.timeout <= max(left, 0.001)


def test_what_another_rank_told_comes_first():
    said = iter([None, KeyError("told")])

    def check():
        if (error := next(said)) is not None:
            raise error

    with pytest.raises(KeyError, match="told"):
        wait_for(_Failing(), time.monotonic() + 0.5, check, 1, 2, "message 3")
