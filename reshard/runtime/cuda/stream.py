"""Transfers on a GPU: they run in rounds on a separate stream, concurrently with the caller's stream.

The host only enqueues work. A transfer starts after the work that the caller's stream already has, and work that the
caller enqueues after ``handle.wait()`` starts after the transfer. A Mover's transfers can be captured in a CUDA graph:
they never wait for the device, allocate memory, or depend on values.

Transfers between the same ranks share a communicator and its stream, so all ranks must start them in the same order, as
in any NCCL program.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from reshard.plan import Plan
from reshard.runtime.cpu.staging import TorchMemory
from reshard.runtime.program import Program
from reshard.runtime.rounds.executor import RoundRunner
from reshard.runtime.rounds.memory import PACK, UNPACK, Copier, Exchange, OneStream, RoundStreams
from reshard.runtime.rounds.schedule import find_rounds


class Mark(Protocol):
    """A point on a stream."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def wait(self) -> None:
        """Let later work on the caller's current stream wait for it."""

    def synchronize(self) -> None:
        """Block until the device has reached it."""


class TransferStream(Protocol):
    """A stream that transfers run on, separate from the caller's."""

    def enqueue(self, work: Callable[[], None], arrays: Sequence[torch.Tensor]) -> Mark | None:
        """Enqueue work after the work that the caller's stream already has.

        Args:
            work: enqueues operations on the current stream. arrays: the tensors that it uses.

        Returns:
            The end of the work; None while a graph is captured.
        """

    def join(self) -> None:
        """Let the caller's stream wait for all work enqueued so far."""


class CudaMark:
    """A CUDA event. It may be queried while another thread captures a graph."""

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


class CudaTransferStream:
    """A high-priority stream on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device, priority=-1)

    def enqueue(self, work: Callable[[], None], arrays: Sequence[torch.Tensor]) -> Mark | None:
        """See :class:`TransferStream`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()
            if torch.cuda.is_current_stream_capturing():
                return None
            for array in arrays:
                array.record_stream(self._stream)  # the allocator must not reuse its memory before
            return CudaMark()

    def join(self) -> None:
        """See :class:`TransferStream`."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


_RELAXED = 2  # cudaStreamCaptureModeRelaxed


def allow_queries_during_capture() -> bool:
    """Let this thread query events while another thread captures a graph.

    In CUDA's default capture mode such a call, from any thread of the process, invalidates the capture.

    Returns:
        False if CUDA is not initialized yet, so that the caller must try again later.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return not torch.cuda.is_available()
    mode = ctypes.c_int(_RELAXED)
    for name in (f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}", "libcudart.so"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(name).cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            return True
    return True


def current_stream_handle(device: torch.device) -> int:
    """The ``cudaStream_t`` handle of the current stream of a device; 0 on devices without streams."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


#: The transfer stream of each device type. Transfers on other device types run in threads.
STREAMS: dict[str, Callable[[torch.device], TransferStream]] = {"cuda": CudaTransferStream}


def current_device(device_type: str) -> torch.device:
    """The device of a type that this process uses."""
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)


def find_copier(device: torch.device) -> Copier | None:
    """The kernel that packs and unpacks on a device; None if there is none and boxes are copied one by one."""
    if device.type != "cuda":
        return None
    try:
        from reshard.runtime.cuda.pack_kernel import RegionCopier
    except ImportError:  # torch without Triton
        return None
    return RegionCopier(device)


class CudaRoundStreams:
    """High-priority streams for packing and for unpacking; the exchange runs on the stream that is current."""

    def __init__(self, device: torch.device) -> None:
        self._streams: dict[str, Any] = {stream: torch.cuda.Stream(device, priority=-1) for stream in (PACK, UNPACK)}

    def on(self, stream: str) -> contextlib.AbstractContextManager[Any]:
        """See :class:`~reshard.runtime.rounds.memory.RoundStreams`."""
        return torch.cuda.stream(self._streams[stream])

    def mark(self) -> Any:
        """See :class:`~reshard.runtime.rounds.memory.RoundStreams`."""
        event = torch.cuda.Event()
        event.record()  # type: ignore[no-untyped-call]
        return event

    def wait(self, mark: Any) -> None:
        """See :class:`~reshard.runtime.rounds.memory.RoundStreams`."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)


def find_round_streams(device: torch.device) -> RoundStreams:
    """The streams that run the rounds on a device."""
    return CudaRoundStreams(device) if device.type == "cuda" else OneStream()


def make_runner(plan: Plan, program: Program, device_type: str) -> RoundRunner | None:
    """The runner of a rank's rounds on the current device of a type; None if transfers run in threads there.

    Raises:
        PlanError: its buffers would exceed the plan's ``staging_bytes``.
    """
    if device_type not in STREAMS:
        return None
    device = current_device(device_type)
    runner = RoundRunner(
        program,
        find_rounds(plan),
        TorchMemory(device),
        [spec.itemsize for spec in plan.tensors],
        find_copier(device),
        plan.staging_bytes,
        find_round_streams(device),
    )
    runner.warm_up()
    return runner


@runtime_checkable
class Breakable(Protocol):
    """An exchange whose connections may fail."""

    def find_error(self) -> str | None:
        """Why it failed; None if it works."""


class StreamTransfers:
    """Starts the transfers of one program on its stream."""

    def __init__(self, runner: RoundRunner, exchange: Exchange, streams: TransferStream) -> None:
        self._runner, self._exchange, self.streams = runner, exchange, streams

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated for buffers and tables."""
        return self._runner.allocated_bytes

    def find_error(self) -> str | None:
        """Why the connections failed; None if they work."""
        return self._exchange.find_error() if isinstance(self._exchange, Breakable) else None

    def start(self, src: Sequence[torch.Tensor | None], dst: Sequence[torch.Tensor | None]) -> Mark | None:
        """Enqueue one transfer.

        Args:
            src, dst: one local array per tensor, as carriers (see :func:`~reshard.runtime.cpu.staging.carrier`).

        Returns:
            Its end; None while a graph is captured.
        """
        used = [array for array in (*src, *dst) if array is not None]
        mark = self.streams.enqueue(lambda: self._runner.run(src, dst, self._exchange), used)
        if mark is None:
            _captured.add(self._runner)
        return mark


#: Runners whose buffers and tables a captured graph uses. They are never freed: the graph may be replayed at any time.
_captured: set[RoundRunner] = set()
