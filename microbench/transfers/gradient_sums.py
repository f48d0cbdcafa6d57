"""Time sums of gradients on emulated hosts: ``python -m microbench.transfers.gradient_sums``.

Four hosts with two ranks each average 16 MiB of fp32 gradients. The contenders run in turns: Gloo's all-reduce in fp32
and in bf16, and :class:`reshard.compression.GradientSum` without a codec and with several. A row prints the median
time, the speed-up over Gloo's fp32, the ratio to the lower bound (``2 (H - 1) / H`` of the coded bytes pass each host's
link), and the relative error. The bits of all ranks are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from microbench.emulation.cluster import Cluster, ClusterError
from microbench.emulation.links import PAYLOAD_SHARE
from microbench.harness.suite import describe_machine, stderr
from microbench.harness.worker import Stopwatch
from reshard.cli.progress import track
from reshard.codecs import parse_codec
from reshard.compression import GradientSum
from reshard.errors import ReshardError
from reshard.topology import topology_from_json

HOSTS, RANKS_PER_HOST = 4, 2
GLOO = {"Gloo fp32": torch.float32, "Gloo bf16": torch.bfloat16}
OURS = {"by hosts, raw": None, "int8x128": "int8x128", "int4x128": "int4x128", "int4x128-bf16": "int4x128-bf16"}


def measure(
    rank: int, report: Callable[[Any], None], mib: int, repeats: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each turn on this rank, and the relative error of each contender."""
    numel, world = mib * 2**20 // 4, dist.get_world_size()
    hosts = [other // RANKS_PER_HOST for other in range(world)]
    own, wanted = torch.zeros(0), torch.zeros(numel)
    for other in range(world):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(other))
        wanted += gradient / world
        own = gradient if other == rank else own
    sums = {name: GradientSum(codec, host_of_rank=hosts) for name, codec in OURS.items()}
    buffers = {name: torch.empty(numel, dtype=GLOO.get(name, torch.float32)) for name in (*GLOO, *OURS)}
    stopwatch = Stopwatch()
    seconds: dict[str, list[float]] = {name: [] for name in buffers}
    errors = {}
    for turn in track(range(repeats + 1), "turns", show=rank == 0):
        for name, buffer in buffers.items():
            buffer.copy_(own)
            stopwatch.start()
            if name in sums:
                sums[name]({"gradients": buffer})
            else:
                dist.all_reduce(buffer)
                buffer.div_(world)
            took = stopwatch.stop().seconds
            if turn:
                seconds[name].append(took)
                continue
            errors[name] = float((buffer.float() - wanted).norm() / wanted.norm())
            first = buffer.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, buffer), f"{name}: rank {rank} has other bits than rank 0"
    return seconds, errors


def main() -> int:
    """Print a row per contender."""
    parser = argparse.ArgumentParser(
        prog="python -m microbench.transfers.gradient_sums",
        description=__doc__,
        epilog="example: python -m microbench.transfers.gradient_sums --rate '1 Gbit/s'",
    )
    parser.add_argument("--mib", type=int, default=16, help="MiB of gradients per rank (16)")
    parser.add_argument("--rate", default="0.4 Gbit/s", help="rate of each host's link (0.4 Gbit/s)")
    parser.add_argument("--repeats", type=int, default=7, help="timed turns of each contender (7)")
    options = parser.parse_args()
    if not 1 <= options.mib <= 1024 or not 1 <= options.repeats <= 1000:
        parser.error("--mib must be 1 to 1024, --repeats 1 to 1000")
    try:
        topology = topology_from_json({"hosts": [{"count": HOSTS, "devices": RANKS_PER_HOST, "nics": [options.rate]}]})
        with Cluster(topology) as cluster:
            results = cluster.run(measure, options.mib, options.repeats, timeout_seconds=900.0)
    except (ClusterError, ReshardError) as error:
        stderr(f"gradient_sums: {error}")
        return 2
    run = describe_machine([])
    print(
        f"{options.mib} MiB, {HOSTS} hosts x {RANKS_PER_HOST} ranks at {options.rate}, {run['machine']}, {run['date']}"
    )
    rate = topology.hosts[0].nics[0].egress_bytes_per_second * PAYLOAD_SHARE
    base = 0.0
    for name in results[0][0]:
        turns = [max(times) for times in zip(*(seconds[name] for seconds, _ in results), strict=True)]
        median = statistics.median(turns)
        base = base or median
        values, nbytes = (
            parse_codec(OURS[name]).element if OURS.get(name) else (1, GLOO.get(name, torch.float32).itemsize)
        )
        bound = 2 * (HOSTS - 1) / HOSTS * options.mib * 2**20 / 4 / values * nbytes / rate
        print(
            f"{name:14} {median:.4f} s ({min(turns):.4f}..{max(turns):.4f})  {base / median:5.2f}x  "
            f"{median / bound:.3f} of bound  error {results[0][1][name]:.2g}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
