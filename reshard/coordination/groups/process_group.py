"""Groups of ranks that can reshard among themselves, and the store that they share."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch.distributed as dist

from reshard.coordination.groups.agreement_messages import RankStatus
from reshard.coordination.groups.store import Store
from reshard.errors import ArgumentError
from reshard.forks import call_in_child, find_creator_pid, keep_in_child
from reshard.formatting import brief, count_of, describe_ranks
from reshard.runtime.torch_compat import is_alive, store_of
from reshard.runtime.transport.descriptors import has_descriptors

#: Time that closing a group waits for each of its threads to end.
END_SECONDS = 2.0
#: A wait that ends this much too late shows that the process was stopped, or that the machine is overloaded.
STOPPED_PAUSE_SECONDS = 1.0
#: Grace period of the other ranks after a pause of this rank. A rank that seems absent may have returned in the pause.
RESUME_SECONDS = 3.0

_lock = threading.RLock()  # like all locks that callers take: a signal handler may interrupt its holder
_groups: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()
_all: weakref.WeakSet[Group] = weakref.WeakSet()


def known_groups(given: Any = None) -> list[Group]:
    """The usable groups in which other ranks may wait for this rank.

    Args:
        given: the group that the call of this rank names, which is not usable.
    """
    if isinstance(given, Group) or (isinstance(given, dist.ProcessGroup) and not is_alive(given)):
        return []  # only the ranks of that group wait, and it cannot be used to notify them
    return [group for group in list(_all) if group.is_usable()]


class ConnectionUser(Protocol):
    """An object that moves data over the connections of a group."""

    def finish(self, timeout_seconds: float | None) -> None:
        """Wait for operations in progress; None: without a timeout."""

    def release(self) -> None:
        """Drop connections once no operation is in progress. Takes no lock and does not wait."""


class GroupResources:
    """The resources that a group releases when it is closed, collected or destroyed.

    This object holds no reference to the group.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.call_groups: dict[tuple[int, ...], Any] = {}
        # Not a WeakSet, which cannot be iterated while another thread adds to it.
        self._users: set[weakref.ref[ConnectionUser]] = set()
        self.monitor: Any = None
        self.is_released = False
        self._pid = os.getpid()

    def add_user(self, user: ConnectionUser) -> None:
        """Register a user, which finishes and drops its connections when the group closes."""
        self._users.add(weakref.ref(user, self._users.discard))

    def users(self) -> list[ConnectionUser]:
        """The users that still exist."""
        return [user for item in tuple(self._users) if (user := item()) is not None]

    def release(self) -> None:
        """Release everything, once. Does nothing in a forked child, because the parent still uses the connections.

        Takes no lock and does not wait, since the garbage collector may call it at any point.
        """
        if self.is_released or self._pid != os.getpid():
            return
        self.is_released = True
        call_groups = list(self.call_groups.values())
        with (
            contextlib.ExitStack() as steps
        ):  # takes them from last to first; an interrupt of one does not prevent others
            steps.callback(self.store.close)
            steps.callback(self.call_groups.clear)
            for call_group in call_groups:
                steps.callback(call_group.close)
            for call_group in call_groups:
                steps.callback(call_group.begin_close)
            if self.monitor is not None:
                steps.callback(self.monitor.end)
            for user in self.users():
                steps.callback(user.release)

    def join(self) -> None:
        """Wait for the threads to end."""
        if self.monitor is not None:
            self.monitor.join(END_SECONDS)
        self.store.join(END_SECONDS)


