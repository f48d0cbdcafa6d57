"""Costs of layers on grids of :mod:`reshard.parallel`: those of ``choose_grid``, with times of the profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from reshard.dtypes import ITEMSIZE, dtype_name
from reshard.parallel.choice.axis_costs import AxisCost, find_axis_cost
from reshard.parallel.choice.grid_layer_cost import GridLayerCost, GridLoad, LayerSizes, find_layer_cost
from reshard.parallel.grid.cuts import AXES
from reshard.topology import Host, Link, Topology

from ..inputs.layer_choices import ChoiceRules, GridShape, LayerChoice
from ..inputs.layer_graph import Layer
from ..inputs.layer_profile import LayerTimes
from .collective_costs import StagePlace
from .layer_costs import LayerCost, LayerCostInputs, device_seconds_of_zero_3, overlapped_seconds

#: Limit on the grids that a search considers, for each number of ranks and each ZeRO stage.
MAX_GRIDS = 2


def why_no_grid(layer: Layer, grid: GridShape) -> str | None:
    """The reason why a layer cannot be on a grid of some shape; None if it can."""
    if layer.grid_sizes is None:
        return layer.grid_refusal or "its sizes on a grid are not known"
    if grid[1] > layer.grid_sizes.max_cols:
        return f"it has only {layer.grid_sizes.max_cols} heads or features for {grid[1]} columns"
    return None


def grid_cost(layer: Layer, choice: LayerChoice, place: StagePlace, work: LayerCostInputs) -> LayerCost:
    """The cost of a layer on a grid for one microbatch. See :func:`~.costs.layer_costs.layer_cost`.

    Computation takes the busiest rank's share of the profiled time of one rank. Communication takes the time of
    :func:`~reshard.parallel.choice.grid_layer_cost.find_layer_cost` for a rank of that speed. Gradients are summed
    over the depth once in a step; such a sum keeps a copy of them.
    """
    sizes = layer.grid_sizes
    assert sizes is not None
    own = work.num_samples / (choice.grid[0] * choice.grid[2])
    times = work.profile.times(layer.key, 1)[0]
    layer_times = times.at(own)
    cost, share = _best_cost(sizes, choice.grid, place, layer_times, own, work), _share(sizes, choice.grid)
    forward = layer_times.forward_seconds * share + cost.forward.exposed + cost.norm_forward_seconds
    deferred = layer_times.weight_grad_seconds * share + cost.weight_grad.exposed
    backward = (
        layer_times.backward_seconds * share
        + cost.input_grad.exposed
        + cost.weight_grad.exposed
        + cost.norm_backward_seconds
    )
    compute = (layer_times.forward_seconds + layer_times.backward_seconds) * share
    if choice.recompute:
        backward += forward
        compute += layer_times.forward_seconds * share
    before = forward + backward
    params = cost.parameters + math.ceil((layer.num_params - sizes.num_params) / choice.cols)
    is_cut = choice.cols if sizes.products else 1  # an embedding saves only its tokens, which columns do not divide
    saved = (layer_times.saved_bytes or layer.saved_bytes * own) / is_cut
    kept = min(saved, layer.input_bytes * own / is_cut) if choice.recompute else saved
    state_costs = _price_grid_states(params, choice, place, work)
    sync = cost.depth_seconds if choice.zero == 0 else state_costs.sync_seconds
    if state_costs.all_gather_seconds:
        forward, backward = (
            seconds + state_costs.all_gather_seconds
            if state_costs.is_encoded
            else overlapped_seconds(seconds, state_costs.all_gather_seconds, work.profile.slowdown)
            for seconds in (forward, backward)
        )
    gather, scatter = device_seconds_of_zero_3(times, choice, params / max(1, layer.num_params))
    forward, backward, sync = forward + gather, backward + gather, sync + scatter
    return LayerCost(
        forward,
        backward,
        0.0 if choice.recompute or choice.zero >= 2 else min(deferred, backward),
        compute,
        before - compute,
        forward + backward - before,
        state_costs.state_bytes,
        state_costs.gradient_bytes,
        kept,
        saved - kept,
        state_costs.gathered_bytes,
        sync,
        float(cost.panel_elements * _itemsize(work)),
    )


class _GridStateCosts(NamedTuple):
    """States of a layer on one rank, and what moves over the depth of a grid.

    Attributes:
        all_gather_seconds: time of all-gathers of parameters, in each forward and in each backward.
        sync_seconds: time of all-reduces of gradients, once in a step.
        is_encoded: whether all-gathers are encoded, so that computation does not hide them.
    """

    state_bytes: float
    gradient_bytes: float
    gathered_bytes: float = 0.0
    all_gather_seconds: float = 0.0
    sync_seconds: float = 0.0
    is_encoded: bool = False


def _price_grid_states(params: float, choice: LayerChoice, place: StagePlace, work: LayerCostInputs) -> _GridStateCosts:
    """Bytes of states of ``params`` parameters on a rank, and the collectives of ZeRO over the depth of a grid.

    The function of this name in :mod:`.layer_costs` is for layers without a grid.
    """
    states, num_microbatches, codec_costs, depth = work.states, work.num_microbatches, work.codec_costs, choice.grid[2]
    weights, gradients, optimizer = params * states.weight, params * states.gradient, params * states.optimizer
    if choice.zero == 0:  # the sum over the depth makes a copy of the gradients
        return _GridStateCosts(weights + gradients * (2 if depth > 1 else 1) + optimizer, gradients)
    depth_cost = _axis_costs(place, choice.grid)["depth"]
    gather, scatter = depth_cost.seconds(weights / depth), depth_cost.seconds(gradients / depth)
    if choice.zero < 3:
        kept = gradients if choice.zero == 1 or num_microbatches > 1 else gradients / depth
        return _GridStateCosts(weights + kept + optimizer / depth, kept, 0.0, 0.0, scatter + gather)
    is_encoded = False
    if codec_costs.all_gather is not None:
        coding = codec_costs.all_gather
        encoded = coding.coding_seconds(weights / depth, weights) + depth_cost.seconds(weights * coding.ratio / depth)
        is_encoded = not codec_costs.is_optional or encoded < gather
        gather = encoded if is_encoded else gather
    if codec_costs.reduce_scatter is not None:
        coding = codec_costs.reduce_scatter
        encoded = coding.coding_seconds(gradients, gradients) + depth_cost.seconds(gradients * coding.ratio / depth)
        scatter = codec_costs.faster(scatter, encoded)
    held = gradients / depth if num_microbatches == 1 else gradients
    return _GridStateCosts((weights + optimizer) / depth + held, held, weights, gather, scatter, is_encoded)


def _exposed(cost: GridLayerCost) -> float:
    return sum(compute_pass.exposed for compute_pass in cost.passes)


def compute_share(layer: Layer, grid: GridShape) -> float:
    """The busiest rank's part of the computation of a sample of a layer."""
    sizes = layer.grid_sizes
    assert sizes is not None
    return _share(sizes, grid)


