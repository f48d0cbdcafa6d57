"""Random encoded transfers: ``python -m tests.campaigns.compression --runs 1000``. In each tenth run a rank is killed.

A run draws two layouts, a shape, dtypes, a codec and a strategy from its seed. Every destination rank compares its
shard, bit for bit, with what the codec makes of the whole tensor in one piece; so all replicas are equal, whatever the
cuts, routes and recoveries. After a kill, all surviving ranks must hold their shards, or raise one RankLostError.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

import reshard
from reshard import Layout, Mesh, Topology
from reshard.api.arrays.casts import wire_dtype
from reshard.cli.progress_bars import print_line, track
from reshard.codecs import BLOCK_CODECS, parse_codec
from reshard.errors import RankLostError
from reshard.planner import STRATEGIES
from reshard.runtime.transport import GlooTransport
from reshard.sharding import compress_tensor
from reshard.testing.processes import LaunchError, run_processes
from tests.support.tensors import same_bytes, take_shard

NUM_RANKS = 8
#: Runs of one launch of processes.
BATCH = 50
SPECS = ("R R", "S0 R", "R S0", "S01 R", "R S01", "S0 S1", "S1 S0", "R S10", "S10 R", "R S1", "S1 R")
SIZES = (32, 64, 96, 128, 200, 256, 384, 500, 512)
DTYPES = ("float32", "bfloat16", "float16")
CHOICES = (None, *STRATEGIES)


@dataclass(frozen=True)
class Run:
    """The arguments of one transfer. ``victim`` is killed at its message number ``moment``; None: nobody is."""

    seed: int
    src: Layout
    dst: Layout
    shape: tuple[int, int]
    src_dtype: str
    dst_dtype: str
    codec: str
    options: dict[str, Any]
    victim: int | None = None
    moment: int = 0


def make_run(seed: int, kills: bool) -> Run:
    """The run of a seed."""
    chance = random.Random(seed)
    layouts = []
    for _ in range(2):
        rows, columns = chance.choice(((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (2, 3), (4, 2), (1, 4)))
        ranks = chance.sample(range(NUM_RANKS), rows * columns)
        layouts.append(Layout(Mesh(ranks, {"a": rows, "b": columns}), chance.choice(SPECS)))
    hosts = sorted(chance.choice((0, 0, 1, 2, 3)) for _ in range(NUM_RANKS))
    options = {
        "strategy": chance.choice(CHOICES),
        "topology": Topology(tuple(hosts)),
        "staging_bytes": chance.choice((2**16, 2**18, 2**26)),
        "verify": chance.random() < 0.3,
    }
    return Run(
        seed,
        *layouts,
        (chance.choice(SIZES), chance.choice(SIZES)),
        chance.choice(DTYPES),
        chance.choice(DTYPES),
        chance.choice(BLOCK_CODECS).replace("x128", chance.choice(("x128", "x128", "x64", "x32"))),
        options,
        chance.choice(sorted({*layouts[0].ranks, *layouts[1].ranks})) if kills else None,
        chance.randint(1, 4),
    )


def expected(run: Run) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The source tensor, the values that must arrive, and whether the plan encodes the tensor."""
    generator = torch.Generator().manual_seed(run.seed)
    whole = torch.randn(run.shape, generator=generator) * 10 ** torch.randn(run.shape[0], 1, generator=generator)
    whole = whole.to(getattr(torch, run.src_dtype))
    target = getattr(torch, run.dst_dtype)
    spec = reshard.TensorSpec(run.shape, run.src_dtype, run.src, run.dst)
    encoded = compress_tensor(spec, parse_codec(run.codec), wire_dtype(run.src_dtype, run.dst_dtype))
    if encoded.codec is None:
        return whole, whole.to(target), False
    data = torch.empty(encoded.codec.nbytes(run.shape, encoded.ndim - 1), dtype=torch.uint8)
    decoded = torch.empty(run.shape, dtype=target)
    encoded.codec.encode(whole, data, encoded.ndim - 1)
    encoded.codec.decode(data, decoded, encoded.ndim - 1)
    return whole, decoded, True


