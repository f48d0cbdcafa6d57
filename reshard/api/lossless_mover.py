"""The transfers of a Mover whose tensors travel as buckets: the ranks agree on the sizes of the buckets before each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from reshard.api.handle import Handle
from reshard.api.lossless.encoding import find_capacities
from reshard.api.lossless.transfer import Arrays, CallArrays, LosslessTransfer, check_dtypes
from reshard.api.lossless_handle import LosslessHandle
from reshard.api.memory_in_use import note_wait
from reshard.api.tensor_checks import check_base, check_no_aliasing, detach_source
from reshard.codecs import LOSSLESS_CODECS
from reshard.coordination import Channel
from reshard.errors import ArgumentError, ReshardError
from reshard.plan import Plan
from reshard.planner import plan_tensors


class InnerMover(Protocol):
    """What the buckets need of the Mover that moves them."""

    def start_checked(self, src: Any, dst: Any, finish: Callable[[], Any]) -> Handle:
        """See :meth:`reshard.Mover.start_checked`."""

    def close(self) -> None:
        """See :meth:`reshard.Mover.close`."""


class LosslessTransfers:
    """One rank's part of the transfers of a plan, whose tensors travel as buckets.

    Args:
        channel: of the ranks of the plan. plan: of the tensors as they are. codec: ``"delta"`` or ``"bf16-lossless"``.
        open_mover: makes a Mover for a plan of buckets; all ranks call it together.
    """

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        codec: str,
        timeout_seconds: float,
        verify: bool,
        open_mover: Callable[[Plan], InnerMover],
    ) -> None:
        self._channel, self._plan, self._codec = channel, plan, codec
        self._timeout_seconds, self._verify, self._open_mover = timeout_seconds, verify, open_mover
        self._inner: InnerMover | None = None
        self._capacities: Mapping[str, int] = {}

    def start(
        self, read: Callable[[], tuple[Arrays, Arrays, Arrays, Arrays]], finish: Callable[[Arrays], Any]
    ) -> LosslessHandle:
        """Agree on the buckets, and start to move them.

        Args:
            read: returns sources, bases, outs that the caller passed, and arrays to write, by name; it raises if they
                are wrong. finish: returns the result, from the arrays to write.

        Raises:
            ReshardError: the arrays of a rank are wrong; the same on all ranks. No data has moved.
        """
        failure: Exception | None = None
        sources: Arrays = {}
        bases, outs, targets = sources, sources, sources
        try:
            sources, bases, outs, targets = read()
            self._check_bases(bases, sources, targets)
        except Exception as error:
            failure = error
        detached = [{name: detach_source(array) for name, array in one.items()} for one in (sources, bases)]
        transfer = LosslessTransfer(
            self._channel,
            self._codec,
            self._plan.tensors,
            CallArrays(detached[0], detached[1], outs),
            self._timeout_seconds,
            "of a Mover",
            verify=self._verify,
        )
        report = transfer.offer(failure)
        started, received = self._start_buckets(transfer)

        def complete(error: ReshardError | None) -> None:
            try:
                transfer.complete(error, received, targets)
            except ReshardError:
                self.close()  # its connections may be broken
                raise

        handle = LosslessHandle(started, report, complete, lambda: finish(targets))
        note_wait(handle, (), list(targets.values()))
        return handle

    def close(self) -> None:
        """Close the Mover of the buckets, after the transfers in progress."""
        if self._inner is not None:
            self._inner.close()
        self._inner = None

    def _check_bases(self, bases: Arrays, sources: Arrays, targets: Arrays) -> None:
        names = [spec.name or "" for spec in self._plan.tensors]
        for name in names:
            what = f"tensor {name!r}" if name else "the tensor"
            if bases[name] is not None and self._codec != "delta":
                raise ArgumentError(f"{what}: base= is for compression='delta', not {self._codec!r}")
            if bases[name] is not None:
                check_base(bases[name], sources[name], what, self._channel.group.rank)
        role = "a base, which the transfer must not change"
        check_no_aliasing([bases[name] for name in names], [targets[name] for name in names], names, role)

    def _start_buckets(self, transfer: LosslessTransfer) -> tuple[Handle, list[torch.Tensor | None]]:
        """The handle of this rank's part of the transfer, and the buffers that receive its buckets.

        An error is raised when the ranks confirm the transfer: a rank without buckets learns of it only then.
        """
        own = Handle(self._channel, self._channel.generation, lambda: None)
        if transfer.is_idle:
            own.watch.succeed()
            return own, transfer.arrays()[1]
        try:
            inner = self._find_inner(transfer)
        except ReshardError as error:
            own.watch.stop(error)
            return own, transfer.arrays()[1]
        sent, received = transfer.arrays(self._capacities)
        return inner.start_checked(sent, received, lambda: None), received

    def _find_inner(self, transfer: LosslessTransfer) -> InnerMover:
        """A Mover whose buffers hold the buckets. It is kept while they are not much larger than needed."""
        capacities = find_capacities(transfer.sizes, self._capacities)
        if self._inner is None or capacities != self._capacities:
            self.close()
            self._capacities = capacities
            self._inner = self._open_mover(
                plan_tensors(
                    transfer.specs(self._capacities),
                    topology=self._plan.topology,
                    staging_bytes=self._plan.staging_bytes,
                )
            )
        return self._inner


def check_lossless_codec(codec: Any, plan: Plan) -> None:
    """Raise ArgumentError unless a Mover of this plan can send its tensors as buckets of this codec."""
    if codec not in LOSSLESS_CODECS:
        raise ArgumentError(
            f"compression of a Mover is {codec!r}; it must be one of {', '.join(map(repr, LOSSLESS_CODECS))}: pass "
            "other codecs to make_plan"
        )
    for spec in plan.tensors:
        if spec.codec is not None:
            raise ArgumentError(f"the plan has tensors of codec {spec.dtype}, which {codec} cannot code again")
    check_dtypes(codec, plan.tensors)
