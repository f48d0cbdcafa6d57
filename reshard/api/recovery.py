"""Transfers that bear the loss of ranks: those that are left find out who is, and move what is missing.

When its part of a transfer is over, well or badly, every rank says so in a round that goes on without those that are
dead or silent. If anybody failed and somebody is lost, the others plan anew for what is missing (see
:mod:`reshard.planner.recovery`), move that, and meet again; a rank that is lost while they do is one more turn.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

import torch

from reshard.api.handle import Handle
from reshard.api.mover import Mover
from reshard.coordination.communicator import Channel, find_channel
from reshard.coordination.decide import Decision, Request, describe_error, gather_said, rebuild_error
from reshard.coordination.liveness.call_sequence import calling
from reshard.coordination.process_group import Group
from reshard.errors import RankLostError, ReshardError, TransferTimeoutError
from reshard.formatting import format_ranks, say_ranks
from reshard.plan.model import Plan
from reshard.planner.recovery import Arrived, find_missing, plan_remainder, view_pieces, whole_tensors
from reshard.runtime.cpu.executor import Tally
from reshard.timeouts import check_patience

#: How much longer than the transfer itself ranks wait for each other behind it.
PATIENCE_SECONDS = 0.5


class Survivors:
    """One transfer that is fault tolerant, as one rank sees it.

    Args:
        channel: of the transfer. plan: of it; src, dst: this rank's arrays. lost: ranks that were lost before it began.
        strategy: by name, for what is left.
        timeout_seconds: of each turn. verify: of the call; what landed in a transfer that failed then counts for
        nothing. recovers: without asking.
    """

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        src: Sequence[torch.Tensor | None],
        dst: Sequence[torch.Tensor | None],
        lost: Collection[int] = (),
        *,
        strategy: str | None,
        timeout_seconds: float,
        verify: bool,
        recovers: bool,
    ) -> None:
        self._group: Group = channel.group
        self._lost = set(lost)
        self._members = tuple(rank for rank in channel.members if rank not in self._lost)
        self._dealt_with: set[int] = set()  # of those that are lost
        self._first, self._src, self._dst = plan, src, dst
        self._strategy, self.timeout_seconds = strategy, timeout_seconds
        self._verify, self._recovers = verify, recovers
        self._plan, self._pieces = plan, whole_tensors(plan)  # of the turn under way
        channel.transfers += 1
        self._name = f"transfer {channel.transfers} of ranks {format_ranks(channel.members)}"
        self._turn = 0

    def settle(self, error: ReshardError | None, tally: Tally, deadline: float) -> None:
        """Return once every rank that is left has all that it needs.

        Args:
            error: what ended this rank's part. tally: how far it came.
            deadline: ``time.monotonic()`` at which whoever has said nothing counts as lost.

        Raises:
            RankLostError: ranks are lost, and with them what others need, or nobody may recover without being asked.
            Otherwise the error of the transfer, if nobody is lost.
        """
        with calling(self._group):
            self._settle(error, tally, deadline)

    def _settle(self, error: ReshardError | None, tally: Tally, deadline: float) -> None:
        while True:
            said = self._meet(error, tally, deadline)
            failed = [one["failed"] for one in said.values() if one["failed"]]
            if not failed:
                return
            if self._lost == self._dealt_with:
                raise rebuild_error(*failed[0])
            self._dealt_with = set(self._lost)
            self._find_remainder(said)
            if not self._pieces:
                return
            if not self._recovers:
                raise self._offer()
            error, tally, deadline = self._move()

    def _offer(self) -> RankLostError:
        lost = sorted(self._lost)
        missing = sum(math.prod(spec.shape) * spec.itemsize * len(spec.dst.ranks) for spec in self._plan.tensors)
        return RankLostError(
            f"{say_ranks(lost)} {'were' if len(lost) > 1 else 'was'} lost in a "
            f"transfer; {missing} bytes are missing, which ranks {format_ranks(self._plan.ranks)} can move among "
            "themselves: call recover() of this error on every rank that is left",
            lost,
            plan=self._plan,
            recover=self._accept,
        )

    def _accept(self) -> None:
        self._recovers = True
        with calling(self._group):
            self._settle(*self._move())

    def _meet(self, error: ReshardError | None, tally: Tally, deadline: float) -> dict[int, Any]:
        """What each rank that is left says of its part; finds out who that is."""
        said = asdict(tally) | {"failed": None if error is None else describe_error(error)}
        self._turn += 1
        while True:
            channel = find_channel(self._group, self._members)
            place = f"waits for {self._name}{f', turn {self._turn}' if self._turn > 1 else ''}"
            request = Request(self._group.rank, said=said, place=place)
            decide = functools.partial(_gather_said, channel)
            left = max(deadline - time.monotonic(), PATIENCE_SECONDS)
            _, decision = channel.agree(request, decide, left, fault_tolerant=True)
            if not decision.lost:
                return decision.said
            self._lost |= set(decision.lost)
            self._members = tuple(rank for rank in self._members if rank not in self._lost)

    def _find_remainder(self, said: dict[int, Any]) -> None:
        """The plan of the next turn, the same on every rank that is left."""
        arrived = {rank: Arrived(one["copied"], one["received"]) for rank, one in said.items()}
        if self._verify:
            arrived = {}
        self._pieces = find_missing(self._plan, self._pieces, arrived, self._members)
        if self._pieces:
            self._plan, self._pieces = plan_remainder(
                self._pieces, self._first, self._members, self._lost, self._strategy
            )

    def _move(self) -> tuple[ReshardError | None, Tally, float]:
        """Do this rank's part of a turn; how that ended, how far it came, and when all must be done."""
        deadline = time.monotonic() + 2 * self.timeout_seconds + PATIENCE_SECONDS  # to agree, and to move
        tally = Tally()
        if self._group.rank not in self._plan.ranks:
            return None, tally, deadline
        try:
            views = view_pieces(self._plan, self._pieces, self._first, self._group.rank, self._src, self._dst)
            limit, verify = self.timeout_seconds, self._verify
            with Mover(self._plan, self._group, timeout_seconds=limit, verify=verify, fault_tolerant=True) as mover:
                handle = mover.start_checked(*views, lambda: None)
                tally = handle.tally
                handle.wait()
        except ReshardError as error:
            return error, tally, deadline
        return None, tally, deadline


