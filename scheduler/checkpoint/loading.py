"""Find the entries of a checkpoint that a rank needs, and read them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from reshard.errors import ArgumentError
from reshard.formatting import brief, format_names

from .pickled import PickledCheckpoint
from .plain_parameters import JoinedTensor, PlainParameter
from .stored import StoredCheckpoint
from .training_state import TrainingState, check_counters, check_rng, restore_rng


def find_entries(checkpoint: StoredCheckpoint | PickledCheckpoint, state: TrainingState) -> ReadRequest:
    """Find the entries that this rank reads from the checkpoint, and read all but the tensors.

    Raises:
        ArgumentError: the checkpoint lacks an entry that ``state`` needs, has it with another shape, or is damaged.
    """
    request = ReadRequest(checkpoint)
    for name, tensor in state.model():
        request.fill([f"model.{alias}" for alias in state.aliases(name)], tensor)
    if state.optimizer is not None:
        _want_optimizer(request, state)
    if "engine" in request.known:  # absent if another program wrote the checkpoint
        request.want(["engine"])
        if any(key in request.known for key in state.rng_keys):
            request.want(state.rng_keys)
    for key in (item for item in request.known if item.startswith(f"feedback.{state.rank}.")):
        request.fill([key], torch.empty(checkpoint.tensors[key].shape, dtype=torch.float32, device="cpu"))
    if state.lr_scheduler is not None:
        request.want(["lr_scheduler"], like={})
    if state.loader is not None:
        request.want(state.loader_keys)
    request.read_values()
    return request


def find_model_entries(request: ReadRequest, state: TrainingState) -> list[int]:
    """Numbers of the model's entries that this rank has a place for, in the sorted keys of the checkpoint."""
    own = {f"model.{alias}" for name, _ in state.model() for alias in state.aliases(name)}
    return [number for number, key in enumerate(request.model_keys()) if key in own]


def check_model_entries(request: ReadRequest, numbers: Iterable[Sequence[int]]) -> None:
    """Raise ArgumentError if the checkpoint has an entry of the model that no rank has a place for.

    Args:
        request: the entries that this rank reads.
        numbers: for each rank, the numbers that :func:`find_model_entries` returned.
    """
    placed = {number for numbers_of_rank in numbers for number in numbers_of_rank}
    unused = [key for number, key in enumerate(request.model_keys()) if number not in placed]
    if unused:
        raise ArgumentError(
            f"the checkpoint {request.checkpoint.folder} is of another model: no stage here has {format_names(unused)}"
        )


def load(request: ReadRequest, state: TrainingState) -> dict[str, Any]:
    """Read this rank's entries into its modules, optimizer, scheduler and loader. No rank communicates.

    Returns:
        The counters of the engine that saved the checkpoint; empty if another program saved it.
    """
    request.checkpoint.read(request.reads)
    for restore in request.restore:
        restore()
    if state.lr_scheduler is not None:
        request.restore_from(["lr_scheduler"], state.lr_scheduler.load_state_dict)
    if state.loader is not None:
        request.restore_from(state.loader_keys, state.loader.load_state_dict)
    counters: dict[str, Any] = request.values.get("engine", {})
    errors: dict[str, torch.Tensor] = {}
    if counters and counters["world_size"] == state.counters["world_size"]:
        for key in state.rng_keys:
            if key in request.values:
                restore_rng(request.values[key])
        prefix = f"feedback.{state.rank}."
        errors = {key.removeprefix(prefix): tensor for key, tensor in request.tensors if key.startswith(prefix)}
    if counters:
        state.sums.load_state_dict({"steps": counters.get("encoded_steps", 0), "errors": errors})
    return counters


