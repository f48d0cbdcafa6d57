"""Time ``compression="auto"`` beside raw at several link rates: ``python -m microbench.transfers.auto_compression``.

Four hosts with two ranks each move a tensor of fp32 from two hosts to the other two. ``auto`` chooses among the codecs
by the rates that the ranks measure. ``auto, slowed`` gets the same rates divided by 100, so it should send raw. Raw
runs twice: the second shows how far two equal contenders differ. All contenders of a case run in turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import reshard
from microbench.emulation.cluster import Cluster, ClusterError
from microbench.harness.suite import describe_machine, stderr
from microbench.harness.worker import Stopwatch
from microbench.transfers.compression import CASES, COLUMNS, case_layouts, cut_shard, payload_topology
from reshard.cli.progress import track
from reshard.topology import Topology, topology_from_json

RATES = ("0.1 Gbit/s", "0.3 Gbit/s", "1 Gbit/s", "3 Gbit/s", "10 Gbit/s")
CODECS = ("int8x128", "int4x128")
#: Admits both codecs.
MAX_ERROR = 0.2
SLOWED = 100
CONTENDERS = ("raw", "raw again", "auto", "auto, slowed")
#: ``auto`` may take this many times the time of raw, beyond the difference between the two raw contenders.
LIMIT = 1.03

Times = dict[str, list[float]]


def measure(
    rank: int, report: Callable[[Any], None], topology: Topology, mib: int, repeats: int
) -> list[tuple[Times, dict[str, str]]]:
    """By case: the seconds of each turn on this rank, and the codec of each contender."""
    stopwatch, results = Stopwatch(), []
    rates = reshard.find_topology(codecs=list(CODECS)).codec_rates
    slow = tuple(
        replace(
            rate,
            encode_bytes_per_second=rate.encode_bytes_per_second / SLOWED,
            decode_bytes_per_second=rate.decode_bytes_per_second / SLOWED,
        )
        for rate in rates
    )
    measured, slowed = (replace(topology, codec_rates=each) for each in (rates, slow))
    for case in track(range(len(CASES)), "cases", show=rank == 0):
        src, dst, shape = case_layouts(case, mib)
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        plans = {}
        for name in CONTENDERS:
            coded = name.startswith("auto")
            plans[name] = reshard.make_plan(
                src,
                dst,
                shape,
                "float32",
                topology=slowed if name == "auto, slowed" else measured,
                compression="auto" if coded else None,
                max_error=MAX_ERROR if coded else None,
            )
        codecs = {name: codec.name if (codec := plan.tensors[0].codec) else "raw" for name, plan in plans.items()}
        movers = {name: reshard.Mover(plan) for name, plan in plans.items()}
        source, out = cut_shard(src, rank, whole), next(iter(movers.values())).empty_out()
        seconds: Times = {name: [] for name in movers}
        for turn in range(repeats + 1):
            for name, mover in movers.items():
                stopwatch.start()
                mover(source, out=out)
                took = stopwatch.stop().seconds
                if turn:
                    seconds[name].append(took)
        for mover in movers.values():
            mover.close()
        results.append((seconds, codecs))
    return results


def main() -> int:
    """Print a row per rate and case; returns 1 if ``auto`` is slower than raw by more than the limit."""
    parser = argparse.ArgumentParser(
        prog="python -m microbench.transfers.auto_compression",
        description=__doc__,
        epilog="example: python -m microbench.transfers.auto_compression --rate '0.4 Gbit/s'",
    )
    parser.add_argument("--mib", type=int, default=16, help="MiB of the tensor (16)")
    parser.add_argument("--rate", action="append", help=f"rate of each host's link ({', '.join(RATES)})")
    parser.add_argument("--repeats", type=int, default=7, help="timed turns of each contender (7)")
    options = parser.parse_args()
    if not 1 <= options.mib <= 4096 or not 1 <= options.repeats <= 1000:
        parser.error("--mib must be 1 to 4096, --repeats 1 to 1000")
    run = describe_machine([])
    print(f"{options.mib} MiB, {COLUMNS} columns, 4 hosts x 2 ranks, {run['machine']}, {run['date']}")
    missed = 0
    for rate in options.rate or RATES:
        try:
            topology = topology_from_json({"hosts": [{"count": 4, "devices": 2, "nics": [rate]}]})
            with Cluster(topology) as cluster:
                ranks = cluster.run(
                    measure, payload_topology(topology), options.mib, options.repeats, timeout_seconds=900.0
                )
        except (ClusterError, reshard.ReshardError) as error:
            stderr(f"auto_compression: {error}")
            return 2
        missed += _print_rate(rate, ranks)
    print(f"{missed} rows are slower than {LIMIT} times raw, beyond the difference of raw to raw")
    return int(bool(missed))


def _print_rate(rate: str, ranks: list[list[tuple[Times, dict[str, str]]]]) -> int:
    missed = 0
    for number, (case, *_) in enumerate(CASES):
        codecs = ranks[0][number][1]
        medians = {}
        for name in CONTENDERS:
            turns = [max(times) for times in zip(*(results[number][0][name] for results in ranks), strict=True)]
            medians[name] = statistics.median(turns)
        raw = min(medians["raw"], medians["raw again"])
        spread = max(medians["raw"], medians["raw again"]) / raw
        cells = [f"{rate:11} {case:16} raw {raw:.4f} s, again {spread:.3f}x"]
        for name in ("auto", "auto, slowed"):
            ratio = medians[name] / raw
            missed += ratio > LIMIT * spread
            cells.append(f"{name} ({codecs[name]}) {ratio:.3f}x")
        print("  ".join(cells), flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
