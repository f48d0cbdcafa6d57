"""The reference implementation of ``native/multicast/pod_chunk_scheduler.h``: chunk scheduling with pods, which share uplinks."""

from __future__ import annotations

from dataclasses import dataclass, field

from reshard.planner.multicast.chunk_workload import CHUNK_UNITS
from tests.reference.chunk_scheduler import ChunkScheduler

_PASSES = 8
_MAX_FAILURES = 1024
_GAIN = 1e-9


@dataclass(eq=False, slots=True)
class _Choice:
    """A transfer that could start: its rate, the numbers of its ports, and its weight."""

    s: int
    r: int
    rate: float
    passes: list[int]
    weight: float


@dataclass(slots=True)
class _Chosen:
    """Transfers that can start together: one per port, and as many per uplink as its rate allows."""

    free_rate: dict[int, float]  # free rate of each uplink
    by: dict[int, list[_Choice]] = field(default_factory=dict)

    def add(self, choice: _Choice) -> None:
        for number in choice.passes:
            self.by.setdefault(number, []).append(choice)

    def remove(self, choice: _Choice) -> None:
        for number in choice.passes:
            self.by[number].remove(choice)

    def has(self, choice: _Choice) -> bool:
        return choice in self.by.get(choice.passes[0], ())

    def conflicts(self, choice: _Choice) -> list[_Choice]:
        """The chosen transfers to remove so that this one can start."""
        found: list[_Choice] = []
        for number in choice.passes[0], choice.passes[-1], *choice.passes[1:-1]:
            others = [other for other in self.by.get(number, ()) if other not in found]
            if number in self.free_rate:
                left = self.free_rate[number] * (1 + _GAIN) - choice.rate - sum(other.rate for other in others)
                others.sort(key=lambda other: other.weight)
                while left < 0 and others:
                    left += others[0].rate
                    found.append(others.pop(0))
            else:
                found.extend(others)
        return found


class PodChunkScheduler(ChunkScheduler):
    """Chooses transfers that keep the ports and uplinks with the most work left busy.

    The weight of a port or uplink grows as its remaining time approaches the longest one. Transfers are chosen heaviest
    first, and then exchanged while that increases the total weight. A chunk enters a pod once; uplinks with spare time
    may bring a chunk into the pod again.
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
                    passes = [port.number for port in self.path(s, r)]
                    choices.append(_Choice(s, r, self.rate(s, r), passes, sum(worth[number] for number in passes)))
        choices.sort(key=lambda choice: (-choice.weight, choice.r, choice.s))
        chosen = self.choose_transfers(choices)
        started = False
        for choice in choices:
            if chosen.has(choice):
                started |= self.start(choice.s, choice.r)
        return self.help_pods(senders, receivers, to_get) or started

    def worth(self, to_get: dict[int, float], to_give: dict[int, float]) -> dict[int, float]:
        """Weight of keeping each port busy, by number: about 1 for the most work left, steeply falling with less."""
        left = {
            **{self.into[r].number: load for r, load in to_get.items()},
            **{self.out[s].number: load for s, load in to_give.items()},
            **{
                down.number: load / CHUNK_UNITS / down.rate
                for down, load in zip(self.down, self.chunk_state.to_enter, strict=True)
            },
            **{
                up.number: load / CHUNK_UNITS / up.rate
                for up, load in zip(self.up, self.chunk_state.to_leave, strict=True)
            },
        }
        most = max(left.values())
        worth = {}
        for number, load in left.items():
            near = 1.0 / (1.0 + (most - load))
            worth[number] = near * near * near + 0.001 * (load / most)
        return worth

    def choose_transfers(self, choices: list[_Choice]) -> _Chosen:
        """Choose the heaviest transfers first, then exchange transfers for conflicting ones while that gains weight."""
        free_rate = {port.number: port.free for port in (*self.up, *self.down)}
        chosen = _Chosen(free_rate)
        by_port: dict[int, list[_Choice]] = {}
        for choice in choices:
            if not chosen.conflicts(choice):
                chosen.add(choice)
            for number in choice.passes[0], choice.passes[-1]:
                by_port.setdefault(number, []).append(choice)
        for _ in range(_PASSES):
            is_better, failures = False, 0
            for choice in choices:
                if chosen.has(choice):
                    continue
                if self.exchange(choice, chosen, by_port):
                    is_better, failures = True, 0
                else:
                    failures += 1
                if failures == _MAX_FAILURES:
                    break
            if not is_better:
                break
        return chosen

    def exchange(self, choice: _Choice, chosen: _Chosen, by_port: dict[int, list[_Choice]]) -> bool:
        """Replace the conflicts of a transfer by it and by others that then fit, if that gains weight."""
        removed = chosen.conflicts(choice)
        gain = choice.weight - sum(other.weight for other in removed)
        for other in removed:
            chosen.remove(other)
        chosen.add(choice)
        added = [choice]
        for other in removed:
            for number in other.passes[0], other.passes[-1]:
                for more in by_port[number]:
                    if not chosen.has(more) and not chosen.conflicts(more):
                        chosen.add(more)
                        added.append(more)
                        gain += more.weight
        if gain > _GAIN:
            return True
        for more in added:
            chosen.remove(more)
        for other in removed:
            chosen.add(other)
        return False

    def help_pods(self, senders: list[int], receivers: list[int], to_get: dict[int, float]) -> bool:
        """Let idle senders of other pods serve idle receivers through uplinks with spare time."""
        started = False
        host, pod = self.nics.host, self.nics.pod
        for r in receivers:
            q = pod[host[r]]
            if self.chunk_state.to_enter[q] / CHUNK_UNITS / self.down[q].rate + 1 > to_get[r]:
                continue
            for s in senders:
                if pod[host[s]] != q and self.rate(s, r) > 0 and self.start(s, r, may_enter_again=True):
                    started = True
                    break
        return started
