"""The contenders (methods to compare) from other libraries, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from microbench.peers.base import MakeContender, Tensors
from microbench.peers.torch_baselines import FullTensor, GlooBroadcast
from reshard.sharding import TensorSpec


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
