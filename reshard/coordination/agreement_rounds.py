"""AgreementRounds: every rank of a call sends a request to the first member, which decides and answers all.

The messages travel over the connections of :mod:`reshard.coordination.hub_and_spokes`.

The first member waits no longer than the shortest timeout of any member. A member whose deadline has passed tells the
first member, and leaves only if it then gets no answer. A rank that leaves while the others stay marks the members as
out of sync (see :mod:`reshard.coordination.liveness.membership`).

States of a member that does not take part in a call:

- missing or absent: the request of the member has not arrived.
- withdrawn: the member took its request back, because its deadline passed or its call failed.
- left: the member ended a call in which the others still wait. It counts that call already, and the others do not.
- lagging: the member still waits in a call that another member has left.
- gone: the connection from the member to the first member ended.
- dead: the member is gone, or its process or its heartbeats have ended.
- lost: the member is dead, and the others have agreed in the store to continue without it.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from reshard.coordination.control_connections import ControlConnections
from reshard.coordination.groups.agreement_messages import (
    Decision,
    RankStatus,
    RoundRequest,
    describe_error,
    parse_error,
)
from reshard.coordination.groups.joining import check_claims, find_two_jobs, name_job
from reshard.coordination.groups.process_group import RESUME_SECONDS, Group
from reshard.coordination.groups.store import LOST_STORE_SECONDS, ForeignValueError, Store, StoreSilentError
from reshard.coordination.hub_and_spokes import DeadlineError, Hub, Spoke
from reshard.coordination.liveness.call_sequence import (
    CallLeftError,
    RoundEndedError,
    acknowledge_skipped,
    add_call_counts,
    find_lagging,
    record_abandoned_call,
    report_error,
)  # fmt: skip
from reshard.coordination.liveness.exclusions import propose_exclusion, read_exclusions
from reshard.coordination.liveness.failure_detector import check_rank_status, explain_loss, explain_lost_store
from reshard.coordination.liveness.heartbeat import Monitor
from reshard.coordination.liveness.lost_ranks import (
    hub_lost_error,
    rank_gone_error,
    rank_stopped_error,
    ranks_late_error,
)
from reshard.coordination.liveness.membership import (
    ExcludedError,
    MembersLostError,
    check_membership,
    find_round_mismatch,
    mark_out_of_sync,
)
from reshard.coordination.liveness.presence import has_ended
from reshard.coordination.liveness.status import (
    BEAT_SECONDS,
    MAX_HEARTBEAT_AGE_SECONDS,
    HeartbeatReader,
    is_reported_dead,
    publish_status,
)
from reshard.errors import ArgumentError, RemoteError, ReshardError, ResourceError, TransferTimeoutError
from reshard.formatting import format_ranks
from reshard.runtime.transport.descriptors import check_descriptors, is_descriptor_shortage, out_of_descriptors

#: Interval at which a waiting rank publishes what it waits for and reads the status of absent ranks.
RENDEZVOUS_CHECK_INTERVAL_SECONDS = 0.2
#: Time that a rank waits for the first member's answer after its own deadline. A fault-tolerant call waits less: it can
#: continue without the first member.
ANSWER_SECONDS, FAULT_TOLERANT_ANSWER_SECONDS = 1.5, 1.0
#: If a rank has no open connection and its heartbeat is this old, other ranks check whether its process exists.
PROBE_AGE_SECONDS = 1.5 * BEAT_SECONDS


@dataclass(frozen=True)
class _RoundArgs:
    """Arguments of one rank for a round; see :meth:`AgreementRounds.run`."""

    request: RoundRequest
    decide: Callable[[list[RoundRequest]], Decision]
    timeout_seconds: float
    fault_tolerant: bool
    deadline: float


class _ExclusionError(RoundEndedError):
    """An exclusion carries the decision of the round in which this rank waits."""


class AgreementRounds:
    """The rounds of one set of ranks: ``members``, ascending."""

    def __init__(self, group: Group, members: tuple[int, ...], store: Store) -> None:
        self._group, self.members = weakref.ref(group), members
        self._store = store
        self.num_rounds = 0  # number of rounds that this rank joined
        self.answered: dict[int, int] = {}  # rank -> its last attempt that got an answer
        self._number = 0  # number of the last round that this rank decided
        self._dead: set[int] = set()  # ranks that are dead according to the store
        self._heartbeats = HeartbeatReader(group.store)
        self.links = ControlConnections(members)

    @property
    def group(self) -> Group:
        """The group of these ranks. The caller keeps it alive."""
        group = self._group()
        assert group is not None
        return group

    def run(
        self,
        request: RoundRequest,
        decide: Callable[[list[RoundRequest]], Decision],
        timeout_seconds: float,
        fault_tolerant: bool,
    ) -> Decision:
        """Hold one round: every member sends its request, and all get the same decision.

        Args:
            request: this rank's request.
            decide: computes the decision from all requests; runs on the first member.
            timeout_seconds: how long to wait for all members.
            fault_tolerant: continue without members that die or miss the deadline; ``Decision.lost`` lists them.

        Raises:
            ReshardError: the error of the decision, the same on all ranks; TransferTimeoutError if members are missing.
        """
        check_membership(self.group, self.members, fault_tolerant)
        self._check_descriptors()
        if len(self.members) > 1:  # a rank that cannot start these threads leaves the call before the round
            self._store.start()
            Monitor.of(self.group)  # sends the heartbeats of this rank
        self.num_rounds += 1
        args = _RoundArgs(request, decide, timeout_seconds, fault_tolerant, time.monotonic() + timeout_seconds)
        try:
            decision = self._run_round(args)
            # Lagging ranks end their call now; this rank waits for their next one.
            while decision.lagging and self.group.rank not in decision.lagging:
                decision = self._run_round(args)
        except ReshardError:
            raise
        except BaseException as error:  # such as an interrupt; the others are still in this round
            self._abandon(request, f"rank {self.group.rank} left a call: {type(error).__name__}")
            raise
        self.answered.update(decision.attempts)
        acknowledge_skipped(self.group, decision.skipped)
        self.group.lost.update(decision.lost)
        if self.group.rank in decision.lost:
            check_membership(self.group, self.members, fault_tolerant)  # raises
        if decision.lagging:
            self.group.abandoned_call = True
            record_abandoned_call(self.group, self.members, decision)
        if decision.out_of_sync:
            mark_out_of_sync(self.group, self.members, decision.out_of_sync)
        decision.raise_error()
        return decision

    def _check_descriptors(self) -> None:
        """Raise ResourceError, and publish it, if this rank has too few file descriptors for its connections."""
        is_hub = self.group.rank == self.members[0]
        if len(self.members) == 1 or (self.links.hub if is_hub else self.links.spoke) is not None:
            return
        try:
            needed = len(self.members) if is_hub else 1
            check_descriptors(self.group.rank, needed, f"the rendezvous of ranks {format_ranks(self.members)}")
        except ResourceError as error:
            report_error(self.group, error)
            self.group.abandoned_call = True  # the ranks that read the error set this too
            raise

    def _abandon(self, request: RoundRequest, why: str) -> None:
        """Leave a round in which the other members wait or will wait."""
        mark_out_of_sync(self.group, self.members, why)
        if self.links.spoke is not None:
            request = replace(request, attempt=self.group.attempts, error=("RemoteError", why))
            with contextlib.suppress(EOFError, DeadlineError):
                self.links.spoke.withdraw(add_call_counts(request, self.group, self.members).to_json())
        if self.links.hub is not None:
            self.links.hub.in_round = False
            self.links.hub.answer(Decision(error=("RemoteError", why), out_of_sync=why).__dict__)

    def _run_round(self, args: _RoundArgs) -> Decision:
        """The decision of one round."""
        self.group.attempts += 1
        self.group.last_members = self.members
        job = name_job(self.group) if self.num_rounds <= 2 else ""
        request = replace(args.request, attempt=self.group.attempts, job=job)
        args = replace(args, request=add_call_counts(request, self.group, self.members))
        try:
            with contextlib.suppress(StoreSilentError):  # checked again while waiting
                if self.num_rounds <= 2 or self.group.claim_error:  # again before the first data moves
                    check_claims(self.group)
            if args.fault_tolerant and (lost := self._read_lost(args)):
                return Decision(lost=lost, generation=args.request.generation)
            return self._run_as_hub(args) if self.group.rank == self.members[0] else self._run_as_spoke(args)
        except ForeignValueError as error:
            text = f"rank {self.group.rank}: {error}"
            self._abandon(args.request, text)
            raise ArgumentError(text) from error
        except StoreSilentError as error:
            text = f"rank {self.group.rank}: {error}, and the call ends after {args.timeout_seconds:g} s"
            mark_out_of_sync(self.group, self.members, text)
            raise TransferTimeoutError(text) from error
        except RuntimeError as error:
            if isinstance(error, ReshardError):
                raise
            explained = explain_lost_store(self.group, error)
            self.links.reason = describe_error(explained)
            if self.links.hub is not None:
                self.links.hub.in_round = False
                self.links.hub.answer(Decision(error=self.links.reason).__dict__)
            raise explained from error
        finally:
            self._publish_waiting(None)

    def _run_as_hub(self, args: _RoundArgs) -> Decision:
        """On the first member: wait for all requests, decide, answer."""
        if len(self.members) == 1:
            return replace(args.decide([args.request]), attempts={args.request.rank: args.request.attempt})
        hub = self._open_hub(args)
        decision = self._decide_as_hub(hub, args)
        self._number += 1
        decision = replace(decision, round=self._number)
        # ranks that get no answer learn from this rank's goodbye why the round ended
        self.links.reason = None if len(hub.pending) == len(self.members) - 1 else decision.error
        hub.in_round = False
        hub.answer(decision.__dict__)
        return decision

    def _find_missing(self, hub: Hub, fault_tolerant: bool) -> list[int]:
        """Members whose requests have not arrived; with ``fault_tolerant``, without the dead and the lost ones."""
        gone = {*self.find_dead(), *self.group.lost} if fault_tolerant else ()
        return [rank for rank in self.members[1:] if rank not in hub.pending and rank not in gone]

    def _wait_for_requests(self, hub: Hub, args: _RoundArgs) -> None:
        """Wait until all members have sent their requests, or in a fault-tolerant call until the deadline."""

        def missing() -> list[int]:
            return self._find_missing(hub, args.fault_tolerant)

        def pump(seconds: float) -> None:
            hub.pump(seconds)
            if hub.timed_out and missing() and not self.group.has_just_resumed():
                raise DeadlineError

        hub.drain()  # drops requests that were withdrawn before this round
        hub.in_round = True
        try:
            self._wait(args, pump, lambda: not missing(), missing, args.deadline)
        except DeadlineError:
            if not args.fault_tolerant:
                raise

    def _decide(self, hub: Hub, args: _RoundArgs) -> Decision:
        """The decision on the requests that have arrived.

        If members are lost, or a member may be about to exclude this rank, the decision counts only once the store has
        accepted it.
        """
        while True:
            hub.drain()  # a rank may have withdrawn or timed out
            lost = self.group.lost if args.fault_tolerant else ()
            received = {rank: RoundRequest.from_json(hub.pending[rank][1]) for rank in hub.pending if rank not in lost}
            received[args.request.rank] = args.request
            requests = [received[rank] for rank in self.members if rank in received]
            decision = (
                find_two_jobs(self.group, requests)
                or find_lagging(requests, self.members)
                or find_round_mismatch(requests)
                or args.decide(requests)
            )
            attempts = {request.rank: request.attempt for request in requests}
            if not args.fault_tolerant:
                return replace(decision, attempts=attempts)
            gone = {*decision.lost, *(rank for rank in self.members if rank not in received)}
            decision = replace(decision, attempts=attempts, round=self._number + 1, lost=sorted(gone))
            if gone <= self.group.lost and not hub.timed_out:
                return decision
            hub.defer()
            exclusion = propose_exclusion(self.group, gone, decision, args.request.attempt)
            if exclusion is not None:
                return exclusion
            if self.group.rank in self.group.lost:
                raise ExcludedError(self.group)

    def _decide_as_hub(self, hub: Hub, args: _RoundArgs) -> Decision:
        """The answer of the first member: the decision on all requests, or the error that prevents one."""
        request = args.request
        try:
            self._wait_for_requests(hub, args)
            return self._decide(hub, args)
        except DeadlineError:
            return self._decide_missing(self._find_missing(hub, args.fault_tolerant), args.timeout_seconds)
        except CallLeftError as error:
            lagging = [
                rank
                for rank, left in zip(self.members, request.left, strict=True)
                if rank == request.rank or (rank in hub.pending and hub.pending[rank][1]["left"][0] <= left)
            ]
            return replace(error.decision, lagging=lagging)
        except ExcludedError as error:
            if args.fault_tolerant:  # the ranks that wait for this rank do not know yet that it is lost
                hub.in_round = False
                hub.answer(Decision(lost=[request.rank], generation=request.generation).__dict__)
            return error.decision
        except RoundEndedError as error:
            return replace(error.decision, generation=max(error.decision.generation, request.generation))
        except OSError as error:  # ranks whose connections this rank cannot accept read the error in its status
            if not is_descriptor_shortage(error):
                raise
            known = out_of_descriptors(request.rank, f"the rendezvous of ranks {format_ranks(self.members)}")
            return Decision(error=describe_error(known), out_of_sync=str(known))
        except ReshardError as error:
            return Decision(error=describe_error(error))

    def _open_hub(self, args: _RoundArgs) -> Hub:
        """The hub of these members. It starts to listen in the first round."""
        if self.links.hub is None:
            try:
                limit = self._store_limit(args, args.deadline)
                self.links.hub = Hub.listen(self._store, self.group.rank, self.members[1:], limit)
            except ReshardError as error:
                mark_out_of_sync(self.group, self.members, str(error))
                raise
            self.links.close_at_exit()
        return self.links.hub

    def _open_spoke(self, args: _RoundArgs, deadline: float) -> Spoke:
        """The connection to the first member. It opens in the first round, at most until ``deadline``."""
        if self.links.spoke is None:
            hub = self.members[0]
            self._wait(args, time.sleep, lambda: self._store.has_key("hub"), lambda: [hub], deadline)
            try:
                self.links.spoke = Spoke.connect(self._store, self.group.rank, hub, self._store_limit(args, deadline))
            except (ResourceError, ArgumentError) as error:
                mark_out_of_sync(self.group, self.members, str(error))
                raise
            except RemoteError as error:
                if args.fault_tolerant:
                    raise EOFError(str(error)) from None
                with contextlib.suppress(StoreSilentError):
                    self._check_absent(hub, args.fault_tolerant)  # the hub may have published why it left
                raise
            self.links.close_at_exit()
        return self.links.spoke

    def _run_as_spoke(self, args: _RoundArgs) -> Decision:
        """On any other member: send the request, wait for the answer."""
        request, fault_tolerant = args.request, args.fault_tolerant
        hub = self.members[0]
        is_sent = False
        answer_seconds = FAULT_TOLERANT_ANSWER_SECONDS if fault_tolerant else ANSWER_SECONDS
        answer_deadline = args.deadline + answer_seconds
        try:
            spoke = self._open_spoke(args, answer_deadline)
            spoke.send_request(request.to_json(), max(answer_deadline - time.monotonic(), answer_seconds))
            is_sent = True
            try:
                self._wait(args, spoke.pump, lambda: spoke.answer is not None, lambda: [hub], args.deadline)
            except DeadlineError:
                spoke.report_timeout()
                answer_deadline = time.monotonic() + answer_seconds
                self._wait(args, spoke.pump, lambda: spoke.answer is not None, lambda: [hub], answer_deadline)
            return Decision.from_json(spoke.take_answer())
        except EOFError as error:
            if fault_tolerant:
                return self._continue_without(hub, args)
            text = str(hub_lost_error(hub, self.group.rank, error, is_gone=self.links.find_lost() == hub))
            return explain_loss(lambda: self._check_absent(hub, fault_tolerant=False), text, self.links.find_reason())
        except DeadlineError:
            if fault_tolerant:
                decision = self._continue_without(hub, args)
            else:
                if self.links.spoke is None:
                    self._store.check(["hub"])  # raises StoreSilentError if the store is at fault
                decision = self._decide_missing([hub], args.timeout_seconds)
            if decision.attempts:  # the first member has decided
                return decision
        except _ExclusionError as error:
            return error.decision
        except RoundEndedError as error:
            generation = max(error.decision.generation, request.generation)
            decision = replace(error.decision, generation=generation)
        except ReshardError as error:
            decision = Decision(error=describe_error(error))
        if is_sent and self.links.spoke is not None:  # the first member must no longer count this rank as present
            withdrawn = replace(request, error=decision.error)
            with contextlib.suppress(EOFError, DeadlineError):
                self.links.spoke.withdraw(None if decision.lagging or decision.lost else withdrawn.to_json())
        return decision

    def _decide_missing(self, missing: list[int], timeout_seconds: float) -> Decision:
        error = ranks_late_error(missing, self.members, timeout_seconds)
        return Decision(error=describe_error(error), out_of_sync=str(error))

    def _wait(
        self,
        args: _RoundArgs,
        pump: Callable[[float], None],
        is_done: Callable[[], bool],
        find_absent: Callable[[], list[int]],
        deadline: float,
    ) -> None:
        """Pump until ``is_done()``; periodically publish this rank's status and check that of the absent ranks.

        After a pause of this process, or of the store in a fault-tolerant call, the wait lasts at least
        ``RESUME_SECONDS`` more, because the others may have come during the pause. An overloaded machine looks like a
        paused process, so ``MAX_HEARTBEAT_AGE_SECONDS`` of waiting after the deadline are enough.

        Raises:
            DeadlineError: the deadline passed. EOFError: the first member is dead, in a fault-tolerant call.
            ReshardError, RoundEndedError: the absent ranks will not come.
        """
        start = last_check = time.monotonic()
        late_seconds = 0.0  # of waiting after the deadline, without pauses
        while not is_done():
            now, spoke = time.monotonic(), self.links.spoke
            has_reason = self.group.has_just_resumed() or (spoke is not None and spoke.is_deferred)
            if now >= deadline and (late_seconds > MAX_HEARTBEAT_AGE_SECONDS or not has_reason):
                pump(0.0)
                if is_done():
                    return
                raise DeadlineError
            if now - last_check >= RENDEZVOUS_CHECK_INTERVAL_SECONDS:
                last_check = now
                self._publish_waiting({"members": list(self.members), "attempt": args.request.attempt})
                try:
                    self._check_reported(args)
                    for rank in find_absent():
                        self._check_absent(rank, args.fault_tolerant)
                except StoreSilentError:  # retried at the next check
                    if args.fault_tolerant:
                        deadline = max(deadline, time.monotonic() + RESUME_SECONDS)
            step = max(0.0005, 0.1 * (now - start)) if pump is time.sleep else 1.0
            seconds = min(
                RENDEZVOUS_CHECK_INTERVAL_SECONDS,
                step,
                deadline - now if now < deadline else RENDEZVOUS_CHECK_INTERVAL_SECONDS,
            )
            late_seconds += seconds if now >= deadline else 0.0
            begun_at = time.monotonic()
            pump(seconds)
            self.group.detect_pause(seconds, begun_at)

    def _publish_waiting(self, waiting: dict[str, Any] | None) -> None:
        if self.group.status.waiting != waiting:
            self.group.status.waiting = waiting
            publish_status(self.group)

    def _check_reported(self, args: _RoundArgs) -> None:
        """Raise an error that another rank reported for this attempt or for all, or the loss of a connection."""
        check_claims(self.group)
        decision = read_exclusions(self.group, args.request.attempt)
        if decision is not None and self.group.rank not in self.group.lost:
            raise _ExclusionError(decision)
        if self.group.lost:
            self._check_lost(args)
        key = f"error/{self.group.rank}/{args.request.attempt}"
        if self.group.store.check([key]):
            raise self.group.store.read(key, parse_error)
        if self.links.hub is not None and self.links.hub.gone and not args.fault_tolerant:
            rank, why = next(iter(self.links.hub.gone.items()))
            self._check_absent(rank, fault_tolerant=False)  # the rank may have published why it left
            raise rank_gone_error(rank, why)

    def _check_absent(self, rank: int, fault_tolerant: bool) -> None:
        """Raise an error if ``rank`` waits for this rank in another call or has left this call. Record a dead rank."""
        key = f"status/{rank}"
        status = self.group.store.read(key, RankStatus.from_json) if self.group.store.check([key]) else None
        if status is not None and not (fault_tolerant and is_reported_dead(status)):
            check_rank_status(self.group, self.members, rank, status, fault_tolerant)
        has_started, seconds = self._heartbeats.read(rank)
        is_silent = has_started and seconds > MAX_HEARTBEAT_AGE_SECONDS
        if not is_silent and not self._has_ended(rank, seconds) and not (status and is_reported_dead(status)):
            return
        if not fault_tolerant:
            error = rank_stopped_error(rank, is_silent=is_silent)
            raise RoundEndedError(Decision(error=describe_error(error), out_of_sync=str(error) if is_silent else ""))
        self._dead.add(rank)
        if rank == self.members[0]:
            raise EOFError(f"rank {rank} is gone")

    def _has_ended(self, rank: int, silent_seconds: float) -> bool:
        """Whether the process of a rank without an open connection, and with an old heartbeat, has ended."""
        if silent_seconds < PROBE_AGE_SECONDS or any(
            call_group.rounds.links.reaches(rank) for call_group in list(self.group.call_groups.values())
        ):
            return False
        return has_ended(self.group.store, rank)

    # Lost ranks, see reshard.coordination.liveness.exclusions.

    def _read_lost(self, args: _RoundArgs) -> list[int]:
        """The members that are lost before this rank enters a round.

        Raises:
            RemoteError: this rank is lost.
        """
        with contextlib.suppress(StoreSilentError):  # read again in the round
            read_exclusions(self.group)
        check_membership(self.group, self.members, args.fault_tolerant)
        return sorted(self.group.lost.intersection(self.members))

    def _check_lost(self, args: _RoundArgs) -> None:
        """Raise if an exclusion ends the round in which this rank waits.

        The first member is not lost: it decides with whom the round goes on.
        """
        lost = self.group.lost
        if self.group.rank in lost:
            raise ExcludedError(self.group)
        if not args.fault_tolerant:
            check_membership(self.group, self.members, fault_tolerant=False)
        elif self.members[0] in lost:
            raise MembersLostError(lost.intersection(self.members))

    def _continue_without(self, hub: int, args: _RoundArgs) -> Decision:
        """The decision after the first member is gone or has not answered."""
        attempt = args.request.attempt
        while True:
            exclusion = read_exclusions(self.group, attempt, LOST_STORE_SECONDS)
            if exclusion is None and not {hub, self.group.rank} & self.group.lost:
                exclusion = propose_exclusion(self.group, [hub], None, attempt)
            if self.group.rank in self.group.lost:
                return ExcludedError(self.group).decision
            if exclusion is not None:
                return exclusion
            if hub in self.group.lost:
                lost = sorted(self.group.lost.intersection(self.members))
                return Decision(lost=lost, generation=args.request.generation)

    def _store_limit(self, args: _RoundArgs, deadline: float) -> float:
        """The time to wait for the store. In a fault-tolerant call, a silent store delays the deadline."""
        return max(deadline - time.monotonic(), LOST_STORE_SECONDS if args.fault_tolerant else 0.0)

    def find_dead(self) -> list[int]:
        """Ranks that are dead according to the store or to the connections of the first member, ascending."""
        return sorted(self._dead | set(() if self.links.hub is None else self.links.hub.gone))
