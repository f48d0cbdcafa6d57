"""Prices of the edges between stages: a bound at first, the planner's plans of the true layouts on demand."""

from __future__ import annotations

import re
from dataclasses import replace

from reshard.codecs import parse_codec
from reshard.dtypes import ITEMSIZE, dtype_name
from reshard.sharding import Mesh, TensorSpec

from ...costs import price_edge
from ...graph import Edge
from ...pipe.partition.stage_mesh import GRID_AXES, STAGE_AXES, layout_of_tensor
from ..inputs.choices import GridShape
from ..inputs.cluster import Cluster, hosts_are_alike
from ..inputs.layer_graph import LayerGraph, Tensor

#: ``(first rank, end rank, tp)`` of one end of an edge; in place of tp, the shape of a grid.
End = tuple[int, int, int | GridShape]

#: Codecs forward and backward.
EdgeCodecs = tuple[str | None, str | None]
#: Values for which the bytes of a codec are counted.
_NUM_VALUES = 1 << 20


def encoded_ratio(codec: str, dtype: str) -> float:
    """Bytes that a block codec makes of each byte of a large array."""
    return parse_codec(codec).nbytes((_NUM_VALUES,)) / (_NUM_VALUES * ITEMSIZE[dtype_name(dtype)])


class EdgePrices:
    """Prices edges by plans of the planner. Each price is computed once.

    Args:
        graph, cluster: the model and its devices.
        message_seconds: time of a message in addition to that of its bytes.
        codecs: of activations and of their gradients; each direction of an edge is encoded where that is faster.
    """

    def __init__(
        self, graph: LayerGraph, cluster: Cluster, message_seconds: float, codecs: EdgeCodecs = (None, None)
    ) -> None:
        self._codecs = codecs
        #: A lower bound of the bytes on the wire of each byte of a tensor.
        self.min_ratio = min([1.0, *(encoded_ratio(name, graph.dtype) for name in codecs if name is not None)])
        self.graph, self.cluster, self.message_seconds = graph, cluster, message_seconds
        self._is_uniform = hosts_are_alike(cluster)
        self._prices: dict[tuple[tuple[Tensor, ...], int, End, End], Edge] = {}

    @property
    def num_priced(self) -> int:
        """Number of prices that the planner has computed."""
        return len(self._prices)

    def is_priced(self, tensors: tuple[Tensor, ...], num_samples: int, src: End, dst: End) -> bool:
        """Whether the planner has priced this edge, or one between the same positions of equal hosts."""
        return not tensors or self._key(tensors, num_samples, src, dst) in self._prices

    def edge(self, numbers: tuple[int, int], tensors: tuple[Tensor, ...], num_samples: int, src: End, dst: End) -> Edge:
        """The priced edge between two stages, for microbatches of ``num_samples`` samples, with its tensors and
        layouts.

        Args:
            numbers: of the stages. tensors: what crosses. src, dst: the ends.
        """
        key = self._key(tensors, num_samples, src, dst)
        if key not in self._prices:
            _, _, a, b = key
            priced = self._price(make_edge((0, 1), tensors, num_samples, a, b))
            self._prices[key] = replace(
                priced,
                forward_seconds=priced.forward_seconds + self.message_seconds,
                backward_seconds=priced.backward_seconds + self.message_seconds * bool(priced.gradients),
            )
        priced, made = self._prices[key], make_edge(numbers, tensors, num_samples, src, dst)
        shift = self._shift(src)
        return replace(
            made,
            forward_seconds=priced.forward_seconds,
            backward_seconds=priced.backward_seconds,
            forward_loads=_shifted(priced.forward_loads, shift),
            backward_loads=_shifted(priced.backward_loads, shift),
            forward_codec=priced.forward_codec,
            backward_codec=priced.backward_codec,
        )

    def _price(self, edge: Edge) -> Edge:
        """The edge with its costs, in each direction with the codec if that is faster."""
        priced = price_edge(edge, self.cluster.topology)
        forward_codec, backward_codec = self._codecs
        if forward_codec is None and backward_codec is None:
            return priced
        encoded = replace(edge, forward_codec=forward_codec, backward_codec=backward_codec if edge.gradients else None)
        encoded = price_edge(encoded, self.cluster.topology)
        for way in ("forward", "backward"):
            if getattr(encoded, f"{way}_seconds") < getattr(priced, f"{way}_seconds"):
                names = [f"{way}_{what}" for what in ("seconds", "loads", "codec")]
                priced = replace(priced, **{name: getattr(encoded, name) for name in names})
        return priced

    def bound_seconds(self, tensors: tuple[Tensor, ...], num_samples: int, src: End, dst: End) -> tuple[float, float]:
        """Seconds forward and backward that no plan beats: unique bytes into hosts over the rate of their NICs."""
        nbytes = sum(tensor.sample_bytes for tensor in tensors) * num_samples
        returned = sum(tensor.sample_bytes for tensor in tensors if tensor.has_gradient) * num_samples
        per_byte = self.bound_per_byte(src, dst)
        return nbytes * per_byte, returned * per_byte

    def bound_per_byte(self, src: End, dst: End) -> float:
        """Seconds for each byte of a tensor that goes from the hosts of ``src`` to other hosts, 0 on one host."""
        senders = {host for host, _, _ in self.cluster.hosts_of(*src[:2])}
        receivers = {host for host, _, _ in self.cluster.hosts_of(*dst[:2])}
        if senders & receivers:
            return 0.0
        topology = self.cluster.topology
        hosts = topology.host
        leave = sum(max(hosts(h).egress_bytes_per_second, hosts(h).ingress_bytes_per_second) for h in senders)
        enter = sum(max(hosts(h).egress_bytes_per_second, hosts(h).ingress_bytes_per_second) for h in receivers)
        return self.min_ratio / min(leave, enter)

    def _shift(self, src: End) -> int:
        """Number of hosts by which equal hosts may be renumbered so that ``src`` begins on host 0."""
        return self.cluster.host_of(src[0]) if self._is_uniform else 0

    def _key(
        self, tensors: tuple[Tensor, ...], num_samples: int, src: End, dst: End
    ) -> tuple[tuple[Tensor, ...], int, End, End]:
        ranks = self._shift(src) * (self.cluster.hosts[0][2] - self.cluster.hosts[0][1])
        plain = tuple(replace(tensor, name=str(i), writer=0, readers=(1,)) for i, tensor in enumerate(tensors))
        return (plain, num_samples, (src[0] - ranks, src[1] - ranks, src[2]), (dst[0] - ranks, dst[1] - ranks, dst[2]))


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


def _shifted(loads: tuple[tuple[str, float], ...], hosts: int) -> tuple[tuple[str, float], ...]:
    """Loads with the ports of hosts renumbered."""
    return loads if not hosts else tuple((_shift_port(port, hosts), seconds) for port, seconds in loads)


def _shift_port(port: str, hosts: int) -> str:
    return re.sub(r"^host (\d+)", lambda found: f"host {int(found[1]) + hosts}", port)
