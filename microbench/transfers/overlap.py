"""A transfer that overlaps a torch computation, between two emulated hosts with one device each.

Meanwhile sender and receiver multiply matrices. The number of multiplications is chosen so that they take as long as
the transfer alone. The combined turn calls ``mover.start`` before the computation and ``handle.wait`` after it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import reshard
from microbench.harness.options import add_number
from microbench.harness.turns import (
    Times,
    equal_hosts,
    format_seconds,
    medians_of,
    run_on_hosts,
    slowest,
    time_in_turns,
)
from reshard.topology import Topology

SIDE = 256


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--mib", 64, "MiB to move", high=4096)
    parser.add_argument("--rate", default="1 Gbit/s", help="rate of the link between the hosts (1 Gbit/s)")
    add_number(parser, "--repeats", 7, "timed turns of each measurement")


def measure(rank: int, report: Callable[[Any], None], mib: int, repeats: int) -> Times:
    """Seconds of each turn on this rank, for the transfer alone, the computation alone, and both together."""
    shape = (mib * 2**20 // 4096, 1024)
    src, dst = reshard.Layout(reshard.Mesh.of(1)), reshard.Layout(reshard.Mesh.of(1, first_rank=1))
    tensor, out = torch.rand(shape) if rank == 0 else None, torch.zeros(shape) if rank else None
    a, b = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    with reshard.Mover(reshard.make_plan(src, dst, shape, "float32", topology=Topology((0, 1)))) as mover:

        def compute(times: int) -> None:
            for _ in range(times):
                torch.mm(a, b)

        def least(work: Callable[[], object]) -> float:
            seconds = []
            for _ in range(3):
                dist.barrier()
                begun = time.perf_counter()
                work()
                seconds.append(time.perf_counter() - begun)
            return min(seconds)

        def both() -> None:
            handle = mover.start(tensor, out=out)
            compute(times)
            handle.wait()

        mover(tensor, out=out)
        alone = [least(lambda: mover(tensor, out=out)), least(lambda: compute(200)) / 200]
        agreed = torch.tensor(alone, dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        times = round(float(agreed[0]) / float(agreed[1]))
        methods = {"transfer": lambda: mover(tensor, out=out), "computation": lambda: compute(times), "both": both}
        return time_in_turns(methods, repeats, show=rank == 0)


def run(options: argparse.Namespace) -> None:
    """Print the three times, and the ratio of the combined time to the longer of the other two."""
    times = slowest(run_on_hosts(equal_hosts(options.rate, 2, 1), measure, options.mib, options.repeats))
    for name, seconds in times.items():
        print(f"{name:12} {format_seconds(seconds)}")
    median = medians_of(times)
    ratio = median["both"] / max(median["transfer"], median["computation"])
    print(f"both / max(transfer, computation): {ratio:.3f}")
