"""``choose_grid``: estimate the step time and memory of every grid of a model, and sort the grids that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from reshard.arguments import check_arguments
from reshard.errors import ArgumentError
from reshard.formatting import brief, format_bytes
from reshard.topology import Topology

from ..grid.cuts import AXES, chunk_spans, size_of
from ..products.dataflow import PANEL_WIDTH
from .axis_costs import find_axis_cost
from .grid_layer_cost import GridLoad, find_layer_cost
from .transformer import TransformerSizes

#: Elements that a layer saves for its backward, per token and hidden feature: inputs of products and norms,
#: projections, and tensors that attention and the MLP save.
_SAVED_PER_FEATURE = 20


@dataclass(frozen=True)
class GridCost:
    """A grid, and the estimated time and memory of one training step on it.

    Attributes:
        rows, cols, depth: shape of the grid.
        order: axis names, from the slowest to the fastest varying over consecutive ranks.
        compute_seconds: computation of matrix products and attention on the busiest rank.
        product_seconds: communication of products that does not overlap with computation.
        depth_seconds: all-reduces of gradients over depth.
        other_seconds: communication of norms.
        memory_bytes: parameters, gradients, optimizer state and activations of a rank.
        num_stationary: number of products of a step that keep the weight in place.
    """

    rows: int
    cols: int
    depth: int
    order: tuple[str, ...]
    compute_seconds: float
    product_seconds: float
    depth_seconds: float
    other_seconds: float
    memory_bytes: float
    num_stationary: int

    @property
    def seconds(self) -> float:
        """Estimated seconds of one training step."""
        return self.compute_seconds + self.product_seconds + self.depth_seconds + self.other_seconds

    @property
    def kind(self) -> str:
        """The usual name of the shape, such as ``2.5-D``."""
        if self.rows == self.cols == 1:
            return "replicas" if self.depth > 1 else "one rank"
        if self.rows == 1:
            return "1-D" if self.depth == 1 else "1-D + replicas"
        return "2-D" if self.depth == 1 else "2.5-D"

    def ranks(self, ranks: Sequence[int]) -> np.ndarray:
        """``(depth, rows, cols)`` array with the rank at each position, for ``DeviceMesh``."""
        return _arrange(ranks, (self.depth, self.rows, self.cols), self.order)

    def __str__(self) -> str:
        return f"[{self.rows}, {self.cols}, {self.depth}]"


@dataclass(frozen=True)
class GridChoice:
    """All grids of :func:`choose_grid`.

    Attributes:
        candidates: grids that fit, the fastest first.
        too_large: grids that need too much memory, the fastest first.
        refused: ``(shape, reason)`` of each shape that cannot run the model.
        memory_limit_bytes: memory limit of a rank, or infinity.
    """

    candidates: tuple[GridCost, ...]
    too_large: tuple[GridCost, ...]
    refused: tuple[tuple[str, str], ...]
    memory_limit_bytes: float

    @property
    def best(self) -> GridCost:
        """The fastest grid that fits."""
        return self.candidates[0]

    def explain(self, count: int = 8) -> str:
        """A table of the fastest ``count`` shapes, each with its fastest rank order, then of shapes that do not fit.

        If more shapes fit, a line says how many.
        """
        lines = [
            f"{'grid':>12} {'kind':>14} {'seconds':>9} {'compute':>9} {'products':>9} {'depth':>9} {'norms':>9} "
            f"{'memory':>10}  ranks vary fastest along"
        ]
        seen: set[str] = set()
        for cost in self.candidates:
            if str(cost) in seen or len(seen) == count:
                continue
            seen.add(str(cost))
            parts = (cost.compute_seconds, cost.product_seconds, cost.depth_seconds, cost.other_seconds)
            lines.append(
                f"{cost!s:>12} {cost.kind:>14} {cost.seconds:>9.4g} "
                + " ".join(f"{part:>9.3g}" for part in parts)
                + f" {format_bytes(cost.memory_bytes):>10}  {', '.join(reversed(cost.order))}"
            )
        more = len({str(cost) for cost in self.candidates}) - len(seen)
        if more:
            lines.append(f"{'':>12} {more} slower {'shape fits' if more == 1 else 'shapes fit'}; pass a larger count")
        shapes = {str(cost): cost for cost in self.too_large}
        lines += [
            f"{name:>12} needs {format_bytes(cost.memory_bytes)} of {format_bytes(self.memory_limit_bytes)}"
            for name, cost in shapes.items()
        ]
        lines += [f"{name:>12} {reason}" for name, reason in self.refused]
        return "\n".join(lines)


@check_arguments(rows=(1, 2**40), itemsize=(1, 2**20), state_bytes=(1, 2**20), panel=(1, 2**40))
def choose_grid(
    model: Any,
    topology: Topology,
    ranks: Sequence[int],
    memory_limit_bytes: float = math.inf,
    *,
    rows: int,
    flops_per_second: float,
    itemsize: int = 4,
    state_bytes: int = 16,
    panel: int = PANEL_WIDTH,
    keep_inputs: bool = False,
) -> GridChoice:
    """Estimate the time of a training step for every grid shape and rank order, and sort them by time.

    Each product uses the dataflow that moves the fewest elements. Its communication overlaps with its local
    multiplication, except for one panel. :mod:`~reshard.parallel.products.dataflow` has the formulas for the bytes. The
    estimate counts these bytes on NICs, on uplinks of pods and inside hosts, and adds one latency per collective and
    panel.

    Args:
        model: :class:`TransformerSizes`, or a model or config that :meth:`TransformerSizes.of` reads.
        topology: hosts and links.
        ranks: ranks of the grid; list the ranks of each host next to each other.
        memory_limit_bytes: memory limit of a rank.
        rows: rows of a batch, over all ranks.
        flops_per_second: rate of one rank; a multiplication and its addition count as two.
        itemsize: bytes of an element of activations and weights.
        state_bytes: bytes of a parameter with its gradient and optimizer state; 16 for Adam in float32.
        panel, keep_inputs: as in :class:`~reshard.parallel.Linear` and :func:`~reshard.parallel.parallelize`.

    Raises:
        ArgumentError: no grid fits (the error says what the smallest needs), or an argument is invalid.
    """
    sizes = model if isinstance(model, TransformerSizes) else TransformerSizes.of(model)
    for name, value in (("flops_per_second", flops_per_second), ("memory_limit_bytes", memory_limit_bytes)):
        if not value > 0:
            raise ArgumentError(f"{name} is {brief(value)}; it must be a positive number")
    if not len(ranks) or len(set(ranks)) < len(ranks) or min(ranks) < 0 or max(ranks) >= len(topology.host_of_rank):
        raise ArgumentError(
            f"ranks must be different ranks of the topology, which has {len(topology.host_of_rank)}, not {list(ranks)}"
        )
    workload = _Workload(
        sizes, topology, tuple(ranks), rows, flops_per_second, itemsize, state_bytes, panel, keep_inputs
    )
    costs: list[GridCost] = []
    refused: list[tuple[str, str]] = []
    for shape in _shapes(len(ranks)):
        depth, grid_rows, cols = shape
        name = f"[{grid_rows}, {cols}, {depth}]"
        if cols > sizes.num_heads:
            refused.append((name, f"has more columns than the {sizes.num_heads} heads"))
        elif depth * grid_rows > rows:
            refused.append((name, f"needs {depth * grid_rows} rows in a batch, which has {rows}"))
        else:
            costs += [workload.estimate(shape, order) for order in _orders(shape)]
    costs.sort(key=lambda cost: (cost.seconds, cost.memory_bytes, str(cost), cost.order))
    fitting = tuple(cost for cost in costs if cost.memory_bytes <= memory_limit_bytes)
    if not fitting:
        min_bytes = min((cost.memory_bytes for cost in costs), default=math.inf)
        detail = (
            f"the smallest needs {format_bytes(min_bytes)} of {format_bytes(memory_limit_bytes)} on each rank; "
            "use more ranks, or fewer rows in a batch"
            if costs
            else "; ".join(f"{name} {reason}" for name, reason in refused)
        )
        raise ArgumentError(f"no grid of {len(ranks)} ranks fits: {detail}")
    too_large = tuple(cost for cost in costs if cost.memory_bytes > memory_limit_bytes)
    return GridChoice(fitting, too_large, tuple(refused), memory_limit_bytes)


def _shapes(size: int) -> Iterator[tuple[int, int, int]]:
    """``(depth, rows, cols)`` of all grids with this number of ranks."""
    divisors = [number for number in range(1, size + 1) if size % number == 0]
    return ((d, r, size // (d * r)) for d in divisors for r in divisors if size % (d * r) == 0)


def _orders(shape: tuple[int, int, int]) -> list[tuple[str, ...]]:
    """Orders of the axes over consecutive ranks, one for all orders that differ only in axes of size 1."""
    orders = {}
    for order in permutations(AXES):
        orders[tuple(axis for axis in order if shape[AXES.index(axis)] > 1)] = order
    return list(orders.values())


def _arrange(ranks: Sequence[int], shape: tuple[int, int, int], order: Sequence[str]) -> np.ndarray:
    """``(depth, rows, cols)`` array of ranks; consecutive ranks differ along the last axis of ``order``."""
    sizes = [shape[AXES.index(axis)] for axis in order]
    array = np.array(ranks).reshape(sizes)
    return array.transpose([list(order).index(axis) for axis in AXES])


@dataclass(frozen=True)
class _Workload:
    """The arguments of :func:`choose_grid` that are the same for all grids."""

    sizes: TransformerSizes
    topology: Topology
    ranks: tuple[int, ...]
    rows: int
    flops_per_second: float
    itemsize: int
    state_bytes: int
    panel: int
    keep_inputs: bool

    def estimate(self, shape: tuple[int, int, int], order: tuple[str, ...]) -> GridCost:
        """Estimate a grid of shape ``(depth, rows, cols)`` with the axes in this order over the ranks."""
        sizes, (depth, rows, cols) = self.sizes, shape
        arranged = _arrange(self.ranks, shape, order)
        axis_costs = {axis: find_axis_cost(self.topology, arranged, number) for number, axis in enumerate(AXES)}
        layer_rows = size_of(chunk_spans(self.rows, depth)[0])
        tokens = tuple(size_of(span) * sizes.sequence for span in chunk_spans(layer_rows, rows))
        load = GridLoad(
            rows,
            cols,
            depth,
            tokens,
            axis_costs,
            self.itemsize,
            self.itemsize,
            self.panel,
            keep_inputs=self.keep_inputs,
        )
        compute = exposed = sums = norms = 0.0
        parameters = stationary = kept = 0
        for layer, count in ((sizes.layer, sizes.num_layers), (sizes.output, 1)):
            cost = find_layer_cost(layer, load, self.flops_per_second)
            compute += count * sum(compute_pass.compute for compute_pass in cost.passes)
            exposed += count * sum(compute_pass.exposed for compute_pass in cost.passes)
            sums += count * cost.depth_seconds
            norms += count * (cost.norm_forward_seconds + cost.norm_backward_seconds)
            parameters += count * cost.parameters
            stationary += count * cost.num_stationary
            kept += count * cost.kept_elements
        saved = sizes.num_layers * _SAVED_PER_FEATURE * tokens[0] * math.ceil(sizes.hidden / cols)
        logits = 3 * tokens[0] * math.ceil(sizes.vocabulary / cols)
        memory = parameters * self.state_bytes + (saved + logits + kept) * self.itemsize
        return GridCost(rows, cols, depth, order, compute, exposed, sums, norms, memory, stationary)
