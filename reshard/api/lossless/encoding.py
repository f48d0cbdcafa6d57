"""Lossless buckets: a table of sizes, then the encoded pieces of the bucket's regions.

A region is cut into pieces that fit a core's cache, so that coding and hashing read each piece from memory once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from reshard.api.lossless.buckets import Bucket, bytes_of
from reshard.codecs.delta import HEADER_BYTES, word_width
from reshard.codecs.formats import FORMATS, decode_piece
from reshard.codecs.raw_bytes import write_into

ShardsByName = Mapping[str, torch.Tensor]

#: Bytes of a piece of a region; a multiple of the blocks of all codecs.
PIECE_BYTES = 2**20
#: Buffers travel whole, so they are replaced if they are more than this many times as large as the buckets, unless they
#: are small.
MAX_SLACK, SMALL_BYTES = 1.15, 2**16
#: Buffers are larger than the buckets by this fraction and bytes, so that similar buckets fit them, too.
SPARE_FRACTION, SPARE_BYTES = 1 / 16, 64
#: Bytes of a piece's entry in the table.
_ENTRY_BYTES = 8


@dataclass(frozen=True)
class EncodedBucket:
    """A bucket as it travels.

    Attributes:
        buffer: flat uint8: the bucket, then zero padding.
        nbytes: bytes of the bucket.
        digest, base_digest: digests of the plain bytes of all regions, and of those of the base; None if not requested.
    """

    buffer: np.ndarray
    nbytes: int
    digest: int | None
    base_digest: int | None = None

    @property
    def data(self) -> np.ndarray:
        """The bucket without the zeros."""
        return self.buffer[: self.nbytes]

    def padded(self, capacity: int) -> np.ndarray:
        """The bucket in a buffer of another size."""
        if capacity == len(self.buffer):
            return self.buffer
        buffer = np.zeros(capacity, dtype=np.uint8)
        buffer[: self.nbytes] = self.data
        return buffer


def capacity_of(nbytes: int) -> int:
    """The size of a buffer for a bucket: a little larger, so that buckets of similar size share a plan."""
    step = max(64, 1 << max(nbytes.bit_length() - 5, 0))
    return -(-nbytes // step) * step


def find_capacities(sizes: Mapping[str, int], held: Mapping[str, int]) -> dict[str, int]:
    """The sizes of buffers for buckets of these sizes: those held if they fit and are not much larger than needed."""
    fits = all(size <= held.get(name, 0) for name, size in sizes.items())
    if fits and sum(held.values()) <= max(MAX_SLACK * sum(sizes.values()), SMALL_BYTES):
        return dict(held)
    return {name: size + int(size * SPARE_FRACTION) + SPARE_BYTES for name, size in sizes.items()}


def encode_bucket(
    bucket: Bucket,
    tensors: ShardsByName,
    base: ShardsByName | None,
    codec: str = "delta",
    *,
    with_digest: bool = True,
    with_base_digest: bool = False,
) -> EncodedBucket:
    """Encode the regions of a bucket.

    Args:
        tensors: the source shards by name.
        base: the source shards of the version to which differences refer; None sends the plain bytes.
        codec: the format of all regions.
    """
    plain = [bytes_of(view) for view in bucket.views(tensors, "src")]
    num_pieces = sum(-(-len(words) // PIECE_BYTES) for words in plain)
    max_bytes = capacity_of(bucket.nbytes + (_ENTRY_BYTES + HEADER_BYTES) * num_pieces)
    # Differences are usually few, and the pages of a large buffer take longer to map than they take to encode.
    few = _ENTRY_BYTES * num_pieces + 2 * (PIECE_BYTES + HEADER_BYTES)
    out = np.zeros(max_bytes if base is None else min(max_bytes, few), dtype=np.uint8)
    at, sizes, hasher, base_hasher = _ENTRY_BYTES * num_pieces, [], xxhash.xxh3_64(), xxhash.xxh3_64()
    bases = [None] * len(plain) if base is None else bucket.views(base, "src")
    for words, old_view, view in zip(plain, bases, bucket.views(tensors, "src"), strict=True):
        old = None if old_view is None else bytes_of(old_view)
        width = word_width(view.element_size())
        name = "raw" if old is None and FORMATS[codec].has_base else codec
        for start in range(0, len(words), PIECE_BYTES):
            piece = words[start : start + PIECE_BYTES]
            old_piece = None if old is None else old[start : start + PIECE_BYTES]
            limit = at + len(piece) + HEADER_BYTES
            if limit > len(out):
                out = _enlarged(out, at, min(max_bytes, 2 * len(out)))
            sizes.append(FORMATS[name].encode(piece, piece if old_piece is None else old_piece, out[at:limit], width))
            at += sizes[-1]
            if with_digest:
                hasher.update(piece.data)
            if with_base_digest and old_piece is not None:
                base_hasher.update(old_piece.data)
    if capacity_of(at) > len(out):
        out = _enlarged(out, at, capacity_of(at))
    out[: _ENTRY_BYTES * len(sizes)] = np.array(sizes, dtype=np.int64).view(np.uint8)
    out[at : capacity_of(at)] = 0  # the encoder may have written past the end of its result
    return EncodedBucket(
        out[: capacity_of(at)],
        at,
        hasher.intdigest() if with_digest else None,
        base_hasher.intdigest() if with_base_digest and base is not None else None,
    )


def _enlarged(buffer: np.ndarray, used: int, nbytes: int) -> np.ndarray:
    """A larger buffer with the first ``used`` bytes of another."""
    larger = np.zeros(nbytes, dtype=np.uint8)
    larger[:used] = buffer[:used]
    return larger


def decode_bucket(
    bucket: Bucket, data: np.ndarray, out: ShardsByName, side: str = "dst", *, with_digest: bool = True
) -> int | None:
    """Write the regions of a bucket to shards that hold the base of its differences.

    Args:
        data: what :func:`encode_bucket` made; more bytes may follow.
        side: side of the layout that the shards belong to.

    Returns:
        The digest of the plain bytes, if asked for.
    """
    hasher = xxhash.xxh3_64()
    views = list(bucket.views(out, side))
    at = _ENTRY_BYTES * sum(-(-view.numel() * view.element_size() // PIECE_BYTES) for view in views)
    sizes = iter(data[:at].view(np.int64).tolist())
    for view in views:
        words = bytes_of(view)
        for start in range(0, len(words), PIECE_BYTES):
            piece, size = words[start : start + PIECE_BYTES], next(sizes)
            decode_piece(data[at : at + size], piece, word_width(view.element_size()))
            at += size
            if with_digest:
                hasher.update(piece.data)
        if not view.is_contiguous():
            kind = torch.uint8 if view.element_size() == 1 else view.dtype  # torch cannot copy uint4
            write_into(view.view(kind), torch.from_numpy(words).view(kind).view(view.shape))
    return hasher.intdigest() if with_digest else None


def digest_regions(bucket: Bucket, shards: ShardsByName, side: str) -> int:
    """The digest of the plain bytes of a bucket's regions in the shards of one side."""
    hasher = xxhash.xxh3_64()
    for view in bucket.views(shards, side):
        hasher.update(bytes_of(view).data)
    return hasher.intdigest()
