"""Costs of a stage under one choice of its layers, for all ranges of layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..costs.collective_costs import StagePlace
from ..costs.layer_costs import LayerCost
from ..costs.search_problem import SearchProblem
from ..costs.tied_costs import tied_share
from ..inputs.layer_choices import LayerChoice


def num_recomputed(part: float, count: int) -> int:
    """The number of recomputed layers if this part of ``count`` layers is recomputed."""
    return int(np.ceil(part * count - 1e-9))


#: Costs of layers that add up over the layers of a stage.
SUMMED = ("forward_seconds", "backward_seconds", "activation_bytes", "state_bytes", "sync_seconds")


class OptionTables:
    """Makes the tables of options, for one number of microbatches. Layers of one class share their costs."""

    def __init__(self, problem: SearchProblem, num_microbatches: int) -> None:
        self.problem, self.num_microbatches = problem, num_microbatches
        self._num = len(problem.graph.layers)
        self._first, self._end = np.indices((self._num + 1, self._num + 1))
        self._middles: dict[float, np.ndarray] = {}
        self._costs: dict[tuple[LayerChoice, StagePlace], _ChoiceCosts] = {}

    def of(self, choice: LayerChoice, place: StagePlace, recomputed: float) -> tuple[np.ndarray, ...]:
        """Six tables ``[first, end]`` of the costs of a stage of these layers.

        They are seconds forward and backward, bytes of activations, fixed bytes, seconds of gradient sums, and bytes at
        the end of a step.

        Args:
            choice: choice of all layers.
            place: place of the stage.
            recomputed: part of the layers that are recomputed, from the first one on.
        """
        key = (replace(choice, recompute=False), place)
        if key not in self._costs:
            self._costs[key] = self._find_costs(*key)
        costs, first, end = self._costs[key], self._first, self._end
        if recomputed not in self._middles:
            again = np.ceil(recomputed * np.maximum(end - first, 0) - 1e-9).astype(int)
            self._middles[recomputed] = np.minimum(first + again, self._num)
        middle = self._middles[recomputed]

        def total(name: str) -> np.ndarray:
            sums = costs.sums[name]
            return (sums[0][middle] - sums[0][first]) + (sums[1][end] - sums[1][middle])

        activation = total("activation_bytes")
        released = costs.kept[first] + activation
        recompute = np.maximum(0.0, costs.peaks[first, middle] - released)
        backward = costs.gathering_peaks[first, middle] - released + costs.max_gathered
        working = np.maximum(costs.gathered, np.minimum(recompute + costs.gathered, backward))  # as working_bytes
        states = total("state_bytes") - costs.repeated
        fixed = states + working + costs.panels
        forward = np.where(costs.unable[end] > costs.unable[first], np.inf, total("forward_seconds"))
        sync, ending = total("sync_seconds") + costs.tie_seconds, states + costs.tie_bytes
        return forward, total("backward_seconds"), activation, fixed, sync, ending

    def _find_costs(self, choice: LayerChoice, place: StagePlace) -> _ChoiceCosts:
        problem, class_of = self.problem, self.problem.class_of
        firsts = [class_of.index(number) for number in range(len(problem.layer_classes))]
        is_able = [problem.can_have(choice, layer, layer + 1) for layer in firsts]
        plain, again = (
            [
                problem.layer_cost(
                    layer, replace(choice, recompute=flag) if able else LayerChoice(), place, self.num_microbatches
                )
                for layer, able in zip(firsts, is_able, strict=True)
            ]
            for flag in (False, True)
        )
        costs = [plain[c] for c in class_of]
        ties = self._find_ties(costs, choice, place)
        return _ChoiceCosts.of(costs, [again[c] for c in class_of], [is_able[c] for c in class_of], ties)

    def _find_ties(self, costs: Sequence[LayerCost], choice: LayerChoice, place: StagePlace) -> np.ndarray:
        """``[3, first, end]``: bytes of states counted twice; lower bounds on seconds and bytes of sums over stages.

        The values equal those of ``repeated_bytes`` and ``TiedCosts.least`` for one stage.
        """
        graph, first, end = self.problem.graph, self._first, self._end
        repeated, seconds, max_bytes = (np.zeros(first.shape) for _ in range(3))
        for tied, number in graph.ties:
            for layer, following in zip(tied, (*tied[1:], len(graph.layers)), strict=True):
                has = (first <= layer) & (layer < end)
                repeated += np.where(has & (following < end), tied_share(graph, layer, number), 0.0) * (
                    costs[layer].state_bytes
                )
                sums = has & (following >= end) & ((tied[0] < first) | (tied[-1] >= end))
                one, nbytes = self.problem.ties.min_of(tied, number, layer, choice, place)
                seconds += np.where(sums, one, 0.0)
                max_bytes = np.maximum(max_bytes, np.where(sums, nbytes, 0.0))
        return np.stack([repeated, seconds, max_bytes])


@dataclass(frozen=True, eq=False)
class _ChoiceCosts:
    """Costs of all layers under one choice on one place. Layers ``first`` to ``end - 1`` are a possible stage.

    Attributes:
        sums: prefix sums over the layers of each cost in :data:`SUMMED`: if all layers are recomputed, and if none is.
        kept: prefix sum of activation bytes if all layers are recomputed.
        peaks: ``[first, end]``: peak bytes of activations while the layers are recomputed one after another.
        gathering_peaks: the same, with the parameters of the recomputed layer and the buffer of their all-gather.
        gathered: ``[first, end]``: bytes of gathered parameters in a forward.
        max_gathered: ``[first, end]``: bytes of the gathered parameters of the largest layer.
        panels: ``[first, end]``: bytes of the panels of the largest matrix product.
        repeated: ``[first, end]``: bytes of states that layers with shared parameters count twice.
        tie_seconds: ``[first, end]``: lower bound on seconds of sums over stages that share parameters.
        tie_bytes: ``[first, end]``: lower bound on bytes of these sums.
        unable: prefix count of layers that cannot have the choice.
    """

    sums: dict[str, tuple[np.ndarray, np.ndarray]]
    kept: np.ndarray
    peaks: np.ndarray
    gathering_peaks: np.ndarray
    gathered: np.ndarray
    max_gathered: np.ndarray
    panels: np.ndarray
    repeated: np.ndarray
    tie_seconds: np.ndarray
    tie_bytes: np.ndarray
    unable: np.ndarray

    @classmethod
    def of(
        cls, plain: Sequence[LayerCost], again: Sequence[LayerCost], is_able: Sequence[bool], ties: np.ndarray
    ) -> _ChoiceCosts:
        """From the costs of each layer without and with recomputation."""

        def running_sums(name: str) -> tuple[np.ndarray, np.ndarray]:
            both = [np.concatenate([[0.0], np.cumsum([getattr(c, name) for c in costs])]) for costs in (again, plain)]
            return both[0], both[1]

        kept = np.cumsum([0.0] + [cost.activation_bytes for cost in again])
        return cls(
            {name: running_sums(name) for name in SUMMED},
            kept,
            _running_max([cost.recompute_bytes + kept[index + 1] for index, cost in enumerate(again)]),
            _running_max(
                [
                    cost.recompute_bytes + kept[index + 1] + 2 * cost.gathered_bytes if cost.recompute_bytes else 0.0
                    for index, cost in enumerate(again)
                ]
            ),
            _gathered_bytes([cost.gathered_bytes for cost in plain]),
            _running_max([cost.gathered_bytes for cost in plain]),
            _running_max([cost.panel_bytes for cost in plain]),
            ties[0],
            ties[1],
            ties[2],
            np.cumsum([0] + [not item for item in is_able]),
        )


def _running_max(values: Sequence[float]) -> np.ndarray:
    """``[first, end]``: the largest value of a range, 0 if it is empty. No value is negative."""
    num = len(values)
    table = np.zeros((num + 1, num + 1))
    table[:num, 1:] = np.maximum.accumulate(np.triu(np.broadcast_to(values, (num, num))), axis=1)
    return table


def _gathered_bytes(values: Sequence[float]) -> np.ndarray:
    """``[first, end]``: sum of the two largest values of a range, and the largest once more."""
    num = len(values)
    table = np.zeros((num + 1, num + 1))
    largest, second = np.zeros(num), np.zeros(num)  # by first layer of a range
    for end in range(num if any(values) else 0):
        begun = slice(0, end + 1)
        second[begun] = np.maximum(second[begun], np.minimum(largest[begun], values[end]))
        largest[begun] = np.maximum(largest[begun], values[end])
        table[begun, end + 1] = 2 * largest[begun] + second[begun]
    return table
