"""Time several methods in turns on all ranks, and merge the seconds of the ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.harness.benchmark_rank import Stopwatch
from reshard.cli.progress_bars import track
from reshard.topology import Topology, topology_from_json

#: Seconds of each turn, by method.
Times = dict[str, list[float]]


def equal_hosts(rate: str, count: int = 4, devices: int = 2) -> Topology:
    """Hosts with equal numbers of devices and one NIC of ``rate`` each."""
    return topology_from_json({"hosts": [{"count": count, "devices": devices, "nics": [rate]}]})


def run_on_hosts(topology: Topology, function: Callable[..., Any], *args: Any, timeout_seconds: float = 900.0) -> Any:
    """Emulate the hosts, and run ``function(rank, report, *args)`` on every rank. Returns the results by rank."""
    with EmulatedCluster(topology) as cluster:
        return cluster.run(function, *args, timeout_seconds=timeout_seconds)


def time_in_turns(
    methods: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    prepare: Callable[[str], object] = lambda name: None,
    check: Callable[[str], object] = lambda name: None,
    show: bool = False,
    label: str = "turns",
) -> Times:
    """Run the methods in turns (A B C A B C). Every rank must call this at once.

    Args:
        repeats: turns that count; the one before them warms up.
        prepare: called with the name before each turn.
        check: called with the name after the turn that warms up, and after the last one.
        show: whether this rank shows a progress bar.

    Returns:
        Seconds of the turns of each method on this rank.
    """
    stopwatch = Stopwatch()
    seconds: Times = {name: [] for name in methods}
    for turn in track(range(repeats + 1), label, show=show):
        for name, method in methods.items():
            prepare(name)
            stopwatch.start()
            method()
            took = stopwatch.stop().seconds
            if turn:
                seconds[name].append(took)
            if turn in (0, repeats):
                check(name)
    return seconds


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> Times:
    """The seconds of each turn on its slowest rank."""
    return {
        name: [max(of_ranks) for of_ranks in zip(*(times[name] for times in ranks), strict=True)] for name in ranks[0]
    }


def medians_of(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median seconds of each method."""
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def format_seconds(seconds: Sequence[float]) -> str:
    """Median, least and most seconds, as ``0.2856 s (0.2831..0.2888)``."""
    return f"{statistics.median(seconds):.4f} s ({min(seconds):.4f}..{max(seconds):.4f})"
