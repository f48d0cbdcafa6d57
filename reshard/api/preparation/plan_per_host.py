"""Plan once per host: one rank of each host makes a plan, and the others map its arrays.

Two rounds come before the round that compares plans. In the first round, the ranks find out which of them run on one
machine. The lowest rank of each machine is its planner: it plans, and writes the arrays into an unnamed file in memory.
The second round tells where the files are. A rank that cannot map the file of its planner, or whose planner failed or
was lost, plans by itself. Small plans are made on every rank, because that is faster than two rounds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from reshard.coordination import (
    CallGroup,
    Decision,
    Group,
    RoundRequest,
    calling,
    find_call_group,
    publish_interruption,
    resolve_partial,
)
from reshard.plan import Plan, PlanTransfers, ranks_of
from reshard.planner import estimate_planning_seconds, plan_tensors, restore_plan
from reshard.runtime.memory_file import map_memory_file, name_machine, open_memory_file, write_memory_file
from reshard.sharding import TensorSpec
from reshard.topology import Topology

#: A plan that is estimated to take this many CPU seconds is made once per host.
SHARED_FROM_SECONDS = 0.05
#: On a busy machine, a plan may take this many times the estimate before the other ranks give up.
_PATIENCE = 50
#: Arrays that :class:`PlanTransfers` derives from its fields, and that every rank needs.
_DERIVED = ("first_box", "num_boxes", "num_chunks", "first_message", "transfer_of_edge")
_SIZE = struct.Struct("<q")


@contextlib.contextmanager
def plan_per_host(
    call_group: CallGroup,
    make: Callable[[Sequence[TensorSpec]], Plan],
    tensors: Sequence[TensorSpec],
    *,
    topology: Topology | None,
    staging_bytes: int,
    timeout_seconds: float,
    fault_tolerant: bool = False,
    purpose: str = "",
) -> Iterator[Callable[[], Plan]]:
    """Make a plan on one rank of each host. All ranks of the call group enter, and leave after a further round.

    Args:
        call_group: call group of the ranks, which pass equal arguments.
        make: function that makes the plan of tensors with a strategy of the library, for the topology and the staging
            bytes below.
        fault_tolerant: continue without ranks that are lost.
        purpose: purpose of the call, for errors.

    Yields:
        A function that returns the plan. It raises what ``make`` raises.

    Raises:
        ReshardError: a rank did not come to a round; the same on all ranks.
    """
    alone = functools.partial(make, tensors)
    estimate = estimate_planning_seconds(tensors) if len(call_group.members) > 1 else 0.0
    if estimate < SHARED_FROM_SECONDS:
        yield alone
        return

    def run_round(
        payload: Any, decide: Callable[[list[RoundRequest]], Decision], what: str, seconds: float
    ) -> Decision:
        request = RoundRequest(call_group.group.rank, payload=payload, purpose=f"{what} {purpose}".strip())
        return call_group.agree(request, decide, seconds, fault_tolerant)[1]

    decide = functools.partial(_find_planners, members=call_group.members)
    rank = call_group.group.rank
    decision = run_round(_name_machine(call_group), decide, "finds planners", timeout_seconds)
    planners = decision.payloads
    if decision.lost or len(set(planners.values())) == len(planners):  # no two ranks share a machine
        yield alone
        return
    decide = functools.partial(_gather_files, members=call_group.members)
    patience = timeout_seconds + _PATIENCE * estimate
    if planners[rank] != rank:
        files = run_round(None, decide, "shares plans", patience).payloads
        yield functools.partial(_map_or_make, files.get(planners[rank]), alone, tensors, topology, staging_bytes)
        return
    made, error, file = None, None, None
    try:
        made = alone()
    except Exception as raised:  # the other ranks plan too, and raise the same error
        error = raised
    try:
        if made is not None and made.is_listed:  # a plan in closed form is made faster than shared
            with contextlib.suppress(Exception):  # such as too little memory
                file = _write(made)
                made = _map(file, tensors, topology, staging_bytes)  # this host keeps one copy
        run_round(file, decide, "shares plans", patience)
        yield functools.partial(_return_or_raise, made, error)
    finally:
        if file is not None:
            os.close(file[1])


@contextlib.contextmanager
def plan_in_group(
    group: Group,
    tensors: Sequence[TensorSpec],
    *,
    topology: Topology | None,
    staging_bytes: int,
    timeout_seconds: float,
) -> Iterator[Plan]:
    """The plan of tensors for a Mover. Make the Mover inside this context, which all ranks of the layouts enter.

    Raises:
        ReshardError: see :func:`plan_per_host` and :func:`reshard.planner.plan_tensors`.
    """
    members = ranks_of(tensors)
    make = functools.partial(plan_tensors, topology=topology, staging_bytes=staging_bytes)
    with contextlib.ExitStack() as files:
        with publish_interruption(group, lambda: members), calling(group):
            planning = plan_per_host(
                find_call_group(group, members),
                make,
                tensors,
                topology=topology,
                staging_bytes=staging_bytes,
                timeout_seconds=timeout_seconds,
            )
            take_plan = files.enter_context(planning)
        yield take_plan()


def _return_or_raise(made: Plan | None, error: Exception | None) -> Plan:
    if made is None:
        assert error is not None
        raise error
    return made


def _map_or_make(
    file: Sequence[int] | None,
    make: Callable[[], Plan],
    tensors: Sequence[TensorSpec],
    topology: Topology | None,
    staging_bytes: int,
) -> Plan:
    """The plan in the planner's file, or a new one if this rank can map no such file."""
    if file is not None:
        with contextlib.suppress(Exception):  # also of a file that another version of the library wrote
            return _map(file, tensors, topology, staging_bytes)
    return make()


