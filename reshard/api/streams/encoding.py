"""Streams without loss: the encoded regions of a stream, behind a table of their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from reshard.api.streams.regions import Stream, bytes_of
from reshard.codecs.delta import HEADER_BYTES, apply_delta, encode_delta, word_width
from reshard.codecs.exponents import EXPONENTS, decode_exponents, encode_exponents
from reshard.codecs.raw_bytes import write_into

Shards = Mapping[str, torch.Tensor]

#: Bytes of a region's entry in the table.
_ENTRY_BYTES = 8


@dataclass(frozen=True)
class EncodedStream:
    """A stream as it travels.

    Attributes:
        buffer: flat uint8, with zeros behind the stream. nbytes: of the stream.
        digest: of the plain bytes of all regions; None if not asked for.
    """

    buffer: np.ndarray
    nbytes: int
    digest: int | None

    @property
    def data(self) -> np.ndarray:
        """The stream without the zeros."""
        return self.buffer[: self.nbytes]

    def padded(self, capacity: int) -> np.ndarray:
        """The stream in a buffer of another size."""
        if capacity == len(self.buffer):
            return self.buffer
        buffer = np.zeros(capacity, dtype=np.uint8)
        buffer[: self.nbytes] = self.data
        return buffer


def capacity_of(nbytes: int) -> int:
    """The size of a buffer for a stream: a little larger, so that streams of similar size share a plan."""
    step = max(64, 1 << max(nbytes.bit_length() - 5, 0))
    return -(-nbytes // step) * step


def encode_stream(
    stream: Stream, tensors: Shards, base: Shards | None, codec: str = "delta", *, with_digest: bool = True
) -> EncodedStream:
    """Encode the regions of a stream.

    Args:
        tensors: the source shards by name. base: the source shards of the version to which differences refer; None
            sends the plain bytes. codec: ``"delta"``, or ``"bf16-lossless"``, which has no base.
    """
    limit = stream.nbytes + (_ENTRY_BYTES + HEADER_BYTES) * len(stream.regions)
    out = np.zeros(capacity_of(limit), dtype=np.uint8)
    at, sizes, hasher = _ENTRY_BYTES * len(stream.regions), [], xxhash.xxh3_64()
    bases = [None] * len(stream.regions) if base is None else stream.views(base, "src")
    for view, old in zip(stream.views(tensors, "src"), bases, strict=True):
        words = bytes_of(view)
        if with_digest:
            hasher.update(words.data)
        limit = at + len(words) + HEADER_BYTES
        if codec == "delta":
            width = word_width(view.element_size())
            sizes.append(encode_delta(words, None if old is None else bytes_of(old), out[at:limit], width))
        else:
            sizes.append(encode_exponents(words, out[at:limit]))
        at += sizes[-1]
    out[: _ENTRY_BYTES * len(sizes)] = np.array(sizes, dtype=np.int64).view(np.uint8)
    out[at : capacity_of(at)] = 0  # the encoder may have written behind its result
    return EncodedStream(out[: capacity_of(at)], at, hasher.intdigest() if with_digest else None)


def decode_stream(stream: Stream, data: np.ndarray, out: Shards, *, with_digest: bool = True) -> int | None:
    """Write the regions of a stream to the destination shards, which hold the base of its differences.

    Args:
        data: what :func:`encode_stream` made; more bytes may follow.

    Returns:
        The digest of the plain bytes, if asked for.
    """
    hasher = xxhash.xxh3_64()
    at = _ENTRY_BYTES * len(stream.regions)
    sizes = data[:at].view(np.int64)
    for size, view in zip(sizes.tolist(), stream.views(out, "dst"), strict=True):
        words = bytes_of(view)
        if size and data[at] == EXPONENTS:
            decode_exponents(data[at : at + size], words)
        else:
            apply_delta(data[at : at + size], words, word_width(view.element_size()))
        at += size
        if with_digest:
            hasher.update(words.data)
        if not view.is_contiguous():
            write_into(view, torch.from_numpy(words).view(view.dtype).view(view.shape))
    return hasher.intdigest() if with_digest else None


def digest_regions(stream: Stream, shards: Shards, side: str) -> int:
    """The digest of the plain bytes of a stream's regions in the shards of one side."""
    hasher = xxhash.xxh3_64()
    for view in stream.views(shards, side):
        hasher.update(bytes_of(view).data)
    return hasher.intdigest()
