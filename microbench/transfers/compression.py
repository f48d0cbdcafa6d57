"""Time coded transfers beside raw ones on emulated hosts: ``python -m microbench.transfers.compression``.

Four hosts with two ranks each move 64 MiB of fp32 from two hosts to the other two. The contenders of a case run in
turns. Every receiver checks that it holds, bit for bit, what the codec makes of the values. A row prints the median
time, the speed-up over raw, and the ratios of the time to the lower bound of the coded bytes and to the prediction. The
prediction counts coding at the rates of the slowest rank, all ranks measuring at once.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

import reshard
from microbench.emulation.cluster import Cluster, ClusterError
from microbench.emulation.links import PAYLOAD_SHARE
from microbench.harness.suite import describe_machine, stderr
from microbench.harness.worker import Stopwatch
from reshard.cli.progress import track
from reshard.codecs import parse_codec
from reshard.cost import find_bound
from reshard.plan import Plan
from reshard.planner import predict
from reshard.sharding import cut_shards
from reshard.topology import CodecRate, Topology, topology_from_json

#: Name, then mesh and spec of the source and of the destination.
CASES = (
    ("rows to columns", "4", "S0 R", "4", "R S0"),
    ("gather", "4", "S0 R", "4", "R R"),
    ("replicas", "2x2", "R S1", "2x2", "S0 R"),
)
COLUMNS = 4096


def case_layouts(number: int, mib: int) -> tuple[reshard.Layout, reshard.Layout, tuple[int, int]]:
    """Source, destination and shape of a case: ranks 0 to 3 send, ranks 4 to 7 receive."""
    _, src_mesh, src_spec, dst_mesh, dst_spec = CASES[number]
    src = reshard.Layout(reshard.Mesh.of(src_mesh), src_spec)
    dst = reshard.Layout(reshard.Mesh.of(dst_mesh, first_rank=4), dst_spec)
    return src, dst, (mib * 2**20 // 4 // COLUMNS, COLUMNS)


def payload_topology(topology: Topology) -> Topology:
    """The emulated links at the rates that their payload reaches."""
    rate = topology.hosts[0].nics[0].egress_bytes_per_second * PAYLOAD_SHARE
    return reshard.Topology.uniform(topology.host_of_rank, rate)


def _plans(mib: int, codecs: tuple[str, ...], topology: Topology) -> list[dict[str, Plan]]:
    options = {"raw": None, **{name: name for name in codecs}}
    plans = []
    for number in range(len(CASES)):
        src, dst, shape = case_layouts(number, mib)
        plans.append(
            {
                name: reshard.make_plan(src, dst, shape, "float32", topology=topology, compression=codec)
                for name, codec in options.items()
            }
        )
    return plans


def cut_shard(layout: Any, rank: int, whole: torch.Tensor) -> torch.Tensor | None:
    """A rank's shard of a whole tensor; the layouts here give each rank one box."""
    if rank not in layout.ranks:
        return None
    ((box, _),) = cut_shards(layout, tuple(whole.shape)).boxes_of(rank)
    return whole[tuple(slice(lo, hi) for lo, hi in box)].contiguous()


def measure(
    rank: int, report: Callable[[Any], None], plans: list[dict[str, Plan]], repeats: int
) -> tuple[list[dict[str, list[float]]], tuple[CodecRate, ...]]:
    """Seconds of each turn on this rank, by case and contender; and the rates of the codecs on the slowest rank."""
    stopwatch, results = Stopwatch(), []
    rates = reshard.find_topology(codecs=[name for name in plans[0] if name != "raw"]).codec_rates
    for case in track(plans, "cases", show=rank == 0):
        spec = case["raw"].tensors[0]
        whole = torch.randn(spec.shape, generator=torch.Generator().manual_seed(0))
        source, seconds = cut_shard(spec.src, rank, whole), {name: [] for name in case}  # type: ignore[var-annotated]
        movers = {name: reshard.Mover(plan) for name, plan in case.items()}
        out = next(iter(movers.values())).empty_out()
        for turn in range(repeats + 1):
            for name, mover in movers.items():
                stopwatch.start()
                mover(source, out=out)
                took = stopwatch.stop().seconds
                if turn:
                    seconds[name].append(took)
                elif out is not None:
                    wanted = whole if name == "raw" else _round_trip(whole, name)
                    assert torch.equal(out, cut_shard(spec.dst, rank, wanted)), name  # type: ignore[arg-type]
        for mover in movers.values():
            mover.close()
        results.append(seconds)
    return results, rates


