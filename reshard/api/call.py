"""The call that users make: from any notation, for one tensor or many, in one agreement round."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from reshard.api.casts import cast_landed, cast_source, landing_of, travelling_dtype
from reshard.api.handle import Handle
from reshard.api.inputs import Item, read_items, refuse
from reshard.api.mover import Mover
from reshard.api.recovery import SurvivingHandle, Survivors
from reshard.api.tensor_checks import check_array
from reshard.api.validation import Options, make_request
from reshard.coordination.communicator import MAX_CACHED, Channel, find_channel
from reshard.coordination.decide import Decision, Request, plan_arguments, resolve_left
from reshard.coordination.liveness.call_sequence import calling, counted, report_error
from reshard.coordination.liveness.membership import counting, those_left
from reshard.coordination.process_group import Group, find_group, known_groups
from reshard.coordination.topology_discovery import topology_of_names
from reshard.errors import ArgumentError, RankLostError, ReshardError
from reshard.formatting import format_ranks
from reshard.plan.check import ensure_checked
from reshard.plan.model import DEFAULT_STAGING_BYTES, Plan
from reshard.planner.planning import plan_tensors
from reshard.planner.strategies.problem import Strategy
from reshard.runtime.cuda.stream import current_device, make_runner
from reshard.runtime.program import Program, build_program
from reshard.runtime.rounds.executor import RoundRunner
from reshard.sharding.tensor_spec import TensorSpec
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout
from reshard.topology.model import Topology


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
) -> Any:
    """Move a sharded tensor from one mesh and layout to another.

    Every rank of the source or the destination calls, and no other. The source is not changed, and no autograd
    is recorded: the result requires no grad.

    Args:
        tensor: this rank's source shard, a torch tensor of any strides; None outside the source. A DTensor
            brings its own mesh, spec, shape and dtype. For several tensors in one plan ``{name: shard}`` with
            the same names on every rank, None where a rank has none.
        src_mesh, dst_mesh: a :class:`~reshard.Mesh`, a torch ``DeviceMesh``, a ``jax.sharding.Mesh``, or a
            :class:`~reshard.Layout` or :class:`~reshard.RegionLayout`, which needs no spec beside it. For several
            tensors one for all, or ``{name: ...}``.
        src_spec, dst_spec: how the mesh shards the tensor, in any notation of :class:`~reshard.Layout`;
            omitted, each rank of the mesh holds all of it. For several tensors one for all, or ``{name: ...}``.
        shape, dtype: the global ones. Omitted, source ranks supply them; without ``shape`` the sizes of the
            shards add up to it.
        dst_dtype: the dtype of the result, cast as ``Tensor.to`` does: floating point to floating point of any width,
            or to what torch promotes to. Omitted, that of the source. Elements travel in the narrower of both.
            For several tensors one for all, or ``{name: ...}``.
        group: whose ranks the meshes name: a process group (omitted: the world), or what
            :func:`~reshard.join` returned. Ranks of a DeviceMesh are ranks of the world and are translated.
        out: where to put this rank's destination shard; must not share storage with the source.
        strategy: a name in ``reshard.planner.registry.STRATEGIES``, or a function of that form.
        topology: where ranks are; omitted, by their host names.
        staging_bytes: what a rank may hold beyond its shards, 64 MiB by default.
        timeout_seconds: how long ranks may take to agree, and the transfer to finish.
        verify: compare digests of what every source rank held and every destination rank holds.
        on_loss: what to do when ranks die in the transfer or before it. ``"raise"``: an error. ``"recover"``: the
            ranks that are left move what is still missing among themselves, from other replicas and from what has
            arrived, and each gets its shard. ``"offer"``: a :class:`~reshard.RankLostError` that holds the plan of
            this and does it when asked. Either costs a round of small messages behind the transfer, in which every
            rank takes part; a rank that is not dead, but silent until the time-out, counts as lost too.

    Returns:
        This rank's destination shard, None outside the destination. A DTensor in and a DeviceMesh as
        ``dst_mesh`` give a DTensor out. For several tensors a dict.

    Raises:
        ReshardError: one of the errors of :mod:`reshard.errors`, the same on every calling rank, before a byte
            moves if an argument is wrong or ranks disagree.
        RankLostError: ranks are lost in a transfer with another ``on_loss``, and with them regions that others need.
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
    ).wait()


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
) -> Handle:
    """As :func:`reshard`, but return once ranks have agreed, with the transfer under way.

    Returns:
        A handle; ``handle.wait(timeout_seconds=...)`` gives what :func:`reshard` returns. The transfer goes on
        whether or not anybody waits. The source must not change until it is over.
    """
    try:
        our_group = find_group(group)
    except ReshardError as error:
        for each in known_groups(group):  # whose other ranks may wait for this one
            report_error(each, error)
        raise
    options = Options(strategy, topology, staging_bytes, verify, on_loss)
    with counted(our_group), calling(our_group):
        try:
            items = read_items(tensor, src_mesh, dst_mesh, src_spec, dst_spec, shape, dtype, dst_dtype, out, our_group)
            members = tuple(sorted({rank for item in items for side in (item.src, item.dst) for rank in side.ranks}))
            outside = not any(rank < our_group.size for rank in members)
            if outside or our_group.rank not in members:
                find_channel(our_group, members)  # raises
            timeout_seconds = check_timeout(timeout_seconds)
        except ReshardError as error:
            refuse(our_group, error, tensor, src_mesh, dst_mesh, timeout_seconds, options.fault_tolerant)
            raise
        except Exception as error:  # whatever a wrong argument does here, the other ranks must hear of it
            known = ArgumentError(f"{type(error).__name__}: {error}")
            refuse(our_group, known, tensor, src_mesh, dst_mesh, timeout_seconds, options.fault_tolerant)
            raise known from error
        return _Call(our_group, items, members, options, timeout_seconds).start()


