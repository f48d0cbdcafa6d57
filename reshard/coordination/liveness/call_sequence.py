"""Calls that a rank failed alone, before it knew with whom, and that the others still wait in.

Where a rank's own arguments say who takes part, it says what is wrong in the round of the others. Where they do not,
the others wait in a call that it has left; if it calls again its next call would meet their present one, with other
values. So each rank counts, for each other one, the calls it may have left: those that it failed alone, and those with
the other one that it gave up because somebody else had. Of two ranks in one round the one with the lower count is in a
call that the other has left: that call fails, and who is ahead waits for the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from reshard.coordination.calling_threads import describe_caller
from reshard.coordination.decide import Record, Verdict, describe_error, name_rank
from reshard.coordination.liveness.status import ANY_RANKS, publish_beacon
from reshard.coordination.process_group import Group
from reshard.errors import DisagreementError, RemoteError, ReshardError
from reshard.formatting import format_ranks


class LeavingError(Exception):
    """Ends the round that this rank waits in; it takes ``verdict`` from it."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.error and verdict.error[1])
        self.verdict = verdict


class HasLeftError(LeavingError):
    """Another rank has left the call."""

    def __init__(self, error: tuple[str, str], members: Sequence[int] = ()) -> None:
        super().__init__(Verdict(error=error, behind=list(members)))


def tell_error(group: Group, error: ReshardError) -> None:
    """Say that this rank gave up before it knew who takes part."""
    group.beacon["errors"] += 1
    group.beacon["error"] = list(describe_error(error))
    group.beacon["many"] |= len(group.channels) > 1
    publish_beacon(group)


