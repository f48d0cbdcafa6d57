"""The schedules that the field knows, each a function from a pipeline to a :class:`Schedule`."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import ArgumentError

from ..graph import Pipeline, check_pipeline
from ..ir.communication import add_transfers
from ..ir.schedule import MOST_ACTIONS, Action, Kind, Schedule


def gpipe(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards. Peak in flight: all microbatches. Source: GPipe (Huang et al., 2019)."""
    check_microbatches(pipeline, num_microbatches)
    return from_warmups("gpipe", pipeline, num_microbatches, [num_microbatches] * len(pipeline.stages))


def one_f_one_b(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """Stage i of n runs n - i forwards ahead, then one backward and one forward in turn.

    Peak in flight: ``min(m, n - i)``. Source: PipeDream-Flush (Narayanan et al., 2021).
    """
    check_microbatches(pipeline, num_microbatches)
    num = len(pipeline.stages)
    return from_warmups("1f1b", pipeline, num_microbatches, [num - i for i in range(num)])


def eager_1f1b(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """As 1F1B, with two forwards ahead for each later stage in place of one, whatever communication costs.

    Peak in flight: ``min(m, 2 * (n - i) - 1)``. Source: the 2023 study of cross-mesh resharding.
    """
    check_microbatches(pipeline, num_microbatches)
    num = len(pipeline.stages)
    return from_warmups("eager-1f1b", pipeline, num_microbatches, [2 * (num - i) - 1 for i in range(num)])


def interleaved_1f1b(pipeline: Pipeline, num_microbatches: int, num_rows: int) -> Schedule:
    """1F1B where row r computes stages r, r + rows, r + 2 * rows, ...

    Source: Megatron-LM (Narayanan et al., 2021).

    Raises:
        ArgumentError: the rows do not divide the stages, or the microbatches.
    """
    check_microbatches(pipeline, num_microbatches)
    num_stages = len(pipeline.stages)
    if isinstance(num_rows, bool) or not isinstance(num_rows, int):
        raise ArgumentError(f"num_rows is {num_rows!r}; it must be an integer")
    if num_rows < 1 or num_stages % num_rows or num_microbatches % num_rows:
        raise ArgumentError(
            f"interleaved 1F1B: {num_rows} rows must divide {num_stages} stages and {num_microbatches} microbatches"
        )
    parts = num_stages // num_rows  # stages of a row
    total = parts * num_microbatches

    def forward(row: int, nth: int) -> Action:
        group, within = divmod(nth, num_rows * parts)
        return Action(Kind.F, within // num_rows * num_rows + row, group * num_rows + within % num_rows)

    def backward(row: int, nth: int) -> Action:
        group, within = divmod(nth, num_rows * parts)
        part = parts - 1 - within // num_rows
        return Action(Kind.B, part * num_rows + row, group * num_rows + within % num_rows)

    rows = []
    for row in range(num_rows):
        ahead = min(total, 2 * (num_rows - 1 - row) + (parts - 1) * num_rows + 1)
        actions = [forward(row, nth) for nth in range(ahead)]
        for nth in range(total):
            actions.append(backward(row, nth))
            if ahead + nth < total:
                actions.append(forward(row, ahead + nth))
        rows.append(actions)
    row_of_stage = [stage % num_rows for stage in range(num_stages)]
    return add_transfers("interleaved-1f1b", rows, pipeline, row_of_stage, num_microbatches)


def zb_h1(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """1F1B with the backward in halves: the weights' half of stage i comes i microbatches later, into the bubble.

    Peak in flight: that of stage 0 in 1F1B, on every stage. Source: ZB-H1 (Qi et al., 2023).
    """
    check_microbatches(pipeline, num_microbatches)
    num = len(pipeline.stages)
    rows = []
    for stage in range(num):
        row: list[Action] = []
        ahead = min(num_microbatches, num - stage)
        row += [Action(Kind.F, stage, nth) for nth in range(ahead)]
        for nth in range(num_microbatches):
            row.append(Action(Kind.I, stage, nth))
            if nth >= stage:
                row.append(Action(Kind.W, stage, nth - stage))
            if ahead + nth < num_microbatches:
                row.append(Action(Kind.F, stage, ahead + nth))
        row += [Action(Kind.W, stage, nth) for nth in range(max(0, num_microbatches - stage), num_microbatches)]
        rows.append(row)
    return add_transfers("zero-bubble", rows, pipeline, range(num), num_microbatches)


def from_warmups(name: str, pipeline: Pipeline, num_microbatches: int, warmups: Sequence[int]) -> Schedule:
    """One stage per row: so many forwards ahead, then one backward and one forward in turn.

    Args:
        warmups: of each stage the forwards before its first backward, at least one; more than there are counts as all.

    Raises:
        ArgumentError: no microbatch, a stage without a warm-up, or one that a later stage would wait for in vain.
    """
    check_microbatches(pipeline, num_microbatches)
    if not isinstance(warmups, Sequence):
        raise ArgumentError(f"warm-ups are a list with one of each stage, not {warmups!r}")
    if len(warmups) != len(pipeline.stages) or not all(isinstance(depth, int) and depth > 0 for depth in warmups):
        raise ArgumentError(f"warm-ups {list(warmups)}: each of {len(pipeline.stages)} stages needs one, from 1 on")
    for edge in pipeline.edges:
        a, b = (min(num_microbatches, warmups[stage]) for stage in (edge.src, edge.dst))
        if a < b:
            raise ArgumentError(
                f"stage {edge.dst} waits for {b} forwards of stage {edge.src}, which makes {a} before it waits for it"
            )
    rows = []
    for stage, warmup in enumerate(warmups):
        ahead = min(num_microbatches, warmup)
        row = [Action(Kind.F, stage, nth) for nth in range(ahead)]
        for nth in range(num_microbatches):
            row.append(Action(Kind.B, stage, nth))
            if ahead + nth < num_microbatches:
                row.append(Action(Kind.F, stage, ahead + nth))
        rows.append(row)
    return add_transfers(name, rows, pipeline, range(len(warmups)), num_microbatches)


def check_microbatches(pipeline: Pipeline, num_microbatches: int) -> None:
    """Raise ArgumentError unless there is a pipeline, and at least one microbatch."""
    check_pipeline(pipeline)
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ArgumentError(f"num_microbatches is {num_microbatches!r}; it must be an integer from 1 on")
    most = MOST_ACTIONS // len(pipeline.stages)
    if num_microbatches > most:
        raise ArgumentError(f"at most {most:,} microbatches can be scheduled on {len(pipeline.stages)} stages")
