"""Count the calls that a rank has left, so that its next call never matches a call in which other ranks still wait.

A rank leaves a call if the call fails on this rank only. If the members of the call are known, the rank reports the
error to them in a round, and the call fails on all members. Otherwise the members keep waiting, and the next call of
the rank would match their call, which is an earlier one.

Each rank therefore counts, for each other rank, the calls that it may have left:

- calls that failed before their members were known;
- calls with the other rank that it abandoned because a third rank had left them.

When two ranks meet in a round, the rank with the lower count lags: it is in a call that the other rank has left.
The call fails on the lagging rank. The other rank is ahead, and waits for the next call of the lagging rank.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from reshard.coordination.groups.agreement_messages import (
    Decision,
    RankStatus,
    RoundRequest,
    describe_error,
    name_rank,
)
from reshard.coordination.groups.calling_threads import describe_caller
from reshard.coordination.groups.process_group import Group
from reshard.coordination.liveness.interruptions import is_published, mark_published
from reshard.coordination.liveness.status import ANY_RANKS, publish_status
from reshard.errors import DisagreementError, RemoteError, ReshardError
from reshard.formatting import format_ranks


class RoundEndedError(Exception):
    """Raised to end the round in which this rank waits. ``decision`` is the result of the round."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.error and decision.error[1])
        self.decision = decision


class CallLeftError(RoundEndedError):
    """Another rank has left the call. ``members`` are the ranks on which the call fails; none: all."""

    def __init__(self, error: tuple[str, str], members: Sequence[int] = ()) -> None:
        super().__init__(Decision(error=error, lagging=list(members)))


def report_error(group: Group, error: ReshardError) -> None:
    """Count a call that failed on this rank before its members were known, and publish the count and the error."""
    group.status.errors += 1
    group.status.error = describe_error(error)
    group.status.are_members_unknown |= len(group.call_groups) > 1
    publish_status(group)


@contextlib.contextmanager
def calling(group: Group) -> Iterator[None]:
    """Like ``Group.calling``, but overlapping calls make the group unusable on all ranks."""
    with _refusing_overlap(group, group.calling()):
        yield


@contextlib.contextmanager
def in_round(group: Group) -> Iterator[None]:
    """Like ``Group.in_round``, but a round inside another one makes the group unusable on all ranks."""
    with _refusing_overlap(group, group.in_round()):
        yield


