"""Rounds in which the ranks of a call say what they have, one of them decides, and all hear the same.

Every member says its request to the first one, which decides and answers (see
:mod:`reshard.coordination.control_channel`).

The first member waits no longer than anybody's time-out: a rank whose time is up says so, and leaves only if that is
not answered. Whoever leaves alone marks the ranks as out of sync (see :mod:`reshard.coordination.liveness.membership`).
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
from reshard.coordination.decide import Decision, Request, describe_error, missing_error, rebuild_error
from reshard.coordination.descriptors import check_room, is_shortage, out_of_descriptors
from reshard.coordination.links import Links
from reshard.coordination.liveness.call_sequence import (
    HasLeftError,
    LeavingError,
    count_calls,
    find_behind,
    forgive,
    give_up,
    report_error,
)  # fmt: skip
from reshard.coordination.liveness.failure_detector import explain_loss, find_elsewhere
from reshard.coordination.liveness.membership import (
    MembershipError,
    check_together,
    find_mixed,
    go_on_without,
    mark_out_of_sync,
)
from reshard.coordination.liveness.status import Pulses, is_blamed, publish_status
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
    """What one rank brings to a round; see :meth:`Rendezvous.hold`."""

    request: Request
    decide: Callable[[list[Request]], Decision]
    timeout_seconds: float
    fault_tolerant: bool

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.timeout_seconds


class Rendezvous:
    """The rounds of one set of ranks, ascending."""

    def __init__(self, group: Group, members: tuple[int, ...], store: Store) -> None:
        self._group, self.members = weakref.ref(group), members
        self._store = store
        self.rounds = 0  # in which this rank took part
        self.answered: dict[int, int] = {}  # of each member the last attempt that was answered
        self._number = 0  # of the last round that this rank decided
        self._blamed: set[int] = set()  # ranks that are gone as far as the store tells
        self._pulses = Pulses(group.store)
        self.links = Links(members)

    @property
    def group(self) -> Group:
        """Whose ranks these are; who calls keeps it."""
        group = self._group()
        assert group is not None
        return group

    def hold(
        self,
        request: Request,
        decide: Callable[[list[Request]], Decision],
        timeout_seconds: float,
        fault_tolerant: bool,
    ) -> Decision:
        """One round: every member says its request, and all take the same decision.

        Args:
            request: what this rank says. decide: what follows from all requests; run on the first member.
            fault_tolerant: go on without members that die or do not come in time; the decision says who is lost.

        Raises:
            The error of the decision, alike on all ranks; TransferTimeoutError if members are missing.
        """
        check_together(self.group, self.members, fault_tolerant)
        self._check_room()
        self.rounds += 1
        brought = _Round(request, decide, timeout_seconds, fault_tolerant)
        try:
            decision = self._meet(brought)
            while decision.behind and self.group.rank not in decision.behind:  # those have left their call now
                decision = self._meet(brought)
        except ReshardError:
            raise
        except BaseException as error:  # an interrupt, say: the others are still in this round
            self._leave(request, f"rank {self.group.rank} left a call: {type(error).__name__}")
            raise
        decision.lost = [int(rank) for rank in decision.lost]
        decision.said = {int(rank): one for rank, one in decision.said.items()}
        decision.hostnames = {int(rank): name for rank, name in decision.hostnames.items()}
        self.answered.update({int(rank): attempt for rank, attempt in decision.attempts.items()})
        forgive(self.group, decision.skipped)
        go_on_without(self.group, decision.lost)
        if decision.behind:
            self.group.gave_up = True
            give_up(self.group, self.members, decision)
        if decision.out_of_sync:
            mark_out_of_sync(self.group, self.members, decision.out_of_sync)
        decision.raise_error()
        return decision

    def _check_room(self) -> None:
        """Raise ResourceError, of which the others hear, if this rank may not open the connections of its rounds."""
        is_hub = self.group.rank == self.members[0]
        if len(self.members) == 1 or (self.links.hub if is_hub else self.links.spoke) is not None:
            return
        try:
            needed = len(self.members) if is_hub else 1
            check_room(self.group.rank, needed, f"meeting ranks {format_ranks(self.members)}")
        except ResourceError as error:
            report_error(self.group, error)
            self.group.gave_up = True  # as those that hear of it do
            raise

    def _leave(self, request: Request, why: str) -> None:
        """Leave a round that the others are in, or may come to."""
        mark_out_of_sync(self.group, self.members, why)
        if self.links.spoke is not None:
            with contextlib.suppress(EOFError, DeadlineError):
                self.links.spoke.leave(replace(request, error=("RemoteError", why)).to_json())
        if self.links.hub is not None:
            self.links.hub.waits = False
            self.links.hub.answer(Decision(error=("RemoteError", why), out_of_sync=why).__dict__)

    def _meet(self, brought: _Round) -> Decision:
        """What all take from one round."""
        self.group.attempts += 1
        self.group.last_members = self.members
        brought.request.attempt = self.group.attempts
        count_calls(brought.request, self.group, self.members)
        try:
            return self._gather(brought) if self.group.rank == self.members[0] else self._ask(brought)
        except RuntimeError as error:
            if isinstance(error, ReshardError):
                raise
            raise RemoteError(f"rank {self.group.rank}: the store is lost: {error}") from error
        finally:
            self._say(None)

    def _gather(self, brought: _Round) -> Decision:
        """The first member: wait for all requests, decide, answer."""
        request, fault_tolerant = brought.request, brought.fault_tolerant
        others = self.members[1:]
        if not others:
            decision = brought.decide([request])
            decision.attempts = {request.rank: request.attempt}
            return decision
        if self.links.hub is None:
            try:
                self.links.hub = Hub.listen(self._store, self.group.rank, others, brought.timeout_seconds)
            except ReshardError as error:
                mark_out_of_sync(self.group, self.members, str(error))
                raise
            self.links.close_at_exit()
        hub = self.links.hub

        def missing() -> list[int]:
            gone = self.find_dead() if fault_tolerant else ()
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
                if not fault_tolerant:
                    raise
            hub.drain()  # somebody may have given up while the last one came
            came = {rank: Request.from_json(hub.pending[rank][1]) for rank in others if rank in hub.pending}
            came[request.rank] = request
            requests = [came[rank] for rank in self.members if rank in came]
            decision = find_behind(requests, self.members) or find_mixed(requests) or brought.decide(requests)
            decision.attempts = {said.rank: said.attempt for said in requests}
        except DeadlineError:
            decision = self._miss(missing(), brought.timeout_seconds)
        except HasLeftError as error:
            decision = error.decision
            decision.behind = [
                rank
                for rank, left in zip(self.members, request.left, strict=True)
                if rank == request.rank or (rank in hub.pending and hub.pending[rank][1]["left"][0] <= left)
            ]
        except MembershipError as error:
            decision = error.decision
            if fault_tolerant:  # those who wait here have yet to hear that this rank is lost
                hub.waits = False
                hub.answer(Decision(lost=[request.rank], generation=request.generation).__dict__)
        except LeavingError as error:
            decision = error.decision
            decision.generation = max(decision.generation, request.generation)
        except OSError as error:  # those that this rank cannot let in find it in the store
            if not is_shortage(error):
                raise
            known = out_of_descriptors(request.rank, f"meeting ranks {format_ranks(self.members)}")
            decision = Decision(error=describe_error(known), out_of_sync=str(known))
        except ReshardError as error:
            decision = Decision(error=describe_error(error))
        self._number += 1
        decision.round = self._number
        hub.waits = False
        hub.answer(decision.__dict__)
        return decision

    def _ask(self, brought: _Round) -> Decision:
        """Any other member: say the request, wait for the answer."""
        request, fault_tolerant = brought.request, brought.fault_tolerant
        hub = self.members[0]
        said = False
        last = brought.deadline + (BORNE_ANSWER_SECONDS if fault_tolerant else ANSWER_SECONDS)
        try:
            if self.links.spoke is None:
                self._wait(brought, time.sleep, lambda: self._store.shows("hub"), lambda: [hub], last)
                try:
                    self.links.spoke = Spoke.connect(self._store, self.group.rank, hub, last - time.monotonic())
                except ResourceError as error:
                    mark_out_of_sync(self.group, self.members, str(error))
                    raise
                except RemoteError as error:
                    if fault_tolerant:
                        raise EOFError(str(error)) from None
                    self._look_for(hub, fault_tolerant)  # it may have published why it left
                    raise
                self.links.close_at_exit()
            spoke = self.links.spoke
            spoke.say(request.to_json(), last - time.monotonic())
            said = True
            try:
                self._wait(brought, spoke.pump, lambda: spoke.answer is not None, lambda: [hub], brought.deadline)
            except DeadlineError:
                spoke.hurry()
                self._wait(brought, spoke.pump, lambda: spoke.answer is not None, lambda: [hub], last)
            return Decision(**spoke.take_answer())
        except EOFError as error:
            if fault_tolerant:
                return Decision(lost=[hub], generation=request.generation)
            text = f"rank {self.group.rank} lost its connection to rank {hub}: {error}"
            return explain_loss(lambda: self._look_for(hub, fault_tolerant=False), text)
        except DeadlineError:
            if (
                fault_tolerant and self.links.spoke is None and not self._store.answers()
            ):  # nor will anybody else be found
                text = f"rank {self.group.rank} hears neither rank {hub} nor the store; its host may be cut off"
                decision = Decision(error=("RemoteError", text))
            elif fault_tolerant:
                decision = Decision(lost=[hub], generation=request.generation)
            else:
                decision = self._miss([hub], brought.timeout_seconds)
        except LeavingError as error:
            decision = error.decision
            decision.generation = max(decision.generation, request.generation)
        except ReshardError as error:
            decision = Decision(error=describe_error(error))
        if said and self.links.spoke is not None:  # so that the first member does not go on without this rank
            told = replace(request, error=decision.error)
            with contextlib.suppress(EOFError, DeadlineError):
                self.links.spoke.leave(None if decision.behind or decision.lost else told.to_json())
        return decision

    def _miss(self, missing: list[int], timeout_seconds: float) -> Decision:
        error = missing_error(missing, self.members, timeout_seconds)
        return Decision(error=error, out_of_sync=error[1])

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
                self._say({"members": list(self.members), "attempt": brought.request.attempt})
                with contextlib.suppress(StoreSilentError):  # look again later
                    self._hear(brought)
                    for rank in absent():
                        self._look_for(rank, brought.fault_tolerant)
            pump(min(PATIENCE_SECONDS, deadline - now, max(0.0005, 0.1 * (now - begun)) if pump is time.sleep else 1.0))

    # What ranks find in the store when they wait in vain

    def _say(self, waiting: dict[str, Any] | None) -> None:
        if self.group.status["waiting"] != waiting:
            self.group.status["waiting"] = waiting
            publish_status(self.group)

    def _hear(self, brought: _Round) -> None:
        """Raise what another rank left for this attempt, or that a connection is lost."""
        key = f"told/{self.group.rank}/{brought.request.attempt}"
        if self.group.store.check([key]):
            raise rebuild_error(*json.loads(self.group.store.get(key)))
        if self.links.hub is not None and self.links.hub.gone and not brought.fault_tolerant:
            rank, why = next(iter(self.links.hub.gone.items()))
            self._look_for(rank, fault_tolerant=False)  # it may have published why it left
            raise RemoteError(f"rank {rank} is gone: {why}")

    def _look_for(self, rank: int, fault_tolerant: bool) -> None:
        """Raise if ``rank`` waits for us elsewhere, gave up in the same call, or will not come any more."""
        key = f"status/{rank}"
        status = json.loads(self.group.store.get(key)) if self.group.store.check([key]) else None
        if fault_tolerant and self._is_gone(rank, status):
            self._blamed.add(rank)
            if rank == self.members[0]:
                raise EOFError(f"rank {rank} is gone")
            return
        if status is not None:
            find_elsewhere(self.group, self.members, rank, status, fault_tolerant)

    def _is_gone(self, rank: int, status: dict[str, Any] | None) -> bool:
        """Whether a rank that does not come never will: somebody said so, or it has no connection and no pulse."""
        if status is not None and is_blamed(status):
            return True
        if self.links.spoke is not None or any(
            each.rendezvous.links.reaches(rank) for each in [*self.group.channels.values()]
        ):
            return False
        return self._pulses.is_silent(rank)

    def find_dead(self) -> list[int]:
        """Ranks that are gone according to the connections of the first member, or to the store."""
        return sorted(self._blamed | set(() if self.links.hub is None else self.links.hub.gone))
