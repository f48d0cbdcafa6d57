"""Compare search methods under several memory limits: ``python -m microbench.strategies.balance``. All is simulated.

Four models, with the shapes of BERT-Large, T5-Large, ViT-Huge and Swin-Large, on two hosts of four devices with 100
Gbit/s, and four limits of memory. The table shows, for each method, the samples per second of its choice under its
best schedule, and the balance degrees of time and of memory.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from microbench.planner.strategy_search import FLOPS, GBIT, make_topology
from reshard.cli.progress import print_line, track
from reshard.errors import ArgumentError
from reshard.scheduler.autoparallel import (
    MIXED_PRECISION,
    ChoiceRules,
    Cluster,
    Layer,
    LayerGraph,
    Problem,
    Profile,
    choose_strategy,
)

METHODS = ("pure", "galvatron", "bmw", "joint")


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
    found = {}
    for name, parts in models.items():
        layers = [layer for part, _, _ in parts for layer in part]
        shapes = [(1, tokens, hidden) for part, tokens, hidden in parts for _ in part]
        found[name] = LayerGraph.chain(layers, shapes[:-1], dtype="bfloat16", name=name)
    return found


def main() -> None:
    """Print one line for each model and limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", default="0.75,1,2,4", help="gigabytes of a device (default: 0.75,1,2,4)")
    parser.add_argument("--rows", type=int, default=64, help="rows of a step (default: 64)")
    options = parser.parse_args()
    topology = make_topology([100 * GBIT] * 2, 4)
    for name, graph in make_models().items():
        profile = Profile.estimate(graph, flops_per_second=FLOPS)
        for limit in track([*map(float, options.limits.split(","))], "limits"):
            cells = []
            for method in METHODS:
                counts = tuple(count for count in (1, 2, 4, 8, 16) if options.rows % count == 0)
                problem = Problem(
                    graph, Cluster(topology, limit * 1e9), profile, options.rows, MIXED_PRECISION, ChoiceRules(), counts
                )
                try:
                    found = choose_strategy(problem, method)
                except ArgumentError as error:
                    if "fits" not in str(error):
                        raise
                    cells.append(f"{method}: out of memory")
                    continue
                time, memory = found.balance
                cells.append(f"{method}: {options.rows / found.seconds:.1f}/s ({time:.2f}, {memory:.2f})")
            print_line(f"{name:5}{limit:4g} GB  {'; '.join(cells)}")


if __name__ == "__main__":
    main()
