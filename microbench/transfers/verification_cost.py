"""The cost of ``verify=True``, on emulated links and over loopback.

A Mover with and a Mover without verification take turns to run the same transfers between two meshes. Each mesh has
four devices on two hosts. A turn ends when the last rank has its shard and, with ``verify=True``, has checked it.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch

import reshard
from microbench.emulation.link_commands import nominal
from microbench.harness.case_options import add_number
from microbench.harness.turns import Times, equal_hosts, medians_of, run_on_hosts, slowest, time_in_turns
from reshard import Layout, Mesh
from reshard.testing.processes import run_processes
from reshard.topology import Topology

PAIRS = (("S0 R", "R S0"), ("S0 R", "R R"), ("R S1", "S0 R"))
COLUMNS = 1024


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--mib", 64, "MiB of the tensor", high=4096)
    parser.add_argument("--rate", default="1 Gbit/s", help="rate of each emulated link (1 Gbit/s)")
    add_number(parser, "--repeats", 9, "timed turns of each Mover")


def measure(rank: int, report: Callable[[Any], None] | None, topology: Topology, mib: int, repeats: int) -> list[Times]:
    """Seconds of each turn on this rank, for each pair of layouts."""
    shape = (mib * 2**20 // (4 * COLUMNS), COLUMNS)
    timings = []
    for src_spec, dst_spec in PAIRS:
        src, dst = Layout(Mesh.of("2x2"), src_spec), Layout(Mesh.of("2x2", first_rank=4), dst_spec)
        plan = reshard.make_plan(src, dst, shape, "float32", topology=topology)
        local = plan.tensors[0].src_tiles.local_shape(rank) if rank in src.ranks else None
        tensor = None if local is None else torch.rand(local)
        with reshard.Mover(plan) as plain, reshard.Mover(plan, verify=True) as verified:
            out = plain.empty_out()
            movers = {"plain": plain, "verified": verified}
            methods = {name: functools.partial(mover, tensor, out=out) for name, mover in movers.items()}
            timings.append(time_in_turns(methods, repeats, show=rank == 0, label=f"turns of {src_spec} -> {dst_spec}"))
    return timings


def run(options: argparse.Namespace) -> None:
    """Print a Markdown table: median times without and with verification, and their ratio."""
    print("| links | layouts | plain, s | verified, s | verified / plain |\n|---|---|---|---|---|")
    topology = equal_hosts(options.rate)
    arguments = nominal(topology), options.mib, options.repeats
    for links in (options.rate, "loopback"):
        if links == "loopback":
            results = run_processes(measure, 8, None, *arguments, timeout_seconds=600.0)
        else:
            results = run_on_hosts(topology, measure, *arguments)
        for pair, ranks in zip(PAIRS, zip(*results, strict=True), strict=True):
            median = medians_of(slowest(ranks))
            ratio = median["verified"] / median["plain"]
            cells = f"{median['plain']:.4f} | {median['verified']:.4f} | {ratio:.3f}"
            print(f"| {links} | {' -> '.join(pair)} | {cells} |", flush=True)
