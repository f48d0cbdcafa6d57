"""Stages of a model that is given as a chain of blocks, for models whose forward cannot be traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.errors import ArgumentError

from ...runtime.stage import StageOutput


@dataclass(frozen=True)
class Block:
    """One link of a chain of blocks.

    Args:
        path: module path that ``cut_before`` can name.
        run: function of named values. Its parameters name the values that it reads: inputs of the batch, or values
            that earlier blocks wrote. A parameter with a default is optional. It returns ``{name: value}``, the values
            that it writes, or a :class:`~reshard.scheduler.StageOutput`.
        modules: paths of the modules and parameters that it uses; default: ``path`` alone.
        recomputed: names of the values that it writes, if every stage that reads one of them computes it again instead
            of receiving it. Such a block must be cheap.
    """

    path: str
    run: Callable[..., Any]
    modules: tuple[str, ...] | None = None
    recomputed: tuple[str, ...] = ()

    @property
    def used(self) -> tuple[str, ...]:
        """Paths of the modules and parameters that the block uses."""
        return (self.path,) if self.modules is None else self.modules

    @property
    def reads(self) -> dict[str, bool]:
        """``{name: whether it is required}`` of the values that the block reads."""
        parameters = inspect.signature(self.run).parameters
        return {name: each.default is each.empty for name, each in parameters.items()}


class BlockStage(torch.nn.Module):
    """Some blocks of a chain. Its parameters keep the names that they have in the whole model.

    Args:
        blocks: blocks to run, in order.
        root: the whole model.
    """

    def __init__(self, blocks: Sequence[Block], root: torch.nn.Module) -> None:
        super().__init__()
        self._blocks = list(blocks)
        self.outputs: tuple[str, ...] = ()  # names of the values that other stages read
        for block in blocks:
            for path in block.used:
                _attach(self, root, path)

    def forward(self, **values: Any) -> StageOutput:
        """Run the blocks on named values."""
        written, _, loss, metrics = self.run(values)
        return StageOutput({name: written[name] for name in self.outputs}, loss, metrics)

    def run(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], set[str], Any, dict[str, Any]]:
        """Run the blocks. Returns the values written, the names of ``given`` that were read, the loss and metrics."""
        written: dict[str, Any] = {}
        read: set[str] = set()
        loss: Any = None
        metrics: dict[str, Any] = {}
        for block in self._blocks:
            arguments = {}
            for name, is_required in block.reads.items():
                if name in written:
                    arguments[name] = written[name]
                elif name in given:
                    arguments[name] = given[name]
                    read.add(name)
                elif is_required:
                    raise ArgumentError(
                        f"block {block.path!r} reads {name!r}, which is neither in the batch, which has "
                        f"{sorted(given)}, nor written by an earlier block"
                    )
            made = block.run(**arguments)
            if isinstance(made, StageOutput):
                loss, metrics = made.loss, {**metrics, **made.metrics}
                made = made.tensors
            if not isinstance(made, Mapping):
                raise ArgumentError(
                    f"block {block.path!r} returned {type(made).__name__}; it must return {{name: value}} or a "
                    "StageOutput"
                )
            written.update(made)
        return written, read, loss, metrics


def _attach(stage: torch.nn.Module, root: torch.nn.Module, path: str) -> None:
    """Register a module or parameter of ``root`` in the stage, at the same path."""
    *parents, name = path.split(".")
    source = root
    for parent in parents:
        child = source._modules.get(parent)
        if child is None:
            break
        if parent not in stage._modules:
            stage.add_module(parent, torch.nn.Module())
        elif stage._modules[parent] is child:
            return  # registered with an ancestor
        stage, source = stage.get_submodule(parent), child
    if name in source._modules:
        stage.add_module(name, source._modules[name])
    elif name in source._parameters:
        stage.register_parameter(name, source._parameters[name])
    elif name in source._buffers:
        stage.register_buffer(name, source._buffers[name], name not in source._non_persistent_buffers_set)
    else:
        raise ArgumentError(f"the model has no module, parameter or buffer {path!r}, which one of its blocks uses")


class BlockCut:
    """A chain of blocks, cut into stages.

    Args:
        make_blocks: returns the blocks of a model.
        model: the model; its blocks name what can be cut.
        cut_before: paths of blocks, in order.

    Raises:
        ArgumentError: a cut names no block, or cuts are out of order.
    """

    def __init__(
        self, make_blocks: Callable[[Any], Sequence[Block]], model: torch.nn.Module, cut_before: Sequence[str]
    ) -> None:
        self._make_blocks = make_blocks
        blocks = list(make_blocks(model))
        paths = [block.path for block in blocks]
        remaining = list(cut_before)
        self._stage_of: list[int] = []
        for block in blocks:
            if remaining and block.path == remaining[0]:
                if block.recomputed:
                    raise ArgumentError(f"cut_before names {block.path!r}, which every stage computes; cut elsewhere")
                remaining.pop(0)
            self._stage_of.append(len(cut_before) - len(remaining))
        if remaining:
            why = "is out of order" if remaining[0] in paths else "is not a block of the model"
            raise ArgumentError(f"cut_before names {remaining[0]!r}, which {why}; its blocks are {', '.join(paths)}")
        self.num_stages = len(cut_before) + 1

    def build(self, root: torch.nn.Module) -> list[BlockStage]:
        """The modules of all stages, which share their parts with ``root``."""
        blocks = list(self._make_blocks(root))
        recomputed = [block for block in blocks if block.recomputed]
        stages: list[list[Block]] = [[] for _ in range(self.num_stages)]
        for block, number in zip(blocks, self._stage_of, strict=True):
            if block.recomputed:
                continue
            for other in recomputed:
                if other not in stages[number] and set(other.recomputed) & set(block.reads):
                    stages[number].append(other)
            stages[number].append(block)
        made = [BlockStage(mine, root) for mine in stages]
        for stage in made:
            stage.training = root.training
        return made
