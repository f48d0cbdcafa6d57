"""Write ``schedules.txt`` in this folder: schedules of each builder for fixed pipelines, with simulated time.

A change of a builder, the search or the simulator changes lines. Review the diff before you commit it.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from reshard.scheduler.ir.schedule import Schedule
from reshard.scheduler.ir.text import format_schedule
from reshard.scheduler.passes.transfer_overlap import block_transfers, defer_recvs
from reshard.scheduler.pipeline import Edge, Pipeline, Stage
from reshard.scheduler.schedules.classic import eager_1f1b, gpipe, one_f_one_b, zb_h1, zb_h2
from reshard.scheduler.schedules.looped import interleaved_1f1b, interleaved_zero_bubble, looped_bfs
from reshard.scheduler.schedules.schedule_search import auto_schedule
from reshard.scheduler.schedules.v_shaped import dualpipe_v, zb_v
from reshard.scheduler.simulation.replay import simulate_schedule
from reshard.scheduler.simulation.validate import check_schedule

FILE = Path(__file__).with_name("schedules.txt")
NUM_PIPELINES = 12


def make_pipeline(chance: random.Random) -> Pipeline:
    """A pipeline of up to four unequal stages, with skip edges and shared links. All times are multiples of 1/8 s."""
    num = chance.randint(1, 4)

    def eighths(most: int) -> float:
        return chance.randint(0, most) / 8

    stages = [
        Stage(eighths(16) + 0.125, eighths(16) + 0.125, eighths(16) + 0.125, chance.randint(1, 4)) for _ in range(num)
    ]
    pairs = [(i, i + 1) for i in range(num - 1)]
    pairs += [(i, j) for i in range(num) for j in range(i + 2, num) if chance.random() < 0.3]
    edges = []
    for i, j in pairs:
        there, back = eighths(20), eighths(20)
        part = chance.choice((0.0, 0.5, 1.0))
        loads = [(("net", seconds * part),) if part and seconds else () for seconds in (there, back)]
        edges.append(Edge(i, j, there, back, *loads))
    return Pipeline(tuple(stages), tuple(edges))


def schedules_of(pipeline: Pipeline, num: int) -> Iterator[tuple[str, Schedule]]:
    """Schedules of a pipeline by name, some with several stages per pp rank."""
    stages = len(pipeline.stages)
    plain = one_f_one_b(pipeline, num)
    yield "1f1b", plain
    yield "1f1b issued at consumer", defer_recvs(plain, pipeline)
    yield "1f1b blocking", block_transfers(plain, pipeline)
    yield "gpipe", gpipe(pipeline, num)
    yield "eager_1f1b", eager_1f1b(pipeline, num)
    yield "zb_h1", zb_h1(pipeline, num)
    yield "zb_h2", zb_h2(pipeline, num)
    yield "auto_schedule", auto_schedule(pipeline, num)
    yield "auto_schedule whole", auto_schedule(pipeline, num, can_split=False)
    for factor in (1, 2):
        limit = factor * max(plain.peak_bytes(pipeline))
        yield f"auto_schedule {limit} bytes", auto_schedule(pipeline, num, activation_limit_bytes=limit)
    if stages % 2 == 0:
        pp_ranks = tuple(stage % (stages // 2) for stage in range(stages))
        yield "auto_schedule on half the pp ranks", auto_schedule(pipeline, num, pp_rank_of_stage=pp_ranks)
        yield "interleaved_1f1b", interleaved_1f1b(pipeline, num, stages // 2)
        yield "interleaved_zero_bubble", interleaved_zero_bubble(pipeline, num, stages // 2)
        yield "looped_bfs", looped_bfs(pipeline, num, stages // 2)
        yield "zb_v", zb_v(pipeline, num)
        yield "dualpipe_v", dualpipe_v(pipeline, num)


def make_lines() -> Iterator[str]:
    """The lines of the file."""
    chance = random.Random(7)
    for number in range(NUM_PIPELINES):
        pipeline, num = make_pipeline(chance), chance.randint(1, 6)
        for name, schedule in schedules_of(pipeline, num):
            check_schedule(schedule, pipeline)
            timeline = simulate_schedule(schedule, pipeline)
            exposed = sum(timeline.exposed_seconds(pp_rank) for pp_rank in range(len(schedule.rank_actions)))
            digest = hashlib.sha256(format_schedule(schedule).encode()).hexdigest()[:12]
            peaks = " ".join(map(str, schedule.peak_bytes(pipeline)))
            yield (
                f"{number}, {len(pipeline.stages)} stages, {num} microbatches, {name}: {timeline.makespan_seconds:.9g} s, "
                f"{exposed:.9g} exposed, keeps {peaks}, in flight {schedule.in_flight}, actions {digest}"
            )


def main() -> int:
    """Write the file."""
    FILE.write_text("".join(f"{line}\n" for line in make_lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
