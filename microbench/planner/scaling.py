"""Planning time and memory by number of ranks.

Times are CPU times, because other work on a shared machine lengthens the others. Each case runs in a separate
process, so that peak memory belongs to the case.
"""

from __future__ import annotations

import argparse
import gc
import math
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from microbench.harness.case_options import add_number
from microbench.harness.new_process import call_in_new_process
from reshard.cli.progress_bars import print_line, track
from reshard.plan import Plan
from reshard.planner import plan_tensors
from reshard.sharding import Layout, Mesh, TensorSpec
from reshard.topology import MACHINES, Topology, load_preset

DEVICES = 8
_RANKS = (16, 32, 64, 128, 256, 512, 1024)
#: Layout pairs: rows to columns, identity, replicated to sharded and back, all mesh axes on one dim.
PAIRS = (("S0 R", "R S1"), ("S01 R", "S01 R"), ("R R", "S0 R"), ("S0 R", "R R"), ("S01 R", "R S0"))


@dataclass(frozen=True)
class ScalingCase:
    """``count`` tensors from ``src_ranks`` to ``dst_ranks`` other ranks, on hosts with ``devices`` ranks each."""

    src_ranks: int
    dst_ranks: int
    src: str
    dst: str
    shape: tuple[int, int] = (16384, 8192)
    count: int = 1
    devices: int = DEVICES
    preset: str = ""  # of the topology; empty: one NIC of 10 Gbit/s per host

    def __str__(self) -> str:
        many = f"{self.count} tensors, " if self.count > 1 else ""
        return f"{many}{self.src_ranks} -> {self.dst_ranks} ranks, {self.src} -> {self.dst}"

    def plan(self, repeats: int) -> tuple[float, Plan]:
        """Median seconds of CPU time to plan, and the plan. Nothing is cached between repetitions."""
        src = Mesh.of((self.src_ranks // self.devices, self.devices))
        dst = Mesh.of((self.dst_ranks // self.devices, self.devices), first_rank=self.src_ranks)
        num_ranks = self.src_ranks + self.dst_ranks
        taken = []
        for _ in range(repeats):
            topology = Topology.uniform([rank // self.devices for rank in range(num_ranks)])
            if self.preset:
                topology = load_preset(self.preset, num_ranks)
            tensors = [
                TensorSpec(self.shape, "bfloat16", Layout(src, self.src), Layout(dst, self.dst), name)
                for name in ([f"w{number}" for number in range(self.count)] if self.count > 1 else [None])
            ]
            gc.collect()
            begun = time.process_time()
            plan = plan_tensors(tensors, topology=topology)
            taken.append(time.process_time() - begun)
        return statistics.median(taken), plan


#: Additional cases: hosts with four devices, and lists of weights from a training layout to an inference layout.
OTHERS = (
    ScalingCase(128, 128, "S0 R", "R S1", devices=4),
    ScalingCase(128, 128, "R R", "S0 R", devices=4),
    ScalingCase(128, 128, "S01 R", "R S1", (4096, 4096), 20),
    ScalingCase(128, 128, "S01 R", "S1 R", (4096, 4096), 20),
    ScalingCase(256, 128, "S0 S1", "R S1", (4096, 4096), 300),
    ScalingCase(256, 128, "S01 R", "S1 R", (4096, 4096), 300),
)


def plan_case(case: ScalingCase, repeats: int) -> tuple[float, int, int]:
    """Plan a case ``repeats`` times: median seconds, messages of the plan, and peak MiB of the process."""
    case.plan(1)  # loads modules
    seconds, plan = case.plan(repeats)
    return seconds, plan.num_messages, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def time_case(case: ScalingCase, repeats: int) -> tuple[float, int, int]:
    """Run :func:`plan_case` in a new process."""
    timed: tuple[float, int, int] = call_in_new_process(plan_case, case, repeats)
    return timed


def growth(ranks: Sequence[int], seconds: Sequence[float]) -> float:
    """The exponent b of ``seconds ~ ranks ** b``, by least squares on the logarithms."""
    x, y = [math.log(n) for n in ranks], [math.log(t) for t in seconds]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--repeats", 3, "repetitions, of which the median counts")
    add_number(parser, "--most", _RANKS[-1], "most ranks of a mesh", low=_RANKS[0], high=_RANKS[-1])
    parser.add_argument(
        "--preset", default="", choices=["", *MACHINES], help="topology (one NIC of 10 Gbit/s per host)"
    )


def run(options: argparse.Namespace) -> None:
    """Print planning time, messages and peak memory by number of ranks, and the exponent of the growth."""
    devices = MACHINES[options.preset].devices if options.preset else DEVICES
    ranks = [n for n in _RANKS if n <= options.most]
    others = [case for case in OTHERS if not options.preset and max(case.src_ranks, case.dst_ranks) <= options.most]
    pairs = [ScalingCase(n, n, *pair, devices=devices, preset=options.preset) for pair in PAIRS for n in ranks]
    taken: list[float] = []
    for case in track([*pairs, *others], "cases"):
        seconds, messages, memory = time_case(case, options.repeats)
        taken.append(seconds)
        print_line(f"{case!s:60} {1e3 * seconds:8.1f} ms  {messages:9,} messages  {memory:5} MiB")
        if case in pairs and case.src_ranks == ranks[-1] and len(ranks) > 1:
            print_line(f"{case.src} -> {case.dst}: time ~ ranks^{growth(ranks, taken[-len(ranks) :]):.2f}")
