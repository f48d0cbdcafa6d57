"""The transfers of a Mover whose tensors travel as buckets: the ranks agree on the sizes of the buckets before each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from reshard.api.arguments.transfer_arrays import MoverArrays
from reshard.api.arrays.memory_in_use import reserve_until_waited
from reshard.api.arrays.tensor_checks import check_base, check_no_aliasing, detach_source
from reshard.api.lossless.encoding import find_capacities
from reshard.api.lossless.lossless_handle import LosslessHandle
from reshard.api.lossless.lossless_transfer import CallArrays, LosslessTransfer
from reshard.api.preparation.agreed_plan import AgreedPlan
from reshard.api.transfers.handle import Handle, TransferState
from reshard.api.transfers.opened_plan import OpenTransfers, open_plan
from reshard.codecs import has_base
from reshard.errors import ArgumentError, ReshardError
from reshard.planner import plan_tensors


class LosslessTransfers:
    """One rank's part of the transfers of a plan, whose tensors travel as buckets.

    Args:
        agreed: the plan of the tensors as they are.
        codec: ``"delta"`` or ``"bf16-lossless"``.
        timeout_seconds: limit of each agreement and of each transfer.
        verify: compare digests after each transfer.
        both_ways: see :class:`reshard.Mover`.
    """

    def __init__(self, agreed: AgreedPlan, codec: str, timeout_seconds: float, verify: bool, both_ways: bool) -> None:
        self._call_group, self._plan, self._codec = agreed.call_group, agreed.plan, codec
        self._timeout_seconds, self._verify, self._both_ways = timeout_seconds, verify, both_ways
        self._inner: OpenTransfers | None = None
        self._capacities: Mapping[str, int] = {}

    def start(self, given: MoverArrays | Exception, finish: Callable[[], Any]) -> LosslessHandle:
        """Agree on the buckets, and start to move them.

        Args:
            given: the arrays of this rank, or what is wrong with them.
            finish: returns the result, after the destination shards are written.

        Raises:
            ReshardError: the arrays of a rank are wrong; the same on all ranks. No data has moved.
        """
        names = [spec.name or "" for spec in self._plan.tensors]
        failure = given if isinstance(given, Exception) else None
        arrays, targets = CallArrays({}, {}, {}), dict[str, torch.Tensor | None]()
        if not isinstance(given, Exception):
            try:
                self._check_bases(given, names)
                targets = dict(zip(names, given.targets, strict=True))
                outs = [None if out is None else target for out, target in zip(given.outs, given.targets, strict=True)]
                sources, bases = (list(map(detach_source, side)) for side in (given.sources, given.bases))
                arrays = CallArrays(*(dict(zip(names, side, strict=True)) for side in (sources, bases, outs)))
            except Exception as error:
                failure = error
        transfer = LosslessTransfer(
            self._call_group,
            self._codec,
            self._plan.tensors,
            arrays,
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

        handle = LosslessHandle(started, report, complete, finish)
        reserve_until_waited(handle, (), list(targets.values()))
        return handle

    def close(self) -> None:
        """End the transfers of the buckets, after those in progress."""
        if self._inner is not None:
            self._inner.close()
        self._inner = None

    def _check_bases(self, given: MoverArrays, names: Sequence[str]) -> None:
        for name, base, source in zip(names, given.bases, given.sources, strict=True):
            what = f"tensor {name!r}" if name else "the tensor"
            if base is not None and not has_base(self._codec):
                raise ArgumentError(f"{what}: base= is for compression='delta', not {self._codec!r}")
            if base is not None:
                check_base(base, source, what, self._call_group.group.rank)
        role = "a base, which the transfer must not change"
        check_no_aliasing(given.bases, given.targets, names, role)

    def _start_buckets(self, transfer: LosslessTransfer) -> tuple[Handle, list[torch.Tensor | None]]:
        """The handle of this rank's part of the transfer, and the buffers that receive its buckets.

        An error is raised when the ranks confirm the transfer, because ranks without buckets take part only in that.
        """
        state = TransferState(self._call_group, self._call_group.generation)
        own = Handle(state, lambda: None)
        if transfer.is_idle:
            state.succeed()
            return own, transfer.arrays()[1]
        try:
            inner = self._find_inner(transfer)
        except ReshardError as error:
            state.stop(error)
            return own, transfer.arrays()[1]
        sent, received = transfer.arrays(self._capacities)
        return inner.start(sent, received, lambda: None), received

    def _find_inner(self, transfer: LosslessTransfer) -> OpenTransfers:
        """Transfers whose buffers hold the buckets. They are kept while they are not much larger than needed."""
        capacities = find_capacities(transfer.sizes, self._capacities)
        if self._inner is None or capacities != self._capacities:
            self.close()
            self._capacities = capacities
            specs, topology = transfer.specs(capacities), self._plan.topology
            plan = plan_tensors(specs, topology=topology, staging_bytes=self._plan.staging_bytes)
            group = self._call_group.group
            with group.nesting():
                limit, both_ways = self._timeout_seconds, self._both_ways
                self._inner = open_plan(plan, group, timeout_seconds=limit, both_ways=both_ways).transfers
        return self._inner
