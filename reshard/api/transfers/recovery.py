"""Fault-tolerant transfers: the surviving ranks find out which ranks are lost, and move the missing data.

When its part of a transfer has ended, each rank reports its outcome (its progress, and its error if any) in an
agreement round. The round excludes ranks that are dead or do not respond. If a rank reports an error and ranks are
lost, the surviving ranks plan how to move the missing data (see :mod:`reshard.planner.recovery_plans`), execute that
plan and hold another round. They repeat this until no rank reports an error.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

import torch

from reshard.api.arguments.options import TransferOptions
from reshard.api.transfers.handle import ConfirmedHandle, Handle, progress_of
from reshard.api.transfers.opened_plan import open_plan
from reshard.coordination import (
    CallGroup,
    Decision,
    Group,
    RoundRequest,
    calling,
    describe_error,
    find_call_group,
    gather_reports,
    rebuild_error,
)
from reshard.coordination.liveness.lost_ranks import ranks_lost_in_transfer_error
from reshard.errors import RankLostError, ReshardError
from reshard.formatting import format_ranks
from reshard.plan import Plan
from reshard.planner.recovery_plans import RankProgress, find_missing, plan_remainder, view_pieces, whole_tensors
from reshard.public_api import not_compiled
from reshard.runtime.cpu.encoded_shards import encoded_array
from reshard.runtime.cpu.transfer_progress import Tally

#: Time that ranks wait for each other's outcome after the time limit of the transfer.
RECOVERY_OUTCOME_GRACE_SECONDS = 0.5


class Recovery:
    """State of a fault-tolerant transfer on one rank, and the attempts to complete it.

    Args:
        call_group: the call group of the transfer.
        plan: the original plan.
        src, dst: this rank's arrays, one per tensor of the plan.
        lost: ranks that were lost before the transfer began.
        options: options of the call. If its strategy is a function, recovery plans use the default strategy. With
            ``verify``, all data of a failed attempt is sent again, because a failed attempt is not verified.
    """

    def __init__(
        self,
        call_group: CallGroup,
        plan: Plan,
        src: Sequence[torch.Tensor | None],
        dst: Sequence[torch.Tensor | None],
        lost: Collection[int],
        options: TransferOptions,
    ) -> None:
        self._group: Group = call_group.group
        self._lost = set(lost)
        self._members = tuple(rank for rank in call_group.members if rank not in self._lost)
        self._handled_losses: set[int] = set()  # lost ranks that the current plan already excludes
        self._original, self._src, self._dst = plan, src, dst
        strategy = options["strategy"]
        self._strategy = None if callable(strategy) else strategy
        self.timeout_seconds, self._verify = options["timeout_seconds"], options["verify"]
        self._is_automatic = options["on_loss"] == "recover"  # else the caller must call recover()
        self._plan, self._pieces = plan, whole_tensors(plan)  # of the current attempt
        call_group.transfers += 1
        self._name = f"transfer {call_group.transfers} of ranks {format_ranks(call_group.members)}"
        self._attempt = 0

    @property
    def survivors(self) -> tuple[int, ...]:
        """The ranks that are not lost."""
        return self._members

    def complete(self, error: ReshardError | None, tally: Tally, deadline: float) -> None:
        """Exchange outcomes and recover, until every surviving rank has its data.

        Args:
            error: the error that ended this rank's part of the transfer, or None.
            tally: progress of this rank's part.
            deadline: value of ``time.monotonic()``; a rank that has not reported by then, or within
                ``RECOVERY_OUTCOME_GRACE_SECONDS`` of this call if that is later, counts as lost.

        Raises:
            RankLostError: ranks are lost, and either no surviving rank holds some missing data, or recovery is not
                automatic.
            ReshardError: an attempt failed, and no rank was lost since the attempt before.
        """
        with calling(self._group):
            self._complete(error, tally, deadline)

    def _complete(self, error: ReshardError | None, tally: Tally, deadline: float) -> None:
        while True:
            outcomes = self._exchange_outcomes(error, tally, deadline)
            failed = [outcome["failed"] for outcome in outcomes.values() if outcome["failed"]]
            if not failed:
                return
            if self._lost == self._handled_losses:
                raise rebuild_error(*failed[0])
            self._handled_losses = set(self._lost)
            self._plan_remainder(outcomes)
            if not self._pieces:
                return
            if not self._is_automatic:
                raise self._offer()
            error, tally, deadline = self._run_attempt()

    def _offer(self) -> RankLostError:
        """The error whose ``recover()`` runs the current plan."""
        lost = sorted(self._lost)
        missing = sum(math.prod(spec.shape) * spec.itemsize * len(spec.dst.ranks) for spec in self._plan.tensors)
        return ranks_lost_in_transfer_error(lost, self._plan.ranks, missing, self._plan, self._accept)

    def _accept(self) -> None:
        self._is_automatic = True
        with calling(self._group):
            self._complete(*self._run_attempt())

    def _exchange_outcomes(self, error: ReshardError | None, tally: Tally, deadline: float) -> dict[int, Any]:
        """Return the outcome of each surviving rank, and update the lost and the surviving ranks."""
        outcome = asdict(tally) | {"failed": None if error is None else describe_error(error)}
        self._attempt += 1
        while True:
            call_group = find_call_group(self._group, self._members)
            purpose = f"waits for {self._name}{f', attempt {self._attempt}' if self._attempt > 1 else ''}"
            request = RoundRequest(self._group.rank, payload=outcome, purpose=purpose)
            decide = functools.partial(_gather_outcomes, call_group)
            seconds = max(deadline - time.monotonic(), RECOVERY_OUTCOME_GRACE_SECONDS)
            _, decision = call_group.agree(request, decide, seconds, fault_tolerant=True)
            if not decision.lost:
                return decision.payloads
            self._lost |= set(decision.lost)
            self._members = tuple(rank for rank in self._members if rank not in self._lost)

    def _plan_remainder(self, outcomes: dict[int, Any]) -> None:
        """Make the plan of the next attempt, the same on every surviving rank."""
        arrived = {rank: RankProgress(outcome["copied"], outcome["received"]) for rank, outcome in outcomes.items()}
        if self._verify:
            arrived = {}
        self._pieces = find_missing(self._plan, self._pieces, arrived, self._members)
        if self._pieces:
            self._plan, self._pieces = plan_remainder(
                self._pieces, self._original, self._members, self._lost, self._strategy
            )

    def _run_attempt(self) -> tuple[ReshardError | None, Tally, float]:
        """Execute this rank's part of the current plan. Return its error, progress and deadline for outcomes."""
        # One timeout for the agreement on the plan, and one for its transfer.
        deadline = time.monotonic() + 2 * self.timeout_seconds + RECOVERY_OUTCOME_GRACE_SECONDS
        tally = Tally()
        if self._group.rank not in self._plan.ranks:
            return None, tally, deadline
        try:
            src, dst = (list(map(encoded_array, arrays)) for arrays in (self._src, self._dst))
            views = view_pieces(self._plan, self._pieces, self._original, self._group.rank, src, dst)
            limit, verify = self.timeout_seconds, self._verify
            with self._group.nesting():
                opened = open_plan(self._plan, self._group, timeout_seconds=limit, verify=verify, fault_tolerant=True)
            with contextlib.closing(opened.transfers) as transfers:
                handle = transfers.start(*views, lambda: None)
                tally = progress_of(handle)
                handle.wait()
        except ReshardError as error:
            return error, tally, deadline
        return None, tally, deadline


