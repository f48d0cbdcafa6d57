"""A Triton kernel that copies strided regions between arrays and a buffer, one launch for each table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reshard.errors import ArgumentError
from reshard.runtime.array_bytes import flat_bytes
from reshard.runtime.strided_regions import (
    COLUMNS,
    IN_ARRAY,
    IN_BUFFER,
    MAX_WORD,
    ROW,
    SIZE,
    STRIDE,
    TENSOR,
    TILES,
    RegionTable,
    make_tables,
)

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
#: Cached address tables, without the tables that a CUDA graph has captured.
MAX_ADDRESS_TABLES = 32


# Triton compiles annotations and accepts only its own.
@triton.jit  # type: ignore[untyped-decorator]
def _copy_regions(  # type: ignore[no-untyped-def]
    addresses, buffer, rows, programs, like,
    TO_BUFFER: tl.constexpr,
    PAIRS: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    AT_TENSOR: tl.constexpr,
    AT_ARRAY: tl.constexpr,
    AT_BUFFER: tl.constexpr,
    AT_ROW: tl.constexpr,
    AT_SIZE: tl.constexpr,
    AT_STRIDE: tl.constexpr,
):  # fmt: skip
    """Each program copies one tile: a block of rows of a region, and a block of words of each row."""
    program = programs + tl.program_id(0) * 3
    row = rows + tl.load(program) * NUM_COLUMNS
    # Divide once per row, in 32 bits: a region has fewer than 2**31 rows.
    lines = tl.load(program + 1) + tl.arange(0, DOWN)
    columns = tl.multiple_of(tl.load(program + 2), 16) + tl.arange(0, ACROSS)
    n0 = tl.load(row + AT_SIZE).to(tl.int32)
    n1 = tl.load(row + AT_SIZE + 1).to(tl.int32)
    n2 = tl.load(row + AT_SIZE + 2).to(tl.int32)
    length = tl.load(row + AT_ROW)
    inner = lines % n2
    rest = lines // n2
    start = (rest // n1).to(tl.int64) * tl.load(row + AT_STRIDE)
    start += (rest % n1).to(tl.int64) * tl.load(row + AT_STRIDE + 1)
    start += inner.to(tl.int64) * tl.load(row + AT_STRIDE + 2) + tl.load(row + AT_ARRAY)
    packed = tl.load(row + AT_BUFFER) + lines.to(tl.int64) * length
    array = tl.load(addresses + tl.load(row + AT_TENSOR)).to(like.dtype)
    if PAIRS:  # all offsets and lengths are even, so two words are loaded at once
        length = tl.multiple_of(length, 2)
        start = tl.multiple_of(start, 2)
        packed = tl.multiple_of(packed, 2)
        array = tl.multiple_of(array, 16)
    mask = (lines < n0 * n1 * n2)[:, None] & (columns < length)[None, :]
    outside = array + start[:, None] + columns[None, :]
    inside = buffer + packed[:, None] + columns[None, :]
    if TO_BUFFER:
        tl.store(inside, tl.load(outside, mask=mask), mask=mask)
    else:
        tl.store(outside, tl.load(inside, mask=mask), mask=mask)


class RegionCopier:
    """Uploads tables to a device and launches the kernel on them.

    Tables and addresses are uploaded from pinned memory before a transfer posts its first operation: a copy from
    pageable memory could block on a receive that waits for another rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._addresses: dict[tuple[int, ...], torch.Tensor] = {}
        self._captured: set[tuple[int, ...]] = set()

    def upload(self, table: RegionTable) -> tuple[RegionTable, torch.Tensor, torch.Tensor]:
        """A table, and its arrays on the device."""
        return table, self._upload(torch.from_numpy(table.rows)), self._upload(torch.from_numpy(table.programs))

    def find_addresses(self, known: tuple[int, ...]) -> torch.Tensor:
        """A cached device array of addresses. Entries that a CUDA graph has captured are never dropped.

        Raises:
            ArgumentError: a graph is being captured and these addresses are not cached.
        """
        addresses = self._addresses.get(known)
        if addresses is None:
            addresses = self._addresses[known] = self._upload(torch.tensor(known, dtype=torch.int64))
            droppable = [address for address in self._addresses if address not in self._captured]
            for item in droppable[:-MAX_ADDRESS_TABLES]:
                del self._addresses[item]
        if self._is_capturing():
            self._captured.add(known)
        return addresses

    def warm_up(self, buffer: torch.Tensor) -> None:
        """Compile and load every kernel variant that a message in the buffer can need.

        Loading one later could block on a receive under way.
        """
        addresses = self.find_addresses((buffer.data_ptr(),))
        for unit in (16, 8, 4, 2, 1):
            covered = 0  # words of a row that the previous tile still covers
            for _, across in TILES:
                width = (covered * min(unit, MAX_WORD) // unit + 1) * unit
                region = (0, 0, 0, width, 1, 1, 1, 0, 0, 0)
                for table in make_tables([region], [unit]) if width <= buffer.numel() else ():
                    for to_buffer in (True, False):
                        self.copy(self.upload(table), addresses, buffer, to_buffer)
                covered = across

    def copy(
        self, uploaded: tuple[RegionTable, torch.Tensor, torch.Tensor], addresses: torch.Tensor, buffer: torch.Tensor,
        to_buffer: bool,
    ) -> None:  # fmt: skip
        """Copy from contiguous arrays into a flat byte buffer, or back, on the current stream."""
        table, rows, programs = uploaded
        flat = flat_bytes(buffer).view(_WORDS[table.word_bytes])
        down, across = table.tile
        _copy_regions[(len(table.programs),)](
            addresses,
            flat,
            rows,
            programs,
            flat,
            TO_BUFFER=to_buffer,
            PAIRS=table.unit > table.word_bytes,
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

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _upload(self, array: torch.Tensor) -> torch.Tensor:
        if self._is_capturing():
            raise ArgumentError("these arrays were not moved before the capture: call the Mover with them once first")
        if self._device.type != "cuda":
            return array.to(self._device)
        return array.pin_memory().to(self._device, non_blocking=True)
