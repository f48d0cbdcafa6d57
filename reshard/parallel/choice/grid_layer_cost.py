"""The cost of one layer on a grid: computation, communication and parameters of the busiest rank.

:func:`~reshard.parallel.choose_grid` adds the costs of layers up; so does the strategy search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from reshard.errors import ArgumentError

from ..grid.cuts import chunk_spans, size_of
from ..products.dataflow import PANEL_WIDTH, LayerProducts, ProductShape
from .axis_costs import AxisCost, find_exchange_seconds, find_product_seconds

#: Collectives of a norm: a forward sums values and then squares, a backward sums both at once.
_NORM_FORWARD, _NORM_BACKWARD = 2, 1
#: Bytes per token in such a collective.
_NORM_BYTES = 8.0


#: The largest size of a layer: products of sizes stay below the largest float.
MAX_SIZE = 1 << 40


@dataclass(frozen=True)
class LayerSizes:
    """The properties of a layer that determine its cost on a grid.

    Args:
        hidden: features of its output.
        sequence: tokens of one row.
        products: ``(in, out)`` of each matrix product. Projections that share an input count as one product.
        num_heads, head_size: number and size of the heads of its attention; ``num_heads`` is 0 if it has none.
        num_norms: normalizations over all features.
        num_entries: entries of an embedding of ``hidden`` features.

    Raises:
        ArgumentError: a size is not a positive integer, or a count is negative, or one is above :data:`MAX_SIZE`.
    """

    hidden: int
    sequence: int
    products: tuple[tuple[int, int], ...] = ()
    num_heads: int = 0
    head_size: int = 0
    num_norms: int = 0
    num_entries: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "products", tuple((k, n) for k, n in self.products))
        sizes = (self.hidden, self.sequence, *(size for product in self.products for size in product))
        counts = (self.num_heads, self.head_size, self.num_norms, self.num_entries)
        if not all(type(item) is int and 1 <= item <= MAX_SIZE for item in sizes) or not all(
            type(count) is int and 0 <= count <= MAX_SIZE for count in counts
        ):
            raise ArgumentError(
                f"sizes of a layer on a grid must be positive integers of at most {MAX_SIZE:,}, and counts at least 0: "
                f"{self}"
            )

    @property
    def max_cols(self) -> int:
        """The largest number of columns of which each gets a head, or a feature if there is no attention."""
        return self.num_heads or min(self.hidden, *itertools.chain(*self.products), 1 << 30)

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of the forward of one row in one process; a multiplication and its addition: 2."""
        products = sum(2.0 * self.sequence * k * n for k, n in self.products)
        return products + attention_flops(self, self.sequence, 1)

    @property
    def num_params(self) -> int:
        """Elements of its weight matrices and its embedding."""
        return sum(k * n for k, n in self.products) + self.num_entries * self.hidden


@dataclass(frozen=True)
class GridLoad:
    """A grid, the costs of collectives on it, and the tokens of one batch.

    Attributes:
        rows, cols, depth: shape of the grid.
        tokens: number of tokens of each row of the grid, in the depth layer with the most tokens.
        axis_costs: costs of collectives by axis name.
        itemsize: bytes of an element of activations and weights on the wire.
        gradient_bytes: bytes of an element of a gradient.
        panel, keep_inputs: see :class:`~reshard.parallel.Linear`.
        encoded_ratio: bytes on the wire per byte of a message of a matrix product.
        coding_seconds: seconds to encode and decode one element that a rank receives. Computation does not hide them.
    """

    rows: int
    cols: int
    depth: int
    tokens: tuple[int, ...]
    axis_costs: Mapping[str, AxisCost]
    itemsize: int
    gradient_bytes: float
    panel: int = PANEL_WIDTH
    encoded_ratio: float = 1.0
    coding_seconds: float = 0.0
    keep_inputs: bool = False


class PassSeconds(NamedTuple):
    """One pass of a layer: computation, and communication that computation does not hide."""

    compute: float
    exposed: float


