"""Stages of a model that is given as a sequence of blocks, for models whose forward cannot be traced."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.arguments import check_fields
from reshard.errors import ArgumentError

from ... import torch_compat
from ...runtime.stage import StageOutput


@dataclass(frozen=True)
class Block:
    """One step of a model's forward. A model is a sequence of blocks.

    Args:
        path: module path that ``cut_before`` can name.
        run: function or module that is called with values by name. Its parameters name the values that it reads:
            inputs of the batch, or values that earlier blocks wrote. A parameter with a default is optional. ``run``
            returns the values that it writes as ``{name: value}``, or a :class:`~reshard.scheduler.StageOutput`.
        modules: paths of the modules and parameters that ``run`` uses; default: ``path`` alone.
        recomputed: names of all values that ``run`` writes, if stages run this block again where they need a value,
            instead of receiving it. Such a block must be cheap. Default: no value.
    """

    path: str
    run: Callable[..., Any]
    modules: tuple[str, ...] | None = None
    recomputed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def used(self) -> tuple[str, ...]:
        """Paths of the modules and parameters that the block uses."""
        return (self.path,) if self.modules is None else self.modules

    @property
    def reads(self) -> dict[str, bool]:
        """``{name: whether it is required}`` of the values that the block reads."""
        called = self.run.forward if isinstance(self.run, torch.nn.Module) else self.run
        parameters = inspect.signature(called).parameters
        return {name: parameter.default is parameter.empty for name, parameter in parameters.items()}


class BlockStage(torch.nn.Module):
    """The blocks of one stage. Its parameters keep the names that they have in the whole model.

    Args:
        root: the whole model.
        used: paths of the modules and parameters that the blocks use.
        bind: ``bind(copy)`` returns the blocks, with functions that use this copy of the model.

    Raises:
        ArgumentError: the model has no such module or parameter.
    """

    def __init__(
        self, root: torch.nn.Module, used: Collection[str], bind: Callable[[torch.nn.Module], Sequence[Block]]
    ) -> None:
        super().__init__()
        for path in used:
            _check_path(root, path)
        # The blocks run on this copy. It shares the children of the stage, also children that wrap or shard others.
        view = torch_compat.copy_parts(root, used)
        torch_compat.share_parts(self, view)
        self.__dict__["_view"] = view  # not a child
        self._bind = functools.partial(bind, view)
        self._blocks = list(self._bind())
        self.outputs: tuple[str, ...] = ()  # names of the values that other stages read
        self.training = root.training

    @property
    def view(self) -> torch.nn.Module:
        """The copy of the model that the blocks run on, which has the modules that they use."""
        module: torch.nn.Module = self.__dict__["_view"]
        return module

    def train(self, mode: bool = True) -> BlockStage:
        """Set the mode of the children, and of the model that the blocks run on."""
        super().train(mode)
        self.view.train(mode)
        return self

    def rebind(self) -> None:
        """Make the blocks again. Call this after replacing children."""
        self._blocks = list(self._bind())

    def to_grid(self, conversion: Any, path: str) -> BlockStage:
        """Cut the modules that the blocks use over a grid of :mod:`reshard.parallel`, in place."""
        view = self.view
        if conversion.convert(view, path) is not view:
            raise ArgumentError(f"a converter replaces the whole {type(view).__name__}, whose parts are in stages")
        self.rebind()
        return self

    @property
    def reads(self) -> set[str]:
        """The names of all values that the blocks may read."""
        return {name for block in self._blocks for name in block.reads}

    def forward(self, **values: Any) -> StageOutput:
        """Run the blocks on named values."""
        output, _ = self.run(values)
        tensors = {name: output.tensors[name] for name in self.outputs}
        return StageOutput(tensors, output.loss, output.metrics, output.weight)  # torch 2.9 cannot compile _replace

    def run(self, given: Mapping[str, Any]) -> tuple[StageOutput, set[str]]:
        """Run the blocks. Returns all values that they write, and the names of ``given`` that they read."""
        written: dict[str, Any] = {}
        read: set[str] = set()
        loss: Any = None
        weight: Any = None
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
                if made.loss is not None and loss is not None:
                    raise ArgumentError(f"block {block.path!r} gives a loss, but so does an earlier block of its stage")
                loss, weight = (loss, weight) if made.loss is None else (made.loss, made.weight)
                metrics |= made.metrics
                made = made.tensors
            if not isinstance(made, Mapping):
                raise ArgumentError(
                    f"block {block.path!r} returned {type(made).__name__}; it must return {{name: value}} or a "
                    "StageOutput"
                )
            written.update(made)
        return StageOutput(written, loss, metrics, weight), read


def copy_stage(module: torch.nn.Module, memo: dict[int, Any] | None = None) -> torch.nn.Module:
    """A copy of the module of a stage. ``memo`` has replacements by id of the original, as in ``copy.deepcopy``."""
    made = copy.deepcopy(module, memo)
    if isinstance(made, BlockStage):
        made.rebind()
    return made


def _check_path(root: torch.nn.Module, path: str) -> None:
    parent, _, name = path.rpartition(".")
    held: set[str] = set()
    with contextlib.suppress(AttributeError):
        module = root.get_submodule(parent)
        held = {*torch_compat.held_modules(module)}.union(*torch_compat.held_tensors(module))
    if name not in held:
        raise ArgumentError(f"the model has no module, parameter or buffer {path!r}, which one of its blocks uses")


class BlockCut:
    """A sequence of blocks, cut into stages.

    Args:
        make_blocks: ``make_blocks(model)`` returns the blocks of a model. The function is also called once for each
            stage, with a copy of the model. In this copy, modules that the stage does not use have no parameters and
            buffers.
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
        self.inputs = frozenset(name for block in blocks for name in block.reads)

    def build(self, root: torch.nn.Module) -> list[BlockStage]:
        """The modules of all stages, which share their parts with ``root``."""
        blocks = list(self._make_blocks(root))
        recomputed = [number for number, block in enumerate(blocks) if block.recomputed]
        stages: list[list[int]] = [[] for _ in range(self.num_stages)]  # indices of the blocks of each stage
        for number, (block, stage) in enumerate(zip(blocks, self._stage_of, strict=True)):
            if block.recomputed:
                continue
            for other in recomputed:
                if other not in stages[stage] and set(blocks[other].recomputed) & set(block.reads):
                    stages[stage].append(other)
            stages[stage].append(number)

        others = torch_compat.copy_without_data(root)

        def bind(mine: Sequence[int], view: torch.nn.Module) -> list[Block]:
            with torch_compat.filled_in(view, others):
                made = list(self._make_blocks(view))
            return [made[number] for number in mine]

        return [
            BlockStage(root, {path for number in mine for path in blocks[number].used}, functools.partial(bind, mine))
            for mine in stages
        ]


def blocks_of_modules(modules: torch.nn.ModuleList) -> list[Block]:
    """One block for each module, which reads what its forward names."""
    return [Block(str(number), module) for number, module in enumerate(modules)]
