"""What one layer costs on a grid: computation, communication and parameters of the busiest rank.

:func:`~reshard.parallel.choose_grid` adds the prices of layers up; so does the strategy search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from reshard.errors import ArgumentError

from .costs import AxisTraffic, find_exchange_seconds, find_product_seconds
from .grid.cuts import chunk_spans, size_of
from .products.dataflow import PANEL_WIDTH, ProductKind, ProductShape, busiest_elements, is_weight_stationary

#: Collectives of a norm, each of a few bytes per token: mean and squares in a forward, both in one in a backward.
_NORM_FORWARD, _NORM_BACKWARD = 2, 1
#: Bytes of a token in such a collective.
_NORM_BYTES = 8.0


@dataclass(frozen=True)
class LayerSizes:
    """The properties of a layer that determine its price on a grid.

    Args:
        hidden: features of what it passes on. sequence: tokens of one row.
        products: ``(in, out)`` of its matrix products. Projections that share an input are one.
        num_heads, head_size: of its attention; without heads, it has none.
        num_norms: normalizations over all features. num_entries: entries of an embedding of ``hidden`` features.

    Raises:
        ArgumentError: a size is not a positive integer, or a count is negative.
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
        if not all(type(each) is int and each >= 1 for each in sizes) or not all(
            type(each) is int and each >= 0 for each in counts
        ):
            raise ArgumentError(f"sizes of a layer on a grid must be positive integers, and counts at least 0: {self}")

    @property
    def most_cols(self) -> int:
        """The most columns of a grid that each have a head, or a feature if there is no attention."""
        return self.num_heads or min(self.hidden, *itertools.chain(*self.products), 1 << 30)

    @property
    def forward_flops(self) -> float:
        """Multiplications and additions of the forward of one row in one process."""
        products = sum(2.0 * self.sequence * k * n for k, n in self.products)
        return products + attention_flops(self, self.sequence, 1)

    @property
    def num_params(self) -> int:
        """Elements of its weight matrices and its embedding."""
        return sum(k * n for k, n in self.products) + self.num_entries * self.hidden


@dataclass(frozen=True)
class GridLoad:
    """A grid and its part of a batch.

    Attributes:
        rows, cols, depth: the shape.
        tokens: tokens of each row of the grid, in a layer that has most of them.
        traffic: of each axis.
        itemsize: bytes of an element of activations and weights on the wire. gradient_bytes: of one of a gradient.
        panel: see :class:`~reshard.parallel.Linear`.
        coded_ratio: bytes on the wire of each byte of a matrix product. coding_seconds: to encode and decode an element
            that a rank receives; nothing hides them.
    """

    rows: int
    cols: int
    depth: int
    tokens: tuple[int, ...]
    traffic: Mapping[str, AxisTraffic]
    itemsize: int
    gradient_bytes: float
    panel: int = PANEL_WIDTH
    coded_ratio: float = 1.0
    coding_seconds: float = 0.0


class PassSeconds(NamedTuple):
    """One pass of a layer: computation, and communication that computation does not hide."""

    compute: float
    exposed: float


@dataclass(frozen=True)
class LayerPrice:
    """What one layer costs on a grid, for a batch.

    Attributes:
        forward, input_grad, weight_grad: the passes, without norms.
        norm_forward_seconds, norm_backward_seconds: collectives of norms.
        depth_seconds: sums of gradients over the depth, once in a step.
        parameters: elements of weight matrices and embeddings of a rank.
        panel_elements: elements of panels of the largest product, the one that is multiplied and the next one.
        num_stationary: products, of all, that keep the weight in place.
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

    @property
    def passes(self) -> tuple[PassSeconds, PassSeconds, PassSeconds]:
        """Forward, gradient of the input, and gradient of the weights."""
        return self.forward, self.input_grad, self.weight_grad


def price_layer(layer: LayerSizes, load: GridLoad, flops_per_second: float) -> LayerPrice:
    """The price of one layer on a grid.

    Each product takes its cheapest dataflow. Its local multiplication hides its communication but for one panel.

    Args:
        layer: the layer. load: the grid and its part of the batch.
        flops_per_second: of one rank, in multiplications and additions.
    """
    attention = attention_flops(layer, load.tokens[0], load.cols) / flops_per_second
    compute, exposed = [attention, 2 * attention, 0.0], [0.0, 0.0, 0.0]
    parameters, panel_elements, stationary, sums = 0, 0, 0, 0.0
    for k, n in layer.products:
        product = ProductShape(min(k, n), tuple(map(size_of, chunk_spans(max(k, n), load.cols))), load.rows, load.panel)
        multiply = 2.0 * load.tokens[0] * product.p * product.q[0] / flops_per_second
        ahead, back = ProductKind.CONTRACT_P, ProductKind.CONTRACT_Q
        kinds = (ahead, back) if k <= n else (back, ahead)
        for number, kind in enumerate((*kinds, ProductKind.CONTRACT_TOKENS)):
            keeps = is_weight_stationary(kind, product, load.tokens)
            itemsize = load.itemsize * load.coded_ratio
            moved = sum(find_product_seconds(kind, product, load.tokens, load.traffic, itemsize, keeps_weight=keeps))
            steps = 1 if keeps else product.panels.num_panels
            stationary += keeps
            compute[number] += multiply
            exposed[number] += max(moved - multiply * (steps - 1) / steps, moved / steps)
            if load.coding_seconds:
                received = busiest_elements(kind, product, load.tokens, keeps_weight=keeps)
                exposed[number] += received * load.coding_seconds
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
    norm = layer.num_norms * load.traffic["col"].seconds(load.tokens[0] * _NORM_BYTES)
    forward, input_grad, weight_grad = map(PassSeconds, compute, exposed)
    return LayerPrice(
        forward,
        input_grad,
        weight_grad,
        norm * _NORM_FORWARD,
        norm * _NORM_BACKWARD,
        sums,
        parameters,
        panel_elements,
        stationary,
    )


def attention_flops(layer: LayerSizes, tokens: int, cols: int) -> float:
    """Operations of attention in a forward: scores, and scores times values. A causal mask does not reduce them."""
    return 4.0 * tokens * layer.sequence * layer.head_size * math.ceil(layer.num_heads / cols)


def _depth_seconds(elements: int, load: GridLoad) -> float:
    """A sum over the depth: a scatter and a gather."""
    return 2 * load.traffic["depth"].seconds(elements * load.gradient_bytes / load.depth)


def _lookup_seconds(layer: LayerSizes, load: GridLoad) -> float:
    """An embedding: tokens are gathered along a column of the grid, and entries are exchanged in a layer of it."""
    size = load.rows * load.cols
    elements = load.tokens[0] * math.ceil(layer.hidden / load.cols) * (size - 1) / size
    tokens = load.traffic["row"].seconds(load.tokens[0] * _NORM_BYTES)
    return tokens + find_exchange_seconds(elements * load.itemsize, load.traffic)
