"""Call groups: the agreement rounds, error reports and transports that the ranks of one call share.

Only the ranks of the call take part. They agree in rounds (see :mod:`reshard.coordination.agreement_rounds`). The first
error of a transfer is published in the store, under ``u/<members>/error/<generation>``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from reshard.coordination.agreement_rounds import AgreementRounds
from reshard.coordination.groups.agreement_messages import (
    Decision,
    RoundRequest,
    describe_error,
    name_rank,
    parse_error,
)
from reshard.coordination.groups.process_group import Group, check_inside
from reshard.coordination.groups.store import ForeignValueError, StoreSilentError
from reshard.coordination.liveness.call_sequence import in_round, record_skipped
from reshard.coordination.liveness.heartbeat import Monitor
from reshard.coordination.liveness.lost_ranks import rank_closed_error, rank_unreachable_error
from reshard.coordination.liveness.status import find_late
from reshard.errors import ArgumentError, RemoteError, ReshardError, ResourceError, TransferTimeoutError
from reshard.formatting import describe_ranks, format_ranks
from reshard.plan import Plan
from reshard.runtime.cpu.staging import Staging
from reshard.runtime.cuda.nccl_exchange import NcclExchange
from reshard.runtime.cuda.nccl_library import NcclError
from reshard.runtime.program import RankProgram
from reshard.runtime.rounds.round_assignment import Round
from reshard.runtime.rounds.runner import RoundRunner
from reshard.runtime.transport import BrokenConnectionError, Connections, GlooTransport

#: Timeout for publishing an error.
REPORT_SECONDS = 1.0
#: Grace period after a broken connection for another rank to report the root cause.
GLOO_ROOT_CAUSE_GRACE_SECONDS = 0.6
#: Grace period after a broken NCCL communicator for another rank to report the root cause. NCCL does not name the rank
#: that is gone.
NCCL_ROOT_CAUSE_GRACE_SECONDS = 2.0
#: Maximum number of cached plans per call group.
MAX_CACHED = 32


class CallGroup:
    """The ranks of one call, ascending; one per group and set of ranks."""

    def __init__(self, group: Group, members: tuple[int, ...]) -> None:
        self._group, self.members = weakref.ref(group), members
        self._pid = os.getpid()
        self.key = hashlib.sha256(repr(members).encode()).hexdigest()[:20]
        self._store = group.store.under(f"u/{self.key}")
        self._lock, self._aborting = threading.RLock(), threading.RLock()
        self.rounds = AgreementRounds(group, members, self._store)
        self.transfers = 0  # number of fault-tolerant transfers
        self.num_started = 0  # transfers started on a GPU
        self.generation = 0
        self.broken: ReshardError | None = None
        # hash of the plan of the last call, and its buffers, which the next call with that plan reuses
        self.idle_staging: tuple[str, Staging] | None = None
        self.idle_runner: RoundRunner | None = None  # of the last call between devices
        self._connections: tuple[int, Connections] | None = None  # (generation, connections)
        self.cache: OrderedDict[str, tuple[Plan, RankProgram, RoundRunner | None]] = OrderedDict()  # of earlier calls

    @property
    def group(self) -> Group:
        """The group of these ranks. The call group holds only a weak reference, so that the group can be collected."""
        group = self._group()
        if group is None:
            raise ArgumentError("the group of this transfer was garbage-collected: keep a reference to it")
        return group

    def agree(
        self,
        request: RoundRequest,
        decide: Callable[[list[RoundRequest]], Decision],
        timeout_seconds: float,
        fault_tolerant: bool = False,
    ) -> tuple[int, Decision]:
        """One round, see :meth:`reshard.coordination.agreement_rounds.AgreementRounds.run`.

        Returns:
            The round number and the decision, which holds no error.
        """
        self.group.check_usable()
        with self._lock, in_round(self.group):
            request = replace(request, generation=self.generation + (self.broken is not None))
            try:
                decision = self.rounds.run(request, decide, timeout_seconds, fault_tolerant)
            except ReshardError:
                raise
            except BaseException as error:  # the others may have the decision, and connect or transfer already
                self.fail(
                    request.generation, RemoteError(f"rank {self.group.rank} left a call: {type(error).__name__}")
                )
                raise
            if decision.generation != self.generation:
                self.generation, self.broken = decision.generation, None
            return decision.round, decision

    # Transfers

    def begin_close(self) -> None:
        """Begin to close the connections between devices, without waiting."""
        if self._connections is not None:
            self._connections[1].begin_close()

    def close(self) -> None:
        """Say goodbye to the other ranks and close all connections; the call group cannot be used afterwards."""
        self.rounds.links.close()
        if self._connections is not None:
            self._connections[1].close()
        if self.idle_runner is not None:
            self.idle_runner.release()
        self._connections, self.idle_staging, self.idle_runner = None, None, None
        self.cache.clear()

    def transport(self, generation: int, both_ways: bool, timeout_seconds: float) -> GlooTransport | None:
        """The transport of this generation, which all members create together; None for a single rank."""
        if len(self.members) == 1:
            return None
        check_error = functools.partial(self.check_reported, generation)
        return self._connect(generation, lambda opened: opened.transport(both_ways, timeout_seconds, check_error))

    def exchange(
        self, generation: int, device: torch.device, number: int, rounds: Sequence[Round], timeout_seconds: float
    ) -> NcclExchange | None:
        """Like :meth:`transport`, between devices.

        Args:
            number: number of the communicator to use.
            rounds: the ranks that exchange messages in them are connected.
        """
        if len(self.members) == 1:
            return None
        check_error = functools.partial(self.check_reported, generation)

        def connect(connections: Connections) -> NcclExchange:
            exchange = connections.exchange(device, number, timeout_seconds, check_error)
            exchange.connect(self.group.rank, rounds, timeout_seconds, check_error)
            return exchange

        return self._connect(generation, connect)

    def collectives(self, generation: int, device: torch.device, timeout_seconds: float) -> Any:
        """A ``torch.distributed`` backend for collectives of all members, made like :meth:`transport`."""
        if len(self.members) == 1:
            return None
        check_error = functools.partial(self.check_reported, generation)
        return self._connect(generation, lambda opened: opened.collectives(device, timeout_seconds, check_error))

    def _connect(self, generation: int, connect: Callable[[Connections], Any]) -> Any:
        self.group.check_usable()
        with self._lock:
            if self._connections is None or self._connections[0] != generation:
                if self._connections is not None:
                    self._connections[1].close()
                store = dist.PrefixStore(f"gloo/{generation}", self._store.raw)
                self._connections = generation, Connections(store, self.group.rank, self.members)
            try:
                Monitor.of(self.group)
                return connect(self._connections[1])
            except ResourceError as error:
                raise self.fail(generation, error) from None
            except ReshardError:
                raise
            except TimeoutError as error:
                raise self.fail(generation, TransferTimeoutError(f"cannot connect: {error}")) from error
            except Exception as error:  # the other ranks wait for this one, whatever went wrong
                deadline = time.monotonic() + _root_cause_seconds(error)
                while time.monotonic() < deadline:
                    self.check_reported(generation)
                    time.sleep(0.05)
                raise self.fail(generation, ConnectionError(f"cannot connect: {error}")) from error

    def fail(self, generation: int, error: BaseException) -> ReshardError:
        """Publish that a transfer failed; returns the first published error, which all members raise."""
        name, text = describe_error(error)
        first = json.dumps([name, name_rank(self.group.rank, text)]).encode()
        key = f"error/{generation}"
        with contextlib.suppress(RuntimeError):  # the store may be lost
            first = self._store.compare_set(key, "", first.decode(), REPORT_SECONDS)
        return self.record_error(generation, self._parse_error(key, first))

    def _parse_error(self, key: str, text: bytes) -> ReshardError:
        try:
            return self._store.parse(key, text, parse_error)
        except ForeignValueError as error:
            return ArgumentError(f"rank {self.group.rank}: {error}")

    def find_root_cause(
        self, generation: int, error: BrokenConnectionError, wait: Callable[[float], bool]
    ) -> ReshardError | BrokenConnectionError:
        """The root cause of a broken connection, after a grace period for another rank to report it.

        A rank that loses a connection closes its others too. So follow the reports from each rank to the rank that it
        lost. The chain ends at a rank that lost none: the dead rank.

        Args:
            wait: waits for a number of seconds; returns true early if an error is reported.
        """
        loser, lost = self.group.rank, error.peer
        losers = {loser}
        with contextlib.suppress(RuntimeError):  # the store may be lost
            self._store.set(f"broken/{generation}/{loser}", str(lost))
        if wait(GLOO_ROOT_CAUSE_GRACE_SECONDS):
            return error
        with contextlib.suppress(RuntimeError):
            while lost not in losers and self._store.check([f"broken/{generation}/{lost}"]):
                losers.add(lost)
                loser, lost = lost, self._store.read(f"broken/{generation}/{lost}", int)
        if self.rounds.links.find_lost() == lost:
            return rank_closed_error(lost)
        if lost in losers:
            return error
        how = str(error) if loser == self.group.rank else f"rank {loser} lost its connection to it"
        return rank_unreachable_error(lost, how)

    def reported_error(self, generation: int) -> ReshardError | None:
        """The error that a member reported, if any."""
        key = f"error/{generation}"
        if not self._store.check([key]):
            lost = self.rounds.links.find_lost()
            if lost is None:
                return None
            return self.fail(generation, rank_closed_error(lost))
        return self.record_error(generation, self._parse_error(key, self._store.get(key)))

    def explain_timeout(self, number: int) -> str:
        """The members that have not started the GPU transfer with this ``number``, as text."""
        others = [rank for rank in self.members if rank != self.group.rank]
        try:
            late = find_late(self.group.store, others, self.key, number)
        except RuntimeError:  # the store may be lost
            return ""
        if late:
            return f": it waits for {describe_ranks(late)}, which {'have' if len(late) > 1 else 'has'} not started it"
        return ": all ranks have started it, so a device or the network stands still, or ranks differ in their order"

    def check_reported(self, generation: int) -> None:
        """Raise the error that a member reported, if any. If the store does not answer, none is known yet."""
        with contextlib.suppress(StoreSilentError):
            error = self.reported_error(generation)
            if error is not None:
                raise error

    def record_error(self, generation: int, error: ReshardError) -> ReshardError:
        """Mark the transport of a generation as failed; the next agreement makes a new one. Returns its first error.

        It returns after the transport has been aborted, by whichever thread: nothing arrives in an array any more.
        """
        if generation != self.generation or self._pid != os.getpid():
            return error
        with self._aborting:
            if self.broken is None:
                self.broken = error
                self.rounds.links.reason = describe_error(error)
                if self._connections is not None and self._connections[0] == generation:
                    self._connections[1].abort()
            return self.broken

    def find_failure(self, generation: int) -> ReshardError | None:
        """The error that ended the transport of a generation, if that is the current one."""
        return self.broken if generation == self.generation else None

    def check_usable(self, generation: int) -> None:
        """Raise unless the transport of this generation is current and has not failed."""
        if generation != self.generation:
            raise RemoteError("an earlier error closed the connections of this Mover; make a new one")
        if self.broken is not None:
            raise self.broken


def _root_cause_seconds(error: Exception) -> float:
    """The time in which another rank may still report why it closed its connections.

    Args:
        error: the error of this rank, which was connecting.
    """
    if isinstance(error, NcclError):
        return NCCL_ROOT_CAUSE_GRACE_SECONDS
    return (
        GLOO_ROOT_CAUSE_GRACE_SECONDS if "gloo/transport/" in str(error) else 0.0
    )  # the file of Gloo that raised the error


def find_call_group(group: Group, members: tuple[int, ...]) -> CallGroup:
    """The call group of these ranks, ascending; created on first use.

    Raises:
        ArgumentError: a rank is outside the group, or this rank is not a member.
    """
    group.check_usable()
    check_inside(group, members)
    if group.rank not in members:
        record_skipped(group, members)
        raise ArgumentError(
            f"rank {group.rank} calls but is in neither layout; only ranks {format_ranks(members)} take part"
        )
    with group.lock:
        if members not in group.call_groups:
            group.call_groups[members] = CallGroup(group, members)
        return group.call_groups[members]
