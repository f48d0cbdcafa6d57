"""Gloo transports, and the process groups and NCCL communicators that the ranks of a call share."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reshard.forks import call_at_exit, call_in_child, keep_in_child
from reshard.formatting import format_ranks
from reshard.public_api import caller_level
from reshard.runtime.cuda.nccl import Communicator
from reshard.runtime.cuda.nccl_exchange import NCCL_DEVICES, NcclCollectives, NcclExchange, make_communicator
from reshard.runtime.transport.descriptors import check_descriptors
from reshard.runtime.transport.gloo_listeners import close_listeners
from reshard.runtime.transport.interface import BrokenConnectionError, Work
from reshard.runtime.transport.shared_memory import SharedMemory, share_memory
from reshard.timeouts import run_with_timeout

#: Interval of checks for reported errors while waiting.
ERROR_POLL_INTERVAL_SECONDS = 0.2
#: A tag that no transfer uses: transfer tags are round numbers.
ABORT_TAG = 2**31 - 1
#: Time to wait for the creation of a group after its own timeout has passed.
GROUP_GRACE_SECONDS = 5.0
#: File descriptors of a Gloo group besides its connections: two for the event loop, one to listen, one spare.
GROUP_DESCRIPTORS = 4


class Connections:
    """Gloo process groups and NCCL communicators of one set of ranks, created on first use."""

    def __init__(self, store: dist.Store, rank: int, members: Sequence[int]) -> None:
        self._store, self._rank = store, rank
        self._own = members.index(rank)
        self._position = {member: position for position, member in enumerate(members)}
        self._groups: list[Any] = []
        self._stores: list[dist.Store] = []  # used by the groups, which hold no reference
        self._exchanges: dict[int, NcclExchange] = {}
        self._collectives: Any = None
        self._shared_memory: SharedMemory | None = None
        self._is_sharing = False  # whether the ranks have found out who shares memory

    def transport(self, both_ways: bool, timeout_seconds: float, check_error: Callable[[], None]) -> GlooTransport:
        """A transport; all ranks must request the same kind.

        A Gloo receiver acknowledges each message over the connection on which it sends its own data to that rank, and
        behind that data. With traffic in both directions, a sender would therefore wait for the end of an opposite
        message after each message that it sent. An in-place exchange took 1.25 times the bound. So a two-way transport
        has one connection per direction.

        Args:
            check_error: called periodically while ranks connect; raises if waiting is pointless.

        Raises:
            RuntimeError: not all ranks connected in time.
            ResourceError: this rank has too few free file descriptors.
        """
        while len(self._groups) < 1 + both_ways:
            self._groups.append(self._make_group_with_timeout(str(len(self._groups)), timeout_seconds, check_error))
        if not self._is_sharing:
            limit = timedelta(seconds=timeout_seconds)
            share = functools.partial(share_memory, self._groups[0], self._own, list(self._position), limit)
            self._shared_memory = run_with_timeout(share, timeout_seconds + GROUP_GRACE_SECONDS)
            self._is_sharing = True
        return GlooTransport(self._groups[0], self._groups[both_ways], self._own, self._position, self._shared_memory)

    def collectives(self, device: torch.device, timeout_seconds: float, check_error: Callable[[], None]) -> Any:
        """The ``torch.distributed`` backend for collectives on one type of device, shared by all callers.

        Raises:
            RuntimeError: not all ranks connected in time.
        """
        if self._collectives is None:
            if device.type in NCCL_DEVICES:
                communicator = self._make_communicator("collectives", device, timeout_seconds, check_error)
                self._collectives = NcclCollectives(communicator, device)
            else:
                self._collectives = self._make_group_with_timeout("collectives", timeout_seconds, check_error)
        return self._collectives

    def _make_communicator(
        self, name: str, device: torch.device, timeout_seconds: float, check_error: Callable[[], None]
    ) -> Communicator:
        store = _PolledStore(dist.PrefixStore(f"{device.type}/{name}", self._store), check_error)
        _on_devices.add(self)
        call_at_exit(_close_communicators, priority=15)  # after transfers, before the connections for control
        return make_communicator(store, self._own, len(self._position), device, timeout_seconds, check_error)

    def _make_group_with_timeout(self, name: str, timeout_seconds: float, check_error: Callable[[], None]) -> Any:
        make = functools.partial(self._make_group, name, timedelta(seconds=timeout_seconds), check_error)
        return run_with_timeout(make, timeout_seconds + GROUP_GRACE_SECONDS)

    def _make_group(self, name: str, limit: timedelta, check_error: Callable[[], None]) -> Any:
        ranks = sorted(self._position)
        check_descriptors(self._rank, len(ranks) - 1 + GROUP_DESCRIPTORS, f"connecting ranks {format_ranks(ranks)}")
        store = _PolledStore(dist.PrefixStore(name, self._store), check_error)
        self._stores.append(store)
        group = keep_in_child(dist.ProcessGroupGloo(store, self._own, len(ranks), limit))
        # Without a barrier an idle rank could exit while others still connect to it, and they would fail.
        group.barrier().wait(limit)
        close_listeners(store.settle())
        return group

    def exchange(
        self, device: torch.device, number: int, timeout_seconds: float, check_error: Callable[[], None]
    ) -> NcclExchange:
        """The NCCL exchange with this number; all ranks must request the same one.

        Each number has its own communicator, which runs its operations in the order of posting.

        Raises:
            RuntimeError, TimeoutError: not all ranks connected in time.
        """
        if number and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            warnings.warn(
                "CUDA_DEVICE_MAX_CONNECTIONS is 1: simultaneous transfers in both directions can deadlock; "
                "unset it, or omit both_ways",
                stacklevel=caller_level(),
            )
        if number not in self._exchanges:
            communicator = self._make_communicator(str(number), device, timeout_seconds, check_error)
            self._exchanges[number] = NcclExchange(communicator, self._position, device)
        return self._exchanges[number]

    def _on_device(self) -> list[Any]:
        is_gloo = self._collectives is None or isinstance(self._collectives, dist.ProcessGroupGloo)
        return [*self._exchanges.values(), *([] if is_gloo else [self._collectives])]

    def begin_close(self) -> None:
        """Begin to close communicators on a device, without waiting. Call it on all connections before closing one."""
        for item in self._on_device():
            item.begin_close()

    def close(self) -> None:
        """Drop all groups. A group without other references ends its threads and closes its connections."""
        self.begin_close()
        self.close_communicators()
        self._collectives = None
        self._exchanges.clear()
        self._groups.clear()
        self._stores.clear()
        self._shared_memory, self._is_sharing = None, False

    def close_communicators(self) -> None:
        """Wait until communicators on a device have closed."""
        for item in self._on_device():
            item.close()

    def abort(self) -> None:
        """End all waits on every transport, on this rank and soon on the other ranks."""
        if self._shared_memory is not None:
            self._shared_memory.close()
        for group in self._groups:
            abort_group(group)
        if isinstance(self._collectives, dist.ProcessGroupGloo):
            abort_group(self._collectives)
        for item in self._on_device():  # an abort may wait for the kernels of the others
            item.begin_abort()
        for item in self._on_device():
            item.abort()


#: Connections with communicators on devices.
_on_devices: weakref.WeakSet[Connections] = weakref.WeakSet()
call_in_child(_on_devices.clear)


def _close_communicators() -> None:
    """At process exit, close all communicators. Otherwise NCCL tells ranks still at work that this one has died."""
    for on_device in list(_on_devices):
        on_device.begin_close()
    for on_device in list(_on_devices):
        on_device.close_communicators()


class _PolledStore(dist.Store):
    """A store that polls where a ``TCPStore`` would block its other users, possibly for minutes."""

    def __init__(self, raw: dist.Store, check_error: Callable[[], None]) -> None:
        super().__init__()
        self._raw, self._check_error = raw, check_error
        self._written: list[bytes] = []

    def settle(self) -> list[bytes]:
        """Stop calling ``check_error``, after all connections are made, and drop the reference to it.

        Returns:
            The values that this rank has written.
        """
        self._check_error = _ignore_errors
        return self._written

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._written.append(value.encode() if isinstance(value, str) else bytes(value))
        self._raw.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of a key; waits until it exists."""
        self.wait([key])
        return bytes(self._raw.get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            RuntimeError: they do not exist in time. Also any exception of ``check_error``.
        """
        begun = last_check = now = time.monotonic()
        while not self._raw.check(keys):
            if timeout is not None and now - begun > timeout.total_seconds():
                raise RuntimeError(f"the store has no key {keys[0]} after {timeout.total_seconds():g} s")
            time.sleep(min(0.02, max(0.0005, 0.1 * (now - begun))))
            now = time.monotonic()
            if now - last_check > ERROR_POLL_INTERVAL_SECONDS:
                last_check = now
                self._check_error()


def _ignore_errors() -> None:
    pass


class GlooTransport:
    """Messages to later ranks of the set go over one Gloo group, messages to earlier ones over another or the same."""

    def __init__(
        self, later: Any, earlier: Any, own: int, position: dict[int, int], shared_memory: SharedMemory | None = None
    ) -> None:
        self._later, self._earlier, self._own, self._position = later, earlier, own, position
        self.shared_memory = shared_memory  # carries large messages between ranks of one host

    def send(self, buffer: torch.Tensor, rank: int, tag: int) -> Work:
        """Start sending a contiguous tensor."""
        to = self._position[rank]
        try:
            return (self._later if to > self._own else self._earlier).send([buffer], to, tag)
        except RuntimeError as error:
            raise BrokenConnectionError(rank, f"cannot post a message to rank {rank}: {error}") from error

    def recv(self, buffer: torch.Tensor, rank: int, tag: int) -> Work:
        """Start receiving into a contiguous tensor."""
        sender = self._position[rank]
        try:
            return (self._later if sender < self._own else self._earlier).recv([buffer], sender, tag)
        except RuntimeError as error:
            raise BrokenConnectionError(rank, f"cannot post a message from rank {rank}: {error}") from error

    def abort(self) -> None:
        """End all waits on this transport, on this rank and soon on the other ranks."""
        if self.shared_memory is not None:
            self.shared_memory.close()
        for group in {self._later, self._earlier}:
            abort_group(group)


def abort_group(group: Any) -> None:
    """Close all connections of a group.

    Gloo's Python API has no abort, but a wait that times out closes all connections of its group. A receive cannot be
    posted on a closed connection, such as one to a dead rank. So this function tries all ranks in turn.
    """
    for rank in range(group.size()):
        if rank != group.rank():
            with contextlib.suppress(RuntimeError):
                never = group.recv([torch.empty(1, dtype=torch.uint8)], rank, ABORT_TAG)
                never.wait(timedelta(milliseconds=1))
