"""Encoded shards that are encoded just before they are sent, and decoded while later messages arrive.

Both work on slabs of the first dim of the encoded array: rows, or elements if the codec joins all dims.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from reshard.codecs import ElementCodec
from reshard.codecs.raw_bytes import decoded_dtype, write_into

Slices = tuple[slice, ...]


class EncodedSource:
    """A source shard and the array of its elements, which is filled slab by slab.

    Args:
        plain: the shard, contiguous.
        codec: its codec.
        num_row_dims: number of leading dims that count rows.

    Attributes:
        encoded: uint8, ``(rows..., elements, bytes of an element)``.
    """

    def __init__(self, plain: torch.Tensor, codec: ElementCodec, num_row_dims: int) -> None:
        self.plain = plain
        self._slabs = _Slabs(plain, codec, num_row_dims)
        self.encoded = self._slabs.encoded
        self._lock = threading.Lock()

    def encode(self, at: Slices) -> None:
        """Encode what a box of the encoded array needs, unless it is encoded already."""
        lo, hi = self._slabs.span(at)
        with self._lock:
            for first, end in self._slabs.take(lo, hi):
                plain, encoded = self._slabs.arrays(first, end)
                self._slabs.codec.encode(plain, encoded, self._slabs.num_row_dims)

    def whole(self) -> torch.Tensor:
        """The encoded array, with all elements."""
        self.encode((slice(0, len(self.encoded)),))
        return self.encoded


class DecodedTarget:
    """A destination shard and the array that receives its elements. Complete slabs are decoded as they arrive.

    Args:
        plain: the shard; any dtype and strides.
        codec, num_row_dims: as for :class:`EncodedSource`.
        decodes_early: whether the codec can decode into the shard itself.

    Attributes:
        encoded: uint8, ``(rows..., elements, bytes of an element)``.
    """

    def __init__(self, plain: torch.Tensor, codec: ElementCodec, num_row_dims: int, *, decodes_early: bool) -> None:
        self.plain, self._decodes_early = plain, decodes_early
        self._decoded = plain if decodes_early else _empty(plain.shape, getattr(torch, decoded_dtype(plain.dtype)))
        self._slabs = _Slabs(self._decoded, codec, num_row_dims)
        self.encoded = self._slabs.encoded
        self._needed = math.prod(self.encoded.shape[1:-1])
        self._received = np.zeros(len(self.encoded), dtype=np.int64)

    def decode(self, at: Slices) -> None:
        """Count a box of the encoded array as received, and decode the slabs that it completes."""
        if not self._decodes_early:
            return
        lo, hi = self._slabs.span(at)
        inner = (range(*part.indices(size)) for part, size in zip(at[1:], self.encoded.shape[1:-1], strict=False))
        self._received[lo:hi] += math.prod(map(len, inner)) * math.prod(self.encoded.shape[len(at) : -1])
        complete = np.flatnonzero(self._received[lo:hi] == self._needed) + lo
        breaks = np.flatnonzero(np.diff(complete) > 1) + 1
        for run in np.split(complete, breaks) if len(complete) else ():
            self._decode(int(run[0]), int(run[-1]) + 1)

    def finish(self) -> None:
        """Decode what is not decoded yet."""
        self._decode(0, len(self.encoded))
        if not self._decodes_early:
            write_into(self.plain, self._decoded)

    def _decode(self, lo: int, hi: int) -> None:
        for first, end in self._slabs.take(lo, hi):
            plain, encoded = self._slabs.arrays(first, end)
            self._slabs.codec.decode(encoded, plain, self._slabs.num_row_dims)


class _Slabs:
    """A contiguous shard and its encoded array, and which slabs were taken."""

    def __init__(self, plain: torch.Tensor, codec: ElementCodec, num_row_dims: int) -> None:
        self.codec, self.num_row_dims = codec, num_row_dims
        num_elements = codec.num_elements(plain.shape[num_row_dims:], 0)
        self.encoded = _empty((*plain.shape[:num_row_dims], num_elements, codec.element[1]), torch.uint8)
        self._plain = plain if num_row_dims else plain.reshape(-1)
        self._taken = bytearray(len(self.encoded))

    def span(self, at: Slices) -> tuple[int, int]:
        """The slabs of a box."""
        lo, hi, _ = at[0].indices(len(self.encoded))
        return lo, hi

    def take(self, lo: int, hi: int) -> Iterator[tuple[int, int]]:
        """Intervals of slabs that were not taken before."""
        while (first := self._taken.find(0, lo, hi)) >= 0:
            end = self._taken.find(1, first, hi)
            lo = end if end >= 0 else hi
            self._taken[first:lo] = b"\1" * (lo - first)
            yield first, lo

    def arrays(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slabs of the shard, and of the encoded array."""
        factor = 1 if self.num_row_dims else self.codec.values
        return self._plain[first * factor : end * factor], self.encoded[first:end]


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new array that any thread may write, even if the caller is in inference mode."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device="cpu")


def encoded_array(array: Any) -> Any:
    """The encoded array of a source or target, all of it encoded; any other array as it is."""
    if isinstance(array, EncodedSource):
        return array.whole()
    return array.encoded if isinstance(array, DecodedTarget) else array
