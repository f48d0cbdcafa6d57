"""What ends the company of some ranks for good: calls that can no longer be told apart, and ranks left behind.

Calls of one set of ranks belong together by their order. A rank that leaves a call by itself (its time is up, its
caller is interrupted) breaks that order: whoever comes later may come to the call that was left or, having skipped it,
to the next one, and nothing in the call tells. So from then on these ranks refuse to call together, each as soon as it
learns of it from the others' beacons.

Where losses are borne, ranks that did not come are lost for good: the others make no call with them any more, and tell
them so if they do come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from reshard.coordination.calling_threads import find_mixed_threads
from reshard.coordination.decide import Record, Verdict
from reshard.coordination.liveness.call_sequence import LeavingError
from reshard.coordination.liveness.status import ANY_RANKS, publish_beacon
from reshard.coordination.process_group import Group
from reshard.errors import DisagreementError, RemoteError
from reshard.formatting import format_ranks, say_ranks


class OutcastError(LeavingError):
    """The others go on without this rank."""

    def __init__(self, text: str) -> None:
        super().__init__(Verdict(error=(RemoteError.__name__, text)))


class LostError(LeavingError):
    """Others have found out that ranks are lost, and go on in this very call."""

    def __init__(self, lost: Collection[int]) -> None:
        super().__init__(Verdict(lost=sorted(lost)))


_CALLS = "makes call"
_ADVICE = "create a new group"


class OutOfStepError(LeavingError):
    """The ranks of a call may be in different ones."""

    def __init__(self, members: Sequence[int], why: str) -> None:
        super().__init__(Verdict(error=(DisagreementError.__name__, _describe(members, why)), loses_step=why))


def _describe(members: Sequence[int], why: str) -> str:
    return f"ranks {format_ranks(members)} are out of sync ({why}): {_ADVICE}"


def lose_step(group: Group, members: Sequence[int], why: str) -> None:
    """Note that calls of these ranks can no longer be told apart."""
    if format_ranks(members) not in group.beacon["out_of_step"]:
        group.beacon["out_of_step"][format_ranks(members)] = why
        publish_beacon(group)


def _find_reason(beacon: dict[str, Any], members: Sequence[int]) -> str | None:
    """Why calls of these ranks can no longer be told apart, by what a rank publishes; None if they can."""
    reasons = beacon["out_of_step"]
    return reasons.get(format_ranks(members), reasons.get(ANY_RANKS))


def check_together(group: Group, members: Sequence[int], bears_loss: bool) -> None:
    """Raise unless these ranks may call.

    Raises:
        DisagreementError: their calls can no longer be told apart.
        RemoteError: some of them are lost, and the call does not bear that.
    """
    why = _find_reason(group.beacon, members)
    if why is not None:
        raise DisagreementError(_describe(members, why))
    lost = [rank for rank in members if rank in group.beacon["lost"]]
    if lost and not bears_loss:
        raise RemoteError(
            f"{say_ranks(lost)} {'were' if len(lost) > 1 else 'was'} lost in an earlier "
            "call, which the others went on without"
        )


def go_on_without(group: Group, lost: Collection[int]) -> None:
    """Note that no call is made with these ranks any more."""
    known = set(group.beacon["lost"])
    if not known.issuperset(lost):
        group.beacon["lost"] = sorted(known.union(lost))
        publish_beacon(group)


def those_left(group: Group, members: Sequence[int]) -> tuple[int, ...]:
    """The ranks that are not lost."""
    return tuple(rank for rank in members if rank not in group.beacon["lost"])


def find_outcast(group: Group, members: Sequence[int], rank: int, beacon: dict[str, Any]) -> None:
    """Raise if a rank, by what it left in the store, makes no call with these ranks or with this one any more.

    Raises:
        OutcastError, OutOfStepError.
    """
    if group.rank in beacon["lost"]:
        raise OutcastError(
            f"rank {rank} goes on without rank {group.rank}, which did not come to a call in time: make a new group"
        )
    why = _find_reason(beacon, members)
    if why is not None:
        raise OutOfStepError(members, why)


@contextlib.contextmanager
def counting(group: Group, members: Sequence[int], bears_loss: bool) -> Iterator[str]:
    """Count a call while it agrees, unless this rank gives it up because another one had left it, uncounted.

    Where losses are borne ranks may leave a call one by one for one of fewer, which must be of the same one.

    Returns:
        What its rounds say of themselves.
    """
    members = tuple(members)
    group.calls[members] = group.calls.get(members, 0) + 1
    group.gave_up = False
    try:
        yield f"{_CALLS} {group.calls[members]} of ranks {format_ranks(members)}" if bears_loss else ""
    finally:
        group.calls[members] -= group.gave_up


def find_mixed(records: Sequence[Record]) -> Verdict | None:
    """What all take from a round to which ranks came for different things; None if it was for the same."""
    threads = find_mixed_threads({record.rank: record.caller for record in records})
    if threads is not None:
        return Verdict(error=(DisagreementError.__name__, threads), loses_step=threads)
    first = records[0]
    for record in records[1:]:
        places = (first.place, record.place)
        if "" in places and all(not place or place.startswith(_CALLS) for place in places):
            continue  # calls that differ in whether they bear losses: their arguments say so
        if record.place != first.place:
            (a, a_place), (b, b_place) = ((one.rank, one.place or "calls again") for one in (first, record))
            text = f"ranks disagree on what comes next: rank {a} {a_place}, rank {b} {b_place}"
            if any(place.startswith("waits for") for place in places):
                text += "; transfers that bear losses are waited for on every rank, in the same order"
            return Verdict(error=(DisagreementError.__name__, f"{text}: {_ADVICE}"), loses_step=text)
    return None
