"""Time a transfer that overlaps a torch computation: ``python -m microbench.transfers.overlap``.

The transfer runs between two emulated hosts with one device each. Meanwhile sender and receiver multiply matrices. The
number of multiplications is chosen so that they take as long as the transfer alone. The combined run calls
``mover.start`` before the computation and ``handle.wait`` after it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import reshard
from microbench.emulation.cluster import Cluster, ClusterError
from microbench.harness.suite import describe_machine, stderr
from microbench.harness.worker import Stopwatch
from reshard.cli.progress import track
from reshard.topology import Topology, topology_from_json

SIDE = 256


def measure(rank: int, report: Callable[[Any], None], mib: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each repetition on this rank, for the transfer alone, the computation alone, and both together."""
    src = reshard.Layout(reshard.Mesh.of(1))
    dst = reshard.Layout(reshard.Mesh.of(1, first_rank=1))
    rows = mib * 2**20 // 4096
    tensor = torch.rand(rows, 1024) if rank == 0 else None
    out = torch.zeros(rows, 1024) if rank == 1 else None
    plan = reshard.make_plan(src, dst, (rows, 1024), "float32", topology=Topology((0, 1)))
    stopwatch = Stopwatch()
    a, b = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    seconds: dict[str, list[float]] = {"transfer": [], "computation": [], "both": []}
    with reshard.Mover(plan) as mover:

        def compute(times: int) -> None:
            for _ in range(times):
                torch.mm(a, b)

        def timed(work: Callable[[], object]) -> float:
            stopwatch.start()
            work()
            return stopwatch.stop().seconds

        def both(times: int) -> None:
            handle = mover.start(tensor, out=out)
            compute(times)
            handle.wait()

        mover(tensor, out=out)
        alone = min(timed(lambda: mover(tensor, out=out)) for _ in range(3))
        once = min(timed(lambda: compute(200)) for _ in range(3)) / 200
        agreed = torch.tensor([alone, once], dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        times = round(float(agreed[0]) / float(agreed[1]))
        for _ in track(range(repeats), "turns", show=rank == 0):
            seconds["transfer"].append(timed(lambda: mover(tensor, out=out)))
            seconds["computation"].append(timed(lambda: compute(times)))
            seconds["both"].append(timed(lambda: both(times)))
    return seconds


def main() -> int:
    """Print the three times, and the ratio of the combined time to the longer of the other two."""
    parser = argparse.ArgumentParser(
        prog="python -m microbench.transfers.overlap",
        description=__doc__,
        epilog="example: python -m microbench.transfers.overlap --mib 256 --rate '2 Gbit/s'",
    )
    parser.add_argument("--mib", type=int, default=64, help="MiB to move (64)")
    parser.add_argument("--rate", default="1 Gbit/s", help="rate of the link between the hosts (1 Gbit/s)")
    parser.add_argument("--repeats", type=int, default=7, help="repetitions of each measurement (7)")
    options = parser.parse_args()
    if not 1 <= options.mib <= 4096 or not 1 <= options.repeats <= 1000:
        parser.error("--mib must be 1 to 4096, --repeats 1 to 1000")
    try:
        topology = topology_from_json({"hosts": [{"count": 2, "devices": 1, "nics": [options.rate]}]})
        with Cluster(topology) as cluster:
            results = cluster.run(measure, options.mib, options.repeats, timeout_seconds=600.0)
    except (ClusterError, reshard.ReshardError) as error:
        stderr(f"overlap: {error}")
        return 2
    run = describe_machine([])
    print(f"{options.mib} MiB over {options.rate}, {run['machine']}, torch {torch.__version__}, {run['date']}")
    medians = {}
    for name in results[0]:
        turns = [max(times) for times in zip(*(result[name] for result in results), strict=True)]
        medians[name] = statistics.median(turns)
        print(f"{name:12} {medians[name]:.4f} s ({min(turns):.4f}..{max(turns):.4f})")
    ratio = medians["both"] / max(medians["transfer"], medians["computation"])
    print(f"both / max(transfer, computation): {ratio:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
