"""Sums of the gradients of parameters that several stages share, such as an embedding that is also the head's weight.

The engine adds these gradients once in a step, after the sums over replicas: each stage sends its gradient to all other
stages at once, and adds the gradients that it receives. Parameters shared by other layers follow one after the other.
See :mod:`reshard.scheduler.gradients.tied_params`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.sharding import Layout, Mesh, TensorSpec

from ...pipeline import Edge, Loads
from ...transfer_costs import price_edge
from ..inputs.cluster import Cluster, hosts_are_alike
from ..inputs.layer_choices import LayerChoice
from ..inputs.layer_graph import LayerGraph, is_shared, own_layer
from ..inputs.stages import StagePlan
from .collective_costs import StagePlace
from .layer_costs import LayerCost

#: Dtype of gradients by the bytes of an element. Others travel as bytes, which no codec encodes.
_DTYPES = {2.0: "bfloat16", 4.0: "float32", 8.0: "float64"}


class TiedEnd(NamedTuple):
    """The ranks of a stage, and how they divide a shared parameter.

    ``inner`` is the number of neighbouring ranks that share a layer. ``over_replicas`` and ``over_inner`` say whether
    the parameter is divided over the replicas and over these ranks.
    """

    first: int
    end: int
    inner: int
    over_replicas: bool
    over_inner: bool

    @property
    def layout(self) -> Layout:
        """The layout of the parameter, as one dim."""
        sizes = {"replica": (self.end - self.first) // self.inner, "inner": self.inner}
        axes = ("replica",) * self.over_replicas + ("inner",) * self.over_inner
        return Layout(Mesh(tuple(range(self.first, self.end)), sizes), (axes or None,))


@dataclass(frozen=True)
class TiedSum:
    """One sum over stages.

    Attributes:
        layers: layers that share the parameters.
        stages: stages that have some of these layers.
        nbytes: bytes of the gradients that each stage sends to each other one, in all.
        seconds: time of the sum, from when all of its stages are ready.
        codec: codec of the gradients on the wire; None: raw.
        stage_bytes: for each of the stages, bytes on a device for the gradients that it receives and adds.
    """

    layers: tuple[int, ...]
    stages: tuple[int, ...]
    nbytes: float
    seconds: float
    codec: str | None
    stage_bytes: tuple[float, ...]


def tied_share(graph: LayerGraph, layer: int, num_params: int) -> float:
    """The part of a layer's parameters that a tie of ``num_params`` parameters has."""
    return num_params / max(1, graph.layers[layer].num_params)


def repeated_bytes(graph: LayerGraph, stage: StagePlan, costs: Sequence[LayerCost]) -> tuple[float, float]:
    """Bytes that layers of a stage count twice because they share parameters: of all states, and of gradients alone."""
    states, gradients = 0.0, 0.0
    for tied, number in graph.ties:
        own = own_layer(tied, stage.first_layer, stage.end_layer)
        for layer in [item for item in tied if own is not None and stage.first_layer <= item < own]:
            share, cost = tied_share(graph, layer, number), costs[layer - stage.first_layer]
            states += share * cost.state_bytes
            gradients += share * cost.gradient_bytes
    return states, gradients


def divides_inner(graph: LayerGraph, layer: int, num_params: int, choice: LayerChoice) -> bool:
    """Whether the ranks that share a layer divide its tied parameters. Grids do, and torch where it can."""
    if choice.grid:
        return True
    layer_of_graph = graph.layers[layer]
    return 1 < choice.tp <= layer_of_graph.tp_limit and layer_of_graph.tp_params >= num_params


