"""The ranks that can reshard among themselves, and the store they meet at."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from reshard.errors import ArgumentError
from reshard.mesh import say_ranks
from reshard.stores import Store

_lock = threading.Lock()
_groups: dict[Any, Group] = {}
_all: weakref.WeakSet[Group] = weakref.WeakSet()


def new_beacon() -> dict[str, Any]:
    """What a rank that has done nothing yet leaves in the store, see :mod:`reshard.beacon`."""
    return {
        "waiting": None,
        "skipped": {},
        "errors": 0,
        "given": {},
        "error": None,
        "many": False,
        "lost": [],
        "out_of_step": {},
    }


def known_groups() -> list[Group]:
    """All groups of this process."""
    return list(_all)


class Group:
    """A set of ranks 0..size-1 that share a store.

    Made by :func:`join`, or from a process group by :func:`find_group`. It holds no connection to other ranks;
    those are made by the ranks that move data, when they first do.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, process_group: Any = None) -> None:
        if not 0 <= rank < size:
            raise ArgumentError(f"rank {rank} is outside a group of {size} ranks")
        self.rank, self.size, self.process_group = rank, size, process_group
        _all.add(self)
        self.hostname = socket.gethostname()
        self.store = Store(store)
        self.channels: dict[tuple[int, ...], Any] = {}
        self.lock = threading.Lock()
        self.monitor: Any = None
        self.attempts = 0  # rounds that this rank began, on any channel
        self.beacon = new_beacon()
        self.forgiven: dict[str, int] = {}  # calls that others skipped, see reshard.failures
        self.calls: dict[tuple[int, ...], int] = {}  # that this rank made, by who takes part
        self.gave_up = False  # the call that it makes, because another rank had left it
        self._caller: int | None = None  # the thread that is in a call
        self.callers: list[threading.Thread] = []  # live threads that have called, the last one last
        self.callers_alternate = False  # whether one of them called again after another one

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
        if self.process_group is None:
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
    try:
        return store.clone()
    except (RuntimeError, AttributeError, NotImplementedError):
        return store


def find_group(group: Any) -> Group:
    """Our group for a ``torch.distributed`` process group (None: the world) or for a joined one.

    Raises:
        ArgumentError: torch.distributed is not initialised, or this process is not in the group.
    """
    if isinstance(group, Group):
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group() first, "
            "or pass group=reshard.join(store, rank, world_size)"
        )
    process_group = dist.group.WORLD if group is None else group
    if not isinstance(process_group, dist.ProcessGroup):
        raise ArgumentError(f"group must be a process group or come from reshard.join, not {type(group).__name__}")
    with _lock:
        if process_group not in _groups:
            rank = dist.get_rank(process_group)
            if rank < 0:
                raise ArgumentError("this process is not in the group that it passes")
            store = c10d._get_process_group_store(process_group)
            prefixed = dist.PrefixStore(f"reshard/{process_group.group_name}", own_client(store))
            _groups[process_group] = Group(prefixed, rank, dist.get_world_size(process_group), process_group)
        return _groups[process_group]


def forget_group(group: Any) -> None:
    """Give back what a group holds: its thread and its connections. No transfer may be under way."""
    with _lock:
        found = group if isinstance(group, Group) else _groups.pop(group, None)
    if found is None:
        return
    if found.monitor is not None:
        found.monitor.close()
    for channel in found.channels.values():
        channel.close()
    found.channels.clear()
    found.store.close()


def join(store: Any, rank: int, world_size: int) -> Group:
    """One group out of processes of several jobs, for example a trainer and a server.

    Every process passes the same store (for example ``torch.distributed.TCPStore``) and a rank of its own
    from 0 to ``world_size - 1``. Nothing is exchanged yet: ranks meet when they first reshard. A group leaves keys
    in the store; for another group (a restart, say) pass a ``PrefixStore`` with another prefix.

    Args:
        store: a ``torch.distributed`` store that all processes reach.
        rank: this process's rank in the new group. world_size: how many ranks it has.

    Returns:
        A group to pass as ``group=``; layouts then name its ranks.

    Raises:
        ArgumentError: the rank is outside the group, or the store is not a store.
    """
    if not isinstance(store, dist.Store):
        raise ArgumentError(f"store must be a torch.distributed store, not {type(store).__name__}")
    return Group(dist.PrefixStore("reshard/join", own_client(store)), int(rank), int(world_size))
