"""Executes a plan on CuPy arrays, in rounds of NCCL messages."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reshard.dtypes import ITEMSIZE, dtype_name
from reshard.errors import ArgumentError, DisagreementError, PlanError
from reshard.formatting import format_ranks
from reshard.plan import Plan, ensure_checked
from reshard.runtime.program import Slices, build_program
from reshard.runtime.rounds.device_interfaces import Posted
from reshard.runtime.rounds.round_assignment import find_rounds
from reshard.runtime.rounds.runner import RoundRunner
from reshard.sharding import TensorSpec

Array = Any
#: Interval at which the host looks whether all ranks have announced their plans.
PLAN_POLL_INTERVAL_SECONDS = 0.0005
#: The CuPy dtypes that hold the bits of dtypes that CuPy lacks.
UNSIGNED = {
    name: f"uint{8 * size}" for name, size in ITEMSIZE.items() if name == "bfloat16" or name.startswith("float8")
}


class Handle:
    """A transfer on the Mover's stream."""

    def __init__(self, cupy: Any, device: int, end: Any, result: Callable[[], Any]) -> None:
        self._cupy, self._device, self._end, self._result = cupy, device, end, result

    def wait(self) -> Any:
        """Let later work on the current stream of the communicator's device wait for the transfer.

        Does not block the host.

        Returns:
            This rank's destination shard (or ``{name: shard}``), None outside the destination.
        """
        with self._cupy.cuda.Device(self._device):
            self._cupy.cuda.get_current_stream().wait_event(self._end)
        return self._result()

    def done(self) -> bool:
        """True once the device has finished it."""
        return bool(self._end.done)

    def synchronize(self) -> Any:
        """Like :meth:`wait`, but block the host until the transfer is finished."""
        self._end.synchronize()
        return self.wait()


