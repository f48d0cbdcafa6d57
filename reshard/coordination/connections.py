"""Messages between ranks over Gloo, and the groups and communicators that ranks of a call share."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reshard.coordination.descriptors import check_room
from reshard.coordination.store import LOOK_SECONDS, in_time
from reshard.forks import keep_in_child
from reshard.formatting import format_ranks
from reshard.runtime.cuda.nccl import Communicator
from reshard.runtime.cuda.nccl_exchange import NCCL_DEVICES, NcclCollectives, NcclExchange, make_communicator
from reshard.runtime.transport import BrokenConnectionError, Work

#: A tag that no transfer uses: those count rounds.
ABORT_TAG = 2**31 - 1
#: How much longer than its own time-out making a group may take before nobody waits for it.
GRACE_SECONDS = 5.0


#: What a Gloo group opens beside a connection to each other rank: two for its event loop, one to listen, one spare.
GROUP_DESCRIPTORS = 4


class Connections:
    """Gloo groups of the same ranks, each with a connection between each two of them, made when first needed."""

    def __init__(self, store: dist.Store, rank: int, members: Sequence[int]) -> None:
        self._store, self._rank = store, rank
        self._own = members.index(rank)
        self._position = {member: position for position, member in enumerate(members)}
        self._groups: list[Any] = []
        self._stores: list[dist.Store] = []  # which the groups use, and do not keep
        self._exchanges: dict[int, NcclExchange] = {}
        self._collectives: Any = None

    def transport(self, is_two_way: bool, timeout_seconds: float, look: Callable[[], None]) -> GlooTransport:
        """A transport; all ranks must ask for the same one.

        Gloo has a receiver say to the sender that it waits, on their connection, behind all that it sends to it itself.
        With traffic both ways a sender would wait for the end of a message in the other direction after each of its own
        (an exchange in place took 1.25 times the bound): a two-way transport has a connection for each direction.

        Args:
            look: called now and then while connections are made; raises when there is no use in waiting.

        Raises:
            RuntimeError: not all ranks came in time. ResourceError: this rank has no descriptors left for it.
        """
        while len(self._groups) < 1 + is_two_way:
            self._groups.append(self._make_in_time(str(len(self._groups)), timeout_seconds, look))
        return GlooTransport(self._groups[0], self._groups[is_two_way], self._own, self._position)

    def collectives(self, device: torch.device, timeout_seconds: float, look: Callable[[], None]) -> Any:
        """A ``torch.distributed`` backend for collectives of tensors on a type of device, one for all that ask.

        Raises:
            RuntimeError: not all ranks came in time.
        """
        if self._collectives is None:
            if device.type in NCCL_DEVICES:
                made = self._communicate("collectives", device, timeout_seconds, look)
                self._collectives = NcclCollectives(made, device)
            else:
                self._collectives = self._make_in_time("collectives", timeout_seconds, look)
        return self._collectives

    def _communicate(
        self, name: str, device: torch.device, timeout_seconds: float, look: Callable[[], None]
    ) -> Communicator:
        store = _PolledStore(dist.PrefixStore(f"{device.type}/{name}", self._store), look)
        return make_communicator(store, self._own, len(self._position), device, timeout_seconds, look)

    def _make_in_time(self, name: str, timeout_seconds: float, look: Callable[[], None]) -> Any:
        make = functools.partial(self._make_group, name, timedelta(seconds=timeout_seconds), look)
        return in_time(make, timeout_seconds + GRACE_SECONDS)

    def _make_group(self, name: str, limit: timedelta, look: Callable[[], None]) -> Any:
        ranks = sorted(self._position)
        check_room(self._rank, len(ranks) - 1 + GROUP_DESCRIPTORS, f"connecting ranks {format_ranks(ranks)}")
        store = _PolledStore(dist.PrefixStore(name, self._store), look)
        self._stores.append(store)
        group = keep_in_child(dist.ProcessGroupGloo(store, self._own, len(ranks), limit))
        # who has nothing to do might end its process while others still connect, which fails for them then
        group.barrier().wait(limit)
        store.settle()
        return group

    def exchange(
        self, device: torch.device, number: int, timeout_seconds: float, look: Callable[[], None]
    ) -> NcclExchange:
        """How groups of messages travel between devices; all ranks must ask for the same one.

        Each number has a communicator of its own: what is put on one runs in that order.

        Raises:
            RuntimeError, TimeoutError: not all ranks came in time.
        """
        if number and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            warnings.warn(
                "CUDA_DEVICE_MAX_CONNECTIONS is 1: transfers both ways at once can wait for each other for ever; "
                "unset it, or do not use both_ways",
                stacklevel=6,
            )
        if number not in self._exchanges:
            made = self._communicate(str(number), device, timeout_seconds, look)
            self._exchanges[number] = NcclExchange(made, self._position, device)
        return self._exchanges[number]

    def close(self) -> None:
        """Let go of all groups; one that nobody else holds ends its threads and closes its connections."""
        for exchange in self._exchanges.values():
            exchange.close()
        if self._collectives is not None and not isinstance(self._collectives, dist.ProcessGroupGloo):
            with contextlib.suppress(RuntimeError):
                self._collectives.shutdown()
        self._collectives = None
        self._exchanges.clear()
        self._groups.clear()
        self._stores.clear()

    def abort(self) -> None:
        """End every wait of any transport, here and soon at the other ranks."""
        for group in self._groups:
            abort_group(group)
        for exchange in self._exchanges.values():
            exchange.abort()
        if isinstance(self._collectives, dist.ProcessGroupGloo):
            abort_group(self._collectives)
        elif self._collectives is not None:
            self._collectives.abort()


class _PolledStore(dist.Store):
    """A store that asks again where a ``TCPStore`` would wait, holding up its other users, for minutes if need be."""

    def __init__(self, raw: dist.Store, look: Callable[[], None]) -> None:
        super().__init__()
        self._raw, self._look = raw, look

    def settle(self) -> None:
        """Connections are made: stop looking around, and forget who did."""
        self._look = _look_nowhere

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._raw.set(key, value)

    def get(self, key: str) -> bytes:
        """A value, once it is there."""
        self.wait([key])
        return bytes(self._raw.get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there.

        Raises:
            RuntimeError: they are not in time, or what ``look`` raised.
        """
        begun = looked = now = time.monotonic()
        while not self._raw.check(keys):
            if timeout is not None and now - begun > timeout.total_seconds():
                raise RuntimeError(f"{keys[0]} is not there after {timeout.total_seconds():g} s")
            time.sleep(min(0.02, max(0.0005, 0.1 * (now - begun))))
            now = time.monotonic()
            if now - looked > LOOK_SECONDS:
                looked = now
                self._look()


