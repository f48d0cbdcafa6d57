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
from reshard.coordination.decide import Decision, Request, describe_error, name_rank
from reshard.coordination.liveness.status import ANY_RANKS, publish_status
from reshard.coordination.process_group import Group
from reshard.errors import DisagreementError, RemoteError, ReshardError
from reshard.formatting import format_ranks


class LeavingError(Exception):
    """Ends the round that this rank waits in; it takes ``decision`` from it."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.error and decision.error[1])
        self.decision = decision


class HasLeftError(LeavingError):
    """Another rank has left the call."""

    def __init__(self, error: tuple[str, str], members: Sequence[int] = ()) -> None:
        super().__init__(Decision(error=error, behind=list(members)))


def report_error(group: Group, error: ReshardError) -> None:
    """Say that this rank gave up before it knew who takes part."""
    group.status["errors"] += 1
    group.status["error"] = list(describe_error(error))
    group.status["many"] |= len(group.channels) > 1
    publish_status(group)


@contextlib.contextmanager
def calling(group: Group) -> Iterator[None]:
    """As ``Group.calling``; a call of a second thread ends the group on all ranks."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(group.calling())
        except ReshardError as error:
            group.status["out_of_sync"].setdefault(ANY_RANKS, str(error))
            report_error(group, error)
            raise
        yield


@contextlib.contextmanager
def counted(group: Group) -> Iterator[None]:
    """A call that ends by what is no error of ours, such as a signal handler's, is one that this rank left.

    Before its first round the rank left it alone. Later the others may be in its next round or transfer: those end.
    """
    rounds, errors, reasons = group.attempts, group.status["errors"], len(group.status["out_of_sync"])
    try:
        yield
    except ReshardError:
        raise
    except BaseException as error:
        left = RemoteError(f"rank {group.rank} left a call: {type(error).__name__}")
        if (group.attempts, group.status["errors"]) == (rounds, errors):
            report_error(group, left)
        elif group.attempts > rounds and len(group.status["out_of_sync"]) == reasons:
            group.status["out_of_sync"][ANY_RANKS] = str(left)
            publish_status(group)
            channel = group.channels.get(group.last_members)
            if channel is not None:
                channel.fail(channel.generation, left)
        raise


def give_up(group: Group, members: Sequence[int], decision: Decision) -> None:
    """Note that this rank leaves a call of some ranks because one of them has."""
    given, me = group.status["given"], members.index(group.rank)
    for rank in members:
        if rank != group.rank:
            count = given.get(str(rank), 0) + 1
            if decision.said:  # nobody is ahead: begin anew from the higher count of each two
                count = max(count - 1, decision.said[rank][me] - group.status["errors"])
            given[str(rank)] = count
    group.status["error"] = list(decision.error or ("RemoteError", "a rank left the call"))
    publish_status(group)


def _count(status: dict[str, Any], rank: int) -> int:
    return int(status["errors"]) + int(status["given"].get(str(rank), 0))


def count_left(group: Group, members: Sequence[int]) -> list[int]:
    """For each rank the calls with it that this rank may have left."""
    return [_count(group.status, rank) for rank in members]


def count_calls(request: Request, group: Group, members: Sequence[int]) -> None:
    """Put into a request what the others need to tell whether it is of the same call as theirs."""
    request.left, request.why_left = count_left(group, members), group.status["error"]
    request.many = group.status["many"]
    skipped = group.status["skipped"]
    request.skipped = {name: entry for name, entry in skipped.items() if not set(entry[1]).isdisjoint(members)}
    made = [ranks for ranks in list(group.channels) if not set(members) <= set(ranks)]
    request.caller = describe_caller(group.callers_alternate)
    request.made = group.forgiven | {_name(ranks): _count_made(group, ranks) for ranks in made}


def has_left(group: Group, rank: int, status: dict[str, Any]) -> bool:
    """Whether a rank has left the call that this rank waits in."""
    return _count(status, group.rank) > _count(group.status, rank)


