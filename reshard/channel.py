"""What the ranks of one call share: agreement rounds, errors told to all, and the transport between them.

Only the ranks of the call take part. In a round every member says its record to the first one, which decides and
answers (see :mod:`reshard.control`). What must be found without a connection is in the store:

``u/<members>/hub``                where the first member listens
``told/<rank>/<attempt>``          an error for a rank that waits where nobody will come
``u/<members>/error/<generation>`` the first error of a transfer, told to all
``beacon/<rank>``                  what a rank is waiting for, or why it gave up, for ranks that wait for it in vain
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from reshard.agreement import Record, Verdict, describe_error, missing_error, name_rank, rebuild_error
from reshard.beacon import Pulses, is_blamed, publish_beacon
from reshard.control import Hub, Spoke
from reshard.errors import ArgumentError, RemoteError, ReshardError
from reshard.failures import HasLeftError, SkippedError, count_calls, find_behind, forgive, give_up, note_skipped
from reshard.group import Group, check_inside
from reshard.lookout import find_elsewhere
from reshard.mesh import format_ranks
from reshard.monitor import Monitor, call_at_exit
from reshard.stores import StoreSilentError
from reshard.transport import Connections, GlooTransport, GroupExchange

#: After this long in a round, a rank says what it waits for and looks at what the others wait for.
PATIENCE_SECONDS = 0.2
TELLING_SECONDS = 1.0  # how long an error may take to be told
MAX_CACHED = 32


class Channel:
    """The ranks of one call, ascending; made once per group and set of ranks."""

    def __init__(self, group: Group, members: tuple[int, ...]) -> None:
        self.group, self.members = group, members
        digest = hashlib.sha256(repr(members).encode()).hexdigest()[:20]
        self._store = group.store.under(f"u/{digest}")
        self._lock = threading.RLock()
        self.calls = 0  # rounds in which this rank took part
        self.answered: dict[int, int] = {}  # of each member the last attempt that was answered
        self._rounds = 0
        self.generation = 0
        self.broken: ReshardError | None = None
        self.idle_staging: Any = None  # of the last call, for the next one of the same plan
        self.idle_runner: Any = None  # the same between devices
        self._blamed: set[int] = set()  # ranks that are gone as far as the store tells
        self._pulses = Pulses(group.store)
        self._hub: Hub | None = None
        self._spoke: Spoke | None = None
        self._connections: tuple[int, Connections] | None = None  # of a generation
        self.cache: OrderedDict[Any, Any] = OrderedDict()

    # Agreement

    def agree(
        self,
        record: Record,
        decide: Callable[[list[Record]], Verdict],
        timeout_seconds: float,
        bears_loss: bool = False,
    ) -> tuple[int, Verdict]:
        """One round: every member says its record, and all take the same verdict.

        Args:
            record: what this rank says. decide: what follows from all records; run on the first member.
            bears_loss: go on without members that die or do not come in time; the verdict says who is lost.

        Returns:
            The number of the round and the verdict, which holds no error.

        Raises:
            The error of the verdict, alike on all ranks; TransferTimeoutError if members are missing.
        """
        with self._lock:
            self.calls += 1
            deadline = time.monotonic() + timeout_seconds
            verdict = self._meet(record, decide, deadline, timeout_seconds, bears_loss)
            while verdict.behind and self.group.rank not in verdict.behind:  # those have left their call now
                verdict = self._meet(record, decide, deadline, timeout_seconds, bears_loss)
            verdict.lost = [int(rank) for rank in verdict.lost]
            verdict.said = {int(rank): one for rank, one in verdict.said.items()}
            verdict.hostnames = {int(rank): name for rank, name in verdict.hostnames.items()}
            self.answered.update({int(rank): attempt for rank, attempt in verdict.attempts.items()})
            forgive(self.group, verdict.skipped)
            if verdict.behind:
                give_up(self.group, self.members, verdict)
            verdict.raise_error()
            if verdict.generation != self.generation:
                self.generation, self.broken = verdict.generation, None
            return verdict.round, verdict

    def _meet(
        self,
        record: Record,
        decide: Callable[[list[Record]], Verdict],
        deadline: float,
        timeout_seconds: float,
        bears_loss: bool,
    ) -> Verdict:
        """What all take from one round."""
        self.group.attempts += 1
        record.attempt = self.group.attempts
        record.generation = self.generation + (self.broken is not None)
        count_calls(record, self.group, self.members)
        try:
            if self.group.rank == self.members[0]:
                return self._gather(record, decide, deadline, timeout_seconds, bears_loss)
            return self._ask(record, deadline, timeout_seconds, bears_loss)
        except RuntimeError as error:
            if isinstance(error, ReshardError):
                raise
            raise RemoteError(f"rank {self.group.rank}: the store is lost: {error}") from error
        finally:
            self._say(None)

    def _gather(
        self,
        record: Record,
        decide: Callable[[list[Record]], Verdict],
        deadline: float,
        timeout_seconds: float,
        bears_loss: bool,
    ) -> Verdict:
        """The first member: wait for all records, decide, answer."""
        others = self.members[1:]
        if not others:
            verdict = decide([record])
            verdict.attempts = {record.rank: record.attempt}
            return verdict
        if self._hub is None:
            self._hub = Hub(self._store, others, timeout_seconds)
            self._close_at_exit()
        hub = self._hub
        hub.pump(0.0)  # who left before this round began does not take part in it
        hub.waits = True

        def missing() -> list[int]:
            gone = self.find_dead() if bears_loss else ()
            return [rank for rank in others if rank not in hub.pending and rank not in gone]

        try:
            try:
                self._wait(record, hub.pump, lambda: not missing(), missing, deadline, bears_loss)
            except TimeoutError:
                if not bears_loss:
                    raise
            hub.pump(0.0)  # somebody may have given up while the last one came
            came = {rank: Record.from_json(hub.pending[rank][1]) for rank in others if rank in hub.pending}
            came[record.rank] = record
            records = [came[rank] for rank in self.members if rank in came]
            verdict = find_behind(records, self.members) or decide(records)
            verdict.attempts = {said.rank: said.attempt for said in records}
        except TimeoutError:
            verdict = Verdict(error=missing_error(missing(), self.members, timeout_seconds))
        except HasLeftError as error:
            verdict = error.verdict
            verdict.behind = [
                rank
                for rank, left in zip(self.members, record.left, strict=True)
                if rank == record.rank or (rank in hub.pending and hub.pending[rank][1]["left"][0] <= left)
            ]
        except SkippedError as error:
            verdict = error.verdict
        except Exception as error:  # a defect in deciding must reach the others too
            verdict = Verdict(error=describe_error(error))
        self._rounds += 1
        verdict.round = self._rounds
        hub.waits = False
        hub.answer(verdict.__dict__)
        return verdict

    def _ask(self, record: Record, deadline: float, timeout_seconds: float, bears_loss: bool) -> Verdict:
        """Any other member: say the record, wait for the answer."""
        hub = self.members[0]
        said = False
        deadline += 1.0 if bears_loss else 2.0  # the first member gives up earlier than the others, and says so
        try:
            if self._spoke is None:
                self._wait(record, _sleep, lambda: self._store.shows("hub"), lambda: [hub], deadline, bears_loss)
                try:
                    self._spoke = Spoke.connect(self._store, self.group.rank, hub, deadline - time.monotonic())
                except RemoteError as error:
                    raise (EOFError(str(error)) if bears_loss else error) from None
                self._close_at_exit()
            spoke = self._spoke
            spoke.say(record.to_json())
            said = True
            self._wait(record, spoke.pump, lambda: spoke.answer is not None, lambda: [hub], deadline, bears_loss)
            return Verdict(**spoke.take_answer())
        except EOFError as error:
            if bears_loss:
                return Verdict(lost=[hub], generation=record.generation)
            return Verdict(error=("RemoteError", f"rank {self.group.rank} lost its connection to rank {hub}: {error}"))
        except TimeoutError:
            if bears_loss:
                verdict = Verdict(lost=[hub], generation=record.generation)
            else:
                verdict = Verdict(error=missing_error([hub], self.members, timeout_seconds))
        except (HasLeftError, SkippedError) as error:
            verdict = error.verdict
        except ReshardError as error:
            verdict = Verdict(error=describe_error(error))
        if said and self._spoke is not None:  # so that the first member does not go on without this rank
            record.error = verdict.error
            with contextlib.suppress(EOFError):
                self._spoke.leave(None if verdict.behind else record.to_json())
        return verdict

    def _wait(
        self,
        record: Record,
        pump: Callable[[float], None],
        come: Callable[[], bool],
        absent: Callable[[], list[int]],
        deadline: float,
        bears_loss: bool,
    ) -> None:
        """Pump until ``come()``, now and then looking around for those who are absent.

        Raises:
            TimeoutError: the deadline passed. ReshardError: what is waited for cannot come.
        """
        begun = looked = time.monotonic()
        while not come():
            if (now := time.monotonic()) >= deadline:
                raise TimeoutError
            if now - looked >= PATIENCE_SECONDS:
                looked = now
                self._say({"members": list(self.members), "attempt": record.attempt})
                with contextlib.suppress(StoreSilentError):  # look again later
                    self._hear(record, bears_loss)
                    for rank in absent():
                        self._look_for(rank, record, bears_loss)
            pump(min(PATIENCE_SECONDS, deadline - now, max(0.0005, 0.1 * (now - begun)) if pump is _sleep else 1.0))

    # What ranks find in the store when they wait in vain

    def _say(self, waiting: dict[str, Any] | None) -> None:
        if self.group.beacon["waiting"] != waiting:
            self.group.beacon["waiting"] = waiting
            publish_beacon(self.group)

    def _hear(self, record: Record, bears_loss: bool) -> None:
        """Raise what another rank left for this attempt, or that a connection is lost."""
        key = f"told/{self.group.rank}/{record.attempt}"
        if self.group.store.check([key]):
            raise rebuild_error(*json.loads(self.group.store.get(key)))
        if self._hub is not None and self._hub.gone and not bears_loss:
            rank, why = next(iter(self._hub.gone.items()))
            raise RemoteError(f"rank {rank} is gone: {why}")

    def _look_for(self, rank: int, record: Record, bears_loss: bool) -> None:
        """Raise if ``rank`` waits for us elsewhere, or gave up in the same call."""
        key = f"beacon/{rank}"
        beacon = json.loads(self.group.store.get(key)) if self.group.store.check([key]) else None
        if bears_loss and self._is_gone(rank, beacon):
            self._blamed.add(rank)
            if rank == self.members[0]:
                raise EOFError(f"rank {rank} is gone")
            return
        if beacon is None:
            return
        find_elsewhere(self.group, self.members, rank, beacon, bears_loss)

    def _is_gone(self, rank: int, beacon: dict[str, Any] | None) -> bool:
        """Whether a rank that does not come never will: somebody said so, or it has no connection and no pulse."""
        if beacon is not None and is_blamed(beacon):
            return True
        if self._spoke is not None or (self._hub is not None and self._hub.has(rank)):
            return False
        return self._pulses.is_silent(rank)

    def find_dead(self) -> list[int]:
        """Ranks that are gone, as far as the connections of the first member tell, or somebody else."""
        return sorted(self._blamed | set(() if self._hub is None else self._hub.gone))

    # Transfers

    def _close_at_exit(self) -> None:
        _open.add(self)
        call_at_exit(_close_all, priority=10)

    def close(self) -> None:
        """Say goodbye to the other ranks; only at the end of the process, the channel is not usable after."""
        for end in (self._hub, self._spoke):
            if end is not None:
                end.close()

    def transport(self, generation: int, is_two_way: bool, timeout_seconds: float) -> GlooTransport | None:
        """A transport of this generation, made by all members together; None for one rank."""
        if len(self.members) == 1:
            return None
        return self._connect(generation, lambda made: made.transport(is_two_way, timeout_seconds))

    def exchange(
        self, generation: int, device: torch.device, number: int, timeout_seconds: float
    ) -> GroupExchange | None:
        """As :meth:`transport`, between devices, on the communicator with a number."""
        if len(self.members) == 1:
            return None
        return self._connect(generation, lambda made: made.exchange(device, number, timeout_seconds))

    def _connect(self, generation: int, ask: Callable[[Connections], Any]) -> Any:
        with self._lock:
            if self._connections is None or self._connections[0] != generation:
                Monitor.of(self.group)
                store = dist.PrefixStore(f"gloo/{generation}", self._store.raw)
                self._connections = generation, Connections(store, self.group.rank, self.members)
            try:
                return ask(self._connections[1])
            except RuntimeError as error:
                raise self.fail(generation, ConnectionError(f"cannot connect: {error}")) from error

    def fail(self, generation: int, error: BaseException) -> ReshardError:
        """Tell all members that a transfer failed; returns the error that they all take, the first one told."""
        name, text = describe_error(error)
        said: str | bytes = json.dumps([name, name_rank(self.group.rank, text)])
        with contextlib.suppress(RuntimeError):  # the store may be gone
            said = self._store.compare_set(f"error/{generation}", "", str(said), TELLING_SECONDS)
        return self.take_error(generation, rebuild_error(*json.loads(said)))

    def told_error(self, generation: int) -> ReshardError | None:
        """The error that a member told of, if any."""
        key = f"error/{generation}"
        if not self._store.check([key]):
            lost = self._lost()
            if lost is None:
                return None
            return self.fail(generation, RemoteError(f"rank {lost} is gone: it closed its connection in a transfer"))
        return self.take_error(generation, rebuild_error(*json.loads(self._store.get(key))))

    def _lost(self) -> int | None:
        """A member whose process has ended, as far as this rank's connections tell."""
        if self._hub is not None:
            return self._hub.lost()
        if self._spoke is not None and self._spoke.is_lost():
            return self.members[0]
        return None

    def take_error(self, generation: int, error: ReshardError) -> ReshardError:
        """Mark a transport as finished; the next agreement makes a new one. Returns its first error."""
        if generation != self.generation:
            return error
        if self.broken is None:
            self.broken = error
            if self._connections is not None and self._connections[0] == generation:
                self._connections[1].abort()
        return self.broken

    def check_usable(self, generation: int) -> None:
        """Raise unless the transport of this generation is the current one and works."""
        if generation != self.generation:
            raise RemoteError("an earlier error closed the connections of this Mover; make a new one")
        if self.broken is not None:
            raise self.broken


#: Channels with connections, to be closed in order at the end of the process.
_open: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_all() -> None:
    for channel in list(_open):
        channel.close()


_sleep = time.sleep


def find_channel(group: Group, members: tuple[int, ...]) -> Channel:
    """The channel of these ranks, ascending, made on first use.

    Raises:
        ArgumentError: a rank is outside the group, or this rank is not among them.
    """
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
