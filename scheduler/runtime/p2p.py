"""Transfers between stages: one :class:`~reshard.Mover` per channel, made once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from reshard.api.handle import Handle
from reshard.api.mover import Mover
from reshard.coordination.process_group import Group
from reshard.errors import ArgumentError
from reshard.plan.model import Plan
from reshard.planner.planning import plan_tensors
from reshard.planner.strategies.problem import Strategy
from reshard.sharding.layout import Layout
from reshard.sharding.mesh import Mesh
from reshard.sharding.tensor_spec import TensorSpec
from reshard.topology.model import Topology

from ..graph import Edge, Pipeline
from ..ir.schedule import Channel

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ChannelPlan:
    """The tensors and the plan of a channel. The plan is None if there is nothing to move between ranks."""

    channel: Channel
    tensors: tuple[TensorSpec, ...]
    plan: Plan | None


def find_device_type(modules: Mapping[int, torch.nn.Module]) -> str:
    """The device type of the parameters and buffers of a rank's stages; "cpu" if there are none.

    Raises:
        ArgumentError: they are on several device types.
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
    row_of_stage: Iterable[int],
    topology: Topology,
    strategy: str | Strategy | None,
    *,
    signal_only: bool = False,
) -> list[ChannelPlan]:
    """Plans of both channels of every edge, in the same order on all ranks."""
    rows = tuple(row_of_stage)
    plans = []
    for edge in pipeline.edges:
        for channel, tensors in _directions(edge):
            moved = [_signal(spec) for spec in tensors] if signal_only else tensors
            stays = rows[edge.src] == rows[edge.dst] and all(spec.src == spec.dst for spec in tensors)
            plan = None if stays or not moved else plan_tensors(moved, strategy=strategy, topology=topology)
            plans.append(ChannelPlan(channel, tensors, plan))
    return plans


def _directions(edge: Edge) -> list[tuple[Channel, tuple[TensorSpec, ...]]]:
    return [
        (Channel(edge.src, edge.dst, True), edge.tensors),
        (Channel(edge.dst, edge.src, False), edge.gradients),
    ]


def _signal(spec: TensorSpec) -> TensorSpec:
    """A tensor of one element in place of another, on the same ranks and with replicas on all of them."""
    return replace(spec, shape=(1,), src=Layout(Mesh(spec.src.ranks)), dst=Layout(Mesh(spec.dst.ranks)))


class PendingTransfer:
    """One end of a transfer in progress.

    Attributes:
        computed_at: when this rank computed the tensors, by ``time.monotonic()``; None on the receiver.
        versions: in-place version counter of each tensor at that time.
    """

    def __init__(self, handle: Handle | None, tensors: Mapping[str, torch.Tensor | None] | None = None) -> None:
        self.handle, self._tensors = handle, tensors
        self.computed_at: float | None = None
        self.versions: dict[str, int] = {}
        self._check: Callable[[], None] | None = None

    def check_at_end(self, check: Callable[[], None]) -> None:
        """Call ``check`` when :meth:`wait` finds the transfer done."""
        self._check = check

    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self.handle is None or self.handle.done()

    def wait(self) -> dict[str, Any]:
        """Block until the transfer is done. Returns the tensors that this rank received."""
        received = None if self.handle is None else self.handle.wait()
        if self._check is not None:
            self._check()
            self._check = None
        return dict(self._tensors if self._tensors is not None else received or {})

    def synchronize(self) -> None:
        """Block until the device is done too. Raises the error of the transfer, if any."""
        if self.handle is not None:
            self.handle.synchronize()


class StageTransfers:
    """The Movers of one rank.

    Args:
        channels: plans of all channels of the pipeline, in the same order on all ranks.
        group: group whose ranks the plans name.
        timeout_seconds: limit for one transfer.
        device: device type of the tensors.
        signal_only: move one element per tensor and receive zeros, to measure communication costs.
        separate_connections: use a connection per channel. Needed if two rows post the transfers between them in
            different orders.
    """

    def __init__(
        self,
        channels: Iterable[ChannelPlan],
        group: Group,
        timeout_seconds: float,
        *,
        device: str = "cpu",
        signal_only: bool = False,
        separate_connections: bool = False,
    ) -> None:
        self._rank, self._signal_only, self._device = group.rank, signal_only, device
        self._plans: dict[Channel, ChannelPlan] = {}
        self._movers: dict[Channel, Mover] = {}
        self._zeros: dict[Channel, Tensors] = {}
        for number, each in enumerate(channels):
            self._plans[each.channel] = each
            if each.plan is not None and group.rank in each.plan.ranks:
                self._movers[each.channel] = Mover(
                    each.plan,
                    group,
                    timeout_seconds=timeout_seconds,
                    device=device,
                    both_ways=True,
                    connection=number if separate_connections else 0,
                )

    def send(self, channel: Channel, tensors: Tensors) -> PendingTransfer:
        """Start to send."""
        mover = self._movers.get(channel)
        if mover is None:
            return PendingTransfer(None, tensors)
        if self._signal_only:
            tensors = {name: array.new_ones(1) for name, array in tensors.items()}
        return PendingTransfer(mover.start(tensors))

    def recv(self, channel: Channel) -> PendingTransfer:
        """Start to receive."""
        mover = self._movers.get(channel)
        if mover is None:
            return PendingTransfer(None)
        if self._signal_only and channel not in self._zeros:  # made once, so that they take no time later
            self._zeros[channel] = {
                str(spec.name): torch.zeros(
                    spec.dst_shards.local_shape(self._rank), dtype=getattr(torch, spec.dtype), device=self._device
                )
                for spec in self._plans[channel].tensors
            }
        return PendingTransfer(mover.start(), self._zeros.get(channel))

    def check_errors(self) -> None:
        """Raise the first error that another rank reported, if any."""
        for mover in self._movers.values():
            mover.check()

    def fail(self, error: BaseException) -> None:
        """End all transfers of this rank with an error, on all ranks that take part in them."""
        for mover in self._movers.values():
            mover.fail(error)

    def close(self) -> None:
        """Close the Movers."""
        for mover in self._movers.values():
            mover.close()
