"""Tables of strided regions. One kernel launch copies all regions of a table between arrays and a flat buffer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Outer dims of a region. A box with more is split into several regions.
MAX_OUTER = 3
#: Columns of a table: tensor number, offset in its array, offset in the buffer, row length, sizes and then strides of
#: the three outer dims. Offsets, row lengths and strides are in words.
TENSOR, IN_ARRAY, IN_BUFFER, ROW, SIZE, STRIDE = 0, 1, 2, 3, 4, 7
COLUMNS = 10
#: Largest unit and largest word of a table, in bytes. With a unit of 16, words of 8 are loaded in pairs.
MAX_UNIT, MAX_WORD = 16, 8
#: Tile shapes ``(rows, words of each row)`` that one program of a launch copies. A table uses one of them.
TILES = ((128, 8), (64, 16), (16, 64), (4, 256), (1, 1024))


@dataclass(frozen=True, eq=False)
class RegionTable:
    """Regions of one unit and tile shape, which one launch copies.

    Attributes:
        rows: ``(regions, COLUMNS)`` int64.
        unit: every row length, offset, stride and address is a multiple of this many bytes: 16, 8, 4, 2 or 1.
        programs: ``(programs, 3)`` int32: region, first row and first word of the program's tile.
        tile: rows and words of a tile.
    """

    rows: np.ndarray
    unit: int
    programs: np.ndarray
    tile: tuple[int, int]

    @property
    def word_bytes(self) -> int:
        """Bytes per word: the unit, but at most :data:`MAX_WORD`."""
        return min(self.unit, MAX_WORD)

    @property
    def copied_bytes(self) -> int:
        """Bytes that one launch copies."""
        return int((self.rows[:, ROW] * self.rows[:, SIZE : SIZE + MAX_OUTER].prod(axis=1)).sum()) * self.word_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the table itself."""
        return self.rows.nbytes + self.programs.nbytes


def box_regions(
    tensor: int, shape: Sequence[int], itemsize: int, box: Sequence[slice], in_buffer: int
) -> list[tuple[int, ...]]:
    """One box of a contiguous array as regions in bytes, packed in row-major order from offset ``in_buffer``."""
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
    indices = itertools.product(*(range(length) for length, _ in reversed(cut)))
    return [
        (
            tensor,
            at + sum(i * stride for i, (_, stride) in zip(index, reversed(cut), strict=True)),
            in_buffer + number * size,
            row,
            *sizes,
            *steps,
        )
        for number, index in enumerate(indices)
    ]


def make_tables(regions: Sequence[tuple[int, ...]], alignments: Sequence[int]) -> list[RegionTable]:
    """Group regions by unit and tile shape, one table for each group.

    Separate tables keep a region at an odd address, or one with short rows, from slowing down the others.

    Args:
        regions: as :func:`box_regions` makes them, in bytes.
        alignments: for each array, a power of two that divides its address.
    """
    rows = np.array(regions, dtype=np.int64).reshape(-1, COLUMNS)
    in_bytes = [IN_ARRAY, IN_BUFFER, ROW, *range(STRIDE, STRIDE + MAX_OUTER)]
    aligned = np.array(alignments, dtype=np.int64)[rows[:, TENSOR]]
    units = np.gcd(np.gcd.reduce(rows[:, in_bytes], axis=1), np.gcd(aligned, MAX_UNIT))
    words = np.minimum(units, MAX_WORD)
    rows[:, in_bytes] //= words[:, None]
    widths = np.array([tile[1] for tile in TILES[:-1]])
    tiles = np.searchsorted(widths, rows[:, ROW])  # the first tile as wide as a row, else the widest
    tables = []
    for unit in sorted(set(units.tolist()), reverse=True):
        for tile in range(len(TILES)):
            chosen = rows[(units == unit) & (tiles == tile)]
            if len(chosen):
                tables.append(RegionTable(chosen, unit, _programs(chosen, TILES[tile]), TILES[tile]))
    return tables


def _programs(rows: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """The tiles of all regions, one program each: see :attr:`RegionTable.programs`."""
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
    """Reference of the kernel for flat uint8 arrays in host memory: copies a table's regions, program by program."""
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
