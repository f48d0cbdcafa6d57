"""Fault injection: ``python -m tests.campaigns.faults --runs 2000``. Every run must end in correct shards or an error.

Each run is a random reshard between real processes, with one fault chosen by a seed: a rank is killed, stopped or late,
a byte changes in transit, or a rank's arguments differ. ``EXPECTED`` gives the required outcome of each fault. The
campaign checks on every surviving rank the elements of the shards, the class and text of errors, the duration, and that
the source is unchanged.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.emulation.namespaces import why_unsupported
from reshard.cli.progress_bars import print_line, track
from reshard.sharding.mesh import parse_ranks
from reshard.testing.processes import LaunchError, run_processes
from tests.campaigns.planted import (
    EMULATED,
    EXPECTED,
    SLACK_SECONDS,
    TIMEOUT_SECONDS,
    Run,
    make_run,
    sends_data,
    take_part,
    take_part_on_host,
)


def play(run: Run) -> tuple[list[str], bool]:
    """Execute a run; returns descriptions of all violations, and whether a survivor raised an error."""
    try:
        if run.fault in EMULATED:
            assert run.topology is not None
            with EmulatedCluster(run.topology) as cluster:
                found = cluster.run(take_part_on_host, run, timeout_seconds=90, grace_seconds=40)
        else:
            found = run_processes(take_part, run.num_ranks, run, timeout_seconds=90, grace_seconds=40)
        results = dict(enumerate(found))
    except LaunchError as error:
        results = dict(error.results)
        wrong = [
            f"rank {failure.rank} {failure.text.strip().splitlines()[-1]}"
            for failure in error.failures
            if failure.rank not in run.victims or not (run.kills or run.fault == "raises before the call")
        ]
        if wrong:
            return wrong, True
    outcomes = {rank: result for rank, result in results.items() if result is not None}
    if run.kills:
        outcomes = {rank: outcome for rank, outcome in outcomes.items() if rank not in run.victims}
    return check(run, outcomes), any(outcome["kind"] == "error" for outcome in outcomes.values())


def check(run: Run, outcomes: dict[int, dict[str, Any]]) -> list[str]:
    """Compare the outcomes of the ranks with the required outcome; returns descriptions of all violations."""
    wrong = []
    expected = EXPECTED[run.fault]
    others = {rank: outcome for rank, outcome in outcomes.items() if outcome["kind"] != "did not call"}
    for rank, other in others.items():
        if other["source_changed"]:
            wrong.append(f"rank {rank}: {other['source_changed']} elements of its source changed")
        if other.get("unlike"):
            wrong.append(f"rank {rank}: {other['unlike']} elements are wrong, but it raised no error")
        if other["seconds"] > run.limit_seconds + run.slack_seconds:
            limit = run.limit_seconds + run.slack_seconds
            wrong.append(f"rank {rank} took {other['seconds']:.1f} s, more than {limit:.1f} s")
    errors = {rank: (other["name"], other["text"]) for rank, other in others.items() if other["kind"] == "error"}
    raised = [f"rank {rank}: {name}: {text}" for rank, (name, text) in errors.items()]
    if expected == "right":
        wrong += raised
    elif expected == "right or a timeout":
        wrong += [f"not a TransferTimeoutError: {item}" for item in raised if ": TransferTimeoutError: " not in item]
    elif expected == "right or the same loss" and errors:
        wrong += [f"not a RankLostError: {item}" for item in raised if ": RankLostError: " not in item]
    elif "names the victim" in expected:
        wrong += [
            f"the error does not name the victim: {item}"
            for item in raised
            if run.victim not in named_ranks(item.split(": ", 1)[1])
        ]
    all_fail = expected == "names the victim" or (expected == "the same error" and _has_effect(run))
    if (all_fail or (expected == "right or the same loss" and errors)) and len(errors) < len(others):
        wrong.append(f"ranks {sorted(set(others) - set(errors))} raised no error")
    if "the same" in expected and len(set(errors.values())) > 1:
        wrong.append(f"ranks raised different errors: {sorted(set(errors.values()))}")
    return wrong


def named_ranks(text: str) -> set[int]:
    """The ranks that a text names, as ``rank 3``, ``ranks 0-2,5``, ``ranks 1, 4`` or ``ranks 1 and 4``."""
    lists = re.findall(r"\branks \[?(\d+(?:-\d+)?(?:(?:, ?| and )\d+(?:-\d+)?)*)", text)
    named = {int(number) for number in re.findall(r"\brank (\d+)", text)}
    return named.union(*(parse_ranks(ranks.replace(" and ", ",")) for ranks in lists))


def _has_effect(run: Run) -> bool:
    """Whether the fault can have an effect: no byte can be flipped if the victim sends none."""
    return run.fault != "byte flipped" or sends_data(run)


def format_table(counts: dict[str, Counter[str]]) -> str:
    """A Markdown table with one line per fault."""
    lines = [
        "| fault | required outcome | runs | as required | correct shards | error |",
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
    """Print a table of all runs; returns 1 if an outcome was not as required."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.faults",
        description=__doc__,
        epilog="example: python -m tests.campaigns.faults --runs 50 --fault 'byte flipped' --out failures.jsonl",
    )
    parser.add_argument("--runs", type=int, default=200, help="number of runs (200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run (0)")
    parser.add_argument(
        "--fault", action="append", choices=sorted(EXPECTED), help="inject only this fault; may be repeated"
    )
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, help="timeout_seconds of each call (2)")
    parser.add_argument("--slack", type=float, default=SLACK_SECONDS, help="extra seconds for a loaded machine (2)")
    parser.add_argument("--out", type=Path, help="write violations as JSON lines to this file")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    failures = []
    begun = time.monotonic()
    faults = tuple(options.fault or EXPECTED)
    if why_unsupported() is not None:
        print(f"skipping {', '.join(EMULATED)}: {why_unsupported()}", file=sys.stderr)
        faults = tuple(fault for fault in faults if fault not in EMULATED)
    for seed in track(range(options.seed, options.seed + options.runs), "runs"):
        run = make_run(seed, faults)
        run = replace(run, timeout_seconds=options.timeout, slack_seconds=options.slack)
        wrong, failed = play(run)
        count = counts.setdefault(run.fault, Counter())
        count.update({"runs": 1, "good": int(not wrong), "failed": int(failed)})
        if wrong:
            failures.append({"run": str(run), "wrong": wrong})
            print_line(f"{run}\n    " + "\n    ".join(wrong), sys.stderr)
    print(format_table(counts))
    print(f"{options.runs} runs in {time.monotonic() - begun:.0f} s, {len(failures)} not as required")
    if options.out:
        options.out.write_text("".join(json.dumps(failure) + "\n" for failure in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
