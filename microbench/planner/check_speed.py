"""Time and memory of :func:`reshard.check_plan` by number of messages.

The benchmark prints the lowest CPU time of several repetitions. Each measurement runs in a separate process, so that
its peak memory is its own. ``--reference`` times the tests' reference checker, which replays messages one by one.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from microbench.harness.case_options import add_number, select
from microbench.harness.new_process import call_in_new_process
from reshard.cli.progress_bars import print_line, track
from reshard.errors import PlanError
from reshard.plan import Plan, PlanTransfers, check_plan
from reshard.planner import plan_tensors
from reshard.sharding import Layout, Mesh, RegionLayout, Strided, TensorSpec
from reshard.topology import Topology, topology_from_json

STAGING_BYTES = 2**20


def _few_ranks(strategy: str) -> Callable[[int], Plan]:
    """From two ranks on one host to two on each of two other hosts, which all get the whole tensor, in many chunks."""

    def make(messages: int) -> Plan:
        src, dst = Layout(Mesh.of(2), "S0"), Layout(Mesh.of(4, first_rank=2))
        topology = Topology.uniform([0, 0, 1, 1, 2, 2])
        shape = (max(1, messages // 32), 2**19)  # about 32 messages per row
        return plan_tensors(
            [TensorSpec(shape, "bfloat16", src, dst)], strategy=strategy, topology=topology, staging_bytes=STAGING_BYTES
        )

    return make


def _relays(messages: int) -> Plan:
    """Rows to columns between two hosts of four ranks and three NICs. Some data is relayed by a rank on another NIC."""
    src, dst = Layout(Mesh.of(4), "S0 R"), Layout(Mesh.of(4, first_rank=4), "R S0")
    host = {"count": 1, "devices": 4, "nics": ["10 Gbit/s"] * 3}
    rows = min(max(1, messages // 20), 54_000)  # more rows would exceed the planner's chunk limit
    spec = TensorSpec((rows, 2**19), "bfloat16", src, dst)
    return plan_tensors(
        [spec], strategy="multicast", topology=topology_from_json({"hosts": [host, host]}), staging_bytes=STAGING_BYTES
    )


def _small_boxes(messages: int) -> Plan:
    """Cyclic rows on two ranks to cyclic columns on two other ranks, so that every box has one element."""
    side = 2 * max(1, math.isqrt(messages) // 2)
    src = Layout(Mesh.of(2, axes=["a"]), ((Strided("a", side // 2),),))
    dst = Layout(Mesh.of(2, first_rank=2, axes=["a"]), ((), (Strided("a", side // 2),)))
    return plan_tensors([TensorSpec((side, side), "bfloat16", src, dst)], strategy="send_recv")


def _many_ranks(messages: int) -> Plan:
    """Rows to columns: every source rank sends to every destination rank."""
    ranks = math.isqrt(messages)
    src, dst = Layout(Mesh.of(ranks), "S0 R"), Layout(Mesh.of(ranks, first_rank=ranks), "R S0")
    topology = Topology.uniform([rank // 8 for rank in range(2 * ranks)])
    return plan_tensors([TensorSpec((ranks, ranks), "int32", src, dst)], strategy="send_recv", topology=topology)


def _many_tensors(messages: int) -> Plan:
    """Weights of sixteen shapes, each from eight ranks to eight other ranks."""
    src, dst = Layout(Mesh.of(8), "S0 R"), Layout(Mesh.of(8, first_rank=8), "R S0")
    topology = Topology.uniform([rank // 8 for rank in range(16)])
    tensors = [TensorSpec((64 + 8 * (i % 16), 64), "int32", src, dst, f"w{i}") for i in range(max(1, messages // 64))]
    return plan_tensors(tensors, strategy="send_recv", topology=topology)


def _regions(messages: int) -> Plan:
    """From explicit regions laid out like bricks in a wall to four ranks that need whole rows of the wall."""
    rows = 4 * max(1, math.isqrt(messages) // 4)
    bricks = [
        [(row, row + 1), (max(0, 2 * i - row % 2), min(2 * rows, 2 * i + 2 - row % 2))]
        for row in range(rows)
        for i in range(rows + row % 2)
    ]
    # a rank's boxes are joined along dim 1, so every box has one row
    src = RegionLayout({rank: bricks[rank::2] for rank in range(2)}, join_dim=1)
    dst = Layout(Mesh.of(4, first_rank=2, axes=["a"]), ("a",))
    return plan_tensors([TensorSpec((rows, 2 * rows), "int32", src, dst)], strategy="send_recv")


def _by_hand(start: np.ndarray, stop: np.ndarray, edges: list[tuple[int, int]], shape: tuple[int, ...]) -> Plan:
    """A hand-made plan: rank 0 holds a tensor that rank 2 needs. Each box is one transfer along ``edges``."""
    num = len(start)
    transfers = PlanTransfers(
        box_offsets=np.arange(num + 1),
        box_tensor=np.zeros(num),
        box_start=start,
        box_stop=stop,
        edge_offsets=len(edges) * np.arange(num + 1),
        sender=np.tile([sender for sender, _ in edges], num),
        receiver=np.tile([receiver for _, receiver in edges], num),
        splits=np.ones((num, len(shape))),
        window=np.full(num, 4),
    )
    # rank 1 has an empty shard: only ranks of a layout may relay
    dst = RegionLayout({1: [], 2: [[(0, size) for size in shape]]}, ndim=len(shape))
    spec = TensorSpec(shape, "int8", Layout(Mesh.of(1)), dst)
    return Plan((spec,), Topology((0, 0, 0)), "by_hand", transfers)


def _overlapping(messages: int) -> Plan:
    """An invalid plan: all boxes overlap at the center of the tensor."""
    reach = np.arange(1, messages + 1)
    start, stop = np.stack([messages - reach, messages - reach[::-1]], axis=1), np.full((messages, 2), 2 * messages)
    return _by_hand(start, np.minimum(stop, messages + reach[:, None]), [(0, 2)], (2 * messages, 2 * messages))


def _staged_overlapping(messages: int) -> Plan:
    """The invalid plan of :func:`_overlapping`, relayed by a rank that needs no data."""
    plan = _overlapping(messages // 2)
    return _by_hand(plan.transfers.box_start, plan.transfers.box_stop, [(0, 1), (1, 2)], plan.tensors[0].shape)


def _spiral(messages: int) -> Plan:
    """A valid plan: concentric rings of four interlocking boxes each, relayed by a rank that needs no data."""
    num = max(1, messages // 8)
    side = 2 * num
    rings = np.arange(num)
    low, high = rings, side - rings
    start, stop = [], []
    for a, b, c, d in (
        (low, low + 1, low, high - 1),
        (low, high - 1, high - 1, high),
        (high - 1, high, low + 1, high),
        (low + 1, high, low, low + 1),
    ):
        start.append(np.stack([a, c], axis=1))
        stop.append(np.stack([b, d], axis=1))
    return _by_hand(np.concatenate(start), np.concatenate(stop), [(0, 1), (1, 2)], (side, side))


CASES: dict[str, Callable[[int], Plan]] = {
    "2 -> 4 ranks, send_recv": _few_ranks("send_recv"),
    "2 -> 4 ranks, broadcast_greedy": _few_ranks("broadcast_greedy"),
    "2 -> 4 ranks, global_all_gather": _few_ranks("global_all_gather"),
    "2 -> 4 ranks, local_all_gather": _few_ranks("local_all_gather"),
    "2 -> 4 ranks, multicast": _few_ranks("multicast"),
    "4 -> 4 ranks, multicast, relays": _relays,
    "2 -> 2 ranks, small boxes": _small_boxes,
    "many ranks, each to each": _many_ranks,
    "many tensors": _many_tensors,
    "explicit regions": _regions,
    "wrong: all boxes overlap": _overlapping,
    "wrong: staged boxes overlap": _staged_overlapping,
    "staged boxes interlock": _spiral,
}


def check_case(name: str, messages: int, repeats: int, reference: str) -> tuple[float, int, int, str]:
    """CPU seconds, number of messages, peak MiB of the process, and the checker's error or ``"valid"``.

    ``reference`` is the folder to import the reference checker from; "" to time :func:`reshard.check_plan`.
    """
    plan = CASES[name](messages)
    check: Callable[[Plan], None] = check_plan
    if reference:
        sys.path.insert(0, reference)
        from tests.support.reference_check import check_plan as check  # type: ignore[no-redef]
    seconds, outcome = math.inf, "valid"
    for _ in range(repeats):
        fresh = dataclasses.replace(plan, tensors=tuple(dataclasses.replace(spec) for spec in plan.tensors))
        begun = time.process_time()
        try:
            check(fresh)
        except PlanError as error:
            outcome = str(error)
        seconds = min(seconds, time.process_time() - begun)
    return seconds, plan.num_messages, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, outcome


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--messages", type=int, nargs="+", default=[50_000], help="approximate numbers of messages (50000)"
    )
    add_number(parser, "--repeats", 3, "repetitions; the fastest one is printed")
    parser.add_argument("--case", action="append", help="run only cases whose name contains this text; may be repeated")
    parser.add_argument("--reference", action="store_true", help="time tests/support/reference_check.py instead")


def run(options: argparse.Namespace) -> None:
    """Print CPU seconds and peak memory of check_plan for plans of several kinds and sizes."""
    reference = str(Path(__file__).parents[2]) if options.reference else ""
    for name, messages in track(list(itertools.product(select(CASES, options.case), options.messages)), "plans"):
        seconds, count, memory, outcome = call_in_new_process(check_case, name, messages, options.repeats, reference)
        print_line(f"{name:34} {count:9,} messages {seconds:9.3f} s {memory:6} MiB  {outcome[:120]}")
