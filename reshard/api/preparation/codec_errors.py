"""Codecs with a limit on their errors: the ranks encode, and agree on the tensors that are over ``max_error``."""

from __future__ import annotations

import functools
import logging

import torch

from reshard.api.arguments.options import is_fault_tolerant
from reshard.api.arrays.casts import encode_source
from reshard.api.preparation.agreement import Agreement
from reshard.codecs import ErrorSums
from reshard.coordination import CallGroup, Decision, RoundRequest, describe_error, gather_reports, rebuild_error
from reshard.errors import CompressionError
from reshard.plan import Plan

logger = logging.getLogger("reshard.api.preparation.agreed_plan")  # the name that docs/compression.md gives


def encode_measured(
    agreement: Agreement, plan: Plan
) -> tuple[dict[str, torch.Tensor | None], frozenset[str], frozenset[int]]:
    """Encode the source shards, add up the errors of all ranks, and compare them with ``max_error``.

    Args:
        agreement: agreement of the call.
        plan: plan with the codecs.

    Returns:
        The encoded shards by tensor, the tensors over the limit, and the ranks that were lost in the agreement.

    Raises:
        CompressionError: a tensor is over the limit, with ``on_error="raise"``; the same error on all ranks.
        ReshardError: a rank failed to encode; the same error on all ranks.
    """
    call_group, items, options = agreement.call_group, agreement.inputs.items, agreement.inputs.options
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
    request = RoundRequest(
        call_group.group.rank, payload=report, purpose=f"compares errors {agreement.purpose}".strip()
    )
    decide = functools.partial(_gather, call_group)
    _, decision = call_group.agree(request, decide, options["timeout_seconds"], is_fault_tolerant(options))
    for rank, payload in sorted(decision.payloads.items()):
        if payload["failed"] is not None:
            name, text = payload["failed"]
            raise rebuild_error(name, f"rank {rank}: {text}")
    relative = {
        name: functools.reduce(
            ErrorSums.plus, (ErrorSums(*payload["sums"][name]) for _, payload in sorted(decision.payloads.items()))
        ).relative_error
        for name in sums
    }
    max_error = options["max_error"]
    assert max_error is not None
    excess = [name for name, value in relative.items() if value > max_error]
    if excess:
        texts = ", ".join(f"{f'{name!r} ' if name else ''}by {relative[name]:.3g}" for name in excess)
        codecs = sorted({spec.dtype for spec in plan.tensors if (spec.name or "") in excess})
        text = (
            f"codec {' or '.join(codecs)} changes {'tensors' if excess[0] else 'the tensor'} {texts} (L2 error over L2 "
            f"norm), but max_error is {max_error:g}"
        )
        if options["on_error"] == "raise":
            raise CompressionError(text)
        logger.info("%s; it travels without the codec", text)
    return encoded, frozenset(excess), frozenset(decision.lost)


def _gather(call_group: CallGroup, requests: list[RoundRequest]) -> Decision:
    return gather_reports(requests, call_group.members, call_group.rounds.find_dead())
