"""Encoded transfers, compared with raw ones on emulated hosts.

Four hosts with two ranks each move 64 MiB of fp32 from two hosts to the other two. The contenders of a case run in
turns. Every receiver checks that it holds, bit for bit, what the codec makes of the values. A row prints the median
time, the speed-up over raw, and the ratios of the time to the lower bound of the encoded bytes and to the prediction.
The prediction counts coding at the rates of the slowest rank, all ranks measuring at once.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

import reshard
from microbench.emulation.link_commands import PAYLOAD_SHARE
from microbench.harness.case_options import add_number, add_rates
from microbench.harness.turns import (
    Times,
    equal_hosts,
    format_seconds,
    medians_of,
    run_on_hosts,
    slowest,
    time_in_turns,
)
from reshard.cli.progress_bars import track
from reshard.codecs import parse_codec
from reshard.cost import find_bound
from reshard.plan import Plan
from reshard.planner import predict
from reshard.sharding import cut_tiles
from reshard.topology import CodecRate, Topology

#: Name, then mesh and spec of the source and of the destination.
CASES = (
    ("rows to columns", "4", "S0 R", "4", "R S0"),
    ("gather", "4", "S0 R", "4", "R R"),
    ("replicas", "2x2", "R S1", "2x2", "S0 R"),
)
COLUMNS = 4096
RATES = ("0.4 Gbit/s", "1 Gbit/s")
CODECS = ("int8x128", "int4x128")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--mib", 64, "MiB of the tensor", high=4096)
    add_rates(parser, RATES)
    parser.add_argument("--codec", action="append", help=f"codec ({', '.join(CODECS)}); may be repeated")
    add_number(parser, "--repeats", 5, "timed turns of each contender")


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


def time_movers(rank: int, plans: dict[str, Plan], repeats: int, is_checked: bool = True) -> Times:
    """Seconds of each turn of a Mover of each plan on this rank.

    Args:
        is_checked: whether each result is compared with what the codec of that name makes of the values.
    """
    spec = next(iter(plans.values())).tensors[0]
    whole = torch.randn(spec.shape, generator=torch.Generator().manual_seed(0))
    source = _cut_shard(spec.src, rank, whole)
    with contextlib.ExitStack() as stack:
        movers = {name: stack.enter_context(reshard.Mover(plan)) for name, plan in plans.items()}
        out = next(iter(movers.values())).empty_out()

        def check(name: str) -> None:
            if out is not None and is_checked:
                wanted = _cut_shard(spec.dst, rank, whole if name == "raw" else _round_trip(whole, name))
                assert wanted is not None and torch.equal(out, wanted), name

        methods = {name: functools.partial(mover, source, out=out) for name, mover in movers.items()}
        return time_in_turns(methods, repeats, check=check)


def _cut_shard(layout: Any, rank: int, whole: torch.Tensor) -> torch.Tensor | None:
    """A rank's shard of a whole tensor; the layouts here give each rank one box."""
    if rank not in layout.ranks:
        return None
    ((box, _),) = cut_tiles(layout, tuple(whole.shape)).boxes_of(rank)
    return whole[tuple(slice(lo, hi) for lo, hi in box)].contiguous()


def _round_trip(whole: torch.Tensor, name: str) -> torch.Tensor:
    codec = parse_codec(name)
    encoded, decoded = torch.empty(codec.nbytes(whole.shape), dtype=torch.uint8), torch.empty_like(whole)
    codec.encode(whole, encoded)
    codec.decode(encoded, decoded)
    return decoded


def measure(
    rank: int, report: Callable[[Any], None], plans: list[dict[str, Plan]], repeats: int
) -> tuple[list[Times], tuple[CodecRate, ...]]:
    """Seconds of each turn on this rank, by case and contender; and the rates of the codecs on the slowest rank."""
    rates = reshard.find_topology(codecs=[name for name in plans[0] if name != "raw"]).codec_rates
    return [time_movers(rank, case, repeats) for case in track(plans, "cases", show=rank == 0)], rates


def run(options: argparse.Namespace) -> None:
    """Print a row per rate, case and contender, and geometric means per rate and codec."""
    for rate in options.rate or RATES:
        topology = equal_hosts(rate)
        plans = []
        for number in range(len(CASES)):
            src, dst, shape = case_layouts(number, options.mib)
            make = functools.partial(reshard.make_plan, src, dst, shape, "float32", topology=payload_topology(topology))
            codecs = options.codec or CODECS
            plans.append({"raw": make()} | {name: make(compression=name) for name in codecs})
        results = run_on_hosts(topology, measure, plans, options.repeats)
        _print_rate(rate, plans, [times for times, _ in results], results[0][1])


def _print_rate(
    rate: str, plans: list[dict[str, Plan]], results: list[list[Times]], codec_rates: tuple[CodecRate, ...]
) -> None:
    rate_of = {codec_rate.codec: codec_rate for codec_rate in codec_rates}
    ratios: dict[str, list[tuple[float, float, float]]] = {}
    for number, (case, *_) in enumerate(CASES):
        times = slowest([ranks[number] for ranks in results])
        median = medians_of(times)
        for name, plan in plans[number].items():
            bound, predicted = find_bound(plan).seconds, predict(plan, rate_of.get(name)).seconds
            factors = median["raw"] / median[name], median[name] / bound, median[name] / predicted
            ratios.setdefault(name, []).append(factors)
            print(f"{rate:11} {case:16} {name:9} {format_seconds(times[name])}  {_format(factors)}")
    for name, triples in ratios.items():
        mean = [math.exp(statistics.fmean(map(math.log, column))) for column in zip(*triples, strict=True)]
        print(f"{rate:11} {'geometric mean':16} {name:9} {_format(mean)}")


def _format(ratios: Any) -> str:
    speed, over, off = ratios
    return f"{speed:5.2f}x raw  {over:.3f} of bound  {off:.3f} of prediction"
