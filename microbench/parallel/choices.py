"""The choice of ``choose_grid``, compared with measured steps on all grids.

Each case trains one layer of the GPT of ``reshard train`` on emulated hosts, on every shape of grid that the ranks can
form, with the rank order that has the lowest cost. Links are calibrated. The rate of a rank is that of a step without
communication, while all ranks run such steps. "Lost" is the measured time of the chosen grid over that of the best one,
less 1. NICs are so slow that communication, and not the CPU that all ranks share, takes most of a step.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.harness.case_options import add_number
from microbench.harness.table import Table
from microbench.harness.turns import Times, medians_of, slowest, time_in_turns
from microbench.parallel.grid_links import measure_grid_links
from reshard.cli.progress_bars import print_line, track
from reshard.coordination.device_mesh import make_device_mesh
from reshard.parallel import Grid, TransformerSizes, choose_grid, parallelize, sync_gradients
from reshard.parallel.choice.grid_choice import GridCost
from reshard.parallel.grid import AXES
from reshard.scheduler.training.models.gpt import GPT
from reshard.scheduler.training.models.model_presets import GPTConfig
from reshard.topology import Topology

HEADS, VOCABULARY, TIMEOUT_SECONDS = 16, 512, 300


@dataclass(frozen=True)
class GridCase:
    """Hosts and a model.

    Attributes:
        hosts, per_host: numbers of hosts and of ranks on each.
        mbits: rate of each NIC.
        rows, sequence: size of a batch and of its sequences.
        hidden: width of the model.
    """

    hosts: int
    per_host: int
    mbits: float
    rows: int
    sequence: int
    hidden: int

    @property
    def topology(self) -> Topology:
        """The hosts and their NICs."""
        ranks = range(self.hosts * self.per_host)
        return Topology.uniform([rank // self.per_host for rank in ranks], self.mbits * 125e3)

    @property
    def config(self) -> GPTConfig:
        """One layer."""
        return GPTConfig(1, HEADS, self.hidden // HEADS, self.sequence, VOCABULARY, is_tied=False)

    def __str__(self) -> str:
        return (
            f"{self.hosts} hosts x {self.per_host}, {self.mbits:g} Mbit/s, {self.rows * self.sequence} tokens, "
            f"h = {self.hidden}"
        )


CASES = (
    GridCase(4, 4, 200, 32, 128, 256),
    GridCase(4, 4, 200, 16, 64, 512),
    GridCase(4, 4, 200, 16, 16, 512),
    GridCase(2, 4, 200, 16, 256, 256),
    GridCase(2, 4, 200, 8, 32, 512),
    GridCase(4, 2, 200, 16, 128, 256),
    GridCase(4, 1, 200, 8, 128, 256),
    GridCase(4, 1, 400, 4, 16, 768),
)


def measure_flops(rank: int, report: Callable[[Any], None], case: GridCase) -> float:
    """Operations per second of a rank in a step of the model without communication, while all ranks run such steps."""
    torch.set_num_threads(1)
    rows = max(1, case.rows // (case.hosts * case.per_host))
    tokens, targets = torch.randint(VOCABULARY, (2, rows, case.sequence))
    model, sizes = GPT(case.config), TransformerSizes.of(case.config)
    forward = sizes.num_layers * sizes.layer.forward_flops + sizes.output.forward_flops
    rates = []
    for _ in range(4):
        dist.barrier()
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < 0.5:
            model(tokens, targets).backward()
            count += 1
        rates.append(3 * forward * rows * count / (time.perf_counter() - begun))
    total = torch.tensor(statistics.median(rates[1:]))
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def time_grids(
    rank: int, report: Callable[[Any], None], case: GridCase, arrangements: list[np.ndarray], repeats: int
) -> Times:
    """Seconds of each step on each grid on this rank. Grids run in turns."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(VOCABULARY, (2, case.rows, case.sequence), generator=generator)
    steps = {}
    for number, ranks in enumerate(arrangements):
        torch.manual_seed(0)
        model = GPT(case.config)
        model.apply(GPT.initialize)
        mesh = make_device_mesh(torch.tensor(ranks), AXES, "cpu", TIMEOUT_SECONDS)
        steps[str(number)] = functools.partial(_step, parallelize(model, Grid(mesh)), tokens, targets)
    return time_in_turns(steps, repeats)


def _step(model: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    model.zero_grad()
    model(tokens, targets).backward()
    sync_gradients(model, check_every=0)


def best_of_each_shape(candidates: tuple[GridCost, ...]) -> list[GridCost]:
    """The cheapest rank order of each shape, cheapest shape first."""
    best_of: dict[str, GridCost] = {}
    for cost in candidates:
        best_of.setdefault(str(cost), cost)
    return list(best_of.values())


def run_case(case: GridCase, repeats: int) -> float:
    """Measure and print one case. Returns what the choice loses."""
    with EmulatedCluster(case.topology) as cluster:
        links = measure_grid_links(cluster, case.topology)
        flops = cluster.run(measure_flops, case, timeout_seconds=120)[0]
        ranks = range(case.hosts * case.per_host)
        choice = choose_grid(
            TransformerSizes.of(case.config), links, ranks, rows=case.rows, flops_per_second=flops, itemsize=4
        )
        costs = best_of_each_shape(choice.candidates)
        arrangements = [cost.ranks(ranks) for cost in costs]
        times = slowest(cluster.run(time_grids, case, arrangements, repeats, timeout_seconds=900))
        seconds = list(medians_of(times).values())
    lost = seconds[0] / min(seconds) - 1
    print_line(f"\n{case}; {flops / 1e9:.1f} GFLOP/s a rank; the choice loses {lost:.1%}")
    table = Table({"grid": ">12", "kind": ">14", "predicted, ms": ">.0f", "measured, ms": ">.0f"})
    for cost, measured in zip(costs, seconds, strict=True):
        table.add(str(cost), cost.kind, 1e3 * cost.seconds, 1e3 * measured)
    return lost


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", type=int, action="append", choices=range(1, 1 + len(CASES)), help="case to run (all)")
    add_number(parser, "--repeats", 3, "steps of each grid, of which the median counts")


def run(options: argparse.Namespace) -> None:
    """Run all cases."""
    numbers = options.case or range(1, 1 + len(CASES))
    lost = [run_case(CASES[number - 1], options.repeats) for number in track(numbers, "cases")]
    print_line(f"\n{sum(rank <= 0.1 for rank in lost)} of {len(lost)} choices lose at most 10 %; worst {max(lost):.1%}")
