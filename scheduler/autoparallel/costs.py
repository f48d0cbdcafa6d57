"""Seconds and bytes of one layer under one choice. What layers cost, stages add up.

Formulas: ring collectives of Patarasu and Yuan (2009); ZeRO of Rajbhandari et al. (2020); computation that overlaps
with a transfer is slowed, as Galvatron-BMW (Wang et al., 2023) charges it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import ArgumentError

from .choices import Choice, shard_1d
from .cluster import Cluster, ring_seconds, slower_rate
from .graph import Layer
from .profile import Profile

if TYPE_CHECKING:
    from .codecs import CodecCosts


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
                raise ArgumentError(f"{name} bytes of a parameter are {value!r}; they must be from 0 to 1e6")


#: 16-bit parameters and gradients; float32 parameters and moments belong to the optimizer.
MIXED_PRECISION = StateBytes(2.0, 2.0, 12.0)


@dataclass(frozen=True)
class LayerCost:
    """One layer on one rank of its stage, for one microbatch.

    Attributes:
        forward_seconds, backward_seconds: with collectives; the backward is whole.
        weight_grad_seconds: the part of the backward that a split puts off; 0 if it cannot be split.
        compute_seconds, sum_seconds, gather_seconds: forward and backward by kind: computation, tensor-parallel sums,
            and what gathers of parameters add.
        state_bytes: parameters, gradients and optimizer. gradient_bytes: of these, what the first backward of a step
            makes. activation_bytes: kept for each microbatch in flight.
        recompute_bytes: more while it is computed again. gathered_bytes: parameters while they are gathered.
        sync_seconds: sum of the gradients, once in a step.
        panel_bytes: panels of the largest product on a grid, while it runs.
    """

    forward_seconds: float
    backward_seconds: float
    weight_grad_seconds: float
    compute_seconds: float
    sum_seconds: float
    gather_seconds: float
    state_bytes: float
    gradient_bytes: float
    activation_bytes: float
    recompute_bytes: float
    gathered_bytes: float
    sync_seconds: float
    panel_bytes: float = 0.0


@dataclass(frozen=True)
class Place:
    """What a layer's cost needs to know of the ranks of its stage.

    Attributes:
        num_ranks: ranks of the stage. num_hosts: hosts that they are on.
        nic_bytes_per_second: slowest host of these; unused on one host.
        inside_bytes_per_second, inside_latency_seconds, latency_seconds: inside a host and between hosts.
        pods: pod of each host, numbered in the order of the hosts; empty if all hosts share a pod.
        uplinks: bytes per second of the uplink of each of these pods, in its slower direction.
    """

    num_ranks: int
    num_hosts: int
    nic_bytes_per_second: float
    inside_bytes_per_second: float
    inside_latency_seconds: float
    latency_seconds: float
    pods: tuple[int, ...] = ()
    uplinks: tuple[float, ...] = ()

    @classmethod
    def of(cls, cluster: Cluster, profile: Profile, first: int, end: int) -> Place:
        """The place of ranks ``first`` to ``end - 1``. Measured collectives replace those of the topology."""
        latency, rate = cluster.topology.inside_latency_seconds, cluster.inside_bytes_per_second
        if profile.sums is not None:
            latency, rate = profile.sums
        parts = cluster.hosts_of(first, end)
        nic = min(cluster.nic_bytes_per_second(host) for host, _, _ in parts)
        between = cluster.topology.latency_seconds
        pods = [cluster.topology.host(host).pod for host, _, _ in parts]
        known = [pod for pod in dict.fromkeys(pods) if pod is not None]
        links: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
        if len(known) > 1:
            numbers = tuple(known.index(pod) for pod in pods if pod is not None)
            links = (numbers, tuple(slower_rate(cluster.topology.pods[pod]) for pod in known))
        return cls(end - first, len(parts), nic if len(parts) > 1 else 0.0, rate, latency, between, *links)

    @property
    def ring_bytes_per_second(self) -> float:
        """The slowest rate of a ring through all hosts in their order: a NIC, or an uplink over how often it passes."""
        rate = self.nic_bytes_per_second
        leaves = [
            pod for pod, following in zip(self.pods, self.pods[1:] + self.pods[:1], strict=True) if pod != following
        ]
        return min([rate, *(uplink / leaves.count(pod) for pod, uplink in enumerate(self.uplinks))])

    def exchange_seconds(self, nbytes: float) -> float:
        """Seconds in which each host sends ``nbytes`` to each other host, all at once."""
        seconds = nbytes * (self.num_hosts - 1) / self.nic_bytes_per_second
        for pod, uplink in enumerate(self.uplinks):
            inside = self.pods.count(pod)
            seconds = max(seconds, nbytes * inside * (self.num_hosts - inside) / uplink)
        return seconds

    def replica_seconds(self, nbytes: float, tp: int, passes: float) -> float:
        """Seconds of a ring over the replicas of a layer, of which each rank has ``nbytes``.

        Between hosts, the rings of all ``tp`` ranks share the NICs. The part inside a host runs beside it.
        """
        replicas = self.num_ranks // tp
        if replicas == 1 or nbytes == 0:
            return 0.0
        inside = replicas // self.num_hosts if self.num_hosts > 1 else replicas
        seconds = ring_seconds(nbytes, inside, self.inside_bytes_per_second, self.inside_latency_seconds, passes)
        if self.num_hosts > 1:
            between = ring_seconds(
                nbytes * tp, self.num_hosts, self.ring_bytes_per_second, self.latency_seconds, passes
            )
            seconds = max(seconds, between)
        return seconds


def overlapped_seconds(compute: float, transfer: float, slowdown: float) -> float:
    """Seconds of computation and a transfer that run together: both are slowed while the other runs."""
    return max(compute, transfer) + (slowdown - 1) * min(compute, transfer)


def layer_cost(
    layer: Layer,
    choice: Choice,
    place: Place,
    profile: Profile,
    states: StateBytes,
    rows: int,
    microbatches: int,
    codec_costs: CodecCosts,
) -> LayerCost:
    """The cost of a layer for microbatches of ``rows`` rows, which the replicas divide evenly.

    ZeRO 3 gathers the parameters for the forward and again for the backward of each microbatch, next to computation.
    The engine reduces gradients once, in the last backward, so with several microbatches they are whole until then.
    ``codec_costs`` say which traffic is coded.
    """
    replicas = place.num_ranks // choice.tp
    own = rows / replicas
    sharding = shard_1d(layer, choice.tp)
    times, is_measured = profile.times(layer.key, choice.tp)
    sample = times.at(own)
    scale = 1.0 if is_measured else sharding.compute
    forward, backward, weight = (
        value * scale for value in (sample.forward_seconds, sample.backward_seconds, sample.weight_grad_seconds)
    )
    sums = sum(
        ring_seconds(nbytes * own, size, place.inside_bytes_per_second, place.inside_latency_seconds, passes)
        for nbytes, passes, size in sharding.sums
    )
    shared = _share_states(sharding.params, choice, place, states, microbatches, codec_costs)
    computed_backward = backward + (forward if choice.recompute else 0.0)
    backward_sums = sums * (2 if choice.recompute else 1)
    whole_forward = overlapped_seconds(forward + sums, shared.gather_seconds, profile.slowdown)
    moved = shared.gather_seconds + shared.scatter_seconds
    whole_backward = overlapped_seconds(computed_backward + backward_sums, moved, profile.slowdown)
    if codec_costs.gathers is not None and choice.zero == 3:  # coded gathers do not overlap with computation
        gather = codec_costs.gathers.gather_seconds(place, shared.gathered_bytes, choice.tp)
        whole_forward = codec_costs.faster(whole_forward, forward + sums + gather)
        whole_backward = codec_costs.faster(whole_backward, computed_backward + backward_sums + gather)
    can_split = not choice.recompute and choice.zero < 2
    saved = (sample.saved_bytes or layer.saved_bytes * own) * (
        sharding.saved_bytes / layer.saved_bytes if layer.saved_bytes else 1
    )
    kept = min(saved, layer.input_bytes * own) if choice.recompute else saved
    compute = forward + computed_backward
    return LayerCost(
        whole_forward,
        whole_backward,
        min(weight, whole_backward) if can_split else 0.0,
        compute,
        sums + backward_sums,
        whole_forward + whole_backward - compute - sums - backward_sums,
        shared.state_bytes,
        shared.gradient_bytes,
        kept,
        saved - kept,
        shared.gathered_bytes,
        shared.sync_seconds,
    )


class _SharedStates(NamedTuple):
    """States of a layer on one rank, and the seconds of moving them between replicas.

    Attributes:
        state_bytes: weights, gradients and optimizer. gradient_bytes: gradients alone.
        gathered_bytes: weights while they are gathered.
        gather_seconds, scatter_seconds: in each forward and backward, and in each backward.
        sync_seconds: once per step.
    """

    state_bytes: float
    gradient_bytes: float
    gathered_bytes: float
    gather_seconds: float
    scatter_seconds: float
    sync_seconds: float


def _share_states(
    params: float, choice: Choice, place: Place, states: StateBytes, microbatches: int, codec_costs: CodecCosts
) -> _SharedStates:
    """What ZeRO shares of the states of ``params`` parameters."""
    replicas = place.num_ranks // choice.tp
    weights, gradients, optimizer = params * states.weight, params * states.gradient, params * states.optimizer
    gathered, gather, scatter = 0.0, 0.0, 0.0
    # DDP has buckets beside the gradients, and keeps them from step to step
    buckets = gradients if choice.zero == 0 and replicas > 1 else 0.0
    sync = place.replica_seconds(params * states.gradient, choice.tp, 2.0)
    if choice.zero == 0 and choice.tp == 1 and codec_costs.sums is not None:
        sync = codec_costs.faster(sync, codec_costs.sums.sum_seconds(place, params * states.gradient))
    if choice.zero >= 1:
        optimizer /= replicas
    if choice.zero == 2:
        gradients /= replicas
        scatter = place.replica_seconds(params * states.gradient, choice.tp, 1.0)
        sync = place.replica_seconds(weights, choice.tp, 1.0)
    if choice.zero == 3:
        gathered, gather = weights, place.replica_seconds(weights, choice.tp, 1.0)
        weights /= replicas
        gradients = gradients / replicas if microbatches == 1 else gradients
        sync = place.replica_seconds(params * states.gradient, choice.tp, 1.0)
        if codec_costs.scatters is not None:
            coded = codec_costs.scatters.scatter_seconds(place, params * states.gradient, choice.tp)
            sync = codec_costs.faster(sync, coded)
    return _SharedStates(weights + gradients + buckets + optimizer, gradients, gathered, gather, scatter, sync)


def recompute_bytes(costs: Sequence[LayerCost]) -> float:
    """Bytes by which the backward of a microbatch exceeds what its forward has kept.

    A layer is computed again once the layers behind it have released their activations.
    """
    most, released = 0.0, 0.0
    for cost in reversed(costs):
        most = max(most, cost.recompute_bytes - released)
        released += cost.activation_bytes
    return most


def late_bytes(costs: Sequence[LayerCost]) -> float:
    """Bytes by which a device has fewer states than all, at its peak, if all microbatches are in flight by then.

    The first backward makes the gradients, layer by layer from the last one, and releases activations meanwhile.
    """
    most, made, released = 0.0, 0.0, 0.0
    for cost in reversed(costs):
        made += cost.gradient_bytes
        most = max(most, made - released)
        released += cost.activation_bytes
    return made - most
