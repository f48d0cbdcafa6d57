"""A plan that all ranks agreed on, with this rank's part of it."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.coordination import Channel, Decision
from reshard.plan import Plan
from reshard.runtime.program import Program
from reshard.runtime.rounds.executor import RoundRunner


@dataclass(frozen=True)
class AgreedPlan:
    """The result of the agreement of a call or a Mover.

    Attributes:
        program: this rank's part of the plan. runner: executes it in rounds on a GPU; None on the CPU.
        channel: of the ranks of the plan. call: number of the round. decision: its result.
    """

    plan: Plan
    program: Program
    runner: RoundRunner | None
    channel: Channel
    call: int
    decision: Decision
