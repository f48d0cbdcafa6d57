"""Bytes that each rank receives on the wire, against the formulas.

Each rank has a separate network namespace, whose counters see all that it receives: payload, headers, and the
acknowledgements of what it sends. Two runs with different numbers of steps are subtracted, so that connecting does not
count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.harness.case_options import add_number
from microbench.harness.table import Table
from microbench.parallel.layers import GridShape, LinearStack, received_per_rank, transformer_linears
from reshard.cli.progress_bars import print_line, track
from reshard.parallel import Grid
from reshard.topology import Topology

#: [1,4,1] is 1-D; [4,4,4] has 64 processes.
GRIDS = "1,4,1 2,2,1 2,2,2 1,2,4 3,2,1 2,3,2 4,4,1 4,4,4"
#: Largest difference that headers and acknowledgements explain.
TOLERANCE = 0.03


def run_steps(rank: int, report: Callable[[Any], None], shape: GridShape, tokens: int, hidden: int, steps: int) -> None:
    """Run steps of the linear layers of a transformer layer on this rank."""
    torch.set_num_threads(1)
    stack = LinearStack(Grid.make(shape.rows, shape.cols, shape.depth), transformer_linears(hidden), tokens)
    for _ in range(steps):
        stack.run_step()


def measure(shape: GridShape, tokens: int, hidden: int, steps: int) -> list[float]:
    """Bytes that each rank receives in one step."""
    with EmulatedCluster(Topology.uniform(list(range(shape.size)), 125e7)) as cluster:
        counts = []
        for number in (1, 1 + steps):
            before = [nics[0][1] for nics in cluster.crossed_bytes()]
            cluster.run(run_steps, shape, tokens, hidden, number, timeout_seconds=600)
            counts.append([nics[0][1] - old for nics, old in zip(cluster.crossed_bytes(), before, strict=True)])
    return [(many - item) / steps for item, many in zip(*counts, strict=True)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grids", default=GRIDS, help="rows,cols,depth of each grid, separated by spaces")
    add_number(parser, "--tokens", 2048, "tokens of a step", high=10**6)
    add_number(parser, "--hidden", 256, "hidden size", high=10**5)
    add_number(parser, "--steps", 8, "steps whose bytes are counted")


def run(options: argparse.Namespace) -> int:
    """Print a table. The exit code is 1 if a rank is off by more than the tolerance."""
    sizes = transformer_linears(options.hidden)
    print_line(
        f"linears of a transformer layer, {options.tokens} tokens, hidden {options.hidden}, float32, bytes per step"
    )
    table = Table({"grid": ">10", "ranks": ">", "formula": ">12", "counted": ">12.0f", "worst ratio": ">.4f"})
    worst = 0.0
    for text in track(options.grids.split(), "grids"):
        shape = GridShape.parse(text)
        formula = [4 * item for item in received_per_rank(shape, sizes, options.tokens)]
        counted = measure(shape, options.tokens, options.hidden, options.steps)
        ratio = max((a / b for a, b in zip(counted, formula, strict=True)), key=lambda ratio: abs(ratio - 1))
        worst = max(worst, abs(ratio - 1))
        table.add(str(shape), shape.size, max(formula), max(counted), ratio)
    return int(worst > TOLERANCE)
