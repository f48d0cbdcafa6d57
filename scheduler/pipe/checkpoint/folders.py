"""Name, find, complete and delete the folders of checkpoints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_UNFINISHED = ".unfinished"
_FOLDER = re.compile(r"step-(\d{8,})(\.unfinished)?")


def find_checkpoints(path: str | Path) -> list[tuple[int, Path]]:
    """Steps and folders of the complete checkpoints at ``path``, one for each step, oldest first."""
    found: dict[int, Path] = {}
    # In reverse order, "step-N.unfinished" comes before "step-N", which then replaces it.
    for folder in sorted(Path(path).glob("step-*"), reverse=True):
        match = _FOLDER.fullmatch(folder.name)
        if match and (folder / ".metadata").exists():  # torch writes this file last
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
    if (unfinished / ".metadata").exists() and not (folder / ".metadata").exists():
        finish(folder)  # it is complete, and may be the only checkpoint
    _delete(unfinished)
    unfinished.mkdir(parents=True)


def finish(folder: Path) -> None:
    """Rename a complete checkpoint to ``folder``. It replaces an earlier checkpoint of the same step."""
    _delete(folder)
    unfinished_folder(folder).rename(folder)


def _delete(folder: Path) -> None:
    if folder.exists():
        # Delete this file first: a folder that has it counts as complete.
        (folder / ".metadata").unlink(missing_ok=True)
        shutil.rmtree(folder)


def prune(path: Path, keep: int) -> None:
    """Delete all folders older than the newest complete checkpoint, except the newest ``keep`` complete ones."""
    kept = [step for step, _ in find_checkpoints(path)[-keep:]]
    for folder in path.glob("step-*"):
        match = _FOLDER.fullmatch(folder.name)
        if match and kept and int(match[1]) not in kept and int(match[1]) < kept[-1]:
            _delete(folder)
