"""What ends the company of some ranks for good: calls that can no longer be told apart, and ranks excluded.

Calls of one set of ranks belong together by their order. A rank that leaves a call by itself (its time is up, its
caller is interrupted) breaks that order: whoever comes later may come to the call that was left or, having skipped it,
to the next one, and nothing in the call tells. So from then on these ranks refuse to call together, each as soon as it
learns of it from the others' beacons.

Where calls are fault tolerant, ranks that did not come are lost for good: the others make no call with them any more,
and tell them so if they do come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from reshard.coordination.calling_threads import find_mixed_threads
from reshard.coordination.decide import Decision, Request
from reshard.coordination.liveness.call_sequence import LeavingError
from reshard.coordination.liveness.status import ANY_RANKS, publish_status
from reshard.coordination.process_group import Group
from reshard.errors import DisagreementError, RemoteError
from reshard.formatting import format_ranks, say_ranks


class MembershipError(LeavingError):
    """The others go on without this rank."""

    def __init__(self, text: str) -> None:
        super().__init__(Decision(error=(RemoteError.__name__, text)))


class LostError(LeavingError):
    """Others have found out that ranks are lost, and go on in this very call."""

    def __init__(self, lost: Collection[int]) -> None:
        super().__init__(Decision(lost=sorted(lost)))


_CALLS = "makes call"
_ADVICE = "create a new group"


class OutOfSyncError(LeavingError):
    """The ranks of a call may be in different ones."""

    def __init__(self, members: Sequence[int], why: str) -> None:
        super().__init__(Decision(error=(DisagreementError.__name__, _describe(members, why)), out_of_sync=why))


def _describe(members: Sequence[int], why: str) -> str:
    return f"ranks {format_ranks(members)} are out of sync ({why}): {_ADVICE}"


def mark_out_of_sync(group: Group, members: Sequence[int], why: str) -> None:
    """Note that calls of these ranks can no longer be told apart."""
    if format_ranks(members) not in group.status["out_of_sync"]:
        group.status["out_of_sync"][format_ranks(members)] = why
        publish_status(group)


def _find_reason(status: dict[str, Any], members: Sequence[int]) -> str | None:
    """Why calls of these ranks can no longer be told apart, by what a rank publishes; None if they can."""
    reasons = status["out_of_sync"]
    return reasons.get(format_ranks(members), reasons.get(ANY_RANKS))


def check_together(group: Group, members: Sequence[int], fault_tolerant: bool) -> None:
    """Raise unless these ranks may call.

    Raises:
        DisagreementError: their calls can no longer be told apart.
        RemoteError: some of them are lost, and the call does not bear that.
    """
    why = _find_reason(group.status, members)
    if why is not None:
        raise DisagreementError(_describe(members, why))
    lost = [rank for rank in members if rank in group.status["lost"]]
    if lost and not fault_tolerant:
        raise RemoteError(
            f"{say_ranks(lost)} {'were' if len(lost) > 1 else 'was'} lost in an earlier "
            "call, which the others went on without"
        )


def go_on_without(group: Group, lost: Collection[int]) -> None:
    """Note that no call is made with these ranks any more."""
    known = set(group.status["lost"])
    if not known.issuperset(lost):
        group.status["lost"] = sorted(known.union(lost))
        publish_status(group)


def those_left(group: Group, members: Sequence[int]) -> tuple[int, ...]:
    """The ranks that are not lost."""
    return tuple(rank for rank in members if rank not in group.status["lost"])


def find_membership_error(group: Group, members: Sequence[int], rank: int, status: dict[str, Any]) -> None:
    """Raise if a rank, by what it left in the store, makes no call with these ranks or with this one any more.

    Raises:
        MembershipError, OutOfSyncError.
    """
    if group.rank in status["lost"]:
        raise MembershipError(
            f"rank {rank} goes on without rank {group.rank}, which did not come to a call in time: make a new group"
        )
    why = _find_reason(status, members)
    if why is not None:
        raise OutOfSyncError(members, why)


@contextlib.contextmanager
def counting(group: Group, members: Sequence[int], fault_tolerant: bool) -> Iterator[str]:
    """Count a call while it agrees, unless this rank gives it up because another one had left it, uncounted.

    Where calls are fault tolerant ranks may leave a call one by one for one of fewer, which must be of the same one.

    Returns:
        What its rounds say of themselves.
    """
    members = tuple(members)
    group.calls[members] = group.calls.get(members, 0) + 1
    group.gave_up = False
    try:
        yield f"{_CALLS} {group.calls[members]} of ranks {format_ranks(members)}" if fault_tolerant else ""
    finally:
        group.calls[members] -= group.gave_up


def find_mixed(requests: Sequence[Request]) -> Decision | None:
    """What all take from a round to which ranks came for different things; None if it was for the same."""
    threads = find_mixed_threads({request.rank: request.caller for request in requests})
    if threads is not None:
        return Decision(error=(DisagreementError.__name__, threads), out_of_sync=threads)
    first = requests[0]
    for request in requests[1:]:
        places = (first.place, request.place)
        if "" in places and all(not place or place.startswith(_CALLS) for place in places):
            continue  # calls that differ in whether they are fault tolerant: their arguments say so
        if request.place != first.place:
            (a, a_place), (b, b_place) = ((one.rank, one.place or "calls again") for one in (first, request))
            text = f"ranks disagree on what comes next: rank {a} {a_place}, rank {b} {b_place}"
            if any(place.startswith("waits for") for place in places):
                text += "; transfers that are fault tolerant are waited for on every rank, in the same order"
            return Decision(error=(DisagreementError.__name__, f"{text}: {_ADVICE}"), out_of_sync=text)
    return None
