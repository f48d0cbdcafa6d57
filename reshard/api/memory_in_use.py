"""The memory that unfinished transfers of this process read and write."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.api.tensor_checks import Place
from reshard.errors import ArgumentError
from reshard.forks import call_in_child


@dataclass(frozen=True, eq=False)
class _Use:
    """The memory of one transfer. It refers to no array, so a result that the caller drops is freed at once."""

    owner: object  # transfers of one owner run one after another
    ended: threading.Event
    read: list[Place]
    written: list[Place]


_uses: list[_Use] = []
_lock = threading.Lock()
call_in_child(_uses.clear)
call_in_child(_lock._at_fork_reinit)  # type: ignore[attr-defined]  # another thread may have held it during fork


def note_use(owner: object, ended: threading.Event, src: Sequence[Any], dst: Sequence[Any]) -> None:
    """Note what a transfer that starts now reads and writes, until ``ended`` is set.

    Args:
        owner: transfers of the same owner run in the order in which they are started.
        src, dst: arrays; anything else, such as an encoded copy, is ignored.
    """
    use = _Use(owner, ended, _places(src), _places(dst))
    with _lock:
        _uses[:] = [each for each in _uses if not each.ended.is_set()]
        _uses.append(use)


def check_unused(
    src: Sequence[torch.Tensor | None],
    dst: Sequence[torch.Tensor | None],
    names: Sequence[str | None],
    owner: object = None,
) -> None:
    """Raise ArgumentError if an unfinished transfer of another owner writes a source, or reads or writes an out."""
    with _lock:
        uses = [each for each in _uses if each.owner is not owner and not each.ended.is_set()]
    if not uses:
        return
    for arrays, what in ((src, "the source"), (dst, "out")):
        for array, name in zip(arrays, names, strict=True):
            if array is None or array.device.type != "cpu" or not array.numel():
                continue
            place = Place(array)
            for use in uses:
                for others, verb in ((use.written, "writes"), (use.read if what == "out" else [], "reads")):
                    if any(place.may_overlap(other) for other in others) and not use.ended.is_set():
                        raise ArgumentError(
                            f"{what}{f' of {name!r}' if name else ''} lies in memory that an unfinished transfer "
                            f"{verb}: call wait() of its handle first"
                        )


def _places(arrays: Sequence[Any]) -> list[Place]:
    return [
        Place(array)
        for array in arrays
        if isinstance(array, torch.Tensor) and array.device.type == "cpu" and array.numel()
    ]
