"""The ranks that can reshard among themselves, and the store they meet at."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from reshard.coordination.descriptors import has_room
from reshard.coordination.store import Store
from reshard.errors import ArgumentError
from reshard.forks import call_in_child, find_maker, keep_in_child
from reshard.formatting import say_ranks

#: How long closing a group waits for its threads, which have been told to end.
END_SECONDS = 2.0

_lock = threading.Lock()
_groups: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()
_all: weakref.WeakSet[Group] = weakref.WeakSet()


def new_status() -> dict[str, Any]:
    """What a rank that has done nothing yet leaves in the store, see :mod:`reshard.coordination.liveness.status`."""
    return {
        "waiting": None,
        "skipped": {},
        "errors": 0,
        "given": {},
        "error": None,
        "many": False,
        "lost": [],
        "out_of_sync": {},
    }


def known_groups(given: Any = None) -> list[Group]:
    """The groups in which other ranks may wait for a call that names no usable group but ``given``."""
    if isinstance(given, Group) or (isinstance(given, dist.ProcessGroup) and not is_alive(given)):
        return []  # its ranks know, or wait in vain; those of other groups do not wait
    return [group for group in list(_all) if group.is_usable()]


class User(Protocol):
    """What moves things over the connections of a group."""

    def finish(self, timeout_seconds: float | None) -> None:
        """Wait for what is under way; None: for as long as it takes."""

    def release(self) -> None:
        """Let go of connections as soon as nothing is under way; takes no lock and does not wait."""


class Held:
    """What a group holds until it is closed, dropped or destroyed. It does not know the group, which may be dropped."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.channels: dict[tuple[int, ...], Any] = {}
        self._users: set[weakref.ref[User]] = set()  # a WeakSet cannot be read while another thread adds to it
        self.monitor: Any = None
        self.is_released = False
        self._pid = os.getpid()

    def add_user(self, user: User) -> None:
        """Have a user finish and let go of its connections when the group closes."""
        self._users.add(weakref.ref(user, self._users.discard))

    def users(self) -> list[User]:
        """Those that are still there."""
        return [user for each in tuple(self._users) if (user := each()) is not None]

    def release(self) -> None:
        """Give all of it back, once; not in a forked child, whose parent uses it.

        Takes no lock and does not wait, since objects are collected anywhere.
        """
        if self.is_released or self._pid != os.getpid():
            return
        self.is_released = True
        for user in self.users():
            user.release()
        if self.monitor is not None:
            self.monitor.end()
        for channel in list(self.channels.values()):
            channel.close()
        self.channels.clear()
        self.store.close()

    def join(self) -> None:
        """Wait for the threads to end."""
        if self.monitor is not None:
            self.monitor.join(END_SECONDS)
        self.store.join(END_SECONDS)


