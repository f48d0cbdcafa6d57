"""Actions of a schedule: computations of a stage, and ends of transfers on the channels between stages."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from reshard.errors import ScheduleError
from reshard.formatting import brief

from ..pipeline import Stage


class Kind(enum.StrEnum):
    """Kinds of actions.

    ``F`` is a forward and ``B`` a whole backward. A split backward is an input-gradient pass ``I`` and, later, a
    weight-gradient pass ``W``. Every other kind is one end of a transfer.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 the usual name in zero-bubble schedules
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def is_transfer(self) -> bool:
        """Whether the action is one end of a transfer."""
        return self in _TRANSFERS

    @property
    def is_send(self) -> bool:
        """Whether the action is the sender's end of a transfer."""
        return self in (Kind.SEND_F, Kind.SEND_B)


def compute_seconds(kind: Kind, stage: Stage) -> float:
    """Duration of a computation of this kind."""
    if kind is Kind.F:
        return stage.forward_seconds
    if kind is Kind.B:
        return stage.backward_seconds
    return stage.input_grad_seconds if kind is Kind.I else stage.weight_grad_seconds


_TRANSFERS = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a pp rank: compute one microbatch of a stage, or start one end of a transfer.

    ``other`` is the stage at the other end of a transfer. Transfers run in the background: a pp rank never waits for a
    send. It waits for a receive before the computation that needs the data. If ``blocks`` is set, the pp rank waits for
    the transfer immediately; such a transfer starts when both ends are posted. If ``overlaps`` is set, an engine may
    compute this forward together with the next computation of the pp rank, a backward; it may also compute one after
    the other.

    The text form is ``0F3``, ``0SEND_F3>1`` or ``1RECV_F3<0``, followed by ``!`` if it blocks, and by ``&`` if it
    overlaps the next computation.
    """

    kind: Kind
    stage: int
    microbatch: int
    other: int | None = None
    blocks: bool = False
    overlaps: bool = False

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.microbatch}"
        if self.other is not None:
            text += f"{'>' if self.kind.is_send else '<'}{self.other}"
        return text + "!" * self.blocks + "&" * self.overlaps

    def __post_init__(self) -> None:
        if not isinstance(self.kind, Kind):
            raise ScheduleError(f"the kind of an action must be a Kind, not {brief(self.kind)}")
        for what, number in (("stage", self.stage), ("microbatch", self.microbatch), ("other stage", self.other)):
            if type(number) is not int and not (number is None and what == "other stage"):
                raise ScheduleError(f"the {what} of an action must be an integer, not {brief(number)}")

    @property
    def channel(self) -> StageChannel:
        """The channel that carries this transfer.

        Raises:
            ScheduleError: the action is not a transfer.
        """
        if self.other is None:
            raise ScheduleError(f"{self} names no stage at its other end, so it has no channel")
        ends = (self.stage, self.other) if self.kind.is_send else (self.other, self.stage)
        return StageChannel(*ends, self.kind in (Kind.SEND_F, Kind.RECV_F))


@dataclass(frozen=True, slots=True)
class StageChannel:
    """One direction of an edge between stages. Its transfers run one at a time, in the order that both ends use."""

    sender: int
    receiver: int
    is_forward: bool

    def __str__(self) -> str:
        """``edge 0 -> 1 forward``: the stages as in the graph, and the direction of the data."""
        first, last = sorted((self.sender, self.receiver))
        return f"edge {first} -> {last} {'forward' if self.is_forward else 'backward'}"
