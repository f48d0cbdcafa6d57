"""Time to plan pairs of layouts with the default strategy.

16384 x 16384 bfloat16 moves to the next ranks, on three topologies. Times are CPU times of one warm process. The
goals are 10 ms up to 64 ranks a side and 0.5 s for 1,024; the exit status is 1 if a pair takes longer.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import time
from pathlib import Path

from microbench.harness.case_options import add_number
from reshard.cli.progress_bars import print_line, track
from reshard.plan import Plan
from reshard.planner import plan_tensors
from reshard.sharding import Layout, Mesh, TensorSpec
from reshard.topology import MACHINES, Topology, load_preset

SHAPE, DEVICES = (16384, 16384), 8
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
#: Presets of topologies, by name; "" is one NIC of 10 Gbit/s for each host of eight ranks.
NETWORKS = {"dgx_h100": "dgx_h100", "one NIC": "", "p3.8xlarge": "p3.8xlarge"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024], help="ranks of each side (64 1024)")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS, help="networks (all)")
    add_number(parser, "--repeats", 7, "repetitions, of which the median counts")
    parser.add_argument("--hashes", type=Path, help="append strategy and hash of each plan to this file")


def goal_seconds(ranks: int) -> float:
    """The time that planning for this many ranks a side should take at most; infinity if no goal is set."""
    return 0.010 if ranks <= 64 else 0.5 if ranks == 1024 else math.inf


def time_planning(ranks: int, src: str, dst: str, preset: str, repeats: int) -> tuple[float, Plan]:
    """Median seconds of CPU time to plan, and the plan. Nothing is cached between repetitions."""
    devices = MACHINES[preset].devices if preset else DEVICES
    meshes = (Mesh.of((ranks // devices, devices), first_rank=first) for first in (0, ranks))
    src_layout, dst_layout = (Layout(mesh, spec) for mesh, spec in zip(meshes, (src, dst), strict=True))
    taken = []
    for _ in range(repeats):
        topology = (
            load_preset(preset, 2 * ranks) if preset else Topology.uniform([r // devices for r in range(2 * ranks)])
        )
        tensor = TensorSpec(SHAPE, "bfloat16", src_layout, dst_layout)
        gc.collect()
        begun = time.process_time()
        plan = plan_tensors([tensor], topology=topology)
        taken.append(time.process_time() - begun)
    return statistics.median(taken), plan


def run(options: argparse.Namespace) -> int:
    """Print the time to plan each case; returns 1 if one takes longer than its goal."""
    todo = list(itertools.product(options.ranks, options.networks, PAIRS))
    missed = 0
    time_planning(16, *PAIRS[0], "", 1)  # loads modules
    for ranks, network, (src, dst) in track(todo, "cases"):
        seconds, plan = time_planning(ranks, src, dst, NETWORKS[network], options.repeats)
        title = f"{network:10} {ranks:5} ranks  {src:6} to {dst:6}"
        print_line(f"{title} {1e3 * seconds:9.2f} ms  {plan.num_messages:9,} messages  {plan.strategy}")
        if options.hashes:
            with options.hashes.open("a") as file:
                file.write(f"{title} {plan.strategy} {plan.plan_hash}\n")
        missed += seconds > goal_seconds(ranks)
        del plan
    print(f"{missed} of {len(todo)} cases take longer than their goal")
    return int(bool(missed))
