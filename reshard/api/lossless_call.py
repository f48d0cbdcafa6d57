"""Starts a call whose tensors travel as buckets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from reshard.api.agreed_plan import AgreedPlan
from reshard.api.handle import Handle
from reshard.api.inputs import Item
from reshard.api.lossless.transfer import CallArrays, LosslessReport, LosslessTransfer
from reshard.api.lossless_handle import LosslessHandle
from reshard.api.memory_in_use import note_wait
from reshard.api.mover_arrays import find_target, wrap_results
from reshard.api.recovery import FaultTolerantHandle, Recovery
from reshard.api.transfers import open_transfers
from reshard.api.validation import Options
from reshard.coordination import Channel, Decision
from reshard.errors import RankLostError, ReshardError
from reshard.formatting import format_ranks
from reshard.sharding import TensorSpec


class LosslessCall:
    """A call on one rank after the agreement on its arguments.

    Args:
        call, decision: number and result of the agreement. items: the tensors, as this rank passes them.
        lost: ranks that were lost before.
    """

    def __init__(
        self,
        channel: Channel,
        call: int,
        decision: Decision,
        items: Sequence[Item],
        options: Options,
        timeout_seconds: float,
        lost: Collection[int],
    ) -> None:
        self._channel, self._call, self._decision, self._items = channel, call, decision, items
        self._options, self._timeout_seconds, self._lost = options, timeout_seconds, lost

    def start(self, specs: Sequence[TensorSpec], purpose: str, plan: Callable[..., Any]) -> Handle:
        """Agree on the buckets and start to move them.

        Args:
            specs: the tensors. purpose: of the call's rounds. plan: returns the agreed plan of ``buckets=``.
        """
        options, rank = self._options, self._channel.group.rank
        transfer = LosslessTransfer(
            self._channel,
            options.compression,
            specs,
            CallArrays(
                {item.name: item.tensor for item in self._items},
                {item.name: item.base for item in self._items},
                {item.name: item.out for item in self._items},
            ),
            self._timeout_seconds,
            purpose,
            verify=options.verify,
            lost=self._lost if options.fault_tolerant else None,
        )
        report = transfer.offer()
        channel, call, decision = self._channel, self._call, self._decision
        if transfer.last_round is not None:  # lost ranks may have left a channel of fewer ranks
            channel, call, generation = transfer.last_round
            decision = replace(decision, generation=generation)
        buckets = transfer.specs()
        agreed_plan, program, runner, lost = plan(channel, buckets=buckets) if buckets else (None, None, None, set())
        lost |= transfer.lost
        try:
            sent, received = transfer.arrays()
            targets = [
                find_target(item, spec.dst_shards.local_shape(rank) if rank in spec.dst.ranks else None, decision, rank)
                for item, spec in zip(self._items, specs, strict=True)
            ]
        except Exception as error:  # for example out of memory; the other ranks wait for this one
            raise channel.fail(decision.generation, error) from error
        by_name = {item.name: target for item, target in zip(self._items, targets, strict=True)}

        def complete(error: ReshardError | None) -> None:
            transfer.complete(error, received, by_name)

        def finish() -> Any:
            return wrap_results(self._items, targets, decision)

        handle: Handle
        if agreed_plan is None:  # no surviving rank receives anything
            inner = Handle(channel, decision.generation, lambda: None)
            inner.watch.succeed()
        else:
            agreed = AgreedPlan(agreed_plan, program, runner, channel, call, decision)
            inner = self._start(agreed, sent, received, lost)
        if agreed_plan is None or not options.fault_tolerant:
            handle = LosslessHandle(inner, report, complete, finish)
        else:
            recovery = Recovery(channel, agreed_plan, sent, received, lost, options, self._timeout_seconds)

            def complete_recovered() -> None:
                transfer.exclude(recovery.survivors)
                complete(None)

            def explain(error: ReshardError) -> ReshardError:
                transfer.exclude(recovery.survivors)
                return transfer.explain(error)

            handle = RecoveredLosslessHandle(inner, recovery, report, complete_recovered, explain, finish)
        note_wait(handle, (), targets)
        return handle

    def _start(self, agreed: AgreedPlan, sent: Sequence[Any], received: Sequence[Any], lost: set[int]) -> Handle:
        """The handle of this rank's part, which has failed already if ranks were lost."""
        channel, generation = agreed.channel, agreed.decision.generation
        failed: ReshardError | None = None
        try:
            if lost:
                failed = RankLostError(f"ranks {format_ranks(sorted(lost))} did not call in time")
            else:  # the buckets have digests of their own
                transfers = open_transfers(agreed, self._timeout_seconds, verify=False, is_one_call=True)
        except Exception as error:
            failed = channel.fail(generation, error)
            if not self._options.fault_tolerant:
                raise failed from error
        if failed is not None:
            handle = Handle(channel, generation, lambda: None)
            handle.watch.stop(failed)
            return handle
        inner = transfers.start(sent, received, lambda: None)
        transfers.close()
        return inner


class RecoveredLosslessHandle(FaultTolerantHandle):
    """A fault-tolerant transfer of buckets: the surviving ranks recover missing buckets, confirm all, and decode them.

    Args:
        complete: confirms and decodes the buckets, once this rank has its own.
        explain: adds to the error of a failed recovery what is lost, and what every out holds.

    Attributes:
        report: how the tensors are sent.
    """

    def __init__(
        self,
        inner: Handle,
        recovery: Recovery,
        report: LosslessReport,
        complete: Callable[[], None],
        explain: Callable[[ReshardError], ReshardError],
        finish: Callable[[], Any],
    ) -> None:
        super().__init__(inner, recovery, finish)
        self._complete_buckets, self._explain = complete, explain
        self.report = report

    def _complete(self) -> ReshardError | None:
        found = super()._complete()
        return self._decode() if found is None else self._explain(found)

    def _recover(self, recover: Callable[[], Any]) -> Any:
        try:
            recover()
        except ReshardError as error:
            raise self._explain(error) from error
        self._final_error = self._decode()
        if self._final_error is not None:
            raise self._final_error
        return self._take_result()

    def _decode(self) -> ReshardError | None:
        try:
            self._complete_buckets()
        except ReshardError as error:
            return error
        return None
