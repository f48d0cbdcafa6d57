"""Membership: decides which ranks may still call together. Tracks out-of-sync sets of ranks, and lost ranks.

The ranks of a set match their calls by order. A timeout or an interrupt can make one rank leave a call that the others
are still in. Then calls can no longer be matched by their order: a request that arrives later may belong to that call
or to the next one. So ranks mark the set as out of sync in their published status, and every rank that reads the mark
refuses further calls of the set.

A rank that misses a fault-tolerant call is lost. The other ranks agree on that (see
:mod:`reshard.coordination.liveness.exclusions`), and exclude it from all further calls. If such a rank calls again, it
gets an error that says so, even if the other ranks have ended by then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from reshard.coordination.groups.agreement_messages import Decision, RankStatus, RoundRequest
from reshard.coordination.groups.calling_threads import find_thread_mismatch
from reshard.coordination.groups.process_group import Group
from reshard.coordination.liveness.call_sequence import RoundEndedError
from reshard.coordination.liveness.lost_ranks import ranks_lost_earlier_error
from reshard.coordination.liveness.status import ANY_RANKS, publish_status
from reshard.errors import DisagreementError, RemoteError
from reshard.formatting import format_ranks


class ExcludedError(RoundEndedError):
    """The other ranks have excluded this rank."""

    def __init__(self, group: Group) -> None:
        super().__init__(Decision(error=(RemoteError.__name__, _describe_exclusion(group))))


class MembersLostError(RoundEndedError):
    """Lost ranks are members of this call, and the others repeat it without them."""

    def __init__(self, lost: Collection[int]) -> None:
        super().__init__(Decision(lost=sorted(lost)))


#: Prefix of the purpose of a round in a fault-tolerant call. The number and the ranks of the call follow.
_CALL_PURPOSE = "makes call"
_ADVICE = "create a new group"


class OutOfSyncError(RoundEndedError):
    """The members of a round may be in different calls."""

    def __init__(self, members: Sequence[int], why: str) -> None:
        super().__init__(Decision(error=(DisagreementError.__name__, _describe(members, why)), out_of_sync=why))


def _describe(members: Sequence[int], why: str) -> str:
    return f"ranks {format_ranks(members)} are out of sync ({why}); {_ADVICE}"


def _describe_exclusion(group: Group) -> str:
    others = "the other ranks continue" if group.excluded_by is None else f"rank {group.excluded_by} continues"
    return f"{others} without rank {group.rank}, which missed the deadline of a call; {_ADVICE}"


def mark_out_of_sync(group: Group, members: Sequence[int], why: str) -> None:
    """Mark these ranks as out of sync in the status of this rank, and publish the status."""
    if format_ranks(members) not in group.status.out_of_sync:
        group.status.out_of_sync[format_ranks(members)] = why
        publish_status(group)


def _find_reason(status: RankStatus, members: Sequence[int]) -> str | None:
    """The reason that a rank's status gives for these ranks to be out of sync; None if they are in sync."""
    reasons = status.out_of_sync
    return reasons.get(format_ranks(members), reasons.get(ANY_RANKS))


def check_membership(group: Group, members: Sequence[int], fault_tolerant: bool) -> None:
    """Raise unless these ranks may call together.

    Raises:
        DisagreementError: the ranks are out of sync.
        RemoteError: the others continue without this rank; or some are lost, and the call is not fault tolerant.
    """
    if group.rank in group.lost:
        raise RemoteError(_describe_exclusion(group))
    why = _find_reason(group.status, members)
    if why is not None:
        raise DisagreementError(_describe(members, why))
    lost = [rank for rank in members if rank in group.lost]
    if lost and not fault_tolerant:
        raise ranks_lost_earlier_error(lost)


def remaining_ranks(group: Group, members: Sequence[int]) -> tuple[int, ...]:
    """The members that are not lost. This rank is always included: if it is lost, its round raises an error."""
    return tuple(rank for rank in members if rank not in group.lost or rank == group.rank)


def check_published_membership(members: Sequence[int], status: RankStatus) -> None:
    """Raise OutOfSyncError if another rank, which published ``status``, has marked ``members`` as out of sync."""
    why = _find_reason(status, members)
    if why is not None:
        raise OutOfSyncError(members, why)


@contextlib.contextmanager
def count_call(group: Group, members: Sequence[int], fault_tolerant: bool) -> Iterator[str]:
    """Count a call of these members. Undo the count if this rank abandons the call because another rank has left it.

    In a fault-tolerant call, each rank decides by itself to continue without lost members. When ranks then meet in a
    round, the count shows whether they are in the same call.

    Yields:
        The purpose of the call's rounds, which their requests carry; "" unless the call is fault tolerant.
    """
    members = tuple(members)
    group.calls[members] = group.calls.get(members, 0) + 1
    group.abandoned_call = False
    try:
        yield f"{_CALL_PURPOSE} {group.calls[members]} of ranks {format_ranks(members)}" if fault_tolerant else ""
    finally:
        group.calls[members] -= group.abandoned_call


def find_round_mismatch(requests: Sequence[RoundRequest]) -> Decision | None:
    """An error decision if the threads or the purposes of a round differ between ranks; None if they match."""
    threads = find_thread_mismatch({request.rank: request.caller for request in requests})
    if threads is not None:
        return Decision(error=(DisagreementError.__name__, threads), out_of_sync=threads)
    first = requests[0]
    for request in requests[1:]:
        purposes = (first.purpose, request.purpose)
        if "" in purposes and all(not purpose or purpose.startswith(_CALL_PURPOSE) for purpose in purposes):
            continue  # only one of the calls is fault tolerant; the comparison of arguments reports it
        if request.purpose != first.purpose:
            actions = [f"rank {item.rank} {item.purpose or 'calls again'}" for item in (first, request)]
            text = f"ranks disagree on what comes next: {', '.join(actions)}"
            if any(purpose.startswith("waits for") for purpose in purposes):
                text += "; every rank must wait for fault-tolerant transfers, in the same order"
            if any("encoded transfer" in purpose for purpose in purposes):
                text += "; every rank must wait for transfers with lossless codecs, in the same order"
            return Decision(error=(DisagreementError.__name__, f"{text}; {_ADVICE}"), out_of_sync=text)
    return None
