"""Time weights sent as differences and sent whole, on emulated hosts: ``python -m microbench.transfers.weight_sync``.

Four trainer ranks on two hosts each hold a quarter of 64 MiB of bf16 weights. Four replicas on two other hosts each
need all weights. Between versions, a share of the weights changes by one or two units in the last place. A
:class:`reshard.Mover` sends the whole weights ("raw"). A :class:`reshard.compression.WeightSync`, and
:func:`reshard.reshard` with ``compression="delta"``, send the differences; with ``"bf16-lossless"`` it sends the whole
weights without loss. Every replica compares each result with the trainers' weights bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

import reshard
from microbench.emulation.cluster import Cluster, ClusterError
from microbench.harness.suite import describe_machine, stderr
from microbench.harness.worker import Stopwatch
from reshard.cli.progress import print_line, track
from reshard.compression import WeightSync
from reshard.topology import Topology, topology_from_json

COLUMNS = 4096
#: Methods in the order in which each version is sent, and their labels.
LABELS = {"raw": "raw", "sync": "WeightSync", "delta": 'compression="delta"', "bf16-lossless": '="bf16-lossless"'}


def measure(
    rank: int, report: Callable[[Any], None], mib: int, share: float, repeats: int, topology: Topology
) -> dict[str, list[float]]:
    """Measure all methods on this rank, once per version.

    Args:
        mib: size of the weights in MiB. share: fraction of the weights that change. repeats: number of timed versions.

    Returns:
        One value per version: seconds of each method; ``"ratio"``, plain bytes over the bytes of the differences.
    """
    src = reshard.Layout(reshard.Mesh.of(4), "S0")
    dst = reshard.Layout(reshard.Mesh.of(4, first_rank=4))
    shape = (mib * 2**20 // 2 // COLUMNS, COLUMNS)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator).to(torch.bfloat16)
    rows = slice(rank * shape[0] // 4, (rank + 1) * shape[0] // 4)
    outs = {name: torch.zeros(shape, dtype=torch.bfloat16) if rank >= 4 else None for name in LABELS}
    plan = reshard.make_plan(src, dst, shape, "bfloat16", topology=topology)
    sync = WeightSync(src, dst, {"w": shape}, "bfloat16", topology=topology)
    call = functools.partial(reshard.reshard, shape=shape, dtype="bfloat16", topology=topology)
    stopwatch = Stopwatch()
    seconds: dict[str, list[float]] = {name: [] for name in (*LABELS, "ratio")}
    old = None
    with reshard.Mover(plan) as mover:
        for version in range(repeats + 2):
            words, changed = whole.view(torch.int16), torch.rand(shape, generator=generator) < share
            words += changed.short() * torch.randint(1, 3, shape, generator=generator).short()
            shard = whole[rows].clone() if rank < 4 else None
            took = {}
            for name, out in outs.items():
                stopwatch.start()
                if name == "raw":
                    mover(shard, out=out)
                elif name == "sync":
                    named = [None if each is None else {"w": each} for each in (shard, out)]
                    result = sync(*named, version=version)
                else:
                    call(shard, src, dst, compression=name, out=out, base=old if name == "delta" else None)
                took[name] = stopwatch.stop().seconds
                assert out is None or torch.equal(out.view(torch.int16), words)
            old = shard
            if version > 1:  # version 0 is sent in full, and version 1 allocates buffers
                assert result.base == version - 1
                took["ratio"] = result.plain_bytes / result.encoded_bytes
                for name, value in took.items():
                    seconds[name].append(value)
    return seconds


def main() -> int:
    """Measure at each link rate, and print a row for each method. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m microbench.transfers.weight_sync",
        description=__doc__,
        epilog="example: python -m microbench.transfers.weight_sync --share 0.04",
    )
    parser.add_argument("--mib", type=int, default=64, help="MiB of weights (64)")
    parser.add_argument("--share", type=float, default=0.01, help="share of the weights that change (0.01)")
    parser.add_argument("--rate", action="append", help="rate of each host's link (0.4 and 1 Gbit/s); may be repeated")
    parser.add_argument("--repeats", type=int, default=7, help="timed turns (7)")
    options = parser.parse_args()
    if not 1 <= options.mib <= 1024 or not 1 <= options.repeats <= 1000 or not 0 <= options.share <= 1:
        parser.error("--mib must be 1 to 1024, --repeats 1 to 1000, --share 0 to 1")
    run = describe_machine([])
    print_line(f"{options.mib} MiB of bf16, {options.share:.1%} changed, {run['machine']}, {run['date']}")
    for rate in track(options.rate or ["0.4 Gbit/s", "1 Gbit/s"], "rates"):
        try:
            topology = topology_from_json({"hosts": [{"count": 4, "devices": 2, "nics": [rate]}]})
            with Cluster(topology) as cluster:
                arguments = options.mib, options.share, options.repeats, topology
                results = cluster.run(measure, *arguments, timeout_seconds=900.0)
        except (ClusterError, reshard.ReshardError) as error:
            stderr(f"weight_sync: {error}")
            return 2
        turns = {
            name: [max(times) for times in zip(*(one[name] for one in results), strict=True)] for name in results[0]
        }
        raw, ratio = statistics.median(turns["raw"]), statistics.median(turns["ratio"])
        for name, label in LABELS.items():
            median = statistics.median(turns[name])
            print_line(
                f"{rate:11} {label:21} {median:.4f} s ({min(turns[name]):.4f}..{max(turns[name]):.4f})  "
                f"{raw / median:5.1f}x raw"
            )
        print_line(f"{rate:11} the differences are 1/{ratio:.0f} of the weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
