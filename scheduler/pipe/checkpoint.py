"""Checkpoints by ``torch.distributed.checkpoint``, under the names of the whole model.

A checkpoint of step 100 is the folder ``step-00000100``. Its keys are ``model.NAME``, ``optimizer.state.NAME.KEY`` and
``optimizer.param_groups.NAME.KEY``, as in torch's flattened optimizer state, so ``torch.distributed.checkpoint`` can
load them into the whole model in one process. The keys ``engine``, ``lr_scheduler``, ``rng.RANK`` and ``loader.RANK``
hold pickled state. All ranks need access to the same file system.

A checkpoint is written to ``step-00000100.unfinished``, which is then renamed. If a rank dies while it saves step 100
again, the earlier checkpoint of step 100 is still there.
"""

from __future__ import annotations

import base64
import functools
import pickle
import random
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from reshard.errors import ArgumentError

from ..runtime.compression import StageSums
from .plain_parameters import PlainParameter, divide_state

_UNFINISHED = ".unfinished"
_FOLDER = re.compile(r"step-(\d{8,})(\.unfinished)?")
#: How long ranks wait for one that writes or reads. A rank that dies is detected at once.
CHECKPOINT_TIMEOUT_SECONDS = 3600.0
#: ``exchange(value, error)``: the values of all ranks, by rank; an error of one rank is raised on all.
Exchange = Callable[[Any, BaseException | None], Mapping[int, Any]]