def take_part(rank: int, runs: list[Run]) -> list[str]:
    """This rank's part of some runs: ``"encoded"``, ``"raw"``, ``"lost: ..."``, ``"wrong"``, or ``""`` outside the run."""
    part = []
    for run in runs:
        if rank not in run.src.ranks + run.dst.ranks:
            part.append("")
            continue
        whole, wanted, is_encoded = expected(run)
        arguments = take_shard(run.src, rank, whole), run.src, run.dst
        options = run.options | {"shape": run.shape, "dtype": run.src_dtype, "dst_dtype": run.dst_dtype}
        options |= {"compression": run.codec, "timeout_seconds": 20}
        if run.victim is not None:
            options["on_loss"] = "recover"
            if rank == run.victim:
                _die_at(run.moment)
        try:
            out = reshard.reshard(*arguments, **options)
        except RankLostError as error:
            part.append(f"lost: {error}")
            continue
        shard = take_shard(run.dst, rank, wanted)
        is_right = out is None if shard is None else same_bytes(out, shard)
        part.append(("encoded" if is_encoded else "raw") if is_right else "wrong")
    return part


def _die_at(moment: int) -> None:
    """Make this process kill itself at its send or receive number ``moment``."""
    count = [0]

    def dying(plain: Any) -> Any:
        def operation(self: Any, *args: Any) -> Any:
            count[0] += 1
            if count[0] == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(self, *args)

        return operation

    GlooTransport.send, GlooTransport.recv = dying(GlooTransport.send), dying(GlooTransport.recv)  # type: ignore[method-assign]


def play(runs: list[Run]) -> list[list[str]]:
    """The outcomes of some runs, by run and rank; those of killed ranks are left out.

    Raises:
        LaunchError: a rank failed that was not killed.
    """
    try:
        results = dict(enumerate(run_processes(take_part, NUM_RANKS, runs, timeout_seconds=300, grace_seconds=60)))
    except LaunchError as error:
        if {failure.rank for failure in error.failures} != {runs[0].victim}:
            raise
        results = error.results
    return [[found[i] for _, found in sorted(results.items()) if found[i]] for i in range(len(runs))]


def main() -> int:
    """Print the outcomes; returns 1 if one was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.compression",
        description=__doc__,
        epilog="example: python -m tests.campaigns.compression --runs 200 --seed 5000",
    )
    parser.add_argument("--runs", type=int, default=1000, help="number of runs (1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run (0)")
    options = parser.parse_args()
    runs = [make_run(options.seed + i, kills=i % 10 == 9) for i in range(options.runs)]
    whole = [run for run in runs if run.victim is None]
    batches = [whole[i : i + BATCH] for i in range(0, len(whole), BATCH)] + [
        [run] for run in runs if run.victim is not None
    ]
    counts: Counter[str] = Counter()
    begun = time.monotonic()
    for batch in track(batches, "launches"):
        try:
            outcomes = play(batch)
        except LaunchError as error:
            counts["failed"] += 1
            print_line(f"seeds {batch[0].seed} to {batch[-1].seed}: {error}", sys.stderr)
            continue
        for run, found in zip(batch, outcomes, strict=True):
            kinds = set(found)
            label = (
                "lost" if len(kinds) == 1 and found[0].startswith("lost: ") else "/".join(sorted(kinds)) or "no rank"
            )
            is_right = label in ("encoded", "raw") or (label == "lost" and run.victim is not None)
            counts[f"{label}{' after a kill' if run.victim is not None else ''}" if is_right else "wrong"] += 1
            if not is_right:
                print_line(f"{run}\n    {found}", sys.stderr)
    texts = ", ".join(f"{count} {label}" for label, count in sorted(counts.items()))
    print(
        f"{options.runs} runs in {time.monotonic() - begun:.0f} s: {texts}; {counts['wrong'] + counts['failed']} wrong"
    )
    return 1 if counts["wrong"] or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
