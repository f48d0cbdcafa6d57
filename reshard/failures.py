"""Calls that a rank failed alone, before it knew with whom, and that the others still wait in.

Where a rank's own arguments say who takes part, it says what is wrong in the round of the others. Where they do not,
the others wait in a call that it has left; if it calls again its next call would meet their present one, with other
values. So each rank counts, for each other one, the calls it may have left: those that it failed alone, and those with
the other one that it gave up because somebody else had. Of two ranks in one round the one with the lower count is in a
call that the other has left: that call fails, and who is ahead waits for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.agreement import Record, Verdict, describe_error, name_rank
from reshard.beacon import publish_beacon
from reshard.errors import ReshardError
from reshard.group import Group
from reshard.mesh import format_ranks


class HasLeftError(Exception):
    """A rank has left the call that this one waits in; ``verdict`` says why."""

    def __init__(self, error: tuple[str, str], members: Sequence[int] = ()) -> None:
        super().__init__(error[1])
        self.verdict = Verdict(error=error, behind=list(members))


def tell_error(group: Group, error: ReshardError) -> None:
    """Say that this rank gave up before it knew who takes part."""
    group.beacon["errors"] += 1
    group.beacon["error"] = list(describe_error(error))
    publish_beacon(group)


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


def has_left(group: Group, rank: int, beacon: dict[str, Any]) -> bool:
    """Whether a rank has left the call that this rank waits in."""
    return _count(beacon, group.rank) > _count(group.beacon, rank)


def find_behind(records: Sequence[Record], members: Sequence[int]) -> Verdict | None:
    """Who is in a call that another one has left, and why that was; None where all are in the same one."""
    left = {record.rank: dict(zip(members, record.left, strict=True)) for record in records}
    behind = sorted({b for a in left for b in left if left[a][b] > left[b][a]})
    if not behind:
        return None
    ahead = next((record for record in records if record.rank not in behind), None)
    if ahead is None:  # failures of calls with others only, each known to some: no call goes on before they are counted
        text = f"ranks {format_ranks(members)} have failed calls alone, and each only some of the others know of"
        return Verdict(error=("RemoteError", text), behind=behind, said={r.rank: r.left for r in records})
    name, text = ahead.why_left or ("RemoteError", "it left the call")
    return Verdict(error=(name, name_rank(ahead.rank, text)), behind=behind)