class Mover:
    """Executes one plan any number of times, on a separate stream.

    Every rank of the communicator must create one, even if the plan does not name it.

    Args:
        plan: its ranks are ranks of the communicator.
        comm: a ``cupy.cuda.nccl.NcclCommunicator``. The Mover works on its device, whichever is current. All ranks must
            order its other uses the same way relative to the Mover's transfers.

    Raises:
        ArgumentError: the plan names ranks that the communicator lacks. DisagreementError: ranks have different plans.
        PlanError: the plan is wrong (see :func:`reshard.check_plan`), or exceeds its ``staging_bytes`` on a rank. All
            ranks raise an error if one does.
    """

    def __init__(self, plan: Plan, comm: Any) -> None:
        import cupy
        from cupy.cuda import nccl

        if not isinstance(plan, Plan):
            raise ArgumentError(f"a Mover needs a Plan, not {type(plan).__name__}")
        if not getattr(nccl, "available", True):
            raise ArgumentError("this CuPy was built without NCCL: install cupy-cuda12x or -13x with nvidia-nccl")
        self.plan, self._comm = plan, comm
        self._cupy, self._nccl = cupy, nccl
        self._rank, size, self._device = comm.rank_id(), comm.size(), comm.device_id()
        self._runner: RoundRunner | None = None
        self._has_moved = False
        self._under_way: deque[tuple[Any, Any]] = deque()  # (end of a transfer, its arrays)
        with cupy.cuda.Device(self._device):  # a stream can be used only while its device is current
            self._stream: Any = cupy.cuda.Stream(non_blocking=True)
            self._has_announced = False  # whether this rank can execute the plan
            try:
                self._prepare(size)
                messages = self._gather(False, size)
            except BaseException:  # also KeyboardInterrupt: the other ranks wait
                if not self._has_announced:
                    self._gather(True, size)
                raise
        failed = [rank for rank, message in enumerate(messages) if message[0]]
        if failed:
            raise PlanError(f"ranks {format_ranks(failed)} cannot execute this plan; their own errors give the reason")
        other = [rank for rank, message in enumerate(messages) if message != messages[0]]
        if other:
            raise DisagreementError(
                f"the plan of ranks {format_ranks(other)} differs from that of rank 0; pass the same plan on all ranks"
            )

    def _prepare(self, size: int) -> None:
        """Check the plan and allocate what its transfers use."""
        plan = self.plan
        if plan.ranks[-1] >= size:
            raise ArgumentError(f"the plan names rank {plan.ranks[-1]}; the communicator has {size} ranks")
        for spec in plan.tensors:
            if spec.codec is not None:
                raise ArgumentError(f"reshard.cupy does not support codecs; tensor {spec} is encoded")
        ensure_checked(plan)
        if self._rank in plan.ranks:
            with self._stream:  # CuPy reuses memory in the order of the stream that it was allocated on
                self._runner = _make_runner(plan, self._rank, _CupyMemory(self._cupy))

    def _gather(self, has_failed: bool, size: int) -> list[bytes]:
        """The announcements of all ranks: a byte that says whether the rank cannot execute its plan, then a digest."""
        cupy = self._cupy
        message = bytes([has_failed]) + hashlib.sha256(self.plan.plan_hash.encode()).digest()
        with self._stream:
            mine = cupy.asarray(np.frombuffer(message, dtype=np.uint8))
            every = cupy.empty(size * len(message), dtype=cupy.uint8)
            arguments = _address(mine), _address(every), len(message), self._nccl.NCCL_UINT8, self._stream.ptr
            self._has_announced = True
            self._comm.allGather(*arguments)
            end = self._stream.record()
            while not end.done:  # Ctrl-C would not end a wait in CUDA
                time.sleep(PLAN_POLL_INTERVAL_SECONDS)
            return [bytes(message_of_rank) for message_of_rank in cupy.asnumpy(every).reshape(size, len(message))]

    @property
    def staging_allocated_bytes(self) -> int:
        """Bytes allocated for staging; at most the plan's ``staging_bytes``."""
        return 0 if self._runner is None else self._runner.allocated_bytes

    def __call__(self, tensor: Any = None, *, out: Any = None) -> Any:
        """Start a transfer and let the current stream wait for it; see :meth:`start`."""
        return self.start(tensor, out=out).wait()

    def start(self, tensor: Any = None, *, out: Any = None) -> Handle:
        """Enqueue one transfer on the Mover's stream, after the work that the current stream already has.

        The first call blocks until all ranks of the plan have made theirs, and compares whether their arrays fit. So it
        cannot be captured in a CUDA graph.

        Args:
            tensor: this rank's source shard, or ``{name: shard}`` for a plan of named tensors; None outside the source.
                It must not change until the transfer is finished.
            out: the array to receive the destination shard, or ``{name: array}``; allocated if omitted.

        Raises:
            ArgumentError: an array does not fit the plan, or is on another device than the communicator. In the first
                call, all ranks raise an error if one does. Later, the other ranks are not notified and wait for this
                one.
        """
        cupy, plan = self._cupy, self.plan
        with cupy.cuda.Device(self._device):
            error: BaseException | None = None
            try:
                src, dst = self._arrays(tensor, out)
            except BaseException as failed:  # also KeyboardInterrupt
                error = failed
            if not self._has_moved and self._runner is not None:
                self._agree_on_arrays(error is not None)
            if error is not None:
                raise error
            self._has_moved = True
            self._stream.wait_event(cupy.cuda.get_current_stream().record())
            with self._stream:
                if self._runner is not None:
                    self._runner.run(src, dst, self._exchange)
                end = self._stream.record()
        while self._under_way and self._under_way[0][0].done:
            self._under_way.popleft()
        # Keep the arrays alive: CuPy's memory pool does not know that this stream uses them.
        self._under_way.append((end, (src, dst)))
        is_named = plan.tensors[0].name is not None
        names = [spec.name for spec in plan.tensors]
        return Handle(cupy, self._device, end, lambda: dict(zip(names, dst, strict=True)) if is_named else dst[0])

    def _arrays(self, tensor: Any, out: Any) -> tuple[list[Array | None], list[Array | None]]:
        """The arrays to send and to write, checked."""
        cupy, plan = self._cupy, self.plan
        program = None if self._runner is None else self._runner.program
        nowhere: Sequence[None] = (None,) * len(plan.tensors)
        src = self._check(plan.by_tensor(tensor), nowhere if program is None else program.src_shapes, "source")
        shapes = nowhere if program is None else program.dst_shapes
        outs = [
            self._empty(shape, spec.dtype) if given is None and shape is not None else given
            for given, shape, spec in zip(plan.by_tensor(out), shapes, plan.tensors, strict=True)
        ]
        dst = self._check(outs, shapes, "destination")
        for given in plan.by_tensor(out):  # only arrays of the caller can overlap a source
            if given is not None and any(item is not None and cupy.may_share_memory(given, item) for item in src):
                raise ArgumentError("out shares memory with a source; pass a separate array")
        return src, dst

    def _agree_on_arrays(self, has_failed: bool) -> None:
        """Exchange, through the plan's first rank, whether each rank's arrays fit. Raise if those of another do not.

        Only ranks of the plan take part.
        """
        cupy, ranks = self._cupy, self.plan.ranks
        first = ranks[0]
        others = [rank for rank in ranks if rank != first]
        with self._stream:
            if self._rank == first:
                every = cupy.asarray(np.full(len(ranks), has_failed, dtype=np.uint8))
                self._exchange([(every[i : i + 1], rank) for i, rank in enumerate(ranks) if rank != first], [])
                self._exchange([], [(every, rank) for rank in others])
            else:
                mine = cupy.asarray(np.full(1, has_failed, dtype=np.uint8))
                every = cupy.empty(len(ranks), dtype=cupy.uint8)
                self._exchange([], [(mine, first)])
                self._exchange([(every, first)], [])
            flags = cupy.asnumpy(every)
        failed = [rank for rank, flag in zip(ranks, flags, strict=True) if flag]
        if failed and not has_failed:
            raise ArgumentError(
                f"ranks {format_ranks(failed)} pass arrays that do not fit this plan; their own errors give the reason"
            )

    def _empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        try:
            return self._cupy.empty(shape, dtype=dtype)
        except (TypeError, ValueError) as error:  # NumPy does not know the dtype, or CuPy does not
            if dtype not in UNSIGNED:
                raise ArgumentError(f"CuPy cannot make an array of {dtype}; pass out=") from error
            return self._cupy.empty(shape, dtype=UNSIGNED[dtype])

    def _check(self, arrays: Sequence[Any], shapes: Sequence[tuple[int, ...] | None], side: str) -> list[Any]:
        for array, shape, spec in zip(arrays, shapes, self.plan.tensors, strict=True):
            self._check_one(array, shape, spec, side)
        return list(arrays)

    def _check_one(self, array: Any, shape: tuple[int, ...] | None, spec: TensorSpec, side: str) -> None:
        what = "the tensor" if spec.name is None else f"tensor {spec.name!r}"
        if (array is None) != (shape is None):
            raise ArgumentError(
                f"{what}: rank {self._rank} is in the {side} layout, but passes None"
                if array is None
                else f"{what}: rank {self._rank} is not in the {side} layout and must pass None"
            )
        if array is None:
            return
        if not isinstance(array, self._cupy.ndarray):
            raise ArgumentError(f"{what}: rank {self._rank} passes {type(array).__name__}, not a CuPy array")
        if array.device.id != self._device:
            raise ArgumentError(
                f"{what}: rank {self._rank} passes an array on device {array.device.id}, but the communicator of this "
                f"Mover is on device {self._device}; the arrays of a transfer must be on the communicator's device"
            )
        if tuple(array.shape) != shape or dtype_name(array.dtype) not in (spec.dtype, UNSIGNED.get(spec.dtype)):
            raise ArgumentError(
                f"{what}: rank {self._rank} passes {dtype_name(array.dtype)} {list(array.shape)}, but its shard in the "
                f"{side} is {spec.dtype} {list(shape or ())}"
            )

    def _exchange(self, recvs: Sequence[Posted], sends: Sequence[Posted], broadcasts: Sequence[Posted] = ()) -> None:
        """Post one round as one group. Its rounds have no broadcasts."""
        assert not broadcasts
        kind, stream = self._nccl.NCCL_UINT8, self._stream.ptr
        try:
            self._nccl.groupStart()  # a KeyboardInterrupt may come as it returns, with the group begun
            for buffer, peer in recvs:
                self._comm.recv(_address(buffer), buffer.size, kind, peer, stream)
            for buffer, peer in sends:
                self._comm.send(_address(buffer), buffer.size, kind, peer, stream)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the cause
                self._nccl.groupEnd()
            raise
        self._nccl.groupEnd()


