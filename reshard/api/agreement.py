"""The second step of a call: the ranks agree on its arguments."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from reshard.api.call_arrays import copy_to_host
from reshard.api.inputs import Inputs
from reshard.api.option_checks import needs_cpu
from reshard.api.options import is_fault_tolerant
from reshard.api.validation import make_request
from reshard.coordination import Channel, Decision, find_channel, remaining_ranks, resolve_partial
from reshard.runtime.cuda.host_copies import is_copied
from reshard.sharding import TensorSpec


@dataclass(frozen=True)
class Agreement:
    """What the ranks of a call have agreed on.

    Attributes:
        inputs: of this rank, checked. If the transfer runs on copies in host memory, they hold the copies.
        channel: the ranks that called.
        call: number of the agreement.
        decision: its result, for the device type that the transfer runs on.
        arguments: ``(name, value)`` pairs that are equal on all ranks.
        lost: in a fault-tolerant call, the ranks that did not call.
        purpose: what further agreements of the call are for, in errors.
    """

    inputs: Inputs
    channel: Channel
    call: int
    decision: Decision
    arguments: list[tuple[str, str]]
    lost: frozenset[int]
    purpose: str

    @property
    def tensors(self) -> list[TensorSpec]:
        """The tensors in the dtypes of their sources."""
        shapes, dtypes = self.decision.shapes, self.decision.dtypes
        return [
            TensorSpec(tuple(shapes[item.name]), dtypes[item.name], item.src, item.dst, item.name or None)
            for item in self.inputs.items
        ]


def agree(inputs: Inputs, purpose: str) -> Agreement:
    """Agree with the other ranks of a call.

    Args:
        inputs: of this rank.
        purpose: of the call's agreements.

    Raises:
        ReshardError: the arguments of a rank are wrong, or ranks disagree; the same error on all ranks.
    """
    group, options = inputs.group, inputs.options
    called = tuple(rank for rank in inputs.members if rank < group.size)
    inside = remaining_ranks(group, called) if is_fault_tolerant(options) else called
    channel = find_channel(group, inside)
    request, items = make_request(inputs, purpose)
    layouts = {item.name: (item.src, item.dst) for item in items}
    lost = set(called) - set(inside)
    while True:
        decide = functools.partial(resolve_partial, layouts=layouts, members=channel.members)
        call, decision = channel.agree(request, decide, options["timeout_seconds"], is_fault_tolerant(options))
        lost |= set(decision.lost)
        if decision.dtypes:
            break
        # No agreement: the rank that decides the round was lost. Repeat the round without the lost ranks.
        channel = find_channel(group, tuple(rank for rank in inside if rank not in lost))
    if is_copied(decision.device_type, needs_cpu(options)):
        items, decision = copy_to_host(items, channel, decision)
    checked = replace(inputs, items=items)
    return Agreement(checked, channel, call, decision, request.arguments, frozenset(lost), purpose)
