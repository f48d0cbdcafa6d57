"""Regions of tensors as bytes in a lossless format: sample, encode, and decode in place.

A region is cut into pieces that fit a core's cache. In an encoded region, eight bytes before each piece tell its number
of bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import torch

from reshard.api.lossless.buckets import bytes_of
from reshard.codecs.delta import HEADER_BYTES, word_width
from reshard.codecs.encoded_ratios import Sample
from reshard.codecs.formats import FORMATS, decode_piece
from reshard.codecs.lossless_choice import BLOCK_BYTES, distance_of, take_sample
from reshard.codecs.raw_bytes import write_into
from reshard.errors import ArgumentError

#: Largest number of bytes of a piece.
PIECE_BYTES = 2**20
#: Bytes of the number before a piece.
_NUMBER_BYTES = 8
#: Regions of at most so many bytes are copied whole to sample them.
SMALL_BYTES = 2**16
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def cut_pieces(region: torch.Tensor) -> Iterator[torch.Tensor]:
    """The pieces of a region. They depend on its shape and dtype only, so both ends cut alike."""
    if region.ndim and 0 < region.numel() * region.itemsize <= PIECE_BYTES:
        yield region
        return
    row_bytes = math.prod(region.shape[1:]) * region.itemsize
    if region.ndim > 1 and row_bytes > PIECE_BYTES:
        for row in region:
            yield from cut_pieces(row)
    elif region.numel():
        yield from region.reshape(-1).split(1) if not region.ndim else region.split(max(1, PIECE_BYTES // row_bytes))


def largest_size(region: torch.Tensor) -> int:
    """The largest number of bytes of an encoded region: the number of the raw format."""
    num_pieces = sum(1 for _ in cut_pieces(region))
    return region.numel() * region.itemsize + (_NUMBER_BYTES + HEADER_BYTES) * num_pieces


def encode_region(region: torch.Tensor, base: torch.Tensor | None, name: str, out: np.ndarray) -> int:
    """Encode a region.

    Args:
        region: a tensor on the CPU.
        base: the tensor before, of equal shape, on the CPU; None if the format needs none.
        name: name of the format.
        out: flat uint8, with at least :func:`largest_size` bytes.

    Returns:
        The number of bytes written.
    """
    width, num_written = word_width(region.itemsize), 0
    pieces = cut_pieces(region)
    bases = pieces if base is None else cut_pieces(base)
    for piece in pieces:
        words = bytes_of(piece)
        old = words if base is None else bytes_of(next(bases))
        first = num_written + _NUMBER_BYTES
        size = FORMATS[name].encode(words, old, out[first : first + len(words) + HEADER_BYTES], width)
        out[num_written:first] = np.frombuffer(size.to_bytes(_NUMBER_BYTES, "little"), dtype=np.uint8)
        num_written = first + size
    return num_written


def decode_region(data: np.ndarray, region: torch.Tensor) -> int:
    """Turn the base into the region that :func:`encode_region` encoded, in place.

    Args:
        data: flat uint8, which begins with the encoded region.
        region: the base, on the CPU; it becomes the decoded region.

    Returns:
        The number of bytes read.

    Raises:
        ArgumentError: ``data`` does not encode a region of this shape. Some elements of ``region`` may have changed.
    """
    width, num_read = word_width(region.itemsize), 0
    for piece in cut_pieces(region):
        words, first = bytes_of(piece), num_read + _NUMBER_BYTES
        size = int.from_bytes(data[num_read:first].tobytes(), "little")
        if not 0 < size <= len(data) - first:
            raise ArgumentError(f"a piece of {size} bytes is not among the {len(data) - first} bytes that are left")
        decode_piece(data[first : first + size], words, width)
        if not piece.is_contiguous():
            kind = torch.uint8 if piece.itemsize == 1 else piece.dtype  # torch cannot copy uint4
            write_into(piece.view(kind), torch.from_numpy(words).view(kind).view(piece.shape))
        num_read = first + size
    return num_read


def find_header(data: np.ndarray) -> int:
    """The header of the first piece of an encoded region."""
    return int(data[_NUMBER_BYTES]) if len(data) > _NUMBER_BYTES else -1  # a region without elements has no piece


def sample_region(region: torch.Tensor, base: torch.Tensor | None) -> Sample:
    """Sample the changes of a region, at the same places on all ranks that hold it, whatever its strides.

    Args:
        region: a tensor on the CPU.
        base: the tensor before, of equal shape, on the CPU; None if there is none.
    """
    width, nbytes = word_width(region.itemsize), region.numel() * region.itemsize
    if base is None or nbytes <= SMALL_BYTES or (region.is_contiguous() and base.is_contiguous()):
        return take_sample(bytes_of(region), None if base is None else bytes_of(base), width)
    places = _find_places(region.shape, region.itemsize)
    new, old = (_gather(tensor, places) for tensor in (region, base))
    return take_sample(new, old, width, every=1)


def _gather(region: torch.Tensor, places: tuple[np.ndarray, ...]) -> np.ndarray:
    return np.ascontiguousarray(region.view(_WORDS[region.itemsize]).numpy()[places]).view(np.uint8).reshape(-1)


@functools.lru_cache(maxsize=1024)
def _find_places(shape: torch.Size, itemsize: int) -> tuple[np.ndarray, ...]:
    """The indices of the sampled elements of a contiguous region."""
    per_block = BLOCK_BYTES // itemsize
    distance = distance_of(math.prod(shape) * itemsize) * per_block
    first = np.arange(0, math.prod(shape) - per_block + 1, distance)
    return np.unravel_index((first[:, None] + np.arange(per_block)).reshape(-1), shape)
