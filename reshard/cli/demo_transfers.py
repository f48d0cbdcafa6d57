"""``reshard demo``: moves real tensors between processes and checks every element."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from reshard.api.call import reshard_async
from reshard.cli.demo_cases import GPU_RANKS, DemoCase, gpu_cases, hard_cases, study_cases
from reshard.cli.progress_bars import print_line, track
from reshard.coordination import all_gather_json
from reshard.cost import NOTABLE_LATENCY, CostReport
from reshard.planner import AUTO, make_plan
from reshard.sharding import AnyLayout, cut_tiles
from reshard.testing.processes import run_processes
from reshard.testing.sharing import check_num_gpus, choose_gpu
from reshard.topology import MESSAGE_SECONDS, Topology

STRATEGIES = (AUTO, "send_recv", "local_all_gather")
REPEATS = 3
_MIB = 2**20

_HEADER = """\
Each case moves one tensor from one mesh of processes to another, three times with each of three strategies:
the default (auto), plain sends, and fetching parts followed by an all-gather. Plans assume that every {devices} ranks
share a host with one link of 10 Gbit/s.

  between, inside  MiB that the plan sends between hosts and inside hosts
  x bound          predicted time on such hosts, divided by the lower bound of any plan
                   (-: the bound is less than the latency of one message; *: over {notable} is latency, which the
                   bound ignores)
  ms               median time until the last rank had its shard; all processes run on this machine, where no link
                   is slow, so this is the cost of the software
  elements         elements compared with their expected values, on all ranks