class Group:
    """A set of ranks 0..size-1 that share a store.

    Made by :func:`join`, or from a process group by :func:`find_group`. Connections and threads are made when ranks
    first need them, and kept until the group is closed: by :meth:`close`, at the end of a ``with`` block, when a joined
    group is no longer referenced, or when its process group is destroyed.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, process_group: Any = None) -> None:
        if not 0 <= rank < size:
            raise ArgumentError(f"rank {rank} is outside a group of {size} ranks")
        self.rank, self.size = rank, size
        self._process_group = None if process_group is None else weakref.ref(process_group)
        self.pid = os.getpid()
        _all.add(self)
        self.hostname = socket.gethostname()
        self.store = Store(store)
        self.held = Held(self.store)
        self.channels = self.held.channels
        self.lock = threading.Lock()
        self.attempts = 0  # rounds that this rank began, on any channel
        self.status = new_status()
        self.forgiven: dict[str, int] = {}  # calls that others skipped, see reshard.coordination.liveness.call_sequence
        self.calls: dict[tuple[int, ...], int] = {}  # that this rank made, by who takes part
        self.gave_up = False  # the call that it makes, because another rank had left it
        self.last_members: tuple[int, ...] = ()  # of the last round
        self._caller: int | None = None  # the thread that is in a call
        self.callers: list[threading.Thread] = []  # live threads that have called, the last one last
        self.callers_alternate = False  # whether one of them called again after another one
        self._is_closed = False
        self._release = weakref.finalize(self, self.held.release)
        self._release.atexit = False

    @property
    def process_group(self) -> Any:
        """The process group of torch; None for a joined group."""
        return None if self._process_group is None else self._process_group()

    def is_destroyed(self) -> bool:
        """Whether this is the group of a process group that torch has destroyed."""
        return self._process_group is not None and not is_alive(self._process_group())

    def is_usable(self) -> bool:
        """Whether :meth:`check_usable` passes."""
        return self.pid == os.getpid() and not self._is_closed and not self.held.is_released

    def check_usable(self) -> None:
        """Raise ArgumentError if the group is closed, or was made in another process."""
        if self.pid != os.getpid():
            raise ArgumentError(_describe_fork(str(self), self.pid))
        if not self.is_usable():
            raise ArgumentError(f"this {self} is closed: make a new one (reshard.join, torch.distributed.new_group)")

    def close(self) -> None:
        """End the threads and close the connections of this rank, once transfers under way are over.

        The group and its Movers cannot be used any more. Ranks that still wait for this one get an error. Closing a
        group twice does nothing, nor does closing it in a forked child.

        Raises:
            ArgumentError: another thread is in a call on the group.
        """
        if self.held.is_released or self.pid != os.getpid():
            return
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.calling())
            except ArgumentError:
                raise ArgumentError(f"another thread is in a call on this {self}, which cannot be closed yet") from None
            self._is_closed = True
            for user in self.held.users():
                user.finish(None)
            self._release()
        self.held.join()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """While this thread agrees with other ranks, no other one may: they would mix up each other's answers.

        Raises:
            ArgumentError: another thread is in a call.
        """
        thread = threading.get_ident()
        with self.lock:
            is_first = self._caller is None
            if self._caller not in (None, thread):
                raise ArgumentError(
                    f"rank {self.rank}: two threads call on one {self} at once; ranks match calls by order, which two "
                    "threads do not have: give each thread its own group (torch.distributed.new_group or reshard.join)"
                )
            self._caller = thread
            current = threading.current_thread()
            earlier = [one for one in self.callers if one is not current and one.is_alive()]
            self.callers_alternate |= current in self.callers[:-1] and bool(earlier)
            self.callers = [*earlier, current]
        try:
            yield
        finally:
            if is_first:
                self._caller = None

    def translate(self, world_rank: int) -> int:
        """The rank in this group of a rank of this process's world, as a DeviceMesh names it.

        In a joined group the ranks of one world have consecutive ranks in world order. Ranks for which that is not so
        derive different layouts here, which they find when they compare them.

        Raises:
            ArgumentError: it is not in the group.
        """
        if self._process_group is None:
            rank = world_rank + self.rank - dist.get_rank()
            if not 0 <= rank < self.size:
                raise ArgumentError(
                    f"rank {world_rank} of the DeviceMesh would be rank {rank} of the {self}: this process, rank "
                    f"{dist.get_rank()} of its world, joined as rank {self.rank}; join in the order of world ranks, "
                    "or give a reshard Mesh of joined ranks"
                )
            return rank
        if self.process_group is dist.group.WORLD:
            return world_rank
        ranks = dist.get_process_group_ranks(self.process_group)
        if world_rank not in ranks:
            raise ArgumentError(f"rank {world_rank} of the DeviceMesh is not in the group {ranks}")
        return ranks.index(world_rank)

    def __str__(self) -> str:
        return f"group of {self.size} ranks"


def check_inside(group: Group, members: Sequence[int]) -> None:
    """Raise ArgumentError if a rank is outside the group."""
    outside = [rank for rank in members if rank >= group.size]
    if outside:
        raise ArgumentError(f"layouts name {say_ranks(outside)}, but the {group} has ranks 0..{group.size - 1}")


def serve_store(listener: socket.socket) -> dist.TCPStore:
    """A ``TCPStore`` that serves on a socket which listens, and takes it over.

    A store that binds by itself listens on every address of its host, whatever address it is given.
    """
    address, port = listener.getsockname()[:2]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def own_client(store: dist.Store) -> dist.Store:
    """A connection of our own to a store, so that waiting on it holds up nobody else's."""
    keep_in_child(store)
    if not has_room(1):  # torch would try for minutes; the first call of the group says what is wrong
        return store
    try:
        return keep_in_child(store.clone())
    except (RuntimeError, AttributeError, NotImplementedError):
        return store