def _find_planners(requests: list[RoundRequest], members: Sequence[int]) -> Decision:
    """A decision whose payloads are the planner of each rank, found by the names of the machines."""
    lowest: dict[Any, int] = {}
    planners = {request.rank: lowest.setdefault(request.payload, request.rank) for request in requests}
    return replace(resolve_partial(requests, {}, members), payloads=planners)


def _gather_files(requests: list[RoundRequest], members: Sequence[int]) -> Decision:
    """A decision whose payloads are the files of the planners."""
    files = {request.rank: request.payload for request in requests if request.payload is not None}
    return replace(resolve_partial(requests, {}, members), payloads=files)


def _name_machine(call_group: CallGroup) -> str:
    """A name that ranks share only if they may open each other's files."""
    name = name_machine(call_group.group.hostname)
    return f"rank {call_group.group.rank}" if name is None else name.hex()


def _write(plan: Plan) -> tuple[int, int, int]:
    """Write a plan to a new file: its arrays, then a table of contents as JSON, then the size of this text.

    Returns:
        The number of this process, the descriptor of the file and its token.

    Raises:
        OSError: there is too little memory.
    """
    arrays = {name: getattr(plan.transfers, name) for name in (*PlanTransfers.__dataclass_fields__, *_DERIVED)}
    arrays["message_bytes"] = plan.message_bytes
    ends = np.cumsum([0, *(array.nbytes for array in arrays.values())]).tolist()
    digest = xxhash.xxh3_64()
    for array in arrays.values():
        digest.update(np.ascontiguousarray(array).data)
    contents = {
        "strategy": plan.strategy,
        "plan_hash": plan.plan_hash,
        "digest": digest.intdigest(),
        "arrays": [[name, array.shape, begin] for (name, array), begin in zip(arrays.items(), ends, strict=False)],
    }
    text = json.dumps(contents).encode()
    token = secrets.randbits(62)
    parts = [*(np.ascontiguousarray(array).data for array in arrays.values()), text, _SIZE.pack(len(text))]
    return os.getpid(), write_memory_file(token, parts), token


def _map(file: Sequence[int], tensors: Sequence[TensorSpec], topology: Topology | None, staging_bytes: int) -> Plan:
    """The plan in a file. Raises OSError if this rank cannot map it, or if it holds something else."""
    descriptor = open_memory_file(*file)
    try:
        mapped = map_memory_file(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
    (size,) = _SIZE.unpack(mapped[-_SIZE.size :])
    contents = json.loads(mapped[-_SIZE.size - size : -_SIZE.size].tobytes())
    if xxhash.xxh3_64(mapped[: -_SIZE.size - size].data).intdigest() != contents["digest"]:
        raise OSError("the file of a plan has changed")
    arrays = {name: _view(mapped, shape, begin) for name, shape, begin in contents["arrays"]}
    fields = {name: arrays[name] for name in PlanTransfers.__dataclass_fields__}
    plan = restore_plan(
        tensors, contents["strategy"], PlanTransfers.unchecked(**fields), topology=topology, staging_bytes=staging_bytes
    )
    # the planner has derived these values from the same bytes
    vars(plan.transfers).update({name: arrays[name] for name in _DERIVED})
    vars(plan).update(plan_hash=contents["plan_hash"], message_bytes=arrays["message_bytes"])
    return plan


def _view(mapped: Any, shape: Sequence[int], begin: int) -> np.ndarray:
    """An int64 array of this shape, in the mapped bytes from ``begin`` on."""
    view: np.ndarray = mapped[begin : begin + 8 * math.prod(shape)].view(np.int64).reshape(shape)
    return view
