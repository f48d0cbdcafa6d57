"""Compare the serial estimate of random plans between pods with their simulated time.

``python -m tests.campaigns.estimates --pairs 250``. ``multicast`` makes the plan of each pair of layouts as a whole and,
if it consists of parts that share no port, in parts. The campaign fails if an estimate is below the lower bound, or if
more than ``--outliers`` of the estimates are further from the simulated time than ``--tolerance``.

``--unordered`` instead takes plans of ``send_recv`` that are too large to be simulated by default, and fails if the
serial estimate times ``UNORDERED`` is below the time of a longer simulation.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator

from reshard import Layout, Mesh
from reshard.cost import find_bound
from reshard.cost.fluid import TooMuchWork
from reshard.cost.prediction import MAX_OPERATIONS, UNORDERED
from reshard.cost.serial_ports import serial_seconds
from reshard.cost.simulator import simulate_until
from reshard.plan import Plan
from reshard.planner.multicast.problem_parts import split_by_ports
from reshard.planner.multicast.strategy import schedule_chunks
from reshard.planner.strategies.chunking import routes_to_transfers
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.sends_and_all_gathers import send_recv
from reshard.sharding import TensorSpec
from reshard.topology import Host, Link, Topology

SPECS = ("S0 R", "R S0", "S0 S1", "S1 S0", "R S1", "S1 R", "S01 R", "R S01")
NIC_RATE = 5e9
#: A simulation takes at most some 20 s.
MAX_SIMULATED = 10**9
#: Layouts between which all pairs of hosts exchange data, or many do.
EXCHANGES = (("S0 S1", "S1 S0"), ("S0 R", "R S0"), ("S01 R", "S1 R"), ("S0 R", "R S1"), ("R S01", "S0 S1"))


def make_problem(seed: int) -> PlanProblem:
    """A tensor that moves between 16 to 128 ranks in pods of 1 to 4 hosts, whose uplinks carry 1 to 1/4 of the NICs."""
    chance = random.Random(seed)
    ranks_per_host, hosts_per_pod = chance.choice((2, 4, 8)), chance.choice((1, 2, 4))
    num_nics = chance.choice((1, ranks_per_host))
    num_sources, num_destinations = chance.choice((32, 64, 128)), chance.choice((16, 32, 64))
    rows, columns = (chance.choice((1, 2, 4, 8, 16)) for _ in range(2))
    first_rank = num_sources if chance.random() < 0.8 else 0
    num_ranks = max(num_sources, first_rank + num_destinations)
    num_hosts = -(-num_ranks // ranks_per_host)
    uplink = hosts_per_pod * num_nics * NIC_RATE / chance.choice((1, 1.5, 2, 3, 4))
    topology = Topology(
        tuple(rank // ranks_per_host for rank in range(num_ranks)),
        tuple(Host((Link.of(NIC_RATE),) * num_nics, pod=host // hosts_per_pod) for host in range(num_hosts)),
        tuple(rank % ranks_per_host % num_nics for rank in range(num_ranks)),
        (Link.of(uplink),) * -(-num_hosts // hosts_per_pod),
        inside_bytes_per_second=chance.choice((None, 1e11)),
        latency_seconds=1e-5,
        inside_latency_seconds=5e-6,
    )
    src = Layout(Mesh.of(f"{num_sources // rows}x{rows}"), chance.choice(SPECS))
    dst = Layout(Mesh.of(f"{num_destinations // columns}x{columns}", first_rank=first_rank), chance.choice(SPECS))
    shape = (256, chance.choice((64, 256)), chance.choice((512, 4096)))
    return PlanProblem.of([TensorSpec(shape, "float32", src, dst, f"seed {seed}")], topology)


def make_plans(problem: PlanProblem) -> Iterator[tuple[str, Plan]]:
    """The plan of the problem as a whole and, if it consists of parts, the one in parts."""
    limits = {"whole": sys.maxsize} | ({"parts": 0} if split_by_ports(problem, 0) else {})
    for kind, max_together in limits.items():
        transfers = routes_to_transfers(problem, schedule_chunks(problem, max_together=max_together))
        yield kind, Plan(problem.tensors, problem.topology, "multicast", transfers, problem.staging_bytes)


def make_exchange(seed: int) -> Plan:
    """A plan of ``send_recv`` from 128 to 1,024 ranks of hosts of eight to as many others, or to half as many."""
    chance = random.Random(seed)
    num_hosts, num_nics = chance.choice((16, 32, 48, 64, 128)), chance.choice((1, 1, 4, 8))
    num_pods = chance.choice((0, 0, 8))
    nic = Link.of(chance.choice((1.25e9, 5e10)))
    topology = Topology(
        tuple(rank // 8 for rank in range(16 * num_hosts)),
        tuple(Host((nic,) * num_nics, host * num_pods // (2 * num_hosts) if num_pods else None)
              for host in range(2 * num_hosts)),
        pods=(Link.of(num_hosts * num_nics * nic.egress_bytes_per_second / 8),) * num_pods,
        latency_seconds=chance.choice((1e-4, 1e-5)),
        inside_latency_seconds=5e-6,
    )  # fmt: skip
    specs = chance.choice(EXCHANGES)
    src = Layout(Mesh.of((num_hosts, 8)), specs[0])
    dst = Layout(Mesh.of((num_hosts // chance.choice((1, 2)), 8), first_rank=8 * num_hosts), specs[1])
    shape = 65536, chance.choice((65536, 65521))
    problem = PlanProblem.of([TensorSpec(shape, "bfloat16", src, dst, f"seed {seed}")], topology)
    return Plan(problem.tensors, topology, "send_recv", routes_to_transfers(problem, send_recv(problem)))


def compare_unordered(seeds: range) -> int:
    """Print how much longer plans of :func:`make_exchange` take than their serial estimates; the exit status."""
    ratios: list[float] = []
    for seed in seeds:
        plan = make_exchange(seed)
        try:
            simulate_until(plan, float("inf"), MAX_OPERATIONS)
            continue  # such a plan is never estimated
        except TooMuchWork:
            pass
        try:
            timeline = simulate_until(plan, float("inf"), 2 * MAX_SIMULATED)
        except TooMuchWork:
            print(f"seed {seed}, {plan.num_messages} messages: not simulated", flush=True)
            continue
        assert timeline is not None
        ratios.append(timeline.makespan_seconds / serial_seconds(plan))
        print(f"seed {seed}, {plan.num_messages} messages: {ratios[-1]:.3f} times the estimate", flush=True)
    print(f"{len(ratios)} plans: up to {max(ratios, default=0.0):.3f} times the serial estimate")
    return int(max(ratios, default=0.0) > UNORDERED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=250, help="number of random pairs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first pair")
    parser.add_argument("--tolerance", type=float, default=0.02, help="relative error of an estimate that is close")
    parser.add_argument("--outliers", type=int, default=20, help="number of estimates that may be further away")
    parser.add_argument("--unordered", action="store_true", help="plans of send_recv that are too large to simulate")
    options = parser.parse_args()
    if options.unordered:
        sys.exit(compare_unordered(range(options.seed, options.seed + options.pairs)))
    ratios: list[float] = []
    below, spent = 0, {"simulated": 0.0, "estimated": 0.0}
    for seed in range(options.seed, options.seed + options.pairs):
        for kind, plan in make_plans(make_problem(seed)):
            if not plan.num_messages:
                continue
            begin = time.process_time()
            try:
                timeline = simulate_until(plan, float("inf"), MAX_SIMULATED)
            except TooMuchWork:
                print(f"seed {seed}, {kind}: not simulated", flush=True)
                continue
            middle = time.process_time()
            estimate = serial_seconds(plan)
            spent["simulated"] += middle - begin
            spent["estimated"] += time.process_time() - middle
            assert timeline is not None
            bound, simulated = find_bound(plan).seconds, timeline.makespan_seconds
            if not simulated:
                continue
            ratios.append(estimate / simulated)
            below += estimate < bound * (1 - 1e-9)
            if abs(ratios[-1] - 1) > options.tolerance or estimate < bound * (1 - 1e-9):
                print(
                    f"seed {seed}, {kind}, {plan.num_messages} messages: estimate {estimate:.6g} s, simulated "
                    f"{simulated:.6g} s ({ratios[-1]:.3f}), bound {bound:.6g} s",
                    flush=True,
                )
    outliers = sum(abs(ratio - 1) > options.tolerance for ratio in ratios)
    print(
        f"{len(ratios)} plans: estimates are {min(ratios):.3f} to {max(ratios):.3f} of the simulated time, in the "
        f"median {statistics.median(ratios):.3f}; {outliers} are further away than {options.tolerance}, {below} below "
        f"the bound; {spent['estimated']:.2f} CPU s for estimates, {spent['simulated']:.2f} for simulations"
    )
    sys.exit(int(below > 0 or outliers > options.outliers))


if __name__ == "__main__":
    main()
