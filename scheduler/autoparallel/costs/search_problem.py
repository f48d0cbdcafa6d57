"""The input of every search method: the model, the devices, the profile and the rules, with the costs of any stage."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from reshard.errors import ArgumentError
from reshard.formatting import brief, count_of, format_names

from ...ir.communication import RECVS_AHEAD
from ...pipeline import Edge, Pipeline, Stage
from ..inputs.cluster import Cluster
from ..inputs.layer_choices import ChoiceRules, LayerChoice
from ..inputs.layer_graph import Layer, LayerGraph, Tensor
from ..inputs.layer_profile import LayerProfile
from ..inputs.stages import StagePlan, describe_stages, pp_ranks_of
from .codec_costs import CodecCosts, check_policy
from .collective_costs import StagePlace
from .edge_costs import EdgeCodecs, EdgeCosts, End
from .grid_costs import best_grids, grid_cost, why_no_grid
from .layer_costs import (
    LayerCost,
    LayerCostInputs,
    StageCost,
    StateBytes,
    fixed_bytes_of,
    late_bytes,
    layer_cost,
    slowest_of,
    working_bytes,
)
from .tied_costs import TiedCosts, TiedSum, repeated_bytes

if TYPE_CHECKING:
    from reshard.compression import Policy

Stages = tuple[StagePlan, ...]


@dataclass(frozen=True)
class Candidate:
    """Stages and a number of microbatches that a method proposes.

    Attributes:
        predicted_seconds: prediction of the method itself; None if it makes none.
    """

    method: str
    stages: Stages
    num_microbatches: int
    predicted_seconds: float | None = None

    @property
    def text(self) -> str:
        """Unique text of this candidate."""
        return f"{count_of(self.num_microbatches, 'microbatch')}: {describe_stages(self.stages)}"

    @cached_property
    def pp_ranks(self) -> tuple[int, ...]:
        """The pp rank of each stage: stages on the same ranks share one."""
        return pp_ranks_of(self.stages)

    @property
    def is_interleaved(self) -> bool:
        """Whether several stages share a pp rank."""
        return len(set(self.pp_ranks)) < len(self.stages)

    @property
    def complexity(self) -> tuple[int, int, int]:
        """Sort key: number of microbatches, sum of ZeRO stages, number of pipeline stages.

        Of equally fast candidates, the one with the smallest key wins.
        """
        zero = sum(max(choice.zero for choice in stage.choices) for stage in self.stages)
        return self.num_microbatches, zero, len(self.stages)


#: The largest number of samples of a step: profiles measure and scale no more.
MAX_SAMPLES = 10**15


class SearchProblem:
    """The input of a search: the model, the devices and the allowed choices. Computed costs are kept.

    Attributes:
        edge_costs: costs of edges between stages.
        ties: costs of sums over stages that share parameters.
    """

    def __init__(
        self,
        graph: LayerGraph,
        cluster: Cluster,
        profile: LayerProfile | Mapping[str, LayerProfile],
        num_samples: int,
        states: StateBytes | None = None,
        rules: ChoiceRules | None = None,
        microbatch_counts: tuple[int, ...] = (),
        compression: Policy | None = None,
        compress_all: bool = False,
    ) -> None:
        """Check the parts of a search.

        Args:
            graph, cluster: the model and its devices.
            profile: the times of its layers, or ``{type of device: times}``.
            num_samples: samples of a step.
            states: bytes of the states of a parameter.
            rules: allowed choices of a layer.
            microbatch_counts: numbers of microbatches to try; default: divisors of ``num_samples``, at most 4 x the
                devices and 256.
            compression: codecs of edges (``pp``), of sums of gradients over replicas (``dp``), of collectives of ZeRO 3
                (``zero``) and of products on grids (``tp``).
            compress_all: encode all traffic inside stages that has a codec. Otherwise each layer takes the faster of
                encoded and raw traffic.

        Raises:
            ArgumentError: a profile is of another model, a type of device has none, no number of microbatches divides
                the samples, or the policy has other dimensions, or codecs whose rates the topology lacks.
        """
        self.profiles = profiles_of(cluster, profile)
        for type_profile in self.profiles.values():
            type_profile.check(graph)
        if type(num_samples) is not int or not 1 <= num_samples <= MAX_SAMPLES:
            raise ArgumentError(
                f"samples is {brief(num_samples)}; it must be a positive integer of at most {MAX_SAMPLES:,}"
            )
        for count in microbatch_counts:
            if type(count) is not int or count < 1 or num_samples % count:
                raise ArgumentError(f"{count} microbatches do not divide {num_samples} samples evenly")
        self.graph, self.cluster, self.num_samples = graph, cluster, num_samples
        self.states = StateBytes() if states is None else states
        self.rules = ChoiceRules() if rules is None else rules
        max_count = min(256, 4 * cluster.num_ranks, num_samples)
        divisors = tuple(count for count in range(1, max_count + 1) if num_samples % count == 0)
        self.microbatch_counts = microbatch_counts or divisors
        self.compression, self.compress_all = compression, compress_all
        codecs: EdgeCodecs = (None, None)
        if compression is not None:
            check_policy(compression, cluster)
            codecs = compression.pair("pp")
        message_seconds = max(type_profile.message_seconds for type_profile in self.profiles.values())
        self.edge_costs = EdgeCosts(graph, cluster, message_seconds, codecs)
        sums = self.codec_costs.all_reduce
        self.ties = TiedCosts(
            graph,
            cluster,
            self.states.gradient,
            message_seconds,
            None if compression is None else compression.dp,
            is_optional=not compress_all,
            min_ratio=sums.ratio if sums else 1.0,
        )
        #: Results that methods keep from one call to the next, such as tables.
        self.memo: dict[Hashable, Any] = {}
        self._layer_costs: dict[tuple[int, LayerChoice, StagePlace, int], LayerCost] = {}
        self._stage_costs: dict[tuple[StagePlan, int], StageCost] = {}
        self._choices: dict[tuple[int, int], tuple[LayerChoice, ...]] = {}
        self._places: dict[tuple[int, int], StagePlace] = {}

    def changed(self, **changes: Any) -> SearchProblem:
        """The search with other arguments. It keeps the costs of layers if they do not depend on the changes."""
        values = {
            "graph": self.graph,
            "cluster": self.cluster,
            "profile": self.profiles if self.cluster.device_types else self.profile,
            "num_samples": self.num_samples,
            "states": self.states,
            "rules": self.rules,
            "microbatch_counts": self.microbatch_counts,
            "compression": self.compression,
            "compress_all": self.compress_all,
        }
        if "cluster" in changes and "profile" not in changes and self.cluster.device_types:
            kept = changes["cluster"].types_of(0, changes["cluster"].num_ranks)
            values["profile"] = {name: self.profiles[name] for name in kept}
        other = SearchProblem(**{**values, **changes})
        if set(changes) <= {"cluster", "rules", "microbatch_counts"} and self.compression is None:
            other._layer_costs = self._layer_costs  # of the cluster, they depend on their place only
        if not {"compression", "compress_all"} & set(changes):
            other.edge_costs.share(self.edge_costs)
        return other

    @property
    def profile(self) -> LayerProfile:
        """The profile of the devices; if there are several types, the profile of the first type."""
        return next(iter(self.profiles.values()))

    @property
    def profile_hash(self) -> str:
        """Hash of all profiles."""
        hashes = [f"{name} {profile.hash}" for name, profile in sorted(self.profiles.items())]
        if len(hashes) == 1:
            return self.profile.hash
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:16]

    @property
    def is_guess(self) -> bool:
        """Whether any profile is an estimate."""
        return any(profile.is_guess for profile in self.profiles.values())

    def spread(self) -> tuple[float, str, float]:
        """:meth:`LayerProfile.spread` of the profile that varies most."""
        return max(profile.spread(self.graph) for profile in self.profiles.values())

    @cached_property
    def host_devices(self) -> int:
        """Devices of the smallest host: the most for tensor parallelism."""
        return min(end - first for _, first, end in self.cluster.hosts)

    def meshes(self, end: int) -> list[int]:
        """Numbers of devices of a stage whose last rank is ``end - 1``."""
        return [n for n in self.cluster.mesh_sizes if n <= end and self.cluster.is_mesh(end - n, end)]

    def choices(self, num_ranks: int, num_samples: int) -> tuple[LayerChoice, ...]:
        """Choices for the layers of a stage, for microbatches of ``num_samples`` samples that its replicas divide
        evenly.

        :func:`best_grids` selects the grids. :meth:`can_have` says which layers may have them.
        """
        if (num_ranks, num_samples) not in self._choices:
            allowed = self.rules.choices(num_ranks, self.host_devices)
            limit = max(layer.tp_limit for layer in self.graph.layers)
            plain = tuple(item for item in allowed if item.sample_shards(num_ranks) and item.tp <= limit)
            plain = tuple(item for item in plain if num_samples % item.sample_shards(num_ranks) == 0)
            self._choices[num_ranks, num_samples] = plain + self._best_grids(
                num_ranks, self.num_samples // num_samples, plain
            )
        return self._choices[num_ranks, num_samples]

    def _best_grids(
        self, num_ranks: int, num_microbatches: int, plain: Sequence[LayerChoice]
    ) -> tuple[LayerChoice, ...]:
        """The grids that come first for the first stage of some ranks."""
        shapes = self.rules.grid_shapes(num_ranks, self.host_devices)
        ends = range(num_ranks, self.cluster.num_ranks + 1)
        end = next((item for item in ends if num_ranks in self.meshes(item)), 0)
        if not shapes or not end:
            return ()
        place, classes = self.place(end - num_ranks, end), self.layer_classes
        layers = [(layer, self.class_of.count(number)) for number, layer in enumerate(classes)]
        firsts = [self.class_of.index(number) for number in range(len(classes))]
        return best_grids(
            layers,
            shapes,
            self.rules,
            plain,
            self.workload(num_microbatches),
            lambda number, choice: self.layer_cost(firsts[number], choice, place, num_microbatches),
        )

    def can_have(self, choice: LayerChoice, first: int, end: int) -> bool:
        """Whether layers ``first`` to ``end - 1`` may have a choice: not every layer can be on a grid."""
        if not choice.grid:
            return True
        return all(
            why_no_grid(self.layer_classes[number], choice.grid) is None for number in set(self.class_of[first:end])
        )

    @cached_property
    def codec_costs(self) -> CodecCosts:
        """The codecs of the traffic inside stages."""
        sizes = (self.states.weight, self.states.gradient)
        return CodecCosts.of(self.compression, self.cluster, self.graph.dtype, *sizes, not self.compress_all)

    @cached_property
    def layer_classes(self) -> tuple[Layer, ...]:
        """One layer of each class, without its name and the module that keeps it from a grid."""
        return tuple(dict.fromkeys(map(_anonymous, self.graph.layers)))

    @cached_property
    def class_of(self) -> tuple[int, ...]:
        """For each layer, the index of its class."""
        return tuple(self.layer_classes.index(_anonymous(layer)) for layer in self.graph.layers)

    def layer_cost(self, layer: int, choice: LayerChoice, place: StagePlace, num_microbatches: int) -> LayerCost:
        """The cost of a layer, which is the same for all layers of its class."""
        key = (self.class_of[layer], choice, place, num_microbatches)
        if key not in self._layer_costs:
            find_cost, layer_of_class = grid_cost if choice.grid else layer_cost, self.layer_classes[key[0]]
            self._layer_costs[key] = slowest_of(
                [
                    find_cost(layer_of_class, choice, place, self.workload(num_microbatches, name))
                    for name in place.device_types or self.profiles
                ]
            )
        return self._layer_costs[key]

    def workload(self, num_microbatches: int, device_type: str | None = None) -> LayerCostInputs:
        """Inputs of the costs of a step: its number of microbatches, and the type of device (default: the first)."""
        profile = self.profile if device_type is None else self.profiles[device_type]
        return LayerCostInputs(
            profile, self.states, self.num_samples // num_microbatches, num_microbatches, self.codec_costs
        )

    def place(self, first: int, end: int) -> StagePlace:
        """The place of ranks ``first`` to ``end - 1``."""
        if (first, end) not in self._places:
            self._places[first, end] = StagePlace.of(self.cluster, first, end)
        return self._places[first, end]

    def stage_cost(self, stage: StagePlan, num_microbatches: int) -> StageCost:
        """The cost of a stage for one of ``num_microbatches`` equal microbatches."""
        key = (stage, num_microbatches)
        if key not in self._stage_costs:
            self._stage_costs[key] = self._find_stage_cost(stage, num_microbatches)
        return self._stage_costs[key]

    def costs(self, stages: Stages, num_microbatches: int) -> tuple[tuple[StageCost, ...], tuple[TiedSum, ...]]:
        """The costs of all stages of a candidate, and the sums of gradients over stages, with their true costs.

        :meth:`stage_cost` does not know the other stages. So it counts the shortest time that such a sum can take.
        """
        exchanges, pp_ranks = self.ties.exchanges(stages), pp_ranks_of(stages)
        stage_costs = [self.stage_cost(stage, num_microbatches) for stage in stages]
        for index, cost in enumerate(stage_costs if self.graph.ties else ()):
            own = [exchange for exchange in exchanges if index in exchange.stages]
            nbytes = max((item.stage_bytes[item.stages.index(index)] for item in own), default=0.0)
            sharing = [pp_ranks[stage] for item in own for stage in item.stages if stage != index]
            stage_costs[index] = replace(
                cost,
                tie_seconds=sum(item.seconds for item in own),
                tie_bytes=nbytes,
                early_sync_seconds=0.0 if pp_ranks[index] in sharing else cost.early_sync_seconds,
            )
        return tuple(stage_costs), exchanges

    def _find_stage_cost(self, stage: StagePlan, num_microbatches: int) -> StageCost:
        place = self.place(stage.first_rank, stage.end_rank)
        costs = [
            self.layer_cost(stage.first_layer + index, choice, place, num_microbatches)
            for index, choice in enumerate(stage.choices)
        ]
        moved = self.relayout_seconds(stage, place, num_microbatches)
        repeated_states, repeated_gradients = repeated_bytes(self.graph, stage, costs)
        buffers, received = self.buffer_bytes(stage, num_microbatches)
        return StageCost(
            sum(cost.forward_seconds for cost in costs) + moved,
            sum(cost.backward_seconds for cost in costs) + moved,
            sum(cost.weight_grad_seconds for cost in costs),
            sum(cost.compute_seconds for cost in costs),
            sum(cost.tp_collective_seconds for cost in costs) + 2 * moved,
            sum(cost.all_gather_seconds for cost in costs),
            sum(cost.sync_seconds for cost in costs),
            sum(cost.state_bytes for cost in costs) - repeated_states,
            sum(cost.activation_bytes for cost in costs) + self.kept_bytes(stage, num_microbatches),
            working_bytes(costs) + max(cost.panel_bytes for cost in costs),
            buffers,
            self.cluster.memory_of(stage.first_rank, stage.end_rank),
            max(0.0, late_bytes(costs) - repeated_gradients),
            num_microbatches,
            *self.ties.least(stage, place),
            received,
            sum(cost.early_sync_seconds for cost in costs),
        )

    def relayout_seconds(self, stage: StagePlan, place: StagePlace, num_microbatches: int) -> float:
        """Seconds in which tensors between layers of one stage with unequal degrees change their layout, one way."""
        seconds = 0.0
        for index in range(1, stage.num_layers):
            seconds += self.relayout_between(
                stage.first_layer + index, stage.choices[index - 1], stage.choices[index], place, num_microbatches
            )
        return seconds

    def relayout_between(
        self, layer: int, before: LayerChoice, after: LayerChoice, place: StagePlace, num_microbatches: int
    ) -> float:
        """Seconds for the inputs of ``layer`` to change from the layout of one choice to that of another.

        Fewer replicas need an all-gather of samples; more replicas keep a part of what they have.
        """
        if before.tp >= after.tp:
            return 0.0
        num_samples = self.num_samples // num_microbatches
        nbytes = sum(tensor.sample_bytes for tensor in self.graph.between(0, layer, layer + 1)) * num_samples
        replicas = place.num_ranks // after.tp
        return place.replica_seconds(nbytes / replicas, place.num_ranks // (after.tp // before.tp), 1.0)

    def buffer_bytes(self, stage: StagePlan, num_microbatches: int) -> tuple[float, float]:
        """Bytes of the receives that a rank posts ahead, of tensors and of gradients, and of tensors alone."""
        num_samples = self.num_samples // num_microbatches
        received = self.received(stage.first_layer, stage.end_layer)
        returned = self.returned_sample_bytes(stage.first_layer, stage.end_layer)
        first, last = stage.sample_shards(stage.first_layer), stage.sample_shards(stage.end_layer - 1)
        cols = stage.choices[0].cols
        ahead = min(RECVS_AHEAD, num_microbatches) * num_samples
        tensors = ahead * cut_sample_bytes(received, cols) / first
        return tensors + ahead * returned / cols / last, tensors

    def kept_bytes(self, stage: StagePlan, num_microbatches: int) -> float:
        """Bytes of the outputs of a microbatch, which a rank keeps until their gradients return."""
        sent = cut_sample_bytes(self.sent(stage.first_layer, stage.end_layer), stage.choices[-1].cols)
        return self.num_samples // num_microbatches * sent / stage.sample_shards(stage.end_layer - 1)

    def returned_sample_bytes(self, first: int, end: int) -> int:
        """Bytes of a sample of the gradients that a stage of layers ``first`` to ``end - 1`` receives in a backward."""
        return sum(tensor.sample_bytes for tensor in self.sent(first, end) if tensor.has_gradient)

    def received(self, first: int, end: int) -> tuple[Tensor, ...]:
        """Tensors that a stage of layers ``first`` to ``end - 1`` receives in a forward."""
        return self.graph.between(0, first, end)

    def sent(self, first: int, end: int) -> tuple[Tensor, ...]:
        """Tensors that a stage of layers ``first`` to ``end - 1`` sends in a forward."""
        return self.graph.between(first, end, len(self.graph.layers))

    def edges(self, stages: Stages, num_microbatches: int) -> list[Edge]:
        """The edges between stages, with costs from the planner."""
        num_samples, edges = self.num_samples // num_microbatches, []
        for src, dst, tensors in stage_edges(self.graph, stages):
            ends = (end_of(stages[src], -1), end_of(stages[dst], 0))
            edges.append(self.edge_costs.edge((src, dst), tensors, num_samples, *ends))
        return edges

    def pipeline(self, stages: Stages, num_microbatches: int) -> Pipeline:
        """The pipeline of a candidate. Activations are scaled so that one limit, of 2**40 bytes, fits all pp ranks.

        Each pp rank has another amount of memory for activations; a schedule is built for one limit.
        """
        made = []
        costs, pp_ranks = [self.stage_cost(plan, num_microbatches) for plan in stages], pp_ranks_of(stages)
        for number, cost in enumerate(costs):
            own = [other for other, pp_rank in zip(costs, pp_ranks, strict=True) if pp_rank == pp_ranks[number]]
            free = max(1.0, cost.limit_bytes - fixed_bytes_of(own))
            split = cost.weight_grad_seconds
            made.append(
                Stage(
                    cost.forward_seconds,
                    cost.backward_seconds - split,
                    split,
                    max(1, int(min(SCALED_LIMIT * 4.0, cost.activation_bytes / free * SCALED_LIMIT))),
                    f"stage {number}",
                    whole_backward_seconds=cost.backward_seconds,
                )
            )
        edges = []
        for src, dst, tensors in stage_edges(self.graph, stages):
            ends = (end_of(stages[src], -1), end_of(stages[dst], 0))
            edge = self.edge_costs.price(tensors, self.num_samples // num_microbatches, *ends)
            loads = edge.forward_loads, edge.backward_loads
            edges.append(Edge(src, dst, edge.forward_seconds, edge.backward_seconds, *loads))
        return Pipeline(tuple(made), tuple(edges))

    def can_split(self, stages: Stages, num_microbatches: int) -> bool:
        """Whether the engine can split the backwards of all stages."""
        return all(choice.zero == 0 and not choice.recompute for stage in stages for choice in stage.choices)


def profiles_of(cluster: Cluster, profile: LayerProfile | Mapping[str, LayerProfile]) -> dict[str, LayerProfile]:
    """The profile of each type of device, in the order of the ranks; a single one has the name ``""`` without types.

    Raises:
        ArgumentError: a type has no profile, or profiles of types are given for a cluster without types.
    """
    types = list(dict.fromkeys(cluster.device_types))
    if isinstance(profile, LayerProfile):
        if len(types) > 1:
            raise ArgumentError(
                f"the cluster has devices of types {', '.join(map(repr, types))}, but there is one profile; pass "
                "{type: LayerProfile} with the profile of each type"
            )
        return {types[0] if types else "": profile}
    if not profile:
        raise ArgumentError("profile is an empty dict; pass a LayerProfile, or {type: LayerProfile}")
    for name, type_profile in profile.items():
        if not isinstance(type_profile, LayerProfile):
            raise ArgumentError(
                f"the profile of device type {name!r} must be a LayerProfile, not {brief(type_profile)}"
            )
    if not types:
        raise ArgumentError(
            f"there are profiles of device types {format_names(profile)}, but the cluster does not say which device "
            "has which type; pass Cluster(..., device_types=[...])"
        )
    missing = next((name for name in types if name not in profile), None)
    if missing is not None:
        raise ArgumentError(
            f"rank {cluster.device_types.index(missing)} of the cluster is a device of type {missing!r}, which has no "
            f"profile; there are profiles of {format_names(profile)}: measure the layers on it with profile_layers()"
        )
    return {name: profile[name] for name in types}


#: Limit of the scaled activations of :meth:`SearchProblem.pipeline`.
SCALED_LIMIT = 1 << 40


def _anonymous(layer: Layer) -> Layer:
    """A layer without the texts in which layers of a class differ."""
    return replace(layer, name="", grid_refusal="")


def cut_sample_bytes(tensors: Sequence[Tensor], cols: int) -> float:
    """Bytes of a sample of tensors on a rank of a stage that divides features over some columns."""
    return sum(tensor.sample_bytes / (cols if tensor.has_gradient else 1) for tensor in tensors)


def end_of(stage: StagePlan, layer: int) -> End:
    """The end of an edge at the first (0) or last (-1) layer of a stage."""
    return (stage.first_rank, stage.end_rank, stage.choices[layer].grid or stage.choices[layer].tp)


def stage_edges(graph: LayerGraph, stages: Sequence[StagePlan]) -> Iterator[tuple[int, int, tuple[Tensor, ...]]]:
    """``(src, dst, tensors)`` of each edge. A tensor that several stages read goes from each to the next."""
    stage_of = [number for number, stage in enumerate(stages) for _ in range(stage.num_layers)]
    tensors_of: dict[tuple[int, int], list[Tensor]] = {}
    for tensor in graph.tensors:
        holders = sorted({stage_of[layer] for layer in (tensor.writer, *tensor.readers)})
        for src, dst in itertools.pairwise(holders):
            tensors_of.setdefault((src, dst), []).append(tensor)
    for (src, dst), tensors in sorted(tensors_of.items()):
        yield src, dst, tuple(tensors)
