"""Tables of what stages cost, and the recurrence by pace on them: the best stages for a pace, from the last to the
first.

For a number of microbatches m and a pace P (seconds per microbatch in the steady state), the state is the first layer l
of a suffix of the model, the devices u that the suffix uses, and the class c (devices, tp, grid) of its first stage::

    R(l, u + n, c) = min over k > l, option o of class c, next class c':  t_o(l..k) + x(l, k, c, c') + R(k, u, c')

subject to t <= P, ports <= P, x <= P one way, and states + min(m, ceil(R / P)) * activations <= memory. A second value
is the time e by which gradient sums end after the first stage's last backward: e = max(sync, e' - b - x_b). The
iteration takes R + (m - 1) P + e. Smaller R and smaller R + e are never worse, so a state keeps their Pareto front.

``native/autoparallel/pace.cpp`` is the loop; ``tests/reference/pace.py`` is its twin.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from reshard import _native

from ...ir.communication import RECVS_AHEAD
from ..choices import Choice, GridShape
from ..problem import Problem, Stages, cut_row_bytes
from ..result.stages import StagePlan

#: Parts of a stage's layers that are recomputed, from its first layer on.
RECOMPUTED_PARTS = (0.0, 0.5, 1.0)
#: What ports may carry in a pace, for a stage that shares its host's port with the stage at the other end.
SHARED_PORT = 0.5


@dataclass(frozen=True)
class StageClass:
    """Devices of a stage, and the degree of its tensor parallelism or its grid: what its edges depend on."""

    num_ranks: int
    tp: int
    grid: GridShape = ()

    @classmethod
    def of(cls, num_ranks: int, choice: Choice) -> StageClass:
        """The class of stages of some ranks whose layers have a choice."""
        return cls(num_ranks, choice.tp, choice.grid)


@dataclass(frozen=True)
class Option:
    """How all layers of a stage are computed: a choice, and the part of the layers that are recomputed.

    ``place`` is the index of the kind of place (hosts and NICs) that the numbers are for.
    """

    stage_class: int
    choice: Choice
    recomputed: float
    place: int


@dataclass(frozen=True, eq=False)
class Tables:
    """All numbers that the recurrence needs, for one number of microbatches.

    Arrays over ``[option, first layer, end layer]``: forward, backward, activation (bytes of a microbatch), fixed
    (bytes of states, working memory and buffers) and sync (seconds). Entries with ``end <= first`` have no meaning.

    Attributes:
        classes, options: see :class:`StageClass` and :class:`Option`.
        ends: numbers of devices that a suffix may use, ascending from 0.
        allowed: ``[option, u]``: whether a stage of the option may begin with ``u`` devices left (itself included).
        next_at: ``[class, u]``: index into ``ends`` of what is left behind the stage, -1 if it cannot stand there.
        port_in, port_out: ``[class, u]``: seconds per byte of the ports towards the stages before and behind it.
        memory: ``[class, u]``: bytes of a device.
        received, sent: ``[first, end]``: bytes of a microbatch that a stage receives and sends forward, on the wire.
        cut_bytes: ``[first, cut, end]``: bytes between two stages next to each other; chains use ``[0, cut, 0]`` only.
        factor: ``[class, u, next class]``: seconds per byte of such an edge that no plan beats.
    """

    problem: Problem
    microbatches: int
    classes: tuple[StageClass, ...]
    options: tuple[Option, ...]
    ends: tuple[int, ...]
    forward: np.ndarray
    backward: np.ndarray
    activation: np.ndarray
    fixed: np.ndarray
    sync: np.ndarray
    allowed: np.ndarray
    next_at: np.ndarray
    port_in: np.ndarray
    port_out: np.ndarray
    memory: np.ndarray
    received: np.ndarray
    sent: np.ndarray
    cut_bytes: np.ndarray
    factor: np.ndarray

    def best_stages(self, pace: float, prices: Mapping[int, tuple[float, float]]) -> tuple[float, float, Stages]:
        """Round trip, excess of gradient sums and stages of the best plan for a pace; infinite if there is none.

        Args:
            pace: seconds per microbatch. prices: seconds forward and backward of edges, by :meth:`edge_index`.
        """
        at = np.array(sorted(prices), dtype=np.int64)
        priced = np.array([prices[index] for index in sorted(prices)], dtype=np.float64).reshape(-1, 2)
        trip, excess, chosen = _native.best_stages(
            len(self.problem.graph.layers), self.problem.graph.is_chain, self.option_class, self.forward,
            self.backward, self.activation, self.fixed, self.sync, self.allowed, self.next_at, self.port_in,
            self.port_out, self.memory, self.received, self.sent, self.cut_bytes, self.factor, at,
            priced[:, 0].copy(), priced[:, 1].copy(), self.microbatches, pace,
        )  # fmt: skip
        return trip, excess, tuple(self.stage(*each) for each in chosen)

    def edge_index(self, src: StagePlan, dst: StagePlan) -> int:
        """The index of the edge between two stages that follow each other."""
        num_classes, num_ends = self.next_at.shape
        size = len(self.problem.graph.layers) + 1
        first, end = (0, 0) if self.problem.graph.is_chain else (src.first_layer, dst.end_layer)
        at = self.ends.index(self.problem.cluster.num_ranks - src.first_rank)
        c, d = (self.classes.index(StageClass.of(each.num_ranks, each.choices[0])) for each in (src, dst))
        return ((((first * size + src.end_layer) * size + end) * num_classes + c) * num_ends + at) * num_classes + d

    @cached_property
    def option_class(self) -> np.ndarray:
        """Class of each option."""
        return np.array([option.stage_class for option in self.options], dtype=np.int64)

    def stage(self, first: int, end: int, at: int, option: int) -> StagePlan:
        """The stage of an option that begins with ``ends[at]`` devices left."""
        chosen = self.options[option]
        begin = self.problem.cluster.num_ranks - self.ends[at]
        count = end - first
        recomputed = num_recomputed(chosen.recomputed, count)
        plain, again = (replace(chosen.choice, recompute=flag) for flag in (False, True))
        choices = (again,) * recomputed + (plain,) * (count - recomputed)
        return StagePlan(first, end, begin, begin + self.classes[chosen.stage_class].num_ranks, choices)


def num_recomputed(part: float, count: int) -> int:
    """How many of ``count`` layers are recomputed."""
    return int(np.ceil(part * count - 1e-9))


def make_tables(problem: Problem, microbatches: int) -> Tables | None:
    """The tables of a problem; None if no stage can have its rows."""
    cluster, graph, rows = problem.cluster, problem.graph, problem.rows // microbatches
    total, num = cluster.num_ranks, len(graph.layers)
    ends = _reachable(problem)
    classes, options, places = _find_options(problem, ends, rows)
    if not options:
        return None
    at_of = {used: at for at, used in enumerate(ends)}
    shape = (len(classes), len(ends))
    next_at = np.full(shape, -1, dtype=np.int64)
    port_in, port_out, memory = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    allowed = np.zeros((len(options), len(ends)), dtype=np.uint8)
    for c, at in itertools.product(range(len(classes)), range(1, len(ends))):
        used, size = ends[at], classes[c].num_ranks
        begin, end = total - used, total - used + size
        if size > used or (used - size) not in at_of or not cluster.is_mesh(begin, end):
            continue
        next_at[c, at] = at_of[used - size]
        memory[c, at] = cluster.memory_of(begin, end)
        port_in[c, at], port_out[c, at] = _port_seconds(problem, begin, end)
        place = places.index(problem.place(begin, end))
        for o, option in enumerate(options):
            allowed[o, at] |= option.stage_class == c and option.place == place
    costs = [_option_tables(problem, option, places, microbatches) for option in options]
    received, sent = (np.zeros((num + 1, num + 1)) for _ in range(2))
    cut = {option.choice.cols: (np.zeros((num + 1, num + 1)), np.zeros((num + 1, num + 1))) for option in options}
    for first in range(num):
        for end in range(first + 1, num + 1):
            reads, writes = problem.received(first, end), problem.sent(first, end)
            received[first, end] = rows * cut_row_bytes(reads, 1) * problem.prices.least_ratio
            sent[first, end] = rows * cut_row_bytes(writes, 1) * problem.prices.least_ratio
            returned = problem.returned_row_bytes(first, end)
            for cols, (ahead, kept) in cut.items():
                ahead[first, end] = rows * (cut_row_bytes(reads, cols) + returned / cols)
                kept[first, end] = rows * cut_row_bytes(writes, cols)
    forward, backward, activation, fixed, sync = (np.stack(each) for each in zip(*costs, strict=True))
    for o, option in enumerate(options):
        shards = option.choice.row_shards(classes[option.stage_class].num_ranks)
        ahead, kept = cut[option.choice.cols]
        fixed[o] += min(RECVS_AHEAD, microbatches) * ahead / shards  # as Problem.buffer_bytes
        activation[o] += kept / shards  # as Problem.kept_bytes
    factor = _bound_factors(problem, classes, ends, next_at)
    return Tables(
        problem, microbatches, classes, options, ends, forward, backward, activation, fixed, sync, allowed, next_at,
        port_in, port_out, memory, received, sent, _bytes_of_cuts(problem, rows), factor,
    )  # fmt: skip


def _bytes_of_cuts(problem: Problem, rows: int) -> np.ndarray:
    """``[first, cut, end]``: bytes of a microbatch from a stage of layers first to cut to one of layers cut to end."""
    graph, num = problem.graph, len(problem.graph.layers)
    sides = 1 if graph.is_chain else num + 1
    table = np.zeros((sides, num + 1, sides))
    for cut in range(1, num):
        for first in range(1 if graph.is_chain else cut):
            for end in [0] if graph.is_chain else range(cut + 1, num + 1):
                tensors = graph.between(first, cut, end or num)
                table[first, cut, end] = rows * sum(tensor.row_bytes for tensor in tensors)
    return table


def _reachable(problem: Problem) -> tuple[int, ...]:
    """Numbers of devices that a suffix of stages can use, ascending."""
    total = problem.cluster.num_ranks
    whole_hosts = total > 128  # of larger clusters, a suffix begins with a host
    starts = {first for _, first, _ in problem.cluster.hosts}
    reached = {0}
    for used in range(total):
        if used in reached:
            for size in problem.cluster.mesh_sizes:
                begin = total - used - size
                if begin < 0 or (whole_hosts and begin not in starts):
                    continue
                if problem.cluster.is_mesh(begin, total - used):
                    reached.add(used + size)
    return tuple(sorted(reached))


def _find_options(
    problem: Problem, ends: Sequence[int], rows: int
) -> tuple[tuple[StageClass, ...], tuple[Option, ...], list]:
    """All classes and options, and the kinds of places they stand on."""
    total, known = problem.cluster.num_ranks, set(ends)
    places: list = []
    by_size: dict[int, set[int]] = {}
    for used in ends[1:]:
        for size in problem.cluster.mesh_sizes:
            begin = total - used
            if size <= used and used - size in known and problem.cluster.is_mesh(begin, begin + size):
                place = problem.place(begin, begin + size)
                if place not in places:
                    places.append(place)
                by_size.setdefault(size, set()).add(places.index(place))
    classes: list[StageClass] = []
    options: list[Option] = []
    for size in sorted(by_size):
        for choice in problem.choices(size, rows):
            if choice.recompute and False in problem.rules.recompute:
                continue
            stage_class = StageClass.of(size, choice)
            if stage_class not in classes:
                classes.append(stage_class)
            parts = RECOMPUTED_PARTS if True in problem.rules.recompute else (0.0,)
            if False not in problem.rules.recompute:
                parts = (1.0,)
            options += [
                Option(classes.index(stage_class), choice, part, place)
                for part in parts
                for place in sorted(by_size[size])
            ]
    return tuple(classes), tuple(options), places


def _port_seconds(problem: Problem, begin: int, end: int) -> tuple[float, float]:
    """Seconds per byte that the ports of a stage are busy for what it exchanges with the stages before and behind it.

    A stage inside a host whose one side only leads out may use half of the port: another stage of the host leads out
        too.
    """
    cluster = problem.cluster
    parts = cluster.hosts_of(begin, end)
    starts, stops = {first for _, first, _ in cluster.hosts}, {stop for _, _, stop in cluster.hosts}
    before = begin in starts and begin > 0
    behind = end in stops and end < cluster.num_ranks
    rate = sum(cluster.nic_bytes_per_second(host) for host, _, _ in parts)
    is_shared = len(parts) == 1 and before != behind and not (begin in starts and end in stops)
    per_byte = 1.0 / rate / (SHARED_PORT if is_shared else 1.0)
    return per_byte * before, per_byte * behind


def _option_tables(problem: Problem, option: Option, places: list, count: int) -> tuple[np.ndarray, ...]:
    """Forward, backward, activation, fixed bytes and sync of an option, each over ``[first, end]``."""
    num, place, choice = len(problem.graph.layers), places[option.place], option.choice
    is_able = [problem.can_have(choice, layer, layer + 1) for layer in range(num)]
    plain, again = (
        [
            problem.layer_cost(layer, replace(choice, recompute=flag) if is_able[layer] else Choice(), place, count)
            for layer in range(num)
        ]
        for flag in (False, True)
    )
    first, end = np.indices((num + 1, num + 1))
    middle = np.minimum(first + np.ceil(option.recomputed * np.maximum(end - first, 0) - 1e-9).astype(int), num)

    def total(name: str) -> np.ndarray:
        sums = [np.concatenate([[0.0], np.cumsum([getattr(c, name) for c in costs])]) for costs in (again, plain)]
        return (sums[0][middle] - sums[0][first]) + (sums[1][end] - sums[1][middle])

    def running_max(values: Sequence[float]) -> np.ndarray:
        table = np.zeros((num + 1, num + 1))
        for start in range(num):
            table[start, start + 1 :] = np.maximum.accumulate(np.array(values[start:]))
        return table

    activation = total("activation_bytes")
    kept = np.cumsum([0.0] + [cost.activation_bytes for cost in again])
    peaks = running_max([cost.recompute_bytes + kept[at + 1] for at, cost in enumerate(again)])[first, middle]
    recompute = np.maximum(0.0, peaks - kept[first] - activation)  # as Problem's recompute_bytes
    fixed = total("state_bytes") + recompute + _gathered_bytes([cost.gathered_bytes for cost in plain])
    fixed += running_max([cost.panel_bytes for cost in plain])
    unable = np.cumsum([0] + [not each for each in is_able])
    forward = np.where(unable[end] > unable[first], np.inf, total("forward_seconds"))
    return forward, total("backward_seconds"), activation, fixed, total("sync_seconds")


def _gathered_bytes(values: Sequence[float]) -> np.ndarray:
    """``[first, end]``: sum of the two largest values of a range, and the largest once more."""
    num = len(values)
    table = np.zeros((num + 1, num + 1))
    for start in range(num):
        largest, second = 0.0, 0.0
        for end in range(start, num):
            if values[end] > largest:
                largest, second = values[end], largest
            else:
                second = max(second, values[end])
            table[start, end + 1] = 2 * largest + second
    return table


def _bound_factors(
    problem: Problem, classes: Sequence[StageClass], ends: Sequence[int], next_at: np.ndarray
) -> np.ndarray:
    """``[class, u, next class]``: seconds per byte of an edge that no plan beats."""
    total = problem.cluster.num_ranks
    factor = np.zeros((len(classes), len(ends), len(classes)))
    memo: dict[tuple[int, int, int], float] = {}
    for c, at, d in itertools.product(range(len(classes)), range(1, len(ends)), range(len(classes))):
        if next_at[c, at] <= 0 or next_at[d, next_at[c, at]] < 0:
            continue
        begin = total - ends[at]
        cut = begin + classes[c].num_ranks
        stop = cut + classes[d].num_ranks
        if (begin, cut, stop) not in memo:
            memo[begin, cut, stop] = problem.prices.bound_per_byte((begin, cut, 1), (cut, stop, 1))
        factor[c, at, d] = memo[begin, cut, stop]
    return factor
