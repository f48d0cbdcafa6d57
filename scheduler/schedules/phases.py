"""Building blocks that the orders of several known schedules share."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ..ir.actions import Action, Kind

#: A computation: an action, or its number in an order of :mod:`.orders`.
Item = TypeVar("Item")


def alternate(
    forwards: Sequence[Item],
    backwards: Sequence[Item],
    num_warmup: int,
    weights: Sequence[Item] = (),
    deferred: int = 0,
) -> list[Item]:
    """The order of a pp rank: its warm-up forwards, then alternating forwards and backwards, then the other backwards.

    Args:
        forwards, backwards: all computations of a pp rank, in order.
        num_warmup: number of forwards before the first pair; a number that is too large stands for all forwards.
        weights: weight-gradient passes of the backwards, which are then input-gradient passes.
        deferred: number of backwards after which the weight-gradient pass of a backward follows.
    """
    num_warmup = min(num_warmup, len(forwards))
    actions = list(forwards[:num_warmup])
    for nth, backward in enumerate(backwards):
        actions += forwards[num_warmup + nth : num_warmup + nth + 1]
        actions.append(backward)
        if weights and nth >= deferred:
            actions.append(weights[nth - deferred])
    return [*actions, *weights[max(0, len(weights) - deferred) :]]


class RowActions:
    """The computations of one pp rank of several stages, added one by one: each is for the next microbatch."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._count: Counter[tuple[bool, int]] = Counter()  # by (is forward, index of the stage)
        self._deferred: deque[tuple[int, int]] = deque()  # (index of the stage, microbatch) of weight-gradient passes

    def num_forwards(self, index: int) -> int:
        """Number of forwards of a stage so far."""
        return self._count[True, index]

    def add(self, kinds: str, times: int = 1) -> None:
        """Add computations, such as ``"F0 I1 W1"``: a forward of the first stage, then both passes of the second stage.

        ``W`` is the oldest weight-gradient pass that is left, if any, and ``W1`` the oldest one of the second stage.
        ``F0&B1`` is a forward that overlaps a backward.
        """
        for _ in range(times):
            for word in kinds.split():
                first, _, second = word.partition("&")
                self._add_one(first, overlaps=bool(second))
                if second:
                    self._add_one(second)

    def finish(self, *indices: int) -> None:
        """Add the weight-gradient passes of some stages that are left."""
        for index in indices:
            self.add(f"W{index}", sum(stage_index == index for stage_index, _ in self._deferred))

    def _add_one(self, word: str, overlaps: bool = False) -> None:
        kind = Kind(word[0])
        if kind is Kind.W:
            weight_pass = next((item for item in self._deferred if word[1:] in ("", str(item[0]))), None)
            if weight_pass is None:
                return
            self._deferred.remove(weight_pass)
            index, microbatch = weight_pass
        else:
            index = int(word[1:])
            microbatch = self._count[kind is Kind.F, index]
            self._count[kind is Kind.F, index] += 1
            if kind is Kind.I:
                self._deferred.append((index, microbatch))
        self.actions.append(Action(kind, self._stages[index], microbatch, overlaps=overlaps))


def first_microbatches(actions: Sequence[Action], num_microbatches: int) -> list[Action]:
    """The actions of the first microbatches. A forward whose overlapped backward is removed overlaps nothing."""
    kept: list[Action] = []
    for nth, action in enumerate(actions):
        if action.microbatch >= num_microbatches:
            continue
        if action.overlaps and actions[nth + 1].microbatch >= num_microbatches:
            action = replace(action, overlaps=False)
        kept.append(action)
    return kept
