"""Staging buffers of one rank's program, and copies of boxes between the rank's arrays and those buffers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from reshard.plan import num_recv_slots
from reshard.runtime.array_bytes import flat_bytes
from reshard.runtime.byte_runs import box_runs, box_span, copy_runs
from reshard.runtime.cpu.box_tables import BoxParts, split_box, tabulate_boxes
from reshard.runtime.program import BoxRange, LocalBox, RankProgram, Recv, Send, Slices

#: Largest number of staging slots of one send queue, regardless of the windows in the plan.
MAX_WINDOW = 4
#: At least this many boxes of a buffer are packed as byte runs in one call instead of box by box.
MANY_BOXES = 4


class Staging:
    """The staging slots of one program, allocated on first use: half for receives, a quarter for each send queue."""

    def __init__(self, program: RankProgram, staging_bytes: int) -> None:
        self.recv = Pool(program.recvs, num_recv_slots(staging_bytes, _largest(program.recvs)))
        self.across = Pool(program.sends_across, _num_send_slots(program.sends_across, staging_bytes))
        self.inside = Pool(program.sends_inside, _num_send_slots(program.sends_inside, staging_bytes))
        # by the message, the first box of the part, and the side
        self._runs: dict[tuple[int, int, str], _ByteRuns] = {}
        self._spans: dict[tuple[int, int, str], tuple[int, int] | None] = {}
        self._tables: dict[tuple[int, str], np.ndarray] = {}  # by the message and the side

    def span_of(self, op: Recv | Send, part: BoxRange, array: torch.Tensor, side: str) -> tuple[int, int] | None:
        """Byte range ``(start, stop)`` of a part of one box in a contiguous array; None if not one run. Cached."""
        key = op.id, part.boxes.start, side
        if key not in self._spans:
            box = op.boxes[part.boxes.start]
            self._spans[key] = box_span(array.shape, array.element_size(), getattr(box, side))
        return self._spans[key]

    def tabulate(self, op: Recv | Send, arrays: Sequence[torch.Tensor | None], side: str) -> np.ndarray:
        """The table of the boxes of a message, see :mod:`reshard.runtime.cpu.box_tables`."""
        held = [arrays[box.tensor] for box in op.boxes]
        is_plain = all(array.is_contiguous() for array in held)  # type: ignore[union-attr]
        table = self._tables.get((op.id, side)) if is_plain else None
        if table is None:
            table = tabulate_boxes(
                [_split(array, getattr(box, side)) for array, box in zip(held, op.boxes, strict=True)]
            )
            if is_plain:
                self._tables[op.id, side] = table
        table = table.copy()
        table[:, 0] += [array.data_ptr() for array in held]  # type: ignore[union-attr]
        return table

    def pack(
        self, op: Recv | Send, part: BoxRange, arrays: Sequence[torch.Tensor | None], side: str, buffer: torch.Tensor
    ) -> None:
        """Copy the boxes of a part from the arrays into its buffer."""
        runs = self._runs_of(op, part, arrays, side)
        if runs is not None:
            runs.pack(arrays, buffer)
        else:
            pack([view_of(arrays, box.tensor, getattr(box, side)) for box in op.boxes[part.boxes]], buffer)

    def unpack(
        self, op: Recv | Send, part: BoxRange, arrays: Sequence[torch.Tensor | None], side: str, buffer: torch.Tensor
    ) -> None:
        """Copy the boxes of a part from its buffer into the arrays."""
        runs = self._runs_of(op, part, arrays, side)
        if runs is not None:
            runs.unpack(buffer, arrays)
        else:
            unpack(buffer, [view_of(arrays, box.tensor, getattr(box, side)) for box in op.boxes[part.boxes]])

    def _runs_of(
        self, op: Recv | Send, part: BoxRange, arrays: Sequence[torch.Tensor | None], side: str
    ) -> _ByteRuns | None:
        """The boxes of a part as byte runs. None if they are few, or if an array is not contiguous. Cached."""
        boxes = op.boxes[part.boxes]
        if len(boxes) < MANY_BOXES:
            return None
        if not all(
            (array := arrays[tensor]) is not None and array.is_contiguous() for tensor in {b.tensor for b in boxes}
        ):
            return None
        key = op.id, part.boxes.start, side
        if key not in self._runs:
            self._runs[key] = _ByteRuns(boxes, arrays, side)
        return self._runs[key]

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated now."""
        return sum(pool.allocated_bytes for pool in (self.recv, self.across, self.inside))


def _largest(ops: Sequence[Recv] | Sequence[Send]) -> int:
    return max((op.nbytes for op in ops), default=0)


