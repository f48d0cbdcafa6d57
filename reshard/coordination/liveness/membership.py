"""Which sets of ranks may call together: sets that are out of sync, and ranks excluded after a loss.

The ranks of a set match their calls by order. A rank that leaves a call alone, because of a timeout or an interrupt,
breaks that order. A rank that arrives later may be in the call that was left or already in the next one, and the call
itself does not show which. So the set is marked out of sync in the status of each rank, and every rank that reads the
mark refuses further calls of the set.

In fault-tolerant calls, a rank that misses a call is excluded permanently. The other ranks make no more calls with it
and report that if it calls again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from reshard.coordination.calling_threads import find_thread_mismatch
from reshard.coordination.liveness.call_sequence import RoundEndedError
from reshard.coordination.liveness.status import ANY_RANKS, publish_status
from reshard.coordination.messages import Decision, RankStatus, Request
from reshard.coordination.process_group import Group
from reshard.errors import DisagreementError, RemoteError
from reshard.formatting import describe_ranks, format_ranks


class ExcludedError(RoundEndedError):
    """The other ranks have excluded this rank."""

    def __init__(self, text: str) -> None:
        super().__init__(Decision(error=(RemoteError.__name__, text)))


class MembersLostError(RoundEndedError):
    """Other ranks have detected lost ranks and continue this call without them."""

    def __init__(self, lost: Collection[int]) -> None:
        super().__init__(Decision(lost=sorted(lost)))


_CALLS = "makes call"
_ADVICE = "create a new group"


class OutOfSyncError(RoundEndedError):
    """The members of a call may be in different calls."""

    def __init__(self, members: Sequence[int], why: str) -> None:
        super().__init__(Decision(error=(DisagreementError.__name__, _describe(members, why)), out_of_sync=why))


def _describe(members: Sequence[int], why: str) -> str:
    return f"ranks {format_ranks(members)} are out of sync ({why}); {_ADVICE}"


def mark_out_of_sync(group: Group, members: Sequence[int], why: str) -> None:
    """Publish that calls of these ranks can no longer be matched."""
    if format_ranks(members) not in group.status.out_of_sync:
        group.status.out_of_sync[format_ranks(members)] = why
        publish_status(group)


def _find_reason(status: RankStatus, members: Sequence[int]) -> str | None:
    """Why these ranks are out of sync according to a rank's status; None if they are not."""
    reasons = status.out_of_sync
    return reasons.get(format_ranks(members), reasons.get(ANY_RANKS))


def check_membership(group: Group, members: Sequence[int], fault_tolerant: bool) -> None:
    """Raise unless these ranks may call together.

    Raises:
        DisagreementError: they are out of sync.
        RemoteError: some of them are lost, and the call is not fault tolerant.
    """
    why = _find_reason(group.status, members)
    if why is not None:
        raise DisagreementError(_describe(members, why))
    lost = [rank for rank in members if rank in group.status.lost]
    if lost and not fault_tolerant:
        raise RemoteError(
            f"{describe_ranks(lost)} {'were' if len(lost) > 1 else 'was'} lost in an earlier call; "
            "create a new group of the remaining ranks"
        )


def record_lost(group: Group, lost: Collection[int]) -> None:
    """Exclude lost ranks from further calls."""
    known = set(group.status.lost)
    if not known.issuperset(lost):
        group.status.lost = sorted(known.union(lost))
        publish_status(group)


def remaining_ranks(group: Group, members: Sequence[int]) -> tuple[int, ...]:
    """The members that are not lost."""
    return tuple(rank for rank in members if rank not in group.status.lost)


def check_published_membership(group: Group, members: Sequence[int], rank: int, status: RankStatus) -> None:
    """Raise if the status of ``rank`` excludes this rank or marks these ranks as out of sync.

    Raises:
        ExcludedError, OutOfSyncError.
    """
    if group.rank in status.lost:
        raise ExcludedError(
            f"rank {rank} continues without rank {group.rank}, which missed the deadline of a call; {_ADVICE}"
        )
    why = _find_reason(status, members)
    if why is not None:
        raise OutOfSyncError(members, why)


@contextlib.contextmanager
def count_call(group: Group, members: Sequence[int], fault_tolerant: bool) -> Iterator[str]:
    """Count a call while its ranks agree; undone if this rank abandons the call because another rank has left it.

    In a fault-tolerant call each rank may move to a call with fewer members on its own. The count shows that they are
    still in the same call.

    Returns:
        The purpose that the rounds of the call carry in their requests; "" unless fault tolerant.
    """
    members = tuple(members)
    group.calls[members] = group.calls.get(members, 0) + 1
    group.abandoned_call = False
    try:
        yield f"{_CALLS} {group.calls[members]} of ranks {format_ranks(members)}" if fault_tolerant else ""
    finally:
        group.calls[members] -= group.abandoned_call


def find_round_mismatch(requests: Sequence[Request]) -> Decision | None:
    """An error decision if ranks entered one round for different purposes; None if the purposes match."""
    threads = find_thread_mismatch({request.rank: request.caller for request in requests})
    if threads is not None:
        return Decision(error=(DisagreementError.__name__, threads), out_of_sync=threads)
    first = requests[0]
    for request in requests[1:]:
        places = (first.place, request.place)
        if "" in places and all(not place or place.startswith(_CALLS) for place in places):
            continue  # only one call is fault tolerant; the comparison of arguments reports that
        if request.place != first.place:
            (a, a_place), (b, b_place) = ((one.rank, one.place or "calls again") for one in (first, request))
            text = f"ranks disagree on what comes next: rank {a} {a_place}, rank {b} {b_place}"
            if any(place.startswith("waits for") for place in places):
                text += "; every rank must wait for fault-tolerant transfers, in the same order"
            return Decision(error=(DisagreementError.__name__, f"{text}; {_ADVICE}"), out_of_sync=text)
    return None