class Group:
    """A set of ranks 0..size-1 that share a store.

    Created by :func:`join`, or from a process group by :func:`find_group`. Connections and threads are created on first
    use. They are kept until the group is closed: by :meth:`close`, at the end of a ``with`` block, when nothing refers
    to a joined group any more, or when its process group is destroyed.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, process_group: Any = None) -> None:
        if not 0 <= rank < size:
            raise ArgumentError(f"rank {brief(rank)} is outside a group of {count_of(size, 'rank')}")
        self.rank, self.size = rank, size
        self._process_group = None if process_group is None else weakref.ref(process_group)
        self.pid = os.getpid()
        _all.add(self)
        self.hostname = socket.gethostname()
        self.store = Store(store)
        self.resources = GroupResources(self.store)
        self.call_groups = self.resources.call_groups
        self.lock = threading.RLock()
        self.claim_token = secrets.token_hex(8)  # of a joined group, see :mod:`reshard.coordination.groups.joining`
        self.is_claimed, self.claim_error = False, ""
        self.attempts = 0  # rounds that this rank has started, on any call group
        self.status, self.is_status_published = RankStatus(), True
        self.acknowledged: dict[str, int] = {}  # skipped calls, see reshard.coordination.liveness.call_sequence
        self.calls: dict[tuple[int, ...], int] = {}  # number of calls of this rank, by members
        self.abandoned_call = False  # whether this rank ends its call because another rank has left it
        self.lost: set[int] = set()  # excluded ranks, see reshard.coordination.liveness.exclusions
        self.num_exclusions = 0  # that this rank has adopted
        self.excluded_by: int | None = None  # the rank that excluded this one
        self.resumed_at = -math.inf  # when this process was last found to have been stopped
        self.last_members: tuple[int, ...] = ()  # members of the last round
        self._caller: int | None = None  # the thread that is in a call
        self._may_nest = False  # whether the next call may begin inside the current one
        self._in_rounds: set[int] = set()  # the threads that are in a round
        self.callers: list[threading.Thread] = []  # live threads that have called, latest last
        self.callers_alternate = False  # whether a thread has called again after another one
        self._is_closed = False
        self._release = weakref.finalize(self, self.resources.release)
        self._release.atexit = False

    @property
    def process_group(self) -> Any:
        """The torch process group; None for a joined group."""
        return None if self._process_group is None else self._process_group()

    def is_destroyed(self) -> bool:
        """Whether torch has destroyed the process group of this group."""
        return self._process_group is not None and not is_alive(self._process_group())

    def is_usable(self) -> bool:
        """Whether :meth:`check_usable` passes."""
        return self.pid == os.getpid() and not self._is_closed and not self.resources.is_released

    def check_usable(self) -> None:
        """Raise ArgumentError if the group is closed or belongs to another process."""
        if self.is_usable():
            return
        if self.pid != os.getpid():
            raise ArgumentError(_describe_fork(str(self), self.pid))
        raise ArgumentError(f"this {self} is closed: make a new one (reshard.join, torch.distributed.new_group)")

    def close(self) -> None:
        """Wait for transfers in progress, then end the threads and close the connections of this rank.

        The group and its Movers cannot be used afterwards. Ranks that still wait for this one get an error. Closing a
        group twice, or in a forked child, does nothing.

        Raises:
            ArgumentError: a call on the group has not ended.
        """
        if self.resources.is_released or self.pid != os.getpid():
            return
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.calling())
            except ArgumentError:
                whose = "this" if self._caller == threading.get_ident() else "another"
                raise ArgumentError(f"cannot close this {self}: {whose} thread is in a call on it") from None
            self._is_closed = True
            for user in self.resources.users():
                user.finish(None)
            self._release()
        self.resources.join()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Reserve the group for one call while it agrees with other ranks; two calls would mix up their answers.

        Raises:
            ArgumentError: another thread is in a call, or this thread is, and did not allow a call inside it.
        """
        thread_id, is_entered = threading.get_ident(), False
        try:  # before anything changes: an interrupt may come at any line
            with self.lock:
                before = caller, may_nest = self._caller, self._may_nest
                if caller not in (None, thread_id):
                    raise ArgumentError(
                        f"rank {self.rank}: two threads call on one {self} at once; ranks match calls by order, and "
                        "two threads have no common order: give each thread its own group "
                        "(torch.distributed.new_group or reshard.join)"
                    )
                if caller is not None and not may_nest:
                    raise self._describe_interruption()
                current = threading.current_thread()
                earlier = [thread for thread in self.callers if thread is not current and thread.is_alive()]
                self.callers_alternate |= current in self.callers[:-1] and bool(earlier)
                self.callers = [*earlier, current]
                is_entered = True
                self._caller, self._may_nest = thread_id, False
            yield
        finally:
            if is_entered:
                self._caller, self._may_nest = before

    @contextlib.contextmanager
    def nesting(self) -> Iterator[None]:
        """Allow one call at a time inside the current one, such as that of a Mover."""
        try:
            self._may_nest = True
            yield
        finally:
            self._may_nest = False

    @contextlib.contextmanager
    def in_round(self) -> Iterator[None]:
        """Mark that this thread is in a round. Rounds contain no others, except if a signal handler starts one.

        Raises:
            ArgumentError: this thread is already in a round.
        """
        thread_id = threading.get_ident()
        if thread_id in self._in_rounds:
            raise self._describe_interruption()
        try:
            self._in_rounds.add(thread_id)
            yield
        finally:
            self._in_rounds.discard(thread_id)

    def detect_pause(self, asked_seconds: float, begun_at: float) -> None:
        """Note a wait that has just ended. If it ended late, this process was stopped.

        Args:
            asked_seconds: its limit.
            begun_at: value of ``time.monotonic()``.
        """
        now = time.monotonic()
        if now - begun_at - asked_seconds > STOPPED_PAUSE_SECONDS:
            self.resumed_at = now

    def has_just_resumed(self) -> bool:
        """Whether this process was stopped until less than :data:`RESUME_SECONDS` ago."""
        return time.monotonic() < self.resumed_at + RESUME_SECONDS

    def _describe_interruption(self) -> ArgumentError:
        return ArgumentError(
            f"rank {self.rank}: a call on the {self} begins inside another call of its thread, as in a signal handler; "
            "ranks match calls by order: call after the other call has returned"
        )

    def translate(self, world_rank: int) -> int:
        """The group rank of a world rank, as a DeviceMesh names it.

        In a joined group the ranks of one world must have consecutive group ranks in world order. If they do not, ranks
        derive different layouts, and the comparison of layouts reports that.

        Raises:
            ArgumentError: the rank is not in the group.
        """
        if self._process_group is None:
            rank = world_rank + self.rank - dist.get_rank()
            if not 0 <= rank < self.size:
                raise ArgumentError(
                    f"rank {world_rank} of the DeviceMesh would be rank {rank} of the {self}: this process, rank "
                    f"{dist.get_rank()} of its world, joined as rank {self.rank}; join in the order of world ranks, "
                    "or pass a reshard Mesh of joined ranks"
                )
            return rank
        if self.process_group is dist.group.WORLD:
            return world_rank
        ranks = dist.get_process_group_ranks(self.process_group)
        if world_rank not in ranks:
            raise ArgumentError(f"rank {world_rank} of the DeviceMesh is not in the group {ranks}")
        return ranks.index(world_rank)

    def __str__(self) -> str:
        return f"group of {count_of(self.size, 'rank')}"