@dataclass(frozen=True)
class GridLayerCost:
    """The cost of one layer on a grid, for a batch.

    Attributes:
        forward, input_grad, weight_grad: the passes, without norms.
        norm_forward_seconds, norm_backward_seconds: collectives of norms.
        depth_seconds: all-reduces of gradients over the depth, once per step.
        parameters: elements of weight matrices and embeddings on a rank.
        panel_elements: elements in the two panels that the largest product holds at a time: the one that is multiplied
            and the one that arrives.
        num_stationary: number of products that keep the weight in place.
        kept_elements: gathered elements that a rank keeps for the backward, with ``keep_inputs``.
    """

    forward: PassSeconds
    input_grad: PassSeconds
    weight_grad: PassSeconds
    norm_forward_seconds: float
    norm_backward_seconds: float
    depth_seconds: float
    parameters: int
    panel_elements: int
    num_stationary: int
    kept_elements: int = 0

    @property
    def passes(self) -> tuple[PassSeconds, PassSeconds, PassSeconds]:
        """Forward, gradient of the input, and gradient of the weights."""
        return self.forward, self.input_grad, self.weight_grad


def find_layer_cost(layer: LayerSizes, load: GridLoad, flops_per_second: float) -> GridLayerCost:
    """The cost of one layer on a grid.

    Products use the dataflows that move least. The local multiplication of a product hides its communication, except
    for one panel. Both products of a backward share an all-gather, so a schedule that runs them apart moves a little
    more than this cost says.

    Args:
        layer: the layer.
        load: the grid and its part of the batch.
        flops_per_second: rate of one rank; a multiplication and its addition count as two.
    """
    attention = attention_flops(layer, load.tokens[0], load.cols) / flops_per_second
    compute, exposed = [attention, 2 * attention, 0.0], [0.0, 0.0, 0.0]
    parameters, panel_elements, stationary, kept, sums = 0, 0, 0, 0, 0.0
    for k, n in layer.products:
        product = ProductShape(min(k, n), tuple(map(size_of, chunk_spans(max(k, n), load.cols))), load.rows, load.panel)
        multiply = 2.0 * load.tokens[0] * product.p * product.q[0] / flops_per_second
        products = LayerProducts(product, load.tokens, k < n, load.keep_inputs)
        flows, itemsize = products.dataflows, load.itemsize * load.encoded_ratio
        kept += products.kept(flows)
        moved = find_product_seconds(products, flows, load.axis_costs, itemsize)
        for number, (seconds, keeps) in enumerate(zip(map(sum, moved), flows, strict=True)):
            steps = 1 if keeps else product.panels.num_panels
            stationary += keeps
            compute[number] += multiply
            exposed[number] += max(seconds - multiply * (steps - 1) / steps, seconds / steps)
        if load.coding_seconds:
            for number, received in enumerate(products.received(flows)):
                exposed[number] += int(received.max()) * load.coding_seconds
        weight = size_of(product.p_rows[0]) * product.q[0]
        width = math.ceil(product.p / product.panels.num_panels)
        panel_elements = max(panel_elements, 2 * width * (load.tokens[0] + product.q[0]))
        parameters += weight
        sums += _depth_seconds(weight, load)
    if layer.num_entries:
        seconds = _lookup_seconds(layer, load)
        exposed[0], exposed[1] = exposed[0] + seconds, exposed[1] + seconds
        table = math.ceil(layer.num_entries / load.rows) * math.ceil(layer.hidden / load.cols)
        parameters += table
        sums += _depth_seconds(table, load)
    norm = layer.num_norms * load.axis_costs["col"].seconds(load.tokens[0] * _NORM_BYTES)
    forward, input_grad, weight_grad = map(PassSeconds, compute, exposed)
    return GridLayerCost(
        forward,
        input_grad,
        weight_grad,
        norm * _NORM_FORWARD,
        norm * _NORM_BACKWARD,
        sums,
        parameters,
        panel_elements,
        stationary,
        kept,
    )


def attention_flops(layer: LayerSizes, tokens: int, cols: int) -> float:
    """Operations of attention in a forward: scores, then scores times values. A causal mask does not reduce them."""
    return 4.0 * tokens * layer.sequence * layer.head_size * math.ceil(layer.num_heads / cols)


def _depth_seconds(elements: int, load: GridLoad) -> float:
    """Seconds of an all-reduce over the depth: a reduce-scatter and an all-gather."""
    return 2 * load.axis_costs["depth"].seconds(elements * load.gradient_bytes / load.depth)


def _lookup_seconds(layer: LayerSizes, load: GridLoad) -> float:
    """Seconds of an embedding: all-gather tokens along a grid column, then exchange entries in a depth layer."""
    size = load.rows * load.cols
    elements = load.tokens[0] * math.ceil(layer.hidden / load.cols) * (size - 1) / size
    tokens = load.axis_costs["row"].seconds(load.tokens[0] * _NORM_BYTES)
    return tokens + find_exchange_seconds(elements * load.itemsize, load.axis_costs)
