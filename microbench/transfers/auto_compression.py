"""``compression="auto"``, compared with raw transfers at several link rates.

Four hosts with two ranks each move a tensor of fp32 from two hosts to the other two. ``auto`` chooses among the codecs
by the rates that the ranks measure. ``auto, slowed`` gets the same rates divided by 100, so it should send raw. Raw
runs twice: the second shows how far two equal contenders differ. All contenders of a case run in turns.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import reshard
from microbench.harness.case_options import add_number, add_rates
from microbench.harness.turns import Times, equal_hosts, medians_of, run_on_hosts, slowest
from microbench.transfers.compression import CASES, CODECS, case_layouts, payload_topology, time_movers
from reshard.cli.progress_bars import track
from reshard.topology import Topology

RATES = ("0.1 Gbit/s", "0.3 Gbit/s", "1 Gbit/s", "3 Gbit/s", "10 Gbit/s")
#: Admits both codecs.
MAX_ERROR = 0.2
SLOWED = 100
#: ``auto`` may take this many times the time of raw, beyond the difference between the two raw contenders.
LIMIT = 1.03


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--mib", 16, "MiB of the tensor", high=4096)
    add_rates(parser, RATES)
    add_number(parser, "--repeats", 7, "timed turns of each contender")


def measure(
    rank: int, report: Callable[[Any], None], topology: Topology, mib: int, repeats: int
) -> list[tuple[Times, dict[str, str]]]:
    """By case: the seconds of each turn on this rank, and the codec of each contender."""
    rates = reshard.find_topology(codecs=list(CODECS)).codec_rates
    slow = tuple(
        replace(
            rate,
            encode_bytes_per_second=rate.encode_bytes_per_second / SLOWED,
            decode_bytes_per_second=rate.decode_bytes_per_second / SLOWED,
        )
        for rate in rates
    )
    results = []
    for case in track(range(len(CASES)), "cases", show=rank == 0):
        src, dst, shape = case_layouts(case, mib)
        make = functools.partial(reshard.make_plan, src, dst, shape, "float32")
        plans = {name: make(topology=topology) for name in ("raw", "raw again")}
        for name, of_codecs in (("auto", rates), ("auto, slowed", slow)):
            known = replace(topology, codec_rates=of_codecs)
            plans[name] = make(topology=known, compression="auto", max_error=MAX_ERROR)
        codecs = {name: codec.name if (codec := plan.tensors[0].codec) else "raw" for name, plan in plans.items()}
        results.append((time_movers(rank, plans, repeats, is_checked=False), codecs))
    return results


def run(options: argparse.Namespace) -> int:
    """Print a row per rate and case; returns 1 if ``auto`` is slower than raw by more than the limit."""
    missed = 0
    for rate in options.rate or RATES:
        topology = equal_hosts(rate)
        ranks = run_on_hosts(topology, measure, payload_topology(topology), options.mib, options.repeats)
        for (case, *_), chosen in zip(CASES, zip(*ranks, strict=True), strict=True):
            codecs, median = chosen[0][1], medians_of(slowest([times for times, _ in chosen]))
            raw, again = sorted((median["raw"], median["raw again"]))
            cells = [f"{rate:11} {case:16} raw {raw:.4f} s, again {again / raw:.3f}x"]
            for name in ("auto", "auto, slowed"):
                missed += median[name] > LIMIT * again
                cells.append(f"{name} ({codecs[name]}) {median[name] / raw:.3f}x")
            print("  ".join(cells), flush=True)
    print(f"{missed} rows are slower than {LIMIT} times raw, beyond the difference of raw to raw")
    return int(bool(missed))
