"""What a child made by ``os.fork`` inherits and must leave alone.

A child shares its parent's sockets and epoll sets, but has none of its threads. What it sent would reach the parent's
ranks, and a C++ destructor would wait for a thread that is not there, or take the parent's sockets out of an epoll set.
So a child closes its copies of plain sockets, which sends nothing, and never destroys anything else.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_kept: weakref.WeakSet[Any] = weakref.WeakSet()
_sockets: weakref.WeakSet[Any] = weakref.WeakSet()
_hooks: list[Callable[[], None]] = []
_inherited: list[tuple[Any, int]] = []  # process groups, and in which process they were made


def keep_in_child(thing: T) -> T:
    """Never run this object's destructor in a forked child; returns the object."""
    _kept.add(thing)
    return thing


def close_in_child(socket: T) -> T:
    """Close a forked child's copy of this socket, so that the other side sees when the parent ends; returns it."""
    _sockets.add(socket)
    return socket


def call_in_child(hook: Callable[[], None]) -> None:
    """Call a function first thing in every forked child."""
    _hooks.append(hook)


def find_maker(process_group: Any) -> int | None:
    """The process that made a torch process group, where this one was forked from it; None if this one made it."""
    return next((pid for each, pid in _inherited if each is process_group), None)


def _leave_alone() -> None:
    for socket in list(_sockets):
        socket.close()
    _sockets.clear()
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    groups = [] if world is None else list(world.pg_map)
    _inherited.extend((group, os.getppid()) for group in groups if find_maker(group) is None)
    kept = [*_kept, *groups]
    _kept.clear()
    if kept:
        import ctypes  # torch has loaded it

        for thing in kept:  # a reference held by nobody is one that not even the end of the interpreter gives up
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    for hook in _hooks:
        hook()


os.register_at_fork(after_in_child=_leave_alone)
