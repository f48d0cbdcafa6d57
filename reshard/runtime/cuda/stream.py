"""Run transfers on a GPU, in rounds, on a stream of their own that runs concurrently with the caller's stream.

The host only enqueues work. A transfer starts after all work that the caller's stream already holds. Work that the
caller enqueues after ``handle.wait()`` starts after the transfer. A CUDA graph can capture a Mover's transfers, because
they never block on the device or depend on tensor values, and allocate only from the pool of the graph.

Transfers between the same ranks share a communicator and its stream, so all ranks must start them in the same order, as
in any NCCL program.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from reshard.errors import ArgumentError
from reshard.plan import Plan
from reshard.runtime.cpu.staging import TorchMemory
from reshard.runtime.program import RankProgram
from reshard.runtime.rounds.device_interfaces import PACK, UNPACK, Copier, RoundExchange, RoundStreams
from reshard.runtime.rounds.round_assignment import find_large_rounds
from reshard.runtime.rounds.runner import RoundRunner


class Mark(Protocol):
    """A point on a stream, like a CUDA event."""

    def query(self) -> bool:
        """Whether the device has reached this point."""

    def wait(self) -> None:
        """Make later work on the caller's current stream wait for this point."""

    def synchronize(self) -> None:
        """Block the host until the device has reached this point."""


class TransferStream(Protocol):
    """A stream that transfers run on, separate from the caller's.

    Attributes:
        rounds: the streams that pack and unpack for its transfers.
    """

    rounds: RoundStreams

    def enqueue(self, work: Callable[[], None], arrays: Sequence[torch.Tensor]) -> Mark | None:
        """Enqueue work that starts after all work that the caller's stream already holds.

        Args:
            work: function that enqueues operations on the current stream.
            arrays: tensors that these operations use.

        Returns:
            Mark at the end of the work; None during graph capture.
        """

    def join(self) -> None:
        """Make the caller's stream wait for all work enqueued so far."""


class CudaMark:
    """A CUDA event that is safe to query while another thread captures a graph."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()  # type: ignore[no-untyped-call]

    def query(self) -> bool:
        """See :class:`Mark`; False while a capture forbids the query."""
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            if "captur" in str(error):
                return False
            raise

    def wait(self) -> None:
        """See :class:`Mark`."""
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """See :class:`Mark`."""
        self._event.synchronize()


class CudaRoundStreams:
    """One high-priority stream for packing and one for unpacking. The exchange runs on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._streams: dict[str, Any] = {stream: torch.cuda.Stream(device, priority=-1) for stream in (PACK, UNPACK)}

    def on(self, stream: str) -> contextlib.AbstractContextManager[Any]:
        """See :class:`~reshard.runtime.rounds.device_interfaces.RoundStreams`."""
        return torch.cuda.stream(self._streams[stream])

    def mark(self) -> Any:
        """See :class:`~reshard.runtime.rounds.device_interfaces.RoundStreams`."""
        event = torch.cuda.Event()
        event.record()  # type: ignore[no-untyped-call]
        return event

    def wait(self, mark: Any) -> None:
        """See :class:`~reshard.runtime.rounds.device_interfaces.RoundStreams`."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)


class CudaTransferStream:
    """A high-priority stream on a CUDA device, with two more for packing and unpacking.

    Each communicator has one, which its Movers share. Torch has 32 streams of a priority and hands them out in turn.
    If every Mover had its own, both directions of a large pipeline would share a stream. Then a receive that waits for
    another rank would block the send for which that rank waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._place = _place(device)
        self._stream: Any = torch.cuda.Stream(device, priority=-1)
        self.rounds: RoundStreams = CudaRoundStreams(device)

    def enqueue(self, work: Callable[[], None], arrays: Sequence[torch.Tensor]) -> Mark | None:
        """See :class:`TransferStream`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._place))
        try:
            return self._enqueue(work, arrays)
        except BaseException:
            if torch.cuda.is_current_stream_capturing():
                self.join()  # otherwise the capture could not end, and its error would hide this one
            raise

    def _enqueue(self, work: Callable[[], None], arrays: Sequence[torch.Tensor]) -> Mark | None:
        with torch.cuda.stream(self._stream):
            work()
            if torch.cuda.is_current_stream_capturing():
                return None
            for array in arrays:
                array.record_stream(self._stream)  # the allocator must not reuse the memory before the work ends
            return CudaMark()

    def join(self) -> None:
        """See :class:`TransferStream`."""
        torch.cuda.current_stream(self._place).wait_stream(self._stream)


_RELAXED = 2  # cudaStreamCaptureModeRelaxed


def allow_queries_during_capture() -> bool:
    """Allow this thread to query events, and to free memory, while another thread captures a graph.

    In CUDA's default capture mode, either from any thread of the process invalidates the capture. Warns once if the
    mode of this thread cannot be changed.

    Returns:
        Whether the mode is changed. False as long as CUDA is not initialized: there is nothing to query yet, and the
        caller must try again later.
    """
    if not torch.cuda.is_initialized():
        return False
    exchange = _find_mode_exchange()
    return exchange is not None and exchange(ctypes.byref(ctypes.c_int(_RELAXED))) == 0


@functools.cache
def _find_mode_exchange() -> Callable[[Any], int] | None:
    """The function that changes the capture mode of a thread, from the CUDA runtime or else from the driver."""
    for library, name in (
        (f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}", "cudaThreadExchangeStreamCaptureMode"),
        ("libcudart.so", "cudaThreadExchangeStreamCaptureMode"),
        ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
    ):
        with contextlib.suppress(OSError, AttributeError):
            exchange: Callable[[Any], int] = getattr(ctypes.CDLL(library), name)
            return exchange
    with contextlib.suppress(RuntimeWarning):  # where warnings are errors, this thread must still go on
        warnings.warn(
            "neither libcudart nor libcuda.so.1 can be loaded, so polling for the end of transfers invalidates graph "
            'captures of other threads: capture with torch.cuda.graph(..., capture_error_mode="thread_local")',
            RuntimeWarning,
            stacklevel=2,
        )
    return None


def current_stream_handle(device: torch.device) -> int:
    """The ``cudaStream_t`` handle of the current stream of a device; 0 on devices without streams."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(_place(device)).cuda_stream)


