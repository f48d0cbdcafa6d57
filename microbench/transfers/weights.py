"""A whole model from a trainer to engines: ``reshard.weights``, compared with what others do with the same shards.

Four trainer ranks on two hosts hold a Llama of 75 tensors with FSDP. Engines of two ranks on other hosts hold it with
tensor parallelism. ``publish`` is the time from :meth:`reshard.weights.Publisher.publish` until every engine holds the
version, verified by digests. ``Mover`` and ``send_recv`` move the same tensors by one plan, by multicast and by plain
sends, without digests or a commit. ``full_tensor + broadcast`` gathers each tensor on the trainer and broadcasts it to
all engines. Every element of the engines is compared with the trainer's after each method.

``--tiny`` publishes 300 tensors of 4 KiB from 4 ranks to 4 on this machine, and compares this with a Mover of one
tensor of their size.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import reshard
from microbench.emulation.link_commands import nominal
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
from microbench.peers.contenders import make_ours
from microbench.peers.torch_baselines import FullTensor
from microbench.transfers.publication import NUM_TRAINERS, Publication, make_group
from reshard.cli.progress_bars import print_line, track
from reshard.cost import find_bound
from reshard.planner import plan_tensors
from reshard.sharding import TensorSpec
from reshard.testing import run_processes
from reshard.topology import Topology

RANKS_PER_ENGINE = 2
HIDDEN, KV, MLP, VOCABULARY, LAYERS = 768, 256, 2048, 8000, 8


def llama() -> dict[str, tuple[tuple[int, int], int]]:
    """Shapes of the weights, and the dim along which tensor parallelism shards them; -1: not at all."""
    shapes = {"model.embed_tokens.weight": ((VOCABULARY, HIDDEN), 0), "lm_head.weight": ((VOCABULARY, HIDDEN), 0)}
    for layer in range(LAYERS):
        p = f"model.layers.{layer}"
        shapes |= {
            f"{p}.self_attn.q_proj.weight": ((HIDDEN, HIDDEN), 0),
            f"{p}.self_attn.k_proj.weight": ((KV, HIDDEN), 0),
            f"{p}.self_attn.v_proj.weight": ((KV, HIDDEN), 0),
            f"{p}.self_attn.o_proj.weight": ((HIDDEN, HIDDEN), 1),
            f"{p}.mlp.gate_proj.weight": ((MLP, HIDDEN), 0),
            f"{p}.mlp.up_proj.weight": ((MLP, HIDDEN), 0),
            f"{p}.mlp.down_proj.weight": ((HIDDEN, MLP), 1),
            f"{p}.input_layernorm.weight": ((1, HIDDEN), -1),
            f"{p}.post_attention_layernorm.weight": ((1, HIDDEN), -1),
        }
    return shapes | {"model.norm.weight": ((1, HIDDEN), -1)}


def make_specs(num_engines: int) -> list[TensorSpec]:
    """The tensors with both layouts."""
    trainer = reshard.Mesh.of(NUM_TRAINERS)
    engines = reshard.Mesh.of(f"{num_engines}x{RANKS_PER_ENGINE}", first_rank=NUM_TRAINERS)
    specs = {-1: "R R", 0: "S1 R", 1: "R S1"}
    return [
        TensorSpec(shape, "bfloat16", reshard.Layout(trainer, "S0 R"), reshard.Layout(engines, specs[dim]), name)
        for name, (shape, dim) in llama().items()
    ]


def _slices(spec: TensorSpec, is_source: bool, rank: int) -> tuple[slice, ...] | None:
    shards = spec.src_tiles if is_source else spec.dst_tiles
    boxes = [box for box, _ in shards.boxes_of(rank)]
    return tuple(slice(lo, hi) for lo, hi in boxes[0]) if boxes else None


def measure(rank: int, report: Callable[[Any], None], num_engines: int, repeats: int, topology: Topology) -> Times:
    """Time all methods on this rank. ``swap`` is the time of ``update`` after the version has come."""
    specs, is_trainer = make_specs(num_engines), rank < NUM_TRAINERS
    generator = torch.Generator().manual_seed(0)
    whole = {str(spec.name): torch.randn(spec.shape, generator=generator).to(torch.bfloat16) for spec in specs}
    boxes = {str(spec.name): box for spec in specs if (box := _slices(spec, is_trainer, rank)) is not None}
    expected = {name: whole[name][box] for name, box in boxes.items()}
    model = {name: part.clone() if is_trainer else torch.zeros_like(part) for name, part in expected.items()}
    shards = {name: (whole[name].shape, [[(cut.start, cut.stop) for cut in box]]) for name, box in boxes.items()}
    group = make_group(rank, num_engines, RANKS_PER_ENGINE)
    publication = Publication(model, group, is_trainer, num_engines, topology=topology, shards=shards)
    dist.barrier()
    nothing = {name: torch.empty(0, whole[name].shape[1], dtype=torch.bfloat16) for name in whole}
    sources = [model.get(name, nothing[name]) if is_trainer else None for name in whole]
    outs = [None if is_trainer else model.get(name) for name in whole]

    def prepare(method: str) -> None:
        if method != "swap":
            for out in outs:
                if out is not None:
                    out.zero_()

    def check(method: str) -> None:
        if not is_trainer and method != "publish":
            assert all(torch.equal(model[name], part) for name, part in expected.items()), method

    plans = {name: plan_tensors(specs, strategy=name, topology=topology) for name in ("auto", "send_recv")}
    methods: dict[str, Callable[[], object]] = {
        "publish": publication.publish,
        "swap": publication.update,
        "Mover": make_ours(plans["auto"], rank, sources, outs),
        "send_recv": make_ours(plans["send_recv"], rank, sources, outs),
        "full_tensor + broadcast": FullTensor(specs, rank, sources, outs),
    }
    times = time_in_turns(methods, repeats, prepare=prepare, check=check)
    publication.close()
    return times


def measure_tiny(rank: int, repeats: int, num_tensors: int, numel: int) -> Times:
    """Time the publication of small tensors on this rank, and a Mover of one tensor of their size."""
    is_trainer, rows = rank < NUM_TRAINERS, numel // 64
    begin, end = rank % 4 * rows // 4, (rank % 4 + 1) * rows // 4
    model = {f"w{i}": torch.full((end - begin, 64), float(i + 1) * is_trainer) for i in range(num_tensors)}
    shards = {name: ((rows, 64), [[(begin, end), (0, 64)]]) for name in model}
    publication = Publication(model, make_group(rank, 1, 4), is_trainer, 1, shards=shards)
    src, dst = (reshard.Layout(reshard.Mesh.of(4, first_rank=first), "S0 R") for first in (0, 4))
    mover = reshard.Mover(reshard.make_plan(src, dst, (num_tensors * rows, 64), "float32"))
    shard = torch.zeros(num_tensors * rows // 4, 64)

    def move() -> None:
        mover(shard if is_trainer else None, out=None if is_trainer else shard)

    dist.barrier()
    times = time_in_turns({"publish": publication.publish, "Mover, one tensor": move}, repeats)
    publication.update()
    assert all(bool((tensor == int(name[1:]) + 1).all()) for name, tensor in model.items())
    publication.close()
    mover.close()
    return times


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--engines", 0, "engines of two ranks; 0: one with 2 hosts, then four with 4 hosts", high=16)
    add_number(parser, "--repeats", 7, "timed turns")
    parser.add_argument("--rate", default="500 Mbit/s", help="of each host (500 Mbit/s)")
    parser.add_argument("--tiny", action="store_true", help="300 small tensors on this machine")


def run(options: argparse.Namespace) -> None:
    """Measure, and print a row for each method with its ratio to the lower bound."""
    if options.tiny:
        times = slowest(run_processes(measure_tiny, 8, options.repeats, 300, 1024, timeout_seconds=600))
        for name, seconds in times.items():
            print_line(f"{name:24} {format_seconds(seconds)}  load {os.getloadavg()[0]:.1f}")
        return
    for engines in track([options.engines] if options.engines else [2, 4], "engines"):
        topology = equal_hosts(options.rate, 2 + engines, 2)
        bound = find_bound(plan_tensors(make_specs(engines), topology=nominal(topology))).seconds  # of TCP payload
        times = slowest(run_on_hosts(topology, measure, engines, options.repeats, topology))
        median = medians_of(times)
        print_line(f"{engines} engines of 2 ranks, {options.rate}: bound {bound:.4f} s, load {os.getloadavg()[0]:.1f}")
        for name, seconds in times.items():
            print_line(f"  {name:24} {format_seconds(seconds)}  {median[name] / bound:6.3f}x the bound")
