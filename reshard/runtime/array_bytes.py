"""Bytes of torch tensors: copies in row-major order, flat views, and digests.

These digests depend on the order of the bytes. So compare only arrays that hold the same region. The digests of
:mod:`reshard.weights.model.region_digests` do not depend on how a tensor is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

#: Bytes of a device array that :func:`digest_array` processes at a time.
_CHUNK_BYTES = 2**24
#: Odd 64-bit constants of splitmix64, as signed integers.
_STEP, _FACTOR = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


def contiguous(array: torch.Tensor) -> torch.Tensor:
    """The array in row-major order, copied only if it has another order.

    An array with elements of one byte is copied as uint8, because torch cannot copy some of these dtypes, such as
    uint4.
    """
    if array.itemsize > 1 or array.is_contiguous() or array.is_neg():
        return array.contiguous()
    return array.view(torch.uint8).contiguous().view(array.dtype)


def flat_bytes(view: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a flat uint8 tensor on the same memory.

    ``as_strided`` sets the strides, because ``view`` would keep those of a view with one element: torch calls such a
    view contiguous whatever its strides are.
    """
    return view.as_strided((view.numel(),), (1,)).view(torch.uint8)


def digest_concatenated(parts: Sequence[torch.Tensor]) -> int:
    """The digest of concatenated views, each in row-major order. Packed into one buffer they have the same digest."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(flat_bytes(contiguous(part)).numpy())
    return digest.intdigest()


def digest_array(array: torch.Tensor) -> int:
    """The 64-bit digest of an array in row-major order. Compare only arrays on the same type of device."""
    if array.device.type == "cpu":
        return digest_concatenated([array])
    return _digest_bytes_on_device(flat_bytes(contiguous(array)))


def _digest_bytes_on_device(data: torch.Tensor) -> int:
    """The digest of flat bytes, computed on their device: a sum of 64-bit words, each mixed with its position."""
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for first in range(0, data.numel(), _CHUNK_BYTES):
        part = data[first : first + _CHUNK_BYTES]
        if part.numel() % 8 or part.storage_offset() % 8:
            part = torch.nn.functional.pad(part, (0, -part.numel() % 8))  # a copy, so it is also aligned
        words = part.view(torch.int64)
        position = torch.arange(first // 8 + 1, first // 8 + 1 + words.numel(), device=data.device)
        mixed = (words ^ (position * _STEP)) * _FACTOR
        mixed ^= mixed >> 29
        total += (mixed * _STEP).sum()
    return (int(total) ^ data.numel()) % 2**64
