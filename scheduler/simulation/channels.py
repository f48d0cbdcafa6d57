"""Transfers between stages while a schedule is simulated: one channel in each direction of an edge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..ir.actions import StageChannel
from ..pipeline import Loads, Pipeline

#: Relative tolerance of times and of transferred shares: smaller differences are rounding errors.
TOLERANCE = 1e-12


@dataclass(frozen=True)
class StageTransfer:
    """One transfer. Times in seconds: its data was computed at ``ready``, and it moved from ``start`` to ``end``."""

    channel: StageChannel
    microbatch: int
    ready: float
    start: float
    end: float


@dataclass
class ChannelState:
    """The transfers of one channel, in the order in which its ends posted them.

    Attributes:
        number: place among the channels of the pipeline.
        seconds: duration of a transfer without contention.
        loads: busy time of each link in one transfer.
        sent: ``(microbatch, time when its data was computed)`` of each posted send.
        received: microbatch of each posted receive.
        at: index of the first transfer that has not ended.
        remaining: fraction of the current transfer still to move, from 1 to 0; None between transfers.
        started: start time of the current transfer.
        rate: speed of the current transfer relative to its speed without contention.
        arrived: arrival time by microbatch.
    """

    channel: StageChannel
    number: int
    seconds: float
    loads: Loads
    sent: list[tuple[int, float]] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    at: int = 0
    remaining: float | None = None
    started: float = 0.0
    rate: float = 0.0
    arrived: dict[int, float] = field(default_factory=dict)

    @cached_property
    def link_shares(self) -> dict[str, float]:
        """Fraction of each link's capacity that a transfer uses at rate 1."""
        link_shares: dict[str, float] = {}
        for link, busy in self.loads:
            if busy:
                link_shares[link] = link_shares.get(link, 0.0) + busy / self.seconds
        return link_shares

    @property
    def seconds_remaining(self) -> float:
        """Time until the current transfer ends at its current rate; infinite if nothing moves."""
        return math.inf if self.remaining is None or not self.rate else self.remaining * self.seconds / self.rate

    def begin(self, now: float) -> None:
        """Start the next transfer."""
        self.remaining, self.started, self.rate = 1.0, now, 0.0

    def advance(self, step: float) -> bool:
        """Move the current transfer for ``step`` seconds. Returns whether it is complete."""
        assert self.remaining is not None
        self.remaining -= step * self.rate / self.seconds
        return self.remaining <= TOLERANCE

    def end(self, now: float) -> StageTransfer:
        """End the current transfer."""
        microbatch, ready = self.sent[self.at]
        self.remaining = None
        self.at += 1
        self.arrived[microbatch] = now
        return StageTransfer(self.channel, microbatch, ready, self.started, now)


def make_channel_states(pipeline: Pipeline) -> dict[StageChannel, ChannelState]:
    """Initial states of the forward and the backward channel of every edge."""
    states: dict[StageChannel, ChannelState] = {}
    for edge in pipeline.edges:
        forward, backward = StageChannel(edge.src, edge.dst, True), StageChannel(edge.dst, edge.src, False)
        states[forward] = ChannelState(forward, len(states), edge.forward_seconds, edge.forward_loads)
        states[backward] = ChannelState(backward, len(states), edge.backward_seconds, edge.backward_loads)
    return states


class LinkRates:
    """Rates of transfers of one pipeline that share links. The rates of channels that move together are kept."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], list[float]] = {}

    def set(self, active: Sequence[ChannelState]) -> None:
        """Set the rate of each of the transfers that move now."""
        key = tuple([state.number for state in active])
        if key not in self._known:
            self._known[key] = find_rates([state.link_shares for state in active])
        for state, rate in zip(active, self._known[key], strict=True):
            state.rate = rate


def find_rates(loads: Sequence[Mapping[str, float]]) -> list[float]:
    """The rates of transfers by max-min fairness over shared links. Without contention the rate is 1.

    Args:
        loads: for each transfer, the fraction of each link's capacity that it uses at rate 1.
    """
    if not any(loads):
        return [1.0] * len(loads)
    capacity = {link: 1.0 for load in loads for link in load}
    rate = [0.0] * len(loads)
    unfrozen = list(range(len(loads)))
    while unfrozen:
        increase = 1.0 - max(rate[i] for i in unfrozen)  # all unfrozen transfers have the same rate
        for link, remaining in capacity.items():
            total = sum(loads[i].get(link, 0.0) for i in unfrozen)
            if total:
                increase = min(increase, remaining / total)
        for i in unfrozen:
            rate[i] += increase
            for link, share in loads[i].items():
                capacity[link] -= share * increase
        full = {link for link, remaining in capacity.items() if remaining <= 1e-12}
        unfrozen = [i for i in unfrozen if rate[i] < 1 - 1e-12 and not full & loads[i].keys()]
    return rate
