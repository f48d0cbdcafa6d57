"""Boxes of arrays as strided byte regions beside a flat buffer, in tables that one kernel launch can follow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Outer dims of a region; boxes with more are cut into several.
MAX_OUTER = 3
#: Columns of a table of regions, all in words but for the first: tensor, offset in its array, offset in the buffer,
#: row length, sizes of three outer dims and their strides.
TENSOR, IN_ARRAY, IN_BUFFER, ROW, SIZE, STRIDE = 0, 1, 2, 3, 4, 7
COLUMNS = 10
#: Largest unit and word of a table, in bytes: pairs of words of 8 are loaded together.
MAX_UNIT, MAX_WORD = 16, 8
#: Rows and words of a row that one program of a launch copies; a table uses one of them.
TILES = ((64, 16), (16, 64), (4, 256), (1, 1024))


@dataclass(frozen=True, eq=False)
class RegionTable:
    """Regions of one kind, which one launch copies.

    Attributes:
        rows: ``(regions, COLUMNS)`` int64, in words. unit: bytes of which every size, offset and address is a multiple:
            16, 8, 4, 2 or 1. A word has as many, 8 at most.
        programs: ``(programs, 3)`` int32: region, first row of a tile, first word of it. tile: rows and words of one.
    """

    rows: np.ndarray
    unit: int
    programs: np.ndarray
    tile: tuple[int, int]

    @property
    def word_bytes(self) -> int:
        """Bytes of one word."""
        return min(self.unit, MAX_WORD)

    @property
    def copied_bytes(self) -> int:
        """What one copy of all regions moves."""
        return int((self.rows[:, ROW] * self.rows[:, SIZE : SIZE + MAX_OUTER].prod(axis=1)).sum()) * self.word_bytes

    @property
    def nbytes(self) -> int:
        """Memory of the table itself."""
        return self.rows.nbytes + self.programs.nbytes


def box_regions(
    tensor: int, shape: Sequence[int], itemsize: int, box: Sequence[slice], in_buffer: int
) -> list[tuple[int, ...]]:
    """One box of a contiguous array as regions, in bytes, in row-major order; the buffer holds it without gaps."""
    lengths = [cut.stop - cut.start for cut in box]
    if not math.prod(lengths):
        return []
    strides = [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    at = sum(cut.start * stride for cut, stride in zip(box, strides, strict=True))
    row = itemsize
    outer: list[tuple[int, int]] = []  # (size, stride), innermost first
    for length, stride in zip(reversed(lengths), reversed(strides), strict=True):
        if length == 1:
            continue
        if not outer and stride == row:
            row *= length
        elif outer and outer[-1][0] * outer[-1][1] == stride:
            outer[-1] = (outer[-1][0] * length, outer[-1][1])
        else:
            outer.append((length, stride))
    kept, cut = outer[:MAX_OUTER], outer[MAX_OUTER:]
    kept += [(1, 0)] * (MAX_OUTER - len(kept))
    size = row * math.prod(length for length, _ in kept)
    sizes, steps = zip(*reversed(kept), strict=True)
    places = itertools.product(*(range(length) for length, _ in reversed(cut)))
    return [
        (
            tensor,
            at + sum(i * stride for i, (_, stride) in zip(place, reversed(cut), strict=True)),
            in_buffer + number * size,
            row,
            *sizes,
            *steps,
        )
        for number, place in enumerate(places)
    ]


def make_tables(regions: Sequence[tuple[int, ...]], alignments: Sequence[int]) -> list[RegionTable]:
    """Tables of regions given in bytes, one for each unit and tile that fit some of them.

    So a region at an odd address, or one of short rows, slows down no other.

    Args:
        alignments: of each array by its number in the regions, a power of two that divides its address.
    """
    rows = np.array(regions, dtype=np.int64).reshape(-1, COLUMNS)
    in_bytes = [IN_ARRAY, IN_BUFFER, ROW, *range(STRIDE, STRIDE + MAX_OUTER)]
    aligned = np.array(alignments, dtype=np.int64)[rows[:, TENSOR]]
    units = np.gcd(np.gcd.reduce(rows[:, in_bytes], axis=1), np.gcd(aligned, MAX_UNIT))
    words = np.minimum(units, MAX_WORD)
    rows[:, in_bytes] //= words[:, None]
    widths = np.array([tile[1] for tile in TILES[:-1]])
    tiles = np.searchsorted(widths, rows[:, ROW])  # the first that is as wide as a row, else the widest
    tables = []
    for unit in sorted(set(units.tolist()), reverse=True):
        for tile in range(len(TILES)):
            chosen = rows[(units == unit) & (tiles == tile)]
            if len(chosen):
                tables.append(RegionTable(chosen, unit, _programs(chosen, TILES[tile]), TILES[tile]))
    return tables


def _programs(rows: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """Which program copies what: tiles of each region's rows, one after the other."""
    num_rows = rows[:, SIZE : SIZE + MAX_OUTER].prod(axis=1)
    down, across = -(-num_rows // tile[0]), -(-rows[:, ROW] // tile[1])
    counts = down * across
    region = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(region)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([region, within // across[region] * tile[0], within % across[region] * tile[1]], axis=1).astype(
        np.int32
    )


def copy_regions_python(
    table: RegionTable, arrays: Sequence[np.ndarray | None], buffer: np.ndarray, to_buffer: bool
) -> None:
    """What the kernel does, on flat uint8 arrays in memory: between arrays and the buffer, program by program."""
    words = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.uint8}[table.word_bytes]
    flats = [None if array is None else _in_words(array, words) for array in arrays]
    flat = _in_words(buffer, words)
    down, across = table.tile
    for number, first_row, first_column in table.programs.tolist():
        row = table.rows[number]
        n0, n1, n2 = row[SIZE : SIZE + MAX_OUTER]
        s0, s1, s2 = row[STRIDE : STRIDE + MAX_OUTER]
        lines = np.arange(first_row, min(first_row + down, n0 * n1 * n2))[:, None]
        columns = np.arange(first_column, min(first_column + across, row[ROW]))[None, :]
        outside = lines // (n1 * n2) * s0 + lines // n2 % n1 * s1 + lines % n2 * s2 + columns + row[IN_ARRAY]
        inside = row[IN_BUFFER] + lines * row[ROW] + columns
        array = flats[row[TENSOR]]
        assert array is not None
        if to_buffer:
            flat[inside] = array[outside]
        else:
            array[outside] = flat[inside]


def _in_words(array: np.ndarray, words: type) -> np.ndarray:
    size = np.dtype(words).itemsize
    return array[: len(array) // size * size].view(words)