def _num_send_slots(sends: Sequence[Send], staging_bytes: int) -> int:
    return max(1, min(MAX_WINDOW, staging_bytes // 4 // max(_largest(sends), 1)))


class Pool:
    """Staging slots of equal size, allocated together on first use."""

    def __init__(self, ops: Sequence[Recv] | Sequence[Send], num_slots: int) -> None:
        self._slot_bytes = -(-_largest(ops) // 16) * 16
        self._num_slots = min(num_slots, len(ops))
        self._storage: torch.Tensor | None = None
        self._free: list[torch.Tensor] = []

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated now."""
        return 0 if self._storage is None else self._storage.numel()

    @property
    def num_free(self) -> int:
        """Number of allocated slots that are not in use."""
        return len(self._free)

    def take(self) -> torch.Tensor | None:
        """A free slot as flat uint8; None if all are in use."""
        if self._storage is None:
            self._storage = torch.empty(self._num_slots * self._slot_bytes, dtype=torch.uint8, device="cpu")
            self._free = list(self._storage.split(self._slot_bytes)) if self._slot_bytes else []
        return self._free.pop() if self._free else None

    def give(self, slot: torch.Tensor) -> None:
        """Return a slot to the pool."""
        self._free.append(slot)


class _ByteRuns:
    """Boxes as byte runs of a buffer. Per tensor: array offsets, buffer offsets, lengths."""

    def __init__(self, packed: Sequence[LocalBox], arrays: Sequence[torch.Tensor | None], side: str) -> None:
        self.rows: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]] = []
        filled = 0
        for tensor, group in itertools.groupby(packed, key=lambda box: box.tensor):
            array = arrays[tensor]
            assert array is not None
            boxes = [getattr(box, side) for box in group]
            at, length = box_runs(array.shape, array.element_size(), boxes)
            ends = filled + np.cumsum(length)
            self.rows.append((tensor, at, ends - length, length))
            filled = int(ends[-1])

    def pack(self, arrays: Sequence[torch.Tensor | None], buffer: torch.Tensor) -> None:
        """Copy from the arrays into the buffer."""
        for tensor, index, in_buffer, length in self.rows:
            copy_runs(_flat(arrays[tensor]), buffer.numpy(), index, in_buffer, length)

    def unpack(self, buffer: torch.Tensor, arrays: Sequence[torch.Tensor | None]) -> None:
        """Copy from the buffer into the arrays."""
        for tensor, index, in_buffer, length in self.rows:
            copy_runs(buffer.numpy(), _flat(arrays[tensor]), in_buffer, index, length)


def _split(array: torch.Tensor | None, at: Slices) -> BoxParts:
    assert array is not None
    itemsize = array.element_size()
    return split_box([itemsize * stride for stride in array.stride()], itemsize, at)


def _flat(array: torch.Tensor | None) -> np.ndarray:
    assert array is not None
    return flat_bytes(array).numpy()


def view_of(arrays: Sequence[torch.Tensor | None], tensor: int, at: Slices | None) -> torch.Tensor:
    """A view of one box of a tensor's local array."""
    array = arrays[tensor]
    assert array is not None and at is not None
    return array[at]


class CastSource:
    """A source array whose elements are cast to another dtype message by message, while they are packed.

    It is indexed like the array and has the itemsize of the target dtype. It reports that it is not contiguous, so that
    all its messages are packed.
    """

    def __init__(self, array: torch.Tensor, dtype: torch.dtype) -> None:
        self.array, self.dtype = array, dtype
        self.shape = array.shape

    def __getitem__(self, at: Slices) -> CastSource:
        return CastSource(self.array[at], self.dtype)

    def is_contiguous(self) -> bool:
        """False: the cast elements exist only in the packed message."""
        return False

    def numel(self) -> int:
        """Number of elements."""
        return self.array.numel()

    def element_size(self) -> int:
        """Bytes of an element after the cast."""
        return self.dtype.itemsize

    def record_stream(self, stream: Any) -> None:
        """See ``torch.Tensor.record_stream``."""
        self.array.record_stream(stream)


def copy_into(target: torch.Tensor, source: torch.Tensor | CastSource) -> None:
    """Copy ``source`` into ``target`` of the same shape. A :class:`CastSource` is cast."""
    if isinstance(source, CastSource):
        target.view(source.dtype).copy_(source.array)
    else:
        target.copy_(source)


def pack(views: Sequence[torch.Tensor | CastSource], buffer: torch.Tensor) -> None:
    """Copy views into consecutive parts of a flat byte buffer."""
    at = 0
    for view in views:
        nbytes = view.numel() * view.element_size()
        copy_into(_typed(buffer, at, nbytes, view), view)
        at += nbytes


def unpack(buffer: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    """Copy consecutive parts of a flat byte buffer into views."""
    at = 0
    for view in views:
        nbytes = view.numel() * view.element_size()
        view.copy_(_typed(buffer, at, nbytes, view))
        at += nbytes


def _typed(buffer: torch.Tensor, at: int, nbytes: int, like: torch.Tensor | CastSource) -> torch.Tensor:
    part = buffer[at : at + nbytes]  # aligned, because all tensors of a message have the same itemsize
    return part.view(like.dtype).view(like.shape)


#: A dtype that torch copies without changing bits, by itemsize.
_WORD_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def view_as_bits(tensor: Any) -> Any:
    """View a tensor as a plain dtype of the same itemsize, so that copies preserve the bits of any dtype.

    None, a :class:`CastSource` and encoded arrays are returned unchanged.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return tensor.detach().view(_WORD_DTYPES[tensor.element_size()])


class TorchMemory:
    """Implements :class:`~reshard.runtime.rounds.device_interfaces.Memory` for torch tensors on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, nbytes: int) -> torch.Tensor:
        """A new flat uint8 tensor."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def view(self, array: torch.Tensor, at: Slices) -> torch.Tensor:
        """A view of one box of an array."""
        return array[at]

    def is_contiguous(self, array: torch.Tensor) -> bool:
        """Whether the elements are contiguous in row-major order."""
        return array.is_contiguous()

    def itemsize(self, array: torch.Tensor) -> int:
        """Bytes per element."""
        return array.element_size()

    def address(self, array: torch.Tensor) -> int:
        """Address of the first byte."""
        return array.data_ptr()

    def flat(self, array: torch.Tensor) -> torch.Tensor:
        """See :func:`flat_bytes`."""
        return flat_bytes(array)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See :func:`copy_into`."""
        copy_into(target, source)

    def pack(self, views: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """See :func:`pack`."""
        pack(views, buffer)

    def unpack(self, buffer: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        """See :func:`unpack`."""
        unpack(buffer, views)
