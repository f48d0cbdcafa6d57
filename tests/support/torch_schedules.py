"""The schedules that the classes of torch.distributed.pipelining make, as the CSV that they write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed.pipelining.schedules as pipelining


def make_torch_schedule(make: Any, num_pp_ranks: int, stages_per_pp_rank: int, num_microbatches: int) -> Any:
    """A schedule of a class of torch, with stand-ins for its stages."""
    num_stages = num_pp_ranks * stages_per_pp_rank
    stages = [
        SimpleNamespace(
            is_first=index == 0,
            is_last=index == num_stages - 1,
            stage_index=index,
            stage_index_to_group_rank={s: s % num_pp_ranks for s in range(num_stages)},
            num_stages=num_stages,
            group_size=num_pp_ranks,
            group_rank=0,
            group=None,
            has_backward=False,
            submod=None,
        )
        for index in range(0, num_stages, num_pp_ranks)
    ]
    single = issubclass(make, pipelining.PipelineScheduleSingle)
    return make(stages[0] if single else stages, num_microbatches)


def torch_csv(schedule: Any) -> str:
    """The computations of a schedule of torch: one line per pp rank."""
    if isinstance(schedule, pipelining.PipelineScheduleSingle):
        order = schedule._get_pipeline_order()
    else:
        order = schedule.pipeline_order
    return "".join(
        ",".join(str(action) for action in order[pp_rank] if action is not None) + "\n" for pp_rank in sorted(order)
    )


#: Classes for one stage per pp rank, for any looped placement, and for a V of two stages per pp rank. The order that
#: Schedule1F1B of torch 2.13 exports cannot run: it numbers the forwards of the last rank from 1.
SINGLE = (pipelining.ScheduleGPipe,)
LOOPED = (
    pipelining.ScheduleLoopedBFS,
    pipelining.ScheduleInterleaved1F1B,
    pipelining.ScheduleInterleavedZeroBubble,
)
V_SHAPED = (pipelining.ScheduleZBVZeroBubble, pipelining.ScheduleDualPipeV)
