"""Resources that a child of ``os.fork`` inherits but must not use or destroy.

A child shares its parent's sockets and epoll sets but has none of its threads. Data sent by the child would reach the
parent's peers. A C++ destructor would wait for a thread that does not exist, or remove the parent's sockets from an
epoll set. So a child closes its copies of plain sockets, which sends nothing, and leaks everything else.
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
_inherited: list[tuple[Any, int]] = []  # (process group, pid of the process that created it)


def keep_in_child(thing: T) -> T:
    """Never run this object's destructor in a forked child. Returns the object."""
    _kept.add(thing)
    return thing


def close_in_child(socket: T) -> T:
    """Close this socket in a forked child, so that the peer sees EOF when the parent ends. Returns the socket."""
    _sockets.add(socket)
    return socket


def call_in_child(hook: Callable[[], None]) -> None:
    """Call ``hook()`` in every forked child, right after the fork."""
    _hooks.append(hook)


def find_creator_pid(process_group: Any) -> int | None:
    """The pid of the parent process that created a torch process group; None if this process created it."""
    return next((pid for item, pid in _inherited if item is process_group), None)


def _after_fork_in_child() -> None:
    for socket in list(_sockets):
        socket.close()
    _sockets.clear()
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    groups = [] if world is None else list(world.pg_map)
    _inherited.extend((group, os.getppid()) for group in groups if find_creator_pid(group) is None)
    kept = [*_kept, *groups]
    _kept.clear()
    if kept:
        import ctypes  # already loaded by torch

        for thing in kept:  # leak one reference, so that not even interpreter shutdown destroys the object
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    for hook in _hooks:
        hook()


os.register_at_fork(after_in_child=_after_fork_in_child)


_registered: set[tuple[int, Any]] = set()  # (pid, function)


def call_at_exit(function: Callable[[], None], priority: int) -> None:
    """Call ``function`` once when this process ends; higher priorities first.

    A multiprocessing child skips atexit handlers, but runs its own finalizers.
    """
    import multiprocessing.util

    if (os.getpid(), function) not in _registered:
        _registered.add((os.getpid(), function))
        multiprocessing.util.Finalize(None, function, exitpriority=priority)
