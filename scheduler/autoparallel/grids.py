"""What layers cost on grids of :mod:`reshard.parallel`: prices of ``choose_grid`` with times of the profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reshard.dtypes import ITEMSIZE, dtype_name
from reshard.parallel.costs import AxisTraffic, find_traffic
from reshard.parallel.grid.cuts import AXES
from reshard.parallel.layer_price import GridLoad, LayerPrice, LayerSizes, price_layer
from reshard.topology import Host, Port, Topology

from .choices import Choice, GridShape
from .codecs import CodecCost, CodecCosts
from .costs import LayerCost, Place, StateBytes, overlapped_seconds
from .graph import Layer
from .profile import Profile, Sample

if TYPE_CHECKING:
    from .problem import Problem

#: Limit on the grids that a search considers, for each number of ranks and each ZeRO stage.
MOST_GRIDS = 2


def why_no_grid(layer: Layer, grid: GridShape) -> str | None:
    """Why a layer cannot be on a grid of some shape; None if it can."""
    if layer.grid_sizes is None:
        return layer.grid_refusal or "its sizes on a grid are not known"
    if grid[1] > layer.grid_sizes.most_cols:
        return f"it has only {layer.grid_sizes.most_cols} heads or features for {grid[1]} columns"
    return None


def grid_cost(
    layer: Layer,
    choice: Choice,
    place: Place,
    profile: Profile,
    states: StateBytes,
    rows: int,
    microbatches: int,
    codec_costs: CodecCosts,
) -> LayerCost:
    """The cost of a layer on a grid for microbatches of ``rows`` rows. See :func:`~.costs.layer_cost`.

    Computation is the busiest rank's part of what the profile says of one rank. Communication is what
    :func:`~reshard.parallel.layer_price.price_layer` says for a rank of that speed. Gradients are summed over the depth
    once in a step; such sums leave a copy of them.
    """
    sizes = layer.grid_sizes
    assert sizes is not None
    own = rows / (choice.grid[0] * choice.grid[2])
    sample = profile.times(layer.key, 1)[0].at(own)
    itemsize = ITEMSIZE[dtype_name(profile.dtype)]
    price, share = _price(sizes, choice.grid, place, sample, own, itemsize, states.gradient, None)
    if codec_costs.panels is not None:
        coded, _ = _price(sizes, choice.grid, place, sample, own, itemsize, states.gradient, codec_costs.panels)
        if not codec_costs.is_optional or _exposed(coded) < _exposed(price):
            price = coded
    forward = sample.forward_seconds * share + price.forward.exposed + price.norm_forward_seconds
    put_off = sample.weight_grad_seconds * share + price.weight_grad.exposed
    backward = (
        sample.backward_seconds * share
        + price.input_grad.exposed
        + price.weight_grad.exposed
        + price.norm_backward_seconds
    )
    compute = (sample.forward_seconds + sample.backward_seconds) * share
    if choice.recompute:
        backward += forward
        compute += sample.forward_seconds * share
    before = forward + backward
    params = price.parameters + math.ceil((layer.num_params - sizes.num_params) / choice.cols)
    is_cut = choice.cols if sizes.products else 1  # of an embedding, tokens are saved
    saved = (sample.saved_bytes or layer.saved_bytes * own) / is_cut
    kept = min(saved, layer.input_bytes * own / is_cut) if choice.recompute else saved
    shared = _share_states(params, choice, place, states, microbatches, codec_costs)
    sync = price.depth_seconds if choice.zero == 0 else shared.sync_seconds
    if shared.gather_seconds:
        forward, backward = (
            seconds + shared.gather_seconds
            if shared.is_coded
            else overlapped_seconds(seconds, shared.gather_seconds, profile.slowdown)
            for seconds in (forward, backward)
        )
    return LayerCost(
        forward,
        backward,
        0.0 if choice.recompute or choice.zero >= 2 else min(put_off, backward),
        compute,
        before - compute,
        forward + backward - before,
        shared.state_bytes,
        shared.gradient_bytes,
        kept,
        saved - kept,
        shared.gathered_bytes,
        sync,
        float(price.panel_elements * itemsize),
    )


class _SharedStates(NamedTuple):
    """States of a layer on one rank, and what moves over the depth of a grid.

    Attributes:
        gather_seconds: of parameters, in each forward and in each backward. sync_seconds: of gradients, once in a step.
        is_coded: whether gathers are coded, so that computation does not hide them.
    """

    state_bytes: float
    gradient_bytes: float
    gathered_bytes: float = 0.0
    gather_seconds: float = 0.0
    sync_seconds: float = 0.0
    is_coded: bool = False


def _share_states(
    params: float, choice: Choice, place: Place, states: StateBytes, microbatches: int, codec_costs: CodecCosts
) -> _SharedStates:
    """What ZeRO over the depth of a grid shares of the states of ``params`` parameters. See :mod:`.costs`."""
    depth = choice.grid[2]
    weights, gradients, optimizer = params * states.weight, params * states.gradient, params * states.optimizer
    if choice.zero == 0:  # a sum over the depth leaves a copy of the gradients
        return _SharedStates(weights + gradients * (2 if depth > 1 else 1) + optimizer, gradients)
    traffic = _traffic(place, choice.grid)["depth"]
    gather, scatter = traffic.seconds(weights / depth), traffic.seconds(gradients / depth)
    if choice.zero < 3:
        kept = gradients if choice.zero == 1 or microbatches > 1 else gradients / depth
        return _SharedStates(weights + kept + optimizer / depth, kept, 0.0, 0.0, scatter + gather)
    is_coded = False
    if codec_costs.gathers is not None:
        coding = codec_costs.gathers
        coded = coding.coding_seconds(weights / depth, weights) + traffic.seconds(weights * coding.ratio / depth)
        is_coded = not codec_costs.is_optional or coded < gather
        gather = coded if is_coded else gather
    if codec_costs.scatters is not None:
        coding = codec_costs.scatters
        coded = coding.coding_seconds(gradients, gradients) + traffic.seconds(gradients * coding.ratio / depth)
        scatter = codec_costs.faster(scatter, coded)
    held = gradients / depth if microbatches == 1 else gradients
    copy = weights  # in some runs ranks have counted one more copy of what they gather
    return _SharedStates((weights + optimizer) / depth + held + copy, held, weights, gather, scatter, is_coded)


def _exposed(price: LayerPrice) -> float:
    return sum(each.exposed for each in price.passes)


def compute_share(layer: Layer, grid: GridShape) -> float:
    """The busiest rank's part of the computation of a row of a layer."""
    sizes = layer.grid_sizes
    assert sizes is not None
    return _share(sizes, grid)


