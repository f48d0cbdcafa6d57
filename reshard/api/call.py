"""``reshard`` and ``reshard_async``: agree on one or more tensors, plan, and start the transfer."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from reshard.api.agreed_plan import AgreedPlan, encode_measured
from reshard.api.casts import unfinished, wire_dtype
from reshard.api.inputs import Item, read_items, report_bad_arguments
from reshard.api.lossless.call import LosslessCall
from reshard.api.memory_in_use import note_wait
from reshard.api.mover import Mover
from reshard.api.mover_arrays import call_arrays, copy_to_host, finish_call
from reshard.api.recovery import FaultTolerantHandle, Recovery
from reshard.api.transfers import Handle
from reshard.api.validation import Options, make_request
from reshard.codecs import Codec, TransferPolicy, is_lossless
from reshard.coordination import (
    MAX_CACHED,
    Channel,
    Decision,
    Group,
    Request,
    calling,
    count_call,
    find_channel,
    find_group,
    known_groups,
    leave_interrupted,
    plan_arguments,
    publish_exceptions,
    publish_interruption,
    remaining_ranks,
    report_error,
    resolve_partial,
    topology_of_names,
)
from reshard.errors import ArgumentError, RankLostError, ReshardError
from reshard.formatting import format_ranks
from reshard.plan import DEFAULT_STAGING_BYTES, Plan, ensure_checked
from reshard.planner import Strategy, code_tensors, plan_tensors
from reshard.public_api import not_compiled
from reshard.runtime.cuda.host_copies import is_copied
from reshard.runtime.cuda.stream import make_runner, refuse_capture
from reshard.runtime.program import RankProgram, build_program
from reshard.runtime.rounds.executor import RoundRunner
from reshard.sharding import TensorSpec
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout
from reshard.topology import Topology


@publish_exceptions(leave_interrupted)
@not_compiled
def reshard(
    tensor: Any = None,
    src_mesh: Any = None,
    dst_mesh: Any = None,
    *,
    src_spec: Any = None,
    dst_spec: Any = None,
    shape: Any = None,
    dtype: Any = None,
    dst_dtype: Any = None,
    group: Any = None,
    out: Any = None,
    strategy: str | Strategy | None = None,
    topology: Topology | None = None,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    verify: bool = False,
    on_loss: str = "raise",
    compression: str | Codec | TransferPolicy | None = None,
    base: Any = None,
    max_error: float | None = None,
    on_error: str = "raw",
) -> Any:
    """Move a sharded tensor from one mesh and layout to another.

    All ranks of the source and the destination must call it, and no other rank. The source is not changed. Autograd
    is not recorded: the result requires no grad.

    CUDA tensors move over NCCL. With ``verify``, ``on_loss``, ``max_error``, or a ``compression`` that only the CPU
    codes, copies of them in host memory move over Gloo.

    To move several tensors in one plan, pass ``{name: shard}`` as ``tensor``, with the same names on every rank and
    None where a rank has no shard. Meshes, specs and ``dst_dtype`` are then one value for all, or ``{name: value}``.

    Args:
        tensor: this rank's source shard, a torch tensor with any strides; None outside the source. A DTensor
            supplies its own mesh, spec, shape and dtype.
        src_mesh, dst_mesh: a :class:`~reshard.Mesh`, a torch ``DeviceMesh``, a ``jax.sharding.Mesh``, or a
            :class:`~reshard.Layout` or :class:`~reshard.RegionLayout`, which includes the spec.
        src_spec, dst_spec: how the mesh shards the tensor, in any notation of :class:`~reshard.Layout`. Default:
            every rank of the mesh holds the whole tensor.
        shape, dtype: global shape and dtype. Default: derived from the source shards, whose sizes add up to the
            global shape.
        dst_dtype: dtype of the result, cast as by ``Tensor.to``: floating point to floating point of any width, or a
            type promotion. Default: the source's. The narrower dtype is on the wire.
        group: the process group (default: the world) or the result of :func:`~reshard.join` that the ranks of the
            meshes refer to. Ranks of a DeviceMesh are world ranks and are translated.
        out: where to write this rank's destination shard; must not share storage with the source.
        strategy: a name in ``reshard.planner.registry.STRATEGIES``, or a function of that form.
        topology: hosts and links of the ranks. Default: one host per host name.
        staging_bytes: memory limit of a rank beyond its shards, in bytes; 64 MiB by default.
        timeout_seconds: limit for the agreement of the ranks, and again for the transfer.
        verify: compare digests of the sent data, of the arrived data and of replicas after the transfer.
        on_loss: what to do if ranks are lost before or during the transfer. ``"raise"``: raise an error.
            ``"recover"``: the surviving ranks move the missing data among themselves, from other replicas and from
            data that has arrived, and every one of them gets its shard. ``"offer"``: raise a
            :class:`~reshard.RankLostError` that holds the plan of this recovery and runs it on request. The last two
            cost one round of small messages among all ranks after the transfer. A rank that does not respond within
            the timeout counts as lost.
        compression: the name of a block codec, such as ``"int8x128"`` (see :mod:`reshard.codecs.block`), or a
            :class:`~reshard.Codec` that you implement: its elements travel in place of the values, and are decoded into
            the result's dtype. Tensors that the codec cannot code, or would not make smaller, travel as they are. Each
            end allocates the coded shard in addition. ``"auto"`` chooses among the codecs of ``topology.codec_rates``,
            or none. ``"bf16-lossless"`` codes bf16 without loss; ``"delta"`` sends the changes since ``base``. A
            :class:`~reshard.compression.Policy` with nothing but ``pp`` stands for its codec.
        base: with ``compression="delta"``: this rank's source shard of an earlier version of the tensor, which ``out``
            of the destination ranks must still hold. Digests compare the versions of all ranks. Unless they are equal,
            the tensor is sent in full, with a warning if a rank passes a base. ``out`` changes only after all ranks
            have received their data: after an error every ``out`` holds the earlier version. Every rank must call
            ``wait`` of the handle, whose ``report`` says what was sent. See :mod:`reshard.api.lossless.transfer`.
        max_error: limit on the error of each tensor, as the L2 norm of the error over the L2 norm of the values of all
            source shards. The ranks measure it while they encode, and agree on it before any data moves. Blocks that
            have NaN or infinity before coding do not count. With ``"auto"`` it also limits the choice of codecs, see
            :func:`~reshard.make_plan`.
        on_error: what to do with a tensor over ``max_error``: ``"raw"``: send it without the codec; ``"raise"``: raise
            a :class:`~reshard.CompressionError` on all ranks.

    Returns:
        This rank's destination shard, None outside the destination. The result is a DTensor if the source is a DTensor
        and ``dst_mesh`` a DeviceMesh. For several tensors ``{name: shard}``.

    Raises:
        ReshardError: an error of :mod:`reshard.errors`, the same on every calling rank. If an argument is wrong or
            ranks disagree, no data has moved.
        RankLostError: with ``on_loss="offer"``, ranks were lost; with ``"recover"``, also regions that other ranks
            need.
    """
    return reshard_async(
        tensor,
        src_mesh,
        dst_mesh,
        src_spec=src_spec,
        dst_spec=dst_spec,
        shape=shape,
        dtype=dtype,
        dst_dtype=dst_dtype,
        group=group,
        out=out,
        strategy=strategy,
        topology=topology,
        staging_bytes=staging_bytes,
        timeout_seconds=timeout_seconds,
        verify=verify,
        on_loss=on_loss,
        compression=compression,
        base=base,
        max_error=max_error,
        on_error=on_error,
    ).wait()


@publish_exceptions(leave_interrupted)
@not_compiled
def reshard_async(
    tensor: Any = None,
    src_mesh: Any = None,
    dst_mesh: Any = None,
    *,
    src_spec: Any = None,
    dst_spec: Any = None,
    shape: Any = None,
    dtype: Any = None,
    dst_dtype: Any = None,
    group: Any = None,
    out: Any = None,
    strategy: str | Strategy | None = None,
    topology: Topology | None = None,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    verify: bool = False,
    on_loss: str = "raise",
    compression: str | Codec | TransferPolicy | None = None,
    base: Any = None,
    max_error: float | None = None,
    on_error: str = "raw",
) -> Handle:
    """As :func:`reshard`, but return as soon as the ranks have agreed and the transfer has started.

    Returns:
        A handle; ``handle.wait(timeout_seconds=...)`` returns the result of :func:`reshard`. The transfer progresses
        without a call to ``wait``, but tensors are encoded before this function returns, and decoded or cast in
        ``wait``. Neither the source, nor ``base`` and ``out``, may change until ``wait`` has returned.
    """
    try:
        found = find_group(group)
    except ReshardError as error:
        for each in known_groups(group):  # their other ranks may wait for this one
            report_error(each, error)
        raise
    options = Options(strategy, topology, staging_bytes, verify, on_loss, compression, max_error, on_error)
    with publish_interruption(found), calling(found):
        try:
            refuse_capture()
            items = read_items(
                {
                    "tensor": tensor, "base": base, "src_mesh": src_mesh, "dst_mesh": dst_mesh, "src_spec": src_spec,
                    "dst_spec": dst_spec, "shape": shape, "dtype": dtype, "dst_dtype": dst_dtype, "out": out,
                },
                found,
            )  # fmt: skip
            members = tuple(sorted({rank for item in items for side in (item.src, item.dst) for rank in side.ranks}))
            outside = not any(rank < found.size for rank in members)
            if outside or found.rank not in members:
                find_channel(found, members)  # raises
            timeout_seconds = check_timeout(timeout_seconds)
        except ReshardError as error:
            report_bad_arguments(found, error, tensor, src_mesh, dst_mesh, timeout_seconds, options.fault_tolerant)
            raise
        except Exception as error:  # a wrong argument may raise anything; the other ranks must receive it
            known = ArgumentError(f"{type(error).__name__}: {error}")
            report_bad_arguments(found, known, tensor, src_mesh, dst_mesh, timeout_seconds, options.fault_tolerant)
            raise known from error
        call = _Call(found, items, members, options, timeout_seconds)
        handle = call.start()
        note_wait(handle, (), [item.device_out for item in call.items])
        return handle


class _Call:
    """One call on one rank, with its arguments read: agrees, plans, allocates and starts the transfer."""

    def __init__(
        self, group: Group, items: list[Item], members: tuple[int, ...], options: Options, timeout_seconds: float
    ) -> None:
        self.group, self.items, self.members = group, items, members
        self.options, self.timeout_seconds = options, timeout_seconds
        self.fault_tolerant = options.fault_tolerant

    def start(self) -> Handle:
        with count_call(self.group, self.members, self.fault_tolerant) as self.purpose:
            channel, call, decision, request, lost = self._agree()
            if is_copied(decision.device_type, self.options.needs_cpu):
                self.items, decision = copy_to_host(self.items, channel, decision)
            everything = frozenset(item.name for item in self.items if self.options.max_error is not None)
            specs = self._tensors(decision)
            if is_lossless(self.options.compression) and any(math.prod(spec.shape) for spec in specs):
                lossless = LosslessCall(channel, call, decision, self.items, self.options, self.timeout_seconds, lost)
                plan_buckets = functools.partial(self._plan, request=request, decision=decision)
                return lossless.start(specs, self.purpose, plan_buckets)
            if lost:
                return self._start_recovery(channel, decision, lost, everything)
            plan, program, runner, lost = self._plan(channel, request, decision)
            encoded: dict[str, torch.Tensor | None] = {}
            excess = frozenset[str]()
            if self.options.max_error is not None and not lost and any(spec.codec for spec in plan.tensors):
                encoded, excess, lost = encode_measured(
                    channel, plan, self.items, self.options, self.timeout_seconds, self.purpose
                )
                if excess and not lost:
                    plan, program, runner, lost = self._plan(channel, request, decision, excess)
        if lost:
            return self._start_recovery(channel, decision, lost, excess)
        try:
            src, dst, targets = call_arrays(self.items, plan, decision, self.group.rank, encoded)
        except Exception as error:  # for example out of memory; the other ranks wait for this one
            raise channel.fail(decision.generation, error) from error
        limit, verify = self.timeout_seconds, self.options.verify
        finish = functools.partial(finish_call, self.items, decision, dst, targets)
        try:
            mover = Mover.agreed(AgreedPlan(plan, program, runner, channel, call, decision), limit, verify)
        except Exception as error:
            known = channel.fail(decision.generation, error)
            if not self.fault_tolerant:
                raise known from error
            handle = Handle(channel, decision.generation, finish)
            handle.watch.stop(known)
        else:
            handle = mover.start_checked(src, dst, finish)
            mover.close()
        if not self.fault_tolerant:
            note_wait(handle, (), unfinished(dst, targets))
            return handle
        handle = FaultTolerantHandle(handle, self._recovery(channel, plan, src, dst), finish)
        note_wait(handle, src, targets)  # a recovery may send from the source again
        return handle

    def _agree(self) -> tuple[Channel, int, Decision, Request, set[int]]:
        """The channel of the ranks that called, their agreement and, in a fault-tolerant call, the lost ranks."""
        inside = tuple(rank for rank in self.members if rank < self.group.size)
        if self.fault_tolerant:
            inside = remaining_ranks(self.group, inside)
        channel = find_channel(self.group, inside)
        request, self.items = make_request(self.group, self.items, self.members, self.options, self.purpose)
        layouts = {item.name: (item.src, item.dst) for item in self.items}
        lost = {rank for rank in self.members if rank < self.group.size} - set(inside)
        while True:
            decide = functools.partial(resolve_partial, layouts=layouts, members=channel.members)
            call, decision = channel.agree(request, decide, self.timeout_seconds, self.fault_tolerant)
            lost |= set(decision.lost)
            if decision.dtypes:
                return channel, call, decision, request, lost
            # No agreement: the rank that decides the round was lost. Repeat the round without the lost ranks.
            channel = find_channel(self.group, tuple(rank for rank in inside if rank not in lost))

    def _start_recovery(self, channel: Channel, decision: Decision, lost: set[int], raw: frozenset[str]) -> Handle:
        """The handle of a transfer that lost ranks before it began, so that recovery has to move all data."""
        plan = self._make_plan(decision, raw)
        src, dst, targets = call_arrays(self.items, plan, decision, self.group.rank, {})
        finish = functools.partial(finish_call, self.items, decision, dst, targets)
        handle = Handle(channel, decision.generation, finish)
        handle.watch.stop(RankLostError(f"ranks {format_ranks(sorted(lost))} did not call in time"))
        handle = FaultTolerantHandle(handle, self._recovery(channel, plan, src, dst, lost), finish)
        note_wait(handle, src, targets)
        return handle

    def _recovery(
        self, channel: Channel, plan: Plan, src: Sequence[Any], dst: Sequence[Any], lost: Collection[int] = ()
    ) -> Recovery:
        return Recovery(channel, plan, src, dst, lost, self.options, self.timeout_seconds)

    def _plan(
        self,
        channel: Channel,
        request: Request,
        decision: Decision,
        raw: frozenset[str] = frozenset(),
        buckets: Sequence[TensorSpec] = (),
    ) -> tuple[Plan, RankProgram, RoundRunner | None, set[int]]:
        """The plan, from the cache or compared between ranks, and the ranks that were lost in the comparison.

        Args:
            raw: tensors that are not coded. buckets: what travels in place of the tensors.
        """
        agreed: list[Any] = [sorted(one.items()) for one in (decision.shapes, decision.dtypes, decision.hostnames)]
        key = repr((request.arguments, decision.device_type, agreed, sorted(raw), list(map(str, buckets))))
        # different functions and codecs may have the same name
        is_cacheable = not callable(self.options.strategy) and isinstance(self.options.compression, str | None)
        if is_cacheable and key in channel.cache:
            channel.cache.move_to_end(key)
            return (*channel.cache[key], set())
        plan = program = runner = error = None
        arguments: list[tuple[str, str]] = []
        try:
            plan = self._make_plan(decision, raw, buckets)
            ensure_checked(plan)  # the strategy may be the caller's
            program = build_program(plan, self.group.rank)
            runner = make_runner(plan, program, decision.device_type)
            arguments = plan_arguments(plan)
        except ReshardError as known:
            error = (type(known).__name__, str(known))
        except Exception as other:
            error = ("ReshardError", f"{type(other).__name__}: {other}")
        purpose = f"compares plans {self.purpose}".strip()
        comparison = Request(self.group.rank, arguments, error=error, purpose=purpose)
        decide = functools.partial(resolve_partial, layouts={}, members=channel.members)
        _, compared = channel.agree(comparison, decide, self.timeout_seconds, self.fault_tolerant)
        assert plan is not None and program is not None
        if is_cacheable:
            channel.cache[key] = plan, program, runner
        if len(channel.cache) > MAX_CACHED:
            channel.cache.popitem(last=False)
        return plan, program, runner, set(compared.lost)

    def _tensors(self, decision: Decision) -> list[TensorSpec]:
        """The tensors in the dtypes of their sources."""
        shapes, dtypes = decision.shapes, decision.dtypes
        return [
            TensorSpec(tuple(shapes[item.name]), dtypes[item.name], item.src, item.dst, item.name or None)
            for item in self.items
        ]

    def _make_plan(
        self, decision: Decision, raw: frozenset[str] = frozenset(), buckets: Sequence[TensorSpec] = ()
    ) -> Plan:
        options, topology = self.options, self.options.topology
        if topology is None:
            topology = topology_of_names(decision.hostnames, self.members[-1] + 1)
        plan = functools.partial(
            plan_tensors, strategy=options.strategy, topology=topology, staging_bytes=options.staging_bytes
        )
        if buckets:
            return plan(buckets)
        tensors = self._tensors(decision)
        on_wire = [wire_dtype(spec.dtype, item.dst_dtype) for spec, item in zip(tensors, self.items, strict=True)]
        codec = None if is_lossless(options.compression) else options.compression
        coded = code_tensors(tensors, codec, options.max_error, topology, plan, on_wire, encodes_first=True)
        for at, item in enumerate(self.items):
            if item.name in raw:
                coded[at] = replace(tensors[at], dtype=on_wire[at])
        return plan(coded)
