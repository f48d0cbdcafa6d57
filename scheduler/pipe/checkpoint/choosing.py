"""Choose the checkpoint to load, the same on all ranks, and check its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard.errors import ArgumentError, DisagreementError

from .digests import check_files
from .folders import find_checkpoints
from .state import Exchange


def choose_checkpoint(path: str | Path, step: int | None, rank: int, is_first: bool, exchange: Exchange) -> Path | None:
    """The folder of the checkpoint of ``step``, or of the newest one; None if ``path`` has no checkpoint.

    Each file is read once, by one of the ranks, and compared with its digest. All ranks call this.

    Raises:
        ArgumentError: there are checkpoints but not of this step, or a file is missing or damaged.
        DisagreementError: ranks pass different steps.
    """
    value: Any = None
    failure: Exception | None = None
    try:
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            raise ArgumentError(f"step is {step!r}; it must be an integer, or None for the newest checkpoint")
        value = [step, [[each, str(folder)] for each, folder in find_checkpoints(path)] if is_first else []]
    except (ArgumentError, OSError) as error:
        failure = error
    gathered = sorted(exchange(value, failure).items())
    for each, (other, _) in gathered:
        if other != step:
            raise DisagreementError(f"ranks {rank} and {each} load steps {step} and {other}; all must load the same")
    folders = {number: Path(folder) for _, (_, found) in gathered for number, folder in found}
    chosen = max(folders, default=None) if step is None else step
    if chosen is None or not folders:
        return None
    if chosen not in folders:
        raise ArgumentError(f"{path} has no complete checkpoint of step {step}; it has steps {[*folders]}")
    ranks = [each for each, _ in gathered]
    damage: Exception | None = None
    try:
        check_files(folders[chosen], ranks.index(rank), len(ranks))
    except ArgumentError as error:
        earlier = [each for each in folders if each < chosen]
        offer = f"to load the one before it, pass step={earlier[-1]}" if earlier else "there is none before it"
        damage = ArgumentError(f"{error}; {offer}")
    exchange(None, damage)
    return folders[chosen]