@lru_cache(maxsize=4096)
def _share(sizes: LayerSizes, grid: GridShape) -> float:
    if not sizes.forward_flops:
        return 1.0 / grid[1]
    alone = AxisCost(0.0, 0.0, 0.0, 0)
    load = GridLoad(1, grid[1], 1, (sizes.sequence,), dict.fromkeys(AXES, alone), 1, 1)
    return find_layer_cost(sizes, load, 1.0).forward.compute / sizes.forward_flops


def _best_cost(
    sizes: LayerSizes, grid: GridShape, place: StagePlace, layer_times: LayerTimes, own: float, work: LayerCostInputs
) -> GridLayerCost:
    """The cost of a layer, with encoded products if they are faster or must be encoded."""
    rows, cols, depth = grid
    flops, itemsize = sizes.forward_flops * own, _itemsize(work)
    rate = flops / layer_times.forward_seconds if flops and layer_times.forward_seconds else math.inf
    tokens = (max(1, math.ceil(own * sizes.sequence)),) * rows
    load = GridLoad(rows, cols, depth, tokens, _axis_costs(place, grid), itemsize, work.states.gradient)
    cost, coding = find_layer_cost(sizes, load, rate), work.codec_costs.panels
    if coding is None:
        return cost
    seconds = coding.coding_seconds(itemsize, 2 * itemsize)  # in an all-gather, a rank also decodes its own part
    encoded = find_layer_cost(sizes, replace(load, encoded_ratio=coding.ratio, coding_seconds=seconds), rate)
    return encoded if not work.codec_costs.is_optional or _exposed(encoded) < _exposed(cost) else cost


