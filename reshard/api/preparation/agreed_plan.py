"""A plan on which its ranks have agreed."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.coordination import CallGroup, Decision
from reshard.plan import Plan
from reshard.runtime.program import RankProgram
from reshard.runtime.rounds.runner import RoundRunner


@dataclass(frozen=True)
class AgreedPlan:
    """The result of the agreement of a call or a Mover.

    Attributes:
        plan: the plan.
        program: this rank's part of the plan.
        runner: executor of the program in rounds on a GPU; None on the CPU.
        call_group: the ranks of the plan.
        round_number: number of the round that agreed on the arguments. It tags the messages of transfers.
        decision: the decision of that round.
        lost: ranks that were lost in the agreement on the plan.
    """

    plan: Plan
    program: RankProgram
    runner: RoundRunner | None
    call_group: CallGroup
    round_number: int
    decision: Decision
    lost: frozenset[int] = frozenset()
