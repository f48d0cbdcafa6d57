"""Seconds and bytes of one layer under one choice. The cost of a stage is the sum over its layers.

Formulas: ring collectives of Patarasu and Yuan (2009); ZeRO of Rajbhandari et al. (2020); computation that overlaps
with a transfer is slowed, as Galvatron-BMW (Wang et al., 2023) charges it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from reshard.errors import ArgumentError
from reshard.formatting import brief

from ...ir.communication import RECVS_AHEAD
from ..inputs.layer_choices import LayerChoice, shard_1d
from ..inputs.layer_graph import Layer
from ..inputs.layer_profile import ClassTimes, LayerProfile
from .codec_costs import CodecCosts
from .collective_costs import StagePlace, ring_seconds


@dataclass(frozen=True)
class StateBytes:
    """Bytes that training keeps for each parameter. Default: float32 with the two moments of Adam."""

    weight: float = 4.0
    gradient: float = 4.0
    optimizer: float = 8.0

    def __post_init__(self) -> None:
        for name in ("weight", "gradient", "optimizer"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e6:
                raise ArgumentError(f"{name} bytes of a parameter are {brief(value)}; they must be from 0 to 1e6")


#: 16-bit parameters and gradients; float32 parameters and moments belong to the optimizer.
MIXED_PRECISION = StateBytes(2.0, 2.0, 12.0)
#: Differences of sums of seconds below this part of the computation are 0.
ROUNDING = 1e-12


@dataclass(frozen=True)
class LayerCostInputs:
    """Inputs of the costs of layers, in addition to the layer, its choice and its place.

    Attributes:
        profile: times of the layers.
        states: bytes of states of a parameter.
        num_samples, num_microbatches: samples of a microbatch, and how many of these a step has.
        codec_costs: codecs of the traffic inside stages.
    """

    profile: LayerProfile
    states: StateBytes
    num_samples: int
    num_microbatches: int
    codec_costs: CodecCosts


@dataclass(frozen=True)
class LayerCost:
    """One layer on one rank of its stage, for one microbatch.

    Attributes:
        forward_seconds, backward_seconds: times with collectives. The backward is whole.
        weight_grad_seconds: the part of the backward that a split defers; 0 if it cannot be split.
        compute_seconds, tp_collective_seconds, all_gather_seconds: parts of the forward and backward together:
            computation, tensor-parallel collectives, and what all-gathers of parameters add.
        state_bytes: parameters, gradients and optimizer.
        gradient_bytes: the part of them that the first backward of a step allocates.
        activation_bytes: kept for each microbatch in flight.
        recompute_bytes: activations that the layer keeps in addition while the backward recomputes its forward.
        gathered_bytes: whole parameters, while ZeRO 3 has gathered them.
        sync_seconds: the all-reduce of the gradients, once per step.
        panel_bytes: panels of the largest product on a grid, while it runs.
        early_sync_seconds: the part of ``sync_seconds`` during which the rank may compute other stages.
    """

    forward_seconds: float
    backward_seconds: float
    weight_grad_seconds: float
    compute_seconds: float
    tp_collective_seconds: float
    all_gather_seconds: float
    state_bytes: float
    gradient_bytes: float
    activation_bytes: float
    recompute_bytes: float
    gathered_bytes: float
    sync_seconds: float
    panel_bytes: float = 0.0
    early_sync_seconds: float = 0.0

    @property
    def late_sync_seconds(self) -> float:
        """The part of ``sync_seconds`` that follows after all computations of the rank."""
        return self.sync_seconds - self.early_sync_seconds


@dataclass(frozen=True)
class StageCost:
    """The summed costs of the layers of a stage, for one microbatch of its number of samples.

    ``late_bytes`` are gradients that do not exist yet at the peak around the first backward of a step of
    ``num_microbatches``. ``received_bytes`` is the part of ``buffer_bytes`` for tensors that are received early,
    without gradients. Once in a step, after its own sums, a stage sums the gradients of parameters that it shares with
    other stages. This takes ``tie_seconds``, and ``tie_bytes`` of a device in addition to its states.
    ``early_sync_seconds`` is the part of ``sync_seconds`` in which the device may compute its other stages.
    """

    forward_seconds: float
    backward_seconds: float
    weight_grad_seconds: float
    compute_seconds: float
    tp_collective_seconds: float
    all_gather_seconds: float
    sync_seconds: float
    state_bytes: float
    activation_bytes: float
    working_bytes: float
    buffer_bytes: float
    limit_bytes: float
    late_bytes: float = 0.0
    num_microbatches: int = 0
    tie_seconds: float = 0.0
    tie_bytes: float = 0.0
    received_bytes: float = 0.0
    early_sync_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward of one microbatch."""
        return self.forward_seconds + self.backward_seconds

    def memory_bytes(self, in_flight: int) -> float:
        """Peak bytes of a device with some microbatches in flight, all gradients, and all buffers."""
        return max(self.fixed_bytes + in_flight * self.activation_bytes, self.ending_bytes)

    @property
    def fixed_bytes(self) -> float:
        """Bytes of a device without activations, in the middle of a step."""
        return self.state_bytes + self.working_bytes + self.buffer_bytes

    @property
    def ending_bytes(self) -> float:
        """Bytes of a device at the end of a step, while it adds gradients of parameters that stages share."""
        return self.state_bytes + self.tie_bytes

    @property
    def late_sync_seconds(self) -> float:
        """The part of ``sync_seconds`` that follows after all computations of the device."""
        return self.sync_seconds - self.early_sync_seconds

    @property
    def ending_seconds(self) -> float:
        """Seconds from the last backward to the end of a step, if no other stage is later."""
        return self.sync_seconds + self.tie_seconds

    def peak_parts(self, in_flight: int) -> tuple[float, float]:
        """Bytes of the states, and of the buffers of edges, at the peak of a device.

        The peak is during the first backward, before all gradients exist, or with a later microbatch. Buffers hold
        tensors of the following microbatches only. Near the end of a step, few of them are left, so not all buffers are
        full.
        """
        ahead = min(RECVS_AHEAD, self.num_microbatches)
        returned = self.buffer_bytes - self.received_bytes

        def buffers(forwards: int) -> float:
            left = max(0, min(ahead, self.num_microbatches - forwards))
            return returned + (self.received_bytes * left / ahead if ahead else 0.0)

        first = self.state_bytes - self.late_bytes, buffers(in_flight)
        if in_flight >= self.num_microbatches:
            return first
        return max(first, (self.state_bytes, buffers(in_flight + 1)), key=sum)

    @property
    def max_in_flight(self) -> int:
        """Microbatches that fit the memory, at least 0."""
        free = self.limit_bytes - self.fixed_bytes
        if self.memory_bytes(0) > self.limit_bytes:
            return 0
        return int(min(1e9, free // self.activation_bytes if self.activation_bytes else 1e9))


def fixed_bytes_of(costs: Sequence[StageCost]) -> float:
    """Bytes of a device that has some stages, without activations: only the largest computation works at a time."""
    if len(costs) == 1:
        return costs[0].fixed_bytes
    return sum(cost.state_bytes + cost.buffer_bytes for cost in costs) + max(cost.working_bytes for cost in costs)


def slowest_of(costs: Sequence[LayerCost]) -> LayerCost:
    """The cost of a layer on devices of several types, which wait for each other: the maximum of each field.

    A split backward defers the slowest whole backward minus the slowest pass of input gradients.
    """
    if len(costs) == 1:
        return costs[0]
    slowest = LayerCost(*map(max, zip(*map(astuple, costs), strict=True)))
    input_seconds = max(cost.backward_seconds - cost.weight_grad_seconds for cost in costs)
    return replace(slowest, weight_grad_seconds=slowest.backward_seconds - input_seconds)


def overlapped_seconds(compute: float, transfer: float, slowdown: float) -> float:
    """Seconds of computation and a transfer that run together: both are slowed while the other runs."""
    return max(compute, transfer) + (slowdown - 1) * min(compute, transfer)


def layer_cost(layer: Layer, choice: LayerChoice, place: StagePlace, work: LayerCostInputs) -> LayerCost:
    """The cost of a layer for one microbatch, whose samples the replicas divide evenly.

    ZeRO 3 gathers the parameters for the forward and again for the backward of each microbatch, next to computation.
    Nothing hides the copies and calls of an all-gather, because the device itself runs them.
    The engine reduces gradients once, in the last backward, so with several microbatches they are whole until then.
    """
    profile, codec_costs = work.profile, work.codec_costs
    own = work.num_samples / (place.num_ranks // choice.tp)
    sharding = shard_1d(layer, choice.tp)
    times, is_measured = profile.times(layer.key, choice.tp)
    layer_times = times.at(own)
    scale = 1.0 if is_measured else sharding.compute
    forward, backward, weight = (
        value * scale
        for value in (layer_times.forward_seconds, layer_times.backward_seconds, layer_times.weight_grad_seconds)
    )
    sums = sum(
        ring_seconds(nbytes * own, size, place.inside_bytes_per_second, place.inside_latency_seconds, passes)
        for nbytes, passes, size in sharding.collectives
    )
    state_costs = _price_states(sharding.params, choice, place, work)
    computed_backward = backward + (forward if choice.recompute else 0.0)
    backward_sums = sums * (2 if choice.recompute else 1)
    whole_forward = overlapped_seconds(forward + sums, state_costs.all_gather_seconds, profile.slowdown)
    moved = state_costs.all_gather_seconds + state_costs.reduce_scatter_seconds
    whole_backward = overlapped_seconds(computed_backward + backward_sums, moved, profile.slowdown)
    if codec_costs.all_gather is not None and choice.zero == 3:  # encoded all-gathers do not overlap with computation
        gather = codec_costs.all_gather.encoded_all_gather_seconds(place, state_costs.gathered_bytes, choice.tp)
        whole_forward = codec_costs.faster(whole_forward, forward + sums + gather)
        whole_backward = codec_costs.faster(whole_backward, computed_backward + backward_sums + gather)
    gather, scatter = device_seconds_of_zero_3(times, choice, sharding.params / max(1, layer.num_params))
    whole_forward, whole_backward = whole_forward + gather, whole_backward + gather
    can_split = not choice.recompute and choice.zero < 2
    saved = (layer_times.saved_bytes or layer.saved_bytes * own) * (
        sharding.saved_bytes / layer.saved_bytes if layer.saved_bytes else 1
    )
    kept = min(saved, layer.input_bytes * own) if choice.recompute else saved
    compute = forward + computed_backward
    exposed = whole_forward + whole_backward - compute - sums - backward_sums
    return LayerCost(
        whole_forward,
        whole_backward,
        min(weight, whole_backward) if can_split else 0.0,
        compute,
        sums + backward_sums,
        exposed if exposed > ROUNDING * compute else 0.0,
        state_costs.state_bytes,
        state_costs.gradient_bytes,
        kept,
        saved - kept,
        state_costs.gathered_bytes,
        state_costs.sync_seconds + scatter,
        early_sync_seconds=state_costs.sync_seconds if may_sum_early(choice, codec_costs) else 0.0,
    )


def may_sum_early(choice: LayerChoice, codec_costs: CodecCosts) -> bool:
    """Whether the engine sums gradients while their rank computes other stages: raw sums under DDP.

    While codecs are optional, a sum may be raw.
    """
    is_ddp = choice.zero == 0 and choice.tp == 1 and not choice.grid
    return is_ddp and (codec_costs.all_reduce is None or codec_costs.is_optional)


def device_seconds_of_zero_3(times: ClassTimes, choice: LayerChoice, share: float) -> tuple[float, float]:
    """Device seconds of an all-gather and a reduce-scatter of ``share`` of a layer's parameters; 0 without ZeRO 3."""
    return (times.all_gather_seconds * share, times.reduce_scatter_seconds * share) if choice.zero == 3 else (0.0, 0.0)


class _StateCosts(NamedTuple):
    """States of a layer on one rank, and the seconds of moving them between replicas.

    Attributes:
        state_bytes: bytes of weights, gradients and optimizer.
        gradient_bytes: bytes of gradients alone.
        gathered_bytes: bytes of weights while they are gathered.
        all_gather_seconds: time of the all-gathers in each forward and in each backward.
        reduce_scatter_seconds: time of the reduce-scatters in each backward.
        sync_seconds: time of the sums, once in a step.
    """

    state_bytes: float
    gradient_bytes: float
    gathered_bytes: float
    all_gather_seconds: float
    reduce_scatter_seconds: float
    sync_seconds: float


def _price_states(params: float, choice: LayerChoice, place: StagePlace, work: LayerCostInputs) -> _StateCosts:
    """Bytes of states of ``params`` parameters on a rank, and the collectives of ZeRO or DDP over the replicas.

    The gathers of ZeRO 3 over the depth of a grid are priced in :mod:`.grid_costs`.
    """
    states, codec_costs = work.states, work.codec_costs
    replicas = place.num_ranks // choice.tp
    weights, gradients, optimizer = params * states.weight, params * states.gradient, params * states.optimizer
    gathered, gather, scatter = 0.0, 0.0, 0.0
    # DDP keeps buckets of the size of the gradients from step to step
    buckets = gradients if choice.zero == 0 and replicas > 1 else 0.0
    sync = place.replica_seconds(params * states.gradient, choice.tp, 2.0)
    if choice.zero == 0 and choice.tp == 1 and codec_costs.all_reduce is not None:
        sync = codec_costs.faster(sync, codec_costs.all_reduce.all_reduce_seconds(place, params * states.gradient))
    if choice.zero >= 1:
        optimizer /= replicas
    if choice.zero == 2:
        gradients /= replicas
        scatter = place.replica_seconds(params * states.gradient, choice.tp, 1.0)
        sync = place.replica_seconds(weights, choice.tp, 1.0)
    if choice.zero == 3:
        gathered, gather = weights, place.replica_seconds(weights, choice.tp, 1.0)
        weights /= replicas
        gradients = gradients / replicas if work.num_microbatches == 1 else gradients
        sync = place.replica_seconds(params * states.gradient, choice.tp, 1.0)
        if codec_costs.reduce_scatter is not None:
            encoded = codec_costs.reduce_scatter.encoded_reduce_scatter_seconds(
                place, params * states.gradient, choice.tp
            )
            sync = codec_costs.faster(sync, encoded)
    return _StateCosts(weights + gradients + buckets + optimizer, gradients, gathered, gather, scatter, sync)


def working_bytes(costs: Sequence[LayerCost]) -> float:
    """Bytes that the computations of a stage need in addition to states and activations, without panels of products.

    A forward under ZeRO 3 holds three things: the parameters of the running layer, those of the next layer, and the
    buffer of one gather. A backward recomputes a layer once the layers after it have released their activations. It
    then holds the parameters of that layer, their buffer, and the parameters of another layer. These need not be the
    layers with the most parameters: in a U-Net, layers with many activations have few.
    """
    gathered = sorted((cost.gathered_bytes for cost in costs), reverse=True)
    forward = gathered[0] + sum(gathered[:2])
    recomputed, backward, released = 0.0, 0.0, 0.0
    for cost in reversed(costs):
        needed = cost.recompute_bytes - released
        recomputed = max(recomputed, needed)
        backward = max(backward, needed + 2 * cost.gathered_bytes + gathered[0]) if cost.recompute_bytes else backward
        released += cost.activation_bytes
    return max(forward, min(recomputed + forward, backward))


def late_bytes(costs: Sequence[LayerCost]) -> float:
    """Bytes of the states that do not exist yet at the peak of a device, if all microbatches are in flight by then.

    The first backward makes the gradients, layer by layer from the last one, and releases activations meanwhile.
    """
    max_bytes, made, released = 0.0, 0.0, 0.0
    for cost in reversed(costs):
        made += cost.gradient_bytes
        max_bytes = max(max_bytes, made - released)
        released += cost.activation_bytes
    return made - max_bytes