def is_alive(process_group: Any) -> bool:
    """Whether torch knows this process group, and has not destroyed it."""
    return process_group is not None and process_group in c10d._world.pg_map


def find_group(group: Any) -> Group:
    """Our group for a ``torch.distributed`` process group (None: the world) or for a joined one.

    Raises:
        ArgumentError: torch.distributed is not initialised, this process is not in the group or was forked from the one
            that made it, or the group is closed or destroyed.
    """
    found = _find_group(group)
    found.check_usable()
    return found


def _find_group(group: Any) -> Group:
    if isinstance(group, Group):
        return group
    if not dist.is_available() or not (dist.is_initialized() or isinstance(group, dist.ProcessGroup)):
        raise ArgumentError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group() first, "
            "or pass group=reshard.join(store, rank, world_size)"
        )
    process_group = dist.group.WORLD if group is None else group
    if not isinstance(process_group, dist.ProcessGroup):
        raise ArgumentError(f"group must be a process group or come from reshard.join, not {type(group).__name__}")
    maker = find_maker(process_group)
    if maker is not None:
        raise ArgumentError(_describe_fork("process group", maker))
    if not is_alive(process_group):
        raise ArgumentError("this process group was destroyed: make a new one (torch.distributed.new_group)")
    with _lock:
        if process_group not in _groups:
            for other in list(_groups.values()):
                if other.is_destroyed():
                    other.held.release()
            rank = dist.get_rank(process_group)
            if rank < 0:
                raise ArgumentError("this process is not in the group that it passes")
            store = c10d._get_process_group_store(process_group)
            prefixed = dist.PrefixStore(f"reshard/{process_group.group_name}", own_client(store))
            found = Group(prefixed, rank, dist.get_world_size(process_group), process_group)
            _groups[process_group] = found
            # torch holds this object until it destroys the process group, which others may hold for longer
            weakref.finalize(store, found.held.release).atexit = False
        return _groups[process_group]


def close_group(group: Any = None) -> None:
    """Close what this rank holds for a process group, or a joined group; see :meth:`Group.close`.

    The process group itself stays, but cannot be passed to this package any more.

    Args:
        group: a process group (omitted: the world), or what :func:`join` returned.

    Raises:
        ArgumentError: another thread is in a call on the group, or it is none.
    """
    if isinstance(group, dist.ProcessGroup) and not is_alive(group):
        return  # closed when it was destroyed
    _find_group(group).close()


def _describe_fork(what: str, pid: int) -> str:
    return (
        f"this {what} was made in process {pid}, and process {os.getpid()} is a child of it: after fork make a new "
        "group (torch.distributed.init_process_group, or reshard.join)"
    )


call_in_child(_lock._at_fork_reinit)  # type: ignore[attr-defined]  # another thread of the parent may have held it


def join(store: Any, rank: int, world_size: int) -> Group:
    """One group out of processes of several jobs, for example a trainer and a server.

    Every process passes the same store (for example ``torch.distributed.TCPStore``) and a rank of its own
    from 0 to ``world_size - 1``. Nothing is exchanged yet: ranks meet when they first reshard. A group leaves keys
    in the store; for another group (a restart, say) pass a ``PrefixStore`` with another prefix.

    Args:
        store: a ``torch.distributed`` store that all processes reach.
        rank: this process's rank in the new group. world_size: how many ranks it has.

    Returns:
        A group to pass as ``group=``; layouts then name its ranks. Its threads and connections end with
        ``group.close()``, with a ``with`` block, or when nothing refers to it any more.

    Raises:
        ArgumentError: the rank is outside the group, or the store is not a store.
    """
    if not isinstance(store, dist.Store):
        raise ArgumentError(f"store must be a torch.distributed store, not {type(store).__name__}")
    return Group(dist.PrefixStore("reshard/join", own_client(store)), int(rank), int(world_size))
