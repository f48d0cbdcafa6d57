"""Digests of tensors that do not depend on how they are sharded.

The digest of an element is a 64-bit mix of its bits and of its flat index in the whole tensor. The digest of a region
is the sum over its elements, where both 32-bit halves add up modulo 2**32. So the digests of disjoint regions add up to
that of the tensor, on whatever ranks they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from reshard._native import DigestedRegions

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
_HALF = 2**32
#: Constants of native/digest.cpp.
_LOW_INDEX, _HIGH_INDEX, _FIRST, _SECOND, _THIRD = 0x9E3779B1, 0x85EBCA77, 0x7FEB352D, 0x846CA68B, 0xC2B2AE35
#: Elements of an array on a device that are digested at a time.
_CHUNK_ELEMENTS = 2**22


def add_digests(digests: np.ndarray, where: np.ndarray, count: int) -> np.ndarray:
    """The digests of unions of disjoint regions, 64-bit as those of the regions.

    Args:
        digests: digests of the regions.
        where: the number of the union that each region belongs to.
        count: number of unions.
    """
    half, width = np.uint64(_HALF - 1), np.uint64(32)
    low, high = np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.uint64)
    np.add.at(low, where, digests & half)
    np.add.at(high, where, digests >> width)
    return (high & half) << width | (low & half)


def flat_strides(shape: Sequence[int]) -> list[int]:
    """The step of the flat index of a tensor along each dim."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides


class LocatedRegions:
    """Regions of tensors in the memory of a rank, which is kept."""

    def __init__(self) -> None:
        self._native = DigestedRegions()
        self._devices: list[tuple[torch.Tensor, list[int], int]] = []
        self._is_on_device: list[bool] = []

    def add(self, array: torch.Tensor, first: int, strides: Sequence[int]) -> None:
        """Add a region of a tensor.

        Args:
            array: the region, on any device.
            first: flat index of its first element in the tensor.
            strides: how far the flat index moves along each dim of the region.
        """
        words = array.unsqueeze(-1).view(_WORDS[array.itemsize])
        per_element = words.shape[-1]
        of_words = [*(stride * per_element for stride in strides), 1]
        self._is_on_device.append(array.device.type != "cpu")
        if self._is_on_device[-1]:
            self._devices.append((words, of_words, first * per_element))
        else:
            unsigned = words.numpy().view(f"uint{8 * words.itemsize}")
            self._native.add(unsigned, np.array(of_words), first * per_element)

    def find_digests(self) -> np.ndarray:
        """The digest of what each region holds now, in the order of :meth:`add`."""
        on_host = np.empty(len(self._is_on_device) - len(self._devices), dtype=np.uint64)
        self._native.digest(on_host)
        if not self._devices:
            return on_host
        digests, is_on_device = np.empty(len(self._is_on_device), dtype=np.uint64), np.array(self._is_on_device)
        digests[~is_on_device] = on_host
        digests[is_on_device] = [_digest_region_on_device(*region) for region in self._devices]
        return digests


def _digest_region_on_device(words: torch.Tensor, strides: Sequence[int], first: int) -> int:
    """The digest of a region, computed on its device, a few rows at a time."""
    rows_at_once = max(1, _CHUNK_ELEMENTS // max(1, words[:1].numel()))
    low = torch.zeros((), dtype=torch.int64, device=words.device)
    high = torch.zeros_like(low)
    for row in range(0, len(words), rows_at_once):
        part = words[row : row + rows_at_once]
        index = torch.full((), first + row * strides[0], dtype=torch.int64, device=words.device)
        for dim, (size, stride) in enumerate(zip(part.shape, strides, strict=True)):
            steps = torch.arange(size, device=words.device) * stride
            index = index + steps.reshape([-1 if other == dim else 1 for other in range(part.ndim)])
        mask = 2 ** (8 * words.itemsize) - 1
        seeded = (part.to(torch.int64) & mask) + (index % _HALF) * _LOW_INDEX + (index // _HALF) * _HIGH_INDEX
        seeded %= _HALF
        mixed = ((seeded ^ (seeded >> 16)) * _FIRST) % _HALF
        mixed ^= mixed >> 15
        low += mixed.sum()
        high += (mixed ^ (mixed >> 13)).sum()
    return int(high) * _THIRD % _HALF * _HALF + int(low) * _SECOND % _HALF
