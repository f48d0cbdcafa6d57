"""A Mover plans once and moves many times."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from reshard.api.arguments.transfer_arrays import ArrayReader, MoverArrays, shard_shapes
from reshard.api.arrays.casts import finish_received, unfinished, wire_source, wire_target
from reshard.api.arrays.dtensors import is_dtensor
from reshard.api.arrays.memory_in_use import check_unused, reserve_until_waited
from reshard.api.arrays.tensor_checks import check_no_aliasing, detach_source, wait_for_collective
from reshard.api.lossless.lossless_mover import LosslessTransfers
from reshard.api.transfers.handle import Handle, PostedTransfer
from reshard.api.transfers.opened_plan import open_plan
from reshard.api.transfers.queued_transfers import QueuedTransfers
from reshard.coordination import Owner, find_group, leave_interrupted, publish_exceptions, publish_interruption
from reshard.errors import ArgumentError, ReshardError
from reshard.plan import Plan
from reshard.public_api import not_compiled
from reshard.runtime.cuda.host_copies import to_device, to_host
from reshard.runtime.cuda.stream import is_capturing
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS


def _leave_opening(error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count and publish that this rank gave up making a Mover, after an exception before its group knew of it."""
    given = dict(zip(("self", "plan", "group"), args, strict=False)) | kwargs
    leave_interrupted(error, find_group(given.get("group")), lambda: given["plan"].ranks)


def _fail_interrupted(error: BaseException, args: tuple[Any, ...], _: dict[str, Any]) -> None:
    """End the transfers of a Mover on all ranks: one of them may wait for a transfer that this rank has not started."""
    fail_transfers(args[0], error)


@dataclass(frozen=True)
class _PlainShards:
    """Names, shapes and dtypes of a rank's source and destination shards in a plan without codecs.

    A side is empty if the rank has no shards on it. ``none`` has a None for each name.
    """

    names: tuple[str, ...]
    none: list[None]
    src: tuple[tuple[torch.Size, torch.dtype], ...]
    dst: tuple[tuple[torch.Size, torch.dtype], ...]

    @classmethod
    def of(cls, plan: Plan, rank: int) -> _PlainShards | None:
        """The shards of a rank. None if a tensor has no name or a codec, or if a side lacks some of the tensors."""
        names = tuple(spec.name for spec in plan.tensors if spec.name is not None)
        if len(names) < len(plan.tensors) or any(spec.codec is not None for spec in plan.tensors):
            return None
        sides = []
        for side in ("src", "dst"):
            shapes = shard_shapes(plan, rank, side)
            dtypes = [getattr(torch, spec.dtype) for spec in plan.tensors]
            forms = [(torch.Size(s), d) for s, d in zip(shapes, dtypes, strict=True) if s is not None]
            if len(forms) not in (0, len(names)):
                return None
            sides.append(tuple(forms))
        return cls(names, [None] * len(names), *sides)

    def read(self, tensors: Mapping[str, torch.Tensor] | None) -> list[torch.Tensor] | None:
        """The source shards in order; None if one of them is not a plain tensor of its shape and dtype on the CPU."""
        if not self.src:
            return None if tensors else []
        if tensors is None or len(tensors) != len(self.names):
            return None
        arrays = []
        for name, (shape, dtype) in zip(self.names, self.src, strict=True):
            array: Any = tensors.get(name)
            if (
                type(array) is not torch.Tensor
                or array.shape != shape
                or array.dtype != dtype
                or array.requires_grad
                or not array.is_cpu
                or array.layout is not torch.strided
                or array.is_conj()
                or array.is_neg()
            ):
                return None
            arrays.append(array)
        return arrays


