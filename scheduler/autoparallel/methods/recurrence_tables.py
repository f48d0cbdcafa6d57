"""The best stages for a given bottleneck time, found from the last stage to the first with tables of costs of stages.

For a number of microbatches m and a bottleneck time P (seconds per microbatch in the steady state), the state is the
first layer l of a suffix of the model, the devices u that the suffix uses, and the class c (devices, tp, grid) of its
first stage::

    R(l, u + n, c) = min over k > l, option o of class c, next class c':  t_o(l..k) + x(l, k, c, c') + R(k, u, c')

subject to t <= P, ports <= P, x <= P one way, states + min(m, ceil(R / P)) * activations <= memory, and bytes at the
end of a step <= memory. A second value is the time e by which gradient sums end after the first stage's last backward:
e = max(sync, e' - b - x_b). The iteration takes R + (m - 1) P + e. Smaller R and smaller R + e are never worse, so a
state keeps their Pareto front.

``native/autoparallel/recurrence.cpp`` is the loop; ``tests/reference/recurrence.py`` is its reference implementation.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from reshard import _native

from ...ir.communication import RECVS_AHEAD
from ..costs.collective_costs import StagePlace
from ..costs.search_problem import SearchProblem, Stages
from ..inputs.layer_choices import GridShape, LayerChoice
from ..inputs.stages import StagePlan
from .option_tables import OptionTables, num_recomputed
from .range_bytes import RangeBytes, bytes_of_cuts

#: Parts of a stage's layers that are recomputed, from its first layer on.
RECOMPUTED_PARTS = (0.0, 0.5, 1.0)
#: Fraction of the port of its host that a stage may use if another stage of the host uses the port, too.
SHARED_PORT = 0.5


@dataclass(frozen=True)
class StageClass:
    """Devices of a stage, and the degree of its tensor parallelism or its grid: what its edges depend on."""

    num_ranks: int
    tp: int
    grid: GridShape = ()

    @classmethod
    def of(cls, num_ranks: int, choice: LayerChoice) -> StageClass:
        """The class of stages of some ranks whose layers have a choice."""
        return cls(num_ranks, choice.tp, choice.grid)


@dataclass(frozen=True)
class Option:
    """The options of all layers of a stage: a choice, and the part of the layers that are recomputed.

    ``place`` is the index of the kind of place (hosts and NICs) that the numbers are for.
    """

    stage_class: int
    choice: LayerChoice
    recomputed: float
    place: int


@dataclass(frozen=True, eq=False)
class Tables:
    """All numbers that the recurrence needs, for one number of microbatches.

    Arrays over ``[option, first layer, end layer]``: forward, backward, activation (bytes of a microbatch), fixed
    (bytes of states, working memory and buffers), sync (seconds of gradient sums) and ending (bytes at the end of a
    step, while gradients are summed over stages). Entries with ``end <= first`` have no meaning.

    Attributes:
        classes, options: see :class:`StageClass` and :class:`Option`.
        ends: numbers of devices that a suffix may use, ascending from 0.
        allowed: ``[option, u]``: whether a stage of the option may begin with ``u`` devices left (itself included).
        next_at: ``[class, u]``: index into ``ends`` of the devices left after the stage, -1 if it cannot begin there.
        port_in, port_out: ``[class, u]``: seconds per byte of the ports towards the stages before and after it.
        memory: ``[class, u]``: bytes of a device.
        received, sent: ``[first, end]``: bytes of a microbatch that a stage receives and sends forward, on the wire.
        cut_bytes: ``[first, cut, end]``: bytes that two stages next to each other exchange in either direction; chains
            use ``[0, cut, 0]`` only.
        factor, latency: ``[class, u, next class]``: lower bounds on the seconds of such an edge: for each byte, and in
            addition.
    """

    problem: SearchProblem
    num_microbatches: int
    classes: tuple[StageClass, ...]
    options: tuple[Option, ...]
    ends: tuple[int, ...]
    forward: np.ndarray
    backward: np.ndarray
    activation: np.ndarray
    fixed: np.ndarray
    sync: np.ndarray
    ending: np.ndarray
    allowed: np.ndarray
    next_at: np.ndarray
    port_in: np.ndarray
    port_out: np.ndarray
    memory: np.ndarray
    received: np.ndarray
    sent: np.ndarray
    cut_bytes: np.ndarray
    factor: np.ndarray
    latency: np.ndarray

    def best_stages(
        self, bottleneck_seconds: float, prices: Mapping[int, tuple[float, float]]
    ) -> tuple[float, float, Stages]:
        """Round trip, excess of gradient sums and stages of the best plan for a bottleneck time; infinite if none fits.

        Args:
            bottleneck_seconds: seconds per microbatch.
            prices: seconds forward and backward of edges, by :meth:`edge_index`.
        """
        at = np.array(sorted(prices), dtype=np.int64)
        priced = np.array([prices[index] for index in sorted(prices)], dtype=np.float64).reshape(-1, 2)
        trip, excess, chosen = _native.best_stages(
            len(self.problem.graph.layers), self.problem.graph.is_chain, self.option_class, self.forward,
            self.backward, self.activation, self.fixed, self.sync, self.ending, self.allowed, self.next_at,
            self.port_in, self.port_out, self.memory, self.received, self.sent, self.cut_bytes, self.factor,
            self.latency, at,
            priced[:, 0].copy(), priced[:, 1].copy(), self.num_microbatches, bottleneck_seconds,
        )  # fmt: skip
        return trip, excess, tuple(self.stage(*item) for item in chosen)

    def min_trip(self) -> float:
        """A round trip that no plan beats at any bottleneck time; infinite if no plan ever fits the memory.

        It is the least sum of the times of stages if edges take no time, each with one microbatch in flight.
        """
        num_ends, size = len(self.ends), len(self.problem.graph.layers) + 1
        seconds = self.forward + self.backward
        needed = self.needed_bytes(slice(None), 1)
        fastest: dict[tuple[bytes, float], np.ndarray] = {}  # ``[first, end]``, of the options of a position
        min_seconds = np.full((num_ends, size), np.inf)
        min_seconds[0, -1] = 0.0  # no layer and no device is left
        for index in range(1, num_ends):
            for c in np.flatnonzero(self.next_at[:, index] >= 0):
                rest, memory = min_seconds[self.next_at[c, index]], float(self.memory[c, index])
                options = np.flatnonzero(self.allowed[:, index] & (self.option_class == c))
                key = (options.tobytes(), memory)
                if key not in fastest:
                    fits = np.where(needed[options] <= memory, seconds[options], np.inf)
                    fastest[key] = np.where(self._is_range, fits.min(axis=0, initial=np.inf), np.inf)
                min_seconds[index] = np.minimum(min_seconds[index], (fastest[key] + rest).min(axis=1))
        return float(min_seconds[-1, 0]) * (1 - 1e-9)

    def needed_bytes(self, option: int | slice, held: int) -> np.ndarray:
        """Bytes of a device with ``held`` microbatches in flight, over ``[..., first, end]``."""
        return np.maximum(self.fixed[option] + held * self.activation[option], self.ending[option])

    @cached_property
    def _is_range(self) -> np.ndarray:
        """``[first, end]``: whether it is a range of layers."""
        size = len(self.problem.graph.layers) + 1
        return np.triu(np.ones((size, size), dtype=bool), 1)

    def edge_index(self, src: StagePlan, dst: StagePlan) -> int:
        """The index of the edge between two stages that follow each other."""
        num_classes, num_ends = self.next_at.shape
        size = len(self.problem.graph.layers) + 1
        first, end = (0, 0) if self.problem.graph.is_chain else (src.first_layer, dst.end_layer)
        at = self.ends.index(self.problem.cluster.num_ranks - src.first_rank)
        c, d = (self.classes.index(StageClass.of(item.num_ranks, item.choices[0])) for item in (src, dst))
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


def make_tables(problem: SearchProblem, num_microbatches: int) -> Tables | None:
    """The tables of a problem, made once for each number of microbatches; None if no stage can have its samples."""
    key = ("tables of stages", num_microbatches)
    if key not in problem.memo:
        problem.memo[key] = _make_tables(problem, num_microbatches)
    return problem.memo[key]


def _make_tables(problem: SearchProblem, num_microbatches: int) -> Tables | None:
    graph, num_samples = problem.graph, problem.num_samples // num_microbatches
    ends = _reachable(problem)
    classes, options, places = _find_options(problem, ends, num_samples)
    if not options:
        return None
    class_of = np.array([option.stage_class for option in options])
    next_at, port_in, port_out, memory, place_at = _positions(problem, ends, classes, places)
    allowed = place_at[class_of] == np.array([option.place for option in options])[:, None]
    tables = OptionTables(problem, num_microbatches)
    costs = [tables.of(option.choice, places[option.place], option.recomputed) for option in options]
    forward, backward, activation, fixed, sync, ending = (np.stack(item) for item in zip(*costs, strict=True))
    exchanged = {cols: RangeBytes.of(graph, cols) for cols in {1, *(option.choice.cols for option in options)}}
    for o, option in enumerate(options):
        shards = option.choice.sample_shards(classes[option.stage_class].num_ranks)
        cols = option.choice.cols
        own = exchanged[cols]
        ahead, kept = num_samples * (own.received + own.returned / cols), num_samples * own.sent
        fixed[o] += min(RECVS_AHEAD, num_microbatches) * ahead / shards  # as in Problem.buffer_bytes
        activation[o] += kept / shards  # as in Problem.kept_bytes
    received, sent = (
        num_samples * item * problem.edge_costs.min_ratio for item in (exchanged[1].received, exchanged[1].sent)
    )
    return Tables(
        problem, num_microbatches, classes, options, ends, forward, backward, activation, fixed, sync, ending,
        allowed.astype(np.uint8), next_at, port_in, port_out, memory, received, sent,
        num_samples * bytes_of_cuts(graph, only_gradients=True), *_edge_bounds(problem, classes, ends, next_at),
    )  # fmt: skip


def _positions(
    problem: SearchProblem, ends: Sequence[int], classes: Sequence[StageClass], places: Sequence[StagePlace]
) -> tuple[np.ndarray, ...]:
    """``next_at``, ``port_in``, ``port_out`` and ``memory`` of :class:`Tables`, and the index of the place, -1 if none.

    All are ``[class, u]``.
    """
    cluster, total = problem.cluster, problem.cluster.num_ranks
    shape = (len(classes), len(ends))
    next_at, place_at = (np.full(shape, -1, dtype=np.int64) for _ in range(2))
    port_in, port_out, memory = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    at_of, index_of = ({value: index for index, value in enumerate(values)} for values in (ends, places))
    sizes = np.array([class_.num_ranks for class_ in classes])
    for size, index in itertools.product(sorted(set(sizes.tolist())), range(1, len(ends))):
        used = ends[index]
        begin, end = total - used, total - used + size
        if size > used or (used - size) not in at_of or not cluster.is_mesh(begin, end):
            continue
        c = sizes == size
        next_at[c, index] = at_of[used - size]
        memory[c, index] = cluster.memory_of(begin, end)
        port_in[c, index], port_out[c, index] = _port_seconds(problem, begin, end)
        place_at[c, index] = index_of[problem.place(begin, end)]
    return next_at, port_in, port_out, memory, place_at


def _reachable(problem: SearchProblem) -> tuple[int, ...]:
    """Numbers of devices that a suffix of stages can use, ascending."""
    total = problem.cluster.num_ranks
    whole_hosts = total > 128  # in larger clusters, a suffix begins at the start of a host
    starts = problem.cluster.host_starts
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
    problem: SearchProblem, ends: Sequence[int], num_samples: int
) -> tuple[tuple[StageClass, ...], tuple[Option, ...], tuple[StagePlace, ...]]:
    """All classes and options, and the kinds of places they stand on."""
    total, known = problem.cluster.num_ranks, set(ends)
    places: dict[StagePlace, int] = {}  # to its index
    by_size: dict[int, set[int]] = {}
    for used in ends[1:]:
        for size in problem.cluster.mesh_sizes:
            begin = total - used
            if size <= used and used - size in known and problem.cluster.is_mesh(begin, begin + size):
                place = places.setdefault(problem.place(begin, begin + size), len(places))
                by_size.setdefault(size, set()).add(place)
    classes: list[StageClass] = []
    options: list[Option] = []
    for size in sorted(by_size):
        for choice in problem.choices(size, num_samples):
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
    return tuple(classes), tuple(options), tuple(places)


def _port_seconds(problem: SearchProblem, begin: int, end: int) -> tuple[float, float]:
    """Seconds of the ports of a stage for a byte that it exchanges with the previous stage, and with the next stage.

    On a host between two others, the first stage receives from one of them and the last stage sends to the other. Each
    may use half of the port, because both directions of both edges pass it. On the first and on the last host, only
    one stage uses the port, so it may use all of it.
    """
    cluster = problem.cluster
    parts = cluster.hosts_of(begin, end)
    before = begin in cluster.host_starts and begin > 0
    after = end in cluster.host_ends and end < cluster.num_ranks
    is_between = parts[0][0] not in (cluster.hosts[0][0], cluster.hosts[-1][0])
    is_shared = len(parts) == 1 and before != after and is_between
    rate = sum(cluster.nic_bytes_per_second(host) for host, _, _ in parts)
    per_byte = 1.0 / rate / (SHARED_PORT if is_shared else 1.0)
    return per_byte * before, per_byte * after


def _edge_bounds(
    problem: SearchProblem, classes: Sequence[StageClass], ends: Sequence[int], next_at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``factor`` and ``latency`` of :class:`Tables`."""
    cluster, edge_costs, total = problem.cluster, problem.edge_costs, problem.cluster.num_ranks
    shape = (len(classes), len(ends), len(classes))
    factor, latency = np.zeros(shape), np.zeros(shape)
    own = np.zeros(shape[:2])  # seconds per byte of one end alone, if the other end is on other hosts
    for c, index in np.argwhere(next_at >= 0):
        begin = total - ends[index]
        own[c, index] = edge_costs.own_per_byte((begin, begin + classes[c].num_ranks, classes[c].grid or classes[c].tp))
    sizes = np.array([class_.num_ranks for class_ in classes])
    of_size = {size: np.flatnonzero(sizes == size) for size in sorted(set(sizes.tolist()))}
    for size, index in itertools.product(of_size, range(1, len(ends))):
        rest = next_at[of_size[size][0], index]
        src = (total - ends[index], total - ends[index] + size)
        for other in of_size if rest > 0 else ():
            if next_at[of_size[other][0], rest] < 0:
                continue
            dst = (src[1], src[1] + other)
            at = np.ix_(of_size[size], np.array([index]), of_size[other])
            factor[at], latency[at] = edge_costs.bound_per_byte(src, dst), edge_costs.fixed_seconds(src, dst)
            if src[1] in cluster.host_starts:
                both = np.maximum.outer(own[of_size[size], index], own[of_size[other], rest])
                factor[at] = np.maximum(factor[at], both[:, None, :])
    return factor, latency
