"""The contender that runs one of our plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import reshard
from microbench.peers.base import Tensors
from reshard.plan import Plan


def make_ours(plan: Plan, rank: int, sources: Tensors, outs: Tensors) -> Callable[[], None]:
    """A contender that calls a :class:`reshard.Mover` of the plan."""
    if rank not in plan.ranks:
        return lambda: None
    mover = reshard.Mover(plan)
    named = plan.tensors[0].name is not None
    names = [spec.name for spec in plan.tensors]
    source: Any = dict(zip(names, sources, strict=True)) if named else sources[0]
    out: Any = dict(zip(names, outs, strict=True)) if named else outs[0]
    return lambda: mover(source, out=out)