@lru_cache(maxsize=4096)
def _share(sizes: LayerSizes, grid: GridShape) -> float:
    if not sizes.forward_flops:
        return 1.0 / grid[1]
    alone = AxisTraffic(0.0, 0.0, 0.0, 0)
    load = GridLoad(1, grid[1], 1, (sizes.sequence,), dict.fromkeys(AXES, alone), 1, 1)
    return price_layer(sizes, load, 1.0).forward.compute / sizes.forward_flops


def _price(
    sizes: LayerSizes,
    grid: GridShape,
    place: Place,
    sample: Sample,
    own: float,
    itemsize: int,
    gradient_bytes: float,
    coding: CodecCost | None,
) -> tuple[LayerPrice, float]:
    """The price of a layer, and the busiest rank's part of its computation."""
    rows, cols, depth = grid
    flops = sizes.forward_flops * own
    rate = flops / sample.forward_seconds if flops and sample.forward_seconds else math.inf
    tokens = (max(1, math.ceil(own * sizes.sequence)),) * rows
    load = GridLoad(rows, cols, depth, tokens, _traffic(place, grid), itemsize, gradient_bytes)
    if coding is not None:  # a gather decodes the rank's own part too
        seconds = coding.coding_seconds(itemsize, 2 * itemsize)
        load = replace(load, coded_ratio=coding.ratio, coding_seconds=seconds)
    return price_layer(sizes, load, rate), _share(sizes, grid)