def num_parts(graph: LayerGraph, layer: int, num_params: int, choice: LayerChoice, num_ranks: int) -> int:
    """Parts that the ranks of a stage divide the tied parameters of a layer into."""
    inner = choice.tp if divides_inner(graph, layer, num_params, choice) else 1
    return inner * (num_ranks // choice.tp if choice.zero == 3 else 1)


def sum_bytes(nbytes: float, parts: int, num_stages: int, is_encoded: bool) -> float:
    """Bytes of a device while it adds gradients: the received gradients, the same joined in one tensor, and the sum.

    A stage that compresses its gradients receives its own, too.
    """
    return nbytes / parts * (2 * num_stages + is_encoded)


class TiedCosts:
    """Prices sums over stages by plans of the planner. Each cost is computed once.

    Args:
        graph, cluster: the model and its devices.
        gradient_bytes: bytes of the gradient of a parameter.
        message_seconds: fixed time of a message.
        codec: codec of gradients.
        is_optional: whether it is used only where it is faster.
        min_ratio: bytes on the wire of each byte of gradients, at least.
    """

    def __init__(
        self,
        graph: LayerGraph,
        cluster: Cluster,
        gradient_bytes: float,
        message_seconds: float,
        codec: str | None = None,
        *,
        is_optional: bool = False,
        min_ratio: float = 1.0,
    ) -> None:
        self.graph, self.cluster, self.gradient_bytes = graph, cluster, gradient_bytes
        self.message_seconds, self.is_optional = message_seconds, is_optional
        self.codec = codec if gradient_bytes in _DTYPES else None
        self.min_ratio = min_ratio if self.codec else 1.0
        self._is_uniform = hosts_are_alike(cluster)
        self._known: dict[tuple[tuple[TiedEnd, ...], int], tuple[float, str | None]] = {}
        self._sends: dict[tuple[TiedEnd, TiedEnd, int, str | None], tuple[float, Loads]] = {}
        rates = [cluster.topology.host(host) for host, _, _ in cluster.hosts]
        self._host_rate = max(max(rate.egress_bytes_per_second, rate.ingress_bytes_per_second) for rate in rates)

    def exchanges(self, stages: Sequence[StagePlan]) -> tuple[TiedSum, ...]:
        """The sums over stages of a step, in order."""
        exchanges = []
        for tied, number in self.graph.ties:
            having = [
                (index, stage, layer)
                for index, stage in enumerate(stages)
                if (layer := own_layer(tied, stage.first_layer, stage.end_layer)) is not None
            ]
            nbytes = number * self.gradient_bytes
            if len(having) < 2 or not nbytes:
                continue
            seconds, codec = self.price([self._end(stage, layer, number) for _, stage, layer in having], number)
            parts = (
                num_parts(self.graph, layer, number, stage.choices[layer - stage.first_layer], stage.num_ranks)
                for _, stage, layer in having
            )
            sizes = tuple(sum_bytes(nbytes, part, len(having), codec is not None) for part in parts)
            exchanges.append(TiedSum(tied, tuple(index for index, _, _ in having), nbytes, seconds, codec, sizes))
        return tuple(exchanges)

    def least(self, stage: StagePlan, place: StagePlace) -> tuple[float, float]:
        """Lower bounds on the sums over a stage and others: their seconds, and the bytes of a device for one sum."""
        seconds, max_bytes = 0.0, 0.0
        for tied, number in self.graph.ties:
            layer = own_layer(tied, stage.first_layer, stage.end_layer)
            if layer is not None and is_shared(tied, stage.first_layer, stage.end_layer):
                choice = stage.choices[layer - stage.first_layer]
                one, nbytes = self.min_of(tied, number, layer, choice, place)
                seconds, max_bytes = seconds + one, max(max_bytes, nbytes)
        return seconds, max_bytes

    def min_of(
        self, tied: Sequence[int], num_params: int, layer: int, choice: LayerChoice, place: StagePlace
    ) -> tuple[float, float]:
        """Least seconds and bytes of a sum over two stages, on the ranks of the one that has ``layer`` of the tie."""
        nbytes = num_params * self.gradient_bytes
        if not nbytes:
            return 0.0, 0.0
        parts = num_parts(self.graph, layer, num_params, choice, place.num_ranks)
        moved = nbytes * self.min_ratio
        seconds = moved / parts / max(self.cluster.inside_bytes_per_second, self._host_rate)
        has_both_ends = tied[0] == 0 and tied[-1] == len(self.graph.layers) - 1
        if place.num_hosts > 1 or (has_both_ends and len(self.cluster.hosts) > 1):  # the stages span hosts
            seconds = max(seconds, moved / (place.num_hosts * self._host_rate))
        return seconds + self.message_seconds, sum_bytes(nbytes, parts, 2, False)

    def price(self, ends: Sequence[TiedEnd], num_params: int) -> tuple[float, str | None]:
        """Seconds in which all stages send their gradients to each other, and the codec that they use."""
        hosts = self.cluster.host_of(min(end.first for end in ends)) if self._is_uniform else 0
        ranks = hosts * (self.cluster.hosts[0][2] - self.cluster.hosts[0][1])
        key = (tuple(end._replace(first=end.first - ranks, end=end.end - ranks) for end in ends), num_params)
        if key not in self._known:
            self._known[key] = self._price(*key)
        return self._known[key]

    def _price(self, ends: Sequence[TiedEnd], num_params: int) -> tuple[float, str | None]:
        raw = self._exchange_seconds(ends, num_params, None)
        if self.codec is None:
            return raw, None
        encoded = self._exchange_seconds(ends, num_params, self.codec)
        return (encoded, self.codec) if encoded < raw or not self.is_optional else (raw, None)

    def _exchange_seconds(self, ends: Sequence[TiedEnd], num_params: int, codec: str | None) -> float:
        """Seconds of all transfers at once: sends of a stage share its ports, and so do receives."""
        sent, received = [0.0] * len(ends), [0.0] * len(ends)
        ports: dict[str, float] = {}
        for pair in itertools.combinations(range(len(ends)), 2):
            for src, dst in (pair, pair[::-1]):
                send_seconds, loads = self._send(ends[src], ends[dst], num_params, codec)
                sent[src] += send_seconds
                received[dst] += send_seconds
                for port, seconds in loads:
                    ports[port] = ports.get(port, 0.0) + seconds
        return max(*sent, *received, *ports.values()) + self.message_seconds

    def _send(self, src: TiedEnd, dst: TiedEnd, num_params: int, codec: str | None) -> tuple[float, Loads]:
        """Seconds and loads of ports of the gradients that one stage sends to another."""
        key = (src, dst, num_params, codec)
        if key not in self._sends:
            dtype = _DTYPES.get(self.gradient_bytes)
            numel = num_params if dtype else math.ceil(num_params * self.gradient_bytes)
            spec = TensorSpec((numel,), dtype or "uint8", src.layout, dst.layout, "tie")
            edge = Edge(0, 1, tensors=(spec,), forward_codec=codec, without_gradient=frozenset({"tie"}))
            priced = price_edge(edge, self.cluster.topology)
            self._sends[key] = priced.forward_seconds, priced.forward_loads
        return self._sends[key]

    def _end(self, stage: StagePlan, layer: int, num_params: int) -> TiedEnd:
        choice = stage.choices[layer - stage.first_layer]
        is_cut = divides_inner(self.graph, layer, num_params, choice)
        return TiedEnd(stage.first_rank, stage.end_rank, choice.tp, choice.zero == 3, is_cut)
