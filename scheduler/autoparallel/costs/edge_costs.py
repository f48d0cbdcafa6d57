"""Costs of the edges between stages: a bound at first, the planner's plans of the true layouts on demand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from reshard.codecs import parse_codec
from reshard.dtypes import ITEMSIZE, dtype_name
from reshard.sharding import Mesh, TensorSpec
from reshard.topology import Host, Topology

from ...model_stages.partition.stage_mesh import GRID_AXES, STAGE_AXES, layout_of_tensor
from ...pipeline import Edge, Loads
from ...transfer_costs import price_edge
from ..inputs.cluster import Cluster
from ..inputs.layer_choices import GridShape
from ..inputs.layer_graph import LayerGraph, Tensor

#: ``(first rank, end rank, tp)`` of one end of an edge; in place of tp, the shape of a grid.
End = tuple[int, int, int | GridShape]

#: Tensors that cross an edge, and samples of a microbatch.
_Carried = tuple[tuple[Tensor, ...], int]
#: Codecs forward and backward.
EdgeCodecs = tuple[str | None, str | None]
#: Values for which the bytes of a codec are counted.
_NUM_VALUES = 1 << 20


def encoded_ratio(codec: str, dtype: str) -> float:
    """Bytes that a block codec makes of each byte of a large array."""
    return parse_codec(codec).nbytes((_NUM_VALUES,)) / (_NUM_VALUES * ITEMSIZE[dtype_name(dtype)])


@dataclass(frozen=True)
class EdgeCost:
    """Seconds, loads of links and codecs of an edge in both directions, as in :class:`~reshard.scheduler.Edge`."""

    forward_seconds: float
    backward_seconds: float
    forward_loads: Loads
    backward_loads: Loads
    forward_codec: str | None
    backward_codec: str | None


class EdgeCosts:
    """Prices edges by plans of the planner. Equal edges between equal hosts are planned once.

    Args:
        graph, cluster: the model and its devices.
        message_seconds: time of a message in addition to that of its bytes.
        codecs: codecs of activations and of their gradients; each direction of an edge is encoded where that is faster.
    """

    def __init__(
        self, graph: LayerGraph, cluster: Cluster, message_seconds: float, codecs: EdgeCodecs = (None, None)
    ) -> None:
        self._codecs = codecs
        #: A lower bound of the bytes on the wire of each byte of a tensor.
        self.min_ratio = min([1.0, *(encoded_ratio(name, graph.dtype) for name in codecs if name is not None)])
        self.graph, self.cluster, self.message_seconds = graph, cluster, message_seconds
        self._planned: dict[Topology, dict[tuple[_Carried, End, End], EdgeCost]] = {}  # by the links of both ends
        self._known: dict[tuple[_Carried, End, End], EdgeCost] = {}

    @property
    def num_priced(self) -> int:
        """Number of costs that the planner has computed, with those of :meth:`share`."""
        return sum(map(len, self._planned.values()))

    def share(self, other: EdgeCosts) -> None:
        """Use what the planner has computed for another cluster, and the other way round. The codecs must be equal."""
        self._planned = other._planned

    def edge(self, numbers: tuple[int, int], tensors: tuple[Tensor, ...], num_samples: int, src: End, dst: End) -> Edge:
        """The priced edge between two stages, with its tensors and layouts.

        Args:
            numbers: numbers of the stages. Others: see :meth:`price`.
        """
        made = make_edge(numbers, tensors, num_samples, src, dst)
        return replace(made, **vars(self.price(tensors, num_samples, src, dst)))

    def price(self, tensors: tuple[Tensor, ...], num_samples: int, src: End, dst: End) -> EdgeCost:
        """The cost of an edge for microbatches of ``num_samples`` samples.

        Args:
            tensors: what crosses.
            src, dst: the ends.
        """
        if src == dst:  # stages on the same ranks, which divide tensors alike
            return EdgeCost(0.0, 0.0, (), (), None, None)
        key = ((tensors, num_samples), src, dst)
        if key not in self._known:
            self._known[key] = self._find(*key)
        return self._known[key]

    def _find(self, carried: _Carried, src: End, dst: End) -> EdgeCost:
        """The cost, from a plan of anonymous tensors between the ranks of both ends alone."""
        ranks = sorted({*range(*src[:2]), *range(*dst[:2])})
        links, hosts, pods = _select(self.cluster.topology, ranks)
        tensors, num_samples = carried
        plain = tuple(replace(tensor, name=str(i), writer=0, readers=(1,)) for i, tensor in enumerate(tensors))
        a, b = ((ranks.index(first), ranks.index(end - 1) + 1, shape) for first, end, shape in (src, dst))
        planned, key = self._planned.setdefault(links, {}), ((plain, num_samples), a, b)
        if key not in planned:
            priced = self._price(make_edge((0, 1), plain, num_samples, a, b), links)
            planned[key] = EdgeCost(*(getattr(priced, field.name) for field in fields(EdgeCost)))
        cost = planned[key]
        has_gradients = any(tensor.has_gradient for tensor in tensors)
        return replace(
            cost,
            forward_seconds=cost.forward_seconds + self.message_seconds,
            backward_seconds=cost.backward_seconds + self.message_seconds * has_gradients,
            forward_loads=_renamed(cost.forward_loads, hosts, pods),
            backward_loads=_renamed(cost.backward_loads, hosts, pods),
        )

    def _price(self, edge: Edge, links: Topology) -> Edge:
        """The edge with its costs, in each direction with the codec if that is faster."""
        priced = price_edge(edge, links)
        forward_codec, backward_codec = self._codecs
        if forward_codec is None and backward_codec is None:
            return priced
        encoded = replace(edge, forward_codec=forward_codec, backward_codec=backward_codec if edge.gradients else None)
        encoded = price_edge(encoded, links)
        for direction in ("forward", "backward"):
            if getattr(encoded, f"{direction}_seconds") < getattr(priced, f"{direction}_seconds"):
                names = [f"{direction}_{what}" for what in ("seconds", "loads", "codec")]
                priced = replace(priced, **{name: getattr(encoded, name) for name in names})
        return priced

    def bound_seconds(self, tensors: tuple[Tensor, ...], num_samples: int, src: End, dst: End) -> tuple[float, float]:
        """Seconds forward and backward that no plan beats: a latency, and bytes over the rates of ports."""
        nbytes = sum(tensor.sample_bytes for tensor in tensors) * num_samples
        returned = sum(tensor.sample_bytes for tensor in tensors if tensor.has_gradient) * num_samples
        per_byte, fixed = self.bound_per_byte(src[:2], dst[:2]), self.fixed_seconds(src[:2], dst[:2])
        if not self._hosts_of(src[:2]) & self._hosts_of(dst[:2]):
            per_byte = max(per_byte, self.own_per_byte(src), self.own_per_byte(dst))
        return nbytes * per_byte + fixed * bool(nbytes), returned * per_byte + fixed * bool(returned)

    def fixed_seconds(self, src: tuple[int, int], dst: tuple[int, int]) -> float:
        """Seconds that a transfer between two ranges of ranks takes at least, in addition to those of its bytes."""
        topology = self.cluster.topology
        if src[0] < dst[1] and dst[0] < src[1]:  # bytes may stay on their rank
            return self.message_seconds
        senders, receivers = self._hosts_of(src), self._hosts_of(dst)
        latencies = [topology.latency_seconds] * (len(senders | receivers) > 1)
        latencies += [topology.inside_latency_seconds] * bool(senders & receivers)
        return self.message_seconds + topology.start_seconds + min(latencies)

    def _hosts_of(self, ranks: tuple[int, int]) -> set[int]:
        return {host for host, _, _ in self.cluster.hosts_of(*ranks)}

    def bound_per_byte(self, src: tuple[int, int], dst: tuple[int, int]) -> float:
        """Seconds for each byte of a tensor between two ranges of ranks, in either direction, with any layouts.

        Between ranks of different hosts, all bytes leave the hosts of one end and enter those of the other. Within a
        host, they pass the links of the ranks of each end.
        """
        senders, receivers = self._hosts_of(src), self._hosts_of(dst)
        topology = self.cluster.topology
        if len(senders | receivers) == 1 and (src[1] <= dst[0] or dst[1] <= src[0]):
            rate = topology.inside_bytes_per_second or math.inf
            rate *= min(src[1] - src[0], dst[1] - dst[0])
            return self.min_ratio / min(rate, topology.inside_total_bytes_per_second or math.inf)
        if senders & receivers:
            return 0.0
        return self.min_ratio / min(sum(map(self._host_rate, hosts)) for hosts in (senders, receivers))

    def own_per_byte(self, end: End) -> float:
        """The same for one end with its layout, if the other end is on other hosts.

        Samples that only ranks of one host have must leave or enter this host.
        """
        first, stop, shape = end
        width = shape if isinstance(shape, int) else shape[1]  # ranks that have the same samples
        num_shards, seconds = (stop - first) // width, 0.0
        for host, begin, after in self.cluster.hosts_of(first, stop):
            num_own = (after - first) // width - -(-(begin - first) // width)
            seconds = max(seconds, num_own / num_shards / self._host_rate(host))
        return self.min_ratio * seconds

    def _host_rate(self, host: int) -> float:
        """Bytes per second of the NICs of a host, in their faster direction."""
        links = self.cluster.topology.host(host)
        return max(links.egress_bytes_per_second, links.ingress_bytes_per_second)


def make_edge(numbers: tuple[int, int], tensors: tuple[Tensor, ...], num_samples: int, src: End, dst: End) -> Edge:
    """An edge without costs: samples and features are divided over both stages as ``Pipe`` divides them."""
    meshes = [_mesh(*end) for end in (src, dst)]
    specs = []
    for tensor in tensors:
        shape = (tensor.shape[0] * num_samples, *tensor.shape[1:])
        one, other = (layout_of_tensor(mesh, len(shape), 0, has_features=tensor.has_gradient) for mesh in meshes)
        specs.append(TensorSpec(shape, tensor.dtype, one, other, tensor.name))
    without = frozenset(tensor.name for tensor in tensors if not tensor.has_gradient)
    return Edge(*numbers, tensors=tuple(specs), without_gradient=without)


def _mesh(first: int, end: int, shape: int | GridShape) -> Mesh:
    """The mesh of a stage."""
    ranks = tuple(range(first, end))
    if isinstance(shape, int):
        return Mesh(ranks, dict(zip(STAGE_AXES, ((end - first) // shape, shape), strict=True)))
    rows, cols, depth = shape
    return Mesh(ranks, dict(zip(GRID_AXES, (depth, rows, cols), strict=True)))


def _select(topology: Topology, ranks: Sequence[int]) -> tuple[Topology, list[int], list[int]]:
    """The links of some ranks, and the numbers that their hosts and pods have in the topology.

    All single hosts whose inside is alike have the same links, because a plan inside a host uses no NIC.
    """
    hosts = list(dict.fromkeys(topology.host_of_rank[rank] for rank in ranks))
    pods = list(dict.fromkeys(pod for host in hosts if (pod := topology.host(host).pod) is not None))
    links = topology.select(ranks)
    if len(hosts) == 1:
        links = replace(links, hosts=(Host(),), nic_of_rank=(0,) * len(ranks), pods=())
    return links, hosts, pods


def _renamed(loads: Loads, hosts: Sequence[int], pods: Sequence[int]) -> Loads:
    """Loads with the names of the ports of hosts and pods that have these numbers."""

    def rename(port: str) -> str:
        kind, number, rest = port.split(" ", 2)
        return f"{kind} {(hosts if kind == 'host' else pods)[int(number)]} {rest}"

    return tuple((rename(port), seconds) for port, seconds in loads)