@lru_cache(maxsize=4096)
def _traffic(place: Place, grid: GridShape) -> Mapping[str, AxisTraffic]:
    """The traffic along each axis of a grid on the ranks of a place, layer by layer and row by row.

    All hosts of a place have the NIC of its slowest one. Without pods, layers that fill the same part of hosts are
    alike, so that traffic inside layers is found for the first ones only.
    """
    rows, cols, depth = grid
    num_hosts = place.num_hosts
    hosts = [rank * num_hosts // place.num_ranks for rank in range(place.num_ranks)]
    nics = (Port.of(place.nic_bytes_per_second or 1.0),)
    topology = Topology(
        tuple(hosts),
        tuple(Host(nics, pod) for pod in place.pods) or (Host(nics),),
        pods=tuple(map(Port.of, place.uplinks)),
        inside_bytes_per_second=place.inside_bytes_per_second,
        inside_latency_seconds=place.inside_latency_seconds,
        latency_seconds=place.latency_seconds,
    )
    ranks = np.arange(place.num_ranks).reshape(depth, rows, cols)
    period = math.lcm(place.num_ranks // num_hosts, rows * cols) // (rows * cols) if num_hosts > 1 else 1
    are_alike = not place.pods and place.num_ranks % num_hosts == 0 and depth % period == 0
    first = ranks[: period if are_alike else depth]
    return {
        axis: find_traffic(topology, ranks if axis == "depth" else first, number) for number, axis in enumerate(AXES)
    }


def best_grids(problem: Problem, num_ranks: int, rows: int, plain: Sequence[Choice]) -> tuple[Choice, ...]:
    """The grids for stages of some ranks, and microbatches of ``rows`` rows: of all, the fastest ones.

    The limit holds for each ZeRO stage separately. A grid is left out if another choice is at least as fast and
    has no more bytes of states and of activations, summed over all layers that can be on the grid.
    """
    shapes = problem.rules.grid_shapes(num_ranks, problem.host_devices)
    classes = problem.layer_classes
    if not shapes or all(layer.grid_sizes is None for layer in classes):
        return ()
    count = problem.rows // rows
    ends = [end for end in range(num_ranks, problem.cluster.num_ranks + 1) if num_ranks in problem.meshes(end)]
    if not ends:
        return ()
    place = problem.place(ends[0] - num_ranks, ends[0])
    able = [number for number, layer in enumerate(classes) if layer.grid_sizes is not None]

    def totals(choice: Choice) -> tuple[float, float, float]:
        seconds = states = activations = 0.0
        for number in able:
            times = problem.class_of.count(number)
            cost = problem.layer_cost(problem.class_of.index(number), choice, place, count)
            seconds += times * (count * (cost.forward_seconds + cost.backward_seconds) + cost.sync_seconds)
            states += times * cost.state_bytes + 3 * cost.gathered_bytes
            activations += times * cost.activation_bytes
        return seconds, states, activations

    found: list[tuple[tuple[float, float, float], Choice]] = []
    recompute = problem.rules.recompute
    for shape in shapes:
        if rows % (shape[0] * shape[2]) or any(why_no_grid(classes[number], shape) for number in able):
            continue
        for zero in problem.rules.grid_zeros(shape):
            choice = Choice.on_grid(*shape, zero=zero, recompute=recompute[0])
            found.append((totals(choice), choice))
    found.sort()
    kept = [totals(choice) for choice in plain if choice.recompute == recompute[0]]
    best: list[Choice] = []
    for values, choice in found:
        alike = sum(each.zero == choice.zero and each.recompute == recompute[0] for each in best)
        if alike < MOST_GRIDS and not any(all(a <= b for a, b in zip(each, values, strict=True)) for each in kept):
            kept.append(values)
            best += [replace(choice, recompute=flag) for flag in recompute]
    return tuple(best)
