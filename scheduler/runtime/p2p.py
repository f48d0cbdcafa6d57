"""What a rank moves between stages: one :class:`~reshard.Mover` per edge and direction, made once."""

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
class ChannelMover:
    """One direction of an edge: what moves, and the plan; None where nothing moves, or nothing has to."""

    channel: Channel
    tensors: tuple[TensorSpec, ...]
    plan: Plan | None


def find_device_type(modules: Mapping[int, torch.nn.Module]) -> str:
    """The type of device that the parameters and buffers of a rank's stages are on; the CPU if there are none.

    Raises:
        ArgumentError: they are on several.
    """
    kinds: dict[str, str] = {}
    for stage, module in modules.items():
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            kinds.setdefault(tensor.device.type, f"{name!r} of stage {stage} is on {tensor.device}")
    if len(kinds) > 1:
        raise ArgumentError(f"the stages of a rank must be on one type of device: {', '.join(kinds.values())}")
    return next(iter(kinds), "cpu")


def make_channel_movers(
    pipeline: Pipeline,
    row_of_stage: Iterable[int],
    topology: Topology,
    strategy: str | Strategy | None,
    *,
    signal_only: bool = False,
) -> list[ChannelMover]:
    """Both directions of all edges, in one order for all ranks."""
    rows = tuple(row_of_stage)
    ways = []
    for edge in pipeline.edges:
        for channel, tensors in _directions(edge):
            moved = [_signal(spec) for spec in tensors] if signal_only else tensors
            stays = rows[edge.src] == rows[edge.dst] and all(spec.src == spec.dst for spec in tensors)
            plan = None if stays or not moved else plan_tensors(moved, strategy=strategy, topology=topology)
            ways.append(ChannelMover(channel, tensors, plan))
    return ways


def _directions(edge: Edge) -> list[tuple[Channel, tuple[TensorSpec, ...]]]:
    return [
        (Channel(edge.src, edge.dst, True), edge.tensors),
        (Channel(edge.dst, edge.src, False), edge.gradients),
    ]


def _signal(spec: TensorSpec) -> TensorSpec:
    """One element in place of a tensor, from the first rank that holds it to all that need it."""
    return replace(spec, shape=(1,), src=Layout(Mesh(spec.src.ranks)), dst=Layout(Mesh(spec.dst.ranks)))


class StageTransfer:
    """One transfer under way; on the receiving side with what it brings.

    ``made_at`` is when what it moves was computed, by ``time.monotonic()``, where this rank knows; ``versions`` says
    how often each tensor had been changed in place by then.
    """

    def __init__(self, handle: Handle | None, tensors: Mapping[str, torch.Tensor | None] | None = None) -> None:
        self.handle, self._tensors = handle, tensors
        self.made_at: float | None = None
        self.versions: dict[str, int] = {}
        self._check: Callable[[], None] | None = None

    def keep(self, check: Callable[[], None]) -> None:
        """Call this once it is over."""
        self._check = check

    def is_over(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self.handle is None or self.handle.done()

    def wait(self) -> dict[str, Any]:
        """Block until it is over; returns what this rank received."""
        brought = None if self.handle is None else self.handle.wait()
        if self._check is not None:
            self._check()
            self._check = None
        return dict(self._tensors if self._tensors is not None else brought or {})

    def synchronize(self) -> None:
        """Block until the device is done with it too; raises what ended it."""
        if self.handle is not None:
            self.handle.synchronize()


class StageTransfers:
    """The Movers of one rank.

    Args:
        ways: of the pipeline, in one order for all ranks; each rank takes part in those that name it.
        device: the type of device that tensors are on.
        signal_only: move one element per tensor, and receive zeros; to measure what communication costs.
        apart: give each channel connections of its own, where rows start transfers of several in different orders.
    """

    def __init__(
        self,
        ways: Iterable[ChannelMover],
        group: Group,
        timeout_seconds: float,
        *,
        device: str = "cpu",
        signal_only: bool = False,
        apart: bool = False,
    ) -> None:
        self._rank, self._signal_only, self._device = group.rank, signal_only, device
        self._ways: dict[Channel, ChannelMover] = {}
        self._movers: dict[Channel, Mover] = {}
        self._zeros: dict[Channel, Tensors] = {}
        for number, way in enumerate(ways):
            self._ways[way.channel] = way
            if way.plan is not None and group.rank in way.plan.ranks:
                self._movers[way.channel] = Mover(
                    way.plan,
                    group,
                    timeout_seconds=timeout_seconds,
                    device=device,
                    both_ways=True,
                    connection=number if apart else 0,
                )

    def send(self, channel: Channel, tensors: Tensors) -> StageTransfer:
        """Start the sender's part."""
        mover = self._movers.get(channel)
        if mover is None:
            return StageTransfer(None, tensors)
        if self._signal_only:
            tensors = {name: array.new_ones(1) for name, array in tensors.items()}
        return StageTransfer(mover.start(tensors))

    def recv(self, channel: Channel) -> StageTransfer:
        """Start the receiver's part."""
        mover = self._movers.get(channel)
        if mover is None:
            return StageTransfer(None)
        if self._signal_only and channel not in self._zeros:  # made once, as they must cost nothing
            self._zeros[channel] = {
                str(spec.name): torch.zeros(
                    spec.dst_shards.local_shape(self._rank), dtype=getattr(torch, spec.dtype), device=self._device
                )
                for spec in self._ways[channel].tensors
            }
        return StageTransfer(mover.start(), self._zeros.get(channel))

    def look(self) -> None:
        """Raise the first error that a rank told of, if one did."""
        for mover in self._movers.values():
            mover.check()

    def fail(self, error: BaseException) -> None:
        """End all transfers of this rank with an error, here and at the ranks they join."""
        for mover in self._movers.values():
            mover.fail(error)

    def close(self) -> None:
        """Close the Movers."""
        for mover in self._movers.values():
            mover.close()
