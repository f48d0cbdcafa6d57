"""Name, find, complete and delete the folders of checkpoints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from reshard.errors import ArgumentError
from reshard.formatting import brief

from .file_digests import DIGESTS_FILE
from .index import INDEX_FILE

#: The index of a checkpoint in the pickled format of ``torch.distributed.checkpoint``.
PICKLED_INDEX_FILE = ".metadata"
_UNFINISHED, _DELETED = ".unfinished", ".deleted"
_FOLDER = re.compile(r"step-(\d{8,})(\.unfinished)?")


def read_path(path: Any) -> Path:
    """A path. Raises ArgumentError if the argument is none."""
    try:
        return Path(path)
    except Exception:
        raise ArgumentError(f"the path of checkpoints is {brief(path)}; it must be a string or a Path") from None


def find_checkpoints(path: str | Path) -> list[tuple[int, Path]]:
    """Steps and folders of the complete checkpoints at ``path``, one for each step, oldest first."""
    folders: dict[int, Path] = {}
    # In reverse order, "step-N.unfinished" comes before "step-N", which then replaces it.
    for folder in sorted(Path(path).glob("step-*"), reverse=True):
        match = _FOLDER.fullmatch(folder.name)
        if match and _is_complete(folder):
            folders[int(match[1])] = folder
    return sorted(folders.items())


def folder_of(path: str | Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return Path(path) / f"step-{step:08d}"


def unfinished_folder(folder: Path) -> Path:
    """The folder in which a checkpoint is written before it is renamed to ``folder``."""
    return folder.with_name(folder.name + _UNFINISHED)


def begin(folder: Path) -> None:
    """Make an empty folder for a checkpoint that will be renamed to ``folder``."""
    unfinished = unfinished_folder(folder)
    if _is_complete(unfinished) and not _is_complete(folder):
        finish(folder)  # it may be the only checkpoint
    _delete(unfinished)
    unfinished.mkdir(parents=True)


def finish(folder: Path) -> None:
    """Rename a complete checkpoint to ``folder``. It replaces an earlier checkpoint of the same step."""
    _delete(folder)
    unfinished_folder(folder).rename(folder)


def _is_complete(folder: Path) -> bool:
    """Whether a checkpoint was completed in this folder. If a file is missing since, it is damaged but complete."""
    has_index, has_digests = (
        any((folder / name).exists() for name in names) for names in ((INDEX_FILE, PICKLED_INDEX_FILE), (DIGESTS_FILE,))
    )
    if folder.name.endswith(_UNFINISHED):
        return has_index and has_digests  # which are written last
    return has_index or has_digests or any(folder.glob("rank-*"))


def _delete(folder: Path) -> None:
    """Delete a folder. If this process dies meanwhile, the rest of the folder counts as no checkpoint."""
    deleted = folder.with_name(folder.name + _DELETED)
    _remove(deleted)
    if folder.exists():
        folder.rename(deleted)
        _remove(deleted)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def prune(path: Path, keep: int) -> None:
    """Delete all folders older than the newest complete checkpoint, except the newest ``keep`` complete ones."""
    kept = [step for step, _ in find_checkpoints(path)[-keep:]]
    for folder in path.glob("step-*"):
        match = _FOLDER.fullmatch(folder.name)
        if match and kept and int(match[1]) not in kept and int(match[1]) < kept[-1]:
            _delete(folder)
    for folder in path.glob(f"step-*{_DELETED}"):
        if _FOLDER.fullmatch(folder.name.removesuffix(_DELETED)):
            _remove(folder)