"""


def run_demo(divisor: int = 4, rows: int = 512) -> int:
    """Run all cases with all strategies and print a row for each; returns 0 if every element was correct."""
    return _run(study_cases(divisor) + hard_cases(rows))


def run_demo_on_gpus(shares_gpus: bool) -> int:
    """Run the cases of :func:`run_demo` on CUDA tensors of four ranks, which share GPUs if ``shares_gpus`` is set."""
    check_num_gpus(GPU_RANKS, shares_gpus)
    return _run(gpu_cases(), functools.partial(choose_gpu, shares_gpus=shares_gpus))


def _run(cases: Sequence[DemoCase], choose: Callable[[int, int], None] | None = None) -> int:
    print(_HEADER.format(devices=cases[0].devices_per_host, notable=f"{100 * NOTABLE_LATENCY:.0f} %"))
    print(_row("case", "from -> to", "strategy", "between", "inside", "x bound", "ms", "elements", "ok"))
    print("-" * 138)
    sys.stdout.flush()
    begun = time.perf_counter()
    num_ranks = max(case.num_ranks for case in cases)
    results = run_processes(_run_rank, num_ranks, cases, choose, timeout_seconds=600.0)
    failed = results[0]
    runs = len(cases) * len(STRATEGIES)
    print("-" * 138)
    print(f"{runs - failed} of {runs} runs moved every element correctly, in {time.perf_counter() - begun:.0f} s.")
    return 1 if failed else 0


def _row(*cells: Any) -> str:
    case, title, strategy, between, inside, over, ms, elements, ok = map(str, cells)
    return f"{case:12} {title:54} {strategy:16} {between:>7} {inside:>7} {over:>7} {ms:>7} {elements:>12}  {ok}"


def _run_rank(rank: int, cases: Sequence[DemoCase], choose: Callable[[int, int], None] | None) -> int:
    device, failed = "cpu", 0
    if choose is not None:
        choose(rank, rank)
        device = "cuda"
    runs = [(case, strategy) for case in cases for strategy in STRATEGIES]
    for case, strategy in track(runs, "runs", show=rank == 0):
        seconds, checked, wrong = _run_case(rank, case, strategy, device)
        results = all_gather_json([seconds, checked, wrong])
        if rank == 0:
            ok = not any(result[2] for result in results)
            failed += not ok
            slowest = sorted(max(result[0][i] for result in results) for i in range(REPEATS))
            print_line(_format_run(case, strategy, 1000 * slowest[REPEATS // 2], sum(r[1] for r in results), ok))
    return failed


def _run_case(rank: int, case: DemoCase, strategy: str, device: str) -> tuple[list[float], int, int]:
    """``(seconds of each repeat, elements compared, elements wrong)`` on this rank."""
    if rank not in case.src.ranks + case.dst.ranks:
        return [0.0] * REPEATS, 0, 0
    topology = _topology(case)
    source, expected = (
        None if shard is None else shard.to(device)
        for shard in (shard_of_positions(layout, rank, case.shape, case.dtype) for layout in (case.src, case.dst))
    )
    before = None if source is None else source.clone()
    seconds, wrong, checked = [], 0, 0
    for _ in range(REPEATS):
        begun = time.perf_counter()
        handle = reshard_async(
            source, case.src, case.dst, shape=case.shape, dtype=case.dtype, strategy=strategy, topology=topology
        )
        out = handle.synchronize()
        seconds.append(time.perf_counter() - begun)
        if expected is not None:
            checked += expected.numel()
            wrong += count_unlike(out, expected)
    if source is not None and before is not None:
        wrong += count_unlike(source, before)
    return seconds, checked, wrong


def _format_run(case: DemoCase, strategy: str, milliseconds: float, checked: int, ok: bool) -> str:
    plan = make_plan(case.src, case.dst, case.shape, case.dtype, strategy=strategy, topology=_topology(case))
    across, inside, _ = plan.bytes_moved()
    sizes = f"{across / _MIB:.1f}", f"{inside / _MIB:.1f}"
    report = CostReport(plan)
    seconds, bound = report.predicted_seconds, report.lower_bound_seconds
    over = f"{seconds / bound:.2f}" if bound > MESSAGE_SECONDS else "-"
    over += "*" * (over != "-" and report.latency_fraction > NOTABLE_LATENCY)
    result = f"{milliseconds:.1f}", f"{checked:,}", "yes" if ok else "NO"
    return _row(case.name, case.title, strategy, *sizes, over, *result)


def _topology(case: DemoCase) -> Topology:
    hosts = tuple(rank // case.devices_per_host for rank in range(case.num_ranks))
    return Topology(hosts, latency_seconds=MESSAGE_SECONDS)


def shard_of_positions(layout: AnyLayout, rank: int, shape: Sequence[int], dtype: str) -> torch.Tensor | None:
    """A rank's shard of a tensor whose elements encode their global position; None outside the layout.

    Each box is computed from its coordinates, so no rank needs the whole tensor.
    """
    if rank not in layout.ranks:
        return None
    shards = cut_tiles(layout, shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    codes = torch.zeros(shards.local_shape(rank), dtype=torch.int64)
    for box, local in shards.boxes_of(rank):
        block = torch.zeros([hi - lo for lo, hi in box], dtype=torch.int64)
        for dim, ((lo, hi), stride) in enumerate(zip(box, strides, strict=True)):
            line = torch.arange(lo, hi) * stride
            block += line.reshape([-1 if d == dim else 1 for d in range(len(shape))])
        codes[(..., *(slice(index, index + hi - lo) for index, (lo, hi) in zip(local, box, strict=True)))] = block
    wanted = getattr(torch, dtype)
    if wanted.itemsize == 1:
        return (codes % 251).to(torch.uint8).view(wanted)
    if wanted.itemsize == 2:
        return (codes % 65521).to(torch.int32).to(torch.int16).view(wanted)
    return codes.to(torch.int32).view(wanted) if wanted.itemsize == 4 else codes.view(wanted)


def count_unlike(a: torch.Tensor, b: torch.Tensor) -> int:
    """Number of elements that differ in any byte; all of them if shapes or dtypes differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel(), 1)
    if not a.numel():
        return 0
    size = a.element_size()
    rows = [x.contiguous().reshape(-1).view(torch.uint8).reshape(-1, size) for x in (a, b)]
    return int((rows[0] != rows[1]).any(dim=1).sum())
