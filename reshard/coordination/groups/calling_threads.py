"""Detects calls from different threads, so that calls of two threads are never matched across ranks.

Ranks match the calls of a group by order. The calls of two threads have no common order on all ranks. So a call of
thread A on one rank could match a call of thread B on another rank, and take its data. Two checks prevent this. A call
that overlaps another thread's call on the same rank ends the group. In every round each rank also reports the name of
its calling thread: threads with the same name belong together.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from reshard.errors import ArgumentError, ReshardError

#: Name prefix of this package's own threads, which make no calls.
_OWN_PREFIX = "reshard-"
_MAIN = threading.main_thread().name
#: Maximum number of thread names that a rank reports.
MAX_NAMES = 256


@dataclass(frozen=True)
class Caller:
    """The calling thread, as one rank reports it.

    Attributes:
        name: thread name, numbered if several threads share it; "" for a thread that Python did not start.
        others: names of the rank's other live threads.
        alternates: whether threads of this rank have called on the group in turns.
    """

    name: str = ""
    others: tuple[str, ...] = ()
    alternates: bool = False


def describe_caller(alternates: bool) -> Caller:
    """The current thread as a :class:`Caller`."""
    current = threading.current_thread()
    names: dict[threading.Thread, str] = {}
    count: dict[str, int] = {}
    for thread in threading.enumerate():  # in start order
        if not isinstance(thread, threading._DummyThread) and not thread.name.startswith(_OWN_PREFIX):
            count[thread.name] = count.get(thread.name, 0) + 1
            names[thread] = thread.name if count[thread.name] == 1 else f"{thread.name} #{count[thread.name]}"
    name = names.pop(current, "")
    return Caller(name, tuple(names.values())[:MAX_NAMES], alternates)


def find_thread_mismatch(callers: dict[int, Caller]) -> str | None:
    """The reason why the calls of these ranks may come from unrelated threads; None if nothing indicates that.

    Related threads have the same name on all ranks. A rank's main thread may also match another thread of another rank.
    That exception does not hold if each rank also has a live thread with the other's name, or if threads of either rank
    call in turns.
    """
    ranks = [rank for rank, caller in callers.items() if caller.name]
    for a, b in itertools.combinations(ranks, 2):
        one, two = callers[a], callers[b]
        if one.name == two.name:
            continue
        is_main = _MAIN in (one.name, two.name)
        is_mutual = two.name in one.others and one.name in two.others
        if not is_main or is_mutual or one.alternates or two.alternates:
            return (
                f"rank {a} calls from thread {one.name!r}, rank {b} from thread {two.name!r}; ranks match calls by "
                "order, and two threads have no common order: give matching threads the same name on all ranks, "
                "and other threads their own group (torch.distributed.new_group or reshard.join)"
            )
    return None


class Owner:
    """The thread that starts the transfers of a Mover: its creator, or after that thread's end the next one to call."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._is_starting = False

    @contextlib.contextmanager
    def starting(self, rank: int, fail: Callable[[ReshardError], ReshardError]) -> Iterator[None]:
        """Refuse a start by another thread, or by a signal handler that interrupts another start.

        Args:
            fail: publishes the error; returns the one to raise.
        """
        self.check(rank, fail)
        self._is_starting = True
        try:
            yield
        finally:
            self._is_starting = False

    def may_start(self) -> bool:
        """Whether :meth:`check` passes, because the owner calls."""
        return self._thread is threading.current_thread() and not self._is_starting

    def check(self, rank: int, fail: Callable[[ReshardError], ReshardError]) -> None:
        """Refuse a start as :meth:`starting` does, for a start that cannot be interrupted by another one."""
        try:
            self._check_thread(rank)
            if self._is_starting:
                raise ArgumentError(
                    f"rank {rank}: a transfer of a Mover starts inside the start of another one, as in a signal "
                    "handler; ranks match transfers by order: start it after the other call has returned"
                )
        except ArgumentError as error:
            raise fail(error) from None

    def _check_thread(self, rank: int) -> None:
        current = threading.current_thread()
        if current is not self._thread and self._thread.is_alive():
            raise ArgumentError(
                f"rank {rank}: thread {current.name!r} starts a transfer of a Mover that belongs to thread "
                f"{self._thread.name!r}; ranks match transfers by order: give each thread its own group and Mover"
            )
        self._thread = current
