"""A Mover plans once and moves many times."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from reshard.api.agreed_plan import AgreedPlan
from reshard.api.casts import finish_received, unfinished, wire_source, wire_target
from reshard.api.dtensors import is_dtensor
from reshard.api.handle import Handle
from reshard.api.lossless.transfer import Arrays
from reshard.api.lossless_mover import LosslessTransfers, check_lossless_codec
from reshard.api.memory_in_use import check_unused, note_wait
from reshard.api.mover_arrays import MoverArrays
from reshard.api.options import check_coding, check_device_type, check_verify, codes_on_cpu
from reshard.api.queued_transfers import QueuedTransfers
from reshard.api.streamed_transfers import StreamedTransfers
from reshard.api.tensor_checks import check_no_aliasing, detach_source, wait_for_collective
from reshard.coordination import (
    Owner,
    Request,
    calling,
    check_inside,
    describe_error,
    find_channel,
    find_group,
    plan_arguments,
    publish_exceptions,
    publish_interruption,
    report_error,
    resolve_partial,
    warn_of_hosts,
)
from reshard.errors import ArgumentError, RankLostError, ReshardError
from reshard.formatting import format_ranks
from reshard.plan import Plan, ensure_checked
from reshard.public_api import not_compiled
from reshard.runtime.cuda.host_copies import is_copied, to_device, to_host
from reshard.runtime.cuda.stream import is_capturing, make_runner
from reshard.runtime.program import build_program
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout


def _fail_interrupted(error: BaseException, mover: Mover, *_: Any, **__: Any) -> None:
    """End the transfers of a Mover on all ranks: one of them may wait for a transfer that this rank has not started."""
    mover.fail(error)


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
        connection: on a GPU, Movers with the same number share a communicator and must start their transfers in the
            same order on every rank; Movers with different numbers use separate communicators. The same on all ranks.
        compression: ``"delta"`` or ``"bf16-lossless"``, for a plan without codecs; see :func:`reshard.reshard`. Each
            :meth:`start` then agrees on the sizes of the buckets, and plans again if they no longer fit. Every rank
            must call ``wait`` of each handle, in the same order. Codecs of blocks are part of a plan.

    Raises:
        PlanError: the plan does not deliver every element.
        DisagreementError: ranks pass different plans or options.
        ArgumentError: the plan names ranks outside the group.
        TransferTimeoutError: a rank did not join in time. RankLostError: with ``fault_tolerant``, ranks were lost.
    """

    _lossless: LosslessTransfers | None = None

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
        connection: int = 0,
        compression: str | None = None,
    ) -> None:
        found = find_group(group)
        try:
            if not isinstance(plan, Plan):
                raise ArgumentError(f"a Mover needs a Plan, not {type(plan).__name__}")
            check_inside(found, plan.ranks)
        except ReshardError as error:
            report_error(found, error)
            raise
        channel = find_channel(found, plan.ranks)
        program = runner = failure = None
        needs_cpu, used = False, device  # type of the device that the transfers run on
        options = {"both_ways": bool(both_ways), "device": device, "verify": bool(verify)}
        options |= {"connection": connection, "compression": compression}
        arguments: list[tuple[str, str]] = []
        try:
            timeout_seconds = check_timeout(timeout_seconds)
            check_device_type(device)
            if is_capturing():
                raise ArgumentError("a Mover cannot be made during the capture of a CUDA graph: make it before")
            check_verify(verify)
            if compression is not None:
                check_lossless_codec(compression, plan)
            needs_cpu = verify or compression is not None or any(codes_on_cpu(spec.codec) for spec in plan.tensors)
            used = "cpu" if is_copied(device, needs_cpu) else device
            check_coding(plan, used)
            ensure_checked(plan)
            arguments = [*plan_arguments(plan), *((name, str(value)) for name, value in options.items())]
            program = build_program(plan, channel.group.rank)
            runner = make_runner(plan, program, used)
        except Exception as raised:  # the plan is wrong, or this rank cannot execute it
            failure = describe_error(raised) if isinstance(raised, ReshardError) else ("PlanError", str(raised))
            timeout_seconds = DEFAULT_TIMEOUT_SECONDS
        request = Request(channel.group.rank, arguments, hostname=channel.group.hostname, error=failure)
        with publish_interruption(found), calling(found):
            decide = functools.partial(resolve_partial, layouts={}, members=plan.ranks)
            call, decision = channel.agree(request, decide, timeout_seconds, fault_tolerant)
            if decision.lost:
                raise RankLostError(f"ranks {format_ranks(decision.lost)} did not join in time", decision.lost)
            assert program is not None
            warn_of_hosts(plan, decision.hostnames)
            agreed = AgreedPlan(plan, program, runner, channel, call, replace(decision, device_type=used))
            self._setup(agreed, _make_transfers(agreed, timeout_seconds, verify, False, connection, both_ways))
            self._arrays = MoverArrays(plan, program, self._group, device)
            self._is_copied = used != device or is_copied(device, needs_cpu)
        if compression is not None:
            self._lossless = LosslessTransfers(
                channel, plan, compression, timeout_seconds, verify, functools.partial(self._open_inner, both_ways)
            )

    def _open_inner(self, both_ways: bool, plan: Plan) -> Mover:
        with self._group.nesting():
            return Mover(plan, self._group, timeout_seconds=self._transfers.timeout_seconds, both_ways=both_ways)

    @classmethod
    def agreed(cls, agreed: AgreedPlan, timeout_seconds: float, verify: bool) -> Mover:
        """A Mover for ranks that have already agreed on the plan; reuses the channel's idle buffers."""
        self = cls.__new__(cls)
        self._setup(agreed, _make_transfers(agreed, timeout_seconds, verify, is_one_call=True))
        return self

    def _setup(self, agreed: AgreedPlan, transfers: QueuedTransfers | StreamedTransfers) -> None:
        self.plan, self._program, self._channel = agreed.plan, agreed.program, agreed.channel
        self._group, self._generation = agreed.channel.group, agreed.decision.generation
        self._transfers: QueuedTransfers | StreamedTransfers = transfers
        self._used_device, self._is_copied = agreed.decision.device_type, False
        self._arrays = MoverArrays(agreed.plan, agreed.program, self._group, self._used_device)
        self._owner = Owner()
        self._closed = False

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
        with self._owner.starting(self._program.rank, self.fail):
            if self._lossless is not None:
                if is_capturing():
                    raise ArgumentError("a CUDA graph cannot capture transfers of coded tensors")
                return self._start_lossless(self._lossless, tensor, out, base)
            return self._start(tensor, out, base)

    def _start_lossless(self, lossless: LosslessTransfers, tensor: Any, out: Any, base: Any) -> Handle:
        names = [spec.name or "" for spec in self.plan.tensors]
        given: list[Any] = []
        written: list[torch.Tensor | None] = []

        def read() -> tuple[Arrays, Arrays, Arrays, Arrays]:
            src = self._arrays.sources(self.plan.by_tensor(tensor))
            bases = [
                wait_for_collective(one.to_local() if is_dtensor(one) else one) for one in self.plan.by_tensor(base)
            ]
            given.extend(self.plan.by_tensor(out))
            dst = self._arrays.targets(given)
            check_no_aliasing(src, dst, names)
            check_unused(src, dst, names, bases=bases)
            written.extend(dst)
            if self._is_copied:
                src, bases, dst = (list(map(to_host, arrays)) for arrays in (src, bases, dst))
            outs = [None if one is None else array for one, array in zip(given, dst, strict=True)]
            by_name = [dict(zip(names, arrays, strict=True)) for arrays in (src, bases, outs, dst)]
            return by_name[0], by_name[1], by_name[2], by_name[3]

        def finish(targets: Mapping[str, Any]) -> Any:
            self._copy_back(list(targets.values()), written)
            return self._results(tensor, given, written)

        handle = lossless.start(read, finish)
        note_wait(handle, (), written if self._is_copied else ())
        return handle

    def _results(self, tensor: Any, outs: Sequence[Any], dst: Sequence[Any]) -> Any:
        """What a transfer returns: arrays, or the DTensors that the caller passed as ``out``."""
        names = [spec.name for spec in self.plan.tensors]
        results = [given if is_dtensor(given) else array for given, array in zip(outs, dst, strict=True)]
        return (
            dict(zip(names, results, strict=True))
            if isinstance(tensor, Mapping) or names[0] is not None
            else results[0]
        )

    def _start(self, tensor: Any, out: Any, base: Any) -> Handle:
        names = [spec.name for spec in self.plan.tensors]
        try:
            if base is not None:
                raise ArgumentError("base= is for a Mover with compression='delta'; this one has no compression")
            src = self._arrays.sources(self.plan.by_tensor(tensor))
            outs = self.plan.by_tensor(out)
            results = dst = self._arrays.targets(outs)
            check_no_aliasing(src, dst, names)
            check_unused(src, dst, names, self._transfers.order)
            tensors, device = self.plan.tensors, self._used_device
            if self._is_copied:
                src, dst = list(map(to_host, src)), list(map(to_host, dst))
            src = [wire_source(detach_source(array), spec, device) for array, spec in zip(src, tensors, strict=True)]
            received = [wire_target(array, spec, device) for array, spec in zip(dst, tensors, strict=True)]
            if is_capturing() and any(spec.codec is not None for spec in tensors):
                raise ArgumentError("a CUDA graph cannot capture transfers of coded tensors")
        except ReshardError as error:
            if is_capturing():  # nothing has run, and an abort would spoil the capture and hide this error
                raise
            raise self._channel.fail(self._generation, error) from None
        except BaseException as error:  # such as KeyboardInterrupt; the other ranks have started this transfer
            self._channel.fail(self._generation, error)
            raise

        def finish() -> Any:
            finish_received(received, dst)
            self._copy_back(dst, results)
            return self._results(tensor, outs, results)

        handle = self._transfers.start(src, received, finish)
        note_wait(handle, (), results if self._is_copied else unfinished(received, dst))
        return handle

    def _copy_back(self, hosts: Sequence[torch.Tensor | None], results: Sequence[torch.Tensor | None]) -> None:
        """Copy what transfers on host copies received to where it belongs."""
        for host, result in zip(hosts, results, strict=True):
            if self._is_copied and host is not None and result is not None:
                to_device(host, result.device, result)

    def start_checked(
        self, src: Sequence[torch.Tensor | None], dst: Sequence[torch.Tensor | None], finish: Callable[[], Any]
    ) -> Handle:
        """As :meth:`start`, for arrays that are already checked."""
        return self._transfers.start(src, dst, finish)

    def fail(self, error: BaseException) -> ReshardError:
        """End all transfers in progress between these ranks with an error, on every rank. Returns the error."""
        return self._channel.fail(self._generation, error)

    def check(self) -> None:
        """Raise the error that another rank published, if there is one, or ArgumentError if the group is closed."""
        self._group.check_usable()
        self._channel.check_reported(self._generation)

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
        arrays = self._arrays.empty_targets()
        if self.plan.tensors[0].name is None:
            return arrays[0]
        return {spec.name: array for spec, array in zip(self.plan.tensors, arrays, strict=True)}


def _make_transfers(
    agreed: AgreedPlan,
    timeout_seconds: float,
    verify: bool,
    is_one_call: bool,
    connection: int = 0,
    both_ways: bool = False,
) -> QueuedTransfers | StreamedTransfers:
    """The transfers of a Mover. Those of a single call reuse what the channel keeps from earlier calls."""
    if agreed.runner is None:
        return QueuedTransfers(agreed, both_ways or agreed.plan.is_two_way, timeout_seconds, verify, is_one_call)
    first = agreed.plan.tensors[0]
    number = 2 * connection + (both_ways and first.src.ranks[0] > first.dst.ranks[0])
    return StreamedTransfers(agreed, number, timeout_seconds, is_one_call)
