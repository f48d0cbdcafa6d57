"""Progress of a rank in a transfer."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.plan import Plan
from reshard.runtime.program import RankProgram


@dataclass
class Tally:
    """Progress of a rank: whether its local copies are complete, and how many messages and bytes it has received."""

    copied: bool = False
    received: int = 0
    received_bytes: int = 0


def describe_progress(plan: Plan, program: RankProgram, tally: Tally) -> str:
    """The progress of a rank in a transfer, for an error message."""
    total = sum(recv.nbytes for recv in program.recvs)
    return (
        f"rank {program.rank} had received {tally.received} of {len(program.recvs)} messages, {tally.received_bytes} "
        f"of {total} bytes, of the transfer of {', '.join(map(str, plan.tensors[:1]))}"
        f"{_and_more(len(plan.tensors) - 1)} (plan {plan.plan_hash[:12]})"
    )


def _and_more(count: int) -> str:
    return f" and {count} more tensor{'s' * (count > 1)}" if count else ""
