"""``wait_for`` distinguishes three failures: a broken connection, a timeout, and an error of another rank."""

from __future__ import annotations

import time

import pytest

from reshard.errors import TransferTimeoutError
from reshard.runtime.transport import BrokenConnectionError, wait_for


class _Failing:
    """A work whose ``wait`` fails after ``seconds`` or after its timeout, whichever comes first."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def wait(self, timeout):
        self.timeout = timeout.total_seconds()
        time.sleep(min(self.seconds, timeout.total_seconds()))
        raise RuntimeError("reset by peer")


def test_failure_before_the_deadline_is_a_broken_connection():
    with pytest.raises(BrokenConnectionError, match="message 3 failed: reset by peer") as caught:
        wait_for(_Failing(), time.monotonic() + 0.5, lambda: None, 1, 2, "message 3")
    assert caught.value.peer == 2


@pytest.mark.parametrize("seconds_left", [-1.0, 0.05])
def test_failure_after_the_deadline_is_a_timeout(seconds_left):
    work = _Failing(seconds=5)
    with pytest.raises(TransferTimeoutError, match="rank 1: message 3 did not finish in time"):
        wait_for(work, time.monotonic() + seconds_left, lambda: None, 1, 2, "message 3")
    assert 0 < work.timeout <= max(seconds_left, 0.001)


def test_error_reported_by_another_rank_takes_precedence():
    errors = iter([None, KeyError("reported")])

    def check():
        if (error := next(errors)) is not None:
            raise error

    with pytest.raises(KeyError, match="reported"):
        wait_for(_Failing(), time.monotonic() + 0.5, check, 1, 2, "message 3")
