"""Which threads call on a group, so that calls of two threads are never paired across ranks.

Ranks match the calls of a group by their order. Two threads of one rank have no order, so a call of one thread could
meet another rank's call of the other thread, and take its data. Two checks prevent that. A call that overlaps another
thread's call on the same rank ends the group. And each rank reports in every round which thread calls, by its name:
threads of one name belong together.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from reshard.errors import ArgumentError

#: Threads of this package; they make no calls.
_OWN_PREFIX = "reshard-"
_MAIN = threading.main_thread().name
#: Names that a rank reports at most.
MAX_NAMES = 256


@dataclass(frozen=True)
class Caller:
    """The thread that calls, as one rank reports it.

    Attributes:
        name: of the thread, with a number where several share a name; "" for a thread that Python did not start.
        others: names of the rank's other live threads.
        alternates: whether threads of this rank have called on the group in turns.
    """

    name: str = ""
    others: tuple[str, ...] = ()
    alternates: bool = False


def describe_caller(alternates: bool) -> Caller:
    """The current thread as a caller."""
    current = threading.current_thread()
    names: dict[threading.Thread, str] = {}
    count: dict[str, int] = {}
    for thread in threading.enumerate():  # in the order in which they were started
        if not isinstance(thread, threading._DummyThread) and not thread.name.startswith(_OWN_PREFIX):
            count[thread.name] = count.get(thread.name, 0) + 1
            names[thread] = thread.name if count[thread.name] == 1 else f"{thread.name} #{count[thread.name]}"
    name = names.pop(current, "")
    return Caller(name, tuple(names.values())[:MAX_NAMES], alternates)


def find_mixed_threads(callers: dict[int, Caller]) -> str | None:
    """Why the calls of these ranks may be of different threads, in words; None if nothing says so.

    Threads that belong together have one name on all ranks. The main thread of a rank may also meet another thread of
    the next, unless each rank has a live thread of the other's name too, or threads of a rank call in turns.
    """
    ranks = [rank for rank, caller in callers.items() if caller.name]
    for place, a in enumerate(ranks):
        for b in ranks[place + 1 :]:
            one, two = callers[a], callers[b]
            if one.name == two.name:
                continue
            is_main = _MAIN in (one.name, two.name)
            is_mutual = two.name in one.others and one.name in two.others
            if not is_main or is_mutual or one.alternates or two.alternates:
                return (
                    f"rank {a} calls from thread {one.name!r}, rank {b} from thread {two.name!r}; ranks match calls by "
                    "order, which two threads do not have: give threads that call together the same name on all ranks, "
                    "and threads that do not their own groups (torch.distributed.new_group or reshard.join)"
                )
    return None


class Owner:
    """The thread that starts the transfers of a Mover: the one that made it, or another one after its end."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()

    def check(self, rank: int) -> None:
        """Raise ArgumentError unless the current thread may start a transfer."""
        current = threading.current_thread()
        if current is not self._thread and self._thread.is_alive():
            raise ArgumentError(
                f"rank {rank}: thread {current.name!r} starts a transfer of a Mover that thread {self._thread.name!r} "
                "made; ranks match transfers by order: give each thread its own group and Mover"
            )
        self._thread = current
