"""Calls whose tensors travel as buckets: the last two steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from reshard.api.arguments.options import is_fault_tolerant
from reshard.api.arguments.transfer_arrays import find_target, wrap_results
from reshard.api.arrays.memory_in_use import reserve_until_waited
from reshard.api.lossless.lossless_handle import LosslessHandle
from reshard.api.lossless.lossless_transfer import CallArrays, EncodingReport, LosslessTransfer
from reshard.api.preparation.agreed_plan import AgreedPlan
from reshard.api.preparation.agreement import Agreement
from reshard.api.preparation.prepare import agree_on_plan
from reshard.api.transfers.handle import Handle, TransferState
from reshard.api.transfers.recovery import FaultTolerantHandle, Recovery
from reshard.api.transfers.start import failed_handle, start_part
from reshard.codecs import has_variable_size
from reshard.coordination.liveness.lost_ranks import ranks_missed_error
from reshard.errors import ReshardError


@dataclass(frozen=True)
class PreparedBuckets:
    """A transfer of buckets that can start.

    Attributes:
        agreement: agreement of the call, and of the last of the agreements on the buckets.
        transfer: the buckets.
        report: how the tensors are sent.
        agreed: the plan of the buckets; None if no surviving rank receives any.
        lost: ranks that were lost before the transfer.
    """

    agreement: Agreement
    transfer: LosslessTransfer
    report: EncodingReport
    agreed: AgreedPlan | None
    lost: frozenset[int]


def sends_buckets(agreement: Agreement) -> bool:
    """Whether the tensors of a call travel as buckets."""
    is_encoded = has_variable_size(agreement.inputs.options["compression"])
    return is_encoded and any(math.prod(spec.shape) for spec in agreement.tensors)


def prepare_buckets(agreement: Agreement) -> PreparedBuckets:
    """Encode the tensors of a call, and agree on the buckets and their plan.

    Raises:
        ReshardError: a rank failed to encode, or replicas of a source differ; the same error on all ranks.
    """
    items, options = agreement.inputs.items, agreement.inputs.options
    transfer = LosslessTransfer(
        agreement.call_group,
        str(options["compression"]),
        agreement.tensors,
        CallArrays(
            {item.name: item.tensor for item in items},
            {item.name: item.base for item in items},
            {item.name: item.out for item in items},
        ),
        options["timeout_seconds"],
        agreement.purpose,
        verify=options["verify"],
        lost=agreement.lost if is_fault_tolerant(options) else None,
    )
    report = transfer.offer()
    if transfer.last_round is not None:  # lost ranks may have left a call group of fewer ranks
        call_group, round_number, generation = transfer.last_round
        decision = replace(agreement.decision, generation=generation)
        agreement = replace(agreement, call_group=call_group, round_number=round_number, decision=decision)
    buckets = transfer.specs()
    agreed = agree_on_plan(agreement, buckets=buckets) if buckets else None
    lost = frozenset(transfer.lost) | (frozenset() if agreed is None else agreed.lost)
    return PreparedBuckets(agreement, transfer, report, agreed, lost)


def start_lossless(prepared: PreparedBuckets) -> Handle:
    """Start to move the buckets."""
    agreement, transfer, agreed = prepared.agreement, prepared.transfer, prepared.agreed
    inputs, call_group, decision = agreement.inputs, agreement.call_group, agreement.decision
    rank, generation = call_group.group.rank, decision.generation
    try:
        sent, received = transfer.arrays()
        targets = [
            find_target(item, spec.dst_tiles.local_shape(rank) if rank in spec.dst.ranks else None, decision, rank)
            for item, spec in zip(inputs.items, agreement.tensors, strict=True)
        ]
    except Exception as error:  # for example out of memory; the other ranks wait for this one
        raise call_group.fail(generation, error) from error
    by_name = {item.name: target for item, target in zip(inputs.items, targets, strict=True)}

    def complete(error: ReshardError | None) -> None:
        transfer.complete(error, received, by_name)

    def finish() -> Any:
        return wrap_results(inputs.items, targets, decision)

    handle: Handle
    if agreed is None:
        state = TransferState(call_group, generation)
        state.succeed()
        inner = Handle(state, _no_result)
    elif prepared.lost:
        inner = failed_handle(call_group, generation, ranks_missed_error(prepared.lost), _no_result)
    else:  # the buckets have digests of their own
        inner = start_part(agreed, sent, received, _no_result, inputs.options, verify=False)
    if agreed is None or not is_fault_tolerant(inputs.options):
        handle = LosslessHandle(inner, prepared.report, complete, finish)
    else:
        recovery = Recovery(call_group, agreed.plan, sent, received, prepared.lost, inputs.options)

        def complete_recovered() -> None:
            transfer.exclude(recovery.survivors)
            complete(None)

        def explain(error: ReshardError) -> ReshardError:
            transfer.exclude(recovery.survivors)
            return transfer.explain(error)

        handle = RecoveredLosslessHandle(inner, recovery, prepared.report, complete_recovered, explain, finish)
    reserve_until_waited(handle, (), targets)
    return handle


def _no_result() -> None:
    """The result of a part of a transfer whose handle the caller does not see."""


class RecoveredLosslessHandle(FaultTolerantHandle):
    """A fault-tolerant transfer of buckets: the surviving ranks recover missing buckets, confirm all, and decode them.

    Args:
        complete: confirms and decodes the buckets, once this rank has its own.
        explain: adds to the error of a failed recovery what is lost, and what every out holds.

    Attributes:
        report: how the tensors are sent.
    """

    def __init__(
        self,
        inner: Handle,
        recovery: Recovery,
        report: EncodingReport,
        complete: Callable[[], None],
        explain: Callable[[ReshardError], ReshardError],
        finish: Callable[[], Any],
    ) -> None:
        super().__init__(inner, recovery, finish)
        self._complete_buckets, self._explain = complete, explain
        self.report = report

    def _complete(self) -> ReshardError | None:
        error = super()._complete()
        return self._decode() if error is None else self._explain(error)

    def _recover(self, recover: Callable[[], Any]) -> Any:
        try:
            recover()
        except ReshardError as error:
            raise self._explain(error) from error
        self._final_error = self._decode()
        if self._final_error is not None:
            raise self._final_error
        return self._take_result()

    def _decode(self) -> ReshardError | None:
        try:
            self._complete_buckets()
        except ReshardError as error:
            return error
        return None