def _round_trip(whole: torch.Tensor, name: str) -> torch.Tensor:
    codec = parse_codec(name)
    coded, decoded = torch.empty(codec.nbytes(whole.shape), dtype=torch.uint8), torch.empty_like(whole)
    codec.encode(whole, coded)
    codec.decode(coded, decoded)
    return decoded


def main() -> int:
    """Print a row per rate, case and contender, and geometric means per rate and codec."""
    parser = argparse.ArgumentParser(
        prog="python -m microbench.transfers.compression",
        description=__doc__,
        epilog="example: python -m microbench.transfers.compression --rate '0.4 Gbit/s' --rate '1 Gbit/s'",
    )
    parser.add_argument("--mib", type=int, default=64, help="MiB of the tensor (64)")
    parser.add_argument("--rate", action="append", help="rate of each host's link (0.4 and 1 Gbit/s); may be repeated")
    parser.add_argument("--codec", action="append", help="codec (int8x128 and int4x128); may be repeated")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of each contender (5)")
    options = parser.parse_args()
    if not 1 <= options.mib <= 4096 or not 1 <= options.repeats <= 1000:
        parser.error("--mib must be 1 to 4096, --repeats 1 to 1000")
    codecs = tuple(options.codec or ("int8x128", "int4x128"))
    run = describe_machine([])
    print(f"{options.mib} MiB, 4 hosts x 2 ranks, {run['machine']}, torch {torch.__version__}, {run['date']}")
    for rate in options.rate or ["0.4 Gbit/s", "1 Gbit/s"]:
        try:
            topology = topology_from_json({"hosts": [{"count": 4, "devices": 2, "nics": [rate]}]})
            plans = _plans(options.mib, codecs, payload_topology(topology))
            with Cluster(topology) as cluster:
                results = cluster.run(measure, plans, options.repeats, timeout_seconds=900.0)
        except (ClusterError, reshard.ReshardError) as error:
            stderr(f"compression: {error}")
            return 2
        _print_rate(rate, plans, [seconds for seconds, _ in results], results[0][1])
    return 0


def _print_rate(
    rate: str,
    plans: list[dict[str, Plan]],
    results: list[list[dict[str, list[float]]]],
    codec_rates: tuple[CodecRate, ...],
) -> None:
    rate_of = {each.codec: each for each in codec_rates}
    ratios: dict[str, list[tuple[float, float, float]]] = {}
    for number, (case, *_) in enumerate(CASES):
        raw = 0.0
        for name, plan in plans[number].items():
            turns = [max(times) for times in zip(*(ranks[number][name] for ranks in results), strict=True)]
            seconds, bound = statistics.median(turns), find_bound(plan).seconds
            raw = seconds if name == "raw" else raw
            predicted = predict(plan, rate_of.get(name)).seconds
            ratios.setdefault(name, []).append((raw / seconds, seconds / bound, seconds / predicted))
            print(
                f"{rate:11} {case:16} {name:9} {seconds:.4f} s ({min(turns):.4f}..{max(turns):.4f})  "
                f"{raw / seconds:5.2f}x raw  {seconds / bound:.3f} of bound  {seconds / predicted:.3f} of prediction"
            )
    for name, pairs in ratios.items():
        columns = zip(*pairs, strict=True)
        speed, over, off = (math.exp(statistics.fmean(map(math.log, column))) for column in columns)
        print(
            f"{rate:11} {'geometric mean':16} {name:9} {speed:.2f}x raw, {over:.3f} of bound, {off:.3f} of prediction"
        )


if __name__ == "__main__":
    sys.exit(main())
