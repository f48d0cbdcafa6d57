"""Open the transfers of a plan: for one call, or for many by a group of ranks that agree on the plan first."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TypeAlias

from reshard import __version__
from reshard.api.arguments.option_checks import (
    check_coding,
    check_device_type,
    check_flag,
    check_listed,
    check_lossless_codec,
    encodes_on_cpu,
)
from reshard.api.preparation.agreed_plan import AgreedPlan
from reshard.api.transfers.queued_transfers import QueuedTransfers
from reshard.api.transfers.streamed_transfers import StreamedTransfers
from reshard.coordination import (
    Group,
    RoundRequest,
    calling,
    check_inside,
    describe_error,
    find_call_group,
    plan_arguments,
    publish_interruption,
    report_error,
    resolve_partial,
    warn_of_hosts,
)
from reshard.coordination.liveness.lost_ranks import ranks_missed_error
from reshard.errors import ArgumentError, ReshardError
from reshard.plan import Plan, ensure_checked
from reshard.runtime import build_program
from reshard.runtime.cuda.host_copies import is_copied
from reshard.runtime.cuda.stream import is_capturing, make_runner
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout

OpenTransfers: TypeAlias = QueuedTransfers | StreamedTransfers


def open_transfers(
    agreed: AgreedPlan,
    timeout_seconds: float,
    verify: bool,
    *,
    is_one_call: bool = False,
    communicator_index: int = 0,
    both_ways: bool = False,
) -> OpenTransfers:
    """Connect the ranks that have agreed on a plan. All of them call it.

    Args:
        agreed: the plan and this rank's part of it.
        timeout_seconds: limit of each transfer.
        verify: compare digests after each transfer.
        is_one_call: reuse the buffers that the call group keeps from earlier calls.
        communicator_index: see :class:`reshard.Mover`.
        both_ways: see :class:`reshard.Mover`.
    """
    if agreed.runner is None:
        return QueuedTransfers(agreed, both_ways or agreed.plan.both_ways, timeout_seconds, verify, is_one_call)
    first = agreed.plan.tensors[0]
    nccl_communicator_index = 2 * communicator_index + (both_ways and first.src.ranks[0] > first.dst.ranks[0])
    return StreamedTransfers(agreed, nccl_communicator_index, timeout_seconds, is_one_call)


@dataclass(frozen=True)
class OpenedPlan:
    """A plan that all of its ranks have opened.

    Attributes:
        agreed: the plan and this rank's part of it, on the type of device that the transfers run on.
        transfers: started in the same order on all ranks.
        is_copied: whether the transfers run on copies of the arrays in host memory.
    """

    agreed: AgreedPlan
    transfers: OpenTransfers
    is_copied: bool


def open_plan(
    plan: Plan,
    group: Group,
    *,
    timeout_seconds: float,
    device: str = "cpu",
    verify: bool = False,
    both_ways: bool = False,
    fault_tolerant: bool = False,
    communicator_index: int = 0,
    compression: str | None = None,
) -> OpenedPlan:
    """Agree on a plan with its other ranks, and connect them. Arguments and errors are those of :class:`reshard.Mover`.

    If one rank fails, all ranks of the plan raise its error.
    """
    try:
        if not isinstance(plan, Plan):
            raise ArgumentError(f"a Mover needs a Plan, not {type(plan).__name__}")
        check_inside(group, plan.ranks)
    except ReshardError as error:
        report_error(group, error)
        raise
    call_group = find_call_group(group, plan.ranks)
    program = runner = failure = None
    needs_cpu, used = False, device  # type of the device that the transfers run on
    options = {"both_ways": both_ways, "device": device, "verify": verify}
    options |= {"communicator_index": communicator_index, "compression": compression}
    arguments: list[tuple[str, str]] = []
    try:
        timeout_seconds = check_timeout(timeout_seconds)
        check_device_type(device)
        if is_capturing():
            raise ArgumentError("a Mover cannot be made during the capture of a CUDA graph: make it before")
        for value, name in ((verify, "verify"), (both_ways, "both_ways"), (fault_tolerant, "fault_tolerant")):
            check_flag(value, name)
        if compression is not None:
            check_lossless_codec(compression, plan)
        needs_cpu = verify or compression is not None or any(encodes_on_cpu(spec.codec) for spec in plan.tensors)
        used = "cpu" if is_copied(device, needs_cpu) else device
        check_coding(plan, used)
        check_listed(plan, used, verify)
        ensure_checked(plan)
        arguments = [*plan_arguments(plan), *((name, str(value)) for name, value in options.items())]
        arguments.append(("the version of reshard", __version__))  # others may cut the same plan into other rounds
        program = build_program(plan, group.rank)
        runner = make_runner(plan, program, used)
    except Exception as raised:  # the plan is wrong, or this rank cannot execute it
        failure = describe_error(raised) if isinstance(raised, ReshardError) else ("PlanError", str(raised))
        timeout_seconds, fault_tolerant = DEFAULT_TIMEOUT_SECONDS, False
    request = RoundRequest(group.rank, arguments, hostname=group.hostname, error=failure)
    with publish_interruption(group, lambda: plan.ranks), calling(group):
        decide = functools.partial(resolve_partial, layouts={}, members=plan.ranks)
        round_number, decision = call_group.agree(request, decide, timeout_seconds, fault_tolerant)
        if decision.lost:
            raise ranks_missed_error(decision.lost, "join")
        assert program is not None
        warn_of_hosts(plan, decision.hostnames)
        agreed = AgreedPlan(plan, program, runner, call_group, round_number, replace(decision, device_type=used))
        transfers = open_transfers(
            agreed, timeout_seconds, verify, communicator_index=communicator_index, both_ways=both_ways
        )
    return OpenedPlan(agreed, transfers, is_copied(device, needs_cpu))