def _place(device: torch.device) -> torch.device | int:
    """A device by its index, because torch looks up an index faster."""
    return device if device.index is None else device.index


def is_capturing() -> bool:
    """Whether a CUDA graph captures the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture() -> None:
    """Raise ArgumentError if a CUDA graph captures the current stream."""
    if is_capturing():
        raise ArgumentError(
            "a CUDA graph cannot capture a call of reshard: make a Mover, start it once with the same arrays, and "
            "capture the next start"
        )


#: Class of the transfer stream, by device type. Transfers on other device types run in threads.
STREAMS: dict[str, Callable[[torch.device], TransferStream]] = {"cuda": CudaTransferStream}


def current_device(device_type: str) -> torch.device:
    """The device of this type that this process uses."""
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)


def find_copier(device: torch.device) -> Copier | None:
    """The kernel that packs and unpacks on a device. If there is none: None, and boxes are copied one by one."""
    if device.type != "cuda":
        return None
    try:
        from reshard.runtime.cuda.pack_kernel import RegionCopier
    except ImportError:  # torch without Triton
        return None
    return RegionCopier(device)


def make_runner(plan: Plan, program: RankProgram, device_type: str) -> RoundRunner | None:
    """Make the runner of a rank's rounds on the current device; None if transfers of this device type run in threads.

    Raises:
        PlanError: the buffers of the rounds would exceed the plan's ``staging_bytes``.
    """
    if device_type not in STREAMS:
        return None
    device = current_device(device_type)
    runner = RoundRunner(
        program,
        find_large_rounds(plan),
        TorchMemory(device),
        [1 if spec.codec is not None else spec.itemsize for spec in plan.tensors],
        find_copier(device),
        plan.staging_bytes,
    )
    runner.warm_up()
    return runner


@runtime_checkable
class Breakable(Protocol):
    """An exchange whose connections may fail."""

    def find_error(self) -> str | None:
        """The reason why the exchange failed; None if it works."""


class StreamRunner:
    """Starts the transfers of one program on its stream.

    All of them start after the work that the current stream holds now: the upload of the tables, and whatever used the
    memory of the buffer before. Later transfers may start on other streams.
    """

    def __init__(self, runner: RoundRunner, exchange: RoundExchange, streams: TransferStream) -> None:
        self._runner, self._exchange, self.streams = runner, exchange, streams
        streams.enqueue(_no_work, [])

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated for buffers and tables."""
        return self._runner.allocated_bytes

    def find_error(self) -> str | None:
        """The reason why the connections failed; None if they work."""
        return self._exchange.find_error() if isinstance(self._exchange, Breakable) else None

    def start(self, src: Sequence[torch.Tensor | None], dst: Sequence[torch.Tensor | None]) -> Mark | None:
        """Enqueue one transfer.

        Args:
            src, dst: one local array per tensor, as :func:`~reshard.runtime.cpu.staging.view_as_bits` gives it.

        Returns:
            Mark at the end of the transfer; None during graph capture.
        """
        # A later call may release the buffer while the device still uses it, so the allocator must know of it as well.
        used = [array for array in (self._runner.buffer(), *src, *dst) if array is not None]
        mark = self.streams.enqueue(lambda: self._runner.run(src, dst, self._exchange, self.streams.rounds), used)
        if mark is None:
            self._runner.keep()
            _captured.add(self._runner)
        return mark


def _no_work() -> None:
    """Enqueue nothing."""


#: Runners whose buffers and tables a captured graph uses. They are never freed, because a graph can always be replayed.
_captured: set[RoundRunner] = set()
