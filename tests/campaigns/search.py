"""Compare the strategy search with all plans of random problems, and with searches of parts of random clusters.

``python -m tests.campaigns.search joint --number 500``: the recurrence by bottleneck time against all plans, in its own
model; the tests run the first 24 of the same problems. ``parts --number 200``: the whole search against all plans on
all parts of the cluster, simulated; the tests run the first 20. ``interleaved --number 100``: the same with several
stages on each mesh. ``clusters --number 100``: the whole search against the same search on each host, on the first
hosts in the order of their rates, and on one device. Each stops at the first that differs.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from typing import Any

from reshard.errors import ArgumentError
from reshard.scheduler.autoparallel import Cluster, LayerGraph, LayerProfile, search
from reshard.scheduler.autoparallel.costs.search_problem import SearchProblem
from reshard.topology import Host, Link, Topology
from tests.scheduler.autoparallel.random_searches import make_graph
from tests.scheduler.autoparallel.test_device_subsets import check_cluster, check_parts
from tests.scheduler.autoparallel.test_interleaving import check_interleaved
from tests.scheduler.autoparallel.test_methods import check_joint

GBIT = 1e9 / 8


def compare_joint(first: int, number: int) -> None:
    for seed in range(first, first + number):
        check_joint(seed)
    print(f"{number} problems: the recurrence found the best of all plans in each")


def compare_parts(first: int, number: int) -> None:
    shares = []
    for seed in range(first, first + number):
        seconds, bound = check_parts(seed)
        if seconds < math.inf:
            shares.append(bound / seconds)
    print(f"{number} problems: no plan on a part of the cluster is faster than the choice, or below the bound")
    low, middle, high = min(shares), statistics.median(shares), max(shares)
    print(f"the bound is {low:.3f} to {high:.3f} of the choice, in the median {middle:.3f} ({len(shares)} problems)")


def compare_interleaved(first: int, number: int) -> None:
    gains = sorted(gain for seed in range(first, first + number) if (gain := check_interleaved(seed)) > 1 + 1e-9)
    print(f"{number} problems: no interleaved plan on a part of the cluster is faster than the choice")
    if gains:
        print(f"{len(gains)} choices are interleaved, and {gains[0]:.3f} to {gains[-1]:.3f} times as fast as others")


def compare_clusters(first: int, number: int) -> None:
    ratios = []
    for seed in range(first, first + number):
        begun = time.process_time()
        seconds, on_all = check_cluster(seed)
        ratios.append(on_all / seconds if seconds < math.inf else 1.0)
        took = time.process_time() - begun
        print(f"cluster {seed}: {seconds:.4g} s, {ratios[-1]:.3f} times as fast as on all devices; {took:.1f} CPU s")
    gains = [ratio for ratio in ratios if ratio > 1 + 1e-9]
    print(
        f"{number} clusters: never behind a part of the cluster; on {len(gains)}, ahead of all devices in their order"
    )


#: Restrictions of the search: values of ``fixed``. One number of microbatches is another.
RESTRICTIONS = (
    {"zero": 0},
    {"zero": 3},
    {"recompute": False},
    {"zero": 0, "recompute": False},
    {"tp": 1},
    {"grid": None},
    {"tp": 1, "grid": None},
)


def compare_restricted(first: int, number: int) -> None:
    ratios = []
    for seed in range(first, first + number):
        rng = random.Random(seed)
        if seed % 2:
            layers, hidden, vocabulary = rng.choice([4, 8, 12]), rng.choice([256, 512, 1024]), rng.choice([1000, 32000])
            graph = LayerGraph.transformer(layers=layers, hidden=hidden, heads=8, sequence=256, vocabulary=vocabulary)
        else:
            graph = make_graph(rng, rng.randint(5, 10))
        sizes = [rng.choice([1, 2, 4]) for _ in range(rng.randint(2, 4))]
        hosts = tuple(Host((Link.of(rng.choice([5, 25, 100]) * GBIT),)) for _ in sizes)
        ranks = tuple(host for host, size in enumerate(sizes) for _ in range(size))
        profile = LayerProfile.estimate(graph, flops_per_second=rng.choice([1e12, 1e13]))
        cluster = Cluster(Topology(ranks, hosts, inside_bytes_per_second=2e10), rng.choice([4e9, 1e9, 3e8]))

        def seconds(fixed: dict[str, Any], graph=graph, cluster=cluster, profile=profile) -> float:
            try:
                return search(graph, cluster, profile, num_samples=32, fixed={**fixed, "idle": False}).seconds
            except ArgumentError:
                return math.inf

        found, counts = seconds({}), SearchProblem(graph, cluster, profile, 32).microbatch_counts
        restrictions = (*RESTRICTIONS, *({"num_microbatches": count} for count in counts))
        least, fixed = min(((seconds(fixed), fixed) for fixed in restrictions), key=lambda item: item[0])
        if found < math.inf:
            ratios.append(min(1.0, least / found))
            print(f"problem {seed}: {found:.4g} s, {least / found:.4f} times that with {fixed}", flush=True)
    print(f"{len(ratios)} problems: the best restricted search takes {min(ratios):.4f} to 1 times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["joint", "parts", "interleaved", "clusters", "restricted"])
    parser.add_argument("--number", type=int, default=100, help="number of random problems (default: 100)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first problem (default: 0)")
    options = parser.parse_args()
    if options.what == "joint":
        compare_joint(options.first, options.number)
    elif options.what == "parts":
        compare_parts(options.first, options.number)
    elif options.what == "interleaved":
        compare_interleaved(options.first, options.number)
    elif options.what == "restricted":
        compare_restricted(options.first, options.number)
    else:
        compare_clusters(options.first, options.number)


if __name__ == "__main__":
    main()
