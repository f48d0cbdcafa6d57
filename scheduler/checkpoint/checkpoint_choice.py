"""Choose the checkpoint to load, the same on all ranks, and check its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard.errors import ArgumentError, DisagreementError
from reshard.formatting import brief

from .file_digests import DIGESTS_FILE, read_digests
from .folders import PICKLED_INDEX_FILE, find_checkpoints, read_path
from .index import INDEX_FILE
from .pickled import PickledCheckpoint
from .stored import StoredCheckpoint
from .training_state import GatherFromRanks


def choose_checkpoint(
    path: str | Path, step: int | None, trust_pickle: bool, rank: int, is_first: bool, exchange: GatherFromRanks
) -> StoredCheckpoint | PickledCheckpoint | None:
    """The checkpoint of ``step``, or the newest one; None if ``path`` has no checkpoint.

    All ranks read the index. Each other file is read once, by one of the ranks, and compared with its digests. All
    ranks call this.

    Args:
        trust_pickle: whether a checkpoint may be unpickled.

    Raises:
        ArgumentError: there are checkpoints but not of this step, a file is missing or damaged, or a checkpoint that is
            not trusted needs pickle.
        DisagreementError: ranks pass different arguments.
    """
    value: Any = None
    failure: Exception | None = None
    try:
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            raise ArgumentError(f"step is {brief(step)}; it must be an integer, or None for the newest checkpoint")
        if not isinstance(trust_pickle, bool):
            raise ArgumentError(f"trust_pickle is {brief(trust_pickle)}; it must be True or False")
        known = read_path(path)
        listed = [[item, str(folder)] for item, folder in find_checkpoints(known)] if is_first else []
        value = [step, trust_pickle, listed]
    except (ArgumentError, OSError) as error:
        failure = error
    gathered = sorted(exchange(value, failure).items())
    first, (step, trust_pickle, _) = gathered[0]
    for item, (other, trusts, _) in gathered:
        if other != step:
            raise DisagreementError(f"ranks {first} and {item} load steps {step} and {other}; all must load the same")
        if trusts != trust_pickle:
            raise DisagreementError(
                f"ranks {first} and {item} pass trust_pickle={trust_pickle} and {trusts}; all must pass the same"
            )
    folders = {number: Path(folder) for _, (_, _, listed) in gathered for number, folder in listed}
    chosen = max(folders, default=None) if step is None else step
    if chosen is None or not folders:
        return None
    if chosen not in folders:
        raise ArgumentError(f"{path} has no complete checkpoint of step {brief(step)}; it has steps {[*folders]}")
    ranks = [item for item, _ in gathered]
    damage: Exception | None = None
    checkpoint = None
    try:
        checkpoint = _open(folders[chosen], trust_pickle)
        checkpoint.check_files(ranks.index(rank), len(ranks))
    except _PickleError as error:
        damage = ArgumentError(str(error))
    except ArgumentError as error:
        earlier = [item for item in folders if item < chosen]
        offer = f"to load the one before it, pass step={earlier[-1]}" if earlier else "there is none before it"
        damage = ArgumentError(f"{error}; {offer}")
    exchange(None, damage)
    return checkpoint


def find_model_shapes(path: str | Path) -> tuple[Path, dict[str, tuple[int, ...]]] | None:
    """The folder of the newest checkpoint, and the shapes of the model's tensors by name, read by this process alone.

    None if there is no checkpoint, or its index is pickled or damaged: :func:`choose_checkpoint` says so on all ranks.
    """
    try:
        folders = find_checkpoints(read_path(path))
        if not folders:
            return None
        stored = StoredCheckpoint(folders[-1][1], read_digests(folders[-1][1]))
    except (ArgumentError, OSError):
        return None
    prefix = "model."
    shapes = {key.removeprefix(prefix): item.shape for key, item in stored.tensors.items() if key.startswith(prefix)}
    return stored.folder, shapes


class _PickleError(Exception):
    """A checkpoint needs pickle."""


def _open(folder: Path, trust_pickle: bool) -> StoredCheckpoint | PickledCheckpoint:
    """Read the index of a checkpoint, in either format, after its digest.

    Raises:
        ArgumentError: it is damaged. _PickleError: it needs pickle, which ``trust_pickle`` does not allow.
    """
    digests = read_digests(folder)
    names = digests or [item for item in (INDEX_FILE, PICKLED_INDEX_FILE) if (folder / item).exists()]
    if INDEX_FILE not in names and PICKLED_INDEX_FILE in names:
        if trust_pickle:
            return PickledCheckpoint(folder, digests)
        raise _PickleError(
            f"{folder} is a checkpoint in the pickled format of torch.distributed.checkpoint, which earlier versions "
            "also wrote; reading it can run any code. If you trust its writer, pass trust_pickle=True "
            "(reshard train: --trust-pickle)"
        )
    if not digests:
        raise ArgumentError(f"{folder / DIGESTS_FILE}, which has the digests of the other files, is missing")
    return StoredCheckpoint(folder, digests)
