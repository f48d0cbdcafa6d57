"""The state that one rank saves and loads: modules, optimizer, scheduler, loader, counters, random generators."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reshard.errors import ArgumentError
from reshard.formatting import brief, compare_names, count_of

from ..gradients.compression_policy import StageSums
from .plain_parameters import JoinedTensor, PlainParameter, named_state

#: ``exchange(value, error)`` returns the values of all ranks, by rank. If a rank passes an error, all ranks raise it.
GatherFromRanks = Callable[[Any, BaseException | None], Mapping[int, Any]]


@dataclass(frozen=True)
class TrainingState:
    """The state that one rank saves to a checkpoint, or loads from it.

    Attributes:
        rank: this rank.
        is_first: whether it decides for all ranks.
        modules: ``{stage: module}`` of this rank.
        ties: for each parameter that several stages share, its name in each: ``{stage: name}``.
        optimizer, lr_scheduler, loader: each is None if it is neither saved nor loaded.
        counters: values of the engine: ``"step"``, ``"loss_scale"`` and ``"world_size"``.
        sums: encoded sums of gradients, whose errors are saved and loaded.
    """

    rank: int
    is_first: bool
    modules: Mapping[int, torch.nn.Module]
    ties: Sequence[Mapping[int, str]]
    optimizer: Any
    lr_scheduler: Any
    loader: Any
    counters: dict[str, Any]
    sums: StageSums

    @property
    def rng_keys(self) -> tuple[str, str]:
        """Keys of the random number generators of this rank, and of those to load if there are none."""
        return f"rng.{self.rank}", "rng.0"

    @property
    def loader_keys(self) -> tuple[str, str]:
        """Keys of the loader of this rank, and of the one to load if there is none."""
        return f"loader.{self.rank}", "loader.0"

    def model(self, for_save: bool = False) -> list[tuple[str, torch.Tensor | JoinedTensor]]:
        """Parameters and persistent buffers, with their names in the whole model."""
        tensors: list[tuple[str, torch.Tensor | JoinedTensor]] = []
        for stage, module in self.modules.items():
            parameters, buffers = named_state(module)
            tensors += [
                (parameter.name, parameter.join(parameter.parameters))
                for parameter in parameters
                if not for_save or self.saves(stage, parameter.name)
            ]
            tensors += buffers.items()
        return tensors

    def optimized_parameters(self, for_save: bool = False) -> list[tuple[PlainParameter, dict[str, Any]]]:
        """``(parameter, parameter group)`` of each parameter in the optimizer; a tied one once per name."""
        groups = {id(parameter): group for group in self.optimizer.param_groups for parameter in group["params"]}
        every = [(stage, parameter) for stage, module in self.modules.items() for parameter in named_state(module)[0]]
        return [
            (item, groups[id(item.parameters[0])])
            for stage, item in every
            if id(item.parameters[0]) in groups and (not for_save or self.saves(stage, item.name))
        ]

    def saves(self, stage: int, name: str) -> bool:
        """Whether a stage saves its parameter of this name. If stages share it under one name, only the first does."""
        return not any(tie.get(stage) == name and name in (tie[s] for s in tie if s < stage) for tie in self.ties)

    def aliases(self, name: str) -> list[str]:
        """The name, then the other names of the same parameter."""
        return [name, *(other for tie in self.ties if name in tie.values() for other in tie.values() if other != name)]


def check_objects(state: TrainingState, method: str) -> None:
    """Raise ArgumentError unless scheduler and loader have a method, and the optimizer has no other parameters.

    The method is ``state_dict`` or ``load_state_dict``.
    """
    for name, item in (("lr_scheduler", state.lr_scheduler), ("loader", state.loader)):
        if item is not None and not callable(getattr(item, method, None)):
            raise ArgumentError(f"{name} is {type(item).__name__}, which has no {method}(); omit it, or give it one")
    if state.optimizer is None:
        return
    if not isinstance(getattr(state.optimizer, "param_groups", None), list):
        raise ArgumentError(f"optimizer is {type(state.optimizer).__name__}, which has no param_groups")
    modules = state.modules.values()
    own = {id(part) for module in modules for entry in named_state(module)[0] for part in entry.parameters}
    optimized = [
        parameter for group in state.optimizer.param_groups for parameter in group["params"] if parameter.numel()
    ]
    foreign = [item for item in optimized if id(item) not in own]
    if foreign:
        raise ArgumentError(
            f"the optimizer has {count_of(len(foreign), 'parameter')} that the engine does not have, the first of "
            f"shape {list(foreign[0].shape)}; make it of engine.parameters()"
        )


def check_counters(value: Any) -> None:
    """Raise ValueError unless a value is the counters of an engine. The text names the key."""
    if not isinstance(value, dict):
        raise ValueError(f"it is {brief(value)}, not a dict")
    low = {"step": 0, "world_size": 1, "encoded_steps": 0}
    if set(value) - {"encoded_steps"} != {"step", "world_size", "loss_scale"}:  # earlier versions lack the first
        raise ValueError(f"it {compare_names(value, {*low, 'loss_scale'})}")
    for key in set(low) & set(value):
        if type(value[key]) is not int or not low[key] <= value[key] < 2**62:
            raise ValueError(f"its {key} is {brief(value[key])}, not an integer from {low[key]} to 2**62 - 1")
    scale = value["loss_scale"]
    if scale is not None:
        if not isinstance(scale, dict) or set(scale) != {"value", "finite_steps"}:
            raise ValueError(f"its loss_scale is {brief(scale)}, not a dict of value and finite_steps")
        factor, steps = scale["value"], scale["finite_steps"]
        if type(factor) is not float or not 0 <= factor < math.inf:
            raise ValueError(f"its loss scale is {brief(factor)}, not a finite float that is 0 or more")
        if type(steps) is not int or not 0 <= steps < 2**62:
            raise ValueError(f"its finite_steps are {brief(steps)}, not an integer from 0 to 2**62 - 1")


def rng_state() -> dict[str, Any]:
    """States of the random number generators of torch, Python and NumPy."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def check_rng(state: Any) -> None:
    """Raise ValueError unless :func:`restore_rng` can restore these states. No generator of the process changes."""
    try:
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.Generator("cuda").set_state(state["cuda"])
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"it holds no states of random number generators: {type(error).__name__}: {error}") from error


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore what :func:`rng_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
