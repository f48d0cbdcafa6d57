"""Weights sent as differences beside whole ones, on emulated hosts.

Four trainer ranks on two hosts each hold a quarter of 64 MiB of bf16 weights. Four replicas on two other hosts each
need all weights. Between versions, a share of the weights changes by one or two units in the last place. A
:class:`reshard.Mover` sends the whole weights ("raw"). A :class:`reshard.compression.WeightSync`, and
:func:`reshard.reshard` with ``compression="delta"``, send the differences; with ``"bf16-lossless"`` it sends the whole
weights without loss. Every replica compares each result with the trainers' weights bit for bit.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch

import reshard
from microbench.harness.options import add_number, add_rates
from microbench.harness.turns import Times, equal_hosts, format_seconds, medians_of, run_on_hosts, slowest
from microbench.harness.worker import Stopwatch
from reshard.cli.progress import print_line, track
from reshard.compression import WeightSync
from reshard.topology import Topology

COLUMNS = 4096
RATES = ("0.4 Gbit/s", "1 Gbit/s")
#: Methods in the order in which each version is sent, and their labels.
LABELS = {"raw": "raw", "sync": "WeightSync", "delta": 'compression="delta"', "bf16-lossless": '="bf16-lossless"'}


def measure(
    rank: int, report: Callable[[Any], None], mib: int, share: float, repeats: int, topology: Topology
) -> Times:
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
                    named = [None if item is None else {"w": item} for item in (shard, out)]
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


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--mib", 64, "MiB of weights", high=1024)
    add_number(parser, "--share", 0.01, "share of the weights that change", low=0, high=1)
    add_rates(parser, RATES)
    add_number(parser, "--repeats", 7, "timed turns")


def run(options: argparse.Namespace) -> None:
    """Measure at each link rate, and print a row for each method."""
    for rate in track(options.rate or RATES, "rates"):
        topology = equal_hosts(rate)
        times = slowest(run_on_hosts(topology, measure, options.mib, options.share, options.repeats, topology))
        median = medians_of(times)
        for name, label in LABELS.items():
            print_line(f"{rate:11} {label:21} {format_seconds(times[name])}  {median['raw'] / median[name]:5.1f}x raw")
        print_line(f"{rate:11} the differences are 1/{median['ratio']:.0f} of the weights")
