"""Which ranks of a group survive. The ranks decide this in the store, so that all know the same lost ranks.

Verdicts are numbered from 1. Verdict ``n`` is the value of the key ``lost/<n>``: all ranks that are lost by then. A
rank that wants to exclude others proposes the next verdict by one compare-and-set. The first proposal becomes the
verdict, and every rank adopts it, also one that it excludes. A rank adopts verdicts in order, and proposes only after
it has adopted all that exist. Nobody is excluded without the store. See decision 22.

A verdict of the first member of a round carries the decision of that round. The other members take it from the verdict
if they get no answer.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from reshard.coordination.messages import Decision
from reshard.coordination.process_group import Group
from reshard.coordination.store import LOST_STORE_SECONDS, STORE_SECONDS


def read_verdicts(group: Group, attempt: int = 0, seconds: float = STORE_SECONDS) -> Decision | None:
    """Adopt the verdicts that this rank does not know yet.

    Args:
        attempt: number of the round in which this rank waits. seconds: timeout of each store call.

    Returns:
        The decision of that round, if one of these verdicts carries it.

    Raises:
        RuntimeError: the store is silent or lost.
    """
    found = None
    while group.store.check([_key(group)], seconds):
        found = _adopt(group, group.store.get(_key(group), seconds), attempt) or found
    return found


def propose_verdict(group: Group, lost: Collection[int], decision: Decision | None, attempt: int) -> Decision | None:
    """Propose to exclude ranks, and adopt the verdict, which may be another rank's.

    Args:
        lost: the ranks to exclude. decision: of the round that this rank decides, if it does.
        attempt: number of that round on this rank.

    Returns:
        The decision of the round, if the verdict carries it.

    Raises:
        RuntimeError: the store has not answered for :data:`LOST_STORE_SECONDS`.
    """
    content = None if decision is None else decision.__dict__
    verdict = {"lost": sorted(group.lost.union(lost)), "by": group.rank, "attempt": attempt, "decision": content}
    return _adopt(group, group.store.compare_set(_key(group), "", json.dumps(verdict), LOST_STORE_SECONDS), attempt)


def _key(group: Group) -> str:
    return f"lost/{group.num_verdicts + 1}"


def _adopt(group: Group, text: bytes, attempt: int) -> Decision | None:
    verdict: dict[str, Any] = json.loads(text)
    group.num_verdicts += 1
    if group.rank in verdict["lost"] and group.rank not in group.lost:
        group.excluded_by = int(verdict["by"])
    group.lost.update(verdict["lost"])
    if verdict["decision"] is None:
        return None
    decision = Decision.from_json(verdict["decision"])
    return decision if decision.attempts.get(group.rank) == attempt else None