@dataclass(frozen=True)
class TrainingState:
    """What one rank saves to a checkpoint, or loads from it.

    Attributes:
        rank: of this process. is_first: whether it decides for all. modules: ``{stage: module}`` of this rank.
        ties: for each parameter that several stages share, its name in each: ``{stage: name}``.
        optimizer, lr_scheduler, loader: each is None if it is neither saved nor loaded.
        counters: values of the engine: ``"step"``, ``"loss_scale"`` and ``"world_size"``.
        sums: coded sums of gradients, whose errors are saved and loaded.
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

    def model(self, for_save: bool = False) -> list[tuple[str, torch.Tensor]]:
        """Parameters and persistent buffers, with their names in the whole model."""
        found: list[tuple[str, torch.Tensor]] = []
        for stage, module in self.modules.items():
            parameters, buffers = divide_state(module)
            found += [
                (each.name, each.join(each.parameters))
                for each in parameters
                if not for_save or self.saves(stage, each.name)
            ]
            found += buffers.items()
        return found

    def optimized_parameters(self, for_save: bool = False) -> list[tuple[PlainParameter, dict[str, Any]]]:
        """``(parameter, parameter group)`` of each parameter in the optimizer; a tied one once per name."""
        groups = {id(each): group for group in self.optimizer.param_groups for each in group["params"]}
        every = [(stage, each) for stage, module in self.modules.items() for each in divide_state(module)[0]]
        return [
            (each, groups[id(each.parameters[0])])
            for stage, each in every
            if id(each.parameters[0]) in groups and (not for_save or self.saves(stage, each.name))
        ]

    def saves(self, stage: int, name: str) -> bool:
        """Whether a stage saves its parameter of this name. If stages share it under one name, the first does."""
        return not any(tie.get(stage) == name and name in (tie[s] for s in tie if s < stage) for tie in self.ties)

    def aliases(self, name: str) -> list[str]:
        """The name, then the other names of the same parameter."""
        return [name, *(each for tie in self.ties if name in tie.values() for each in tie.values() if each != name)]


def find_checkpoints(path: str | Path) -> list[tuple[int, Path]]:
    """Steps and folders of the complete checkpoints at ``path``, one for each step, oldest first."""
    found: dict[int, Path] = {}
    for folder in sorted(Path(path).glob("step-*"), reverse=True):  # a renamed folder after an unfinished one
        match = _FOLDER.fullmatch(folder.name)
        if match and (folder / ".metadata").exists():  # torch writes this file last
            found[int(match[1])] = folder
    return sorted(found.items())


def folder_of(path: str | Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return Path(path) / f"step-{step:08d}"


def _begin(folder: Path) -> None:
    """Make an empty folder to write to."""
    unfinished = folder.with_name(folder.name + _UNFINISHED)
    if (unfinished / ".metadata").exists() and not (folder / ".metadata").exists():
        _finish(folder)  # it is complete, and may be the only checkpoint
    _delete(unfinished)
    unfinished.mkdir(parents=True)


def _finish(folder: Path) -> None:
    """Give a complete checkpoint its name, in place of an earlier checkpoint of its step."""
    _delete(folder)
    folder.with_name(folder.name + _UNFINISHED).rename(folder)


def _delete(folder: Path) -> None:
    if folder.exists():
        # first, so that a folder without some files never counts as complete
        (folder / ".metadata").unlink(missing_ok=True)
        shutil.rmtree(folder)


def _prune(path: Path, keep: int) -> None:
    """Delete all folders older than the newest complete checkpoint, except the newest ``keep`` complete ones."""
    kept = [step for step, _ in find_checkpoints(path)[-keep:]]
    for folder in path.glob("step-*"):
        match = _FOLDER.fullmatch(folder.name)
        if match and kept and int(match[1]) not in kept and int(match[1]) < kept[-1]:
            _delete(folder)


def save(folder: Path, state: TrainingState, exchange: Exchange, keep: int) -> None:
    """Write a checkpoint, and delete old ones. All ranks call this.

    The steps are those of ``torch.distributed.checkpoint.save``. Ranks communicate by ``exchange``, which ends on all
    of them if one fails or dies.
    """
    writer = dcp.FileSystemWriter(folder.with_name(folder.name + _UNFINISHED))
    planner = dcp.DefaultSavePlanner()

    def share(step: Callable[[], Any]) -> dict[int, Any]:
        """Run a step on this rank, and return the results by rank. An error on one rank is raised on all."""
        value: str | None = None
        failure: Exception | None = None
        try:
            value = base64.b85encode(zlib.compress(pickle.dumps(step()))).decode()
        except OSError as error:
            failure = ArgumentError(f"cannot write the checkpoint {folder}: {error}")
        except Exception as error:  # such as that a loader's state cannot be pickled
            failure = error
        gathered = exchange(value, failure)
        return {rank: pickle.loads(zlib.decompress(base64.b85decode(each))) for rank, each in sorted(gathered.items())}

    def plan() -> Any:
        planner.set_up_planner(_saved_entries(state), writer.storage_meta(), state.is_first)
        writer.set_up_storage_writer(state.is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def write() -> Any:
        own = global_plans[[*plans].index(state.rank)]
        writing = writer.write_data(planner.finish_plan(own), planner)
        writing.wait()
        return writing.value()

    def finish() -> None:
        if state.is_first:
            writer.finish(metadata, [*results.values()])
            _finish(folder)
            _prune(folder.parent, keep)

    share(lambda: _begin(folder) if state.is_first else None)
    plans = share(plan)
    global_plans, metadata = planner.create_global_plan([*plans.values()])
    global_plans = writer.prepare_global_plan(global_plans)
    results = share(write)
    share(finish)


def _saved_entries(state: TrainingState) -> dict[str, Any]:
    """What this rank saves, by key."""
    saved: dict[str, Any] = {"model": dict(state.model(for_save=True)), "engine": pickle.dumps(state.counters)}
    saved[f"rng.{state.rank}"] = pickle.dumps(_rng_state())
    saved |= {f"feedback.{state.rank}.{name}": error for name, error in state.sums.state_dict()["errors"].items()}
    if state.optimizer is not None:
        saved["optimizer"] = _optimizer_state(state)
    if state.lr_scheduler is not None:
        saved["lr_scheduler"] = pickle.dumps(state.lr_scheduler.state_dict())
    if state.loader is not None:
        saved[f"loader.{state.rank}"] = pickle.dumps(state.loader.state_dict())
    return saved


def _optimizer_state(state: TrainingState) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for plain, group in state.optimized_parameters(for_save=True):
        values = [state.optimizer.state.get(each, {}) for each in plain.parameters]
        for key, value in values[0].items():
            has_shape = isinstance(value, torch.Tensor) and value.shape == plain.parameters[0].shape
            flat[f"state.{plain.name}.{key}"] = plain.join([each[key] for each in values]) if has_shape else value
        for key, value in group.items():
            if key != "params":
                flat[f"param_groups.{plain.name}.{key}"] = value
    return flat


def find_entries(folder: Path, state: TrainingState) -> Request:
    """Find what this rank reads from the checkpoint.

    Raises:
        ArgumentError: the checkpoint lacks an entry that ``state`` needs, or has it with another shape.
    """
    known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    request = Request(known)
    for name, tensor in state.model():
        request.want([f"model.{each}" for each in state.aliases(name)], tensor)
    if state.optimizer is not None:
        _want_optimizer(request, state)
    for keys in (["engine"], [f"rng.{state.rank}", "rng.0"]):  # absent if another program wrote the checkpoint
        if any(key in known for key in keys):
            request.want(keys)
    for key in (each for each in known if each.startswith(f"feedback.{state.rank}.")):
        request.want([key], torch.empty(known[key].size))
    if state.lr_scheduler is not None:
        request.want(["lr_scheduler"])
    if state.loader is not None:
        request.want([f"loader.{state.rank}", "loader.0"])
    request.check(folder)
    return request


def load(folder: Path, request: Request, state: TrainingState) -> dict[str, Any]:
    """Read this rank's part into its modules, optimizer, scheduler and loader. It does not communicate.

    Returns:
        The counters of the engine that saved the checkpoint; empty if another program saved it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        for wanted in (request.wanted, *request.further):
            dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
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
        _restore_rng(pickle.loads(request.first(f"rng.{state.rank}", "rng.0")))
        prefix = f"feedback.{state.rank}."
        errors = {key.removeprefix(prefix): each for key, each in request.wanted.items() if key.startswith(prefix)}
    state.sums.load_state_dict({"steps": counters.get("coded_steps", 0), "errors": errors})
    return counters


