"""Schedules as values: what each row of devices does, in order."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from reshard.errors import ArgumentError, ScheduleError

from ..graph import Pipeline, check_pipeline


class Kind(enum.StrEnum):
    """What an action does. ``B`` is a whole backward, ``I`` and ``W`` are its halves."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 the field's name for it
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def is_transfer(self) -> bool:
        """Whether it moves something between stages."""
        return self in _TRANSFERS

    @property
    def is_send(self) -> bool:
        """Whether it is the sender's end of a transfer."""
        return self in (Kind.SEND_F, Kind.SEND_B)


#: More actions than this are not read or made.
MOST_ACTIONS = 1_000_000
MOST_NAME = 100
_TRANSFERS = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
#: By how much an action changes what is kept: microbatches begun and not finished.
_KEPT = {Kind.F: 1, Kind.B: -1, Kind.W: -1}


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a row does: compute for a microbatch of a stage, or start one end of a transfer.

    ``other`` is the stage at the other end. A transfer goes on by itself: a send is never waited for, a receive by the
    computation that needs it. One that ``blocks`` is waited for at once, and starts only when both ends have come.

    Printed as ``0F3``, ``0SEND_F3>1``, ``1RECV_F3<0``, with a ``!`` behind those that block.
    """

    kind: Kind
    stage: int
    microbatch: int
    other: int | None = None
    blocks: bool = False

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.microbatch}"
        if self.other is not None:
            text += f"{'>' if self.kind.is_send else '<'}{self.other}"
        return text + "!" * self.blocks

    def __post_init__(self) -> None:
        if not isinstance(self.kind, Kind):
            raise ScheduleError(f"the kind of an action is a Kind, not {self.kind!r}")
        for what, number in (("stage", self.stage), ("microbatch", self.microbatch), ("other stage", self.other)):
            if type(number) is not int and not (number is None and what == "other stage"):
                raise ScheduleError(f"the {what} of an action is an integer, not {number!r}")

    @property
    def channel(self) -> Channel:
        """The transfers that it stands in line with.

        Raises:
            ScheduleError: it is no transfer.
        """
        if self.other is None:
            raise ScheduleError(f"{self} is no transfer with another stage")
        ends = (self.stage, self.other) if self.kind.is_send else (self.other, self.stage)
        return Channel(*ends, self.kind in (Kind.SEND_F, Kind.RECV_F))


@dataclass(frozen=True, slots=True)
class Channel:
    """All transfers of one edge in one direction; they pass one after the other, in the order of both ends."""

    sender: int
    receiver: int
    is_forward: bool


@dataclass(frozen=True)
class Schedule:
    """What each row of devices does, in order; a row computes one stage or several.

    Attributes:
        name: of the builder and passes that made it. rows: the actions of each row. row_of_stage: who computes what.
        num_microbatches: of each stage.

    Raises:
        ScheduleError: a name that its text could not hold.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    row_of_stage: tuple[int, ...]
    num_microbatches: int

    def __post_init__(self) -> None:
        is_whole = isinstance(self.rows, tuple) and isinstance(self.row_of_stage, tuple)
        if not is_whole or not all(isinstance(row, tuple) for row in self.rows):
            raise ScheduleError("rows of a schedule are a tuple of tuples of Actions, row_of_stage is one of integers")
        numbers = (*self.row_of_stage, self.num_microbatches)
        if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
            raise ScheduleError("row_of_stage and num_microbatches of a schedule are integers")
        for row in self.rows:
            for action in row:
                if not isinstance(action, Action):
                    raise ScheduleError(f"a schedule is made of Actions, not of {type(action).__name__}")
        if not isinstance(self.name, str):
            raise ScheduleError(f"a schedule's name is a text, not {self.name!r}")
        if not 0 < len(self.name) <= MOST_NAME or self.name != self.name.strip() or {":", "\n"} & set(self.name):
            raise ScheduleError(
                f"a schedule's name is up to {MOST_NAME} characters on one line without a colon, not {self.name!r}"
            )

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.row_of_stage)

    def renamed(self, suffix: str) -> str:
        """A name for what a pass makes of it: this one, shortened if need be, and a suffix."""
        return self.name[: MOST_NAME - len(suffix)].rstrip() + suffix

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        for row, actions in enumerate(self.rows):
            for action in actions:
                yield row, action

    @cached_property
    def named_stages(self) -> tuple[int, int]:
        """The lowest and the highest stage that actions name.

        Raises:
            ScheduleError: a transfer without another stage.
        """
        low, high = 0, 0
        for row, action in self:
            if action.kind.is_transfer and action.other is None:
                raise ScheduleError(f"{action} on row {row} is a transfer without a stage at its other end")
            ends = (action.stage, action.stage if action.other is None else action.other)
            low, high = min(low, *ends), max(high, *ends)
        return low, high

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Of each stage the most microbatches that it has begun and not finished.

        Raises:
            ScheduleError: an action of a stage that there is not.
        """
        _check_stages(self)
        now, most = [0] * self.num_stages, [0] * self.num_stages
        for _, action in self:
            now[action.stage] += _KEPT.get(action.kind, 0)
            most[action.stage] = max(most[action.stage], now[action.stage])
        return tuple(most)

    def peak_bytes(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Of each row the most activations that a device keeps at once."""
        check_fits(self, pipeline)
        now, most = [0] * len(self.rows), [0] * len(self.rows)
        for row, action in self:
            now[row] += _KEPT.get(action.kind, 0) * pipeline.stages[action.stage].activation_bytes
            most[row] = max(most[row], now[row])
        return tuple(most)

    def __str__(self) -> str:
        """A header and one row per line; :func:`~reshard.scheduler.parse_schedule` reads it."""
        rows = " ".join(map(str, self.row_of_stage))
        lines = [f"{self.name}: {self.num_microbatches} microbatches, stages on rows {rows}"]
        lines += [f"{row}: {' '.join(map(str, actions))}".rstrip() for row, actions in enumerate(self.rows)]
        return "\n".join(lines)


def check_fits(schedule: object, pipeline: object) -> None:
    """Raise unless a schedule is one, and of no more stages than the pipeline has.

    Raises:
        ArgumentError: something else was given. ScheduleError: it was made for another pipeline.
    """
    check_pipeline(pipeline)
    if not isinstance(schedule, Schedule):
        raise ArgumentError(f"a Schedule is needed, not {type(schedule).__name__}")
    assert isinstance(pipeline, Pipeline)
    num = len(pipeline.stages)
    if schedule.num_stages != num:
        raise ScheduleError(f"the schedule has {schedule.num_stages} stages, the pipeline {num}")
    _check_stages(schedule)


def _check_stages(schedule: Schedule) -> None:
    for stage in schedule.named_stages:
        if not 0 <= stage < schedule.num_stages:
            raise ScheduleError(f"the schedule names stage {stage}; there are stages 0 to {schedule.num_stages - 1}")