def _gather_said(channel: Channel, requests: list[Request]) -> Decision:
    return gather_said(requests, channel.members, channel.rendezvous.find_dead())


class SurvivingHandle(Handle):
    """A transfer that is fault tolerant. Every rank must wait for it: what is left to do is done there."""

    def __init__(self, inner: Handle, survivors: Survivors, finish: Callable[[], Any]) -> None:
        super().__init__(inner._channel, inner._generation, finish)
        self._inner, self._survivors = inner, survivors
        self._deadline = time.monotonic() + survivors.timeout_seconds + PATIENCE_SECONDS
        self._settling = threading.Lock()
        self._outcome: ReshardError | None = None
        self._is_settled = False

    def done(self) -> bool:
        """True once the transfer itself is over."""
        return self._inner.done()

    def wait(self, timeout_seconds: float | None = None) -> Any:
        """As of any handle; then wait for the other ranks, and do what losses left to do.

        Raises:
            RankLostError: see ``on_loss`` of :func:`reshard.reshard`.
        """
        self.check_process()
        if not self._inner._done.wait(check_patience(timeout_seconds)):
            raise TransferTimeoutError(f"the transfer is not over after {timeout_seconds:g} s; it goes on")
        with self._settling:
            if not self._is_settled:
                self._outcome, self._is_settled = self._settle(), True
        if self._outcome is not None:
            raise self._outcome
        return self._take()

    def _settle(self) -> ReshardError | None:
        error: ReshardError | None = None
        try:
            self._inner.check()
        except ReshardError as failed:
            error = failed
        try:
            self._survivors.settle(error, self._inner.tally, self._deadline)
        except RankLostError as lost:
            recover = lost._recover
            if recover is not None:
                lost._recover = lambda: self._recover(recover)
            return lost
        except ReshardError as failed:
            if self._inner.describe is not None:
                failed.add_note(self._inner.describe())
            return failed
        return None

    def _recover(self, recover: Callable[[], Any]) -> Any:
        """What ``recover`` of an error does: the result, as :meth:`wait` would have given it."""
        recover()
        self._outcome = None
        return self._take()
