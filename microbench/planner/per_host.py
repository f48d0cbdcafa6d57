"""Planning on the eight ranks of a host: each of them by itself, or one for all.

The plans are those of ``microbench large``. Only the ranks of one host run, although the plans have more ranks. Each
rank also hashes the plan and builds its program, as calls do. The benchmark prints sums over the ranks: CPU seconds;
the memory that they hold afterwards, shared pages counted once; and their peaks, with the pages of the file counted
once.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from microbench.harness.case_options import add_number
from microbench.planner.large import inputs
from reshard.api.preparation import plan_per_host
from reshard.coordination import CallGroup, find_call_group, find_group, plan_arguments
from reshard.plan import DEFAULT_STAGING_BYTES, Plan
from reshard.planner import plan_tensors
from reshard.runtime import build_program
from reshard.sharding import TensorSpec
from reshard.testing.processes import run_processes
from reshard.topology import Topology

_RANKS = 8
_CASES = ("300 tensors, 128 to 128", "300 tensors, 512 to 512", "300 tensors, 1024 to 1024", "tp-columns/1024")


def measure(rank: int, case: str, shares: bool) -> dict[str, Any]:
    """Plan a case on a rank of the host. For ``case`` see :func:`microbench.planner.large.inputs`."""
    plan_per_host.SHARED_FROM_SECONDS = 0.0 if shares else float("inf")
    call_group = find_call_group(find_group(None), tuple(range(_RANKS)))
    with _planning(call_group, *inputs("swap/16")) as take_plan:  # loads modules, and connects the ranks
        build_program(take_plan(), rank)
        dist.barrier()
    tensors, topology = inputs(case)
    gc.collect()  # which copies pages of the parent process
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    held, resident, begun = _kib("smaps_rollup", "Pss"), _kib("status", "VmRSS"), time.process_time()
    with _planning(call_group, tensors, topology) as take_plan:
        plan = take_plan()
        planned = time.process_time() - begun
        arguments, program = plan_arguments(plan), build_program(plan, rank)
        dist.barrier()
    cpu, peak = time.process_time() - begun, _kib("status", "VmHWM") - resident
    if rank:
        peak -= _kib("status", "RssShmem")  # part of the peak of rank 0
    gc.collect()
    dist.barrier()
    held = _kib("smaps_rollup", "Pss") - held
    dist.barrier()
    del program
    return {"planned": planned, "cpu": cpu, "held": held, "peak": peak, "arguments": arguments}


def _planning(
    call_group: CallGroup, tensors: Sequence[TensorSpec], topology: Topology
) -> AbstractContextManager[Callable[[], Plan]]:
    make = functools.partial(plan_tensors, topology=topology)
    return plan_per_host.plan_per_host(
        call_group, make, tensors, topology=topology, staging_bytes=DEFAULT_STAGING_BYTES, timeout_seconds=600
    )


def _kib(file: str, name: str) -> int:
    """A line of a file of this process in /proc."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--cases`` and ``--repeats``."""
    parser.add_argument("--cases", nargs="*", default=list(_CASES), help="see microbench large (whole models)")
    add_number(parser, "--repeats", 1, "runs of each kind, in turns; the median counts")


def run(options: argparse.Namespace) -> None:
    """Print two rows for each case."""
    print(f"{'':34} {'':10} plan, CPU s  all, CPU s   held MiB   peak MiB")
    for case in options.cases:
        sums: dict[bool, list[list[float]]] = {False: [], True: []}
        hashes = set()
        for _ in range(options.repeats):
            for shares in (False, True):
                results = run_processes(measure, _RANKS, case, shares, timeout_seconds=900)
                sums[shares].append(
                    [sum(result[name] for result in results) for name in ("planned", "cpu", "held", "peak")]
                )
                hashes |= {repr(result["arguments"]) for result in results}
        alone, once = (np.median(sums[shares], axis=0) for shares in (False, True))
        for title, row in (("each rank", alone), ("once", once)):
            print(f"{case:34} {title:10} {row[0]:11.2f} {row[1]:11.2f} {row[2] / 1024:10.0f} {row[3] / 1024:10.0f}")
        print(f"{'':34} {'ratio':10} {'':2}".rstrip(), *(f"{b / a:10.2f}" for a, b in zip(alone, once, strict=True)))
        if len(hashes) > 1:
            raise SystemExit(f"{case}: the plans differ")
