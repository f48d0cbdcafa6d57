"""Schedules as text, both ways, and as the CSV of torch.distributed.pipelining.

::

    1f1b: 2 microbatches, stages on rows 0 1
    0: 0F0 0SEND_F0>1 0F1 ...
    1: 1RECV_F0<0 1F0 ...
"""

from __future__ import annotations

import csv
import io
import re
from collections import deque

from reshard.errors import ArgumentError, ScheduleError

from ..graph import Pipeline, check_pipeline
from .schedule import MOST_ACTIONS, Action, Kind, Schedule

_HEADER = re.compile(
    r"(?P<name>[^:\n]{1,100}): (?P<num>\d{1,7}) microbatches, stages on rows (?P<rows>\d{1,5}( \d{1,5})*)",
    re.ASCII,
)
_ACTION = re.compile(
    r"(?P<stage>\d{1,5})(?P<kind>SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(?P<microbatch>\d{1,7})"
    r"(?:(?P<way>[<>])(?P<other>\d{1,5}))?(?P<blocks>!)?",
    re.ASCII,
)


def format_schedule(schedule: Schedule) -> str:
    """A schedule as text that :func:`parse_schedule` reads."""
    return f"{schedule}\n"


def parse_schedule(text: str) -> Schedule:
    """The inverse of :func:`format_schedule`.

    Raises:
        ScheduleError: a line that cannot be read; it is not checked whether the schedule makes sense.
    """
    _check_text(text)
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    header = _HEADER.fullmatch(lines[0].strip()) if lines else None
    if header is None:
        raise ScheduleError(
            f"line 1: {lines[0][:80] if lines else ''!r} is no header like '1f1b: 8 microbatches, stages on rows 0 1'"
        )
    row_of_stage = tuple(map(int, header["rows"].split()))
    num = int(header["num"])
    if not 1 <= num * len(row_of_stage) <= MOST_ACTIONS:
        raise ScheduleError(
            f"line 1: {num:,} microbatches of {len(row_of_stage)} stages; at least one, and not so many"
        )
    rows = []
    total = 0
    for number, line in enumerate(lines[1:]):
        row, _, rest = line.partition(":")
        if row.strip() != str(number):
            raise ScheduleError(f"line {number + 2}: row {number} is expected, not {row[:40]!r}")
        words = rest.split()
        total += len(words)
        if total > MOST_ACTIONS:
            raise ScheduleError(f"more than {MOST_ACTIONS:,} actions")
        try:
            rows.append(tuple(parse_action(word) for word in words))
        except ScheduleError as error:
            raise ScheduleError(f"line {number + 2}: {error}") from None
    return Schedule(header["name"], tuple(rows), row_of_stage, num)


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise ScheduleError(f"a schedule is read from a text, not from {type(text).__name__}")


def parse_action(word: str) -> Action:
    """One action as it prints.

    Raises:
        ScheduleError: it is none.
    """
    found = _ACTION.fullmatch(word)
    if found is None:
        raise ScheduleError(f"{word[:40]!r} is no action like 0F3, 0SEND_F3>1 or 1RECV_F3<0")
    kind = Kind(found["kind"])
    if kind.is_transfer != (found["other"] is not None) or (found["blocks"] and not kind.is_transfer):
        raise ScheduleError(f"{word!r}: transfers, and only they, name another stage and may block")
    if kind.is_transfer and (found["way"] == ">") != kind.is_send:
        raise ScheduleError(f"{word!r}: what is sent goes > to a stage, what is received comes < from one")
    other = None if found["other"] is None else int(found["other"])
    return Action(kind, int(found["stage"]), int(found["microbatch"]), other, bool(found["blocks"]))


