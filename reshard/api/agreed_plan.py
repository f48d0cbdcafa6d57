"""What the ranks of a call agree on before data moves: a plan, and the errors of its codecs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from reshard.api.validation import Options
from reshard.codecs import ErrorSums
from reshard.coordination import Channel, Decision, Request, gather_reports, rebuild_error
from reshard.errors import CompressionError
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


def agree_on_errors(
    channel: Channel,
    plan: Plan,
    sums: Mapping[str, ErrorSums],
    options: Options,
    error: tuple[str, str] | None,
    timeout_seconds: float,
    purpose: str,
) -> tuple[frozenset[str], set[int]]:
    """Add up the errors of all ranks' source shards and compare them with ``max_error``.

    Args:
        sums: this rank's sums by coded tensor. error: class and text of this rank's error in encoding, or None.

    Returns:
        The tensors over the limit, and the ranks that were lost in the round.

    Raises:
        CompressionError: a tensor is over the limit, with ``on_error="raise"``; the same error on all ranks.
        ReshardError: a rank failed to encode; the same error on all ranks.
    """
    report = {"failed": error, "sums": sums}
    request = Request(channel.group.rank, payload=report, purpose=f"compares errors {purpose}".strip())
    decide = functools.partial(_gather, channel)
    _, decision = channel.agree(request, decide, timeout_seconds, options.fault_tolerant)
    for rank, found in sorted(decision.payloads.items()):
        if found["failed"] is not None:
            name, text = found["failed"]
            raise rebuild_error(name, f"rank {rank}: {text}")
    relative = {
        name: functools.reduce(
            ErrorSums.plus, (ErrorSums(*found["sums"][name]) for _, found in sorted(decision.payloads.items()))
        ).relative_error
        for name in sums
    }
    excess = [name for name, value in relative.items() if value > options.max_error]
    if excess and options.on_error == "raise":
        texts = ", ".join(f"{f'{name!r} ' if name else ''}by {relative[name]:.3g}" for name in excess)
        codecs = sorted({spec.dtype for spec in plan.tensors if (spec.name or "") in excess})
        raise CompressionError(
            f"codec {' or '.join(codecs)} changes {'tensors' if excess[0] else 'the tensor'} {texts} (L2 error over L2 "
            f"norm), but max_error is {options.max_error:g}"
        )
    return frozenset(excess), set(decision.lost)


def _gather(channel: Channel, requests: list[Request]) -> Decision:
    return gather_reports(requests, channel.members, channel.rendezvous.find_dead())
