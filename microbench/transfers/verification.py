"""Measure the cost of ``verify=True``: ``python -m microbench.transfers.verification``.

It runs on emulated links and over loopback. A Mover with and a Mover without verification take turns to run the same
transfers between two meshes. Each mesh has four devices on two hosts. A turn ends when the last rank has its shard and,
with ``verify=True``, has checked it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

import reshard
from microbench.emulation.cluster import Cluster, ClusterError
from microbench.emulation.links import nominal
from microbench.harness.suite import describe_machine, stderr
from microbench.harness.worker import Stopwatch
from reshard import Layout, Mesh
from reshard.cli.progress import track
from reshard.testing.processes import run_processes
from reshard.topology import Topology, topology_from_json

PAIRS = (("S0 R", "R S0"), ("S0 R", "R R"), ("R S1", "S0 R"))
COLUMNS = 1024


def measure(
    rank: int, report: Callable[[Any], None] | None, topology: Topology, mib: int, repeats: int
) -> list[dict[bool, list[float]]]:
    """Time the turns of this rank: for each pair of layouts, ``{verify: seconds of each turn}``."""
    shape = (mib * 2**20 // (4 * COLUMNS), COLUMNS)
    stopwatch, timings = Stopwatch(), []
    for src_spec, dst_spec in PAIRS:
        src, dst = Layout(Mesh.of("2x2"), src_spec), Layout(Mesh.of("2x2", first_rank=4), dst_spec)
        plan = reshard.make_plan(src, dst, shape, "float32", topology=topology)
        local = plan.tensors[0].src_shards.local_shape(rank) if rank in src.ranks else None
        tensor = None if local is None else torch.rand(local)
        movers = {verify: reshard.Mover(plan, verify=verify) for verify in (False, True)}
        outs = {verify: mover(tensor) for verify, mover in movers.items()}  # warm-up
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in track(range(repeats), f"turns of {src_spec} -> {dst_spec}", show=rank == 0):
            for verify in (False, True) if turn % 2 else (True, False):
                stopwatch.start()
                movers[verify](tensor, out=outs[verify])
                seconds[verify].append(stopwatch.stop().seconds)
        for mover in movers.values():
            mover.close()
        timings.append(seconds)
    return timings


def main() -> int:
    """Print a Markdown table: median times without and with verification, and their ratio."""
    parser = argparse.ArgumentParser(
        prog="python -m microbench.transfers.verification",
        description=__doc__,
        epilog="example: python -m microbench.transfers.verification --mib 16 --repeats 5",
    )
    parser.add_argument("--mib", type=int, default=64, help="size of the tensor in MiB (default: 64)")
    parser.add_argument("--rate", default="1 Gbit/s", help="rate of each emulated link (default: 1 Gbit/s)")
    parser.add_argument("--repeats", type=int, default=9, help="timed turns of each Mover (default: 9)")
    options = parser.parse_args()
    if not 1 <= options.mib <= 4096 or not 1 <= options.repeats <= 1000:
        parser.error("--mib must be from 1 to 4096, and --repeats from 1 to 1000")
    run = describe_machine([])
    print(f"{options.mib} MiB, {run['machine']}, torch {torch.__version__}, {run['date']}\n")
    print("| links | layouts | plain, s | verified, s | verified / plain |\n|---|---|---|---|---|")
    for links in (options.rate, "loopback"):
        try:
            topology = topology_from_json({"hosts": [{"count": 4, "devices": 2, "nics": [options.rate]}]})
            arguments = nominal(topology), options.mib, options.repeats
            if links == "loopback":
                results = run_processes(measure, 8, None, *arguments, timeout_seconds=600.0)
            else:
                with Cluster(topology) as cluster:
                    results = cluster.run(measure, *arguments, timeout_seconds=600.0)
        except (ClusterError, reshard.ReshardError) as error:
            stderr(f"verification: {error}")
            return 2
        for number, pair in enumerate(PAIRS):
            medians = {}
            for verify in (False, True):
                turns = zip(*(result[number][verify] for result in results), strict=True)
                medians[verify] = statistics.median(max(seconds_of_ranks) for seconds_of_ranks in turns)
            print(
                f"| {links} | {' -> '.join(pair)} | {medians[False]:.4f} | {medians[True]:.4f} "
                f"| {medians[True] / medians[False]:.3f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