def to_torch_csv(schedule: Schedule, *, transfers: bool = False) -> str:
    """The CSV that torch's pipeline runtime loads: one line per row, actions without the stages at other ends.

    Args:
        transfers: whether to write them. Without, which is what to load, torch adds its own, and what else it needs:
            with them ("compute_comms") it would not divide gradients by the number of microbatches. Then receives stand
            right before what needs them, since torch's dry run refuses any that stands before its send.

    Raises:
        ScheduleError: a transfer between stages that are not neighbours, or one that blocks; torch has neither.
    """
    if not isinstance(schedule, Schedule):
        raise ArgumentError(f"a Schedule is needed, not {type(schedule).__name__}")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in schedule.rows:
        actions: list[Action] = []
        held: dict[tuple[bool, int], dict[int | None, deque[Action]]] = {}  # receives of each channel, in order
        for action in row:
            if action.kind.is_transfer:
                if abs(action.stage - (action.other or 0)) != 1 or (transfers and action.blocks):
                    raise ScheduleError(
                        f"{action}: torch's text has transfers between neighbours only, none that block"
                    )
                if not transfers:
                    continue
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                lines = held.setdefault((action.kind is Kind.RECV_F, action.stage), {})
                lines.setdefault(action.other, deque()).append(action)
                continue
            if action.kind in (Kind.F, Kind.B, Kind.I):
                for line in held.get((action.kind is Kind.F, action.stage), {}).values():
                    if any(recv.microbatch == action.microbatch for recv in line):
                        while line[0].microbatch != action.microbatch:
                            actions.append(line.popleft())
                        actions.append(line.popleft())
            actions.append(action)
        writer.writerow(f"{action.stage}{action.kind}{action.microbatch}" for action in actions)
    return out.getvalue()


def from_torch_csv(text: str, pipeline: Pipeline, name: str = "torch") -> Schedule:
    """A schedule from torch's CSV, with its transfers if it has some and those of the pipeline's edges if not.

    What torch's FSDP does between (``0UNSHARD``, ``0RESHARD``, ``0REDUCE_GRAD``) is passed over.

    Raises:
        ScheduleError: a cell that is no action, or a row that no stage belongs to.
    """
    from .communication import add_transfers

    _check_text(text)
    check_pipeline(pipeline)
    rows: list[list[Action]] = []
    try:
        lines = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ScheduleError(f"the text is no CSV: {error}") from None
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    for row, cells in enumerate(lines):
        words = [cell.strip() for cell in cells]
        if not any(words):
            raise ScheduleError(f"row {row} is empty, so no stage belongs to it")
        rows.append([_from_torch(word) for word in words if word and not _TORCH_FSDP.fullmatch(word)])
        if not rows[-1]:
            raise ScheduleError(f"row {row} has nothing that a stage computes or sends")
        if sum(map(len, rows)) > MOST_ACTIONS:
            raise ScheduleError(f"more than {MOST_ACTIONS:,} actions")
    row_of: dict[int, int] = {}
    for row, actions in enumerate(rows):
        for action in actions:
            if row_of.setdefault(action.stage, row) != row:
                raise ScheduleError(f"stage {action.stage} is on rows {row_of[action.stage]} and {row}")
    if sorted(row_of) != list(range(len(pipeline.stages))):
        raise ScheduleError(f"the text has stages {sorted(row_of)}, the pipeline 0 to {len(pipeline.stages) - 1}")
    row_of_stage = tuple(row_of[stage] for stage in range(len(row_of)))
    num = 1 + max(action.microbatch for row in rows for action in row)
    if num * len(row_of_stage) > MOST_ACTIONS:
        raise ScheduleError(f"{num:,} microbatches of {len(row_of_stage)} stages are too many")
    if any(action.kind.is_transfer for row in rows for action in row):
        return Schedule(name, tuple(map(tuple, rows)), row_of_stage, num)
    return add_transfers(name, rows, pipeline, row_of_stage, num)


#: Where torch's transfer of a stage leads.
_TORCH_STEP = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}
_TORCH_FSDP = re.compile(r"\d{1,5}(UNSHARD|RESHARD|REDUCE_GRAD)")
_TORCH = re.compile(r"(\d{1,5})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d{1,7})")


def _from_torch(cell: str) -> Action:
    found = _TORCH.fullmatch(cell)
    if found is None:
        raise ScheduleError(f"{cell[:40]!r} is no action of torch's text that is known here, like 0F3, 1SEND_B2 or 1W4")
    kind, stage = Kind(found[2]), int(found[1])
    other = stage + _TORCH_STEP[kind] if kind.is_transfer else None
    return Action(kind, stage, int(found[3]), other)
