"""All-reduces of gradients on emulated hosts, compared with Gloo's.

Four hosts with two ranks each average 16 MiB of fp32 gradients. The contenders run in turns: Gloo's all-reduce in fp32
and in bf16, and :class:`reshard.compression.GradientSum` without a codec and with several. A row prints the median
time, the speed-up over Gloo's fp32, the ratio to the lower bound (``2 (H - 1) / H`` of the encoded bytes pass each
host's link), and the relative error. The bits of all ranks are compared.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from microbench.emulation.link_commands import PAYLOAD_SHARE
from microbench.harness.case_options import add_number
from microbench.harness.turns import (
    Times,
    equal_hosts,
    format_seconds,
    medians_of,
    run_on_hosts,
    slowest,
    time_in_turns,
)
from reshard.codecs import parse_codec
from reshard.compression import GradientSum

HOSTS, RANKS_PER_HOST = 4, 2
GLOO = {"Gloo fp32": torch.float32, "Gloo bf16": torch.bfloat16}
OURS = {"by hosts, raw": None, "int8x128": "int8x128", "int4x128": "int4x128", "int4x128-bf16": "int4x128-bf16"}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--mib", 16, "MiB of gradients per rank", high=1024)
    parser.add_argument("--rate", default="0.4 Gbit/s", help="rate of each host's link (0.4 Gbit/s)")
    add_number(parser, "--repeats", 7, "timed turns of each contender")


def measure(rank: int, report: Callable[[Any], None], mib: int, repeats: int) -> tuple[Times, dict[str, float]]:
    """Seconds of each turn on this rank, and the relative error of each contender."""
    numel, world = mib * 2**20 // 4, dist.get_world_size()
    hosts = [other // RANKS_PER_HOST for other in range(world)]
    own, wanted = torch.zeros(0), torch.zeros(numel)
    for other in range(world):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(other))
        wanted += gradient / world
        own = gradient if other == rank else own
    buffers = {name: torch.empty(numel, dtype=GLOO.get(name, torch.float32)) for name in (*GLOO, *OURS)}
    errors = {}

    def average(buffer: torch.Tensor) -> None:
        dist.all_reduce(buffer)
        buffer.div_(world)

    def check(name: str) -> None:
        buffer = buffers[name]
        errors[name] = float((buffer.float() - wanted).norm() / wanted.norm())
        first = buffer.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, buffer), f"{name}: rank {rank} has other bits than rank 0"

    methods: dict[str, Callable[[], object]] = {name: functools.partial(average, buffers[name]) for name in GLOO}
    for name, codec in OURS.items():
        methods[name] = functools.partial(GradientSum(codec, host_of_rank=hosts), {"gradients": buffers[name]})
    times = time_in_turns(methods, repeats, prepare=lambda name: buffers[name].copy_(own), check=check, show=rank == 0)
    return times, errors


def run(options: argparse.Namespace) -> None:
    """Print a row per contender."""
    topology = equal_hosts(options.rate, HOSTS, RANKS_PER_HOST)
    results = run_on_hosts(topology, measure, options.mib, options.repeats)
    times = slowest([times for times, _ in results])
    median = medians_of(times)
    rate = topology.hosts[0].nics[0].egress_bytes_per_second * PAYLOAD_SHARE
    for name, seconds in times.items():
        values, nbytes = (
            parse_codec(OURS[name]).element if OURS.get(name) else (1, GLOO.get(name, torch.float32).itemsize)
        )
        bound = 2 * (HOSTS - 1) / HOSTS * options.mib * 2**20 / 4 / values * nbytes / rate
        print(
            f"{name:14} {format_seconds(seconds)}  {median['Gloo fp32'] / median[name]:5.2f}x  "
            f"{median[name] / bound:.3f} of bound  error {results[0][1][name]:.2g}"
        )
