"""Detection of a common mistake: each rank passes the whole tensor in place of its shard. The shards are then equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

from reshard.formatting import describe_ranks

if TYPE_CHECKING:
    import torch

#: Slices of each dim at either end of a shard that :func:`digest_corners` reads, and fewer of more dims.
CORNER, SMALL_CORNER = 8, 2
#: Number of dims up to which the corners have :data:`CORNER` slices.
_MAX_DIMS = 3


def digest_corners(shard: torch.Tensor) -> int | None:
    """The digest of the first and the last elements of a shard on the CPU.

    None if there are no such elements, or if all of them are equal, as in a tensor of zeros: equal digests of such
    shards would mean nothing.
    """
    from reshard.runtime.array_bytes import contiguous, flat_bytes

    if shard.device.type != "cpu" or not shard.numel():
        return None
    width = CORNER if shard.ndim <= _MAX_DIMS else SMALL_CORNER
    ends = (shard[(part,) * shard.ndim] for part in (slice(width), slice(-width, None)))
    data = b"".join(flat_bytes(contiguous(end)).numpy().tobytes() for end in ends)
    size = shard.itemsize
    return None if data == data[:size] * (len(data) // size) else int(xxhash.xxh3_64_intdigest(data))


def describe_equal_shards(what: str, ranks: Sequence[int], local_shape: Sequence[int], shape: Sequence[int]) -> str:
    """The text of a warning."""
    return (
        f"{what}: {describe_ranks(sorted(ranks))} pass shards of shape {list(local_shape)} that seem equal, so the "
        f"whole has shape {list(shape)}. If each passes the whole tensor, omit the spec of the source or pass shards; "
        f"if this is meant, pass shape={list(shape)}"
    )
