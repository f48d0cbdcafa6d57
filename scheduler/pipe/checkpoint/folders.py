"""Name, find, complete and delete the folders of checkpoints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from .digests import DIGESTS_FILE

_UNFINISHED = ".unfinished"
_FOLDER = re.compile(r"step-(\d{8,})(\.unfinished)?")


def find_checkpoints(path: str | Path) -> list[tuple[int, Path]]:
    """Steps and folders of the complete checkpoints at ``path``, one for each step, oldest first."""
    found: dict[int, Path] = {}
    # In reverse order, "step-N.unfinished" comes before "step-N", which then replaces it.
    for folder in sorted(Path(path).glob("step-*"), reverse=True):
        match = _FOLDER.fullmatch(folder.name)
        if match and _is_complete(folder):
            found[int(match[1])] = folder
    return sorted(found.items())


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
    last = [(folder / name).exists() for name in (".metadata", DIGESTS_FILE)]
    return all(last) if folder.name.endswith(_UNFINISHED) else any(last)


def _delete(folder: Path) -> None:
    if folder.exists():
        # Delete these files first: a folder that has one of them counts as complete.
        for name in (DIGESTS_FILE, ".metadata"):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder)


def prune(path: Path, keep: int) -> None:
    """Delete all folders older than the newest complete checkpoint, except the newest ``keep`` complete ones."""
    kept = [step for step, _ in find_checkpoints(path)[-keep:]]
    for folder in path.glob("step-*"):
        match = _FOLDER.fullmatch(folder.name)
        if match and kept and int(match[1]) not in kept and int(match[1]) < kept[-1]:
            _delete(folder)
