"""Compare ``auto_schedule`` with all other schedules of random pipelines: ``python -m tests.campaigns.schedules``.

Each of the builders of ``reshard.scheduler`` and each schedule that a class of torch.distributed.pipelining exports is
simulated on the same placement, by the native loop. ``auto_schedule`` may keep what the other keeps on each row.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from reshard.errors import ArgumentError, ScheduleError
from reshard.scheduler import Edge, Pipeline, Stage, auto_schedule, check_schedule, from_torch_csv
from reshard.scheduler.ir.communication import add_transfers, computations
from reshard.scheduler.ir.schedule import Schedule
from reshard.scheduler.schedules.known_schedules import known_orders
from reshard.scheduler.schedules.orders import OrderModel
from tests.support.torch_schedules import LOOPED, SINGLE, V_SHAPED, make_torch_schedule, torch_csv

#: Losses above this share of the makespan are reported.
TOLERANCE = 1e-3
#: The schedules of each pipeline whose seed is divisible by this are checked completely.
CHECKED = 10


@dataclass(frozen=True)
class Case:
    """A pipeline, the pp rank of each stage, and the number of microbatches."""

    seed: int
    pipeline: Pipeline
    pp_rank_of_stage: tuple[int, ...]
    shape: str
    num_microbatches: int

    def __str__(self) -> str:
        num_pp_ranks = max(self.pp_rank_of_stage) + 1
        return f"{self.seed}: {num_pp_ranks} pp ranks, {self.shape}, {len(self.pp_rank_of_stage)} stages, {self.num_microbatches} mb"


def draw_case(seed: int, most_pp_ranks: int = 16, most_stages: int = 32) -> Case:
    """A random pipeline: equal or unequal costs, skip edges, shared links, looped or V placement."""
    chance = random.Random(seed)
    num_pp_ranks = chance.choice([n for n in (2, 2, 3, 4, 4, 5, 6, 8, 8, 12, 16) if n <= most_pp_ranks])
    shape = chance.choice(["plain", "looped", "looped", "V", "V"])
    per_pp_rank = 1 if shape == "plain" else 2 if shape == "V" else chance.choice([2, 2, 3, 4])
    while num_pp_ranks * per_pp_rank > most_stages:
        per_pp_rank -= 1
    num = num_pp_ranks * per_pp_rank
    spread = chance.choice([0.0, 0.1, 0.3, 0.6])  # of the costs of stages
    communication = chance.choice([0.0, 0.05, 0.2, 0.5, 1.0])  # of a forward
    input_part, weight_part = chance.choice([(1.0, 1.0), (1.0, 1.0), (1.2, 0.8), (1.0, 0.5), (1.3, 1.0)])
    bytes_of = chance.choice([(4, 4), (4, 4), (2, 6)])
    overhead = chance.choice([1.0, 1.0, 0.95])  # a whole backward against its two passes

    def vary(seconds: float) -> float:
        return round(seconds * chance.uniform(1 - spread, 1 + spread), 3)

    stages = []
    for _ in range(num):
        f, i, w = vary(1.0), vary(input_part), vary(weight_part)
        stages.append(Stage(f, i, w, chance.randint(*bytes_of), whole_backward_seconds=round((i + w) * overhead, 4)))
    pairs = [(i, i + 1) for i in range(num - 1)]
    if chance.random() < 0.4:
        pairs += [(i, j) for i in range(num) for j in range(i + 2, num) if chance.random() < 1.5 / num]
    shares_link = chance.random() < 0.2
    edges = []
    for i, j in pairs:
        there, back = vary(communication), vary(communication)
        loads = [(("net", seconds * 0.3),) if shares_link and seconds else () for seconds in (there, back)]
        edges.append(Edge(i, j, there, back, *loads))
    if shape == "V":
        placement = tuple(s if s < num_pp_ranks else 2 * num_pp_ranks - 1 - s for s in range(num))
    else:
        placement = tuple(s % num_pp_ranks for s in range(num))
    count = chance.choice(
        [
            num_pp_ranks,
            num_pp_ranks + 1,
            2 * num_pp_ranks,
            2 * num_pp_ranks,
            3 * num_pp_ranks,
            2 * num_pp_ranks + 1,
            4 * num_pp_ranks,
        ]
    )
    return Case(
        seed, Pipeline(tuple(stages), tuple(edges)), placement, f"{shape} {per_pp_rank} a pp rank", max(2, count)
    )


def others(case: Case) -> Iterator[tuple[str, Schedule]]:
    """The schedules of other builders for a case, by name."""
    num, count, pipeline = len(case.pp_rank_of_stage), case.num_microbatches, case.pipeline
    num_pp_ranks = max(case.pp_rank_of_stage) + 1
    is_looped = case.pp_rank_of_stage == tuple(s % num_pp_ranks for s in range(num))
    for name, order in known_orders(case.pp_rank_of_stage, count):
        yield name, add_transfers(name, order, pipeline, case.pp_rank_of_stage, count)
    classes = [*(SINGLE if num_pp_ranks == num else ()), *(LOOPED if is_looped else V_SHAPED)]
    for make in classes:
        name = f"torch {make.__name__.removeprefix('Schedule')}"
        try:
            original = make_torch_schedule(make, num_pp_ranks, num // num_pp_ranks, count)
        except ValueError:
            continue  # torch refuses this number of microbatches
        yield name, from_torch_csv(torch_csv(original), pipeline, name)


def compare(case: Case) -> Iterator[tuple[str, float]]:
    """For each other schedule of a case: its name, and the makespan of auto_schedule relative to its own."""
    model = OrderModel(case.pipeline, case.pp_rank_of_stage, case.num_microbatches)
    seconds_within: dict[tuple[int, ...], float] = {}  # of auto_schedule, by the peaks of the other schedule
    for name, other in others(case):
        limits = other.peak_bytes(case.pipeline)
        if limits not in seconds_within:
            seconds_within[limits] = auto_seconds(case, model, limits)
        yield name, seconds_within[limits] / model.makespan_seconds(model.numbers(computations(other)))


def auto_seconds(case: Case, model: OrderModel, limits: tuple[int, ...]) -> float:
    """Makespan of auto_schedule within a limit of each row."""
    try:
        ours = auto_schedule(
            case.pipeline, case.num_microbatches, activation_limit_bytes=limits, pp_rank_of_stage=case.pp_rank_of_stage
        )
    except (ArgumentError, ScheduleError):
        return float("inf")
    if case.seed % CHECKED == 0:
        check_schedule(ours, case.pipeline)
    peaks = ours.peak_bytes(case.pipeline)
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)), (case.seed, peaks, limits)
    return model.makespan_seconds(model.numbers(computations(ours)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=400, help="number of random pipelines (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--pp-ranks", type=int, default=16, help="most pp ranks (default: 16)")
    parser.add_argument("--stages", type=int, default=32, help="most stages (default: 32)")
    options = parser.parse_args()
    ratios: dict[str, list[float]] = defaultdict(list)
    begun = time.process_time()
    for seed in range(options.seed, options.seed + options.number):
        case = draw_case(seed, options.pp_ranks, options.stages)
        for name, ratio in compare(case):
            ratios[name].append(ratio)
            if ratio > 1 + TOLERANCE:
                print(f"{case}: {name} is {100 * (ratio - 1):.2f} % faster", flush=True)
    for name, found in sorted(ratios.items()):
        lost = sum(ratio > 1 + TOLERANCE for ratio in found)
        print(
            f"{name}: {len(found)} compared, {lost} lost, mean {statistics.mean(found):.4f}, worst {max(found):.4f}, "
            f"best {min(found):.4f}"
        )
    found = [ratio for one in ratios.values() for ratio in one]
    lost = sum(ratio > 1 + TOLERANCE for ratio in found)
    print(
        f"{options.number} pipelines, {len(found)} comparisons: {lost} lost by more than {100 * TOLERANCE:g} %, mean "
        f"{statistics.mean(found):.4f}, worst {max(found):.4f}; {time.process_time() - begun:.0f} s of CPU"
    )


if __name__ == "__main__":
    main()
