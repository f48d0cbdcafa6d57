"""Copies many strided regions between arrays and a buffer on a GPU in one launch, with Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from reshard.regions import COLUMNS, IN_ARRAY, IN_BUFFER, ROW, SIZE, STRIDE, TENSOR, RegionTable
from reshard.staging import flat_bytes

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit  # type: ignore[untyped-decorator]
def _copy_regions(
    addresses: Any,
    buffer: Any,
    rows: Any,
    programs: Any,
    like: Any,
    TO_BUFFER: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    AT_TENSOR: tl.constexpr,
    AT_ARRAY: tl.constexpr,
    AT_BUFFER: tl.constexpr,
    AT_ROW: tl.constexpr,
    AT_SIZE: tl.constexpr,
    AT_STRIDE: tl.constexpr,
) -> None:
    """Each program copies one tile: some rows of a region, and some units of each."""
    program = programs + tl.program_id(0) * 3
    row = rows + tl.load(program) * NUM_COLUMNS
    # divisions are done once a row and in 32 bits: a region has fewer than 2**31 rows
    lines = tl.load(program + 1) + tl.arange(0, DOWN)
    columns = tl.load(program + 2) + tl.arange(0, ACROSS)
    n0 = tl.load(row + AT_SIZE).to(tl.int32)
    n1 = tl.load(row + AT_SIZE + 1).to(tl.int32)
    n2 = tl.load(row + AT_SIZE + 2).to(tl.int32)
    length = tl.load(row + AT_ROW)
    inner = lines % n2
    rest = lines // n2
    start = (rest // n1).to(tl.int64) * tl.load(row + AT_STRIDE)
    start += (rest % n1).to(tl.int64) * tl.load(row + AT_STRIDE + 1)
    start += inner.to(tl.int64) * tl.load(row + AT_STRIDE + 2) + tl.load(row + AT_ARRAY)
    mask = (lines < n0 * n1 * n2)[:, None] & (columns < length)[None, :]
    array = tl.load(addresses + tl.load(row + AT_TENSOR)).to(like.dtype)
    outside = array + start[:, None] + columns[None, :]
    inside = buffer + tl.load(row + AT_BUFFER) + lines.to(tl.int64)[:, None] * length + columns[None, :]
    if TO_BUFFER:
        tl.store(inside, tl.load(outside, mask=mask), mask=mask)
    else:
        tl.store(outside, tl.load(inside, mask=mask), mask=mask)


class RegionCopier:
    """A table on a device, and the launch that follows it.

    Addresses of arrays go to the device when they differ from the last call's: with the same arrays nothing does.
    """

    def __init__(self, table: RegionTable, device: torch.device) -> None:
        self.table = table
        self._rows = torch.from_numpy(table.rows).to(device)
        self._programs = torch.from_numpy(table.programs).to(device)
        self._device = device
        self._known: tuple[int, ...] = ()
        self._addresses = torch.empty(0, dtype=torch.int64, device=device)

    def copy(self, arrays: Sequence[torch.Tensor | None], buffer: torch.Tensor, to_buffer: bool) -> None:
        """Between contiguous arrays and a flat byte buffer, on the current stream.

        Raises:
            ValueError: the address of an array or of the buffer is not a multiple of the table's unit.
        """
        if not len(self.table.programs):
            return
        known = tuple(0 if array is None else array.data_ptr() for array in arrays)
        if any(address % self.table.unit for address in (*known, buffer.data_ptr())):
            raise ValueError(f"arrays and buffer must be aligned to {self.table.unit} bytes")
        if known != self._known:
            self._addresses = torch.tensor(known, dtype=torch.int64).to(self._device, non_blocking=True)
            self._known = known
        flat = flat_bytes(buffer).view(_UNITS[self.table.unit])
        down, across = self.table.tile
        _copy_regions[(len(self.table.programs),)](
            self._addresses,
            flat,
            self._rows,
            self._programs,
            flat,
            TO_BUFFER=to_buffer,
            DOWN=down,
            ACROSS=across,
            NUM_COLUMNS=COLUMNS,
            AT_TENSOR=TENSOR,
            AT_ARRAY=IN_ARRAY,
            AT_BUFFER=IN_BUFFER,
            AT_ROW=ROW,
            AT_SIZE=SIZE,
            AT_STRIDE=STRIDE,
        )
