"""Soak test for wrong elements and resource leaks: ``python -m tests.campaigns.soak --seconds 7200``.

Eight processes reshard random tensors between random layouts, with calls and Movers, one or several at a time, and check
every element. In between they create groups of two ranks and use each once: joined groups are closed or dropped, process
groups are destroyed. Each process regularly samples its memory, file descriptors and threads. At the end, the growth of
memory is reported as a Theil-Sen slope, and as the difference between the first and the last tenth of the run.

By default, glibc keeps more and more freed memory when block sizes are random. The command therefore restarts itself with
allocator settings that return large blocks at once, so that resident memory is the memory in use.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh
from reshard.cli.demo_transfers import count_unlike, shard_of_positions
from reshard.cli.progress_bars import show_time
from reshard.planner import AUTO, STRATEGIES
from reshard.testing.processes import run_processes

NUM_RANKS = 8
#: Number of different rank sets. Connections are cached per set of ranks, so the number must be limited.
NUM_SETS = 10
ROUNDS_PER_TURN = 20
GROUPS_PER_TURN = 6
MAX_ELEMENTS = 1_000_000
DTYPES = ("float32", "bfloat16", "int64", "bool", "complex64")
CHOICES = (AUTO, *STRATEGIES)
#: Allowed growth of memory from the first to the last tenth of the run, for allocator caches.
MAX_GROWTH_BYTES = 16 * 2**20
#: glibc maps blocks of at least this size separately and unmaps them when freed. A set threshold does not adapt.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True)
class Sample:
    """Resources of one process at one time: resident bytes, file descriptors and threads."""

    seconds: float
    memory: int
    descriptors: int
    threads: int


def _layout(chance: random.Random, ranks: list[int], ndim: int) -> Layout:
    sizes = [d for d in range(1, len(ranks) + 1) if len(ranks) % d == 0]
    first = chance.choice(sizes)
    spec: list[list[str]] = [[] for _ in range(ndim)]
    for axis in ("x", "y"):
        dim = chance.randint(-1, ndim - 1)
        if dim >= 0:
            spec[dim].append(axis)
    return Layout(Mesh(ranks, {"x": first, "y": len(ranks) // first}), tuple(map(tuple, spec)))


def _sides(chance: random.Random) -> tuple[list[int], list[int]]:
    """Ranks of a source and a destination: either disjoint, or the same set in another order."""
    ranks = chance.sample(range(NUM_RANKS), chance.randint(2, NUM_RANKS))
    if chance.random() < 0.3:
        return ranks, chance.sample(ranks, len(ranks))
    cut = chance.randint(1, len(ranks) - 1)
    return ranks[:cut], ranks[cut:]


def _run_case(chance: random.Random, rank: int, sets: list[tuple[list[int], list[int]]]) -> int:
    """Run one random case; returns the number of wrong elements on this rank."""
    sides = chance.choice(sets)
    ndim = chance.randint(1, 3)
    src, dst = (_layout(chance, chance.sample(side, len(side)), ndim) for side in sides)
    shape = [chance.randint(1, 30) for _ in range(ndim - 1)]
    shape.append(max(1, chance.randint(1, MAX_ELEMENTS) // math.prod(shape)))
    dtype, strategy, kind = chance.choice(DTYPES), chance.choice(CHOICES), chance.choice(("call", "two", "mover"))
    if rank not in (*src.ranks, *dst.ranks):
        return 0
    source, wanted = (shard_of_positions(layout, rank, shape, dtype) for layout in (src, dst))
    options: dict[str, Any] = {"shape": shape, "dtype": dtype, "strategy": strategy, "timeout_seconds": 120}
    if kind == "call":
        outs = [reshard.reshard(source, src, dst, verify=chance.random() < 0.5, **options)]
    elif kind == "two":
        handles = [reshard.reshard_async(source, src, dst, **options) for _ in range(2)]
        outs = [handle.wait() for handle in reversed(handles)]
    else:
        plan = reshard.make_plan(src, dst, shape, dtype, strategy=strategy)
        with reshard.Mover(plan, timeout_seconds=120) as mover:
            outs = [mover(source) for _ in range(3)]
    return 0 if wanted is None else sum(count_unlike(out, wanted) for out in outs)


def _use_group(chance: random.Random, rank: int, name: str, store: dist.Store) -> int:
    """Create a group of two ranks, reshard in it and end it; returns the number of wrong elements on this rank."""
    pair = sorted(chance.sample(range(NUM_RANKS), 2))
    kind = chance.choice(("closed", "dropped", "destroyed"))
    made = dist.new_group(pair) if kind == "destroyed" else None  # a collective call of the world group
    if rank not in pair:
        return 0
    own = pair.index(rank)
    group = reshard.join(dist.PrefixStore(name, store), own, 2) if made is None else made
    both = Mesh([0, 1])
    src, dst = Layout(both, "S0 R"), Layout(both, "R S0")
    source, wanted = (shard_of_positions(layout, own, (64, 64), "float32") for layout in (src, dst))
    wrong = count_unlike(reshard.reshard(source, src, dst, group=group, timeout_seconds=120), wanted)
    if kind == "closed":
        reshard.close_group(group)
    elif kind == "destroyed":
        dist.destroy_process_group(made)
    return wrong


def _sample(begun: float) -> Sample:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        time.monotonic() - begun,
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(list(Path("/proc/self/fd").iterdir())),
        len(list(Path("/proc/self/task").iterdir())),
    )


def soak(rank: int, seconds: float, seed: int, num_groups: int) -> tuple[int, int, list[Sample]]:
    """Run the soak test on one rank; returns the number of rounds, of wrong elements, and the samples."""
    chance = random.Random(seed)
    sets = [_sides(chance) for _ in range(NUM_SETS)]
    begun, rounds, wrong = time.monotonic(), 0, 0
    samples: list[Sample] = []
    is_running, store = torch.ones(1), dist.distributed_c10d._get_default_store()
    with show_time(seconds, show=rank == 0) as tick:
        while is_running.item():
            for _ in range(ROUNDS_PER_TURN):
                state = chance.random()  # a new generator per case: ranks may draw different numbers of values
                wrong += _run_case(random.Random(f"{seed} {rounds} {state}"), rank, sets)
                rounds += 1
            for number in range(num_groups):
                name = f"group {len(samples)} {number}"
                wrong += _use_group(random.Random(f"{seed} {name}"), rank, name, store)
            samples.append(_sample(begun))
            tick()
            if rank == 0:
                is_running[0] = float(time.monotonic() - begun < seconds)
            dist.broadcast(is_running, 0)
    return rounds, wrong, samples


def growth(samples: list[Sample]) -> tuple[float, float]:
    """Growth of memory: Theil-Sen slope in bytes per hour, and last tenth minus first tenth in bytes."""
    kept = samples[len(samples) // 10 :]  # skips the warm-up of caches and connections
    step = max(1, len(kept) // 200)
    few = kept[::step]
    slopes = [(b.memory - a.memory) / (b.seconds - a.seconds) for i, a in enumerate(few) for b in few[i + 1 :]]
    tenth = max(1, len(kept) // 10)
    ends = [statistics.median(item.memory for item in part) for part in (kept[:tenth], kept[-tenth:])]
    return 3600 * statistics.median(slopes or [0.0]), ends[1] - ends[0]


def main() -> int:
    """Print a table of resources per rank; returns 1 if an element was wrong or a resource leaked."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.soak",
        description=__doc__,
        epilog="example: python -m tests.campaigns.soak --seconds 600 --groups 2",
    )
    parser.add_argument("--seconds", type=float, default=7200.0, help="duration (7200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases (0)")
    parser.add_argument(
        "--groups", type=int, default=GROUPS_PER_TURN, help=f"groups created per {ROUNDS_PER_TURN} rounds (6)"
    )
    options = parser.parse_args()
    if not ALLOCATOR.keys() <= os.environ.keys():
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.campaigns.soak", *sys.argv[1:]], {**ALLOCATOR, **os.environ}
        )
    found = run_processes(
        soak, NUM_RANKS, options.seconds, options.seed, options.groups, timeout_seconds=options.seconds + 600
    )
    bad = False
    print("| rank | MiB at the end | MiB/h | last tenth - first tenth, MiB | descriptors, first and last | threads |")
    print("|---|---|---|---|---|---|")
    for rank, (_, wrong, samples) in enumerate(found):
        slope, more = growth(samples)
        settled = samples[len(samples) // 10]
        last = samples[-1]
        bad |= wrong > 0 or more > MAX_GROWTH_BYTES
        bad |= last.descriptors > settled.descriptors + 2 or last.threads > settled.threads + 1
        print(
            f"| {rank} | {last.memory / 2**20:.0f} | {slope / 2**20:+.2f} | {more / 2**20:+.1f} "
            f"| {settled.descriptors}, {last.descriptors} | {settled.threads}, {last.threads} |"
        )
    rounds, wrong = found[0][0], sum(item[1] for item in found)
    groups = options.groups * len(found[0][2])
    print(f"{rounds} rounds and {groups} groups in {found[0][2][-1].seconds:.0f} s, {wrong} elements wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
