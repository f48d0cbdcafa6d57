"""The contender that executes a plan of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import reshard
from microbench.peers.base import Tensors
from reshard.plan import Plan


def make_ours(plan: Plan, rank: int, sources: Tensors, outs: Tensors) -> Callable[[], None]:
    """A contender that calls a :class:`reshard.Mover` of the plan, or does nothing on a rank outside the plan.

    Args:
        sources, outs: this rank's shards, in the order of the plan's tensors; None where it has none.
    """
    if rank not in plan.ranks:
        return lambda: None
    mover = reshard.Mover(plan)
    is_named = plan.tensors[0].name is not None
    names = [spec.name for spec in plan.tensors]
    source: Any = dict(zip(names, sources, strict=True)) if is_named else sources[0]
    out: Any = dict(zip(names, outs, strict=True)) if is_named else outs[0]
    return lambda: mover(source, out=out)