def find_behind(requests: Sequence[Request], members: Sequence[int]) -> Decision | None:
    """Who is in a call that another one has left, and why that was; None where all are in the same one.

    The error is for all, and stays, where a rank called with others only: nobody can tell in which call it is.
    """
    left = {request.rank: dict(zip(members, request.left, strict=True)) for request in requests}
    behind = sorted({b for a in left for b in left if left[a][b] > left[b][a]})
    if not behind:
        return _find_skipped(requests, members)
    if any(request.many for request in requests):
        request = next(request for request in requests if request.many)
        text = describe_unknown(request.rank, (request.why_left or ("", ""))[1])
        return Decision(error=(DisagreementError.__name__, text), out_of_sync=text)
    ahead = next((request for request in requests if request.rank not in behind), None)
    if ahead is None:  # failures of calls with others only, each known to some: no call goes on before they are counted
        text = f"ranks {format_ranks(members)} have failed calls alone, and each only some of the others know of"
        return Decision(error=("RemoteError", text), behind=behind, said={r.rank: r.left for r in requests})
    name, text = ahead.why_left or ("RemoteError", "it left the call")
    return Decision(error=(name, name_rank(ahead.rank, text)), behind=behind)


def describe_unknown(rank: int, text: str) -> str:
    """Why a failed call of a rank that takes part in calls with different ranks leaves them out of sync."""
    return f"rank {rank} failed a call of which nobody knows who takes part ({text})"


# Calls of a rank that leave it out, while others may wait for it in a call with it


def note_skipped(group: Group, ranks: Sequence[int]) -> None:
    """Note that this rank called, and only others take part."""
    count = group.status["skipped"].get(_name(ranks), [0])[0]
    group.status["skipped"][_name(ranks)] = [count + 1, list(ranks)]
    publish_status(group)


class SkippedError(LeavingError):
    """A rank called with others only, while this one waits for it; the decision has ``{name: [count, ranks]}``."""

    def __init__(self, text: str, skipped: dict[str, Any]) -> None:
        super().__init__(Decision(error=(DisagreementError.__name__, text), skipped=skipped))


def find_skipped(group: Group, members: Sequence[int], rank: int, status: dict[str, Any]) -> None:
    """Raise if a rank, by what it left in the store, has called with others only more often than those have.

    Raises:
        SkippedError: the waiting ranks may forgive that, as it is not among them yet.
    """
    for name, (count, ranks) in status["skipped"].items():
        if group.rank in ranks and count > _count_made(group, ranks):
            raise SkippedError(_describe_skipped(group.rank, members, rank, ranks), {name: [count, ranks]})


def forgive(group: Group, skipped: dict[str, Any]) -> None:
    """Count calls that others made without this rank's knowing as dealt with: it fails the call that it waits in."""
    for name, (count, ranks) in skipped.items():
        missing = count - _count_made(group, ranks)
        if group.rank in ranks and missing > 0:
            group.forgiven[name] = group.forgiven.get(name, 0) + missing


def _find_skipped(requests: Sequence[Request], members: Sequence[int]) -> Decision | None:
    for request in requests:
        for name, (count, ranks) in request.skipped.items():
            for other in requests:
                if other.rank in ranks and other.made.get(name, 0) < count:
                    text = _describe_skipped(other.rank, members, request.rank, ranks)
                    return Decision(error=(DisagreementError.__name__, f"{text}; create a new group"))
    return None


def _describe_skipped(rank: int, members: Sequence[int], other: int, ranks: Sequence[int]) -> str:
    return (
        f"ranks disagree on who takes part: rank {rank} calls with ranks {format_ranks(members)}, "
        f"rank {other} with ranks {format_ranks(ranks)}, which leave it out"
    )


def _count_made(group: Group, ranks: Sequence[int]) -> int:
    channel = group.channels.get(tuple(ranks))
    return (channel.rendezvous.rounds if channel else 0) + group.forgiven.get(_name(ranks), 0)


def _name(ranks: Sequence[int]) -> str:
    return hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:20]
