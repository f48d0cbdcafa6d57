"""The gradients that passes of a stage change. ``order="ready"`` swaps only passes whose order changes no result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from reshard.errors import ArgumentError

from .. import torch_compat
from ..ir.actions import Action, Kind
from .stage import StageRun

#: By name of a tensor, its identity and its in-place version counter.
_Versions = dict[str, tuple[int, int]]

_NAMES = {Kind.B: "backward", Kind.I: "input-gradient pass", Kind.W: "weight-gradient pass"}


class GradientPasses:
    """The parameters to whose gradients the passes of each stage of a rank have added.

    Sums of floating-point numbers depend on their order. Most parameters get their gradient in one of the two passes
    of a split backward. A parameter that gets it in both, such as a tied embedding, fixes the order of the passes.

    Args:
        stages: ``{stage: its module}``.
    """

    def __init__(self, stages: Mapping[int, StageRun]) -> None:
        self._stages = stages
        self._added: dict[tuple[int, Kind], set[str]] = {}  # by stage and kind of pass, names of parameters
        self._moved: set[int] = set()  # stages of which passes were swapped in this step

    def begin(self) -> None:
        """Begin a step."""
        self._moved.clear()

    def may_move(self, stage: int) -> bool:
        """Whether weight-gradient passes of a stage and its input-gradient passes add to different gradients."""
        weights, inputs = self._added.get((stage, Kind.W)), self._added.get((stage, Kind.I))
        return weights is not None and inputs is not None and not weights & inputs

    @contextlib.contextmanager
    def watch(self, action: Action, is_moved: bool) -> Iterator[None]:
        """Find out what a backward or a weight-gradient pass changes while the context is open.

        Args:
            action: the pass.
            is_moved: whether it runs before a pass of its stage that precedes it in the plan.

        Raises:
            ArgumentError: results depend on the order in which passes have run.
        """
        stage, is_split = action.stage, action.kind is not Kind.B
        if is_moved:
            self._moved.add(stage)
        random_state, buffers = torch.get_rng_state(), self._buffers(stage)
        gradients = self._gradients(stage) if is_split else {}
        yield
        if not torch.equal(random_state, torch.get_rng_state()):
            raise self._depends(action, "draws random numbers", "they would depend")
        changed = _find_changed(buffers, self._buffers(stage))
        if changed:
            raise self._depends(action, f"changes its buffer {min(changed)!r}", "its value would depend")
        if is_split:
            added = self._added.setdefault((stage, action.kind), set())
            added |= _find_changed(gradients, self._gradients(stage))
            self._check_moved(action)

    def _depends(self, action: Action, what: str, effect: str) -> ArgumentError:
        return ArgumentError(
            f"stage {action.stage} {what} in the {_NAMES[action.kind]} of microbatch {action.microbatch}; with "
            f'order="ready", {effect} on the times of messages: use order="planned"'
        )

    def _check_moved(self, action: Action) -> None:
        """Raise ArgumentError if passes of a stage were swapped that add to one gradient."""
        stage = action.stage
        if stage in self._moved and not self.may_move(stage):
            both = self._added[stage, Kind.W] & self._added[stage, Kind.I]
            raise ArgumentError(
                f"both passes of the split backward of stage {stage} add to the gradient of {min(both)!r} since "
                f'microbatch {action.microbatch}, after order="ready" has swapped such passes; use order="planned"'
            )

    def _gradients(self, stage: int) -> _Versions:
        """For each parameter of a stage with a gradient, a value that changes when the gradient is added to."""
        named = self._stages[stage].module.named_parameters()
        return {name: _version_of(item.grad) for name, item in named if item.grad is not None}

    def _buffers(self, stage: int) -> _Versions:
        """For each buffer of a stage, a value that changes when the buffer changes."""
        return {name: _version_of(buffer) for name, buffer in self._stages[stage].module.named_buffers()}


def _version_of(tensor: torch.Tensor) -> tuple[int, int]:
    return id(tensor), torch_compat.version_of(tensor)


def _find_changed(before: _Versions, after: _Versions) -> set[str]:
    return {name for name, version in after.items() if before.get(name) != version}
