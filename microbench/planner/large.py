"""Plans for thousands of ranks and for whole models.

Each row is one plan, made in a new process: CPU seconds, peak memory, messages, strategy, and the simulated time over
the lower bound (above a million messages, the predicted time). ``--compare`` also makes and simulates the plans of
other strategies, unless a lower bound on their time is at most 0.5 % below the time of ``auto``. The exit status is 1
if one of them is faster by more than 0.5 %, apart from gathered plans, which ``auto`` takes only if they halve the time
(decision 31). It is also 1 if a plan takes more CPU time or memory than its limit. No data is moved. One tensor of the
pairs is 8 GiB: 65536 x 65536 bfloat16, on hosts of eight ranks with one NIC of 10 Gbit/s, or those of ``--preset``.
Exponents of the growth of CPU time and memory are fitted for pairs that were planned for several numbers of ranks;
plans in closed form apart.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from reshard.cost import find_bound, simulate
from reshard.plan import ROTATION
from reshard.planner import plan_tensors, predict
from reshard.sharding import Layout, Mesh, TensorSpec
from reshard.topology import Host, Link, Topology, load_preset

#: A strategy beats ``auto`` if it is faster by more than this part.
MARGIN = 0.005
_GBIT = 1e9 / 8
#: Above this number of messages, the time is what ``predict`` estimates.
_MAX_SIMULATED = 1_000_000
#: Layouts of the pairs, and the ranks of the destination for each rank of the source.
PAIRS: dict[str, tuple[str, str, float]] = {
    "rows": ("S01 R", "S01 R", 1),
    "half": ("S0 S1", "S0 S1", 0.5),
    "scatter": ("R R", "S0 R", 1),
    "broadcast": ("S1 R", "S1 R", 0),
    "replicate": ("S1 R", "R R", 0),
    "tp-rows": ("S01 R", "S1 R", 1),
    "tp-rows-half": ("S01 R", "S1 R", 0.5),
    "tp-columns": ("S01 R", "R S1", 1),
    "swap": ("S0 S1", "S1 S0", 1),
    "transpose": ("S0 R", "R S0", 1),
    "gather": ("S01 R", "R R", 1),
    "columns": ("S01 R", "R S0", 1),
}
_SHAPE = (65536, 65536)
#: Limits on CPU seconds and peak MiB of plans of pairs, by the most ranks of a side.
PAIR_LIMITS = {1024: (2.0, 4096), 4096: (10.0, 4096), 16384: (60.0, 4096)}
#: Limits on CPU seconds and peak MiB of plans of models.
MODEL_LIMITS = {
    "300 tensors, 128 to 128": (0.3, 200),
    "723 tensors, 128 to 128": (0.72, 482),
    "1000 tensors, 128 to 128": (1.0, 667),
    "300 tiny tensors, 16 to 16": (0.3, 200),
    "18432 sharded experts, 8 to 8": (2.0, 4096),
    "18432 whole experts, 8 to 8": (2.0, 4096),
    "300 tensors, 512 to 512": (4.0, 4096),
    "1000 tensors, 512 to 512": (13.3, 4096),
    "300 tensors, 1024 to 1024": (8.0, 4096),
    "1000 tensors, 1024 to 1024": (26.7, 4096),
}


def _hosts(count: int, devices: int = 8) -> Topology:
    return Topology.uniform([rank // devices for rank in range(count)], 10 * _GBIT)


def _pair(name: str, ranks: int, preset: str = "") -> tuple[list[TensorSpec], Topology]:
    """One tensor between ``ranks`` and other ranks. From one host of eight to all if the factor is 0."""
    src, dst, factor = PAIRS[name]
    num_src, num_dst = (8, ranks) if not factor else (ranks, int(ranks * factor))
    layouts = Layout(Mesh.of((num_src // 8, 8)), src), Layout(Mesh.of((num_dst // 8, 8), first_rank=num_src), dst)
    count = num_src + num_dst
    return [TensorSpec(_SHAPE, "bfloat16", *layouts)], load_preset(preset, count) if preset else _hosts(count)


def llama_shapes(count: int, num_stages: int = 1) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
    """Name, shape, layout under tensor parallelism on axis 1, and pipeline stage of weights of Llama-70B's layers."""
    yield "embed", (32000, 8192), "S1 R", 0
    yield "head", (32000, 8192), "S1 R", num_stages - 1
    yield "norm", (8192,), "R", num_stages - 1
    layer = (
        ("q", (8192, 8192), "S1 R"),
        ("k", (1024, 8192), "S1 R"),
        ("v", (1024, 8192), "S1 R"),
        ("o", (8192, 8192), "R S1"),
        ("gate", (28672, 8192), "S1 R"),
        ("up", (28672, 8192), "S1 R"),
        ("down", (8192, 28672), "R S1"),
        ("norm1", (8192,), "R"),
        ("norm2", (8192,), "R"),
    )
    for number in range(3, count):
        which = number - 3
        name, shape, spec = layer[which % len(layer)]
        yield f"{which // len(layer)}.{name}", shape, spec, which * num_stages // (count - 3)


