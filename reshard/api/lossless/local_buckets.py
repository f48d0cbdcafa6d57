"""Buckets with the shards of all ranks in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.api.arguments.option_checks import check_dtypes
from reshard.api.lossless.buckets import Bucket, find_buckets
from reshard.api.lossless.encoding import EncodedBucket, decode_bucket, digest_regions, encode_bucket
from reshard.codecs import has_base
from reshard.errors import ArgumentError, DisagreementError
from reshard.formatting import describe_ranks
from reshard.public_api import caller_level
from reshard.runtime.array_bytes import contiguous
from reshard.sharding import Layout, Mesh, TensorSpec

ShardsByRank = Mapping[int, torch.Tensor]
#: A function that moves buckets between ranks. It takes the tensors of a plan and the ``{rank: bytes}`` of each tensor
#: on the senders, and returns the ``{rank: bytes}`` of each tensor on the receivers.
Move = Callable[[Sequence[TensorSpec], Sequence[Mapping[int, np.ndarray]]], list[dict[int, np.ndarray]]]


class LocalArrays(NamedTuple):
    """The shards of all ranks as contiguous CPU tensors, by rank.

    Attributes:
        shards, base: source shards of the new and of an earlier version; ``base`` may be empty.
        out: destination shards that hold the earlier version; may be empty.
        targets: destination shards to write, copies of ``out`` or new.
    """

    shards: ShardsByRank
    base: ShardsByRank
    out: ShardsByRank
    targets: ShardsByRank


def check_lossless(spec: TensorSpec, codec: str, dst_dtype: str | None) -> None:
    """Raise ArgumentError unless the codec encodes the tensor, whose result has ``dst_dtype``; None: the same dtype."""
    check_dtypes(codec, [spec])
    if dst_dtype not in (None, spec.dtype):
        raise ArgumentError(f"{codec} sends {spec.dtype} bit for bit, and cannot make {dst_dtype} of it")


def move_lossless(spec: TensorSpec, codec: str, arrays: LocalArrays, move: Move) -> None:
    """Encode the shards of all source ranks, move the buckets, and decode them into the destination shards.

    Args:
        spec: the tensor.
        move: moves the buckets.

    Raises:
        DisagreementError: replicas of the source differ. Nothing was written.
    """
    shards, base, out, targets = arrays
    of_rank = {rank: find_buckets([spec], rank) for rank in {*spec.src.ranks, *spec.dst.ranks}}
    buckets = next(iter(of_rank.values()))
    because = _why_full(of_rank, buckets, base, out) if has_base(codec) else "it has no base"
    if because and base:
        warnings.warn(f"compression={codec!r} sends the tensor in full: {because}", stacklevel=caller_level())
    encoded: dict[str, dict[int, EncodedBucket]] = {}
    for name, bucket in buckets.items():
        for rank in bucket.holders:
            old = None if because else {"": base[rank]}
            made = encode_bucket(of_rank[rank][name], {"": shards[rank]}, old, codec)
            first = encoded.setdefault(name, {}).setdefault(bucket.holders[0], made)
            if made.digest != first.digest:
                raise DisagreementError(
                    f"ranks {bucket.holders[0]} and {rank} hold the same regions, but other values in them"
                )
            encoded[name][rank] = made
    specs = [
        TensorSpec((len(made.buffer),), "uint8", Layout(Mesh(bucket.holders)), Layout(Mesh(bucket.receivers)), name)
        for (name, bucket), made in zip(
            buckets.items(), (next(iter(item.values())) for item in encoded.values()), strict=True
        )
    ]
    moved = move(specs, [{rank: made.buffer for rank, made in item.items()} for item in encoded.values()])
    for name, arrived in zip(buckets, moved, strict=True):
        for rank, data in arrived.items():
            decode_bucket(of_rank[rank][name], data, {"": targets[rank]}, with_digest=False)


def _why_full(
    of_rank: Mapping[int, Mapping[str, Bucket]], buckets: Mapping[str, Bucket], base: ShardsByRank, out: ShardsByRank
) -> str:
    """The reason why the tensor must be sent in full; "" if all ranks hold the same earlier version."""
    for what, given, side in (("base", base, "holders"), ("out", out, "receivers")):
        lacking = sorted({rank for item in buckets.values() for rank in getattr(item, side) if rank not in given})
        if lacking:
            return f"{describe_ranks(lacking)} pass{'es' * (len(lacking) == 1)} no {what}"
    for name, bucket in buckets.items():
        digests = {rank: digest_regions(of_rank[rank][name], {"": base[rank]}, "src") for rank in bucket.holders}
        first = bucket.holders[0]
        received = {rank: digest_regions(of_rank[rank][name], {"": out[rank]}, "dst") for rank in bucket.receivers}
        for rank, digest in [*digests.items(), *received.items()]:
            if digest != digests[first]:
                return f"rank {rank} holds another base than rank {first}"
    return ""


def as_torch(array: Any) -> torch.Tensor:
    """An array of NumPy or torch as a contiguous tensor whose elements have its bytes in the order of this machine."""
    if not isinstance(array, np.ndarray):
        return contiguous(array.detach().resolve_conj().resolve_neg().cpu())
    native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    whole = np.ascontiguousarray(array, dtype=native).reshape(array.shape)  # NumPy makes 0-d arrays 1-d
    kind = {1: "u1", 2: "i2", 4: "i4", 8: "i8"}.get(whole.itemsize, "c16")
    return torch.from_numpy(whole.view(kind))
