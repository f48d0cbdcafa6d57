"""Planted faults: ``python -m microbench.faults --runs 2000``. Every run ends in correct shards or one clear error.

Each run is a random reshard between real processes with one fault in it, chosen by a seed: a rank that is killed,
stopped or late, a byte that changes on the way, a call that does not fit the others'. What must follow is written down
per fault, and checked on every rank that survives: destination shards element by element, the class and text of errors,
how long they took, and that no source changed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import reshard
from reshard import Layout, Mesh, Topology
from reshard.demo import count_unlike, shard_of_positions
from reshard.launch import LaunchError, run_processes
from reshard.staging import flat_bytes
from reshard.transport import GlooTransport

TIMEOUT_SECONDS = 2.0
#: How long after the death of a rank, or after the time-out, survivors may take.
DEATH_SECONDS, SILENCE_SECONDS = 5.0, 2.0
#: For what a loaded machine adds to any of them, unless more is given.
SLACK_SECONDS = 2.0
MOST_ELEMENTS = 2_000_000
STRATEGIES = ("auto", "multicast", "send_recv", "local_all_gather", "broadcast_greedy")
DTYPES = ("float32", "bfloat16", "int64", "bool", "complex64")

#: Of each fault what survivors get: "right" shards, or an error, alike on all of them or with the victim's rank in it.
EXPECTED = {
    "none": "right",
    "late": "right",
    "slow in flight": "right",
    "killed before": "names the victim",
    "killed in flight": "right or names the victim",
    "killed behind": "right",
    "stopped in flight": "right or a time-out",
    "never calls": "names the victim",
    "byte flipped": "all alike",
    "raises in between": "names the victim",
    "other shape": "all alike",
    "other layout": "all alike",
    "other strategy": "all alike",
    "other dtype": "all alike",
    "wrong shard": "all alike",
    "no shard": "all alike",
}
#: Faults with which the victim does not come back.
GONE = {"killed before", "killed in flight", "killed behind", "stopped in flight"}


@dataclass(frozen=True)
class Run:
    """One reshard and what goes wrong in it.

    Attributes:
        moment: at which of the victim's operations a fault in flight strikes.
    """

    seed: int
    fault: str
    shape: tuple[int, ...]
    dtype: str
    src: Layout
    dst: Layout
    topology: Topology | None
    strategy: str
    victim: int
    moment: int
    verify: bool
    num_ranks: int
    timeout_seconds: float = TIMEOUT_SECONDS
    slack_seconds: float = SLACK_SECONDS

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.fault}, {self.dtype} {list(self.shape)} from {self.src} to {self.dst}, "
            f"{self.strategy}{', verify' if self.verify else ''}, victim {self.victim} at {self.moment}"
        )


def make_run(seed: int, faults: Iterable[str] = tuple(EXPECTED)) -> Run:
    """The run of a seed."""
    chance = random.Random(seed)
    fault = sorted(faults)[seed % len(tuple(faults))]
    num_ranks = chance.randint(2, 8)
    ranks = chance.sample(range(num_ranks), num_ranks)
    cut = chance.randint(1, num_ranks - 1)
    sides = (ranks[:cut], ranks[cut:]) if chance.random() < 0.7 else (ranks, ranks[::-1])
    ndim = chance.randint(1, 3)
    src, dst = (_layout(chance, side, ndim) for side in sides)
    shape = [chance.randint(1, 40) for _ in range(ndim - 1)]
    shape.append(max(1, chance.randint(1000, MOST_ELEMENTS) // math.prod(shape)))
    hosts = sorted(chance.randrange(3) for _ in range(num_ranks))
    candidates = (
        sorted(src.ranks) if fault in ("wrong shard", "no shard", "other dtype") else sorted({*src.ranks, *dst.ranks})
    )
    return Run(
        seed=seed,
        fault=fault,
        shape=tuple(shape),
        dtype=chance.choice(DTYPES),
        src=src,
        dst=dst,
        topology=Topology(tuple(hosts)) if chance.random() < 0.5 else None,
        strategy=chance.choice(STRATEGIES),
        victim=chance.choice(candidates),
        moment=chance.randint(1, 6),
        verify=fault == "byte flipped" or chance.random() < 0.3,
        num_ranks=num_ranks,
    )


def _layout(chance: random.Random, ranks: list[int], ndim: int) -> Layout:
    size = len(ranks)
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    a = chance.choice(divisors)
    mesh = Mesh(ranks, {"x": a, "y": size // a})
    spec: list[list[str]] = [[] for _ in range(ndim)]
    for axis in ("x", "y"):
        dim = chance.randint(-1, ndim - 1)
        if dim >= 0:
            spec[dim].append(axis)
    return Layout(mesh, tuple(tuple(steps) for steps in spec))


def _arguments(run: Run, rank: int, source: Any) -> dict[str, Any]:
    """What a rank passes; the victim of a disagreement passes something else."""
    given: dict[str, Any] = {
        "tensor": source,
        "src_mesh": run.src,
        "dst_mesh": run.dst,
        "shape": run.shape,
        "dtype": run.dtype,
        "strategy": run.strategy,
        "topology": run.topology,
        "verify": run.verify,
        "timeout_seconds": run.timeout_seconds,
    }
    if rank != run.victim:
        return given
    if run.fault == "other shape":
        given["shape"] = (*run.shape[:-1], run.shape[-1] + 1)
    elif run.fault == "other layout":
        turned = Mesh(run.dst.ranks, {"x": run.dst.mesh.size})
        same = str(Layout(turned, (("x",),))) == str(run.dst)
        given["dst_mesh"] = Layout(turned) if same else Layout(turned, (("x",),))
    elif run.fault == "other strategy":
        given["strategy"] = STRATEGIES[(STRATEGIES.index(run.strategy) + 1) % len(STRATEGIES)]
    elif run.fault == "other dtype":
        given["dtype"] = "float64"
    elif run.fault == "wrong shard":
        given["tensor"] = torch.cat([source, source])
    elif run.fault == "no shard":
        given["tensor"] = None
    return given


def _strike(run: Run) -> None:
    """As the victim: have the fault strike at an operation of the transfer."""

    def act() -> None:
        if run.fault == "killed in flight":
            os.kill(os.getpid(), signal.SIGKILL)
        elif run.fault == "stopped in flight":
            stopped = os.getpid()
            if os.fork() == 0:  # ends it once the others must have given up, as the launcher would wait for it
                time.sleep(run.timeout_seconds + SILENCE_SECONDS + run.slack_seconds)
                os.kill(stopped, signal.SIGKILL)
                os._exit(0)
            os.kill(stopped, signal.SIGSTOP)
        elif run.fault == "slow in flight":
            time.sleep(run.timeout_seconds / 4)

    count, sends = [0], [0]
    plain_send, plain_recv = GlooTransport.send, GlooTransport.recv

    def send(self: GlooTransport, buffer: torch.Tensor, rank: int, tag: int) -> Any:
        count[0] += 1
        if count[0] == run.moment:
            act()
        sends[0] += 1
        if run.fault == "byte flipped" and sends[0] == 1:
            buffer = buffer.clone()
            buffer[buffer.numel() // 2] ^= 1
        return plain_send(self, buffer, rank, tag)

    def recv(self: GlooTransport, buffer: torch.Tensor, rank: int, tag: int) -> Any:
        count[0] += 1
        if count[0] == run.moment:
            act()
        return plain_recv(self, buffer, rank, tag)

    GlooTransport.send, GlooTransport.recv = send, recv  # type: ignore[method-assign]


def _bytes(array: torch.Tensor) -> torch.Tensor:
    return flat_bytes(array.contiguous())


def _take_part(rank: int, run: Run) -> dict[str, Any] | None:
    """What one rank does, and what became of it."""
    if rank not in (*run.src.ranks, *run.dst.ranks):
        return None
    source, wanted = (shard_of_positions(layout, rank, run.shape, run.dtype) for layout in (run.src, run.dst))
    kept = None if source is None else _bytes(source).clone()  # a clone of bools would make their bytes 0 and 1
    first = reshard.reshard(source, run.src, run.dst, shape=run.shape, dtype=run.dtype)  # all have met
    assert wanted is None or not count_unlike(first, wanted)
    is_victim = rank == run.victim
    if is_victim:
        if run.fault == "killed before":
            os.kill(os.getpid(), signal.SIGKILL)
        if run.fault in ("never calls", "raises in between"):
            if run.fault == "never calls":
                time.sleep(run.timeout_seconds + SILENCE_SECONDS)
                return {"kind": "stayed away"}
            raise RuntimeError("planted")
        if run.fault == "late":
            time.sleep(run.timeout_seconds / 4)
        _strike(run)
    begun = time.monotonic()
    try:
        out = reshard.reshard(**_arguments(run, rank, source))
        said = {"kind": "right", "unlike": 0 if wanted is None else count_unlike(out, wanted)}
    except reshard.ReshardError as error:
        said = {"kind": "error", "name": type(error).__name__, "text": str(error)}
    said["seconds"] = time.monotonic() - begun
    said["source_changed"] = 0 if source is None or kept is None else count_unlike(_bytes(source), kept)
    if is_victim and run.fault == "killed behind":
        os.kill(os.getpid(), signal.SIGKILL)
    return said


def play(run: Run) -> list[str]:
    """Do one run; what was not as it must be, in words."""
    begun = time.monotonic()
    try:
        results = dict(enumerate(run_processes(_take_part, run.num_ranks, run, timeout_seconds=90, grace_seconds=40)))
    except LaunchError as error:
        results = dict(error.results)
        wrong = [
            f"rank {failure.rank} {failure.text.strip().splitlines()[-1]}"
            for failure in error.failures
            if failure.rank != run.victim or run.fault not in {*GONE, "raises in between"}
        ]
        if wrong:
            return wrong
    said = {rank: result for rank, result in results.items() if result is not None and rank != run.victim}
    if run.victim in results and run.fault not in GONE and results[run.victim] is not None:
        said[run.victim] = results[run.victim]
    return check(run, said, time.monotonic() - begun)


def check(run: Run, said: dict[int, dict[str, Any]], seconds: float) -> list[str]:
    """What is wrong with what the ranks say of a run."""
    wrong = []
    expected = EXPECTED[run.fault]
    others = {rank: one for rank, one in said.items() if one["kind"] != "stayed away"}
    for rank, one in others.items():
        if one["source_changed"]:
            wrong.append(f"rank {rank}: {one['source_changed']} elements of its source changed")
        if one.get("unlike"):
            wrong.append(f"rank {rank}: {one['unlike']} elements are wrong and nothing was said")
        limit = run.timeout_seconds + SILENCE_SECONDS if "killed" not in run.fault else DEATH_SECONDS
        if one["seconds"] > limit + run.slack_seconds:
            wrong.append(f"rank {rank} took {one['seconds']:.1f} s")
    errors = {rank: (one["name"], one["text"]) for rank, one in others.items() if one["kind"] == "error"}
    moves = _moves(run)
    if expected == "right or a time-out":
        wrong += [
            f"rank {rank} got no time-out: {name}: {text}"
            for rank, (name, text) in errors.items()
            if name != "TransferTimeoutError"
        ]
    if expected == "right" and errors:
        wrong += [f"rank {rank}: {name}: {text}" for rank, (name, text) in errors.items()]
    if expected == "all alike" and (moves or run.fault != "byte flipped"):
        if len(errors) < len(others):
            wrong.append(f"ranks {sorted(set(others) - set(errors))} got no error")
        if len(set(errors.values())) > 1:
            wrong.append(f"ranks do not say the same: {sorted(set(errors.values()))}")
    if expected == "names the victim" and len(errors) < len(others):
        wrong.append(f"ranks {sorted(set(others) - set(errors))} got no error")
    if "names the victim" in expected:
        wrong += [
            f"rank {rank} does not name rank {run.victim}: {name}: {text}"
            for rank, (name, text) in errors.items()
            if f"rank {run.victim}" not in text and f"ranks {run.victim}" not in text
        ]
    return wrong


def _moves(run: Run) -> bool:
    """Whether the victim sends anything, so that a byte of it can change."""
    plan = reshard.make_plan(
        run.src,
        run.dst,
        run.shape,
        run.dtype,
        strategy=run.strategy,
        topology=run.topology or Topology((0,) * run.num_ranks),
    )
    transfers = plan.transfers
    return bool(((transfers.sender == run.victim) & (transfers.receiver != run.victim)).any())


def format_table(counts: dict[str, Counter[str]]) -> str:
    """One line per fault."""
    lines = ["| fault | what survivors get | runs | as it must be |", "|---|---|---|---|"]
    for fault, expected in EXPECTED.items():
        if fault in counts:
            lines.append(f"| {fault} | {expected} | {counts[fault].total()} | {counts[fault]['good']} |")
    return "\n".join(lines)


def main() -> int:
    """Print a table; 1 if any run was not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m microbench.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="how many (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (0)")
    parser.add_argument("--fault", action="append", choices=sorted(EXPECTED), help="only this one, may be repeated")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, help="of each call, in seconds (2)")
    parser.add_argument("--slack", type=float, default=SLACK_SECONDS, help="seconds that a loaded machine may add (2)")
    parser.add_argument("--out", type=Path, help="write what went wrong as JSON lines")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    failures = []
    begun = time.monotonic()
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    for seed in range(options.seed, options.seed + options.runs):
        run = make_run(seed, options.fault or tuple(EXPECTED))
        run = replace(run, timeout_seconds=options.timeout, slack_seconds=options.slack)
        wrong = play(run)
        counts.setdefault(run.fault, Counter())["bad" if wrong else "good"] += 1
        if wrong:
            failures.append({"run": str(run), "wrong": wrong})
            say(f"{run}\n    " + "\n    ".join(wrong))
    print(format_table(counts))
    print(f"{options.runs} runs in {time.monotonic() - begun:.0f} s, {len(failures)} not as they must be")
    if options.out:
        options.out.write_text("".join(json.dumps(failure) + "\n" for failure in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