class _Call:
    def __init__(
        self, group: Group, items: list[Item], members: tuple[int, ...], options: Options, timeout_seconds: float
    ) -> None:
        self.group, self.items, self.members = group, items, members
        self.options, self.timeout_seconds = options, timeout_seconds
        self.fault_tolerant = options.fault_tolerant

    def start(self) -> Handle:
        with counting(self.group, self.members, self.fault_tolerant) as self.place:
            channel, call, decision, request, lost = self._agree()
            if lost:
                return self._start_without(channel, decision, lost)
            plan, program, runner, lost = self._plan(channel, request, decision)
        if lost:
            return self._start_without(channel, decision, lost)
        try:
            src, dst, finish = self._arrays(program.dst_shapes, decision)
        except Exception as error:  # no memory for the result, say: the others wait for this rank
            raise channel.fail(decision.generation, error) from error
        limit, verify = self.timeout_seconds, self.options.verify
        try:
            mover = Mover.agreed(plan, program, runner, channel, call, decision, limit, verify)
        except Exception as error:
            known = channel.fail(decision.generation, error)
            if not self.fault_tolerant:
                raise known from error
            handle = Handle(channel, decision.generation, finish)
            handle.stop(known)
        else:
            handle = mover.start_checked(src, dst, finish)
            mover.close()
        if not self.fault_tolerant:
            return handle
        return SurvivingHandle(handle, self._survivors(channel, plan, src, dst), finish)

    def _agree(self) -> tuple[Channel, int, Decision, Request, set[int]]:
        """The channel of those that came, what they agreed on, and who did not come where the call bears that."""
        inside = tuple(rank for rank in self.members if rank < self.group.size)
        if self.fault_tolerant:
            inside = those_left(self.group, inside)
        channel = find_channel(self.group, inside)
        request = make_request(self.group, self.items, self.members, self.options)
        request.place = self.place
        layouts = {item.name: (item.src, item.dst) for item in self.items}
        lost = {rank for rank in self.members if rank < self.group.size} - set(inside)
        while True:
            decide = functools.partial(resolve_left, layouts=layouts, members=channel.members)
            call, decision = channel.agree(request, decide, self.timeout_seconds, self.fault_tolerant)
            lost |= set(decision.lost)
            if decision.dtypes:
                return channel, call, decision, request, lost
            channel = find_channel(self.group, tuple(rank for rank in inside if rank not in lost))  # the first was lost

    def _start_without(self, channel: Channel, decision: Decision, lost: set[int]) -> Handle:
        """A transfer of which ranks were lost before it began: all of it is missing."""
        plan = self._make_plan(decision)
        shapes = [
            spec.dst_shards.local_shape(self.group.rank) if self.group.rank in spec.dst.ranks else None
            for spec in plan.tensors
        ]
        src, dst, finish = self._arrays(shapes, decision)
        handle = Handle(channel, decision.generation, finish)
        handle.stop(RankLostError(f"ranks {format_ranks(sorted(lost))} did not come"))
        return SurvivingHandle(handle, self._survivors(channel, plan, src, dst, lost), finish)

    def _survivors(
        self, channel: Channel, plan: Plan, src: Sequence[Any], dst: Sequence[Any], lost: Collection[int] = ()
    ) -> Survivors:
        return Survivors(
            channel,
            plan,
            src,
            dst,
            lost,
            strategy=None if callable(self.options.strategy) else self.options.strategy,
            timeout_seconds=self.timeout_seconds,
            verify=self.options.verify,
            recovers=self.options.on_loss == "recover",
        )

    def _plan(
        self, channel: Channel, request: Request, decision: Decision
    ) -> tuple[Plan, Program, RoundRunner | None, set[int]]:
        """The plan for what was agreed, cached or made and compared; and who was lost meanwhile, if that is borne."""
        agreed: list[Any] = [sorted(one.items()) for one in (decision.shapes, decision.dtypes, decision.hostnames)]
        key = repr((request.arguments, decision.device_type, agreed))
        known = not callable(self.options.strategy)  # another function of the same name may be another strategy
        if known and key in channel.cache:
            channel.cache.move_to_end(key)
            return (*channel.cache[key], set())
        said = Request(self.group.rank, place=f"compares plans {self.place}".strip())
        plan = program = runner = None
        try:
            plan = self._make_plan(decision)
            ensure_checked(plan)  # it was made just now, but perhaps by a caller's strategy
            program = build_program(plan, self.group.rank)
            runner = make_runner(plan, program, decision.device_type)
            said.arguments = plan_arguments(plan)
        except Exception as error:
            said.error = (
                ("ReshardError", f"{type(error).__name__}: {error}")
                if not isinstance(error, ReshardError)
                else (type(error).__name__, str(error))
            )
        decide = functools.partial(resolve_left, layouts={}, members=channel.members)
        _, same = channel.agree(said, decide, self.timeout_seconds, self.fault_tolerant)
        assert plan is not None and program is not None
        if known:
            channel.cache[key] = plan, program, runner
        if len(channel.cache) > MAX_CACHED:
            channel.cache.popitem(last=False)
        return plan, program, runner, set(same.lost)

    def _make_plan(self, decision: Decision) -> Plan:
        topology = self.options.topology
        if topology is None:
            topology = topology_of_names(decision.hostnames, self.members[-1] + 1)
        tensors = [
            TensorSpec(
                tuple(decision.shapes[item.name]), _travelling(item, decision), item.src, item.dst, item.name or None
            )
            for item in self.items
        ]
        return plan_tensors(
            tensors, strategy=self.options.strategy, topology=topology, staging_bytes=self.options.staging_bytes
        )

    def _arrays(
        self, shapes: Sequence[tuple[int, ...] | None], decision: Decision
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None], Callable[[], Any]]:
        """What is sent, where it lands, and what makes this rank's result of that."""
        targets = [self._target(item, shape, decision) for item, shape in zip(self.items, shapes, strict=True)]
        dtypes = [_travelling(item, decision) for item in self.items]
        src = [cast_source(item.tensor, dtype) for item, dtype in zip(self.items, dtypes, strict=True)]
        dst = [landing_of(target, dtype) for target, dtype in zip(targets, dtypes, strict=True)]

        def finish() -> Any:
            cast_landed(dst, targets)
            return self._result(targets, decision)

        return src, dst, finish

    def _target(self, item: Item, shape: tuple[int, ...] | None, decision: Decision) -> torch.Tensor | None:
        dtype = decision.dtypes[item.name] if item.dst_dtype is None else item.dst_dtype
        if item.out is None and shape is not None:
            device = self._device_of(item, decision.device_type)
            item.out = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        return check_array(
            item.out, shape, dtype, "the destination", item.name or None, self.group.rank, decision.device_type
        )

    def _device_of(self, item: Item, device_type: str) -> torch.device:
        """Where a result is put: beside this rank's source if it has one."""
        return current_device(device_type) if item.tensor is None else item.tensor.device

    def _result(self, dst: Sequence[torch.Tensor | None], decision: Decision) -> Any:
        results = {
            item.name: item.wrap(array, decision.shapes[item.name])
            if item.name in decision.dtensors or item.out_like is not None
            else array
            for item, array in zip(self.items, dst, strict=True)
        }
        return results[""] if self.items[0].name == "" else {name: results[name] for name in self.items[0].names}


def _travelling(item: Item, decision: Decision) -> str:
    return travelling_dtype(decision.dtypes[item.name], item.dst_dtype)
