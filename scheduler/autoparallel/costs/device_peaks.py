"""The memory of the devices of each pp rank at its peak, over the computations of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.actions import Kind
from ...schedules.orders import KINDS
from .layer_costs import StageCost


@dataclass(frozen=True)
class DevicePeak:
    """Bytes of the fullest device of a pp rank at its peak.

    ``ending_bytes`` are those at the end of a step, while it adds gradients of parameters that stages share.
    """

    state_bytes: float
    activation_bytes: float
    working_bytes: float
    buffer_bytes: float
    ending_bytes: float
    limit_bytes: float

    @property
    def memory_bytes(self) -> float:
        """All bytes at the peak."""
        kept = self.activation_bytes + self.working_bytes + (self.state_bytes + self.buffer_bytes)
        return max(kept, self.ending_bytes)


def peak_of_stage(cost: StageCost, in_flight: int) -> DevicePeak:
    """The peak of a pp rank that computes one stage, with some microbatches in flight."""
    states, buffers = cost.peak_parts(in_flight)
    activations = in_flight * cost.activation_bytes
    return DevicePeak(states, activations, cost.working_bytes, buffers, cost.ending_bytes, cost.limit_bytes)


def peak_of_stages(costs: Sequence[StageCost], stages: Sequence[int], codes: Sequence[int]) -> DevicePeak:
    """The peak of a pp rank that computes several stages.

    The gradients of a stage come with its first backward. Buffers of all edges are full, and the largest computation
    works at the peak.

    Args:
        costs: costs of all stages.
        stages: those of the pp rank.
        codes: its computations by number, in order.
    """
    own = [costs[stage] for stage in stages]
    late = {stage: costs[stage].late_bytes for stage in stages}
    states, kept = sum(cost.state_bytes for cost in own) - sum(late.values()), 0.0
    peak = (states, kept)
    for code in codes:
        stage, kind = (code >> 2) % len(costs), KINDS[code & 3]
        if kind is Kind.F:
            kept += costs[stage].activation_bytes
        else:
            states += late.pop(stage, 0.0)
        if kind in (Kind.B, Kind.W):
            kept -= costs[stage].activation_bytes
        peak = max(peak, (states, kept), key=sum)
    return DevicePeak(
        *peak,
        max(cost.working_bytes for cost in own),
        sum(cost.buffer_bytes for cost in own),
        sum(cost.ending_bytes for cost in own),
        min(cost.limit_bytes for cost in own),
    )
