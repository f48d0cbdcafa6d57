"""Starts a call whose tensors travel as streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reshard.api.agreed_plan import AgreedPlan
from reshard.api.inputs import Item
from reshard.api.mover import Mover
from reshard.api.mover_arrays import find_target, wrap_results
from reshard.api.streams.transfer import CallArrays, StreamedHandle, StreamTransfer
from reshard.api.transfers import Handle
from reshard.api.validation import Options
from reshard.coordination import Channel, Decision
from reshard.errors import ReshardError
from reshard.sharding import TensorSpec


class StreamedCall:
    """A call on one rank after the agreement on its arguments.

    Args:
        call, decision: number and result of the agreement. items: the tensors, as this rank passes them.
    """

    def __init__(
        self,
        channel: Channel,
        call: int,
        decision: Decision,
        items: Sequence[Item],
        options: Options,
        timeout_seconds: float,
    ) -> None:
        self._channel, self._call, self._decision, self._items = channel, call, decision, items
        self._options, self._timeout_seconds = options, timeout_seconds

    def start(self, specs: Sequence[TensorSpec], purpose: str, plan: Callable[..., Any]) -> Handle:
        """Agree on the streams and start to move them.

        Args:
            specs: the tensors. purpose: of the call's rounds. plan: returns the agreed plan of ``streams=``.
        """
        channel, decision, rank = self._channel, self._decision, self._channel.group.rank
        transfer = StreamTransfer(
            channel,
            self._options.compression,
            specs,
            CallArrays(
                {item.name: item.tensor for item in self._items},
                {item.name: item.base for item in self._items},
                {item.name: item.out for item in self._items},
            ),
            self._timeout_seconds,
            purpose,
            verify=self._options.verify,
        )
        report = transfer.offer()
        agreed_plan, program, runner, _ = plan(streams=transfer.specs())
        try:
            sent, received = transfer.arrays()
            targets = [
                find_target(item, spec.dst_shards.local_shape(rank) if rank in spec.dst.ranks else None, decision, rank)
                for item, spec in zip(self._items, specs, strict=True)
            ]
            agreed = AgreedPlan(agreed_plan, program, runner, channel, self._call, decision)
            mover = Mover.agreed(agreed, self._timeout_seconds, verify=False)  # the streams have digests of their own
        except Exception as error:  # for example out of memory; the other ranks wait for this one
            raise channel.fail(decision.generation, error) from error
        inner = mover.start_checked(sent, received, lambda: None)
        mover.close()
        by_name = {item.name: target for item, target in zip(self._items, targets, strict=True)}

        def complete(error: ReshardError | None) -> None:
            transfer.complete(error, received, by_name)

        return StreamedHandle(inner, report, complete, lambda: wrap_results(self._items, targets, decision))
