"""Search methods under several memory limits. All is simulated.

Four models, with the shapes of BERT-Large, T5-Large, ViT-Huge and Swin-Large, on two hosts of four devices with 100
Gbit/s, and four limits of memory each. At the smallest limit only some methods find a training plan that fits. The
table shows, for each method, the samples per second of its choice under its best schedule, and the balance degrees of
time and of memory.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from microbench.harness.case_options import add_number
from microbench.planner.strategy_search import FLOPS, GBIT, make_topology
from reshard.cli.progress_bars import print_line, track
from reshard.errors import ArgumentError
from reshard.scheduler.autoparallel import MIXED_PRECISION, ChoiceRules, Cluster, Layer, LayerGraph, LayerProfile
from reshard.scheduler.autoparallel.costs.search_problem import SearchProblem
from reshard.scheduler.autoparallel.searching import choose_training_plan

METHODS = ("pure", "galvatron", "bmw", "joint", "auto")
#: Gigabytes of a device, for each model.
LIMITS = {
    "BERT": (0.7, 0.85, 1.25, 4.0),
    "T5": (0.85, 1.0, 1.25, 2.0),
    "ViT": (1.35, 1.5, 2.0, 4.0),
    "Swin": (0.48, 0.75, 1.0, 2.0),
}
COUNTS = (1, 2, 4, 8, 16)


def transformer_layers(name: str, count: int, hidden: int, tokens: int, cross: bool = False) -> list[Layer]:
    """Equal layers of an encoder or, with cross attention, of a decoder."""
    stream, width = 2.0 * tokens * hidden, 16 if cross else 12
    flops = 2.0 * width * tokens * hidden**2 + 4.0 * tokens**2 * hidden * (2 if cross else 1)
    saved, sums = (22 if cross else 17) * stream, 3 if cross else 2
    layer = Layer(
        "", f"{name} {hidden} {tokens}", flops, width * hidden**2, saved, stream, 8, width * hidden**2,
        saved - 5 * stream, sums, stream,
    )  # fmt: skip
    return [replace(layer, name=f"{name}.{number}") for number in range(count)]


def make_models() -> dict[str, LayerGraph]:
    """The four models as chains of layers."""
    models: dict[str, list[tuple[list[Layer], int, int]]] = {
        "BERT": [(transformer_layers("encoder", 24, 1024, 512), 512, 1024)],
        "T5": [
            (transformer_layers("encoder", 12, 1024, 512), 512, 1024),
            (transformer_layers("decoder", 12, 1024, 512, cross=True), 512, 1024),
        ],
        "ViT": [(transformer_layers("encoder", 32, 1280, 257), 257, 1280)],
        "Swin": [
            (transformer_layers(f"step{step}", count, 192 << step, (56 >> step) ** 2), (56 >> step) ** 2, 192 << step)
            for step, count in enumerate((2, 2, 18, 2))
        ],
    }
    graphs = {}
    for name, parts in models.items():
        layers = [layer for part, _, _ in parts for layer in part]
        shapes = [(1, tokens, hidden) for part, tokens, hidden in parts for _ in part]
        graphs[name] = LayerGraph.chain(layers, shapes[:-1], dtype="bfloat16", name=name)
    return graphs


def describe(problem: SearchProblem, method: str) -> str:
    """Samples per second of a method's choice, and its balance degrees of time and memory."""
    try:
        training_plan = choose_training_plan(problem, method)
    except ArgumentError as error:
        if "fits" not in str(error):
            raise
        return "out of memory"
    time, memory = training_plan.balance
    return f"{problem.num_samples / training_plan.seconds:.1f} ({time:.2f}, {memory:.2f})"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limits", help="gigabytes of a device, of all models, such as 0.5,1,2 (default: by model)")
    add_number(parser, "--samples", 64, "samples of a step", high=10**5)


def run(options: argparse.Namespace) -> None:
    """Print a line of the table for each model and limit."""
    given = [float(part) for part in options.limits.split(",")] if options.limits else None
    topology = make_topology([100 * GBIT] * 2, 4)
    counts = tuple(count for count in COUNTS if options.samples % count == 0)
    print_line(f"| model | GB | {' | '.join(f'`{method}`' for method in METHODS)} |")
    print_line("|---" * (2 + len(METHODS)) + "|")
    for name, graph in make_models().items():
        profile = LayerProfile.estimate(graph, flops_per_second=FLOPS)
        for limit in track(given or LIMITS[name], f"limits of {name}"):
            cluster = Cluster(topology, limit * 1e9)
            problem = SearchProblem(graph, cluster, profile, options.samples, MIXED_PRECISION, ChoiceRules(), counts)
            cells = " | ".join(describe(problem, method) for method in METHODS)
            print_line(f"| {name} | {limit:g} | {cells} |")
