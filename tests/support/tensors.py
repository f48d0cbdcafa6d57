"""Test tensors whose values encode their global position, the expected shards of a layout, and results of calls."""

from __future__ import annotations

import math

import numpy as np
import torch

import reshard
from reshard.sharding.tiles import cut_tiles


def whole_tensor(shape, dtype=torch.int64):
    numel = math.prod(shape)
    values = torch.arange(numel, dtype=torch.int64)
    if dtype in (torch.bool,):
        values = values % 2
    elif dtype.itemsize == 1:
        return (values % 251).to(torch.uint8).view(dtype).reshape(shape)
    elif dtype.itemsize == 2:
        return (values % 32749).to(torch.int16).view(dtype).reshape(shape)
    return values.to(dtype).reshape(shape)


def take_shard(layout, rank, whole):
    """The shard of a rank, cut from the whole tensor; None if the rank is not in the layout."""
    if rank not in layout.ranks:
        return None
    shards = cut_tiles(layout, tuple(whole.shape))
    shape = shards.local_shape(rank)
    array = np.zeros(shape, whole.dtype) if isinstance(whole, np.ndarray) else torch.zeros(shape, dtype=whole.dtype)
    for box, local in shards.boxes_of(rank):
        at = tuple(slice(first, first + hi - lo) for first, (lo, hi) in zip(local, box, strict=True))
        array[(..., *at)] = whole[(..., *(slice(lo, hi) for lo, hi in box))]
    return array


def same_bytes(a, b):
    """Bitwise equality for any dtype; equal NaNs are equal."""
    if tuple(a.shape) != tuple(b.shape) or a.dtype != b.dtype:
        return False
    flat = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*flat)


def result_or_error(call):
    """The return value of a call, or its error as text."""
    try:
        return call()
    except reshard.ReshardError as error:
        return f"{type(error).__name__}: {error}"


def check_group_works(rank, src, dst, whole):
    """Move a tensor once more, as a program does after an error."""
    moved = reshard.reshard(take_shard(src, rank, whole), src, dst)
    assert moved is None or same_bytes(moved, take_shard(dst, rank, whole))
