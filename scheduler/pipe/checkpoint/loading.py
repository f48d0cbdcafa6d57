"""Find the entries of a checkpoint that a rank needs, and read them."""

from __future__ import annotations

import functools
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from reshard.errors import ArgumentError

from .plain_parameters import PlainParameter
from .state import TrainingState, restore_rng


def find_entries(folder: Path, state: TrainingState) -> Request:
    """Find the entries that this rank reads from the checkpoint.

    Raises:
        ArgumentError: the checkpoint lacks an entry that ``state`` needs, has it with another shape, or is damaged.
    """
    try:
        known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # pickle raises any kind
        raise ArgumentError(f"cannot read {folder / '.metadata'}: {type(error).__name__}: {error}") from error
    request = Request(known)
    for name, tensor in state.model():
        request.want([f"model.{each}" for each in state.aliases(name)], tensor)
    if state.optimizer is not None:
        _want_optimizer(request, state)
    for keys in (["engine"], [f"rng.{state.rank}", "rng.0"]):  # absent if another program wrote the checkpoint
        if any(key in known for key in keys):
            request.want(keys)
    for key in (each for each in known if each.startswith(f"feedback.{state.rank}.")):
        request.want([key], torch.empty(known[key].size, dtype=torch.float32, device="cpu"))
    if state.lr_scheduler is not None:
        request.want(["lr_scheduler"])
    if state.loader is not None:
        request.want([f"loader.{state.rank}", "loader.0"])
    request.check(folder)
    return request


