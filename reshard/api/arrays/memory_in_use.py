"""The memory that unfinished transfers of this process read and write."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from reshard.api.arrays.tensor_checks import DEVICE_TYPES, MemoryExtent
from reshard.errors import ArgumentError
from reshard.forks import call_in_child
from reshard.runtime.cpu.encoded_shards import DecodedTarget, EncodedSource
from reshard.runtime.cpu.staging import CastSource
from reshard.runtime.cuda.device_encoding import DeviceDecodedTarget


@dataclass(frozen=True, eq=False)
class _Use:
    """The memory that one transfer uses. It refers to no array, so a result that the caller drops is freed at once."""

    owner: object  # transfers of one owner run one after another; None: this use may run at the same time as any
    is_over: Callable[[], bool]
    read: list[MemoryExtent]
    written: list[MemoryExtent]


class HandleInUse(Protocol):
    """The part of a handle that this module needs."""

    def _has_work(self) -> bool:
        """Whether ``wait`` still reads or writes arrays."""


_uses: list[_Use] = []
_lock = threading.RLock()  # a thread may take it again after a signal handler has raised while it held the lock
call_in_child(_uses.clear)
call_in_child(_lock._at_fork_reinit)  # type: ignore[attr-defined]  # another thread may have held it during fork


def reserve_until_over(owner: object, is_over: Callable[[], bool], src: Sequence[Any], dst: Sequence[Any]) -> None:
    """Note what a transfer that starts now reads and writes, until it is over.

    Args:
        owner: transfers of the same owner run in the order in which they are started.
        is_over: holds no array.
        src, dst: arrays, or the objects that cast or encode arrays on the way.
    """
    _add(_Use(owner, is_over, _extents(src), _extents(dst)))


def reserve_until_waited(handle: HandleInUse, src: Sequence[Any], dst: Sequence[Any]) -> None:
    """Note what ``wait`` of a handle reads and writes, until it has done so or the handle is gone."""
    weak_handle = weakref.ref(handle)

    def is_over() -> bool:
        waited = weak_handle()
        return waited is None or not waited._has_work()

    read, written = _extents(src), _extents(dst)
    if read or written:
        _add(_Use(None, is_over, read, written))


def _add(use: _Use) -> None:
    with _lock:
        _uses[:] = [item for item in _uses if not item.is_over()]
        _uses.append(use)


def check_unused(
    src: Sequence[torch.Tensor | None],
    dst: Sequence[torch.Tensor | None],
    names: Sequence[str | None],
    owner: object = None,
    bases: Sequence[torch.Tensor | None] = (),
) -> None:
    """Raise ArgumentError if an unfinished transfer of another owner writes a source or base, or uses an out.

    A transfer whose ``wait`` still has to cast, decode or recover its result is unfinished, whatever its owner.
    """
    with _lock:
        uses = [item for item in _uses if (owner is None or item.owner is not owner) and not item.is_over()]
    if not uses:
        return
    for arrays, what in ((src, "the source"), (dst, "out"), (bases, "the base")):
        for array, name in zip(arrays, names, strict=arrays is not bases):
            if array is None or array.device.type not in DEVICE_TYPES or not array.numel():
                continue
            extent = MemoryExtent(array)
            for use in uses:
                for others, verb in ((use.written, "writes"), (use.read if what == "out" else [], "reads")):
                    if any(extent.may_overlap(other) for other in others) and not use.is_over():
                        raise ArgumentError(
                            f"{what}{f' of {name!r}' if name else ''} lies in memory that an unfinished transfer "
                            f"{verb}: call wait() of its handle first"
                        )


def _extents(arrays: Sequence[Any]) -> list[MemoryExtent]:
    return [
        MemoryExtent(array)
        for array in map(_memory_of, arrays)
        if isinstance(array, torch.Tensor) and array.device.type in DEVICE_TYPES and array.numel()
    ]


def _memory_of(array: Any) -> Any:
    """The caller's array, if this object casts or encodes it on the way."""
    if isinstance(array, EncodedSource | DecodedTarget | DeviceDecodedTarget):
        return array.plain
    return array.array if isinstance(array, CastSource) else array