@contextlib.contextmanager
def _refusing_overlap(group: Group, entered: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(entered)
        except ReshardError as error:
            group.status.out_of_sync.setdefault(ANY_RANKS, str(error))
            report_error(group, error)
            raise
        yield


def leave_call(group: Group, error: ReshardError, find_members: Callable[[], Sequence[int]] | None = None) -> None:
    """Count and publish a call that this rank leaves before a round, after an error.

    Args:
        find_members: returns the ranks of the call. If it fails, or is None, they are unknown. If this rank takes part
            in calls with several sets of ranks, it is then out of sync with all of them.
    """
    members: Sequence[int] | None = None
    if find_members is not None:
        with contextlib.suppress(Exception):  # the arguments that name them may be wrong
            members = find_members()
    if members is None:
        report_error(group, error)
    elif group.rank in members:
        for rank in members:
            if rank != group.rank:
                group.status.abandoned[str(rank)] = group.status.abandoned.get(str(rank), 0) + 1
        group.status.error = describe_error(error)
        publish_status(group)


def leave_interrupted(
    error: BaseException, group: Group, find_members: Callable[[], Sequence[int]] | None = None
) -> None:
    """Like :func:`leave_call`, after an exception that ended the call before the group knew of it."""
    leave_call(group, RemoteError(f"rank {group.rank} left a call: {type(error).__name__}"), find_members)


@contextlib.contextmanager
def publish_interruption(group: Group, find_members: Callable[[], Sequence[int]] | None = None) -> Iterator[None]:
    """Publish that this rank left a call if an unpublished exception ends the call, such as KeyboardInterrupt.

    If this rank has not entered a round, it counts the call as left. Otherwise the other members may already be in the
    next round or in the transfer. To end the round, this rank publishes that it is out of sync with all ranks. To end
    the transfer, it fails the call group.

    Args:
        find_members: see :func:`leave_call`.
    """
    rounds, left_calls = group.attempts, (group.status.errors, dict(group.status.abandoned))
    reasons = len(group.status.out_of_sync)
    try:
        yield
    except BaseException as error:
        if isinstance(error, ReshardError) and is_published(error):
            raise
        mark_published(error)
        left = RemoteError(f"rank {group.rank} left a call: {type(error).__name__}")
        if (group.attempts, (group.status.errors, group.status.abandoned)) == (rounds, left_calls):
            leave_interrupted(error, group, find_members)
        elif group.attempts > rounds and len(group.status.out_of_sync) == reasons:
            group.status.out_of_sync[ANY_RANKS] = str(left)
            publish_status(group)
            call_group = group.call_groups.get(group.last_members)
            if call_group is not None:
                call_group.fail(call_group.generation, left)
        raise


def record_abandoned_call(group: Group, members: Sequence[int], decision: Decision) -> None:
    """Record that this rank abandons a call of ``members`` because another member has left the call."""
    abandoned, own = group.status.abandoned, members.index(group.rank)
    for rank in members:
        if rank != group.rank:
            count = abandoned.get(str(rank), 0) + 1
            if decision.payloads:  # every rank lags another one: both ranks of each pair take the higher count
                count = max(count - 1, decision.payloads[rank][own] - group.status.errors)
            abandoned[str(rank)] = count
    group.status.error = decision.error or ("RemoteError", "a rank left the call")
    publish_status(group)


def _count_with(status: RankStatus, rank: int) -> int:
    return int(status.errors) + int(status.abandoned.get(str(rank), 0))


def count_left_calls(group: Group, members: Sequence[int]) -> list[int]:
    """``(members,)`` number of calls with each member that this rank may have left."""
    return [_count_with(group.status, rank) for rank in members]


def add_call_counts(request: RoundRequest, group: Group, members: Sequence[int]) -> RoundRequest:
    """Add to a request the counts by which other ranks tell which call it belongs to."""
    skipped = group.status.skipped
    others = [ranks for ranks in list(group.call_groups) if not set(members) <= set(ranks)]
    return replace(
        request,
        left=count_left_calls(group, members),
        why_left=group.status.error,
        are_members_unknown=group.status.are_members_unknown,
        skipped={name: entry for name, entry in skipped.items() if not set(entry[1]).isdisjoint(members)},
        caller=describe_caller(group.callers_alternate),
        other_calls=group.acknowledged | {_hash_ranks(ranks): _count_calls(group, ranks) for ranks in others},
    )


def has_left(group: Group, rank: int, status: RankStatus) -> bool:
    """Whether ``rank``, which published ``status``, has left the call in which this rank waits."""
    return _count_with(status, group.rank) > _count_with(group.status, rank)


def is_behind(group: Group, rank: int, status: RankStatus) -> bool:
    """Whether this rank has left a call with ``rank``, which published ``status`` before it noticed."""
    return _count_with(group.status, rank) > _count_with(status, group.rank)


def find_lagging(requests: Sequence[RoundRequest], members: Sequence[int]) -> Decision | None:
    """The error for the members that are in a call that another member has left; None if all are in the same call.

    If the rank that left a call also takes part in calls with other sets of ranks, the members of that call are
    unknown. All members then get the error and are out of sync.
    """
    left = {request.rank: dict(zip(members, request.left, strict=True)) for request in requests}
    lagging = sorted({b for a in left for b in left if left[a][b] > left[b][a]})
    if not lagging:
        return _find_skipped(requests, members)
    if any(request.are_members_unknown for request in requests):
        request = next(request for request in requests if request.are_members_unknown)
        text = describe_unknown_members(request.rank, (request.why_left or ("", ""))[1])
        return Decision(error=(DisagreementError.__name__, text), out_of_sync=text)
    ahead = next((request for request in requests if request.rank not in lagging), None)
    if ahead is None:  # every rank lags another one: all fail, and each pair equalizes its counts
        text = f"ranks {format_ranks(members)} have each failed calls that only some of the other ranks counted"
        return Decision(error=("RemoteError", text), lagging=lagging, payloads={r.rank: r.left for r in requests})
    name, text = ahead.why_left or ("RemoteError", "it left the call")
    return Decision(error=(name, name_rank(ahead.rank, text)), lagging=lagging)


def describe_unknown_members(rank: int, text: str) -> str:
    """The reason why ranks are out of sync: a call failed on ``rank``, which calls with several sets of ranks."""
    return f"rank {rank} failed a call whose members are unknown ({text})"


# A rank *skips* a call if it makes the call but is not among its members. These members may wait for that rank in
# another call.


def record_skipped(group: Group, ranks: Sequence[int]) -> None:
    """Count and publish a call of this rank whose members, ``ranks``, do not include this rank."""
    count = group.status.skipped.get(_hash_ranks(ranks), [0])[0]
    group.status.skipped[_hash_ranks(ranks)] = [count + 1, list(ranks)]
    publish_status(group)


class SkippedError(RoundEndedError):
    """A rank for which this rank waits made a call that does not include itself.

    ``decision.skipped`` is ``{hash of ranks: [count, ranks]}``.
    """

    def __init__(self, text: str, skipped: dict[str, Any]) -> None:
        super().__init__(Decision(error=(DisagreementError.__name__, text), skipped=skipped))


def check_skipped(group: Group, members: Sequence[int], rank: int, status: RankStatus) -> None:
    """Check the skipped calls of ``rank``, which published ``status``.

    Raises:
        SkippedError: this rank is a member of a skipped call that it has not counted yet. The decision names the call,
            so that this rank counts it once.
    """
    for name, (count, ranks) in status.skipped.items():
        if group.rank in ranks and count > _count_calls(group, ranks):
            raise SkippedError(_describe_skipped(group.rank, members, rank, ranks), {name: [count, ranks]})


def acknowledge_skipped(group: Group, skipped: dict[str, Any]) -> None:
    """Count skipped calls as handled. Each skipped call then fails only one call of this rank."""
    for name, (count, ranks) in skipped.items():
        missing = count - _count_calls(group, ranks)
        if group.rank in ranks and missing > 0:
            group.acknowledged[name] = group.acknowledged.get(name, 0) + missing


def _find_skipped(requests: Sequence[RoundRequest], members: Sequence[int]) -> Decision | None:
    """The error if a member has skipped a call that another member has not counted, else None."""
    for request in requests:
        for name, (count, ranks) in request.skipped.items():
            for other in requests:
                if other.rank in ranks and other.other_calls.get(name, 0) < count:
                    text = _describe_skipped(other.rank, members, request.rank, ranks)
                    return Decision(error=(DisagreementError.__name__, f"{text}; create a new group"))
    return None


def _describe_skipped(rank: int, members: Sequence[int], other: int, ranks: Sequence[int]) -> str:
    return (
        f"ranks disagree on who takes part: rank {rank} calls with ranks {format_ranks(members)}, "
        f"rank {other} with ranks {format_ranks(ranks)}, which do not include rank {other}"
    )


def _count_calls(group: Group, ranks: Sequence[int]) -> int:
    """The number of calls of ``ranks`` that this rank has made, or counted as handled."""
    call_group = group.call_groups.get(tuple(ranks))
    return (call_group.rounds.num_rounds if call_group else 0) + group.acknowledged.get(_hash_ranks(ranks), 0)


def _hash_ranks(ranks: Sequence[int]) -> str:
    return hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:20]
