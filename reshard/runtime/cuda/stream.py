"""Transfers on a GPU: put on a stream of their own, in rounds, while the caller's stream goes on.

The processor only puts work on streams. A transfer begins when what the caller had put on its stream is done, and what
the caller puts there behind ``handle.wait()`` begins when the transfer is done. A Mover's transfers can be captured in
a CUDA graph: nothing in them waits for the device, allocates, or depends on values.

Transfers between the same ranks share a communicator and its stream, so all ranks start them in the same order, as in
any NCCL program.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from reshard.plan.model import Plan
from reshard.runtime.cpu.staging import TorchMemory
from reshard.runtime.program import Program
from reshard.runtime.rounds.executor import RoundRunner
from reshard.runtime.rounds.memory import PACK, UNPACK, Copier, Exchange, Lanes, OneLane
from reshard.runtime.rounds.schedule import find_rounds


class Mark(Protocol):
    """A point on a stream."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def wait(self) -> None:
        """Let what the caller puts on its current stream from here on begin behind it."""

    def synchronize(self) -> None:
        """Block until the device has reached it."""


class Streams(Protocol):
    """A stream beside the caller's."""

    def put(self, work: Callable[[], None], arrays: Sequence[torch.Tensor]) -> Mark | None:
        """Put work on the stream, behind what the caller has put on its own.

        Args:
            work: puts things on the current stream. arrays: what it uses.

        Returns:
            Its end; None while a graph is captured.
        """

    def join(self) -> None:
        """Let the caller's stream wait for all that was put there."""


class CudaMark:
    """An event, which may be queried while a graph is captured elsewhere in the process."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()  # type: ignore[no-untyped-call]

    def query(self) -> bool:
        """See :class:`Mark`; while a capture forbids to ask, not yet."""
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


class CudaStreams:
    """On a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device, priority=-1)

    def put(self, work: Callable[[], None], arrays: Sequence[torch.Tensor]) -> Mark | None:
        """See :class:`Streams`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()
            if torch.cuda.is_current_stream_capturing():
                return None
            for array in arrays:
                array.record_stream(self._stream)  # its memory is not given away before the stream is there
            return CudaMark()

    def join(self) -> None:
        """See :class:`Streams`."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


_RELAXED = 2  # cudaStreamCaptureModeRelaxed


def allow_queries_during_capture() -> bool:
    """Let this thread query events while another one captures a graph; whether that is settled for good.

    CUDA's default mode of capture forbids such calls in every thread of the process, and they break the capture.
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
    """What C functions take for the current stream of a device; 0 where there are none."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


#: How transfers of each type of device are put on streams; types that are not here move in lanes, by threads.
STREAMS: dict[str, Callable[[torch.device], Streams]] = {"cuda": CudaStreams}


def current_device(kind: str) -> torch.device:
    """The device that this process uses of a type."""
    if kind == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(kind)


def find_copier(device: torch.device) -> Copier | None:
    """What packs and unpacks on a device in few launches; None where boxes are copied one by one."""
    if device.type != "cuda":
        return None
    try:
        from reshard.runtime.cuda.pack_kernel import RegionCopier
    except ImportError:  # torch without Triton
        return None
    return RegionCopier(device)


class CudaLanes:
    """Packing and unpacking on streams of their own, of high priority; the exchange is on the caller's."""

    def __init__(self, device: torch.device) -> None:
        self._streams: dict[str, Any] = {lane: torch.cuda.Stream(device, priority=-1) for lane in (PACK, UNPACK)}

    def on(self, lane: str) -> contextlib.AbstractContextManager[Any]:
        """See :class:`~reshard.runtime.rounds.memory.Lanes`."""
        return torch.cuda.stream(self._streams[lane])

    def mark(self) -> Any:
        """See :class:`~reshard.runtime.rounds.memory.Lanes`."""
        event = torch.cuda.Event()
        event.record()  # type: ignore[no-untyped-call]
        return event

    def wait(self, mark: Any) -> None:
        """See :class:`~reshard.runtime.rounds.memory.Lanes`."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)


def find_lanes(device: torch.device) -> Lanes:
    """Where rounds on a device are put."""
    return CudaLanes(device) if device.type == "cuda" else OneLane()


def make_runner(plan: Plan, program: Program, device_type: str) -> RoundRunner | None:
    """What runs a rank's part on the current device of a type; None on the processor.

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
        find_lanes(device),
    )
    runner.warm_up()
    return runner


@runtime_checkable
class Breakable(Protocol):
    """What messages go over, which may break."""

    def find_error(self) -> str | None:
        """What broke it, None if nothing did."""


class StreamTransfers:
    """The transfers of one program."""

    def __init__(self, runner: RoundRunner, exchange: Exchange, streams: Streams) -> None:
        self._runner, self._exchange, self.streams = runner, exchange, streams

    @property
    def allocated_bytes(self) -> int:
        """Bytes held beyond the shards."""
        return self._runner.allocated_bytes

    def find_error(self) -> str | None:
        """What broke the connections, None if nothing did."""
        return self._exchange.find_error() if isinstance(self._exchange, Breakable) else None

    def start(self, src: Sequence[torch.Tensor | None], dst: Sequence[torch.Tensor | None]) -> Mark | None:
        """Put one transfer on the stream; arrays are carriers (see :func:`~reshard.runtime.cpu.staging.carrier`)."""
        used = [array for array in (*src, *dst) if array is not None]
        mark = self.streams.put(lambda: self._runner.run(src, dst, self._exchange), used)
        if mark is None:
            _captured.add(self._runner)
        return mark


#: Whose buffers and tables a graph uses, which may be replayed as long as the process lives.
_captured: set[RoundRunner] = set()
