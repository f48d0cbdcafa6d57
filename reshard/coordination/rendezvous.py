"""Rounds in which the ranks of a call say what they have, one of them decides, and all hear the same.

Every member says its record to the first one, which decides and answers (see
:mod:`reshard.coordination.control_channel`).

The first member waits no longer than anybody's time-out: a rank whose time is up says so, and leaves only if that is
not answered. Whoever leaves alone marks the ranks as out of step (see :mod:`reshard.coordination.liveness.membership`).
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from reshard.coordination.control_channel import DeadlineError, Hub, Spoke
from reshard.coordination.decide import Record, Verdict, describe_error, missing_error, rebuild_error
from reshard.coordination.descriptors import check_room, is_shortage, out_of_descriptors
from reshard.coordination.liveness.call_sequence import (
    HasLeftError,
    LeavingError,
    count_calls,
    find_behind,
    forgive,
    give_up,
    tell_error,
)  # fmt: skip
from reshard.coordination.liveness.failure_detector import explain_loss, find_elsewhere
from reshard.coordination.liveness.heartbeat import call_at_exit
from reshard.coordination.liveness.membership import OutcastError, check_together, find_mixed, go_on_without, lose_step
from reshard.coordination.liveness.status import Pulses, is_blamed, publish_beacon
from reshard.coordination.process_group import Group
from reshard.coordination.store import Store, StoreSilentError
from reshard.errors import RemoteError, ReshardError, ResourceError
from reshard.formatting import format_ranks

#: After this long in a round, a rank says what it waits for and looks at what the others wait for.
PATIENCE_SECONDS = 0.2
#: How long a rank whose time is up waits for the first one to say so to all; less where it goes on without that one.
ANSWER_SECONDS, BORNE_ANSWER_SECONDS = 1.5, 1.0


@dataclass
class _Round:
    """What one rank brings to a round; see :meth:`Meeting.hold`."""

    record: Record
    decide: Callable[[list[Record]], Verdict]
    timeout_seconds: float
    bears_loss: bool

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.timeout_seconds


class Meeting:
    """The rounds of one set of ranks, ascending."""

    def __init__(self, group: Group, members: tuple[int, ...], store: Store) -> None:
        self._group, self.members = weakref.ref(group), members
        self._store = store
        self.rounds = 0  # in which this rank took part
        self.answered: dict[int, int] = {}  # of each member the last attempt that was answered
        self._number = 0  # of the last round that this rank decided
        self._blamed: set[int] = set()  # ranks that are gone as far as the store tells
        self._pulses = Pulses(group.store)
        self._hub: Hub | None = None
        self._spoke: Spoke | None = None

    @property
    def group(self) -> Group:
        """Whose ranks these are; who calls keeps it."""
        group = self._group()
        assert group is not None
        return group

    def hold(
        self,
        record: Record,
        decide: Callable[[list[Record]], Verdict],
        timeout_seconds: float,
        bears_loss: bool,
    ) -> Verdict:
        """One round: every member says its record, and all take the same verdict.

        Args:
            record: what this rank says. decide: what follows from all records; run on the first member.
            bears_loss: go on without members that die or do not come in time; the verdict says who is lost.

        Raises:
            The error of the verdict, alike on all ranks; TransferTimeoutError if members are missing.
        """
        check_together(self.group, self.members, bears_loss)
        self._check_room()
        self.rounds += 1
        brought = _Round(record, decide, timeout_seconds, bears_loss)
        try:
            verdict = self._meet(brought)
            while verdict.behind and self.group.rank not in verdict.behind:  # those have left their call now
                verdict = self._meet(brought)
        except ReshardError:
            raise
        except BaseException as error:  # an interrupt, say: the others are still in this round
            self._leave(record, f"rank {self.group.rank} left a call: {type(error).__name__}")
            raise
        verdict.lost = [int(rank) for rank in verdict.lost]
        verdict.said = {int(rank): one for rank, one in verdict.said.items()}
        verdict.hostnames = {int(rank): name for rank, name in verdict.hostnames.items()}
        self.answered.update({int(rank): attempt for rank, attempt in verdict.attempts.items()})
        forgive(self.group, verdict.skipped)
        go_on_without(self.group, verdict.lost)
        if verdict.behind:
            self.group.gave_up = True
            give_up(self.group, self.members, verdict)
        if verdict.loses_step:
            lose_step(self.group, self.members, verdict.loses_step)
        verdict.raise_error()
        return verdict

    def _check_room(self) -> None:
        """Raise ResourceError, of which the others hear, if this rank may not open the connections of its rounds."""
        is_hub = self.group.rank == self.members[0]
        if len(self.members) == 1 or (self._hub if is_hub else self._spoke) is not None:
            return
        try:
            needed = len(self.members) if is_hub else 1
            check_room(self.group.rank, needed, f"meeting ranks {format_ranks(self.members)}")
        except ResourceError as error:
            tell_error(self.group, error)
            self.group.gave_up = True  # as those that hear of it do
            raise

    def _leave(self, record: Record, why: str) -> None:
        """Leave a round that the others are in, or may come to."""
        lose_step(self.group, self.members, why)
        if self._spoke is not None:
            with contextlib.suppress(EOFError, DeadlineError):
                self._spoke.leave(replace(record, error=("RemoteError", why)).to_json())
        if self._hub is not None:
            self._hub.waits = False
            self._hub.answer(Verdict(error=("RemoteError", why), loses_step=why).__dict__)

    def _meet(self, brought: _Round) -> Verdict:
        """What all take from one round."""
        self.group.attempts += 1
        self.group.last_members = self.members
        brought.record.attempt = self.group.attempts
        count_calls(brought.record, self.group, self.members)
        try:
            return self._gather(brought) if self.group.rank == self.members[0] else self._ask(brought)
        except RuntimeError as error:
            if isinstance(error, ReshardError):
                raise
            raise RemoteError(f"rank {self.group.rank}: the store is lost: {error}") from error
        finally:
            self._say(None)

    def _gather(self, brought: _Round) -> Verdict:
        """The first member: wait for all records, decide, answer."""
        record, bears_loss = brought.record, brought.bears_loss
        others = self.members[1:]
        if not others:
            verdict = brought.decide([record])
            verdict.attempts = {record.rank: record.attempt}
            return verdict
        if self._hub is None:
            try:
                self._hub = Hub.listen(self._store, self.group.rank, others, brought.timeout_seconds)
            except ReshardError as error:
                lose_step(self.group, self.members, str(error))
                raise
            _close_at_exit(self)
        hub = self._hub

        def missing() -> list[int]:
            gone = self.find_dead() if bears_loss else ()
            return [rank for rank in others if rank not in hub.pending and rank not in gone]

        def pump(seconds: float) -> None:
            hub.pump(seconds)
            if hub.hurried and missing():
                raise DeadlineError

        try:
            hub.drain()  # who left before this round began does not take part in it
            hub.waits = True
            try:
                self._wait(brought, pump, lambda: not missing(), missing, brought.deadline)
            except DeadlineError:
                if not bears_loss:
                    raise
            hub.drain()  # somebody may have given up while the last one came
            came = {rank: Record.from_json(hub.pending[rank][1]) for rank in others if rank in hub.pending}
            came[record.rank] = record
            records = [came[rank] for rank in self.members if rank in came]
            verdict = find_behind(records, self.members) or find_mixed(records) or brought.decide(records)
            verdict.attempts = {said.rank: said.attempt for said in records}
        except DeadlineError:
            verdict = self._miss(missing(), brought.timeout_seconds)
        except HasLeftError as error:
            verdict = error.verdict
            verdict.behind = [
                rank
                for rank, left in zip(self.members, record.left, strict=True)
                if rank == record.rank or (rank in hub.pending and hub.pending[rank][1]["left"][0] <= left)
            ]
        except OutcastError as error:
            verdict = error.verdict
            if bears_loss:  # those who wait here have yet to hear that this rank is lost
                hub.waits = False
                hub.answer(Verdict(lost=[record.rank], generation=record.generation).__dict__)
        except LeavingError as error:
            verdict = error.verdict
            verdict.generation = max(verdict.generation, record.generation)
        except OSError as error:  # those that this rank cannot let in find it in the store
            if not is_shortage(error):
                raise
            known = out_of_descriptors(record.rank, f"meeting ranks {format_ranks(self.members)}")
            verdict = Verdict(error=describe_error(known), loses_step=str(known))
        except ReshardError as error:
            verdict = Verdict(error=describe_error(error))
        self._number += 1
        verdict.round = self._number
        hub.waits = False
        hub.answer(verdict.__dict__)
        return verdict

    def _ask(self, brought: _Round) -> Verdict:
        """Any other member: say the record, wait for the answer."""
        record, bears_loss = brought.record, brought.bears_loss
        hub = self.members[0]
        said = False
        last = brought.deadline + (BORNE_ANSWER_SECONDS if bears_loss else ANSWER_SECONDS)
        try:
            if self._spoke is None:
                self._wait(brought, time.sleep, lambda: self._store.shows("hub"), lambda: [hub], last)
                try:
                    self._spoke = Spoke.connect(self._store, self.group.rank, hub, last - time.monotonic())
                except ResourceError as error:
                    lose_step(self.group, self.members, str(error))
                    raise
                except RemoteError as error:
                    if bears_loss:
                        raise EOFError(str(error)) from None
                    self._look_for(hub, bears_loss)  # it may have published why it left
                    raise
                _close_at_exit(self)
            spoke = self._spoke
            spoke.say(record.to_json(), last - time.monotonic())
            said = True
            try:
                self._wait(brought, spoke.pump, lambda: spoke.answer is not None, lambda: [hub], brought.deadline)
            except DeadlineError:
                spoke.hurry()
                self._wait(brought, spoke.pump, lambda: spoke.answer is not None, lambda: [hub], last)
            return Verdict(**spoke.take_answer())
        except EOFError as error:
            if bears_loss:
                return Verdict(lost=[hub], generation=record.generation)
            text = f"rank {self.group.rank} lost its connection to rank {hub}: {error}"
            return explain_loss(lambda: self._look_for(hub, bears_loss=False), text)
        except DeadlineError:
            if bears_loss and self._spoke is None and not self._store.answers():  # nor will anybody else be found
                text = f"rank {self.group.rank} hears neither rank {hub} nor the store; its host may be cut off"
                verdict = Verdict(error=("RemoteError", text))
            elif bears_loss:
                verdict = Verdict(lost=[hub], generation=record.generation)
            else:
                verdict = self._miss([hub], brought.timeout_seconds)
        except LeavingError as error:
            verdict = error.verdict
            verdict.generation = max(verdict.generation, record.generation)
        except ReshardError as error:
            verdict = Verdict(error=describe_error(error))
        if said and self._spoke is not None:  # so that the first member does not go on without this rank
            told = replace(record, error=verdict.error)
            with contextlib.suppress(EOFError, DeadlineError):
                self._spoke.leave(None if verdict.behind or verdict.lost else told.to_json())
        return verdict

    def _miss(self, missing: list[int], timeout_seconds: float) -> Verdict:
        error = missing_error(missing, self.members, timeout_seconds)
        return Verdict(error=error, loses_step=error[1])

    def _wait(
        self,
        brought: _Round,
        pump: Callable[[float], None],
        come: Callable[[], bool],
        absent: Callable[[], list[int]],
        deadline: float,
    ) -> None:
        """Pump until ``come()``, now and then looking around for those who are absent.

        Raises:
            DeadlineError: the deadline passed. ReshardError, LeavingError: what is waited for cannot come.
        """
        begun = looked = time.monotonic()
        while not come():
            if (now := time.monotonic()) >= deadline:
                raise DeadlineError
            if now - looked >= PATIENCE_SECONDS:
                looked = now
                self._say({"members": list(self.members), "attempt": brought.record.attempt})
                with contextlib.suppress(StoreSilentError):  # look again later
                    self._hear(brought)
                    for rank in absent():
                        self._look_for(rank, brought.bears_loss)
            pump(min(PATIENCE_SECONDS, deadline - now, max(0.0005, 0.1 * (now - begun)) if pump is time.sleep else 1.0))

    # What ranks find in the store when they wait in vain

    def _say(self, waiting: dict[str, Any] | None) -> None:
        if self.group.beacon["waiting"] != waiting:
            self.group.beacon["waiting"] = waiting
            publish_beacon(self.group)

    def _hear(self, brought: _Round) -> None:
        """Raise what another rank left for this attempt, or that a connection is lost."""
        key = f"told/{self.group.rank}/{brought.record.attempt}"
        if self.group.store.check([key]):
            raise rebuild_error(*json.loads(self.group.store.get(key)))
        if self._hub is not None and self._hub.gone and not brought.bears_loss:
            rank, why = next(iter(self._hub.gone.items()))
            self._look_for(rank, bears_loss=False)  # it may have published why it left
            raise RemoteError(f"rank {rank} is gone: {why}")

    def _look_for(self, rank: int, bears_loss: bool) -> None:
        """Raise if ``rank`` waits for us elsewhere, gave up in the same call, or will not come any more."""
        key = f"beacon/{rank}"
        beacon = json.loads(self.group.store.get(key)) if self.group.store.check([key]) else None
        if bears_loss and self._is_gone(rank, beacon):
            self._blamed.add(rank)
            if rank == self.members[0]:
                raise EOFError(f"rank {rank} is gone")
            return
        if beacon is not None:
            find_elsewhere(self.group, self.members, rank, beacon, bears_loss)

    def _is_gone(self, rank: int, beacon: dict[str, Any] | None) -> bool:
        """Whether a rank that does not come never will: somebody said so, or it has no connection and no pulse."""
        if beacon is not None and is_blamed(beacon):
            return True
        if self._spoke is not None or any(each.meeting.reaches(rank) for each in [*self.group.channels.values()]):
            return False
        return self._pulses.is_silent(rank)

    def reaches(self, rank: int) -> bool:
        """Whether a connection of these rounds to a rank is open, so that its process is there."""
        if self._hub is not None:
            return self._hub.reaches(rank)
        return self._spoke is not None and rank == self.members[0] and not self._spoke.is_lost()

    def find_dead(self) -> list[int]:
        """Ranks that are gone, as far as the connections of the first member tell, or somebody else."""
        return sorted(self._blamed | set(() if self._hub is None else self._hub.gone))

    def find_ended(self) -> int | None:
        """A member whose process has ended, as far as this rank's connections tell, if there is one."""
        if self._hub is not None:
            return self._hub.lost()
        if self._spoke is not None and self._spoke.is_lost():
            return self.members[0]
        return None

    def find_left(self) -> int | None:
        """A member whose process has ended in order, as far as this rank's connections tell, if there is one."""
        if self._hub is not None:
            with contextlib.suppress(OSError):
                self._hub.drain()
            return self._hub.left()
        if self._spoke is not None:
            with contextlib.suppress(EOFError):
                self._spoke.pump(0.0)
            return self.members[0] if self._spoke.has_left else None
        return None

    def close(self) -> None:
        """Say goodbye to the other ranks; there are no rounds after it."""
        for end in (self._hub, self._spoke):
            if end is not None:
                end.close()


#: Those with connections, to be closed in order at the end of the process.
_open: weakref.WeakSet[Meeting] = weakref.WeakSet()


def _close_at_exit(meeting: Meeting) -> None:
    _open.add(meeting)
    call_at_exit(_close_all, priority=10)


def _close_all() -> None:
    for meeting in list(_open):
        meeting.close()