def _look_nowhere() -> None:
    pass


class GlooTransport:
    """Messages to ranks of later positions go over one group, those to earlier ones over another, or the same."""

    def __init__(self, later: Any, earlier: Any, own: int, position: dict[int, int]) -> None:
        self._later, self._earlier, self._own, self._position = later, earlier, own, position

    def send(self, buffer: torch.Tensor, rank: int, tag: int) -> Work:
        """Start sending a flat buffer."""
        to = self._position[rank]
        with _naming(rank, f"a message to rank {rank}"):
            return (self._later if to > self._own else self._earlier).send([buffer], to, tag)

    def recv(self, buffer: torch.Tensor, rank: int, tag: int) -> Work:
        """Start receiving into a flat buffer."""
        sender = self._position[rank]
        with _naming(rank, f"a message from rank {rank}"):
            return (self._later if sender < self._own else self._earlier).recv([buffer], sender, tag)

    def abort(self) -> None:
        """End every wait on this transport, here and soon at the other ranks."""
        for group in {self._later, self._earlier}:
            abort_group(group)


@contextlib.contextmanager
def _naming(rank: int, what: str) -> Iterator[None]:
    """Gloo's error on a connection that is closed already does not say whose it is."""
    try:
        yield
    except RuntimeError as error:
        raise BrokenConnectionError(rank, f"{what} cannot be posted: {error}") from error


def abort_group(group: Any) -> None:
    """Close all connections of a group.

    Gloo has no abort that does this from Python, but a wait that times out closes all connections of its group.
    """
    with contextlib.suppress(RuntimeError):
        never = group.recv([torch.empty(1, dtype=torch.uint8)], int(group.rank() == 0), ABORT_TAG)
        never.wait(timedelta(milliseconds=1))