@contextlib.contextmanager
def calling(group: Group) -> Iterator[None]:
    """As ``Group.calling``; a call of a second thread ends the group on all ranks."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(group.calling())
        except ReshardError as error:
            group.beacon["out_of_step"].setdefault(ANY_RANKS, str(error))
            tell_error(group, error)
            raise
        yield


@contextlib.contextmanager
def counted(group: Group) -> Iterator[None]:
    """A call that ends by what is no error of ours, such as a signal handler's, is one that this rank left.

    Before its first round the rank left it alone. Later the others may be in its next round or transfer: those end.
    """
    rounds, errors, reasons = group.attempts, group.beacon["errors"], len(group.beacon["out_of_step"])
    try:
        yield
    except ReshardError:
        raise
    except BaseException as error:
        left = RemoteError(f"rank {group.rank} left a call: {type(error).__name__}")
        if (group.attempts, group.beacon["errors"]) == (rounds, errors):
            tell_error(group, left)
        elif group.attempts > rounds and len(group.beacon["out_of_step"]) == reasons:
            group.beacon["out_of_step"][ANY_RANKS] = str(left)
            publish_beacon(group)
            channel = group.channels.get(group.last_members)
            if channel is not None:
                channel.fail(channel.generation, left)
        raise


def give_up(group: Group, members: Sequence[int], verdict: Verdict) -> None:
    """Note that this rank leaves a call of some ranks because one of them has."""
    given, me = group.beacon["given"], members.index(group.rank)
    for rank in members:
        if rank != group.rank:
            count = given.get(str(rank), 0) + 1
            if verdict.said:  # nobody is ahead: begin anew from the higher count of each two
                count = max(count - 1, verdict.said[rank][me] - group.beacon["errors"])
            given[str(rank)] = count
    group.beacon["error"] = list(verdict.error or ("RemoteError", "a rank left the call"))
    publish_beacon(group)


def _count(beacon: dict[str, Any], rank: int) -> int:
    return int(beacon["errors"]) + int(beacon["given"].get(str(rank), 0))


def count_left(group: Group, members: Sequence[int]) -> list[int]:
    """For each rank the calls with it that this rank may have left."""
    return [_count(group.beacon, rank) for rank in members]


def count_calls(record: Record, group: Group, members: Sequence[int]) -> None:
    """Put into a record what the others need to tell whether it is of the same call as theirs."""
    record.left, record.why_left = count_left(group, members), group.beacon["error"]
    record.many = group.beacon["many"]
    skipped = group.beacon["skipped"]
    record.skipped = {name: entry for name, entry in skipped.items() if not set(entry[1]).isdisjoint(members)}
    made = [ranks for ranks in list(group.channels) if not set(members) <= set(ranks)]
    record.caller = describe_caller(group.callers_alternate)
    record.made = group.forgiven | {_name(ranks): _count_made(group, ranks) for ranks in made}


def has_left(group: Group, rank: int, beacon: dict[str, Any]) -> bool:
    """Whether a rank has left the call that this rank waits in."""
    return _count(beacon, group.rank) > _count(group.beacon, rank)


def find_behind(records: Sequence[Record], members: Sequence[int]) -> Verdict | None:
    """Who is in a call that another one has left, and why that was; None where all are in the same one.

    The error is for all, and stays, where a rank called with others only: nobody can tell in which call it is.
    """
    left = {record.rank: dict(zip(members, record.left, strict=True)) for record in records}
    behind = sorted({b for a in left for b in left if left[a][b] > left[b][a]})
    if not behind:
        return _find_skipped(records, members)
    if any(record.many for record in records):
        record = next(record for record in records if record.many)
        text = describe_unknown(record.rank, (record.why_left or ("", ""))[1])
        return Verdict(error=(DisagreementError.__name__, text), loses_step=text)
    ahead = next((record for record in records if record.rank not in behind), None)
    if ahead is None:  # failures of calls with others only, each known to some: no call goes on before they are counted
        text = f"ranks {format_ranks(members)} have failed calls alone, and each only some of the others know of"
        return Verdict(error=("RemoteError", text), behind=behind, said={r.rank: r.left for r in records})
    name, text = ahead.why_left or ("RemoteError", "it left the call")
    return Verdict(error=(name, name_rank(ahead.rank, text)), behind=behind)


def describe_unknown(rank: int, text: str) -> str:
    """Why a failed call of a rank that takes part in calls with different ranks leaves them out of step."""
    return f"rank {rank} failed a call of which nobody knows who takes part ({text})"


# Calls of a rank that leave it out, while others may wait for it in a call with it


def note_skipped(group: Group, ranks: Sequence[int]) -> None:
    """Note that this rank called, and only others take part."""
    count = group.beacon["skipped"].get(_name(ranks), [0])[0]
    group.beacon["skipped"][_name(ranks)] = [count + 1, list(ranks)]
    publish_beacon(group)


class SkippedError(LeavingError):
    """A rank called with others only, while this one waits for it; the verdict has ``{name: [count, ranks]}``."""

    def __init__(self, text: str, skipped: dict[str, Any]) -> None:
        super().__init__(Verdict(error=(DisagreementError.__name__, text), skipped=skipped))


def find_skipped(group: Group, members: Sequence[int], rank: int, beacon: dict[str, Any]) -> None:
    """Raise if a rank, by what it left in the store, has called with others only more often than those have.

    Raises:
        SkippedError: the waiting ranks may forgive that, as it is not among them yet.
    """
    for name, (count, ranks) in beacon["skipped"].items():
        if group.rank in ranks and count > _count_made(group, ranks):
            raise SkippedError(_describe_skipped(group.rank, members, rank, ranks), {name: [count, ranks]})


def forgive(group: Group, skipped: dict[str, Any]) -> None:
    """Count calls that others made without this rank's knowing as dealt with: it fails the call that it waits in."""
    for name, (count, ranks) in skipped.items():
        missing = count - _count_made(group, ranks)
        if group.rank in ranks and missing > 0:
            group.forgiven[name] = group.forgiven.get(name, 0) + missing


def _find_skipped(records: Sequence[Record], members: Sequence[int]) -> Verdict | None:
    for record in records:
        for name, (count, ranks) in record.skipped.items():
            for other in records:
                if other.rank in ranks and other.made.get(name, 0) < count:
                    text = _describe_skipped(other.rank, members, record.rank, ranks)
                    return Verdict(error=(DisagreementError.__name__, f"{text}; create a new group"))
    return None


def _describe_skipped(rank: int, members: Sequence[int], other: int, ranks: Sequence[int]) -> str:
    return (
        f"ranks disagree on who takes part: rank {rank} calls with ranks {format_ranks(members)}, "
        f"rank {other} with ranks {format_ranks(ranks)}, which leave it out"
    )


def _count_made(group: Group, ranks: Sequence[int]) -> int:
    channel = group.channels.get(tuple(ranks))
    return (channel.meeting.rounds if channel else 0) + group.forgiven.get(_name(ranks), 0)


def _name(ranks: Sequence[int]) -> str:
    return hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:20]
