"""A whole model from a trainer to engines: ``reshard.weights`` beside what others do with the same shards.

Four trainer ranks on two hosts hold a Llama of 75 tensors with FSDP. Engines of two ranks on other hosts hold it with
tensor parallelism. ``publish`` is the time from :meth:`reshard.weights.Publisher.publish` until every engine holds the
version, verified by digests. ``Mover`` and ``send_recv`` move the same tensors by one plan, by multicast and by plain
sends, without digests or a commit. ``full_tensor + broadcast`` gathers each tensor on the trainer and broadcasts it to
all engines. Every element of the engines is compared with the trainer's after each method.

``--tiny`` publishes 300 tensors of 4 KiB from 4 ranks to 4 on this machine, beside a Mover of one tensor of their size.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import reshard
from microbench.emulation.links import nominal
from microbench.harness.options import add_number
from microbench.harness.turns import (
    Times,
    equal_hosts,
    format_seconds,
    medians_of,
    run_on_hosts,
    slowest,
    time_in_turns,
)
from microbench.peers.registry import make_ours
from microbench.peers.torch_baselines import FullTensor
from reshard import weights
from reshard.cli.progress import print_line, track
from reshard.cost import find_bound
from reshard.planner import plan_tensors
from reshard.sharding import TensorSpec
from reshard.testing import run_processes
from reshard.topology import Topology

NUM_TRAINERS, RANKS_PER_ENGINE = 4, 2
HIDDEN, KV, MLP, VOCABULARY, LAYERS = 768, 256, 2048, 8000, 8


def llama() -> dict[str, tuple[tuple[int, int], int]]:
    """Shapes of the weights, and the dim along which tensor parallelism shards them; -1: not at all."""
    found = {"model.embed_tokens.weight": ((VOCABULARY, HIDDEN), 0), "lm_head.weight": ((VOCABULARY, HIDDEN), 0)}
    for layer in range(LAYERS):
        p = f"model.layers.{layer}"
        found |= {
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
    return found | {"model.norm.weight": ((1, HIDDEN), -1)}


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
    shards = spec.src_shards if is_source else spec.dst_shards
    boxes = [box for box, _ in shards.boxes_of(rank)]
    return tuple(slice(lo, hi) for lo, hi in boxes[0]) if boxes else None


def measure(rank: int, report: Callable[[Any], None], num_engines: int, repeats: int, topology: Topology) -> Times:
    """Time all methods on this rank. ``swap`` is the time of ``update`` after the version has come."""
    specs = make_specs(num_engines)
    generator = torch.Generator().manual_seed(0)
    whole = {spec.name: torch.randn(spec.shape, generator=generator).to(torch.bfloat16) for spec in specs}
    is_trainer = rank < NUM_TRAINERS
    mine, stated = {}, {}
    for spec in specs:
        at = _slices(spec, is_trainer, rank)
        if at is not None:
            mine[spec.name] = whole[spec.name][at].clone() if is_trainer else torch.zeros_like(whole[spec.name][at])
            stated[spec.name] = spec.shape, [[(cut.start, cut.stop) for cut in at]]
    groups = [dist.new_group(list(range(NUM_TRAINERS)))]
    groups += [
        dist.new_group([NUM_TRAINERS + RANKS_PER_ENGINE * i + j for j in range(RANKS_PER_ENGINE)])
        for i in range(num_engines)
    ]
    group = groups[0] if is_trainer else groups[1 + (rank - NUM_TRAINERS) // RANKS_PER_ENGINE]
    store = dist.distributed_c10d._get_default_store()
    options: dict[str, Any] = {"group": group, "topology": topology, "shards": stated}
    publisher = weights.Publisher(mine, store, **options) if is_trainer else None
    subscriber = None if is_trainer else weights.Subscriber(mine, store, **options)
    dist.barrier()
    nothing = {spec.name: torch.empty(0, spec.shape[1], dtype=torch.bfloat16) for spec in specs}
    sources = [mine.get(spec.name, nothing[spec.name]) if is_trainer else None for spec in specs]
    outs = [None if is_trainer else mine.get(spec.name) for spec in specs]
    version = 0

    def publish() -> None:
        nonlocal version
        version += 1
        if publisher is not None:
            engines = publisher.publish(version).wait(600).engines
            assert list(engines.values()) == [""] * num_engines, engines

    def swap() -> None:
        if subscriber is not None:
            assert subscriber.update(600) == version

    def prepare(name: str) -> None:
        if name != "swap":
            for out in outs:
                if out is not None:
                    out.zero_()

    def check(name: str) -> None:
        for spec, out in zip(specs, outs, strict=True):
            at = None if is_trainer else _slices(spec, False, rank)
            if out is not None and at is not None and name != "publish":
                assert torch.equal(out, whole[spec.name][at]), (name, spec.name)

    plans = {name: plan_tensors(specs, strategy=name, topology=topology) for name in ("auto", "send_recv")}
    methods: dict[str, Callable[[], object]] = {
        "publish": publish,
        "swap": swap,
        "Mover": make_ours(plans["auto"], rank, sources, outs),
        "send_recv": make_ours(plans["send_recv"], rank, sources, outs),
        "full_tensor + broadcast": FullTensor(specs, rank, sources, outs),
    }
    times = time_in_turns(methods, repeats, prepare=prepare, check=check)
    for side in (publisher, subscriber):
        if side is not None:
            side.close()
    return times


def measure_tiny(rank: int, repeats: int, num_tensors: int, numel: int) -> Times:
    """Time the publication of small tensors on this rank, and a Mover of one tensor of their size."""
    size, is_trainer = 8, rank < NUM_TRAINERS
    groups = [dist.new_group(list(range(4))), dist.new_group(list(range(4, 8)))]
    rows = numel // 64
    own = slice(rank % 4 * rows // 4, (rank % 4 + 1) * rows // 4)
    model = {f"w{i}": torch.full((rows, 64), float(i + 1) * is_trainer)[own].clone() for i in range(num_tensors)}
    stated = {name: ((rows, 64), [[(own.start, own.stop), (0, 64)]]) for name in model}
    store = dist.distributed_c10d._get_default_store()
    options: dict[str, Any] = {"group": groups[not is_trainer], "shards": stated}
    publisher = weights.Publisher(model, store, **options) if is_trainer else None
    subscriber = None if is_trainer else weights.Subscriber(model, store, **options)
    src, dst = (reshard.Layout(reshard.Mesh.of(4, first_rank=first), "S0 R") for first in (0, 4))
    mover = reshard.Mover(reshard.make_plan(src, dst, (num_tensors * rows, 64), "float32"))
    shard = torch.zeros(num_tensors * rows // 4, 64)
    version = 0

    def publish() -> None:
        nonlocal version
        version += 1
        if publisher is not None:
            assert set(publisher.publish(version).wait(600).engines.values()) == {""}

    def move() -> None:
        mover(shard if is_trainer else None, out=None if is_trainer else shard)

    dist.barrier()
    times = time_in_turns({"publish": publish, "Mover, one tensor": move}, repeats)
    if subscriber is not None:
        assert subscriber.update(60) == version
        assert all(bool((tensor == int(name[1:]) + 1).all()) for name, tensor in model.items())
        subscriber.close()
    elif publisher is not None:
        publisher.close()
    mover.close()
    assert dist.get_world_size() == size
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
