"""Write the golden file ``plans.txt``: the plans of each strategy for fixed cases, with lower bound and simulated time.

If you change a strategy, the order of messages, the lower bound or the simulator, run this and review the diff before
you commit it. Plans must not depend on the machine, because all ranks must compute the same plan.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reshard import Layout, Mesh, RegionLayout, Topology
from reshard.cost.cost_report import CostReport
from reshard.cost.lower_bound import find_bound
from reshard.plan import check_plan
from reshard.planner.planning import plan_tensors
from reshard.planner.strategy_registry import AUTO, STRATEGIES
from reshard.sharding.tensor_spec import TensorSpec
from reshard.topology.topology_files import topology_from_json
from tests.support.random_problems import random_problem

NUM_RANDOM = 40
FILE = Path(__file__).with_name("plans.txt")
TOPOLOGIES = {
    "one NIC": {"hosts": [{"count": 8, "devices": 4, "nics": ["10 Gbit/s"]}]},
    "latency": {"hosts": [{"count": 8, "devices": 4, "nics": ["10 Gbit/s"]}], "latency_seconds": 1e-4},
    "slow inside": {
        "hosts": [{"count": 8, "devices": 4, "nics": ["10 Gbit/s"]}],
        "latency_seconds": 1e-4,
        "inside": "2 Gbit/s",
        "inside_latency_seconds": 2e-4,
    },
    "two NICs": {"hosts": [{"count": 8, "devices": 4, "nics": ["25 Gbit/s", "10 Gbit/s"]}]},
    "unequal": {
        "hosts": [
            {"count": 2, "devices": 4, "nics": ["40 Gbit/s"]},
            {"count": 3, "devices": 2, "nics": ["10 Gbit/s"]},
            {"count": 9, "devices": 2, "nics": [{"egress": "10 Gbit/s", "ingress": "20 Gbit/s"}]},
        ]
    },
    "pods": {
        "pods": [{"egress": "20 Gbit/s", "ingress": "20 Gbit/s"}, {"egress": "10 Gbit/s", "ingress": "10 Gbit/s"}],
        "hosts": [
            {"count": 4, "devices": 4, "nics": ["10 Gbit/s"], "pod": 0},
            {"count": 4, "devices": 4, "nics": ["10 Gbit/s"], "pod": 1},
        ],
    },
}
#: Source mesh and spec; destination mesh, first rank and spec.
CASES = [
    ("2x4", "S0 R", "3x4", 8, "S0 R"),
    ("2x4", "R R", "2x4", 8, "S0 R"),
    ("2x4", "R S01", "2x4", 8, "S01 R"),
    ("1x4", "S1 R", "2x4", 4, "R R"),
    ("1x1", "R R", "4x2", 1, "R R"),
    ("2x2", "S0 S1", "3x3", 4, "S1 S0"),
    ("4x2", "R S0", "3x4", 4, "S0 S1"),
    ("3x4", "S0 R", "2x2", 2, "R R"),
]
LARGE_SHAPE = (3100, 4096)
#: Topology, source mesh and spec, destination mesh and spec, strategy.
LARGE = [
    ("latency", "2x4", "S0 R", "3x4", "S0 R", "broadcast_greedy"),
    ("latency", "2x4", "S1 R", "3x4", "S0 R", "broadcast_size"),
    ("latency", "2x4", "R S1", "3x4", "S0 R", "multicast"),
    ("unequal", "2x4", "S0 R", "3x4", "S0 R", "multicast"),
    ("one NIC", "2x4", "S0 R", "3x4", "S0 R", "send_recv"),
    ("one NIC", "2x4", "R S1", "3x4", "S0 R", "send_recv"),
    ("slow inside", "2x4", "R S1", "3x4", "S0 R", "multicast"),
    ("slow inside", "2x4", "S0 R", "3x4", "S0 R", "multicast"),
    ("two NICs", "2x4", "S0 R", "3x4", "S0 R", "multicast"),
    ("latency", "4x4", "S0 R", "1x4", "R R", "multicast"),
]


def cases() -> Iterator[tuple[str, Layout | RegionLayout, Layout | RegionLayout, tuple[int, ...], int]]:
    """Name, source and destination layout, shape, and staging bytes of each case."""
    for number, (src_grid, src, dst_grid, first, dst) in enumerate(CASES):
        layouts = Layout(Mesh.of(src_grid), src), Layout(Mesh.of(dst_grid, first_rank=first), dst)
        shape = (480 + 7 * (number % 3), 512) if number % 2 else (96, 4096)
        yield f"{src} on {src_grid} -> {dst} on {dst_grid}", *layouts, shape, 2**20 if number % 3 else 2**26
    rng = random.Random(3)
    rows = sorted(rng.sample(range(1, 300), 5))
    cuts = list(zip([0, *rows], [*rows, 300], strict=True))
    src = RegionLayout({rank: [[cuts[rank], (0, 64)]] for rank in range(6)})
    dst = RegionLayout({rank + 9: [[(0, 300), (16 * rank, 16 * rank + 16)]] for rank in range(4)})
    yield "uneven rows -> columns", src, dst, (300, 64), 2**20


def small_tensors() -> Iterator[tuple[Layout, Layout, tuple[int, int], str]]:
    """Source and destination layout, shape and dtype of 12 small tensors. Layouts repeat; some shards are uneven."""
    src, dst = Mesh.of("2x4"), Mesh.of("3x4", first_rank=8)
    specs = [("S0 R", "R S0"), ("R S1", "S1 R"), ("S0 S1", "R R")]
    for index in range(12):
        src_spec, dst_spec = specs[index % 3]
        yield (
            Layout(src, src_spec),
            Layout(dst, dst_spec),
            (24 + index % 5, 16 << index % 4),
            ("float32", "float16", "int8")[index % 4 % 3],
        )


def read(description: dict[str, Any]) -> Topology:
    """Parse a topology; latencies default to 0."""
    return topology_from_json({"latency_seconds": 0, "inside_latency_seconds": 0, **description})


def make_lines() -> Iterator[str]:
    """Make the lines of the golden file."""
    for name, src, dst, shape, staging_bytes in cases():
        for network, description in TOPOLOGIES.items():
            if network == "slow inside":
                continue
            for strategy in (AUTO, *STRATEGIES):
                line = _make_line([(src, dst, shape, "float32")], read(description), strategy, staging_bytes)
                yield f"{name}, {network}, {strategy}: {line}"
    tensors = list(small_tensors())
    for strategy in (AUTO, "send_recv", "local_all_gather", "broadcast_greedy", "multicast"):
        line = _make_line(tensors, read(TOPOLOGIES["latency"]), strategy, 2**20)
        yield f"{len(tensors)} small tensors, latency, {strategy}: {line}"
    for network, src_grid, src, dst_grid, dst, strategy in LARGE:
        first_rank = Mesh.of(src_grid).size
        layouts = Layout(Mesh.of(src_grid), src), Layout(Mesh.of(dst_grid, first_rank=first_rank), dst)
        line = _make_line([(*layouts, LARGE_SHAPE, "float32")], read(TOPOLOGIES[network]), strategy, 2**28)
        yield f"{src} on {src_grid} -> {dst} on {dst_grid} of {LARGE_SHAPE}, {network}, {strategy}: {line}"
    names = list(STRATEGIES)
    for seed in range(NUM_RANDOM):
        for strategy in (AUTO, names[seed % len(names)]):
            *tensor, topology = random_problem(seed)
            line = _make_line([(*tensor, "float32")], topology, strategy, 2**16 << seed % 5)
            yield f"random problem {seed}, {strategy}: {line}"


def _make_line(tensors: Sequence[tuple[Any, ...]], topology: Topology, strategy: str, staging_bytes: int) -> str:
    specs = [TensorSpec(shape, dtype, src, dst, str(index)) for index, (src, dst, shape, dtype) in enumerate(tensors)]
    plan = plan_tensors(specs, strategy=strategy, topology=topology, staging_bytes=staging_bytes)
    check_plan(plan)
    across, inside, copied = plan.bytes_moved()
    return (
        f"{plan.num_messages} messages, {across} + {inside} + {copied} bytes, "
        f"{CostReport(plan).predicted_seconds:.6g} s of {find_bound(plan).seconds:.6g} s, {plan.plan_hash[:12]}"
    )


def main() -> int:
    """Write the golden file."""
    FILE.write_text("".join(f"{line}\n" for line in make_lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
