"""Pairs of layouts on emulated hosts.

A row is one transfer on one emulated cluster. The command builds each cluster, runs all contenders of a row in turns,
and checks every received element. It prints a table with the measured time, its ratio to the lower bound, and the ratio
of predicted to measured time. Under torchrun the same rows run on the machines of the job.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from microbench.cases.rows import SUITES, Row, all_rows
from microbench.emulation.emulated_cluster import ClusterError
from microbench.emulation.namespaces import why_unsupported
from microbench.harness.case_options import BenchmarkOptionError, add_number
from microbench.harness.machine_description import describe_machine, stderr
from microbench.harness.records import write_records
from microbench.harness.steal_time import TimeBudget
from microbench.harness.suite import (
    ALL_CONTENDERS,
    ALSO_BY_DEFAULT,
    DEFAULT_CONTENDERS,
    Planned,
    plan_row,
    run_cluster,
)
from microbench.transfers.report import format_summary, format_table
from reshard.cli.progress_bars import show_progress
from reshard.topology import parse_rate

#: On an idle machine a run takes less. The rest is the budget for repeating disturbed turns.
DEFAULT_MINUTES, FULL_MINUTES = 10, 60


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--suite", action="append", help=f"run only this suite; may be repeated: {', '.join([*SUITES, 'random'])}"
    )
    parser.add_argument(
        "--row", action="append", help="run only rows with this text in 'suite: name' (see --list); may be repeated"
    )
    parser.add_argument("--full", action="store_true", help="run all rows and contenders; takes at most an hour")
    parser.add_argument(
        "--contender", action="append", help=f"run only this contender; may be repeated: {', '.join(ALL_CONTENDERS)}"
    )
    add_number(parser, "--repeats", 5, "timed turns of each contender, after one warm-up")
    add_number(
        parser, "--minutes", 0.0, f"time budget for repeated turns; 0: {DEFAULT_MINUTES}, with --full {FULL_MINUTES}",
        low=0, high=10_000,
    )  # fmt: skip
    add_number(parser, "--seed", 0, "seed of the random rows", low=0, high=2**32)
    add_number(parser, "--random", 8, "number of random rows in --full and --suite random", low=0, high=10_000)
    add_number(parser, "--scale", 1.0, "factor for the first dim of every tensor", low=1e-6, high=64)
    parser.add_argument("--out", type=Path, help="write JSON lines to this file")
    parser.add_argument("--topology", type=Path, help="torchrun only: topology file with the expected link rates")
    parser.add_argument("--rate", help="torchrun without --topology: expected rate of each NIC (10 Gbit/s)")
    parser.add_argument(
        "--calibrate", type=Path, help="torchrun only: measure the links, write a topology file here, and exit"
    )
    parser.add_argument("--list", action="store_true", help="print the rows and their expected seconds, and exit")


def run(options: argparse.Namespace) -> int:
    """Run the rows.

    Returns:
        0 on success; 1 if an element was wrong, nothing was measured or the link rates are not valid.

    Raises:
        BenchmarkOptionError, ClusterError: the run could not start.
    """
    is_job = "TORCHELASTIC_RUN_ID" in os.environ
    _check_options(options, is_job)
    options.rate = "10 Gbit/s" if options.rate is None else options.rate
    parse_rate(options.rate)
    rows = _select_rows(options)
    if options.calibrate:
        from microbench.harness.torchrun import write_topology

        write_topology(options.calibrate, options.topology, options.rate, stderr)
        return 0
    if is_job:
        return _run_on_machines(options, rows)
    planned = [
        plan_row(row, str(number), _contenders(options, row), options.repeats) for number, row in enumerate(rows)
    ]
    if options.list:
        for item in planned:
            print(f"{item.row.suite:13} {item.row.name:52.52} {item.row.title:48.48} {item.expected_seconds:6.1f} s")
        print(f"{len(planned)} rows, about {sum(item.expected_seconds for item in planned):.0f} s of transfers")
        return 0
    reason = why_unsupported()
    if reason is not None:
        raise ClusterError(reason)
    return _run(options, planned)


def _check_options(options: argparse.Namespace, is_job: bool) -> None:
    if not is_job and (options.topology or options.calibrate):
        raise BenchmarkOptionError("--topology and --calibrate need torchrun; each row fixes its emulated cluster")
    if not is_job and options.rate is not None:
        raise BenchmarkOptionError("--rate needs torchrun; each row fixes the rates of its emulated cluster")
    if options.topology and options.rate is not None:
        raise BenchmarkOptionError(
            "--rate and --topology exclude each other: the topology file gives the rates of the NICs"
        )
    for name, file in (("--out", options.out), ("--calibrate", options.calibrate)):
        if file and (file.is_dir() or not file.parent.is_dir()):
            raise BenchmarkOptionError(
                f"{name} {file}: " + ("is a folder" if file.is_dir() else f"no folder {file.parent}")
            )


def _contenders(options: argparse.Namespace, row: Row) -> Sequence[str]:
    if options.contender:
        return list(options.contender)
    return ALL_CONTENDERS if options.full else (*DEFAULT_CONTENDERS, *ALSO_BY_DEFAULT.get(row.suite, ()))


def _select_rows(options: argparse.Namespace) -> list[Row]:
    rows = all_rows(options.seed, options.random, options.scale)
    known = {row.suite for row in rows} | set(SUITES)
    for suite in options.suite or []:
        if suite not in known:
            raise BenchmarkOptionError(f"unknown suite {suite!r}; known suites: {', '.join(sorted(known))}")
    for contender in options.contender or []:
        if contender not in ALL_CONTENDERS:
            raise BenchmarkOptionError(
                f"unknown contender {contender!r}; known contenders: {', '.join(ALL_CONTENDERS)}"
            )
    named = options.suite or options.row
    rows = [row for row in rows if options.suite is None or row.suite in options.suite]
    rows = [
        row for row in rows if options.row is None or any(part in f"{row.suite}: {row.name}" for part in options.row)
    ]
    if not (options.full or named):
        rows = [row for row in rows if row.is_default]
    if not rows:
        filters = ", ".join(map(repr, [*(options.suite or []), *(options.row or [])]))
        raise BenchmarkOptionError(f"no row matches {filters}; --list --full prints all rows")
    return rows


def _run_on_machines(options: argparse.Namespace, rows: list[Row]) -> int:
    from microbench.harness.torchrun import run_on_machines

    contenders = options.contender or (ALL_CONTENDERS if options.full else DEFAULT_CONTENDERS)
    is_first = os.environ.get("RANK") == "0"
    records: list[dict[str, Any]] = [describe_machine(options.words)]
    run_on_machines(rows, contenders, options.repeats, records.append, stderr, options.topology, options.rate)
    if not is_first:
        return 0
    write_records(options.out, records)
    print(format_table(records))
    print(format_summary(records))
    return _status(records)


def _run(options: argparse.Namespace, planned: list[Planned]) -> int:
    records: list[dict[str, Any]] = []
    minutes = options.minutes or (FULL_MINUTES if options.full else DEFAULT_MINUTES)
    budget = TimeBudget(60.0 * minutes, sum(item.expected_seconds for item in planned))

    def write(record: dict[str, Any]) -> None:
        records.append(record)
        if file is not None:
            file.write(json.dumps(record) + "\n")
            file.flush()

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(options.out.open("w")) if options.out else None
        write(describe_machine(options.words))
        advance = stack.enter_context(_progress(budget.expected_seconds))
        try:
            for cluster in dict.fromkeys(item.row.cluster for item in planned):
                run_cluster(cluster, [item for item in planned if item.row.cluster == cluster], write, advance, budget)
        except KeyboardInterrupt:
            if options.out:
                stderr(f"{options.out} has the results of the completed clusters")
            raise
        write({"kind": "end", "took_seconds": round(budget.elapsed_seconds, 1)})
    print(format_table(records))
    print(format_summary(records))
    return _status(records)


def _status(records: list[dict[str, Any]]) -> int:
    """Exit status: 1 if an element was wrong, the link rates are not valid, or nothing was measured; else 0."""
    wrong = sum(record.get("wrong", 0) for record in records)
    valid = all(record["valid"] for record in records if record["kind"] == "cluster")
    measured = any("seconds" in record for record in records)
    if not measured:
        stderr("microbench: nothing was measured")
    elif not valid:
        stderr("microbench: NOT VALID: link rates changed during the run, or differ from the expected rates")
    return 0 if measured and valid and not wrong else 1


@contextlib.contextmanager
def _progress(total: float) -> Iterator[Callable[[float, str], None]]:
    """A progress bar on a terminal, else one line per step."""
    if not sys.stderr.isatty():
        yield lambda seconds, what: stderr(what)
        return
    with show_progress(total, "s") as advance:
        yield advance
