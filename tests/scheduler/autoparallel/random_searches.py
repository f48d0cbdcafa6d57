"""Small random problems of the strategy search, and all plans of one."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
from dataclasses import replace

from reshard.parallel.choice.grid_layer_cost import LayerSizes
from reshard.scheduler.autoparallel import ChoiceRules, Cluster, Layer, LayerGraph, LayerProfile, Tensor
from reshard.scheduler.autoparallel.costs.iteration import evaluate
from reshard.scheduler.autoparallel.costs.layer_costs import StageCost
from reshard.scheduler.autoparallel.costs.search_problem import Candidate, SearchProblem
from reshard.scheduler.autoparallel.costs.step_bounds import step_bound
from reshard.scheduler.autoparallel.inputs.stages import StagePlan
from reshard.scheduler.autoparallel.methods.recurrence_tables import make_tables
from reshard.topology import Host, Link, Topology


def make_graph(rng, num_layers, *, skips=True):
    layers, tensors = [], []
    for index in range(num_layers):
        saved = rng.uniform(1e6, 2e7)
        params = rng.randrange(10**5, 5 * 10**6)
        name, key = f"layers.{index}", f"kind {index if rng.random() < 0.7 else 0}"
        half = {"tp_limit": 2, "tp_params": params // 2, "tp_saved_bytes": saved / 2}
        sums = {"tp_all_reduces": 2, "tp_all_reduce_bytes": saved / 8}
        layers.append(Layer(name, key, rng.uniform(1e8, 2e9), params, saved, saved / 8, **half, **sums))
        if index:
            tensors.append(
                Tensor(f"x{index}", (1, rng.choice([1000, 50_000, 400_000])), "float32", index - 1, (index,))
            )
    if skips and num_layers > 2 and rng.random() < 0.5:
        tensors.append(Tensor("skip", (1, 200_000), "float32", 0, (num_layers - 1,)))
    return LayerGraph(tuple(layers), tuple(tensors), name="random")


def make_cluster(rng, sizes, memory_bytes, rates=(2e8, 1e9, 5e9)):
    hosts = tuple(Host((Link.of(rng.choice(rates)),)) for _ in sizes)
    host_of_rank = tuple(host for host, size in enumerate(sizes) for _ in range(size))
    return Cluster(Topology(host_of_rank, hosts, inside_bytes_per_second=1e10), memory_bytes)


def put_on_grids(rng, graph):
    """The graph, most of whose layers can be on a grid."""
    layers = []
    for layer in graph.layers:
        hidden = rng.choice([64, 96])
        products = ((hidden, 3 * hidden), (4 * hidden, hidden))
        sizes = LayerSizes(hidden, rng.choice([16, 128]), products, rng.choice([1, 2, 4]), 8, 2)
        able = rng.random() < 0.8 and sizes.num_params <= layer.num_params
        refusal = "" if able else "no converter"
        layers.append(replace(layer, grid_sizes=sizes if able else None, grid_refusal=refusal))
    return replace(graph, layers=tuple(layers))


def tie_layers(rng, graph):
    """The graph, some of whose layers share parameters."""
    layers = range(len(graph.layers))
    ties = []
    for _ in range(rng.randint(1, 2)):
        tied = tuple(sorted(rng.sample(layers, rng.randint(2, len(layers)))))
        least = min(graph.layers[layer].num_params for layer in tied)
        ties.append((tied, rng.randint(least // 8, least // 2)))
    return replace(graph, ties=tuple(ties))


def make_problem(seed, *, max_layers=3, executable=True, grids=False, ties=False, slow_links=False):
    """A random problem. With ``slow_links``, no layer is divided, and transfers may take longer than all computation."""
    rng = random.Random(seed)
    graph = make_graph(rng, rng.randint(2, max_layers))
    if grids:
        graph = put_on_grids(rng, graph)
    if ties:
        graph = tie_layers(rng, graph)
    sizes = rng.choice([(1, 1), (2,), (2, 1), (2, 2), (1, 1, 1)])
    profile = LayerProfile.estimate(graph, flops_per_second=1e11)
    memory = rng.choice([1e9, 2e8, 1e8])
    rules = ChoiceRules(executable=executable, **({"max_tp": 1, "grids": False} if slow_links else {}))
    counts = (rng.choice([2, 4]),)
    cluster = make_cluster(rng, sizes, memory, **({"rates": (1e6, 1e7, 1e8)} if slow_links else {}))
    return SearchProblem(graph, cluster, profile, 8, rules=rules, microbatch_counts=counts)


def make_problem_with_one_layer_off_grids(seed):
    """A problem in which only grids divide layers over ranks, and most layers but not all can be on one."""
    rng = random.Random(f"off grids {seed}")
    graph = make_graph(rng, rng.randint(4, 6))
    sizes = LayerSizes(64, 16, ((64, 192), (256, 64)), 2, 8, 2)
    refused = rng.randrange(len(graph.layers))
    alone = {"tp_limit": 1, "tp_params": 0, "tp_saved_bytes": 0, "tp_all_reduces": 0, "tp_all_reduce_bytes": 0}
    layers = tuple(
        replace(layer, key="refused", grid_refusal="no converter", **alone)
        if number == refused
        else replace(layer, grid_sizes=sizes, **alone)
        for number, layer in enumerate(graph.layers)
    )
    graph = replace(graph, layers=layers)
    cluster = make_cluster(rng, rng.choice([(2, 1), (1, 2), (2, 2)]), 1e9)
    profile = LayerProfile.estimate(graph, flops_per_second=1e11)
    return SearchProblem(graph, cluster, profile, 8, microbatch_counts=(8,))  # microbatches have one sample


def all_plans(tables):
    """All ways to fill the devices with stages: tuples of (first, end, index of devices left, option)."""
    num_layers = len(tables.problem.graph.layers)

    def extend(first, at):
        for option, c in enumerate(tables.option_class):
            if not tables.allowed[option, at]:
                continue
            rest = int(tables.next_at[c, at])
            if rest == 0:
                yield ((first, num_layers, at, option),)
                continue
            for end in range(first + 1, num_layers):
                for others in extend(end, rest):
                    yield ((first, end, at, option), *others)

    return extend(0, len(tables.ends) - 1)


#: The cost of a stage whose layers cannot have its choice.
NEVER = StageCost(*[math.inf] * 12)


@functools.cache
def _stage(tables, first, end, left, option):
    """A stage, its cost, and the seconds of its ports."""
    stage = tables.stage(first, end, left, option)
    if not tables.problem.can_have(stage.choices[0], first, end):
        return stage, NEVER, 0.0
    c = tables.option_class[option]
    ports = tables.received[first, end] * tables.port_in[c, left] + tables.sent[first, end] * tables.port_out[c, left]
    return stage, tables.problem.stage_cost(stage, tables.num_microbatches), ports


@functools.cache
def _price(tables, src, dst, true_prices):
    """Seconds forward and backward of the edge between two stages."""
    problem = tables.problem
    a, b = _stage(tables, *src)[0], _stage(tables, *dst)[0]
    tensors = problem.graph.between(a.first_layer, a.end_layer, b.end_layer)
    ends = tuple((s.first_rank, s.end_rank, s.choices[0].grid or s.choices[0].tp) for s in (a, b))
    num_samples = problem.num_samples // tables.num_microbatches
    if not tensors:
        return 0.0, 0.0
    if not true_prices:
        return problem.edge_costs.bound_seconds(tensors, num_samples, *ends)
    edge = problem.edge_costs.edge((0, 1), tensors, num_samples, *ends)
    return edge.forward_seconds, edge.backward_seconds


def min_bottleneck_seconds(tables, plan, true_prices):
    """The bottleneck time below which no part of a plan can work."""
    edges = [_price(tables, src, dst, true_prices) for src, dst in itertools.pairwise(plan)]
    stages = [_stage(tables, *transfer) for transfer in plan]
    return max([cost.seconds for _, cost, _ in stages] + [ports for _, _, ports in stages] + [max(e) for e in edges])


def seconds_at(tables, plan, bottleneck_seconds, true_prices):
    """What a plan takes at a bottleneck time in the model of ``methods/recurrence_tables.py``, written from its definition; inf if not allowed."""
    m = tables.num_microbatches
    if min_bottleneck_seconds(tables, plan, true_prices) > bottleneck_seconds * (1 + 1e-12):
        return math.inf
    trip, excess = 0.0, -math.inf
    for index in reversed(range(len(plan))):
        _, cost, _ = _stage(tables, *plan[index])
        there, back = _price(tables, plan[index], plan[index + 1], true_prices) if index + 1 < len(plan) else (0.0, 0.0)
        trip += cost.seconds + there + back
        excess = max(cost.ending_seconds, excess - back - cost.backward_seconds)
        held = min(m, max(1, math.ceil(trip / bottleneck_seconds - 1e-9)))
        if cost.memory_bytes(held) > cost.limit_bytes * (1 + 1e-12):
            return math.inf
    return trip + (m - 1) * bottleneck_seconds + excess


def min_seconds(tables, plan, bottleneck_times):
    """What a plan takes at the first bottleneck time of an ascending grid that allows it: a longer one only adds to it."""
    start = bisect.bisect_left(bottleneck_times, min_bottleneck_seconds(tables, plan, True) * (1 - 1e-12))
    return next(
        (
            s
            for bottleneck_seconds in bottleneck_times[start:]
            if (s := seconds_at(tables, plan, bottleneck_seconds, True)) < math.inf
        ),
        math.inf,
    )


def all_parts(cluster):
    """The ranks of all parts of a cluster: any number of devices of each host, with the hosts in any order."""
    for counts in itertools.product(*(range(end - first + 1) for _, first, end in cluster.hosts)):
        used = [
            range(first, first + count) for (_, first, _), count in zip(cluster.hosts, counts, strict=True) if count
        ]
        for order in itertools.permutations(used):
            if order:
                yield tuple(itertools.chain.from_iterable(order))


def least_seconds(problem):
    """The least simulated seconds of all plans on all parts of the cluster; infinite if none fits."""
    best, known = math.inf, set()
    for ranks in all_parts(problem.cluster):
        part = problem.changed(cluster=problem.cluster.select(ranks))
        if part.cluster.hash in known:
            continue
        known.add(part.cluster.hash)
        for count in part.microbatch_counts:
            tables = make_tables(part, count)
            for plan in all_plans(tables) if tables is not None else ():
                if not all(
                    part.can_have(s.choices[0], s.first_layer, s.end_layer) for s, _, _ in _stages(tables, plan)
                ):
                    continue
                candidate = Candidate("all", tuple(s for s, _, _ in _stages(tables, plan)), count)
                if step_bound(part, candidate) < best:
                    found = evaluate(part, candidate, below_seconds=best)
                    best = best if found is None or found.short_bytes else found.seconds
    return best


def _stages(tables, plan):
    return [_stage(tables, *item) for item in plan]


def interleaved_candidates(problem):
    """All candidates on all ranks of a problem that put several stages on each mesh, with one choice for all of them."""
    num_layers, total = len(problem.graph.layers), problem.cluster.num_ranks

    def fill(first):
        if first == total:
            yield ()
        for end in range(first + 1, total + 1):
            if end - first in problem.meshes(end):
                yield from (((first, end), *rest) for rest in fill(end))

    for count, meshes in itertools.product(problem.microbatch_counts, fill(0)):
        num, options = (
            len(meshes),
            [problem.choices(end - first, problem.num_samples // count) for first, end in meshes],
        )
        placements = [tuple(range(num)) * times for times in range(2, min(4, num_layers // num) + 1)]
        placements += [(*range(num), *reversed(range(num)))] if num_layers >= 2 * num else []
        for placement, choices in itertools.product(placements if num > 1 else (), itertools.product(*options)):
            for inner in itertools.combinations(range(1, num_layers), len(placement) - 1):
                cuts = (0, *inner, num_layers)
                stages = tuple(
                    StagePlan(first, end, *meshes[r], (choices[r],) * (end - first))
                    for first, end, r in zip(cuts, cuts[1:], placement, strict=False)
                )
                if all(problem.can_have(s.choices[0], s.first_layer, s.end_layer) for s in stages):
                    yield Candidate("all", stages, count)


def least_interleaved_seconds(problem, below_seconds):
    """The least simulated seconds of all interleaved plans on all parts of the cluster that are faster than a limit."""
    best, known = below_seconds, set()
    for ranks in all_parts(problem.cluster):
        part = problem.changed(cluster=problem.cluster.select(ranks))
        if part.cluster.hash in known:
            continue
        known.add(part.cluster.hash)
        for candidate in interleaved_candidates(part):
            if step_bound(part, candidate) < best:
                found = evaluate(part, candidate, below_seconds=best)
                best = best if found is None or found.short_bytes else found.seconds
    return best
