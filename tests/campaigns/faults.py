"""Planted faults: ``python -m tests.campaigns.faults --runs 2000``. Every run ends in correct shards or one clear error.

Each run is a random reshard between real processes with one fault in it, chosen by a seed: a rank that is killed,
stopped or late, a byte that changes on the way, a call that does not fit the others'. What must follow is written down
per fault, and checked on every rank that survives: destination shards element by element, the class and text of errors,
how long they took, and that no source changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from microbench.emulation.cluster import Cluster
from microbench.emulation.namespaces import why_unsupported
from reshard.testing.processes import LaunchError, run_processes
from tests.campaigns.planted import (
    EMULATED,
    EXPECTED,
    SLACK_SECONDS,
    TIMEOUT_SECONDS,
    Run,
    make_run,
    moves,
    take_part,
    take_part_there,
)


def play(run: Run) -> tuple[list[str], bool]:
    """Do one run; what was not as it must be, in words, and whether any survivor got an error."""
    try:
        if run.fault in EMULATED:
            assert run.topology is not None
            with Cluster(run.topology) as cluster:
                found = cluster.run(take_part_there, run, timeout_seconds=90, grace_seconds=40)
        else:
            found = run_processes(take_part, run.num_ranks, run, timeout_seconds=90, grace_seconds=40)
        results = dict(enumerate(found))
    except LaunchError as error:
        results = dict(error.results)
        wrong = [
            f"rank {failure.rank} {failure.text.strip().splitlines()[-1]}"
            for failure in error.failures
            if failure.rank not in run.victims or not (run.kills or run.fault == "raises in between")
        ]
        if wrong:
            return wrong, True
    said = {rank: result for rank, result in results.items() if result is not None}
    if run.kills:
        said = {rank: one for rank, one in said.items() if rank not in run.victims}
    return check(run, said), any(one["kind"] == "error" for one in said.values())


def check(run: Run, said: dict[int, dict[str, Any]]) -> list[str]:
    """What is wrong with what the ranks say of a run."""
    wrong = []
    expected = EXPECTED[run.fault]
    others = {rank: one for rank, one in said.items() if one["kind"] != "stayed away"}
    for rank, one in others.items():
        if one["source_changed"]:
            wrong.append(f"rank {rank}: {one['source_changed']} elements of its source changed")
        if one.get("unlike"):
            wrong.append(f"rank {rank}: {one['unlike']} elements are wrong and nothing was said")
        if one["seconds"] > run.limit_seconds + run.slack_seconds:
            wrong.append(f"rank {rank} took {one['seconds']:.1f} s")
    errors = {rank: (one["name"], one["text"]) for rank, one in others.items() if one["kind"] == "error"}
    told = [f"rank {rank}: {name}: {text}" for rank, (name, text) in errors.items()]
    if expected == "right":
        wrong += told
    elif expected == "right or a time-out":
        wrong += [f"no time-out: {one}" for one in told if ": TransferTimeoutError: " not in one]
    elif expected == "right or lost alike" and errors:
        wrong += [f"it lost nothing: {one}" for one in told if ": RankLostError: " not in one]
    elif "names the victim" in expected:
        wrong += [
            f"the victim is not named: {one}"
            for one in told
            if f"rank {run.victim}" not in one.split(": ", 1)[1] and f"ranks {run.victim}" not in one
        ]
    all_fail = expected == "names the victim" or (expected == "all alike" and _is_felt(run))
    if (all_fail or (expected == "right or lost alike" and errors)) and len(errors) < len(others):
        wrong.append(f"ranks {sorted(set(others) - set(errors))} got no error")
    if "alike" in expected and len(set(errors.values())) > 1:
        wrong.append(f"ranks do not say the same: {sorted(set(errors.values()))}")
    return wrong


def _is_felt(run: Run) -> bool:
    """Whether the fault can be noticed: a byte cannot change where the victim sends none."""
    return run.fault != "byte flipped" or moves(run)


def format_table(counts: dict[str, Counter[str]]) -> str:
    """One line per fault."""
    lines = [
        "| fault | what survivors must get | runs | as it must be | all right | an error |",
        "|---|---|---|---|---|---|",
    ]
    for fault, expected in EXPECTED.items():
        if fault in counts:
            count = counts[fault]
            lines.append(
                f"| {fault} | {expected} | {count['runs']} | {count['good']} | {count['runs'] - count['failed']} "
                f"| {count['failed']} |"
            )
    return "\n".join(lines)


def main() -> int:
    """Print a table; 1 if any run was not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.faults", description=__doc__)
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
    faults = tuple(options.fault or EXPECTED)
    if why_unsupported() is not None:
        print(f"without {', '.join(EMULATED)}: {why_unsupported()}", file=sys.stderr)
        faults = tuple(fault for fault in faults if fault not in EMULATED)
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    for seed in range(options.seed, options.seed + options.runs):
        run = make_run(seed, faults)
        run = replace(run, timeout_seconds=options.timeout, slack_seconds=options.slack)
        wrong, failed = play(run)
        count = counts.setdefault(run.fault, Counter())
        count.update({"runs": 1, "good": int(not wrong), "failed": int(failed)})
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
