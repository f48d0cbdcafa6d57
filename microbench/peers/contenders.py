"""The contenders: a plan of this package, and the methods of other libraries by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import reshard
from microbench.peers.base import MakeContender, Tensors
from microbench.peers.torch_baselines import FullTensor, GlooBroadcast
from reshard.plan import Plan
from reshard.sharding import TensorSpec


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


def make_awex(specs: Sequence[TensorSpec], rank: int, sources: Tensors, outs: Tensors) -> Callable[[], None]:
    """Make the awex contender. Imports awex only here, because awex is optional."""
    from microbench.peers.awex import Awex

    return Awex(specs, rank, sources, outs)


#: ``{name: function that makes the contender}``.
PEERS: dict[str, MakeContender] = {
    "gloo broadcast": GlooBroadcast,
    "full_tensor + broadcast": FullTensor,
    "awex": make_awex,
}
