"""What the ranks of one call share: agreement rounds, errors told to all, and the transport between them.

Only the ranks of the call take part. They agree in rounds (see :mod:`reshard.coordination.rendezvous`). The
first error of a transfer is told to all in the store, under ``u/<members>/error/<generation>``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from reshard.coordination.connections import Connections, GlooTransport
from reshard.coordination.decide import Decision, Request, describe_error, name_rank, rebuild_error
from reshard.coordination.liveness.call_sequence import note_skipped
from reshard.coordination.liveness.heartbeat import Monitor
from reshard.coordination.process_group import Group, check_inside
from reshard.coordination.rendezvous import Rendezvous
from reshard.errors import ArgumentError, RemoteError, ReshardError, ResourceError, TransferTimeoutError
from reshard.formatting import format_ranks
from reshard.runtime.cuda.nccl_exchange import NcclExchange
from reshard.runtime.rounds.schedule import Round
from reshard.runtime.transport import BrokenConnectionError

TELLING_SECONDS = 1.0  # how long an error may take to be told
#: How long a rank whose connection broke waits for who knows why: that another rank has died, say.
SAY_SECONDS = 0.6
MAX_CACHED = 32


class Channel:
    """The ranks of one call, ascending; made once per group and set of ranks."""

    def __init__(self, group: Group, members: tuple[int, ...]) -> None:
        self._group, self.members = weakref.ref(group), members
        self._pid = os.getpid()
        digest = hashlib.sha256(repr(members).encode()).hexdigest()[:20]
        self._store = group.store.under(f"u/{digest}")
        self._lock = threading.RLock()
        self.rendezvous = Rendezvous(group, members, self._store)
        self.transfers = 0  # of those that are fault tolerant
        self.generation = 0
        self.broken: ReshardError | None = None
        self.idle_staging: Any = None  # of the last call, for the next one of the same plan
        self.idle_runner: Any = None  # the same between devices
        self._connections: tuple[int, Connections] | None = None  # of a generation
        self.cache: OrderedDict[Any, Any] = OrderedDict()

    @property
    def group(self) -> Group:
        """Whose ranks these are. Whoever moves something keeps it; a channel does not, so that it may be dropped."""
        group = self._group()
        if group is None:
            raise ArgumentError("nothing refers any more to the group of this transfer")
        return group

    def agree(
        self,
        request: Request,
        decide: Callable[[list[Request]], Decision],
        timeout_seconds: float,
        fault_tolerant: bool = False,
    ) -> tuple[int, Decision]:
        """One round, see :meth:`reshard.coordination.rendezvous.Rendezvous.hold`.

        Returns:
            The number of the round and the decision, which holds no error.
        """
        self.group.check_usable()
        with self._lock:
            request.generation = self.generation + (self.broken is not None)
            decision = self.rendezvous.hold(request, decide, timeout_seconds, fault_tolerant)
            if decision.generation != self.generation:
                self.generation, self.broken = decision.generation, None
            return decision.round, decision

    # Transfers

    def close(self) -> None:
        """Say goodbye to the other ranks and let go of all connections; the channel is not usable after."""
        self.rendezvous.links.close()
        if self._connections is not None:
            self._connections[1].close()
        if self.idle_runner is not None:
            self.idle_runner.release()
        self._connections = self.idle_staging = self.idle_runner = None
        self.cache.clear()

    def transport(self, generation: int, is_two_way: bool, timeout_seconds: float) -> GlooTransport | None:
        """A transport of this generation, made by all members together; None for one rank."""
        if len(self.members) == 1:
            return None
        look = functools.partial(self.check_reported, generation)
        return self._connect(generation, lambda made: made.transport(is_two_way, timeout_seconds, look))

    def exchange(
        self, generation: int, device: torch.device, number: int, rounds: Sequence[Round], timeout_seconds: float
    ) -> NcclExchange | None:
        """As :meth:`transport`, between devices, on the communicator with a number; connects the ranks of rounds."""
        if len(self.members) == 1:
            return None
        look = functools.partial(self.check_reported, generation)

        def ask(made: Connections) -> NcclExchange:
            exchange = made.exchange(device, number, timeout_seconds, look)
            exchange.connect(self.group.rank, rounds, timeout_seconds, look)
            return exchange

        return self._connect(generation, ask)

    def collectives(self, generation: int, device: torch.device, timeout_seconds: float) -> Any:
        """As :meth:`transport`, a backend of ``torch.distributed`` for collectives of all members."""
        if len(self.members) == 1:
            return None
        look = functools.partial(self.check_reported, generation)
        return self._connect(generation, lambda made: made.collectives(device, timeout_seconds, look))

    def _connect(self, generation: int, ask: Callable[[Connections], Any]) -> Any:
        self.group.check_usable()
        with self._lock:
            if self._connections is None or self._connections[0] != generation:
                if self._connections is not None:
                    self._connections[1].close()
                Monitor.of(self.group)
                store = dist.PrefixStore(f"gloo/{generation}", self._store.raw)
                self._connections = generation, Connections(store, self.group.rank, self.members)
            try:
                return ask(self._connections[1])
            except ResourceError as error:
                raise self.fail(generation, error) from None
            except ReshardError:
                raise
            except TimeoutError as error:
                raise self.fail(generation, TransferTimeoutError(f"cannot connect: {error}")) from error
            except Exception as error:  # whatever it is, the other ranks wait for this one
                raise self.fail(generation, ConnectionError(f"cannot connect: {error}")) from error

    def fail(self, generation: int, error: BaseException) -> ReshardError:
        """Tell all members that a transfer failed; returns the error that they all take, the first one told."""
        name, text = describe_error(error)
        said: str | bytes = json.dumps([name, name_rank(self.group.rank, text)])
        with contextlib.suppress(RuntimeError):  # the store may be gone
            said = self._store.compare_set(f"error/{generation}", "", str(said), TELLING_SECONDS)
        return self.take_error(generation, rebuild_error(*json.loads(said)))

    def explain(
        self, generation: int, error: BrokenConnectionError, wait: Callable[[float], bool]
    ) -> ReshardError | BrokenConnectionError:
        """Why a connection broke, once others had the time to tell.

        A rank that loses one closes its others too. So who lost whom leads to the rank that lost none, and is gone.

        Args:
            wait: for so many seconds; true as soon as somebody has told.
        """
        loser, lost = self.group.rank, error.peer
        losers = {loser}
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self._store.set(f"broken/{generation}/{loser}", str(lost))
        if wait(SAY_SECONDS):
            return error
        with contextlib.suppress(RuntimeError):
            while lost not in losers and self._store.check([f"broken/{generation}/{lost}"]):
                losers.add(lost)
                loser, lost = lost, int(self._store.get(f"broken/{generation}/{lost}"))
        if lost in losers or loser == self.group.rank:
            return error
        return RemoteError(f"rank {loser} lost its connection to rank {lost}")

    def reported_error(self, generation: int) -> ReshardError | None:
        """The error that a member told of, if any."""
        key = f"error/{generation}"
        if not self._store.check([key]):
            lost = self.rendezvous.links.find_ended()
            if lost is None:
                return None
            return self.fail(generation, RemoteError(f"rank {lost} is gone: it closed its connection in a transfer"))
        return self.take_error(generation, rebuild_error(*json.loads(self._store.get(key))))

    def check_reported(self, generation: int) -> None:
        """Raise the error that a member told of, if any."""
        error = self.reported_error(generation)
        if error is not None:
            raise error

    def take_error(self, generation: int, error: ReshardError) -> ReshardError:
        """Mark a transport as finished; the next agreement makes a new one. Returns its first error."""
        if generation != self.generation or self._pid != os.getpid():
            return error
        if self.broken is None:
            self.broken = error
            if self._connections is not None and self._connections[0] == generation:
                self._connections[1].abort()
        return self.broken

    def find_failure(self, generation: int) -> ReshardError | None:
        """What ended the transport of a generation, if it is the current one."""
        return self.broken if generation == self.generation else None

    def check_usable(self, generation: int) -> None:
        """Raise unless the transport of this generation is the current one and works."""
        if generation != self.generation:
            raise RemoteError("an earlier error closed the connections of this Mover; make a new one")
        if self.broken is not None:
            raise self.broken


def find_channel(group: Group, members: tuple[int, ...]) -> Channel:
    """The channel of these ranks, ascending, made on first use.

    Raises:
        ArgumentError: a rank is outside the group, or this rank is not among them.
    """
    group.check_usable()
    check_inside(group, members)
    if group.rank not in members:
        note_skipped(group, members)
        raise ArgumentError(
            f"rank {group.rank} calls, but is in neither layout; only ranks {format_ranks(members)} take part"
        )
    with group.lock:
        if members not in group.channels:
            group.channels[members] = Channel(group, members)
        return group.channels[members]
