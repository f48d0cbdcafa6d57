"""Transfers between stages. Each channel (an edge and a direction) has one :class:`~reshard.Mover`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from reshard.api.mover import Mover, check_transfers, fail_transfers, start_checked
from reshard.api.transfers.handle import Handle, PostedTransfer, result_of
from reshard.coordination import Group
from reshard.errors import ArgumentError
from reshard.plan import Plan
from reshard.planner import Strategy
from reshard.runtime.cuda.stream import STREAMS
from reshard.sharding import Layout, Mesh, TensorSpec
from reshard.topology import Topology

from .. import torch_compat
from ..ir.actions import StageChannel
from ..pipeline import Edge, Pipeline
from ..transfer_costs import plan_encoded

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ChannelPlan:
    """The tensors and the plan of a channel. The plan is None if no rank has to send data to another one."""

    channel: StageChannel
    tensors: tuple[TensorSpec, ...]
    plan: Plan | None

    def __str__(self) -> str:
        what = ", ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in self.tensors) or "no tensors"
        how = "nothing moves" if self.plan is None else f"{self.plan.num_messages} messages of {self.plan.strategy}"
        return f"{self.channel}: {what}, {how}"


def find_device_type(modules: Mapping[int, torch.nn.Module]) -> str:
    """The device type of the parameters and buffers of a rank's stages; "cpu" if the stages have none.

    Raises:
        ArgumentError: the parameters and buffers are on several device types.
    """
    kinds: dict[str, str] = {}
    for stage, module in modules.items():
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            kinds.setdefault(tensor.device.type, f"{name!r} of stage {stage} is on {tensor.device}")
    if len(kinds) > 1:
        raise ArgumentError(f"the stages of a rank must be on one type of device: {', '.join(kinds.values())}")
    return next(iter(kinds), "cpu")


def plan_channels(
    pipeline: Pipeline,
    pp_rank_of_stage: Iterable[int],
    topology: Topology,
    strategy: str | Strategy | None,
    *,
    signal_only: bool = False,
) -> list[ChannelPlan]:
    """Plan both channels of every edge. All ranks get the same plans in the same order.

    Args:
        signal_only: move one element per tensor.
    """
    pp_ranks = tuple(pp_rank_of_stage)
    plans = []
    for edge in pipeline.edges:
        for channel, tensors in _directions(edge):
            moved = [_one_element(spec) for spec in tensors] if signal_only else tensors
            is_local = pp_ranks[edge.src] == pp_ranks[edge.dst] and all(spec.src == spec.dst for spec in tensors)
            codec = edge.forward_codec if channel.is_forward else edge.backward_codec
            plan = None if is_local or not moved else plan_encoded(moved, codec, topology, strategy)
            plans.append(ChannelPlan(channel, tensors, plan))
    return plans


def _directions(edge: Edge) -> list[tuple[StageChannel, tuple[TensorSpec, ...]]]:
    return [
        (StageChannel(edge.src, edge.dst, True), edge.tensors),
        (StageChannel(edge.dst, edge.src, False), edge.gradients),
    ]


def _one_element(spec: TensorSpec) -> TensorSpec:
    """A spec of the same name and dtype with one element, replicated on all ranks of the given spec."""
    return replace(spec, shape=(1,), src=Layout(Mesh(spec.src.ranks)), dst=Layout(Mesh(spec.dst.ranks)))


class PendingTransfer:
    """A transfer of this rank: a posted receive, or an output of a stage, before and after its send has started.

    Args:
        channel: the channel.
        sent: the tensors that this rank sends; None on the receiver.
        computed_at: when this rank had computed them.

    Attributes:
        sent: see above; None once :meth:`wait` has returned.
        handle: handle of the Mover; None if nothing moves between ranks, and before the send.
        received: the tensors that :meth:`wait` returns; None for those of the handle.
    """

    __slots__ = ("_versions", "channel", "computed_at", "handle", "received", "sent")

    def __init__(self, channel: StageChannel, sent: Tensors | None = None, computed_at: Any = None) -> None:
        self.channel, self.sent, self.computed_at = channel, sent, computed_at
        self.handle: Handle | PostedTransfer | None = None
        self.received: Tensors | None = None
        self._versions = [] if sent is None else [torch_compat.version_of(array) for array in sent.values()]

    def check(self) -> None:
        """Raise ArgumentError if a tensor that this rank sends has changed in place since it was computed."""
        for (name, tensor), version in zip((self.sent or {}).items(), self._versions, strict=False):
            if torch_compat.version_of(tensor) != version:
                raise ArgumentError(
                    f"stage {self.channel.sender} changed {name!r} in place after returning it, so stage "
                    f"{self.channel.receiver} may have received either value; return a copy"
                )

    def is_done(self) -> bool:
        """Whether :meth:`wait` would return without blocking."""
        return self.handle is None or self.handle.done()

    def has_arrived(self) -> bool:
        """Whether :meth:`is_done` is true, or the data is there although nobody has waited for it."""
        return self.handle.has_arrived() if isinstance(self.handle, PostedTransfer) else self.is_done()

    def wake_at_end(self, wake: Callable[[], None]) -> bool:
        """Call ``wake`` once the transfer has ended. Returns whether it will be called; else the caller must poll."""
        if not isinstance(self.handle, PostedTransfer):
            return False
        self.handle.wake_at_end(wake)
        return True

    def wait(self) -> Tensors:
        """Wait for the transfer, and return the tensors that this rank received.

        Raises:
            ArgumentError: a tensor that this rank sends has changed in place since it was computed.
        """
        received = None if self.handle is None else result_of(self.handle)
        if self.sent is not None:
            self.check()
            self.sent = None
        return self.received if self.received is not None else received or {}

    def take(self) -> Tensors:
        """Call :meth:`wait`, and drop the tensors: the records of a step hold this object until the step ends."""
        tensors = self.wait()
        if self.received is not None:
            self.received = {}
        if self.handle is not None:
            self.handle.release()
        return tensors

    def synchronize(self) -> None:
        """Block the host until the device has finished the transfer. Raises the error of the transfer, if any."""
        if self.handle is not None:
            self.handle.synchronize()


class StageTransfers:
    """The Movers of all channels of one rank.

    Args:
        channels: plans of all channels of the pipeline, in the same order on all ranks.
        group: the group of the ranks in the plans.
        timeout_seconds: limit for one transfer.
        device: device type of the tensors.
        signal_only: move one element per tensor and receive zeros, to measure communication costs.

    Attributes:
        must_warm_up: whether the stages must run once before the first transfer, because the device is a GPU.
    """

    def __init__(
        self,
        channels: Iterable[ChannelPlan],
        group: Group,
        timeout_seconds: float,
        *,
        device: str = "cpu",
        signal_only: bool = False,
    ) -> None:
        self._rank, self._signal_only, self._device = group.rank, signal_only, device
        self.must_warm_up = device in STREAMS
        self._plans: dict[StageChannel, ChannelPlan] = {}
        self._movers: dict[StageChannel, Mover] = {}
        self._zeros: dict[StageChannel, Tensors] = {}
        for entry in channels:
            self._plans[entry.channel] = entry
            if entry.plan is not None and group.rank in entry.plan.ranks:
                self._movers[entry.channel] = Mover(
                    entry.plan, group, timeout_seconds=timeout_seconds, device=device, both_ways=True
                )

    def send(self, output: PendingTransfer) -> None:
        """Start to send an output."""
        output.check()
        mover, tensors = self._movers.get(output.channel), output.sent
        if mover is None:
            output.received = tensors
            return
        if self._signal_only:
            tensors = {name: array.new_ones(1) for name, array in (tensors or {}).items()}
        output.handle = start_checked(mover, tensors)

    def recv(self, channel: StageChannel) -> PendingTransfer:
        """Start to receive the tensors of one microbatch."""
        transfer, mover = PendingTransfer(channel), self._movers.get(channel)
        if mover is not None:
            if self._signal_only:
                transfer.received = self._zeros_of(channel)
            transfer.handle = start_checked(mover)
        return transfer

    def _zeros_of(self, channel: StageChannel) -> Tensors:
        """Zeros for the tensors of a channel, kept for all microbatches, so that they cost no time later."""
        if channel not in self._zeros:
            self._zeros[channel] = {
                str(spec.name): torch.zeros(
                    spec.dst_tiles.local_shape(self._rank), dtype=getattr(torch, spec.dtype), device=self._device
                )
                for spec in self._plans[channel].tensors
            }
        return self._zeros[channel]

    def check_errors(self) -> None:
        """Raise the first error that another rank reported, if any."""
        for mover in self._movers.values():
            check_transfers(mover)

    def fail(self, error: BaseException) -> None:
        """Fail all transfers of this rank. Every rank that takes part in one of them gets ``error``."""
        for mover in self._movers.values():
            fail_transfers(mover, error)

    def close(self) -> None:
        """Close the Movers."""
        for mover in self._movers.values():
            mover.close()
