"""Write a checkpoint, all ranks together."""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from reshard.errors import ArgumentError, DisagreementError
from reshard.formatting import brief

from .file_digests import digest_parts, write_digests, write_synced
from .folders import begin, finish, folder_of, prune, read_path, unfinished_folder
from .index import INDEX_FILE
from .training_state import GatherFromRanks, TrainingState, check_objects, rng_state
from .writing import Entries, plan_writes, write_entries

#: Time limit for waiting for a rank that writes or reads. Ranks detect at once that another one died.
CHECKPOINT_TIMEOUT_SECONDS = 3600.0
#: Time limit for a shared file system to show the folder of the first rank to the other ranks.
FOLDER_TIMEOUT_SECONDS = 5.0


def check_saved(path: Any, state: TrainingState, keep: Any) -> Path:
    """The path of a checkpoint.

    Raises:
        ArgumentError: ``path`` is not a path, this rank cannot save these objects, or another argument is wrong.
    """
    step = state.counters["step"]
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**62:
        raise ArgumentError(
            f"step is {brief(step)}; it must be the number of steps taken, an integer from 0 to 2**62 - 1"
        )
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ArgumentError(f"keep is {brief(keep)}; it must be a positive integer")
    check_objects(state, "state_dict")
    return read_path(path)


def save(path: Path, state: TrainingState, exchange: GatherFromRanks, keep: int) -> None:
    """Write a checkpoint in a folder at ``path``, and delete old ones. All ranks call this.

    Each rank writes its own shards. If several ranks have a replica of a shard, the least loaded of them writes it. If
    several have a value, the first of them writes it. The first rank also writes the index and the digests.

    Raises:
        ArgumentError: a value cannot be saved, before any file is written; or a file cannot be written.
        DisagreementError: ranks save different steps, or different shapes or dtypes of a tensor.
    """
    _check_alike(exchange([state.counters["step"], _has_optimizer(state)], None))
    folder = folder_of(path, state.counters["step"])
    unfinished = unfinished_folder(folder)

    def share(step: Callable[[], Any]) -> dict[int, Any]:
        """Run a step on this rank, and return the results by rank. An error on one rank is raised on all."""
        value: str | None = None
        failure: Exception | None = None
        try:
            value = base64.b85encode(zlib.compress(json.dumps(step()).encode())).decode()
        except OSError as error:
            failure = ArgumentError(f"cannot write the checkpoint {folder}: {error}")
        except Exception as error:  # for example, of the loader
            failure = error
        gathered = exchange(value, failure)
        return {rank: json.loads(zlib.decompress(base64.b85decode(item))) for rank, item in sorted(gathered.items())}

    entries = Entries()

    def collect() -> Any:
        _collect(state, entries)
        return entries.outline()

    def write() -> Any:
        return write_entries(unfinished, state.rank, entries, plan.pieces[state.rank], plan.values[state.rank])

    def complete() -> None:
        if state.is_first:
            index = plan.make_index({rank: shards for rank, (_, shards) in results.items()})
            write_synced(unfinished / INDEX_FILE, index.to_json())
            digests = {name: digest for files, _ in results.values() for name, digest in files.items()}
            write_digests(unfinished, {**digests, INDEX_FILE: digest_parts(unfinished / INDEX_FILE)[0]})
            finish(folder)
            prune(folder.parent, keep)

    plan = plan_writes(share(collect))
    share(lambda: begin(folder) if state.is_first else None)
    share(lambda: _check_shared(unfinished))
    results = share(write)
    share(complete)


def _has_optimizer(state: TrainingState) -> bool | None:
    """Whether this rank passes an optimizer; None if it has no parameters, since torch then makes none."""
    has_parameters = any(True for module in state.modules.values() for _ in module.parameters())
    return state.optimizer is not None if has_parameters else None


def _check_alike(values: Mapping[int, Sequence[Any]]) -> None:
    """Raise DisagreementError unless all ranks save the same step, and either all or none save an optimizer."""
    (first, (step, _)), *others = sorted(values.items())
    for rank, (other, _) in others:
        if other != step:
            raise DisagreementError(f"ranks {first} and {rank} save steps {step} and {other}; all must save the same")
    passing = [rank for rank, (_, has_optimizer) in sorted(values.items()) if has_optimizer]
    lacking = [rank for rank, (_, has_optimizer) in sorted(values.items()) if has_optimizer is False]
    if passing and lacking:
        raise DisagreementError(
            f"rank {passing[0]} saves an optimizer and rank {lacking[0]} none, though it has parameters; all must pass "
            "theirs"
        )


def _check_shared(folder: Path) -> None:
    """Raise ArgumentError unless this rank sees the folder that the first rank has made."""
    deadline = time.monotonic() + FOLDER_TIMEOUT_SECONDS
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise ArgumentError(
                f"{folder}, which the first rank has made, is not there on this rank; all ranks must save to the same "
                "folder, on a file system that they share"
            )
        time.sleep(0.05)


def _collect(state: TrainingState, entries: Entries) -> None:
    """Add what this rank saves."""
    for name, tensor in state.model(for_save=True):
        entries.add(f"model.{name}", tensor)
    entries.add_value("engine", state.counters)
    entries.add_value(state.rng_keys[0], rng_state())
    for name, error in state.sums.state_dict()["errors"].items():
        entries.add(f"feedback.{state.rank}.{name}", error)
    if state.optimizer is not None:
        _collect_optimizer(state, entries)
    if state.lr_scheduler is not None:
        entries.add_value("lr_scheduler", state.lr_scheduler.state_dict())
    if state.loader is not None:
        entries.add_value(state.loader_keys[0], state.loader.state_dict())


def _collect_optimizer(state: TrainingState, entries: Entries) -> None:
    for plain, group in state.optimized_parameters(for_save=True):
        values = [state.optimizer.state.get(parameter, {}) for parameter in plain.parameters]
        for key, value in values[0].items():
            name = _join(f"optimizer.state.{plain.name}", key)
            if not isinstance(value, torch.Tensor):
                entries.add_value(name, value)
            else:
                has_shape = value.shape == plain.parameters[0].shape
                entries.add(name, plain.join([item[key] for item in values]) if has_shape else value)
        for key, value in group.items():
            if key != "params":
                entries.add_value(_join(f"optimizer.param_groups.{plain.name}", key), value)


def _join(prefix: str, key: Any) -> str:
    if type(key) is not str or "." in key:
        raise ArgumentError(f"{prefix} has the key {brief(key)}; a checkpoint needs strings without dots")
    return f"{prefix}.{key}"