def _itemsize(work: LayerCostInputs) -> int:
    return ITEMSIZE[dtype_name(work.profile.dtype)]


@lru_cache(maxsize=4096)
def _axis_costs(place: StagePlace, grid: GridShape) -> Mapping[str, AxisCost]:
    """The costs of collectives along each axis of a grid on the ranks of a place, layer by layer and row by row.

    All hosts of a place have the NIC of its slowest one. Without pods, layers that fill the same part of hosts are
    alike. The costs inside layers are then found only once for them.
    """
    rows, cols, depth = grid
    num_hosts = place.num_hosts
    hosts = [rank * num_hosts // place.num_ranks for rank in range(place.num_ranks)]
    nics = (Link.of(place.nic_bytes_per_second or 1.0),)
    topology = Topology(
        tuple(hosts),
        tuple(Host(nics, pod) for pod in place.pods) or (Host(nics),),
        pods=tuple(map(Link.of, place.uplinks)),
        inside_bytes_per_second=place.inside_bytes_per_second,
        inside_latency_seconds=place.inside_latency_seconds,
        latency_seconds=place.latency_seconds,
    )
    ranks = np.arange(place.num_ranks).reshape(depth, rows, cols)
    period = math.lcm(place.num_ranks // num_hosts, rows * cols) // (rows * cols) if num_hosts > 1 else 1
    are_alike = not place.pods and place.num_ranks % num_hosts == 0 and depth % period == 0
    first = ranks[: period if are_alike else depth]
    return {
        axis: find_axis_cost(topology, ranks if axis == "depth" else first, number) for number, axis in enumerate(AXES)
    }


def best_grids(
    layers: Sequence[tuple[Layer, int]],
    shapes: Sequence[GridShape],
    rules: ChoiceRules,
    plain: Sequence[LayerChoice],
    work: LayerCostInputs,
    cost: Callable[[int, LayerChoice], LayerCost],
) -> tuple[LayerChoice, ...]:
    """Of all grids of a stage, the fastest ones.

    The limit holds for each ZeRO stage separately. A grid is left out if another choice is at least as fast and
    has no more bytes of states and of activations, summed over all layers that can be on the grid.

    Args:
        layers: one layer of each class, and how many of the class the model has.
        shapes: shapes of the grids.
        rules: rules of the search.
        plain: choices of the search without grids.
        work: samples and microbatches.
        cost: the cost of a layer of a class, by its index in ``layers``, under a choice.
    """
    able = [number for number, (layer, _) in enumerate(layers) if layer.grid_sizes is not None]
    if not able:
        return ()

    def totals(choice: LayerChoice) -> tuple[float, float, float]:
        seconds = states = activations = 0.0
        for number in able:
            times, ranked = layers[number][1], cost(number, choice)
            computed = ranked.forward_seconds + ranked.backward_seconds
            seconds += times * (work.num_microbatches * computed + ranked.sync_seconds)
            states += times * ranked.state_bytes + 3 * ranked.gathered_bytes
            activations += times * ranked.activation_bytes
        return seconds, states, activations

    ranked: list[tuple[tuple[float, float, float], LayerChoice]] = []
    recompute = rules.recompute
    for shape in shapes:
        if work.num_samples % (shape[0] * shape[2]) or any(why_no_grid(layers[number][0], shape) for number in able):
            continue
        for zero in rules.grid_zeros(shape):
            choice = LayerChoice.on_grid(*shape, zero=zero, recompute=recompute[0])
            ranked.append((totals(choice), choice))
    ranked.sort()
    kept = [totals(choice) for choice in plain if choice.recompute == recompute[0]]
    best: list[LayerChoice] = []
    for values, choice in ranked:
        alike = sum(item.zero == choice.zero and item.recompute == recompute[0] for item in best)
        if alike < MAX_GRIDS and not any(all(a <= b for a, b in zip(item, values, strict=True)) for item in kept):
            kept.append(values)
            best += [replace(choice, recompute=flag) for flag in recompute]
    return tuple(best)
