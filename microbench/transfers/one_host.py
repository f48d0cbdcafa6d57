"""A model of many tensors inside one host, compared with awex, and the prediction after calibration.

Four trainer ranks hold a Llama of 75 tensors with FSDP, and four ranks get it with tensor parallelism over two ranks,
twice, all on this machine. ``publish`` is the time until both engines hold a version of
:class:`reshard.weights.Publisher`, verified by digests, and ``swap`` that of ``update``. The transfer with which
``hosts --calibrate`` measures the ranks of a host together takes turns with the methods, so that predictions from its
median rate meet the same load of the machine.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import reshard
from microbench.harness.calibrate import InsideTransfer, measure_links, measured_topology
from microbench.harness.case_options import add_number
from microbench.harness.turns import format_seconds, medians_of, slowest, time_in_turns
from microbench.peers.base import NotApplicable, slices_of
from microbench.peers.contenders import PEERS, make_ours
from microbench.transfers.publication import Publication, make_group
from microbench.transfers.weights import llama
from reshard.cli.progress_bars import print_line
from reshard.cost import find_bound, simulate
from reshard.planner import plan_tensors
from reshard.runtime.transport import shared_memory
from reshard.sharding import TensorSpec
from reshard.testing import run_processes
from reshard.topology import Topology

NUM_RANKS = 8
#: Strategies that are compared with awex. ``auto`` chooses with the measured rates, and "auto, unmeasured" without
#: them. "auto, sockets" shares no memory.
STRATEGIES = ("auto", "auto, unmeasured", "auto, sockets", "send_recv", "multicast")


def make_specs(scale: int) -> list[TensorSpec]:
    """The tensors with both layouts. ``scale`` multiplies their first dim, except for norms."""
    trainer, engines = reshard.Mesh.of(4), reshard.Mesh.of("2x2", first_rank=4)
    specs = {-1: "R R", 0: "S1 R", 1: "R S1"}
    return [
        TensorSpec(
            (shape[0] * (scale if dim >= 0 else 1), shape[1]),
            "bfloat16",
            reshard.Layout(trainer, "S0 R"),
            reshard.Layout(engines, specs[dim]),
            name,
        )
        for name, (shape, dim) in llama().items()
    ]


def _values(spec: TensorSpec, at: tuple[slice, ...]) -> torch.Tensor:
    """Values that tell positions apart."""
    numbers = torch.arange(spec.shape[0] * spec.shape[1], dtype=torch.int32) % 32749
    return numbers.to(torch.int16).view(spec.shape)[at].clone().view(torch.bfloat16)


def _call_without_sharing(method: Callable[[], object]) -> None:
    """Call a method whose large messages go over sockets. All ranks call at the same time."""
    limit, shared_memory.MIN_SHARED_BYTES = shared_memory.MIN_SHARED_BYTES, sys.maxsize
    try:
        method()
    finally:
        shared_memory.MIN_SHARED_BYTES = limit


def _make_publication(
    rank: int,
    specs: Sequence[TensorSpec],
    sources: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor | None],
    topology: Topology,
) -> Publication:
    """The trainer, or the engine, of this rank; it holds the same tensors as the other methods move."""
    tensors: dict[str, torch.Tensor] = {}
    shards = {}
    for spec, source, out in zip(specs, sources, outs, strict=True):
        side = spec.src_tiles if rank in spec.src.ranks else spec.dst_tiles
        boxes = [box for box, _ in side.boxes_of(rank)]
        tensor = source if out is None else out
        if boxes and tensor is not None:
            tensors[str(spec.name)], shards[str(spec.name)] = tensor, (spec.shape, boxes)
    is_trainer = rank in specs[0].src.ranks
    return Publication(tensors, make_group(rank, 2, 2), is_trainer, 2, topology=topology, shards=shards)


def measure(rank: int, repeats: int, scale: int) -> dict[str, Any]:
    """Calibrate, and time all methods on this rank."""
    one_host = Topology((0,) * NUM_RANKS)
    topologies: list[Any] = [measured_topology(one_host, measure_links(rank, lambda value: None, one_host))]
    dist.broadcast_object_list(topologies, 0)
    topology: Topology = topologies[0]
    specs, sources, outs = make_specs(scale), [], []
    for spec in specs:
        is_source = rank in spec.src.ranks
        layout, shards = (spec.src, spec.src_tiles) if is_source else (spec.dst, spec.dst_tiles)
        values = _values(spec, slices_of(spec, layout, rank)).reshape(shards.local_shape(rank))
        sources.append(values if is_source else None)
        outs.append(None if is_source else torch.zeros_like(values))
    plans = {
        name: plan_tensors(specs, strategy=name.split(",")[0], topology=one_host if "unmeasured" in name else topology)
        for name in STRATEGIES
    }
    calibration = InsideTransfer(rank, range(NUM_RANKS), topology)
    methods: dict[str, Callable[[], object]] = {"calibration": calibration}
    methods |= {name: make_ours(plan, rank, sources, outs) for name, plan in plans.items()}
    methods["auto, sockets"] = functools.partial(_call_without_sharing, methods["auto, sockets"])
    publication = _make_publication(rank, specs, sources, outs, topology)

    def publish() -> None:
        publication.publish()
        dist.barrier()  # the threads of the engines count too

    methods |= {"publish": publish, "swap": publication.update}
    try:
        methods["awex"] = PEERS["awex"](specs, rank, sources, outs)
    except NotApplicable as reason:
        if not rank:
            print_line(f"without awex: {reason}")

    def prepare(name: str) -> None:
        for out in outs:
            if out is not None and name not in ("calibration", "swap"):
                out.zero_()

    def check(name: str) -> None:
        for spec, out in zip(specs, outs, strict=True):
            if out is not None and name not in ("calibration", "publish"):
                expected = _values(spec, slices_of(spec, spec.dst, rank))
                assert torch.equal(out.view(torch.int16), expected.view(torch.int16)), (name, spec.name)

    spent = dict.fromkeys(methods, 0.0)

    def count_cpu(name: str, method: Callable[[], object]) -> None:
        begun = time.process_time()
        method()
        spent[name] += (time.process_time() - begun) / (repeats + 1)

    turns = {name: functools.partial(count_cpu, name, method) for name, method in methods.items()}
    times = time_in_turns(turns, repeats, prepare=prepare, check=check, show=rank == 0)
    publication.close()
    kept = {"topology": topology, "plans": plans, "nbytes": calibration.nbytes} if not rank else {}
    return {"times": times, "cpu": spent, **kept}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--repeats", 7, "timed turns")
    add_number(parser, "--scale", 3, "factor of the first dim of the tensors; 3: 352 MB", high=32)


def run(options: argparse.Namespace) -> None:
    """Measure, and print a row for each method with its prediction."""
    ranks = run_processes(measure, NUM_RANKS, options.repeats, options.scale, timeout_seconds=900)
    times = slowest([rank["times"] for rank in ranks])
    medians, first = medians_of(times), ranks[0]
    seconds = medians["calibration"] - first["topology"].start_seconds
    topology = replace(first["topology"], inside_total_bytes_per_second=first["nbytes"] / seconds)
    total = sum(spec.shape[0] * spec.shape[1] * spec.itemsize for spec in make_specs(options.scale))
    bound = find_bound(first["plans"]["auto"].tensors, topology)
    print_line(f"{total / 2**20:.0f} MiB, load {os.getloadavg()[0]:.1f}; measured before:\n{first['topology']}")
    print_line(f"bound {bound.seconds:.4f} s: {bound.reason}")
    for name, seconds in times.items():
        cpu = sum(rank["cpu"][name] for rank in ranks)
        ratio = medians[name] / medians["send_recv"]
        line = f"  {name:18} {format_seconds(seconds)}  {ratio:6.3f} of send_recv, CPU {cpu:.3f} s"
        if name in first["plans"]:
            plan = first["plans"][name]
            predicted = simulate(plan, topology).makespan_seconds
            line += f", predicted {predicted:.4f} ({predicted / medians[name]:.3f}), {plan.strategy}"
        print_line(line)
