"""The third step of a call: the ranks agree on a plan, and on the errors of its codecs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reshard.api.arguments.option_checks import check_listed
from reshard.api.arguments.options import is_fault_tolerant
from reshard.api.arrays.casts import wire_dtype
from reshard.api.preparation.agreed_plan import AgreedPlan
from reshard.api.preparation.agreement import Agreement
from reshard.api.preparation.codec_errors import encode_measured
from reshard.api.preparation.plan_per_host import plan_per_host
from reshard.codecs import has_variable_size
from reshard.coordination import MAX_CACHED, RoundRequest, plan_arguments, resolve_partial, topology_of_names
from reshard.errors import ReshardError
from reshard.plan import Plan, ensure_checked
from reshard.planner import AUTO_CODEC, compress_tensors, plan_tensors
from reshard.runtime import build_program
from reshard.runtime.cuda.stream import make_runner
from reshard.sharding import TensorSpec
from reshard.topology import Topology


@dataclass(frozen=True)
class Prepared:
    """A transfer that can start.

    Attributes:
        agreement: agreement of the call.
        plan: plan of the transfer.
        agreed: the plan as the ranks have agreed on it; None if ranks were lost before.
        encoded: source shards that are encoded already, by tensor.
        lost: ranks that were lost before the transfer. A recovery then has to move all data.
    """

    agreement: Agreement
    plan: Plan
    agreed: AgreedPlan | None
    encoded: Mapping[str, torch.Tensor | None] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()


def prepare(agreement: Agreement) -> Prepared:
    """Agree on the plan of a call. Tensors whose codec changes them too much travel without it.

    Raises:
        ReshardError: a rank cannot plan or encode, or plans differ; the same error on all ranks.
    """
    max_error = agreement.inputs.options["max_error"]
    if agreement.lost:
        raw = [item.name for item in agreement.inputs.items if max_error is not None]
        return Prepared(agreement, _make_plan(agreement, raw), None, lost=agreement.lost)
    agreed = agree_on_plan(agreement)
    if agreed.lost or max_error is None or not any(spec.codec for spec in agreed.plan.tensors):
        return Prepared(agreement, agreed.plan, agreed, lost=agreed.lost)
    encoded, excess, lost = encode_measured(agreement, agreed.plan)
    if lost:
        return Prepared(agreement, _make_plan(agreement, excess), None, lost=lost)
    if excess:
        agreed = agree_on_plan(agreement, excess)
    return Prepared(agreement, agreed.plan, agreed, encoded, agreed.lost)


def agree_on_plan(agreement: Agreement, raw: Collection[str] = (), buckets: Sequence[TensorSpec] = ()) -> AgreedPlan:
    """The plan, from the cache or compared between the ranks.

    Args:
        agreement: agreement of the call.
        raw: tensors that are not encoded.
        buckets: what travels in place of the tensors.
    """
    call_group, decision, options = agreement.call_group, agreement.decision, agreement.inputs.options
    agreed: list[Any] = [sorted(item.items()) for item in (decision.shapes, decision.dtypes, decision.hostnames)]
    key = repr((agreement.arguments, decision.device_type, agreed, sorted(raw), list(map(str, buckets))))
    # different functions and codecs may have the same name
    is_cacheable = not callable(options["strategy"]) and isinstance(options["compression"], str | None)
    if is_cacheable and key in call_group.cache:
        call_group.cache.move_to_end(key)
        return AgreedPlan(
            *call_group.cache[key], call_group=call_group, round_number=agreement.round_number, decision=decision
        )
    program = runner = error = None
    arguments: list[tuple[str, str]] = []
    is_made_per_host = is_cacheable and options["compression"] != AUTO_CODEC  # which makes several plans
    with (
        _plan_per_host(agreement, raw, buckets)
        if is_made_per_host
        else nullcontext(functools.partial(_make_plan, agreement, raw, buckets)) as take_plan
    ):
        try:
            plan = take_plan()
            check_listed(plan, decision.device_type, options["verify"])
            ensure_checked(plan)  # the strategy may be the caller's
            program = build_program(plan, call_group.group.rank)
            runner = make_runner(plan, program, decision.device_type)
            arguments = plan_arguments(plan)
        except ReshardError as known:
            error = (type(known).__name__, str(known))
        except Exception as other:
            error = ("ReshardError", f"{type(other).__name__}: {other}")
        purpose = f"compares plans {agreement.purpose}".strip()
        request = RoundRequest(call_group.group.rank, arguments, error=error, purpose=purpose)
        decide = functools.partial(resolve_partial, layouts={}, members=call_group.members)
        _, compared = call_group.agree(request, decide, options["timeout_seconds"], is_fault_tolerant(options))
    assert program is not None
    if is_cacheable:
        call_group.cache[key] = plan, program, runner
    if len(call_group.cache) > MAX_CACHED:
        call_group.cache.popitem(last=False)
    return AgreedPlan(plan, program, runner, call_group, agreement.round_number, decision, frozenset(compared.lost))


def _plan_per_host(
    agreement: Agreement, raw: Collection[str], buckets: Sequence[TensorSpec]
) -> AbstractContextManager[Callable[[], Plan]]:
    """A function that returns the plan of a call, which one rank of each host makes."""
    options = agreement.inputs.options
    try:
        tensors, plan = _tensors_on_wire(agreement, raw, buckets)
    except Exception:  # on all ranks alike
        return nullcontext(functools.partial(_make_plan, agreement, raw, buckets))
    return plan_per_host(
        agreement.call_group,
        plan,
        tensors,
        topology=_topology_of(agreement),
        staging_bytes=options["staging_bytes"],
        timeout_seconds=options["timeout_seconds"],
        fault_tolerant=is_fault_tolerant(options),
        purpose=agreement.purpose,
    )


def _make_plan(agreement: Agreement, raw: Collection[str] = (), buckets: Sequence[TensorSpec] = ()) -> Plan:
    """The plan of a call, the same on all ranks. Arguments as of :func:`agree_on_plan`."""
    tensors, plan = _tensors_on_wire(agreement, raw, buckets)
    return plan(tensors)


def _topology_of(agreement: Agreement) -> Topology:
    topology: Topology | None = agreement.inputs.options["topology"]
    if topology is None:
        topology = topology_of_names(agreement.decision.hostnames, agreement.inputs.members[-1] + 1)
    return topology


def _tensors_on_wire(
    agreement: Agreement, raw: Collection[str], buckets: Sequence[TensorSpec]
) -> tuple[Sequence[TensorSpec], Callable[[Sequence[TensorSpec]], Plan]]:
    """The tensors that a call moves, and a function that plans them. Arguments: see :func:`agree_on_plan`."""
    inputs, options, topology = agreement.inputs, agreement.inputs.options, _topology_of(agreement)
    strategy, staging_bytes = options["strategy"], options["staging_bytes"]
    plan = functools.partial(plan_tensors, strategy=strategy, topology=topology, staging_bytes=staging_bytes)
    if buckets:
        return buckets, plan
    tensors = agreement.tensors
    on_wire = [wire_dtype(spec.dtype, item.dst_dtype) for spec, item in zip(tensors, inputs.items, strict=True)]
    codec = None if has_variable_size(options["compression"]) else options["compression"]
    encoded = compress_tensors(tensors, codec, options["max_error"], topology, plan, on_wire, encodes_first=True)
    for index, item in enumerate(inputs.items):
        if item.name in raw:
            encoded[index] = replace(tensors[index], dtype=on_wire[index])
    return encoded, plan
