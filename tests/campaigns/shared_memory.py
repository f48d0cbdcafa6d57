"""Fail calls that take memory for ranks of one host to share: ``python -m tests.campaigns.shared_memory``.

Linux may refuse any memfd_create, ftruncate, posix_fallocate, mmap and madvise for shared memory, for example where it
commits no more memory than it has. A library that the process loads first refuses the n-th of these calls on one rank
or on all, or all from the n-th on. A trial plans once per host, moves large messages through rings, and runs collectives
of a grid. Every rank must end with right data or an error of this package; no process may die.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh, Topology
from reshard.api.preparation import plan_per_host
from reshard.parallel.grid.grid_axis import Axis
from reshard.testing import run_processes

NUM_RANKS, TIMEOUT_SECONDS = 3, 15.0
ROWS, COLUMNS = Layout(Mesh.of("3"), "S0 R"), Layout(Mesh.of("3"), "R S0")
SHAPE = (768, 1536)
#: Who fails, and up to which call; see :func:`fail_calls`.
WHO = ("rank 0", "rank 1", "all ranks, and all later calls")


def _move(rank: int, group: Any) -> bool:
    whole = torch.arange(float(SHAPE[0] * SHAPE[1])).view(SHAPE)
    options = {
        "shape": SHAPE,
        "group": group,
        "topology": Topology((0,) * NUM_RANKS),
        "timeout_seconds": TIMEOUT_SECONDS,
    }
    out = reshard.reshard(whole.tensor_split(NUM_RANKS)[rank], ROWS, COLUMNS, **options)
    return torch.equal(out, whole.tensor_split(NUM_RANKS, 1)[rank])


def _gather(rank: int, axis: Axis, numel: int) -> bool:
    parts = [torch.full((numel,), float(each)) for each in range(NUM_RANKS)]
    return torch.equal(axis.all_gather(parts[rank], [numel] * NUM_RANKS).wait().view(NUM_RANKS, -1), torch.stack(parts))


def _outcome(call: Any) -> str:
    try:
        return "right" if call() else "wrong"
    except reshard.ReshardError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"


def _make_axis(rank: int) -> Axis:
    axis = Axis("row", dist.new_group(range(NUM_RANKS)), list(range(NUM_RANKS)), rank)
    axis.split_by_host([0] * NUM_RANKS)
    return axis


def meet_refusals(rank: int, numbers: range) -> list[tuple[str, list[str], int]]:
    """The name of each trial, the outcomes of its calls on this rank, and how many calls could be refused."""
    torch.set_num_threads(1)
    plan_per_host.SHARED_FROM_SECONDS = 0.0
    refuse = ctypes.CDLL(None).fail_shared_memory
    found = []
    for number in numbers:
        for who in WHO:
            group = dist.new_group(range(NUM_RANKS))
            dist.barrier()
            if who in (f"rank {rank}", WHO[-1]):
                refuse(number, 10**9 if who == WHO[-1] else number)
            else:
                refuse(0, -1)
            outcomes = [_outcome(lambda group=group: _move(rank, group)) for _ in range(2)]
            axis: list[Axis] = []
            outcomes.append(_outcome(lambda axis=axis: not axis.append(_make_axis(rank))))
            for numel in (10, 3000, 100_000, 90_000):
                outcomes += [_outcome(lambda numel=numel, one=one: _gather(rank, one, numel)) for one in axis]
            num_calls = refuse(0, -1)
            outcomes.append(_outcome(lambda group=group: _move(rank, group)))
            found.append((f"call {number} of {who}", outcomes, num_calls))
            dist.barrier()
            with contextlib.suppress(reshard.ReshardError):
                reshard.close_group(group)
            del axis
    return found


def run_campaign(last: int) -> tuple[Counter[str], list[str], int]:
    """Outcomes by class, what is wrong, and the largest number of calls that a trial could have refused on a rank."""
    rows = run_processes(meet_refusals, NUM_RANKS, range(1, last + 1), timeout_seconds=1800.0)
    ends: Counter[str] = Counter()
    wrong = []
    for trial in zip(*rows, strict=True):
        for rank, (name, outcomes, _) in enumerate(trial):
            ends.update(outcome.partition(":")[0] for outcome in outcomes)
            wrong += [
                f"{name}: rank {rank}, step {step}: {outcome[:300]}"
                for step, outcome in enumerate(outcomes)
                if outcome == "wrong" or outcome.startswith("raw ")
            ]
    return ends, wrong, max(num_calls for row in rows for *_, num_calls in row)


def main() -> int:
    """Print what is wrong. Returns 0 if nothing is."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.shared_memory", description=__doc__)
    parser.add_argument(
        "--last", type=int, default=40, help="refuse the first call to this one, one in each trial (40)"
    )
    options = parser.parse_args()
    if not hasattr(ctypes.CDLL(None), "fail_shared_memory"):
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "refusals.so"
            source = Path(__file__).with_name("shared_memory.c")
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
            again = [sys.executable, "-m", "tests.campaigns.shared_memory", "--last", str(options.last)]
            return subprocess.run(again, env=os.environ | {"LD_PRELOAD": str(library)}, check=False).returncode
    begun = time.monotonic()
    ends, wrong, num_calls = run_campaign(options.last)
    print(
        f"{len(WHO) * options.last} trials of at most {num_calls} calls in {time.monotonic() - begun:.0f} s, "
        f"{len(wrong)} wrong; {dict(ends)}"
    )
    for text in wrong:
        print(f"  {text}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
