"""Predicted speed of [4,4,4] over [8,8,1] on 64 GPUs.

Shapes are [rows, cols, depth]. The SUMMA2.5-LM paper reports 1.45 under weak scaling: the batch grows with depth x
rows, and the hidden size with rows. The two grids then run different problems, so their speeds are compared as
floating-point operations per second and GPU. The table also compares the grids on the same problem. Costs are those of
``choose_grid`` on 16 hosts of 4 GPUs, with the best mapping of ranks for each grid.
"""

from __future__ import annotations

import argparse
import itertools

from microbench.harness.case_options import add_number
from microbench.harness.table import Table
from reshard.cli.progress_bars import print_line, track
from reshard.parallel import TransformerSizes, choose_grid
from reshard.parallel.choice.grid_choice import GridCost
from reshard.topology import Topology

SEQUENCE = 512
#: Weak scaling: batch rows per unit of depth x rows, and hidden features per row of the grid.
ROWS, HIDDEN = 12, 768


def sizes(hidden: int) -> TransformerSizes:
    """One layer, without the output layer."""
    return TransformerSizes(hidden, 1, 64, 64, hidden // 64, 4 * hidden, 1, 1, SEQUENCE)


def find_best(
    shape: tuple[int, int, int], rows: int, hidden: int, topology: Topology, flops_per_second: float
) -> GridCost:
    """The cost of a grid of shape ``(rows, cols, depth)`` under its best mapping of ranks, in bfloat16."""
    choice = choose_grid(sizes(hidden), topology, range(64), rows=rows, flops_per_second=flops_per_second, itemsize=2)
    return next(
        candidate for candidate in choice.candidates if (candidate.rows, candidate.cols, candidate.depth) == shape
    )


def speed(grid_cost: GridCost, rows: int, hidden: int) -> float:
    """Floating-point operations of matrix products per second and GPU: 3 passes of 2 x 12 h^2 per token."""
    return 3 * 24 * hidden**2 * rows * SEQUENCE / 64 / grid_cost.seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--rows", ROWS, "batch rows per unit of depth x rows")
    add_number(parser, "--hidden", HIDDEN, "hidden features per row of the grid", high=10**5)


def run(options: argparse.Namespace) -> None:
    """Print a table of ratios."""
    settings = itertools.product((100, 200), (25, 50, 200), (30, 60, 120))
    print_line(f"[4,4,4] over [8,8,1]; {SEQUENCE} tokens a row; the paper reports 1.45")
    table = Table(
        {"NIC, Gbit/s": ">", "inside, GB/s": ">", "TFLOP/s": ">", "weak scaling": ">.2f", "same problem": ">.2f"}
    )
    for nic, inside, teraflops in track(list(settings), "settings"):
        topology = Topology(
            tuple(rank // 4 for rank in range(64)),
            Topology.uniform([0], nic * 125e6).hosts,
            inside_bytes_per_second=inside * 1e9,
            latency_seconds=5e-6,
            inside_latency_seconds=5e-6,
        )
        weak, same = [], []
        for shape in ((4, 4, 4), (8, 8, 1)):
            rows, hidden = options.rows * shape[0] * shape[2], options.hidden * shape[0]
            weak.append(speed(find_best(shape, rows, hidden, topology, teraflops * 1e12), rows, hidden))
            rows, hidden = options.rows * 16, options.hidden * 4
            same.append(speed(find_best(shape, rows, hidden, topology, teraflops * 1e12), rows, hidden))
        table.add(nic, inside, teraflops, weak[0] / weak[1], same[0] / same[1])
