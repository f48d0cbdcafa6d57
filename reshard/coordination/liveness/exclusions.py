"""Exclusion of lost ranks from a group. The ranks decide it in the store, so that all exclude the same ranks.

Exclusions are numbered from 1. Exclusion ``n`` is the value of the key ``lost/<n>``: all ranks that are lost by then. A
rank that wants to exclude others proposes the next exclusion by one compare-and-set. The first proposal becomes the
exclusion. Every rank adopts it, even if the exclusion names this rank. A rank adopts exclusions in order, and proposes
only after it has adopted all that exist. Nobody is excluded without the store. See decision 22.

If the first member of a round proposes, the exclusion carries the decision of that round. The other members take it
from there if they get no answer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from typing import Any

from reshard.coordination.groups.agreement_messages import Decision, read_json
from reshard.coordination.groups.process_group import Group
from reshard.coordination.groups.store import LOST_STORE_SECONDS, STORE_TIMEOUT_SECONDS


def read_exclusions(group: Group, attempt: int = 0, seconds: float = STORE_TIMEOUT_SECONDS) -> Decision | None:
    """Adopt the exclusions that this rank does not know yet.

    Args:
        attempt: number of the round in which this rank waits.
        seconds: timeout of each store call.

    Returns:
        The decision of that round, if one of these exclusions carries it.

    Raises:
        RuntimeError: the store is silent or lost.
    """
    exclusions = None
    while group.store.check([_key(group)], seconds):
        exclusions = _adopt(group, group.store.get(_key(group), seconds), attempt) or exclusions
    return exclusions


def propose_exclusion(group: Group, lost: Collection[int], decision: Decision | None, attempt: int) -> Decision | None:
    """Propose to exclude ranks, and adopt the exclusion, which may be another rank's.

    Args:
        lost: the ranks to exclude.
        decision: decision of the round, if this rank decides it.
        attempt: number of that round on this rank.

    Returns:
        The decision of the round, if the exclusion carries it.

    Raises:
        RuntimeError: the store has not answered for :data:`LOST_STORE_SECONDS`.
    """
    content = None if decision is None else decision.__dict__
    exclusion = {"lost": sorted(group.lost.union(lost)), "by": group.rank, "attempt": attempt, "decision": content}
    return _adopt(group, group.store.compare_set(_key(group), "", json.dumps(exclusion), LOST_STORE_SECONDS), attempt)


def _key(group: Group) -> str:
    return f"lost/{group.num_exclusions + 1}"


def _adopt(group: Group, text: bytes, attempt: int) -> Decision | None:
    exclusion, decision = group.store.parse(_key(group), text, functools.partial(_parse_exclusion, group.size))
    group.num_exclusions += 1
    if group.rank in exclusion["lost"] and group.rank not in group.lost:
        group.excluded_by = int(exclusion["by"])
    group.lost.update(exclusion["lost"])
    return decision if decision is not None and decision.attempts.get(group.rank) == attempt else None


def _parse_exclusion(size: int, text: bytes) -> tuple[dict[str, Any], Decision | None]:
    """An exclusion and the decision that it carries. Raises an error if the text is something else."""
    exclusion = read_json(text, {"lost": [int], "by": int, "attempt": int, "decision": object})
    carried = exclusion["decision"]
    if not all(0 <= rank < size for rank in (*exclusion["lost"], exclusion["by"])):
        raise ValueError(f"a rank is not in the group of {size}")
    return exclusion, None if carried is None else Decision.from_json(carried)
