"""What the ranks of a call agree on before data moves: a plan, and the errors of its codecs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reshard.api.casts import encode_source
from reshard.api.inputs import Item
from reshard.api.validation import Options
from reshard.codecs import ErrorSums
from reshard.coordination import Channel, Decision, Request, describe_error, gather_reports, rebuild_error
from reshard.errors import CompressionError
from reshard.plan import Plan
from reshard.runtime.program import RankProgram
from reshard.runtime.rounds.executor import RoundRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgreedPlan:
    """The result of the agreement of a call or a Mover.

    Attributes:
        program: this rank's part of the plan. runner: executes it in rounds on a GPU; None on the CPU.
        channel: of the ranks of the plan. call: number of the round. decision: its result.
    """

    plan: Plan
    program: RankProgram
    runner: RoundRunner | None
    channel: Channel
    call: int
    decision: Decision


def encode_measured(
    channel: Channel, plan: Plan, items: Sequence[Item], options: Options, timeout_seconds: float, purpose: str
) -> tuple[dict[str, torch.Tensor | None], frozenset[str], set[int]]:
    """Encode the source shards, add up the errors of all ranks, and compare them with ``max_error``.

    Args:
        items: the tensors of the plan, as this rank passes them.

    Returns:
        The encoded shards by tensor, the tensors over the limit, and the ranks that were lost in the round.

    Raises:
        CompressionError: a tensor is over the limit, with ``on_error="raise"``; the same error on all ranks.
        ReshardError: a rank failed to encode; the same error on all ranks.
    """
    encoded: dict[str, torch.Tensor | None] = {}
    sums: dict[str, ErrorSums] = {}
    error = None
    try:
        for item, spec in zip(items, plan.tensors, strict=True):
            if spec.codec is not None:
                encoded[item.name], sums[item.name] = encode_source(item.tensor, spec)
    except Exception as failed:  # for example out of memory
        error = describe_error(failed)
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
    if excess:
        texts = ", ".join(f"{f'{name!r} ' if name else ''}by {relative[name]:.3g}" for name in excess)
        codecs = sorted({spec.dtype for spec in plan.tensors if (spec.name or "") in excess})
        text = (
            f"codec {' or '.join(codecs)} changes {'tensors' if excess[0] else 'the tensor'} {texts} (L2 error over L2 "
            f"norm), but max_error is {options.max_error:g}"
        )
        if options.on_error == "raise":
            raise CompressionError(text)
        logger.info("%s; it travels without the codec", text)
    return encoded, frozenset(excess), set(decision.lost)


def _gather(channel: Channel, requests: list[Request]) -> Decision:
    return gather_reports(requests, channel.members, channel.rendezvous.find_dead())
