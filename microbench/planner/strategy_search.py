"""Methods of the strategy search compared with each other, and their speed.

All seconds are simulated with estimated times of layers. ``clusters`` compares methods on random clusters; ``families``
on models where edges matter and where they do not; ``speed`` times the recurrence and the whole search.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

from microbench.harness.case_options import BenchmarkOptionError, add_number
from microbench.harness.records import write_records
from reshard.cli.progress_bars import print_line, track
from reshard.scheduler.autoparallel import MIXED_PRECISION, Cluster, Layer, LayerGraph, LayerProfile
from reshard.scheduler.autoparallel.costs.iteration import evaluate
from reshard.scheduler.autoparallel.costs.search_problem import SearchProblem
from reshard.scheduler.autoparallel.methods.auto_method import METHODS, auto, decide
from reshard.scheduler.autoparallel.methods.joint import best_plans
from reshard.topology import Host, Link, Topology

#: Peak rate of a device, and the rate inside a host, as of an A100.
FLOPS, INSIDE = 3.12e14, 3e11
GBIT = 1e9 / 8


def make_gpt(layers: int, hidden: int, sequence: int = 1024) -> LayerGraph:
    """A GPT, whose edges are all alike."""
    return LayerGraph.transformer(
        layers=layers, hidden=hidden, heads=hidden // 128, sequence=sequence, vocabulary=50_304, name=f"gpt{hidden}"
    )


def make_backbone(blocks: int, width: int, side: int = 56) -> LayerGraph:
    """A vision backbone of four steps: each halves the side and doubles the width, so that later edges carry less."""
    layers: list[Layer] = []
    shapes: list[tuple[int, ...]] = []
    for step in range(4):
        tokens, hidden = (side >> step) ** 2, width << step
        for _ in range(blocks * (3 if step == 2 else 1)):
            stream = 2.0 * tokens * hidden
            flops = 24.0 * tokens * hidden**2
            name, key = f"layers.{len(layers)}", f"step {step} {width} {side}"
            params = 12 * hidden**2 + 13 * hidden
            layers.append(
                Layer(
                    name,
                    key,
                    flops,
                    params,
                    saved_bytes=17 * stream,
                    input_bytes=stream,
                    tp_limit=8,
                    tp_params=12 * hidden**2,
                    tp_saved_bytes=12 * stream,
                    tp_all_reduces=2,
                    tp_all_reduce_bytes=stream,
                )
            )
            shapes.append((1, tokens, hidden))
    return LayerGraph.chain(layers, shapes[:-1], dtype="bfloat16", name=f"backbone{width}")


def make_topology(rates: Sequence[float], devices: int) -> Topology:
    """Hosts with one NIC each, of these rates in bytes per second."""
    host_of_rank = tuple(host for host in range(len(rates)) for _ in range(devices))
    hosts = tuple(Host((Link.of(rate),)) for rate in rates)
    return Topology(
        host_of_rank, hosts, inside_bytes_per_second=INSIDE, latency_seconds=1.5e-5, inside_latency_seconds=5e-6
    )


def make_problem(graph: LayerGraph, topology: Topology, num_samples: int, memory: float = 40e9) -> SearchProblem:
    """A search with guessed times."""
    profile = LayerProfile.estimate(graph, flops_per_second=FLOPS)
    counts = tuple(count for count in (4, 8, 16, 32) if num_samples % count == 0)
    return SearchProblem(
        graph, Cluster(topology, memory), profile, num_samples, MIXED_PRECISION, microbatch_counts=counts
    )


def compare(problem: SearchProblem) -> dict[str, float]:
    """Simulated seconds of each method's own choice, of ``joint`` with its best candidate, and of ``auto``."""
    seconds_of: dict[str, float] = {}
    for name, method in METHODS.items():
        seconds = []
        for candidate in method(problem):
            evaluation = evaluate(problem, candidate)
            seconds.append(math.inf if evaluation is None or evaluation.short_bytes else evaluation.seconds)
        seconds_of[name] = seconds[0] if seconds else math.inf
        if name == "joint":
            seconds_of["joint, best of its candidates"] = min(seconds, default=math.inf)
    candidates = auto(problem)
    best = decide(problem, candidates, moves=True)[0] if candidates else None
    seconds_of["auto"] = math.inf if best is None or best.short_bytes else best.seconds
    return seconds_of


def print_table(title: str, results: Sequence[dict[str, float]]) -> None:
    """Geometric mean and worst ratio over ``auto``, and how often a method finds nothing that fits."""
    results = [result for result in results if result["auto"] < math.inf]
    print_line(f"{title}: {len(results)} problems; seconds over those of auto")
    for name in results[0] if results else ():
        ratios = [result[name] / result["auto"] for result in results if result[name] < math.inf]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
        missing = len(results) - len(ratios)
        worst = max(ratios, default=math.nan)
        min_ratio = min(ratios, default=math.nan)
        print_line(f"  {name:32} mean {mean:6.3f}  worst {worst:6.3f}  least {min_ratio:6.3f}  nothing fits {missing}")


