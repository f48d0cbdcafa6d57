"""Weights as differences, compared with whole ones, on emulated hosts.

Four trainer ranks on two hosts each hold a quarter of 64 MiB of bf16 weights. Four engines of one rank on two other
hosts each need all weights. Between versions, a share of the weights changes by one or two units in the last place. A
:class:`reshard.Mover` sends the whole weights ("raw"). ``publish`` is the time from
:meth:`reshard.weights.Publisher.publish` until every engine holds the version, verified, without compression and with
``compression="delta"``; ``update`` then swaps the version in. :func:`reshard.reshard` sends differences with
``compression="delta"``, and with ``"bf16-lossless"`` the whole weights without loss. Every engine compares each result
with the trainers' weights bit for bit. The CPU time is the sum over all eight ranks.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import reshard
from microbench.harness.benchmark_rank import Stopwatch
from microbench.harness.case_options import add_number, add_rates
from microbench.harness.turns import Times, equal_hosts, format_seconds, medians_of, run_on_hosts, slowest
from microbench.transfers.publication import NUM_TRAINERS, Publication, make_group
from reshard.cli.progress_bars import print_line, track
from reshard.topology import Topology

COLUMNS = 4096
RATES = ("0.4 Gbit/s", "1 Gbit/s")
#: Methods in the order in which each version is sent.
METHODS = ("raw", "publish", "publish delta", "update delta", "reshard delta", "reshard bf16-lossless")
#: Versions that are sent in full, connect ranks or allocate buffers.
UNTIMED = 3


class Versions:
    """The weights of one version after the other, the same on all ranks.

    Args:
        mib: size of the weights in MiB.
        share: fraction of the weights that change.
    """

    def __init__(self, mib: int, share: float) -> None:
        self.shape = (mib * 2**20 // 2 // COLUMNS, COLUMNS)
        self._share, self._generator = share, torch.Generator().manual_seed(0)
        self.whole = torch.randn(self.shape, generator=self._generator).to(torch.bfloat16)

    @property
    def words(self) -> torch.Tensor:
        """The bits of the weights."""
        return self.whole.view(torch.int16)

    def change(self) -> None:
        """Make the next version."""
        changed = torch.rand(self.shape, generator=self._generator) < self._share
        steps = torch.randint(1, 3, self.shape, generator=self._generator).short()
        self.words.add_(changed.short() * steps)


def measure(
    rank: int, report: Callable[[Any], None], mib: int, share: float, repeats: int, topology: Topology
) -> tuple[Times, Times, float]:
    """Measure all methods on this rank, once per version.

    Args:
        mib: size of the weights in MiB.
        share: fraction of the weights that change.
        repeats: number of timed versions.

    Returns:
        Seconds of each method, one value per version; its CPU seconds; and plain bytes over bytes of the last
        differences on ranks of the trainer.
    """
    versions, is_trainer = Versions(mib, share), rank < NUM_TRAINERS
    shape, whole = versions.shape, versions.whole
    begin, end = (quarter * shape[0] // 4 for quarter in (rank, rank + 1))
    part = whole[begin:end] if is_trainer else whole
    models = {name: {"w": torch.zeros_like(part)} for name in ("publish", "publish delta")}
    group, publications = make_group(rank, 4), {}
    for name, model in models.items():
        options: dict[str, Any] = {"name": name, "topology": topology}
        if is_trainer:
            options["shards"] = {"w": (shape, [((begin, end), (0, COLUMNS))])}
            options["compression"] = "delta" if name == "publish delta" else None
        publications[name] = Publication(model, group, is_trainer, 4, **options)
    src, dst = (reshard.Layout(reshard.Mesh.of(4, first_rank=first), spec) for first, spec in ((0, "S0"), (4, "R")))
    mover = reshard.Mover(reshard.make_plan(src, dst, shape, "bfloat16", topology=topology))
    call = functools.partial(reshard.reshard, shape=shape, dtype="bfloat16", topology=topology)
    out = None if is_trainer else torch.zeros(shape, dtype=torch.bfloat16)
    outs: dict[str, Any] = {name: None if out is None else out.clone() for name in METHODS}
    seconds: Times = {name: [] for name in METHODS}
    used: Times = {name: [] for name in METHODS}
    shard, old, ratio, stopwatch = None, None, 1.0, Stopwatch()
    for version in range(1, repeats + UNTIMED + 1):
        versions.change()
        old, shard = shard, whole[begin:end].clone() if is_trainer else None
        for name in METHODS:
            method, _, kind = name.partition(" ")
            if name in models and shard is not None:
                models[name]["w"].copy_(shard)
            stopwatch.start()
            begun = time.process_time()
            if method == "raw":
                mover(shard, out=outs[name])
            elif method == "publish":
                sent = publications[name].publish()
                ratio = ratio if sent is None else sent.nbytes / (sent.encoded_bytes or sent.nbytes)
            elif method == "update":
                publications["publish delta"].update()
            else:
                call(shard, src, dst, compression=kind, out=outs[name], base=old if kind == "delta" else None)
            took = stopwatch.stop().seconds
            if version > UNTIMED:
                seconds[name].append(took)
                used[name].append(time.process_time() - begun)
            got = models["publish delta"]["w"] if method == "update" else outs[name]
            assert is_trainer or method == "publish" or torch.equal(got.view(torch.int16), versions.words), name
    mover.close()
    for publication in publications.values():
        publication.close()
    return seconds, used, ratio


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--mib", 64, "MiB of weights", high=1024)
    add_number(parser, "--share", 0.01, "share of the weights that change", low=0, high=1)
    add_rates(parser, RATES)
    add_number(parser, "--repeats", 7, "timed turns")


def run(options: argparse.Namespace) -> None:
    """Measure at each link rate, and print a row for each method."""
    for rate in track(options.rate or RATES, "rates"):
        topology = equal_hosts(rate)
        ranks = run_on_hosts(topology, measure, options.mib, options.share, options.repeats, topology)
        times = slowest([seconds for seconds, *_ in ranks])
        median = medians_of(times)
        print_line(f"{rate}, load {os.getloadavg()[0]:.1f}; the differences are 1/{ranks[0][2]:.0f} of the weights")
        for name in METHODS:
            used = statistics.median(map(sum, zip(*(used[name] for _, used, _ in ranks), strict=True)))
            faster = median["raw"] / median[name]
            print_line(
                f"  {name:21} {format_seconds(times[name])}  {faster:5.1f}x raw  {1e3 * used:.0f} ms of CPU time"
            )
