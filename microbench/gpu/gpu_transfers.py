"""Movers and ``torch.distributed`` compared between ranks that share GPUs: the wall time and the time of the host.

The ranks use sockets, so compare methods and not rates. Bars: the host time of ``start`` and ``wait`` is at most three
times that of ``dist.send``, and one to three ranks take at most 1.05 times ``dist.broadcast``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from microbench.harness.table import Table
from reshard import Layout, Mesh, Mover, make_plan
from reshard.testing import run_processes, share_gpus

SIZES_MIB = (1, 64, 512)
TURNS = 7
MAX_RECEIVERS = 3
#: Method -> seconds of all turns: until the data has arrived on all ranks, and of the host in the calls.
Times = dict[str, tuple[list[float], list[float]]]


def measure_all(rank: int, device: str, cases: Sequence[tuple[int, int]]) -> list[Times]:
    """:func:`measure` of each case; empty where the rank takes no part. Its processes are the same."""
    if device == "cuda":
        share_gpus(rank)
    groups = {num: _new_groups(device, num + 1) for num in sorted({num for num, _ in cases})}
    return [measure(rank, device, groups[num], num, mib) if rank <= num else {} for num, mib in cases]


def _new_groups(device: str, num_ranks: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """A group for torch's transfers, and one for Movers and barriers."""
    ranks = list(range(num_ranks))
    backends = ("nccl" if device == "cuda" else "gloo", "gloo")
    return dist.new_group(ranks, backend=backends[0]), dist.new_group(ranks, backend=backends[1])


def measure(
    rank: int, device: str, groups: tuple[dist.ProcessGroup, dist.ProcessGroup], num_receivers: int, mib: int
) -> Times:
    """Seconds of both methods on this rank. The first turn warms up and does not count."""
    group, own = groups
    receivers = Mesh.of(num_receivers, first_rank=1)
    shape = (mib * 2**18,)
    array = torch.full(shape, float(rank), device=device)
    plan = make_plan(Layout(Mesh([0])), Layout(receivers), shape, "float32")

    def send_with_torch() -> None:
        if num_receivers > 1:
            dist.broadcast(array, 0, group=group)
        elif rank == 0:
            dist.send(array, 1, group=group)
        else:
            dist.recv(array, 0, group=group)

    with Mover(plan, group=own, device=device) as mover:

        def send_with_mover() -> None:
            mover.start(array if rank == 0 else None, out=array if rank else None).wait()

        name = "dist.broadcast" if num_receivers > 1 else "dist.send"
        methods: dict[str, Callable[[], None]] = {"Mover": send_with_mover, name: send_with_torch}
        times: Times = {method: ([], []) for method in methods}
        for turn in range(TURNS + 1):
            for method, send in methods.items():
                _synchronize(device)
                dist.barrier(own)
                begun = time.perf_counter()
                send()
                host = time.perf_counter() - begun
                _synchronize(device)
                dist.barrier(own)
                if turn:
                    times[method][0].append(time.perf_counter() - begun)
                    times[method][1].append(host)
    assert rank == 0 or not array.any()
    return times


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script itself")
    parser.add_argument("--mib", type=int, nargs="*", default=SIZES_MIB, help="sizes in MiB")


def run(options: argparse.Namespace) -> None:
    """Print a row per number of receivers, size and method."""
    columns = {"receivers": ">", "MiB": ">4", "method": "<16", "median ms": ">.2f", "ratio": ">6.2f"}
    table = Table(columns | {"host us": ">.0f", "of torch": ">.2f"})
    cases = list(itertools.product((1, MAX_RECEIVERS), options.mib))
    by_rank = run_processes(measure_all, MAX_RECEIVERS + 1, options.device, cases, timeout_seconds=600.0)
    for number, (num_receivers, mib) in enumerate(cases):
        rank_results = [results[number] for results in by_rank if results[number]]
        medians = {
            method: [max(statistics.median(times[method][part]) for times in rank_results) for part in (0, 1)]
            for method in rank_results[0]
        }
        base = list(medians.values())[1]
        for method, (seconds, host) in medians.items():
            table.add(num_receivers, mib, method, 1e3 * seconds, seconds / base[0], 1e6 * host, host / base[1])
