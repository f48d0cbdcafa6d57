"""Boxes of arrays as strided byte regions beside a flat buffer, in tables that one kernel launch can follow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Outer dims of a region; boxes with more are cut into several.
MAX_OUTER = 3
#: Columns of a table of regions, all in units but for the first: tensor, offset in its array, offset in the buffer,
#: row length, sizes of three outer dims and their strides.
TENSOR, IN_ARRAY, IN_BUFFER, ROW, SIZE, STRIDE = 0, 1, 2, 3, 4, 7
COLUMNS = 10
#: Rows and units of a row that one program of a launch copies; a table uses one of them.
TILES = ((64, 16), (16, 64), (4, 256), (1, 1024))


@dataclass(frozen=True, eq=False)
class RegionTable:
    """Regions that are copied together.

    Attributes:
        rows: ``(regions, COLUMNS)`` int64. unit: bytes of which every number in it is a multiple: 8, 4, 2 or 1.
        programs: ``(programs, 3)`` int32: region, first row of a tile, first unit of it. tile: rows and units of one.
    """

    rows: np.ndarray
    unit: int
    programs: np.ndarray
    tile: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """What one copy of all regions moves."""
        return int((self.rows[:, ROW] * self.rows[:, SIZE : SIZE + MAX_OUTER].prod(axis=1)).sum()) * self.unit


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


def make_table(regions: Sequence[tuple[int, ...]], largest_unit: int = 8) -> RegionTable:
    """A table of regions given in bytes, in the largest unit that divides all of them and ``largest_unit``."""
    rows = np.array(regions, dtype=np.int64).reshape(-1, COLUMNS)
    in_bytes = [IN_ARRAY, IN_BUFFER, ROW, *range(STRIDE, STRIDE + MAX_OUTER)]
    common = int(np.gcd.reduce(rows[:, in_bytes], axis=None, initial=8)) if len(rows) else 8
    unit = math.gcd(common, largest_unit)
    rows[:, in_bytes] //= unit
    width = int(np.median(rows[:, ROW])) if len(rows) else 1
    tile = next((one for one in TILES if one[1] >= width), TILES[-1])
    return RegionTable(rows, unit, _programs(rows, tile), tile)


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
    units = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.uint8}[table.unit]
    flats = [None if array is None else _in_units(array, units) for array in arrays]
    flat = _in_units(buffer, units)
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


def _in_units(array: np.ndarray, units: type) -> np.ndarray:
    size = np.dtype(units).itemsize
    return array[: len(array) // size * size].view(units)
