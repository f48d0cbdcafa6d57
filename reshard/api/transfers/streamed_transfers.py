"""Start the transfers of a plan on a stream of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from reshard.api.arrays.memory_in_use import reserve_until_over
from reshard.api.preparation.agreed_plan import AgreedPlan
from reshard.api.transfers.handle import StreamHandle, StreamTransferState
from reshard.coordination import NCCL_ROOT_CAUSE_GRACE_SECONDS, Monitor
from reshard.runtime.cpu.staging import view_as_bits
from reshard.runtime.cuda.device_encoding import DeviceDecodedTarget
from reshard.runtime.cuda.nccl_library import NcclError
from reshard.runtime.cuda.stream import STREAMS, StreamRunner, is_capturing


class StreamedTransfers:
    """The transfers of one plan on the stream of a communicator.

    Args:
        agreed: the plan and this rank's part of it, with a runner.
        communicator_index: index of the NCCL communicator to use, among those between the ranks of the call group.
        timeout_seconds: limit for connecting the ranks, and of each transfer.
        keeps_runner: leave the buffers and tables with the call group, for the next call.
    """

    def __init__(self, agreed: AgreedPlan, communicator_index: int, timeout_seconds: float, keeps_runner: bool) -> None:
        runner, self._call_group, self._generation = agreed.runner, agreed.call_group, agreed.decision.generation
        assert runner is not None
        self.timeout_seconds = timeout_seconds
        if keeps_runner:
            if self._call_group.idle_runner is not None and self._call_group.idle_runner is not runner:
                self._call_group.idle_runner.release()
            self._call_group.idle_runner = runner
        device = runner.memory.device
        exchange = self._call_group.exchange(
            self._generation, device, communicator_index, runner.rounds, timeout_seconds
        )
        streams = STREAMS[device.type](device) if exchange is None else exchange.streams
        self.on_stream: StreamRunner | None = StreamRunner(runner, exchange or _no_exchange, streams)
        self._call_group.group.resources.add_user(self)

    @property
    def order(self) -> object:
        """See :attr:`QueuedTransfers.order`."""
        return self

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated for buffers and tables."""
        return 0 if self.on_stream is None else self.on_stream.allocated_bytes

    def start(self, src: Sequence[torch.Tensor | None], dst: Sequence[Any], finish: Callable[[], Any]) -> StreamHandle:
        """Enqueue a transfer of checked arrays. ``finish`` returns the result of the handle."""
        call_group, on_stream = self._call_group, self.on_stream
        call_group.check_usable(self._generation)
        assert on_stream is not None
        deadline = time.monotonic() + self.timeout_seconds
        state = StreamTransferState(call_group, self._generation, on_stream, deadline)
        handle = StreamHandle(state, finish, on_stream)
        Monitor.of(call_group.group).watch(state)  # before the start, which may block on a rank that has died
        try:
            received = [view_as_bits(item.encoded if isinstance(item, DeviceDecodedTarget) else item) for item in dst]
            state.begin_at(on_stream.start(list(map(view_as_bits, src)), received))
        except BaseException as error:  # the other ranks wait for this one
            if is_capturing():  # nothing has run, and an abort would spoil the capture and hide this error
                Monitor.of(call_group.group).forget(state)
                raise
            if isinstance(error, NcclError):
                state.done.wait(NCCL_ROOT_CAUSE_GRACE_SECONDS)
            known = call_group.fail(self._generation, error)
            state.stop(known)
            if not isinstance(error, Exception):
                raise
            raise known from error
        reserve_until_over(self, state.leaves_memory, src, dst)
        return handle

    def close(self) -> None:
        """Do nothing: the device finishes what was enqueued."""

    def finish(self, timeout_seconds: float | None) -> None:
        """Do nothing: handles wait for their transfers."""

    def release(self) -> None:
        """Called when the group closes: drop the connections. Unfinished transfers keep what they use."""
        self.on_stream = None


def _no_exchange(recvs: Sequence[Any], sends: Sequence[Any], broadcasts: Sequence[Any]) -> None:
    """The exchange of a plan with one rank, which has no messages."""