def check_inside(group: Group, members: Sequence[int]) -> None:
    """Raise ArgumentError if a rank is outside the group."""
    outside = [rank for rank in members if rank >= group.size]
    if outside:
        raise ArgumentError(
            f"the plan or a layout names {describe_ranks(outside)}, but the {group} has ranks 0..{group.size - 1}"
        )


def serve_store(listener: socket.socket) -> dist.TCPStore:
    """A ``TCPStore`` server on a listening socket, which it takes over.

    A ``TCPStore`` that binds its own socket listens on every address of its host, whatever address it is given.
    """
    address, port = listener.getsockname()[:2]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def own_client(store: dist.Store) -> dist.Store:
    """A separate connection to a store, so that waiting on it does not block other users of the store."""
    keep_in_child(store)
    if not has_descriptors(1):  # torch would retry for minutes; the first call of the group reports the shortage
        return store
    try:
        return keep_in_child(store.clone())
    except (RuntimeError, AttributeError, NotImplementedError):
        return store


def find_group(group: Any) -> Group:
    """The Group of a ``torch.distributed`` process group (None: the world) or of a joined group.

    Raises:
        ArgumentError: torch.distributed is not initialised, this process is not in the group or is a forked child of
            its creator, or the group is closed or destroyed.
    """
    known = _find_group(group)
    known.check_usable()
    return known


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
    maker = find_creator_pid(process_group)
    if maker is not None:
        raise ArgumentError(_describe_fork("process group", maker))
    if not is_alive(process_group):
        raise ArgumentError("this process group was destroyed: make a new one (torch.distributed.new_group)")
    with _lock:
        if process_group not in _groups:
            for other in list(_groups.values()):
                if other.is_destroyed():
                    other.resources.release()
            rank = dist.get_rank(process_group)
            if rank < 0:
                raise ArgumentError("this process is not a member of the process group that it passes")
            store = store_of(process_group)
            prefixed = dist.PrefixStore(f"reshard/{process_group.group_name}", own_client(store))
            made = Group(prefixed, rank, dist.get_world_size(process_group), process_group)
            _groups[process_group] = made
            # torch drops this store when it destroys the process group; the group object itself may live longer
            weakref.finalize(store, made.resources.release).atexit = False
        return _groups[process_group]


def close_group(group: Any = None) -> None:
    """Close what this rank holds for a process group or a joined group; see :meth:`Group.close`.

    The process group itself stays open, but this package accepts it no more.

    Args:
        group: a process group or the result of :func:`join`; None for the world.

    Raises:
        ArgumentError: another thread is in a call on the group, or ``group`` is not a group.
    """
    if isinstance(group, dist.ProcessGroup) and not is_alive(group):
        return  # closed when it was destroyed
    _find_group(group).close()


def _describe_fork(what: str, pid: int) -> str:
    return (
        f"this {what} was created in process {pid}, and process {os.getpid()} is its forked child: create a new group "
        "after fork (torch.distributed.init_process_group or reshard.join)"
    )


call_in_child(_lock._at_fork_reinit)  # type: ignore[attr-defined]  # another thread may have held it during fork
