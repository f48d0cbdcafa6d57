"""The last step of a call: start the transfer, or the recovery of one that lost ranks before it began."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from reshard.api.arguments.options import TransferOptions, is_fault_tolerant
from reshard.api.arguments.transfer_arrays import call_arrays, finish_call
from reshard.api.arrays.casts import unfinished
from reshard.api.arrays.memory_in_use import reserve_until_waited
from reshard.api.preparation.agreed_plan import AgreedPlan
from reshard.api.preparation.prepare import Prepared
from reshard.api.transfers.handle import Handle, TransferState
from reshard.api.transfers.opened_plan import open_transfers
from reshard.api.transfers.recovery import FaultTolerantHandle, Recovery
from reshard.coordination import CallGroup
from reshard.coordination.liveness.lost_ranks import ranks_missed_error
from reshard.errors import ReshardError


def start_plain(prepared: Prepared) -> Handle:
    """Start a transfer that no rank has missed."""
    agreement, agreed = prepared.agreement, prepared.agreed
    assert agreed is not None
    inputs, decision, call_group = agreement.inputs, agreement.decision, agreement.call_group
    try:
        src, dst, targets = call_arrays(inputs.items, agreed.plan, decision, inputs.group.rank, prepared.encoded)
    except Exception as error:  # for example out of memory; the other ranks wait for this one
        raise call_group.fail(decision.generation, error) from error
    finish = functools.partial(finish_call, inputs.items, decision, dst, targets)
    handle = start_part(agreed, src, dst, finish, inputs.options, inputs.options["verify"])
    if not is_fault_tolerant(inputs.options):
        reserve_until_waited(handle, (), unfinished(dst, targets))
        return handle
    recovery = Recovery(call_group, agreed.plan, src, dst, (), inputs.options)
    handle = FaultTolerantHandle(handle, recovery, finish)
    reserve_until_waited(handle, src, targets)  # a recovery may send from the source again
    return handle


def start_recovery(prepared: Prepared) -> Handle:
    """The handle of a transfer that lost ranks before it began, so that the recovery has to move all data."""
    agreement, plan, lost = prepared.agreement, prepared.plan, prepared.lost
    inputs, decision, call_group = agreement.inputs, agreement.decision, agreement.call_group
    src, dst, targets = call_arrays(inputs.items, plan, decision, inputs.group.rank, {})
    finish = functools.partial(finish_call, inputs.items, decision, dst, targets)
    failed = failed_handle(call_group, decision.generation, ranks_missed_error(lost), finish)
    handle = FaultTolerantHandle(failed, Recovery(call_group, plan, src, dst, lost, inputs.options), finish)
    reserve_until_waited(handle, src, targets)
    return handle


def start_part(
    agreed: AgreedPlan,
    src: Sequence[Any],
    dst: Sequence[Any],
    finish: Callable[[], Any],
    options: TransferOptions,
    verify: bool,
) -> Handle:
    """Start this rank's part of a plan. In a fault-tolerant call, the handle has failed already if it cannot start.

    Args:
        agreed: the plan and this rank's part of it.
        src: the arrays to send, one per tensor of the plan.
        dst: the arrays to receive into.
        finish: returns the result of the handle.
        options: options of the call.
        verify: compare digests after the transfer.
    """
    call_group, generation = agreed.call_group, agreed.decision.generation
    try:
        transfers = open_transfers(agreed, options["timeout_seconds"], verify, is_one_call=True)
    except Exception as error:
        known = call_group.fail(generation, error)
        if not is_fault_tolerant(options):
            raise known from error
        return failed_handle(call_group, generation, known, finish)
    handle = transfers.start(src, dst, finish)
    transfers.close()
    return handle


def failed_handle(call_group: CallGroup, generation: int, error: ReshardError, finish: Callable[[], Any]) -> Handle:
    """The handle of a transfer that an error ended before it began."""
    state = TransferState(call_group, generation)
    state.stop(error)
    return Handle(state, finish)