class ReadRequest:
    """The entries that one rank reads from a checkpoint.

    Attributes:
        known: keys of all entries of the checkpoint.
        tensors: ``(key, tensor to fill)``. A key may occur twice, such as that of a tied parameter.
        values: ``{key: value or whole tensor}`` of the entries that the caller restores.
        reads: reads that fill the tensors.
        restore: functions to call after the reads.
    """

    def __init__(self, checkpoint: StoredCheckpoint | PickledCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.known = {**dict.fromkeys(checkpoint.tensors), **dict.fromkeys(checkpoint.values)}
        self.tensors: list[tuple[str, Any]] = []
        self.values: dict[str, Any] = {}
        self.reads: Sequence[Any] = ()
        self.restore: list[Callable[[], None]] = []
        self._likes: dict[str, Any] = {}
        self._missing: list[str] = []

    def model_keys(self) -> list[str]:
        """Keys of the model's parameters and buffers in the checkpoint, sorted."""
        return sorted(key for key in self.checkpoint.tensors if key.startswith("model."))

    def fill(self, keys: Sequence[str], tensor: torch.Tensor | JoinedTensor) -> None:
        """Request the first of these keys that the checkpoint has, to fill ``tensor``.

        If the checkpoint lacks all keys, or has another shape or kind of dtype, :meth:`read_values` reports this.
        """
        key = next((item for item in keys if item in self.known), None)
        stored = self.checkpoint.tensors.get(key or "")
        shape, dtype = list(tensor.shape), tensor.dtype
        if key is None:
            self._missing.append(keys[0])
        elif stored is None:
            self._missing.append(f"{key} of shape {shape} (it has another kind of value)")
        elif list(stored.shape) != shape:
            self._missing.append(f"{key} of shape {shape} (it has {list(stored.shape)})")
        elif stored.dtype != dtype and not (stored.dtype.is_floating_point and dtype.is_floating_point):
            self._missing.append(f"{key} of {dtype} (it has {stored.dtype})")
        else:
            self.tensors.append((key, tensor))

    def want(self, keys: Sequence[str], like: Any = None) -> str | None:
        """Request the value, or the whole tensor, of the first of these keys that the checkpoint has.

        Args:
            like: a value of the same kind; None: of any kind.

        Returns:
            The key; None if the checkpoint lacks all keys. :meth:`read_values` then reports this.
        """
        key = next((item for item in keys if item in self.known), None)
        if key is None:
            self._missing.append(keys[0])
        elif key in self.checkpoint.values:
            self.values[key], self._likes[key] = None, like
        elif key not in self.values:
            entry = self.checkpoint.tensors[key]
            self.values[key] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            self.tensors.append((key, self.values[key]))
        return key

    def read_values(self) -> None:
        """Read the requested values, and find what to read of the tensors.

        Raises:
            ArgumentError: the checkpoint lacks an entry, has it with another shape or kind of dtype, or is damaged.
        """
        folder = self.checkpoint.folder
        if self._missing:
            others = f" and {len(self._missing) - 3} more" if len(self._missing) > 3 else ""
            raise ArgumentError(
                f"the checkpoint {folder} has no {', '.join(self._missing[:3])}{others}; it has {len(self.known)} "
                f"entries, such as {', '.join(sorted(self.known)[:3])}"
            )
        for key in self.values:
            if key in self.checkpoint.values:
                self.values[key] = self.checkpoint.read_value(key)
            try:
                self._check(key, self.values[key])
            except ValueError as error:
                raise ArgumentError(f"cannot read {key} in {self.checkpoint.file_of(key)}: {error}") from error
        self.reads = self.checkpoint.find_reads(self.tensors)

    def _check(self, key: str, value: Any) -> None:
        """Raise ValueError if a value is not what is needed. Numbers may be tensors, and tuples lists."""
        like = self._likes.get(key)
        if key == "engine":
            check_counters(value)
        elif key.startswith("rng."):
            check_rng(value)
        elif value is not None and like is not None:
            kinds = ((bool, int, float, np.generic, torch.Tensor), (list, tuple), str, dict)
            if any(isinstance(value, kind) != isinstance(like, kind) for kind in kinds):
                raise ValueError(f"it is {brief(value)}, but a value like {brief(like)} is needed")

    def restore_from(self, keys: Sequence[str], restore: Callable[[Any], None]) -> None:
        """Pass the first of these values that was requested to a function.

        Raises:
            ArgumentError: the function raises an error.
        """
        key = next(item for item in keys if item in self.values)
        try:
            restore(self.values[key])
        except Exception as error:
            raise ArgumentError(
                f"{key} in {self.checkpoint.file_of(key)} cannot be loaded: {type(error).__name__}: {error}"
            ) from error


def _want_optimizer(request: ReadRequest, state: TrainingState) -> None:
    """Request the state and the settings of each parameter in the optimizer."""
    keys_of: dict[str, dict[str, str]] = {}  # {parameter name: {key of its state: key in the checkpoint}}
    prefix = "optimizer.state."
    for stored in request.known:
        if stored.startswith(prefix):
            name, _, key = stored.removeprefix(prefix).rpartition(".")
            keys_of.setdefault(name, {})[key] = stored
    names: dict[int, list[str]] = {}
    optimized = state.optimized_parameters()
    for plain, _ in optimized:
        names.setdefault(id(plain.parameters[0]), []).extend(state.aliases(plain.name))
    done: set[int] = set()
    for plain, group in optimized:
        aliases = names[id(plain.parameters[0])]
        if id(plain.parameters[0]) not in done:
            request.restore += [state.optimizer.state[parameter].clear for parameter in plain.parameters]
            for key, stored in next((keys_of[item] for item in aliases if item in keys_of), {}).items():
                _want_state(
                    request, [state.optimizer.state[parameter] for parameter in plain.parameters], plain, key, stored
                )
        if id(group) not in done:
            for key in group:
                if key != "params":
                    keys = [f"optimizer.param_groups.{alias}.{key}" for alias in aliases]
                    setting = request.want(keys, like=group[key])
                    if setting is not None:
                        request.restore.append(functools.partial(_set_from, group, key, request, setting))
        done |= {id(plain.parameters[0]), id(group)}
    for group in state.optimizer.param_groups:
        if id(group) not in done and group["params"]:  # this rank has no parameters; a scheduler reads the settings
            for key in group:
                settings = (item for item in request.known if item.startswith("optimizer.param_groups."))
                setting = next((item for item in settings if item.endswith(f".{key}")), None)
                if setting is not None:
                    request.want([setting], like=group[key])
                    request.restore.append(functools.partial(_set_from, group, key, request, setting))


def _want_state(
    request: ReadRequest, values: Sequence[dict[str, Any]], plain: PlainParameter, key: str, stored: str
) -> None:
    """Request one entry of a parameter's optimizer state. If it has the parameter's shape, it is sharded alike."""
    entry = request.checkpoint.tensors.get(stored)
    if entry is not None and entry.shape == tuple(plain.join(plain.parameters).shape):
        made = [torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False) for parameter in plain.parameters]
        for value, tensor in zip(values, made, strict=True):
            request.restore.append(functools.partial(_set, value, key, tensor))
        request.fill([stored], plain.join(made))
        return
    request.want([stored])
    for value in values:
        request.restore.append(functools.partial(_set_from, value, key, request, stored))


def _set(values: dict[str, Any], key: str, tensor: torch.Tensor) -> None:
    values[key] = tensor


def _set_from(values: dict[str, Any], key: str, request: ReadRequest, stored: str) -> None:
    value = request.values[stored]
    values[key] = value.clone() if isinstance(value, torch.Tensor) else value
