"""Write a checkpoint, all ranks together."""

from __future__ import annotations

import base64
import pickle
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from reshard.errors import ArgumentError, DisagreementError

from .digests import digest_of, write_digests
from .folders import begin, finish, folder_of, prune, unfinished_folder
from .state import Exchange, TrainingState, check_objects, rng_state

#: Time limit for waiting for a rank that writes or reads. Ranks detect at once that another one died.
CHECKPOINT_TIMEOUT_SECONDS = 3600.0
#: Time limit for the other ranks until a shared file system shows them the folder that the first rank has made.
FOLDER_TIMEOUT_SECONDS = 5.0


def check_saved(state: TrainingState, keep: Any) -> None:
    """Raise ArgumentError unless this rank can save these objects, and the step and ``keep`` are valid."""
    step = state.counters["step"]
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ArgumentError(f"step is {step!r}; it must be the number of steps taken, an integer that is 0 or more")
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ArgumentError(f"keep is {keep!r}; it must be a positive integer")
    check_objects(state, "state_dict")


def save(path: Path, state: TrainingState, exchange: Exchange, keep: int) -> None:
    """Write a checkpoint in a folder at ``path``, and delete old ones. All ranks call this.

    The function runs the steps of ``torch.distributed.checkpoint.save``. But ranks communicate by ``exchange``, which
    ends on all ranks if one fails or dies.
    """
    _check_alike(exchange([state.counters["step"], _has_optimizer(state)], None))
    folder = folder_of(path, state.counters["step"])
    writer = dcp.FileSystemWriter(unfinished_folder(folder))
    planner = dcp.DefaultSavePlanner()

    def share(step: Callable[[], Any]) -> dict[int, Any]:
        """Run a step on this rank, and return the results by rank. An error on one rank is raised on all."""
        value: str | None = None
        failure: Exception | None = None
        try:
            value = base64.b85encode(zlib.compress(pickle.dumps(step()))).decode()
        except OSError as error:
            failure = ArgumentError(f"cannot write the checkpoint {folder}: {error}")
        except Exception as error:  # for example, the state of a loader cannot be pickled
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
        written = writing.value()
        files = {each.storage_data.relative_path for each in written}
        return written, {name: digest_of(unfinished_folder(folder) / name) for name in files}

    def complete() -> None:
        if state.is_first:
            writer.finish(metadata, [written for written, _ in results.values()])
            digests = {name: digest for _, each in results.values() for name, digest in each.items()}
            unfinished = unfinished_folder(folder)
            write_digests(unfinished, {**digests, ".metadata": digest_of(unfinished / ".metadata")})
            finish(folder)
            prune(folder.parent, keep)

    share(lambda: begin(folder) if state.is_first else None)
    share(lambda: _check_shared(unfinished_folder(folder)))
    plans = share(plan)
    global_plans, metadata = planner.create_global_plan([*plans.values()])
    global_plans = writer.prepare_global_plan(global_plans)
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


def _saved_entries(state: TrainingState) -> dict[str, Any]:
    """The entries that this rank saves, by key."""
    saved: dict[str, Any] = {"model": dict(state.model(for_save=True)), "engine": pickle.dumps(state.counters)}
    saved[f"rng.{state.rank}"] = pickle.dumps(rng_state())
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