def _gather_outcomes(call_group: CallGroup, requests: list[RoundRequest]) -> Decision:
    return gather_reports(requests, call_group.members, call_group.rounds.find_dead())


class FaultTolerantHandle(ConfirmedHandle):
    """A fault-tolerant transfer. Every rank must call :meth:`wait`, which exchanges outcomes and recovers.

    Args:
        inner: handle of the original transfer.
        recovery: its state.
        finish: returns the result of the transfer; called once all data has arrived.
    """

    def __init__(self, inner: Handle, recovery: Recovery, finish: Callable[[], Any]) -> None:
        super().__init__(inner, finish)
        self._recovery = recovery
        self._deadline = time.monotonic() + recovery.timeout_seconds + RECOVERY_OUTCOME_GRACE_SECONDS
        self._completing = threading.RLock()
        self._is_complete = False

    @not_compiled
    def wait(self, timeout_seconds: float | None = None) -> Any:
        """Wait as :meth:`Handle.wait` does. Then exchange outcomes with the other ranks and recover if ranks are lost.

        ``timeout_seconds`` limits only the wait for this rank's part of the original transfer.

        Raises:
            RankLostError: see ``on_loss`` of :func:`reshard.reshard`.
            TransferTimeoutError: this rank's part has not ended after ``timeout_seconds``; it continues.
            ReshardError: an attempt failed, and no rank was lost since the attempt before.
        """
        self._wait_for_part(timeout_seconds)
        with self._completing:
            if not self._is_complete:
                self._final_error, self._is_complete = self._complete(), True
        if self._final_error is not None:
            raise self._final_error
        return self._take_result()

    def _complete(self) -> ReshardError | None:
        outcome = self._confirm(lambda error: self._recovery.complete(error, progress_of(self._inner), self._deadline))
        if isinstance(outcome, RankLostError) and (recover := outcome._recover) is not None:
            outcome._recover = lambda: self._recover(recover)
        return outcome

    def _recover(self, recover: Callable[[], Any]) -> Any:
        """Run :meth:`RankLostError.recover` and return the result of the transfer."""
        recover()
        self._final_error = None
        return self._take_result()
