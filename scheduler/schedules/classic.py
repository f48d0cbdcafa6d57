"""Builders of well-known schedules."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import ArgumentError

from ..graph import Pipeline, check_pipeline
from ..ir.communication import add_transfers
from ..ir.schedule import MOST_ACTIONS, Action, Kind, Schedule


def gpipe(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards. Most in flight: all microbatches. Source: GPipe (Huang et al., 2019)."""
    check_microbatches(pipeline, num_microbatches)
    return from_warmups("gpipe", pipeline, num_microbatches, [num_microbatches] * len(pipeline.stages))


def one_f_one_b(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """1F1B: stage i of n starts with n - i forwards, then alternates backwards and forwards.

    Most in flight: ``min(m, n - i)``. Source: PipeDream-Flush (Narayanan et al., 2021).
    """
    check_microbatches(pipeline, num_microbatches)
    num = len(pipeline.stages)
    return from_warmups("1f1b", pipeline, num_microbatches, [num - i for i in range(num)])


def eager_1f1b(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """1F1B with two more forwards at the start for each later stage, instead of one. Ignores communication costs.

    Most in flight: ``min(m, 2 * (n - i) - 1)``. Source: "On Optimizing the Communication of Model Parallelism" (Zhuang
    et al., 2023).
    """
    check_microbatches(pipeline, num_microbatches)
    num = len(pipeline.stages)
    return from_warmups("eager-1f1b", pipeline, num_microbatches, [2 * (num - i) - 1 for i in range(num)])


def interleaved_1f1b(pipeline: Pipeline, num_microbatches: int, num_rows: int) -> Schedule:
    """Interleaved 1F1B: row r computes stages r, r + num_rows, r + 2 * num_rows, ...

    Source: Megatron-LM (Narayanan et al., 2021).

    Raises:
        ArgumentError: ``num_rows`` does not divide the number of stages and the number of microbatches.
    """
    check_microbatches(pipeline, num_microbatches)
    num_stages = len(pipeline.stages)
    if isinstance(num_rows, bool) or not isinstance(num_rows, int):
        raise ArgumentError(f"num_rows is {num_rows!r}; it must be an integer")
    if num_rows < 1 or num_stages % num_rows or num_microbatches % num_rows:
        raise ArgumentError(
            f"interleaved 1F1B: {num_rows} rows must divide {num_stages} stages and {num_microbatches} microbatches"
        )
    num_chunks = num_stages // num_rows  # stages per row
    total = num_chunks * num_microbatches

    def forward(row: int, nth: int) -> Action:
        group, within = divmod(nth, num_rows * num_chunks)
        return Action(Kind.F, within // num_rows * num_rows + row, group * num_rows + within % num_rows)

    def backward(row: int, nth: int) -> Action:
        group, within = divmod(nth, num_rows * num_chunks)
        chunk = num_chunks - 1 - within // num_rows
        return Action(Kind.B, chunk * num_rows + row, group * num_rows + within % num_rows)

    rows = []
    for row in range(num_rows):
        ahead = min(total, 2 * (num_rows - 1 - row) + (num_chunks - 1) * num_rows + 1)
        actions = [forward(row, nth) for nth in range(ahead)]
        for nth in range(total):
            actions.append(backward(row, nth))
            if ahead + nth < total:
                actions.append(forward(row, ahead + nth))
        rows.append(actions)
    row_of_stage = [stage % num_rows for stage in range(num_stages)]
    return add_transfers("interleaved-1f1b", rows, pipeline, row_of_stage, num_microbatches)


def zb_h1(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """1F1B with split backwards: stage i defers weight-gradient passes by i microbatches, which fills its bubbles.

    Most in flight: ``min(m, n)`` on every stage. Source: ZB-H1 in "Zero Bubble Pipeline Parallelism" (Qi et
    al., 2023).
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
    """One stage per row: each stage starts with some forwards, then alternates backwards and forwards.

    Args:
        name: name of the schedule.
        pipeline, num_microbatches: what to schedule.
        warmups: for each stage, the number of forwards before its first backward, at least one. Numbers above
            ``num_microbatches`` mean all of them.

    Raises:
        ArgumentError: an argument is out of range, or a stage has fewer warm-up forwards than a later stage that needs
            its outputs, which would deadlock.
    """
    check_microbatches(pipeline, num_microbatches)
    if not isinstance(warmups, Sequence):
        raise ArgumentError(f"warmups must be a list with a number for each stage, not {warmups!r}")
    if len(warmups) != len(pipeline.stages) or not all(isinstance(depth, int) and depth > 0 for depth in warmups):
        raise ArgumentError(
            f"warmups {list(warmups)}: each of {len(pipeline.stages)} stages needs an integer of at least 1"
        )
    for edge in pipeline.edges:
        a, b = (min(num_microbatches, warmups[stage]) for stage in (edge.src, edge.dst))
        if a < b:
            raise ArgumentError(
                f"stage {edge.dst} needs {b} forwards of stage {edge.src} before its first backward, but stage "
                f"{edge.src} waits for that backward after {a}: raise its warm-up"
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
    """Raise ArgumentError unless there is a pipeline and a valid number of microbatches."""
    check_pipeline(pipeline)
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ArgumentError(f"num_microbatches is {num_microbatches!r}; it must be an integer of at least 1")
    most = MOST_ACTIONS // len(pipeline.stages)
    if num_microbatches > most:
        raise ArgumentError(f"at most {most:,} microbatches can be scheduled on {len(pipeline.stages)} stages")
