"""Time to plan pairs of layouts with the default strategy.

16384 x 16384 bfloat16 moves to the next ranks, on three topologies. Times are CPU times of one warm process. The
goals are 10 ms up to 64 ranks a side and 0.5 s for 1,024; the exit status is 1 if a pair takes longer.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from microbench.harness.options import add_number
from reshard.cli.progress import print_line, track
from reshard.plan import Plan
from reshard.planner import plan_tensors
from reshard.sharding import Layout, Mesh, TensorSpec
from reshard.topology import MACHINES, Topology, load_preset

SHAPE = (16384, 16384)
PAIRS = (
    ("S0 R", "R S1"),
    ("S01 R", "R S01"),
    ("S01 R", "R S0"),
    ("S0 R", "R R"),
    ("R R", "S0 R"),
    ("S01 R", "S01 R"),
    ("S01 R", "R R"),
    ("S0 S1", "S1 S0"),
    ("S0 R", "S1 R"),
)
#: One NIC of 10 Gbit/s for each host of eight ranks.
ONE_NIC = "one NIC"
NETWORKS = ("dgx_h100", ONE_NIC, "p3.8xlarge")


@dataclass(frozen=True)
class Case:
    """One pair of layouts between ``ranks`` and the next ``ranks``, on a network."""

    network: str
    ranks: int
    src: str
    dst: str

    def __str__(self) -> str:
        return f"{self.network:10} {self.ranks:5} ranks  {self.src:6} to {self.dst:6}"

    @property
    def goal_seconds(self) -> float | None:
        """The time that planning should take at most; None if no goal is set for this many ranks."""
        return 0.010 if self.ranks <= 64 else 0.5 if self.ranks == 1024 else None

    def inputs(self) -> tuple[TensorSpec, Topology]:
        """A tensor without cached values, and its topology."""
        devices = 8 if self.network == ONE_NIC else MACHINES[self.network].devices
        grid, count = (self.ranks // devices, devices), 2 * self.ranks
        src, dst = Layout(Mesh.of(grid), self.src), Layout(Mesh.of(grid, first_rank=self.ranks), self.dst)
        if self.network == ONE_NIC:
            topology = Topology.uniform([rank // devices for rank in range(count)])
        else:
            topology = load_preset(self.network, count)
        return TensorSpec(SHAPE, "bfloat16", src, dst), topology

    def time(self, repeats: int) -> tuple[float, Plan]:
        """Median seconds of CPU time to plan, and the plan."""
        taken = []
        for _ in range(repeats):
            spec, topology = self.inputs()
            gc.collect()
            begun = time.process_time()
            plan = plan_tensors([spec], topology=topology)
            taken.append(time.process_time() - begun)
        return statistics.median(taken), plan


def cases(ranks: list[int], networks: list[str]) -> Iterator[Case]:
    """All cases of these numbers of ranks and networks."""
    for count in ranks:
        for network in networks:
            yield from (Case(network, count, src, dst) for src, dst in PAIRS)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024], help="ranks of each side (64 1024)")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS, help="networks (all)")
    add_number(parser, "--repeats", 7, "repetitions, of which the median counts")
    parser.add_argument("--hashes", type=Path, help="append strategy and hash of each plan to this file")


def run(options: argparse.Namespace) -> int:
    """Print the time to plan each case; returns 1 if one takes longer than its goal."""
    todo = list(cases(options.ranks, options.networks))
    Case(NETWORKS[0], 16, *PAIRS[0]).time(1)  # loads modules
    missed = 0
    for case in track(todo, "cases"):
        seconds, plan = case.time(options.repeats)
        print_line(f"{case} {1e3 * seconds:9.2f} ms  {plan.num_messages:9,} messages  {plan.strategy}")
        if options.hashes:
            with options.hashes.open("a") as file:
                file.write(f"{case} {plan.strategy} {plan.plan_hash}\n")
        missed += case.goal_seconds is not None and seconds > case.goal_seconds
        del plan
    print(f"{missed} of {len(todo)} cases take longer than their goal")
    return int(bool(missed))