def _make_runner(plan: Plan, rank: int, memory: _CupyMemory) -> RoundRunner:
    itemsizes = [spec.itemsize for spec in plan.tensors]
    runner = RoundRunner(
        build_program(plan, rank), find_rounds(plan), memory, itemsizes, staging_bytes=plan.staging_bytes
    )
    runner.warm_up()
    return runner


def _address(array: Array) -> int:
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])


class _CupyMemory:
    """Implements :class:`~reshard.runtime.rounds.device_interfaces.Memory` for CuPy arrays on the current device."""

    device = None

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def empty(self, nbytes: int) -> Array:
        return self._cupy.empty(nbytes, dtype=self._cupy.uint8)

    def view(self, array: Array, at: Slices) -> Array:
        return array[(..., *at)]

    def is_contiguous(self, array: Array) -> bool:
        return bool(array.flags.c_contiguous)

    def itemsize(self, array: Array) -> int:
        return int(array.itemsize)

    def address(self, array: Array) -> int:
        return _address(array)

    def flat(self, array: Array) -> Array:
        return array.reshape(-1).view(self._cupy.uint8)

    def copy(self, target: Array, source: Array) -> None:
        target[...] = source

    def pack(self, views: Sequence[Array], buffer: Array) -> None:
        for view, part in _parts(views, buffer):
            part[...] = view

    def unpack(self, buffer: Array, views: Sequence[Array]) -> None:
        for view, part in _parts(views, buffer):
            view[...] = part


def _parts(views: Sequence[Array], buffer: Array) -> list[tuple[Array, Array]]:
    """Pairs each view with its part of the buffer, in the view's shape and dtype."""
    parts, at = [], 0
    for view in views:
        parts.append((view, buffer[at : at + view.nbytes].view(view.dtype).reshape(view.shape)))
        at += view.nbytes
    return parts