def _model(
    count: int, num_src: int, num_dst: int, *, num_stages: int = 1, shrink: int = 1, is_same: bool = False
) -> tuple[list[TensorSpec], Topology]:
    """Weights of Llama from FSDP, over all ranks of a pipeline stage, to tensor parallelism of 8 x data parallelism."""
    dst = Mesh.of((num_dst // 8, 8), first_rank=0 if is_same else num_src)
    ranks_per_stage = num_src // num_stages
    stages = [Mesh.of((ranks_per_stage // 8, 8), first_rank=stage * ranks_per_stage) for stage in range(num_stages)]
    src = [{ndim: Layout(mesh, "S01" + " R" * (ndim - 1)) for ndim in (1, 2)} for mesh in stages]
    layouts = {spec: Layout(dst, spec) for spec in ("S1 R", "R S1", "R")}
    tensors = [
        TensorSpec(tuple(size // shrink for size in shape), "bfloat16", src[stage][len(shape)], layouts[spec], name)
        for name, shape, spec, stage in llama_shapes(count, num_stages)
    ]
    return tensors, _hosts(max(num_src, num_dst) if is_same else num_src + num_dst)


def _experts(count: int, *, is_sharded: bool) -> tuple[list[TensorSpec], Topology]:
    """Expert weights from 8 to 8 ranks: each one sharded over all of them, or each one whole on one rank."""
    meshes = Mesh.of(8), Mesh.of(8, first_rank=8)
    alone = [[Layout(Mesh.of(1, first_rank=first + rank), "R R") for rank in range(8)] for first in (0, 8)]
    tensors = []
    for number in range(count):
        src, dst = (
            (Layout(meshes[0], "S0 R"), Layout(meshes[1], "R S0"))
            if is_sharded
            else (alone[0][number % 8], alone[1][number * 8 // count])
        )
        tensors.append(TensorSpec((1408, 2048), "bfloat16", src, dst, f"expert{number}"))
    return tensors, _hosts(16)


def _other(name: str, ranks: int) -> tuple[list[TensorSpec], Topology]:
    """Pairs of as many ranks that differ in one way from those of the table. The tensor has 512 MiB to 128 ranks."""
    size, count, hosts = 16384 if ranks <= 128 else _SHAPE[0], 2 * ranks, ranks // 8
    shape = size, size
    src, dst = Layout(Mesh.of((hosts, 8)), "S01 R"), Layout(Mesh.of((hosts, 8), first_rank=ranks), "S1 R")
    topology = _hosts(count)
    if name == "overlapping":
        dst, topology = Layout(Mesh.of((hosts, 8), first_rank=ranks // 2), "S1 R"), _hosts(ranks * 3 // 2)
    elif name == "equal":
        dst, topology = Layout(Mesh.of((hosts, 8)), "S1 R"), _hosts(ranks)
    elif name == "8-to-4":
        dst = Layout(Mesh.of((2 * hosts, 4), first_rank=ranks), "S1 R")
        topology = Topology.uniform([r // 8 if r < ranks else r // 4 - hosts for r in range(count)], 10 * _GBIT)
    elif name == "two-nics":
        topology = Topology(tuple(rank // 8 for rank in range(count)), (Host((Link.of(10 * _GBIT),) * 2),))
    elif name == "pods":
        nics = tuple(Host((Link.of(10 * _GBIT),), host // 8) for host in range(2 * hosts))
        topology = Topology(tuple(rank // 8 for rank in range(count)), nics, pods=(Link.of(40 * _GBIT),) * (hosts // 4))
    elif name == "uneven":
        shape = size - 3, size - 21
    return [TensorSpec(shape, "bfloat16", src, dst)], topology


def _mixture(num_src: int) -> tuple[list[TensorSpec], Topology]:
    """Experts of a mixture of 1T parameters in float8, from a trainer to a quarter of its ranks in a fat tree.

    The trainer has four pipeline stages, each with expert parallelism of 64 and FSDP inside experts. Each replica of
    the server has expert parallelism of 64. Hosts have 8 ranks with a NIC of 400 Gbit/s each, pods have 32 hosts, and
    uplinks carry half of what the hosts of a pod can.
    """
    num_dst, num_hosts = num_src // 4, num_src * 5 // 32
    nic, uplink = Link.of(400 * _GBIT), Link.of(32 * 8 * 400 * _GBIT / 2)
    topology = Topology(
        tuple(rank // 8 for rank in range(num_src + num_dst)),
        tuple(Host((nic,) * 8, pod=host // 32) for host in range(num_hosts)),
        tuple(rank % 8 for rank in range(num_src + num_dst)),
        (uplink,) * -(-num_hosts // 32),
        inside_bytes_per_second=4e11,
        latency_seconds=1e-5,
        inside_latency_seconds=5e-6,
    )
    dst = Layout(Mesh.of((num_dst // 64, 64), first_rank=num_src), "R S1 R R")
    stages = [Mesh.of((64, num_src // 256), first_rank=stage * num_src // 4) for stage in range(4)]
    tensors = [
        TensorSpec((15, 384, 6144, 7168), "float8_e4m3fn", Layout(mesh, "R S0 S1 R"), dst, f"stage{number}")
        for number, mesh in enumerate(stages)
    ]
    return tensors, topology


OTHERS = ("overlapping", "equal", "8-to-4", "two-nics", "pods", "uneven")
#: Whole models by name; see :func:`_model`.
MODELS: dict[str, Callable[[], tuple[list[TensorSpec], Topology]]] = {
    "300 tensors, 128 to 128": lambda: _model(300, 128, 128),
    "723 tensors, 128 to 128": lambda: _model(723, 128, 128),
    "1000 tensors, 128 to 128": lambda: _model(1000, 128, 128),
    "300 tensors, 8 stages, 128 to 128": lambda: _model(300, 128, 128, num_stages=8),
    "300 tensors in place, 128": lambda: _model(300, 128, 128, is_same=True),
    "300 tiny tensors, 16 to 16": lambda: _model(300, 16, 16, shrink=64),
    "18432 sharded experts, 8 to 8": lambda: _experts(18432, is_sharded=True),
    "18432 whole experts, 8 to 8": lambda: _experts(18432, is_sharded=False),
    "300 tensors, 512 to 256": lambda: _model(300, 512, 256),
    "300 tensors, 512 to 512": lambda: _model(300, 512, 512),
    "1000 tensors, 512 to 512": lambda: _model(1000, 512, 512),
    "300 tensors, 1024 to 1024": lambda: _model(300, 1024, 1024),
    "1000 tensors, 1024 to 1024": lambda: _model(1000, 1024, 1024),
    **{f"1T experts, {ranks} to {ranks // 4}": partial(_mixture, ranks) for ranks in (512, 1024, 2048, 4096, 8192)},
}


def inputs(case: str) -> tuple[list[TensorSpec], Topology]:
    """The tensors and the topology of a case.

    A case is a pair with its ranks (``swap/1024``) and perhaps a preset (``swap/1024/dgx_h100``), a model, or one of
    ``OTHERS``, perhaps with its ranks (``pods/1024``; otherwise 128).
    """
    if case in MODELS:
        return MODELS[case]()
    name, *rest = case.split("/")
    if name in OTHERS:
        return _other(name, int(rest[0]) if rest else 128)
    ranks, *preset = rest
    return _pair(name, int(ranks), *preset)


def exceeds_limit(case: str, record: dict[str, Any]) -> bool:
    """Whether a plan took more CPU time or memory than it may, or was refused. Cases without a limit may take any."""
    limit = MODEL_LIMITS.get(case)
    if "/" in case:
        limit = next((limit for ranks, limit in PAIR_LIMITS.items() if int(case.split("/")[1]) <= ranks), None)
    return limit is not None and ("cpu" not in record or record["cpu"] > limit[0] or record["mib"] > limit[1])


def measure(case: str, strategy: str, simulates: bool, *, has_loads: bool = False) -> dict[str, Any]:
    """Plan a case in this process; ``has_loads`` adds how long the links of each class are busy."""
    plan_tensors(inputs("swap/16")[0], topology=inputs("swap/16")[1])  # loads modules
    tensors, topology = inputs(case)
    begun = time.process_time()
    try:
        plan = plan_tensors(tensors, topology=topology, strategy=strategy)
    except ValueError as error:
        return {"error": str(error)}
    record: dict[str, Any] = {
        "cpu": time.process_time() - begun,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "messages": plan.num_messages,
        "strategy": plan.strategy,
        "hash": plan.plan_hash,
    }
    print(json.dumps(record), flush=True)
    if simulates:
        is_small = plan.num_messages <= _MAX_SIMULATED
        record["seconds"] = simulate(plan).makespan_seconds if is_small else predict(plan).seconds
        record["bound"] = find_bound(plan).seconds
    if has_loads:
        from microbench.planner.link_loads import loads_of, to_json

        record["loads"] = to_json(loads_of(plan))
    return record


def bounds_of(case: str) -> dict[str, float]:
    """A lower bound, in seconds, on the time of each strategy's plan of a case."""
    from reshard.plan import DEFAULT_STAGING_BYTES, ranks_of
    from reshard.planner.estimates import StrategyBounds
    from reshard.planner.stacking import Stacks, stack_problem
    from reshard.planner.strategy_registry import STRATEGIES

    tensors, topology = inputs(case)
    used = topology.only(ranks_of(tensors))
    bounds = StrategyBounds(stack_problem(tensors, Stacks.of(tensors), used, DEFAULT_STAGING_BYTES))
    return {name: bounds.of_strategy(name) for name in STRATEGIES}


def run_one(case: str, strategy: str, limit: float, *, has_loads: bool = False) -> dict[str, Any]:
    """:func:`measure` in a new process; ``limit`` seconds for the simulation."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), case, strategy, str(limit), *["loads"] * has_loads]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {"error": f"exit status {done.returncode}"}


def _one(case: str, strategy: str, limit: str, *loads: str) -> int:
    if float(limit):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, float(limit))
    if strategy == "bounds":
        print(json.dumps(bounds_of(case)))
        return 0
    print(json.dumps(measure(case, strategy, bool(float(limit)), has_loads=bool(loads))), flush=True)
    return 0


def _format(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"refused: {record['error'][:90]}"
    ratio = f"{record['seconds'] / record['bound']:.3f}" if "seconds" in record else "not simulated"
    return f"{record['cpu']:7.2f} s {record['mib']:6} MiB {record['messages']:11,}  {record['strategy']:18} {ratio}"


def growth(ranks: Sequence[int], seconds: Sequence[float]) -> float:
    """The exponent b of ``seconds ~ ranks ** b``, by least squares on the logarithms."""
    return float(np.polyfit(np.log(ranks), np.log(seconds), 1)[0])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="*", default=[256, 1024], help="ranks of a side (256 1024)")
    parser.add_argument("--pairs", nargs="*", default=list(PAIRS), help="pairs of layouts (all)")
    parser.add_argument("--preset", default="", help="hosts of the pairs, such as dgx_h100 (one NIC of 10 Gbit/s)")
    parser.add_argument("--cases", nargs="*", default=[], help="models and other cases; all: every one of them")
    parser.add_argument(
        "--compare", nargs="*", default=[], metavar="STRATEGY", help="strategies to compare with auto; all: every one"
    )
    parser.add_argument("--picture", type=Path, metavar="SVG", help="draw the loads of links in the last case's plan")
    parser.add_argument("--limit", type=float, default=60, help="CPU seconds to plan and simulate; 0: only plan (60)")


def run(options: argparse.Namespace) -> int:
    """Print one row per plan, what beats ``auto``, and how time and memory of each pair grow with the ranks."""
    named = [*MODELS, *OTHERS] if options.cases == ["all"] else options.cases
    beaten: list[str] = []
    gathered: list[str] = []
    slow: list[str] = []
    record: dict[str, Any] = {}
    planned: dict[tuple[str, bool], list[tuple[int, float, float]]] = {}  # ranks, CPU seconds, MiB of each plan
    hosts = f"/{options.preset}" if options.preset else ""
    for case in [*(f"{name}/{ranks}{hosts}" for ranks in options.ranks for name in options.pairs), *named]:
        record = run_one(case, "auto", options.limit, has_loads=options.picture is not None)
        print(f"{case:34} {_format(record)}", flush=True)
        slow += [case] * exceeds_limit(case, record)
        name, _, ranks = case.removesuffix(hosts).partition("/")
        if name in PAIRS and "cpu" in record:
            figures = int(ranks), record["cpu"], record["mib"]
            planned.setdefault((name, record["strategy"] == ROTATION), []).append(figures)
        time_of_auto = record.get("seconds", math.inf)
        bounds = run_one(case, "bounds", 0) if options.compare else {}
        for strategy in [name for name in bounds if name != "error"] if options.compare == ["all"] else options.compare:
            if time_of_auto <= bounds.get(strategy, 0.0) * (1 + MARGIN):
                print(f"{'  ' + strategy:34} at least {bounds[strategy] / time_of_auto:.3f} times the time of auto")
                continue
            other = run_one(case, strategy, options.limit)
            ratio = f", {other['seconds'] / time_of_auto:.3f} times the time of auto" if "seconds" in other else ""
            print(f"{'  ' + strategy:34} {_format(other)}{ratio}", flush=True)
            if "seconds" in other and time_of_auto > other["seconds"] * (1 + MARGIN):
                (gathered if strategy == "gathered_multicast" else beaten).append(f"{case}: {strategy}")
    if options.picture and "loads" in record and "seconds" in record:
        from microbench.planner.link_loads import draw_loads, from_json

        draw_loads(case, from_json(record["loads"]), record["bound"], record["seconds"], options.picture)
    for (name, is_closed), rows in planned.items():
        if len(rows) > 1:
            numbers, seconds, memory = zip(*rows, strict=True)
            label = f"{name}, {min(numbers)} to {max(numbers)}{', closed form' * is_closed}"
            exponents = growth(numbers, seconds), growth(numbers, memory)
            print(f"{label:34} CPU time ~ ranks^{exponents[0]:.2f}, memory ~ ranks^{exponents[1]:.2f}")
    if options.compare:
        print(f"{len(beaten)} plans of auto are slower by more than {MARGIN:.1%}: {'; '.join(beaten) or 'none'}")
    print(f"{len(slow)} plans exceed a limit on CPU time or memory: {'; '.join(slow) or 'none'}")
    return int(bool(beaten or slow))


if __name__ == "__main__":  # in a new process
    sys.exit(_one(*sys.argv[1:]))
