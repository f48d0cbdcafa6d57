"""Scheduling where pods of hosts stand behind uplinks, which several pairs of ports want at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from reshard.planner.multicast.workload import UNITS
from tests.reference.chunk_scheduler import ChunkScheduler

_PASSES = 8
_GAIN = 1e-9


@dataclass(eq=False, slots=True)
class _Choice:
    """A transfer that could start: what it passes (resources by number), and what that is worth."""

    s: int
    r: int
    rate: float
    passes: list[int]
    weight: float


@dataclass(slots=True)
class _Chosen:
    """Transfers that can start together. A port takes one, an uplink as many as its rate allows."""

    room: dict[int, float]  # of uplinks
    by: dict[int, list[_Choice]] = field(default_factory=dict)

    def add(self, choice: _Choice) -> None:
        for number in choice.passes:
            self.by.setdefault(number, []).append(choice)

    def remove(self, choice: _Choice) -> None:
        for number in choice.passes:
            self.by[number].remove(choice)

    def has(self, choice: _Choice) -> bool:
        return choice in self.by.get(choice.passes[0], ())

    def in_the_way(self, choice: _Choice) -> list[_Choice]:
        """What must go so that this one can start."""
        found: list[_Choice] = []
        for number in choice.passes:
            others = [other for other in self.by.get(number, ()) if other not in found]
            if number in self.room:
                left = self.room[number] * (1 + _GAIN) - choice.rate - sum(other.rate for other in others)
                others.sort(key=lambda other: other.weight)
                while left < 0 and others:
                    left += others[0].rate
                    found.append(others.pop(0))
            else:
                found.extend(others)
        return found


class PodChunkScheduler(ChunkScheduler):
    """Chooses transfers so that what has most left to do is busy: ports and uplinks alike.

    Each is worth more the closer its remaining time is to the longest one. Choices are made heaviest first, and then
    exchanged as long as that gains. A pod gets a chunk over its uplink once; uplinks with time to spare may bring what
    the pod has already.
    """

    def pair(
        self, senders: list[int], receivers: list[int], to_get: dict[int, float], to_give: dict[int, float]
    ) -> bool:
        """See :meth:`ChunkScheduler.pair`."""
        worth = self.worth(to_get, to_give)
        choices = []
        for r in receivers:
            for s in senders:
                if self.can_start(s, r):
                    passes = [resource.number for resource in self.path(s, r)]
                    choices.append(_Choice(s, r, self.rate(s, r), passes, sum(worth[number] for number in passes)))
        choices.sort(key=lambda choice: (-choice.weight, choice.r, choice.s))
        chosen = self.choose_transfers(choices)
        started = False
        for choice in choices:
            if chosen.has(choice):
                started |= self.start(choice.s, choice.r)
        return self.help_pods(senders, receivers, to_get) or started

    def worth(self, to_get: dict[int, float], to_give: dict[int, float]) -> dict[int, float]:
        """What it is worth to keep each resource busy, by number: 1 where most is left, steeply less elsewhere."""
        left = {
            **{self.into[r].number: load for r, load in to_get.items()},
            **{self.out[s].number: load for s, load in to_give.items()},
            **{
                down.number: load / UNITS / down.rate
                for down, load in zip(self.down, self.chunk_state.to_enter, strict=True)
            },
            **{up.number: load / UNITS / up.rate for up, load in zip(self.up, self.chunk_state.to_leave, strict=True)},
        }
        most = max(left.values())
        worth = {}
        for number, load in left.items():
            near = 1.0 / (1.0 + (most - load))
            worth[number] = near * near * near + 0.001 * (load / most)
        return worth

    def choose_transfers(self, choices: list[_Choice]) -> _Chosen:
        """The heaviest first, then exchanges of one for those in its way, as long as those gain."""
        room = {resource.number: resource.free for resource in (*self.up, *self.down)}
        chosen = _Chosen(room)
        around: dict[int, list[_Choice]] = {}
        for choice in choices:
            if not chosen.in_the_way(choice):
                chosen.add(choice)
            for number in choice.passes[0], choice.passes[-1]:
                around.setdefault(number, []).append(choice)
        for _ in range(_PASSES):
            exchanged = [self.exchange(choice, chosen, around) for choice in choices]
            if not any(exchanged):
                break
        return chosen

    def exchange(self, choice: _Choice, chosen: _Chosen, around: dict[int, list[_Choice]]) -> bool:
        """Take one in place of those in its way, and what else there is room for then, if that gains."""
        if chosen.has(choice):
            return False
        gone = chosen.in_the_way(choice)
        gain = choice.weight - sum(other.weight for other in gone)
        for other in gone:
            chosen.remove(other)
        chosen.add(choice)
        added = [choice]
        for other in gone:
            for number in other.passes[0], other.passes[-1]:
                for more in around[number]:
                    if not chosen.has(more) and not chosen.in_the_way(more):
                        chosen.add(more)
                        added.append(more)
                        gain += more.weight
        if gain > _GAIN:
            return True
        for more in added:
            chosen.remove(more)
        for other in gone:
            chosen.add(other)
        return False

    def help_pods(self, senders: list[int], receivers: list[int], to_get: dict[int, float]) -> bool:
        """Let idle senders of other pods serve idle receivers, over uplinks that have the time."""
        started = False
        host, pod = self.ports.host, self.ports.pod
        for r in receivers:
            q = pod[host[r]]
            if self.chunk_state.to_enter[q] / UNITS / self.down[q].rate + 1 > to_get[r]:
                continue
            for s in senders:
                if pod[host[s]] != q and self.rate(s, r) > 0 and self.start(s, r, may_enter_again=True):
                    started = True
                    break
        return started