def load(folder: Path, request: Request, state: TrainingState) -> dict[str, Any]:
    """Read this rank's entries into its modules, optimizer, scheduler and loader. No rank communicates.

    Returns:
        The counters of the engine that saved the checkpoint; empty if another program saved it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        for wanted in (request.wanted, *request.further):
            try:
                dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
            except (CheckpointException, Exception) as error:  # the first is no Exception
                raise ArgumentError(f"cannot read the checkpoint {folder}: {error}") from error
    for restore in request.restore:
        restore()
    if state.lr_scheduler is not None:
        state.lr_scheduler.load_state_dict(pickle.loads(request.wanted["lr_scheduler"]))
    if state.loader is not None:
        state.loader.load_state_dict(pickle.loads(request.first(f"loader.{state.rank}", "loader.0")))
    if "engine" not in request.wanted:
        return {}
    counters: dict[str, Any] = pickle.loads(request.wanted["engine"])
    errors: dict[str, torch.Tensor] = {}
    if counters["world_size"] == state.counters["world_size"]:
        restore_rng(pickle.loads(request.first(f"rng.{state.rank}", "rng.0")))
        prefix = f"feedback.{state.rank}."
        errors = {key.removeprefix(prefix): each for key, each in request.wanted.items() if key.startswith(prefix)}
    state.sums.load_state_dict({"steps": counters.get("coded_steps", 0), "errors": errors})
    return counters


class Request:
    """The entries that one rank reads from a checkpoint.

    Attributes:
        known: ``{key: metadata}`` of all entries of the checkpoint.
        wanted: before loading, ``{key: tensor to fill, or None}``; after loading, ``{key: value}``.
        further: second and further tensors to fill from a key of ``wanted``, such as tied parameters.
        restore: functions to call after loading.
    """

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known = known
        self.wanted: dict[str, Any] = {}
        self.further: list[dict[str, Any]] = []
        self.restore: list[Callable[[], None]] = []
        self._missing: list[str] = []

    def want(self, keys: Sequence[str], tensor: torch.Tensor | None = None) -> str | None:
        """Request the first of these keys that the checkpoint has, to fill ``tensor``.

        Returns:
            The key; None if the checkpoint lacks all keys, or has another shape. :meth:`check` then reports this.
        """
        key = next((each for each in keys if each in self.known), None)
        if key is None:
            self._missing.append(keys[0])
            return None
        if tensor is not None:
            stored = self.known[key]
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != tuple(tensor.shape):
                found = list(stored.size) if isinstance(stored, TensorStorageMetadata) else "another kind of value"
                self._missing.append(f"{key} of shape {list(tensor.shape)} (it has {found})")
                return None
        if key in self.wanted and tensor is not None:  # tied parameters, of which the checkpoint has one
            if self.wanted[key] is not tensor:
                if all(key in each for each in self.further):
                    self.further.append({})
                next(each for each in self.further if key not in each)[key] = tensor
            return key
        stored = self.known[key]
        if tensor is None and isinstance(stored, TensorStorageMetadata):  # such as a learning rate
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        self.wanted[key] = tensor
        return key

    def first(self, *keys: str) -> Any:
        """The value of the first of these keys that was requested."""
        return next(self.wanted[key] for key in keys if key in self.wanted)

    def check(self, folder: Path) -> None:
        """Raise ArgumentError if the checkpoint lacks a requested entry, or has it with another shape."""
        if self._missing:
            others = f" and {len(self._missing) - 3} more" if len(self._missing) > 3 else ""
            raise ArgumentError(
                f"the checkpoint {folder} has no {', '.join(self._missing[:3])}{others}; it has {len(self.known)} "
                f"entries, such as {', '.join(sorted(self.known)[:3])}"
            )


def _want_optimizer(request: Request, state: TrainingState) -> None:
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
            request.restore += [state.optimizer.state[each].clear for each in plain.parameters]
            for key, stored in next((keys_of[each] for each in aliases if each in keys_of), {}).items():
                _want_state(request, [state.optimizer.state[each] for each in plain.parameters], plain, key, stored)
        if id(group) not in done:
            for key in group:
                if key != "params":
                    setting = request.want([f"optimizer.param_groups.{alias}.{key}" for alias in aliases])
                    if setting is not None:
                        request.restore.append(functools.partial(_set_from, group, key, request, setting))
        done |= {id(plain.parameters[0]), id(group)}
    for group in state.optimizer.param_groups:
        if id(group) not in done and group["params"]:  # this rank has no parameters; a scheduler reads the settings
            for key in group:
                settings = (each for each in request.known if each.startswith("optimizer.param_groups."))
                setting = next((each for each in settings if each.endswith(f".{key}")), None)
                if setting is not None:
                    request.want([setting])
                    request.restore.append(functools.partial(_set_from, group, key, request, setting))


def _want_state(
    request: Request, values: Sequence[dict[str, Any]], plain: PlainParameter, key: str, stored: str
) -> None:
    """Request one entry of a parameter's optimizer state. If it has the parameter's shape, it is sharded alike."""
    metadata = request.known[stored]
    if not isinstance(metadata, TensorStorageMetadata):
        request.want([stored])
        for each in values:
            request.restore.append(functools.partial(_set_from, each, key, request, stored))
    elif tuple(metadata.size) == tuple(plain.join(plain.parameters).shape):
        dtype = metadata.properties.dtype
        made = [torch.zeros_like(each, dtype=dtype, requires_grad=False) for each in plain.parameters]
        for each, tensor in zip(values, made, strict=True):
            request.restore.append(functools.partial(_set, each, key, tensor))
        request.want([stored], plain.join(made))
    else:
        scalar = torch.zeros(metadata.size, dtype=metadata.properties.dtype)
        request.want([stored], scalar)
        for each in values:
            request.restore.append(functools.partial(_set_copy, each, key, scalar))


def _set(values: dict[str, Any], key: str, tensor: torch.Tensor) -> None:
    values[key] = tensor


def _set_copy(values: dict[str, Any], key: str, tensor: torch.Tensor) -> None:
    values[key] = tensor.clone()


def _set_from(values: dict[str, Any], key: str, request: Request, stored: str) -> None:
    values[key] = request.wanted[stored]