def random_problem(seed: int) -> tuple[str, SearchProblem]:
    """A model and a cluster drawn at random, and the group of problems that they belong to."""
    rng = random.Random(seed)
    graph = rng.choice([make_gpt(8, 1024), make_gpt(12, 2048), make_backbone(2, 256), make_backbone(2, 384)])
    rates = [rng.choice([10, 25, 100]) * GBIT for _ in range(rng.choice([2, 3, 4]))]
    if rng.random() < 0.5:
        rates = [rates[0]] * len(rates)
    family = "GPT" if graph.name.startswith("gpt") else "vision backbones"
    links = "unequal links" if len(set(rates)) > 1 else f"links of {rates[0] / GBIT:.0f} Gbit/s"
    return f"{family}, {links}", make_problem(graph, make_topology(rates, rng.choice([2, 4])), 64)


def random_clusters(number: int, seconds: float, path: Path | None) -> None:
    """Models and clusters drawn at random, as many as fit the seconds. Stops if ``auto`` is slower than another method.

    Clusters in the file at ``path`` are not compared again; others are appended to it.
    """
    known: dict[int, dict[str, float]] = {}
    if path is not None and path.exists():
        known = {line["seed"]: line["seconds"] for line in map(json.loads, path.read_text().splitlines())}
    groups: dict[str, list[dict[str, float]]] = {"all": []}
    begun = time.monotonic()
    for seed in track(range(number), "clusters"):
        if seed not in known and time.monotonic() - begun > seconds:
            continue
        group, problem = random_problem(seed)
        if seed not in known:
            known[seed] = compare(problem)
            write_records(path, [{"seed": seed, "group": group, "seconds": known[seed]}], "a")
        ratios = known[seed]
        behind = {name: s for name, s in ratios.items() if s < ratios["auto"] * (1 - 1e-9)}
        if behind:
            raise SystemExit(f"cluster {seed}: auto takes {ratios['auto']:.6g} s, but {behind}")
        for item in ("all", group, *(["vision backbones or unequal links"] if "GPT, links" not in group else [])):
            groups.setdefault(item, []).append(ratios)
    for name in sorted(groups):
        print_table(name, groups[name])


def families() -> None:
    """One line for each family of models and links."""
    for title, graph, rates in (
        ("GPT, fast links", make_gpt(12, 2048), [400 * GBIT] * 4),
        ("GPT, unequal links", make_gpt(12, 2048), [100 * GBIT, 10 * GBIT, 100 * GBIT, 10 * GBIT]),
        ("vision backbone, 25 Gbit/s", make_backbone(2, 384), [25 * GBIT] * 4),
        ("vision backbone, 10 Gbit/s", make_backbone(2, 384), [10 * GBIT] * 4),
    ):
        ratios_of = compare(make_problem(graph, make_topology(rates, 4), 64))
        ratios = ", ".join(f"{name} {seconds / ratios_of['auto']:.3f}" for name, seconds in ratios_of.items())
        print_line(f"{title}: auto {ratios_of['auto']:.4g} s; over it: {ratios}")


def speed() -> None:
    """Seconds of the recurrence until its first exact plan, and of ``auto``."""
    for layers, hidden, hosts, counts in ((48, 8192, 8, (16, 32, 64)), (94, 12288, 128, (64, 128, 256))):
        graph = make_gpt(layers, hidden, 2048)
        topology = make_topology([400 * GBIT] * hosts, 8)
        profile = LayerProfile.estimate(graph, flops_per_second=FLOPS)
        problem = SearchProblem(
            graph, Cluster(topology, 80e9), profile, 1024, MIXED_PRECISION, microbatch_counts=counts
        )
        begun = time.process_time()
        plan = next(best_plans(problem))
        took = time.process_time() - begun
        print_line(
            f"{len(graph.layers)} layers on {8 * hosts} devices: {took:.2f} CPU s to the first exact plan, "
            f"{problem.edge_costs.num_priced} priced edges; {plan.predicted_seconds:.4g} s, {len(plan.stages)} stages"
        )
        begun = time.process_time()
        best = decide(problem, auto(problem), moves=True)[0]
        took = time.process_time() - begun
        print_line(f"  auto: {took:.1f} more CPU s; {best.seconds:.4g} s, {best.candidate.text}")


PARTS = ("families", "speed", "clusters")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", nargs="*", help=f"what to run ({', '.join(PARTS)})")
    add_number(parser, "--clusters", 20, "number of random clusters", high=10**6)
    add_number(parser, "--seconds", 3600.0, "seconds after which no cluster starts", low=0, high=1e6)
    parser.add_argument("--results", type=Path, help="file of random clusters that are finished, read and appended to")


def run(options: argparse.Namespace) -> None:
    """Run the parts that are named."""
    for part in options.parts or PARTS:
        if part == "clusters":
            random_clusters(options.clusters, options.seconds, options.results)
        elif part == "families":
            families()
        elif part == "speed":
            speed()
        else:
            raise BenchmarkOptionError(f"no part {part!r}; choose among {', '.join(PARTS)}")
