"""The position of a strided view in the tensor whose memory it shows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.errors import ArgumentError
from reshard.weights.mapping.parts import ComposedTensor, PlacedRegion

#: A view that takes more separate regions of a tensor than this is refused.
MAX_PARTS = 1 << 16


@dataclass(frozen=True)
class _StridedRun:
    """Elements at equal distances along one dim of a view, which run along one dim of the tensor.

    Attributes:
        dim: the dim of the view.
        place_step: the distance of two elements along this dim.
        base_dim: the dim of the tensor.
        step: the distance of two elements along that dim.
        count: number of elements, at least 2.
    """

    dim: int
    place_step: int
    base_dim: int
    step: int
    count: int


def view_of_tensor(
    name: str, base_shape: Sequence[int], shape: Sequence[int], strides: Sequence[int], offset: int
) -> ComposedTensor:
    """A view, as regions of a contiguous tensor.

    Args:
        name: name of the tensor.
        base_shape: shape of the tensor.
        shape: shape of the view.
        strides: strides of the view, in elements.
        offset: offset of the view, in elements.

    Raises:
        ArgumentError: the view shows an element twice, or its elements are no slices along dims of the tensor.
    """
    if math.prod(shape) == 0:
        return ComposedTensor(tuple(shape), ())
    base_strides = [math.prod(base_shape[dim + 1 :]) for dim in range(len(base_shape))]
    runs = [
        run
        for dim, (count, stride) in enumerate(zip(shape, strides, strict=True))
        if count > 1
        for run in _find_runs(dim, count, stride, base_shape, base_strides)
    ]
    first, rest = [], offset
    for size, stride in zip(base_shape, base_strides, strict=True):
        index, rest = divmod(rest, stride)
        first.append(index)
        reach = sum(run.step * (run.count - 1) for run in runs if run.base_dim == len(first) - 1)
        if index + reach >= size:
            raise ArgumentError(f"a view of {name!r} takes elements that are no slices of its dims")
    return ComposedTensor(tuple(shape), _parts_of(name, runs, first, len(shape)))


def _find_runs(
    dim: int, count: int, stride: int, base_shape: Sequence[int], base_strides: Sequence[int]
) -> list[_StridedRun]:
    """The runs of one dim of a view: several if it joins dims of the tensor."""
    runs, place_step = [], 1
    while count > 1:
        base_dim = next((d for d, size in enumerate(base_shape) if size > 1 and 0 < base_strides[d] <= stride), None)
        if base_dim is None or stride % base_strides[base_dim]:
            raise ArgumentError(f"a view with stride {stride} of a tensor of shape {list(base_shape)} cannot be traced")
        step = stride // base_strides[base_dim]
        inside = -(-base_shape[base_dim] // step)  # elements until the dim ends
        if count <= inside:
            inside = count
        elif base_shape[base_dim] % step or count % inside:
            raise ArgumentError(f"a view of a tensor of shape {list(base_shape)} joins dims in part")
        if inside == 1:
            raise ArgumentError(f"a view of a tensor of shape {list(base_shape)} leaves it")
        runs.append(_StridedRun(dim, place_step, base_dim, step, inside))
        count, stride, place_step = count // inside, stride * inside, place_step * inside
    return runs


def _parts_of(name: str, runs: Sequence[_StridedRun], first: Sequence[int], ndim: int) -> tuple[PlacedRegion, ...]:
    """One part for each combination of the runs that share a dim with a longer one."""
    kept: list[_StridedRun] = []
    for run in sorted(runs, key=lambda run: -run.count):
        if all(run.dim != other.dim and run.base_dim != other.base_dim for other in kept):
            kept.append(run)
    unrolled = [run for run in runs if run not in kept]
    if math.prod(run.count for run in unrolled) > MAX_PARTS:
        raise ArgumentError(f"a view of {name!r} consists of more than {MAX_PARTS} regions")
    parts = []
    for numbers in itertools.product(*(range(run.count) for run in unrolled)):
        begin, placed_first, dims = list(first), [0] * ndim, [-1] * len(first)
        for run, number in zip(unrolled, numbers, strict=True):
            begin[run.base_dim] += number * run.step
            placed_first[run.dim] += number * run.place_step
        region, place = ([range(index, index + 1) for index in indices] for indices in (begin, placed_first))
        for run in kept:
            begun, placed = begin[run.base_dim], placed_first[run.dim]
            region[run.base_dim] = range(begun, begun + (run.count - 1) * run.step + 1, run.step)
            place[run.dim] = range(placed, placed + (run.count - 1) * run.place_step + 1, run.place_step)
            dims[run.base_dim] = run.dim
        parts.append(PlacedRegion(name, tuple(region), tuple(place), tuple(dims)))
    return tuple(parts)