class Mover:
    """Executes one plan many times, without planning, connecting or allocating per call.

    Use it as a context manager, or call :meth:`close`. All ranks of the plan must create their Movers in the same
    order and start the same number of transfers. Only the thread that created a Mover may start its transfers, until
    that thread ends.

    Args:
        plan: the plan, equal on all ranks. Checked once, as by :func:`reshard.check_plan`, unless
            :func:`reshard.make_plan` made it in this process.
        group: the process group (default: the world) or the result of :func:`reshard.join` that the plan's ranks
            refer to.
        timeout_seconds: limit for the agreement of the ranks, and again for each transfer.
        device: device type of the arrays, ``"cpu"`` or ``"cuda"``; the latter is the current CUDA device.
        verify: compare digests of the sent data, of the arrived data and of replicas after each transfer.
        both_ways: another Mover transfers in the opposite direction between the same ranks at the same time, so each
            direction gets its own connections. The same on all ranks.
        fault_tolerant: ranks that do not join in time are excluded from the group permanently.
        communicator_index: on a GPU, Movers with the same index share an NCCL communicator and must start their
            transfers in the same order on every rank; Movers with different indices use separate communicators. The
            same on all ranks.
        compression: ``"delta"`` or ``"bf16-lossless"``, for a plan without codecs; see :func:`reshard.reshard`. This
            names one format, where ``"lossless"`` of :class:`reshard.weights.Publisher` chooses among several. Each
            :meth:`start` then agrees on the sizes of the buckets, and plans again if they no longer fit. Every rank
            must call ``wait`` of each handle, in the same order. Codecs of blocks are part of a plan.

    Raises:
        PlanError: the plan does not deliver every element.
        DisagreementError: ranks pass different plans or options.
        ArgumentError: the plan names ranks outside the group.
        TransferTimeoutError: a rank did not join in time. RankLostError: with ``fault_tolerant``, ranks were lost.
    """

    @publish_exceptions(_leave_opening)
    @not_compiled
    def __init__(
        self,
        plan: Plan,
        group: Any = None,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        device: str = "cpu",
        verify: bool = False,
        both_ways: bool = False,
        fault_tolerant: bool = False,
        communicator_index: int = 0,
        compression: str | None = None,
    ) -> None:
        members = find_group(group)
        with publish_interruption(members, lambda: plan.ranks):
            opened = open_plan(
                plan,
                members,
                timeout_seconds=timeout_seconds,
                device=device,
                verify=verify,
                both_ways=both_ways,
                fault_tolerant=fault_tolerant,
                communicator_index=communicator_index,
                compression=compression,
            )
            agreed = opened.agreed
            self.plan, self._agreed, self._transfers, self._is_copied = plan, agreed, opened.transfers, opened.is_copied
            self._group = agreed.call_group.group
            self._reader = ArrayReader(plan, agreed.program, self._group, device)
            self._lossless: LosslessTransfers | None = None
            if compression is not None:
                self._lossless = LosslessTransfers(
                    agreed, compression, self._transfers.timeout_seconds, verify, both_ways
                )
            self._owner, self._closed = Owner(), False
            self._plain_shards: _PlainShards | None = None
            if isinstance(opened.transfers, QueuedTransfers) and not opened.is_copied and compression is None:
                self._plain_shards = _PlainShards.of(plan, agreed.program.rank)

    @property
    def staging_allocated_bytes(self) -> int:
        """Bytes allocated beyond the source and destination shards; at most the plan's ``staging_bytes``."""
        return self._transfers.allocated_bytes

    @publish_exceptions(_fail_interrupted)
    @not_compiled
    def __call__(
        self, tensor: Any = None, *, out: Any = None, base: Any = None, timeout_seconds: float | None = None
    ) -> Any:
        """Start a transfer and wait for its result; see :meth:`start` and :meth:`Handle.wait`."""
        return self.start(tensor, out=out, base=base).wait(timeout_seconds)

    @publish_exceptions(_fail_interrupted)
    @not_compiled
    def start(self, tensor: Any = None, *, out: Any = None, base: Any = None) -> Handle:
        """Start a transfer.

        Args:
            tensor: this rank's source shard or DTensor, or ``{name: shard}`` for a plan of named tensors; None
                outside the source. It must not change until the transfer has ended.
            out: where to write the destination shard: a tensor or DTensor, or ``{name: array}``. Default: allocated.
            base: with ``compression="delta"``: this rank's source shard of the version that ``out`` of the destination
                ranks holds, as for :func:`reshard.reshard`.

        Returns:
            A handle. Several transfers may be in progress; they finish in the order in which they were started.

        Raises:
            ArgumentError: an array does not fit the plan, or an unfinished transfer of another Mover or call writes the
                source, or reads or writes ``out``; this error ends all unfinished transfers of the Mover on
                every rank. Also if the Mover or its group is closed, or was created by another thread or process.
        """
        self._group.check_usable()
        if self._closed:
            raise ArgumentError("this Mover is closed")
        with self._owner.starting(self._agreed.program.rank, functools.partial(fail_transfers, self)):
            if self._lossless is None:
                return self._start(tensor, out, base)
            if is_capturing():
                raise ArgumentError("a CUDA graph cannot capture transfers of encoded tensors")
            return self._start_lossless(self._lossless, tensor, out, base)

    def _start(self, tensor: Any, out: Any, base: Any) -> Handle:
        call_group, generation = self._agreed.call_group, self._agreed.decision.generation
        tensors, device = self.plan.tensors, self._agreed.decision.device_type
        try:
            if base is not None:
                raise ArgumentError("base= is for a Mover with compression='delta'; this one has no compression")
            arrays = self._read(tensor, out, base, self._transfers.order)
            sent = [
                wire_source(detach_source(array), spec, device)
                for array, spec in zip(arrays.sources, tensors, strict=True)
            ]
            received = [wire_target(array, spec, device) for array, spec in zip(arrays.targets, tensors, strict=True)]
            if is_capturing() and any(spec.codec is not None for spec in tensors):
                raise ArgumentError("a CUDA graph cannot capture transfers of encoded tensors")
        except ReshardError as error:
            if is_capturing():  # nothing has run, and an abort would spoil the capture and hide this error
                raise
            raise call_group.fail(generation, error) from None
        except BaseException as error:  # such as KeyboardInterrupt; the other ranks have started this transfer
            call_group.fail(generation, error)
            raise

        def finish() -> Any:
            finish_received(received, arrays.targets)
            return self._results(tensor, arrays)

        handle = self._transfers.start(sent, received, finish)
        reserve_until_waited(handle, (), arrays.results if self._is_copied else unfinished(received, arrays.targets))
        return handle

    def _start_lossless(self, lossless: LosslessTransfers, tensor: Any, out: Any, base: Any) -> Handle:
        arrays: MoverArrays | Exception
        try:
            arrays = self._read(tensor, out, base)
        except Exception as error:  # the other ranks receive it in the agreement on the buckets
            return lossless.start(error, lambda: None)
        handle = lossless.start(arrays, lambda: self._results(tensor, arrays))
        reserve_until_waited(handle, (), arrays.results if self._is_copied else ())
        return handle

    def _read(self, tensor: Any, out: Any, base: Any, owner: object = None) -> MoverArrays:
        """The arrays of a transfer, checked.

        Transfers of ``owner`` may still use these arrays, because they end before this transfer begins.
        """
        names = [spec.name for spec in self.plan.tensors]
        sources = self._reader.sources(self.plan.by_tensor(tensor))
        bases = [
            wait_for_collective(item.to_local() if is_dtensor(item) else item) for item in self.plan.by_tensor(base)
        ]
        outs = self.plan.by_tensor(out)
        results = self._reader.dst_shards(outs)
        check_no_aliasing(sources, results, names)
        check_unused(sources, results, names, owner, bases)
        if not self._is_copied:
            return MoverArrays(sources, bases, outs, results, results)
        on_host = [list(map(to_host, arrays)) for arrays in (sources, bases, results)]
        return MoverArrays(on_host[0], on_host[1], outs, results, on_host[2])

    def _results(self, tensor: Any, arrays: MoverArrays) -> Any:
        """The results of a transfer: the destination shards, or the DTensors that the caller passed as ``out``."""
        for host, result in zip(arrays.targets, arrays.results, strict=True):
            if self._is_copied and host is not None and result is not None:
                to_device(host, result.device, result)
        names = [spec.name for spec in self.plan.tensors]
        results = [out if is_dtensor(out) else array for out, array in zip(arrays.outs, arrays.results, strict=True)]
        is_named = isinstance(tensor, Mapping) or names[0] is not None
        return dict(zip(names, results, strict=True)) if is_named else results[0]

    @not_compiled
    def close(self) -> None:
        """End the progress thread after the transfers in progress. The group's connections stay open."""
        if not self._closed:
            self._closed = True
            self._transfers.close()
            if self._lossless is not None:
                self._lossless.close()

    def __reduce__(self) -> Any:
        raise ArgumentError("a Mover cannot be copied or pickled: its connections belong to one object; make another")

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def empty_out(self) -> Any:
        """An uninitialized array for this rank's destination shard, to pass as ``out=``; None outside the destination.

        For a plan of named tensors ``{name: array}``.
        """
        arrays = self._reader.empty_targets()
        if self.plan.tensors[0].name is None:
            return arrays[0]
        return {spec.name: array for spec, array in zip(self.plan.tensors, arrays, strict=True)}


