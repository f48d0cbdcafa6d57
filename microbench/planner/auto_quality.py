"""The choice of the ``auto`` strategy, compared with all strategies that it chooses from.

For random layout pairs on random topologies, it plans and simulates every strategy that ``auto`` chooses from, and
compares the best makespan with that of ``auto``. Simulation is skipped if the load of the busiest port already exceeds
the makespan of ``auto``. No tensor is moved.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from microbench.harness.case_options import add_number
from microbench.harness.records import write_records
from reshard.cli.progress_bars import track
from reshard.cost import simulate
from reshard.errors import ReshardError
from reshard.planner import AUTO, CANDIDATES, PlanProblem, StrategyBounds, bound_of_transfers, plan_tensors
from reshard.planner.auto_strategy import MIN_GATHER_GAIN
from reshard.ragged import NO_RANK
from reshard.sharding import Layout, Mesh, TensorSpec
from reshard.topology import MACHINES, Host, Link, Topology, load_preset

MAX_RANKS = 256
#: Smallest and largest tensor of a pair, in bytes.
BYTES = (2**10, 2**32)
#: A pair counts as lost if another strategy is faster by more than this part.
MARGIN = 0.01
_GBIT = 1e9 / 8
_DTYPES = {"bfloat16": 2, "float32": 4, "int8": 1}


def _preset(name: str) -> Callable[[random.Random, int], tuple[Topology, int]]:
    def make(chance: random.Random, num_ranks: int) -> tuple[Topology, int]:
        return load_preset(name, num_ranks), MACHINES[name].devices

    return make


def _plain(chance: random.Random, num_ranks: int) -> tuple[Topology, int]:
    """Equal hosts with the default latency."""
    devices = chance.choice((1, 2, 4, 8))
    rate = chance.choice((10, 25, 100, 400)) * _GBIT
    return Topology.uniform([rank // devices for rank in range(num_ranks)], rate), devices


def _zero_latency(chance: random.Random, num_ranks: int) -> tuple[Topology, int]:
    """Equal hosts with one to eight NICs and no cost per message."""
    devices = chance.choice((2, 4, 8))
    nics = chance.choice([n for n in (1, 2, 4, 8) if n <= devices])
    hosts = (Host((Link.of(chance.choice((10, 50, 400)) * _GBIT),) * nics),)
    topology = Topology(tuple(rank // devices for rank in range(num_ranks)), hosts)
    return topology.without_latency(), devices


def _unequal(chance: random.Random, num_ranks: int) -> tuple[Topology, int]:
    """Hosts with different numbers and rates of NICs; on half of the topologies rates also differ by direction."""
    devices = chance.choice((2, 4, 8))
    num_hosts = -(-num_ranks // devices)

    def link() -> Link:
        rates = [chance.choice((10, 25, 40, 100)) * _GBIT for _ in range(2)]
        return Link(*rates) if is_split else Link.of(rates[0])

    is_split, max_axes = chance.random() < 0.5, chance.choice((1, 1, 2))
    hosts = tuple(Host(tuple(link() for _ in range(chance.randint(1, max_axes)))) for _ in range(num_hosts))
    topology = Topology(tuple(rank // devices for rank in range(num_ranks)), hosts)
    return _with_costs(chance, topology), devices


def _pods(chance: random.Random, num_ranks: int) -> tuple[Topology, int]:
    """Pods whose uplink has the total rate of their hosts, or a half or a quarter of it."""
    devices = chance.choice((2, 4, 8))
    num_hosts = -(-num_ranks // devices)
    num_pods = min(chance.randint(2, 4), num_hosts)
    nics = chance.choice((1, 1, 2))
    rate = chance.choice((10, 100)) * _GBIT
    hosts = tuple(Host((Link.of(rate),) * nics, host * num_pods // num_hosts) for host in range(num_hosts))
    up = Link.of(rate * nics * -(-num_hosts // num_pods) / chance.choice((1, 2, 4)))
    topology = Topology(tuple(rank // devices for rank in range(num_ranks)), hosts, pods=(up,) * num_pods)
    return _with_costs(chance, topology), devices


def _with_costs(chance: random.Random, topology: Topology) -> Topology:
    """Random costs per message: none, the defaults, RDMA-like with slow links inside hosts, or changes of senders."""
    what = chance.randrange(4)
    if what == 0:
        return topology.without_latency()
    if what == 1:
        return topology
    if what == 2:
        return replace(topology, latency_seconds=1.5e-5, inside_latency_seconds=5e-6, inside_bytes_per_second=2.5e10)
    return replace(topology, sender_change_seconds=2e-4)


NETWORKS: dict[str, Callable[[random.Random, int], tuple[Topology, int]]] = {
    **{name: _preset(name) for name in MACHINES},
    "no latency given": _plain,
    "free messages": _zero_latency,
    "unequal NICs": _unequal,
    "pods": _pods,
}


def random_pair(seed: int, number: int, max_ranks: int = MAX_RANKS) -> tuple[str, TensorSpec, Topology]:
    """Pair ``number`` of a seed: name of its network, tensor with both layouts, and topology."""
    chance = random.Random(f"{seed}/{number}")
    network = list(NETWORKS)[number % len(NETWORKS)]
    is_in_place = chance.random() < 0.25
    max_side_ranks = max_ranks if is_in_place else max_ranks // 2
    counts = [
        min(2 ** chance.randint(0, max_side_ranks.bit_length() - 1) * chance.choice((1, 1, 1, 3)), max_side_ranks)
        for _ in range(2)
    ]
    first = 0 if is_in_place else counts[0]
    if is_in_place and chance.random() < 0.5:
        first = chance.randint(0, counts[0])  # meshes that overlap
        counts[1] = min(counts[1], max_ranks - first)
    topology, devices = NETWORKS[network](chance, max(counts[0], first + counts[1]))
    ndim = chance.randint(1, 3)
    src, dst = (
        _random_layout(chance, count, begin, devices, ndim) for count, begin in zip(counts, (0, first), strict=True)
    )
    dtype = chance.choice(list(_DTYPES))
    numel = math.exp(chance.uniform(*map(math.log, BYTES))) / _DTYPES[dtype]
    return network, TensorSpec(_random_shape(chance, numel, ndim), dtype, src, dst), topology


def _random_shape(chance: random.Random, numel: float, ndim: int) -> tuple[int, ...]:
    """A random shape of about ``numel`` elements."""
    parts = [chance.uniform(0.5, 1.5) for _ in range(ndim)]
    sizes = [max(1, round(numel ** (part / sum(parts)))) for part in parts]
    if chance.random() < 0.7:  # typical sizes are powers of two
        sizes = [2 ** round(math.log2(size)) for size in sizes]
    return tuple(sizes)


def _random_layout(chance: random.Random, count: int, first: int, devices: int, ndim: int) -> Layout:
    """A layout on a mesh of one to three axes; each axis shards a random dim or none."""
    grid = [count]
    if count % devices == 0 and count > devices and chance.random() < 0.8:
        grid = [count // devices, devices]
    if grid[0] % 2 == 0 and chance.random() < 0.2:
        grid = [2, grid[0] // 2, *grid[1:]]
    spec = ["" for _ in range(ndim)]
    for axis in chance.sample(range(len(grid)), len(grid)):
        if chance.random() < 0.7:
            spec[chance.randrange(ndim)] += str(axis)
    return Layout(Mesh.of(grid, first_rank=first), " ".join(f"S{axes}" if axes else "R" for axes in spec))


def measure(network: str, spec: TensorSpec, topology: Topology, rivals: bool = True) -> dict[str, Any]:
    """Plan and simulate ``auto`` and, with ``rivals``, every strategy that it chooses from.

    Returns:
        ``{strategy: [makespan seconds, messages, CPU seconds to plan, CPU seconds to simulate]}``, with ``"chosen"``,
        ``"network"``, ``"title"`` and ``"bytes"``. If a strategy cannot be faster than ``auto``, its makespan is only a
        lower bound.
    """
    record: dict[str, Any] = {"network": network, "title": str(spec), "bytes": math.prod(spec.shape) * spec.itemsize}
    problem = PlanProblem.of([spec], topology) if rivals else None
    for name, strategy in {AUTO: None, **(CANDIDATES if rivals else {})}.items():
        if problem is not None and name.endswith("gather"):  # planning one among many receivers would take minutes
            bound = StrategyBounds(problem).of_gathers((problem.receivers != NO_RANK).sum(axis=1))
            if bound > record[AUTO][0]:
                record[name] = [bound, 0, 0.0, 0.0]
                continue
        fresh = TensorSpec(spec.shape, spec.dtype, spec.src, spec.dst)  # without cached unit tasks
        begun = time.process_time()
        try:
            plan = plan_tensors([fresh], strategy=strategy, topology=topology)
        except ReshardError as error:
            record[name] = [math.inf, 0, str(error)]
            continue
        taken = time.process_time() - begun
        if name != AUTO and problem is not None:
            bound = bound_of_transfers(problem, plan.transfers)
            if bound > record[AUTO][0]:
                record[name] = [bound, plan.num_messages, taken, 0.0]
                continue
        begun = time.process_time()
        record[name] = [simulate(plan).makespan_seconds, plan.num_messages, taken, time.process_time() - begun]
        if name == AUTO:
            record["chosen"] = plan.strategy
    return record


def _measure(task: tuple[int, int, int, bool]) -> dict[str, Any]:
    seed, number, max_ranks, rivals = task
    return {"number": number, **measure(*random_pair(seed, number, max_ranks), rivals)}


def measure_pairs(
    seed: int, numbers: list[int], max_ranks: int, jobs: int, rivals: bool = True
) -> Iterator[dict[str, Any]]:
    """Measure every pair; results come in any order."""
    tasks = [(seed, number, max_ranks, rivals) for number in numbers]
    if jobs == 1:
        yield from map(_measure, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_measure, tasks)


def ratio_of(record: dict[str, Any]) -> float:
    """Makespan of ``auto`` over the makespan of the best strategy. Gathering counts where ``auto`` is to choose it."""
    gains = {"gathered_multicast": MIN_GATHER_GAIN}
    best = min(record[name][0] * gains.get(name, 1.0) for name in CANDIDATES)
    return float(record[AUTO][0] / best) if best else 1.0


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--pairs", 500, "number of random pairs", high=10**6)
    add_number(parser, "--seed", 0, "seed of the pairs", low=0, high=2**32)
    add_number(parser, "--most-ranks", MAX_RANKS, "most ranks of both meshes together", low=2, high=2**16)
    add_number(parser, "--jobs", 1, "worker processes")
    parser.add_argument("--only", type=int, action="append", help="run only the pair of this number; may be repeated")
    parser.add_argument("--no-rivals", action="store_true", help="only time the planning of auto")
    add_number(parser, "--worst", 10, "number of worst pairs to print", low=0)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")


def run(options: argparse.Namespace) -> int:
    """Compare auto with the strategies it chooses from; the exit status is 1 if one is faster by more than 1 %."""
    numbers = options.only or list(range(options.pairs))
    rows = []
    results = measure_pairs(options.seed, numbers, options.most_ranks, options.jobs, not options.no_rivals)
    for record in track(results, "pairs", len(numbers)):
        rows.append(record)
        write_records(options.out, [record], "a")
    planned = [record[AUTO][2] for record in rows]
    print(f"auto planned {len(rows)} pairs in {sum(planned):.2f} s, median {1e3 * statistics.median(planned):.1f} ms")
    return 0 if options.no_rivals else report(rows, options.worst)


def report(rows: list[dict[str, Any]], worst: int) -> int:
    """Print the distribution of ratios and the worst pairs; returns 1 if a pair was lost."""
    ratios = sorted(map(ratio_of, rows))
    lost = sum(ratio > 1 + MARGIN for ratio in ratios)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"makespan of auto / makespan of the best strategy: worst {ratios[-1]:.4f}, geometric mean {mean:.5f}")
    for part in (0.5, 0.9, 0.95, 0.99):
        print(f"  {part:.0%} of pairs within {ratios[math.ceil(part * len(ratios)) - 1]:.4f}")
    print(f"{lost} pairs on which another strategy is faster by more than {MARGIN:.0%}")
    print(f"{'':28} {'chosen':>7} {'best':>7} {'best by over 1 %':>18} {'CPU s to plan':>14} {'to simulate':>12}")
    for name in CANDIDATES:
        times = {rival: [record[rival][0] for record in rows] for rival in CANDIDATES}
        others = [min(times[rival][i] for rival in CANDIDATES if rival != name) for i in range(len(rows))]
        best = sum(a <= b for a, b in zip(times[name], others, strict=True))
        alone = sum(a * (1 + MARGIN) < b for a, b in zip(times[name], others, strict=True))
        chosen = sum(record["chosen"] == name for record in rows)
        spent = [sum(record[name][index] for record in rows if len(record[name]) > 3) for index in (2, 3)]
        print(f"{name:28} {chosen:7} {best:7} {alone:18} {spent[0]:14.2f} {spent[1]:12.2f}")
    for record in sorted(rows, key=ratio_of, reverse=True)[:worst]:
        best = min(CANDIDATES, key=lambda name: record[name][0])
        print(
            f"{ratio_of(record):.4f}  pair {record['number']}: {record['chosen']} {1e6 * record[AUTO][0]:.1f} us, "
            f"{best} {1e6 * record[best][0]:.1f} us; {record['network']}, {record['title']}"
        )
    return int(lost > 0)