class Request:
    """What one rank reads from a checkpoint.

    Attributes:
        known: ``{key: metadata}`` of all entries of the checkpoint.
        wanted: before loading, ``{key: tensor to fill, or None}``; after loading, ``{key: value}``.
        further: more tensors to fill, under keys that ``wanted`` has too.
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
            The key; None if the checkpoint has none of the keys or another shape, which :meth:`check` then reports.
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
            for key, stored in next((keys_of[each] for each in aliases if each in keys_of), {}).items():
                _want_state(request, [state.optimizer.state[each] for each in plain.parameters], plain, key, stored)
        if id(group) not in done:
            for key in group:
                if key != "params":
                    setting = request.want([f"optimizer.param_groups.{alias}.{key}" for alias in aliases])
                    if setting is not None:
                        request.restore.append(functools.partial(_set_from, group, key, request, setting))
        done |= {id(plain.parameters[0]), id(group)}


def _want_state(
    request: Request, values: Sequence[dict[str, Any]], plain: PlainParameter, key: str, stored: str
) -> None:
    """Request one entry of a parameter's optimizer state, sharded as the parameter is if it has the same shape."""
    metadata = request.known[stored]
    if not isinstance(metadata, TensorStorageMetadata):
        request.want([stored])
        for each in values:
            request.restore.append(functools.partial(_set_from, each, key, request, stored))
    elif tuple(metadata.size) == tuple(plain.join(plain.parameters).shape):
        dtype = metadata.properties.dtype
        made = [torch.zeros_like(each, dtype=dtype, requires_grad=False) for each in plain.parameters]
        for each, tensor in zip(values, made, strict=True):
            each[key] = tensor
        request.want([stored], plain.join(made))
    else:
        values[0][key] = torch.zeros(metadata.size, dtype=metadata.properties.dtype)
        request.want([stored], values[0][key])
        for each in values[1:]:
            request.restore.append(functools.partial(_clone_from, each, key, values[0]))


def _clone_from(values: dict[str, Any], key: str, source: Mapping[str, Any]) -> None:
    values[key] = source[key].clone()


def _set_from(values: dict[str, Any], key: str, request: Request, stored: str) -> None:
    values[key] = request.wanted[stored]


def _rng_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