def start_checked(mover: Mover, tensors: Mapping[str, torch.Tensor] | None = None) -> Handle | PostedTransfer:
    """Like :meth:`Mover.start`, for callers that no compiled code calls, and that publish their exceptions themselves.

    They must wait for every transfer.

    Args:
        mover: moves named tensors.
        tensors: source shards that no unfinished transfer writes; None outside the source.
    """
    shards, transfers = mover._plain_shards, mover._transfers
    sources = None if shards is None else shards.read(tensors)
    if shards is None or sources is None or not isinstance(transfers, QueuedTransfers):
        return mover.start(tensors)
    mover._group.check_usable()
    if mover._closed:
        raise ArgumentError("this Mover is closed")
    if not mover._owner.may_start():
        mover._owner.check(mover._agreed.program.rank, functools.partial(fail_transfers, mover))
    results: list[Any] = [torch.empty(shape, dtype=dtype) for shape, dtype in shards.dst] or shards.none
    received = dict(zip(shards.names, results, strict=True))
    posted = transfers.post(sources or shards.none, results, received)
    if posted is None:
        return transfers.start(sources or shards.none, results, lambda: received, is_noted=False)
    return posted


def fail_transfers(mover: Mover, error: BaseException) -> ReshardError:
    """End all transfers in progress between the ranks of a Mover, on every rank. Returns the error that they raise."""
    agreed = mover._agreed
    return agreed.call_group.fail(agreed.decision.generation, error)


def check_transfers(mover: Mover) -> None:
    """Raise the error that another rank of a Mover published, or ArgumentError if the group is closed."""
    agreed = mover._agreed
    agreed.call_group.group.check_usable()
    agreed.call_group.check_reported(agreed.decision.generation)
