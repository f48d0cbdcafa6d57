"""Pipeline schedules as immutable values.

A schedule has a list of actions for each pp rank, the rank in the pipeline. All stages of a pp rank run on the same
devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from reshard.arguments import check_arguments
from reshard.drawing import Drawn
from reshard.errors import ArgumentError, ScheduleError
from reshard.formatting import brief

from ..pipeline import Pipeline, check_pipeline
from .actions import Action, Kind
from .dependency_graph import build_dependency_graph

if TYPE_CHECKING:
    import networkx as nx

#: Maximum number of actions in a schedule. Parsers and builders reject larger schedules.
MAX_ACTIONS = 1_000_000
#: Maximum length of the name of a schedule.
MAX_NAME = 100
#: See :func:`in_flight_change`.
_IN_FLIGHT_CHANGE = {Kind.F: 1, Kind.B: -1, Kind.W: -1}


def in_flight_change(kind: Kind) -> int:
    """Change in the number of microbatches in flight: those whose forward has run and whose backward has not."""
    return _IN_FLIGHT_CHANGE.get(kind, 0)


@dataclass(frozen=True)
class Schedule(Drawn):
    """The actions of each pp rank, in order.

    Attributes:
        name: names of the builder and the passes that made the schedule.
        rank_actions: actions of each pp rank.
        pp_rank_of_stage: pp rank that computes each stage.
        num_microbatches: microbatches per iteration.

    Raises:
        ScheduleError: a field has the wrong type, or the text form cannot hold the name.
    """

    name: str
    rank_actions: tuple[tuple[Action, ...], ...]
    pp_rank_of_stage: tuple[int, ...]
    num_microbatches: int

    def __post_init__(self) -> None:
        is_whole = isinstance(self.rank_actions, tuple) and isinstance(self.pp_rank_of_stage, tuple)
        if not is_whole or not all(isinstance(actions, tuple) for actions in self.rank_actions):
            raise ScheduleError(
                "rank_actions must be a tuple of tuples of Actions, and pp_rank_of_stage a tuple of integers"
            )
        numbers = (*self.pp_rank_of_stage, self.num_microbatches)
        if any(isinstance(number, bool) or not isinstance(number, int) or number >= 2**62 for number in numbers):
            raise ScheduleError("pp_rank_of_stage and num_microbatches of a schedule must be integers below 2**62")
        for actions in self.rank_actions:
            for action in actions:
                if not isinstance(action, Action):
                    raise ScheduleError(f"rank_actions of a schedule must hold Actions, not {type(action).__name__}")
        if not isinstance(self.name, str):
            raise ScheduleError(f"the name of a schedule must be a string, not {brief(self.name)}")
        if not 0 < len(self.name) <= MAX_NAME or self.name != self.name.strip() or {":", "\n"} & set(self.name):
            raise ScheduleError(
                f"a schedule's name must be up to {MAX_NAME} characters on one line without a colon, not "
                f"{brief(self.name)}"
            )

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline."""
        return len(self.pp_rank_of_stage)

    def renamed(self, suffix: str) -> str:
        """The name and a suffix. The name is cut so that both have at most :data:`MAX_NAME` characters."""
        return self.name[: MAX_NAME - len(suffix)].rstrip() + suffix

    @check_arguments(num_microbatches=(0, MAX_ACTIONS))
    def first(self, num_microbatches: int) -> Schedule:
        """The schedule of the first microbatches alone.

        It is valid if this one is: pp ranks keep the order of actions.
        """
        rank_actions = tuple(
            tuple(action for action in actions if action.microbatch < num_microbatches) for actions in self.rank_actions
        )
        return replace(self, rank_actions=rank_actions, num_microbatches=num_microbatches)

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        for pp_rank, actions in enumerate(self.rank_actions):
            for action in actions:
                yield pp_rank, action

    @cached_property
    def named_stages(self) -> tuple[int, int]:
        """The lowest and the highest stage that any action names. Stage 0 always counts as named.

        Raises:
            ScheduleError: a transfer names no stage at its other end.
        """
        low, high = 0, 0
        for pp_rank, action in self:
            if action.kind.is_transfer and action.other is None:
                raise ScheduleError(f"{action} on pp rank {pp_rank} is a transfer, but names no stage at its other end")
            ends = (action.stage, action.stage if action.other is None else action.other)
            low, high = min(low, *ends), max(high, *ends)
        return low, high

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage, the maximum number of microbatches in flight.

        Raises:
            ScheduleError: an action names a stage that does not exist, or a transfer names no other stage.
        """
        _check_stages(self)
        now, peak = [0] * self.num_stages, [0] * self.num_stages
        for _, action in self:
            now[action.stage] += in_flight_change(action.kind)
            peak[action.stage] = max(peak[action.stage], now[action.stage])
        return tuple(peak)

    @check_arguments()
    def peak_bytes(self, pipeline: Pipeline) -> tuple[int, ...]:
        """For each pp rank, the peak bytes of activations on a device.

        Raises:
            ArgumentError, ScheduleError: see :func:`check_fits`.
        """
        check_fits(self, pipeline)
        now, peak = [0] * len(self.rank_actions), [0] * len(self.rank_actions)
        for pp_rank, action in self:
            now[pp_rank] += in_flight_change(action.kind) * pipeline.stages[action.stage].activation_bytes
            peak[pp_rank] = max(peak[pp_rank], now[pp_rank])
        return tuple(peak)

    @check_arguments()
    def to_networkx(self, pipeline: Pipeline) -> nx.DiGraph:
        """The dependencies of a schedule as a ``networkx.DiGraph``. A schedule deadlocks if the graph has a cycle.

        Nodes are computations, as :class:`Action`, and transfers, as ``(channel, microbatch)``. Node attributes:

        * ``kind``: "F", "B", "I", "W", or "transfer".
        * ``pp_rank``: the pp rank that computes, or that sends.
        * ``microbatch``.
        * ``seconds``: duration without link contention.
        * ``text``: a readable name.

        Each edge points to the node that waits. Edge attribute ``reason``:

        * "data": a computation needs data, or a transfer waits for the last action before its send.
        * "order": an action waits for the action before it in its pp rank.
        * "posted": a transfer waits until the receiving pp rank reaches the receive.
        * "channel": a transfer waits for the previous transfer of its channel.

        Raises:
            ArgumentError: an argument has the wrong type.
            ScheduleError: the schedule was made for another pipeline.
        """
        check_fits(self, pipeline)
        return build_dependency_graph(self.rank_actions, pipeline)

    def __str__(self) -> str:
        """A header line and one line per pp rank; :func:`~reshard.scheduler.parse_schedule` parses this text."""
        pp_ranks = " ".join(map(str, self.pp_rank_of_stage))
        lines = [f"{self.name}: {self.num_microbatches} microbatches, stages on pp ranks {pp_ranks}"]
        lines += [
            f"{pp_rank}: {' '.join(map(str, actions))}".rstrip() for pp_rank, actions in enumerate(self.rank_actions)
        ]
        return "\n".join(lines)


def check_fits(schedule: object, pipeline: object) -> None:
    """Raise unless the schedule has as many stages as the pipeline and names only those.

    Raises:
        ArgumentError: an argument has the wrong type.
        ScheduleError: the numbers of stages differ, or an action names a stage that does not exist.
    """
    check_pipeline(pipeline)
    if not isinstance(schedule, Schedule):
        raise ArgumentError(f"a Schedule is needed, not {type(schedule).__name__}")
    assert isinstance(pipeline, Pipeline)
    num = len(pipeline.stages)
    if schedule.num_stages != num:
        raise ScheduleError(f"the schedule has {schedule.num_stages} stages, but the pipeline has {num}")
    _check_stages(schedule)


def _check_stages(schedule: Schedule) -> None:
    for stage in schedule.named_stages:
        if not 0 <= stage < schedule.num_stages:
            raise ScheduleError(f"the schedule names stage {stage}; there are stages 0 to {schedule.num_stages - 1}")
