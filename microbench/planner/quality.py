"""Simulated makespan over the lower bound, on many layout pairs.

It plans and simulates; no tensor is moved.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from microbench.harness.case_options import add_number
from reshard.cli.progress_bars import track
from reshard.cost import find_bound, simulate
from reshard.planner import plan_tensors
from reshard.sharding import Layout, Mesh, TensorSpec
from reshard.topology import Host, Link, Topology

TEN_GBIT = 1.25e9
_SHAPES = ((1024, 1024, 32), (1000, 1100, 40), (840, 840, 64), (2048, 512, 48), (1021, 997, 37), (96, 4096, 128))


@dataclass(frozen=True)
class Pair:
    """A layout pair on a topology. The makespan is compared with ``best_seconds``, or the lower bound if None."""

    spec: TensorSpec
    topology: Topology
    best_seconds: float | None = None


def random_layout(rng: random.Random, mesh: Mesh) -> Layout:
    """A random layout of a 3-d tensor: each mesh axis shards a random dim or none."""
    axes = ["R"] * 3
    for axis in rng.choice(("", "0", "1", "01", "10", "0 1", "1 0")).split():
        dim = rng.choice([dim for dim in range(3) if axes[dim] == "R"])
        axes[dim] = "S" + axis
    return Layout(mesh, " ".join(axes))


def random_pair(rng: random.Random, hosts: tuple[int, int], devices: int = 4) -> tuple[TensorSpec, int]:
    """A random tensor on disjoint meshes of ``hosts[0]`` and ``hosts[1]`` hosts, and the total number of hosts."""
    src = Mesh.of((hosts[0], devices))
    dst = Mesh.of((hosts[1], devices), first_rank=hosts[0] * devices)
    spec = TensorSpec(rng.choice(_SHAPES), "float32", random_layout(rng, src), random_layout(rng, dst))
    return spec, sum(hosts)


def uniform(num_hosts: int, devices: int = 4) -> Topology:
    """One NIC of 10 Gbit/s per host, without latency, because the bound ignores latency."""
    return Topology.uniform([rank // devices for rank in range(num_hosts * devices)], TEN_GBIT).without_latency()


def one_nic(seed: int, count: int) -> Iterator[Pair]:
    """Random pairs between 1 to 8 source hosts and 1 to 8 destination hosts."""
    rng = random.Random(seed)
    for _ in range(count):
        spec, hosts = random_pair(rng, (rng.randint(1, 8), rng.randint(1, 8)))
        yield Pair(spec, uniform(hosts))


def listed(seed: int, count: int) -> Iterator[Pair]:
    """Fixed layout pairs from the literature."""
    for line in (
        "2 2 S0RR>S0RR RRR>S0RR RS0R>S0RR RS01R>S01RR S1RR>S0RR S0RR>S01RR S01RR>S0RR RS0R>RRS0 S0RR>RRR RRR>RRR",
        "1 2 S1RR>S0RR S1RR>RRR RRR>S01RR",
        "2 3 S0RR>S0RR RRR>S0RR S1RR>S0RR RS0R>S0RR",
        "3 2 S0RR>S0RR RRR>S0RR",
        "3 4 RRR>S0RR RRR>RS0R",
        "4 4 RS01R>S01RR S1RR>S0RR RS0R>S0RR",
        "4 3 RRR>S0RR",
        "4 5 RRR>S0RR",
        "2 5 RRR>S0RR",
        "4 6 RS0R>S0RR S0RR>S0RR",
    ):
        a, b, *pairs = line.split()
        shape = (3072, 1024, 170) if "3" in (a, b) else (1024, 1024, 512)
        src, dst = Mesh.of((int(a), 4)), Mesh.of((int(b), 4), first_rank=4 * int(a))
        for pair in pairs:
            left, right = (_spaced(side) for side in pair.split(">"))
            yield Pair(TensorSpec(shape, "float32", Layout(src, left), Layout(dst, right)), uniform(int(a) + int(b)))


def _spaced(spec: str) -> str:
    return spec.replace("R", " R").replace("S", " S").strip()


def several_nics(seed: int, count: int) -> Iterator[Pair]:
    """Random pairs on hosts with 2, 4 or 8 NICs and at least one device per NIC."""
    rng = random.Random(seed)
    for number in range(count):
        nics = (2, 4, 8)[number % 3]
        devices = max(4, nics)
        spec, hosts = random_pair(rng, (rng.randint(1, 4), rng.randint(1, 4)), devices)
        topology = uniform(hosts, devices)
        yield Pair(spec, replace(topology, hosts=(Host((Link.of(TEN_GBIT),) * nics),), nic_of_rank=()))


def unequal(seed: int, count: int) -> Iterator[Pair]:
    """Random pairs on hosts whose NIC has 10, 5 or 2.5 Gbit/s."""
    rng = random.Random(seed)
    for _ in range(count):
        spec, num_hosts = random_pair(rng, (rng.randint(1, 6), rng.randint(1, 6)))
        hosts = tuple(Host((Link.of(TEN_GBIT / rng.choice((1, 2, 4))),)) for _ in range(num_hosts))
        yield Pair(spec, replace(uniform(num_hosts), hosts=hosts))


def pods(seed: int, count: int) -> Iterator[Pair]:
    """Random pairs on two to four pods of four hosts. An uplink has the rate of one NIC; meshes may span pods."""
    rng = random.Random(seed)
    for _ in range(count):
        num_pods = rng.randint(2, 4)
        places = list(range(4 * num_pods))
        if rng.random() < 0.5:
            rng.shuffle(places)
        half = 2 * num_pods
        a, b = rng.randint(1, half), rng.randint(1, half)
        src = Mesh.from_array([[4 * host + device for device in range(4)] for host in places[:a]])
        dst = Mesh.from_array([[4 * host + device for device in range(4)] for host in places[half : half + b]])
        spec = TensorSpec(rng.choice(_SHAPES), "float32", random_layout(rng, src), random_layout(rng, dst))
        hosts = tuple(Host((Link.of(TEN_GBIT),), host // 4) for host in range(4 * num_pods))
        yield Pair(spec, replace(uniform(4 * num_pods), hosts=hosts, pods=(Link.of(TEN_GBIT),) * num_pods))


def shared(seed: int, count: int) -> Iterator[Pair]:
    """Random pairs whose meshes are on the same hosts or overlap."""
    rng = random.Random(seed)
    num_pairs = tried = 0
    while num_pairs < count:
        a = rng.randint(1, 6)
        b = a if tried % 2 else rng.randint(1, 6)
        first = 0 if tried % 2 else rng.randint(0, a)
        src, dst = Mesh.of((a, 4)), Mesh.of((b, 4), first_rank=4 * first)
        spec = TensorSpec(rng.choice(_SHAPES), "float32", random_layout(rng, src), random_layout(rng, dst))
        topology = uniform(max(a, first + b))
        tried += 1
        if find_bound([spec], topology).seconds:  # 0 if nothing moves between hosts
            num_pairs += 1
            yield Pair(spec, topology)


def mixed(seed: int, count: int) -> Iterator[Pair]:
    """Random pairs with 1 to 8 NICs, rates by host and direction, pods of 1:1 to 4:1, and overlapping meshes."""
    rng = random.Random(seed)
    num_pairs = 0
    while num_pairs < count:
        devices = rng.choice((4, 8))
        a, b = rng.randint(1, 5), rng.randint(1, 5)
        first = rng.choice((a, a, rng.randint(0, a)))
        num_hosts = max(a, first + b)
        nics = rng.choice([n for n in (1, 2, 4, 8) if n <= devices])
        num_pods = rng.choice((0, 0, 2, 3))
        rates = rng.choice(((1,), (1, 2), (1, 2, 4)))
        hosts = []
        for host in range(num_hosts):
            out, into = TEN_GBIT / rng.choice(rates), TEN_GBIT / rng.choice(rates)
            hosts.append(Host((Link(out, into),) * nics, host * num_pods // num_hosts if num_pods else None))
        up = TEN_GBIT * nics * -(-num_hosts // max(num_pods, 1)) / rng.choice((1, 2, 4))
        src, dst = Mesh.of((a, devices)), Mesh.of((b, devices), first_rank=first * devices)
        spec = TensorSpec(rng.choice(_SHAPES), "float32", random_layout(rng, src), random_layout(rng, dst))
        topology = uniform(num_hosts, devices)
        topology = replace(topology, hosts=tuple(hosts), nic_of_rank=(), pods=(Link.of(up),) * num_pods)
        if find_bound([spec], topology).seconds:
            num_pairs += 1
            yield Pair(spec, topology)


def one_holder(seed: int, count: int) -> Iterator[Pair]:
    """Broadcasts of 1 KiB to 256 MiB from one host to 16 and 128 hosts with one port of 3.2 Tbit/s and 15 us latency.

    ``best_seconds`` is a round-optimal broadcast with the best number n of chunks: the minimum over n of
    ``(n - 1 + ceil(log2(hosts + 1))) * (latency + bytes / (n * rate))``.
    """
    rate, latency = 8 * 400e9 / 8, 1.5e-5
    for hosts in (16, 128):
        topology = replace(Topology.uniform(range(hosts + 1), rate), latency_seconds=latency)
        src, dst = Layout(Mesh.of(1)), Layout(Mesh.of(hosts, first_rank=1))
        rounds = math.ceil(math.log2(hosts + 1))
        for power in range(10, 29):
            best = min((n - 1 + rounds) * (latency + 2**power / (n * rate)) for n in range(1, 1000))
            yield Pair(TensorSpec((2**power,), "int8", src, dst), topology, best)


SETS: dict[str, tuple[Callable[[int, int], Iterator[Pair]], int]] = {
    "one NIC": (one_nic, 600),
    "listed": (listed, 29),
    "several NICs": (several_nics, 200),
    "unequal rates": (unequal, 200),
    "pods 4:1": (pods, 100),
    "in place, overlapping": (shared, 200),
    "mixed": (mixed, 300),
    "one holder": (one_holder, 38),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", choices=list(SETS), help="run only this set; may be repeated")
    parser.add_argument("--strategy", action="append", help="strategy to measure (auto); may be repeated")
    add_number(parser, "--seed", 0, "seed of the random sets", low=0, high=2**32)
    parser.add_argument(
        "--count", type=int, help="pairs per random set (default: by set); listed and one holder are fixed"
    )
    add_number(parser, "--worst", 0, "number of worst pairs to print", low=0)


def run(options: argparse.Namespace) -> None:
    """Print the mean and worst ratio of simulated makespan to lower bound, for each set of pairs and strategy."""
    strategies = options.strategy or ["auto"]
    for name in options.set or SETS:
        make, count = SETS[name]
        rows: dict[str, list[tuple[float, str]]] = {strategy: [] for strategy in strategies}
        spent = dict.fromkeys(strategies, 0.0)
        for pair in track(make(options.seed, options.count or count), f"pairs of {name}", options.count or count):
            for strategy in strategies:
                begun = time.perf_counter()
                plan = plan_tensors([pair.spec], strategy=strategy, topology=pair.topology)
                spent[strategy] += time.perf_counter() - begun
                bound = pair.best_seconds or find_bound(plan).seconds
                rows[strategy].append((simulate(plan).makespan_seconds / bound, str(pair.spec)))
        for strategy, strategy_ratios in rows.items():
            ratios = [ratio for ratio, _ in strategy_ratios]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(
                f"{name:22} {strategy:18} {len(strategy_ratios):4} pairs  mean {mean:.4f}  max {max(ratios):.4f}  "
                f"planned in {1e3 * spent[strategy] / len(strategy_ratios):.1f} ms each",
                flush=True,
            )
            for ratio, title in sorted(strategy_ratios, reverse=True)[: options.worst]:
                print(f"    {ratio:.4f}  {title}")
