"""ReplicaSync of a stage under DDP: before a step they share buffers, behind it they add gradients.

DDP's reducer sums inside a backward, where nobody sees a copy that has failed; so it never runs. Nor is DDP's own group
used: a step that fails leaves what some replicas have posted there and others have not, and the next step would be
paired with that. ReplicaSync have connections of their own, which are made anew behind an error, and hear of one by
their channel.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from reshard.api.tensor_checks import shares_with_itself
from reshard.coordination.communicator import find_channel
from reshard.coordination.decide import Request, resolve
from reshard.coordination.liveness.heartbeat import Monitor
from reshard.coordination.process_group import Group
from reshard.errors import ArgumentError, DisagreementError, RemoteError, ReshardError, TransferTimeoutError
from reshard.formatting import say_ranks
from reshard.sharding.mesh import Mesh

from .data_parallel import fsdp_ranks

#: How often a copy that waits for the others looks whether they came, and whether one has failed.
SLEEP_SECONDS = 0.0005
LOOK_SECONDS = 0.2
#: How long whose connection inside a stage broke waits for others to say why.
HEAR_SECONDS = 1.5
#: How much is added at once.
BUCKET_BYTES = 2**25

Look = Callable[[], None]
Gradients = list[tuple[torch.Tensor, torch.Tensor]]


def find_replicas(group: Group, stage: int, module: Any, mesh: Mesh) -> tuple[int, ...]:
    """The ranks of the group that DDP joins, ascending; none where the module is not under DDP.

    Raises:
        ArgumentError: some are not of the stage, or some that FSDP joins.
    """
    if not isinstance(module, DistributedDataParallel):
        if group.process_group is not None:
            _check_inside(stage, "FSDP", [group.translate(rank) for rank in fsdp_ranks(module)], mesh)
        return ()
    world = dist.get_process_group_ranks(module.process_group)
    if group.process_group is None:  # which knows no ranks of the world
        said: list[Any] = [None] * len(world)
        dist.all_gather_object(said, group.rank, group=module.process_group)
        return tuple(sorted(said))
    ranks = tuple(sorted(group.translate(rank) for rank in world))
    _check_inside(stage, "DDP", ranks, mesh)
    return ranks


def _check_inside(stage: int, wrapper: str, ranks: Sequence[int], mesh: Mesh) -> None:
    others = sorted(set(ranks) - set(mesh.ranks))
    if others:
        raise ArgumentError(
            f"the module of stage {stage} is wrapped by {wrapper} over {say_ranks(ranks)}, but {say_ranks(others)} "
            f"{'are' if len(others) > 1 else 'is'} not of that stage, which is on {say_ranks(mesh.ranks)}: give "
            f"{wrapper} a group of ranks of its stage"
        )


class ReplicaSync:
    """The ranks that have one stage under DDP, as one of them sees them.

    Args:
        ranks: of the group, ascending; those that DDP joins. device: the type that the module is on.
        timeout_seconds: how long one may wait for the others.

    Raises:
        DisagreementError: the others' modules are different ones. RemoteError, TransferTimeoutError: some did not come.
    """

    def __init__(
        self, stage: int, module: Any, group: Group, ranks: tuple[int, ...], device: str, timeout_seconds: float
    ) -> None:
        self.stage, self._module, self._timeout_seconds = stage, module, timeout_seconds
        self._group, self._channel = group, find_channel(group, ranks)
        request = Request(group.rank, hostname=group.hostname)
        request.arguments = [(f"{what} of stage {stage}", text) for what, text in self._outline()]
        _, decision = self._channel.agree(request, lambda requests: resolve(requests, {}), timeout_seconds)
        self._generation, self._is_begun = decision.generation, False
        self._connections = self._channel.collectives(decision.generation, torch.device(device), timeout_seconds)
        group.held.add_user(self)

    # What a monitor asks, see :class:`reshard.coordination.liveness.heartbeat.Watched`

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of all replicas."""
        return self._channel.members

    def reported_error(self) -> ReshardError | None:
        """An error that another copy told of."""
        return self._channel.reported_error(self._generation)

    def stop(self, error: ReshardError) -> None:
        """End with an error."""
        self._channel.fail(self._generation, error)

    def look(self) -> bool:
        """Whether a step is over; its own thread says."""
        return False

    # What a group asks that closes, see :class:`reshard.coordination.process_group.User`

    def finish(self, timeout_seconds: float | None) -> None:
        """A step that is under way ends with an error."""

    def release(self) -> None:
        """Let go of the connections."""
        self._connections = None

    # A step

    def check(self) -> None:
        """Raise what another copy told of."""
        self._channel.check_reported(self._generation)

    def fail(self, error: BaseException) -> None:
        """End what other replicas wait for, with an error."""
        self._channel.fail(self._generation, error)

    def begin(self, look: Look) -> None:
        """Before the first forward: see that all replicas are alike still, and take the buffers of the first one.

        Args:
            look: called now and then while replicas wait for each other; raises when a rank has failed.

        Raises:
            DisagreementError: replicas have different parameters or buffers. TransferTimeoutError, RemoteError: some
            copy
                did not come.
        """
        self._is_begun, self._shares_itself = True, self._module.require_forward_param_sync
        self._module.require_forward_param_sync = False  # its forwards would wait in torch for a copy that failed
        self._module.reducer._reset_state()  # a forward between steps has armed it, if there was one
        if self._connections is None:
            return
        Monitor.of(self._group).watch(self)
        outline = self._outline()
        marks = [int(hashlib.sha256(text.encode()).hexdigest()[:15], 16) for _, text in outline]
        most = self._on_device([sign * mark for mark in marks for sign in (1, -1)])
        self._add(most, look, "begin a step", dist.ReduceOp.MAX)
        for (what, text), high, low in zip(outline, most.tolist()[::2], most.tolist()[1::2], strict=True):
            if high != -low:
                raise DisagreementError(
                    f"replicas of stage {self.stage} have different {what}; rank {self._channel.group.rank} has {text}"
                )
        self._share_buffers(look)

    def end(self) -> None:
        """The step is over, or has failed."""
        if not self._is_begun:
            return
        self._is_begun, self._module.require_forward_param_sync = False, self._shares_itself
        if self._connections is not None:
            Monitor.of(self._group).forget(self)

    def add_gradients(self, look: Look, summed: set[int]) -> None:
        """Behind the last backward: add the gradients of all replicas. What no copy used keeps none.

        Args:
            look: see :meth:`begin`. summed: ids of parameters that are dealt with already, as another stage has them
                too; grows.

        Raises:
            TransferTimeoutError, RemoteError: some copy did not come; or what ``look`` raises.
        """
        self._group.check_usable()
        parameters = [parameter for parameter in self.parameters() if id(parameter) not in summed]
        summed.update(map(id, parameters))
        if not parameters or self._connections is None:
            return
        kinds = self._on_device([_kind(parameter.grad) for parameter in parameters])
        self._add(kinds, look, op=dist.ReduceOp.MAX)
        dense: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter, kind in zip(parameters, kinds.tolist(), strict=True):
            if kind == _DENSE:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=_gradient_dtype(parameter))
                elif parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
                dense.setdefault((parameter.grad.dtype, parameter.device), []).append(parameter.grad)
            elif kind != _NONE:
                parameter.grad = gradient = _sparse(parameter, sparse_dim=kind - _NONE)
                self._add(gradient, look)
        for gradients in dense.values():
            for some in _buckets(gradients):
                flat = torch.cat([gradient.reshape(-1) for gradient in some])
                self._add(torch.view_as_real(flat) if flat.is_complex() else flat, look)
                for gradient, part in zip(some, flat.split([each.numel() for each in some]), strict=True):
                    gradient.copy_(part.view(gradient.shape))

    def parameters(self) -> list[torch.Tensor]:
        """Those whose gradients :meth:`add_gradients` adds."""
        return [each for name, each in self._module.module.named_parameters() if self._is_joined(name)]

    def _is_joined(self, name: str) -> bool:
        return name not in self._module.parameters_to_ignore

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Those that replicas share, dense ones."""
        named = self._module.module.named_buffers() if self._module.broadcast_buffers else ()
        return [(name, each) for name, each in named if self._is_joined(name) and each.layout is torch.strided]

    def _outline(self) -> list[tuple[str, str]]:
        """What all replicas must have alike."""

        def describe(named: Iterable[tuple[str, torch.Tensor]]) -> str:
            return ", ".join(f"{name} {_gradient_dtype(each)} {list(each.shape)}" for name, each in named)

        parameters = [one for one in self._module.module.named_parameters() if self._is_joined(one[0])]
        return [("parameters", describe(parameters)), ("buffers", describe(self._buffers()))]

    def _share_buffers(self, look: Look) -> None:
        """All take the buffers of the first copy, as bytes: whatever their dtypes and strides."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for name, buffer in self._buffers():
            if shares_with_itself(buffer):
                raise ArgumentError(
                    f"buffer {name!r} of stage {self.stage} has strides {buffer.stride()}: several of its elements are "
                    "one place in memory, which cannot be shared between replicas"
                )
            by_device.setdefault(buffer.device, []).append(buffer.detach())
        for buffers in by_device.values():
            flat = torch.cat([_bytes_of(buffer) for buffer in buffers])
            self._wait(self._broadcast(flat), "share their buffers", look)
            if self._channel.group.rank != self.members[0]:
                parts = flat.split([math.prod(buffer.shape) * buffer.itemsize for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    # Collectives

    def _on_device(self, numbers: list[int]) -> torch.Tensor:
        """Integers that the replicas' connections can carry."""
        named = itertools.chain(self._module.module.named_parameters(), self._buffers())
        first = next((each for name, each in named if self._is_joined(name)), None)
        return torch.tensor(numbers, dtype=torch.int64, device=None if first is None else first.device)

    def _add(
        self, array: torch.Tensor, look: Look, what: str = "add their gradients", op: Any = dist.ReduceOp.SUM
    ) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._wait(self._connections.allreduce([array], options), what, look)

    def _broadcast(self, array: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return self._connections.broadcast([array], options)

    def _wait(self, work: Any, what: str, look: Look) -> None:
        """As the work's own wait, which would not notice that a copy has failed for minutes."""
        deadline = time.monotonic() + self._timeout_seconds
        looked = time.monotonic()
        try:
            while not work.is_completed():
                now = time.monotonic()
                if now > deadline:
                    raise TransferTimeoutError(
                        f"a replica of stage {self.stage} did not come within {self._timeout_seconds:g} s to where "
                        f"replicas {what}"
                    )
                if now - looked > LOOK_SECONDS:
                    looked = now
                    look()
                time.sleep(SLEEP_SECONDS)
            work.wait()
        except RuntimeError as error:
            if isinstance(error, ReshardError):
                raise
            hear(functools.partial(self._look_for_left, what, look))
            raise RemoteError(f"a replica of stage {self.stage} is gone where replicas {what}: {error}") from error

    def _look_for_left(self, what: str, look: Look) -> None:
        """Raise what others told of, or who has ended its process in order."""
        look()
        rank = self._channel.rendezvous.links.find_left()
        if rank is not None:
            raise RemoteError(f"rank {rank} has ended, a replica of stage {self.stage}, before replicas {what}")


def hear(look: Look) -> None:
    """When a connection inside a stage broke: raise what others tell of in a while, as that a rank has died."""
    deadline = time.monotonic() + HEAR_SECONDS
    while time.monotonic() < deadline:
        look()
        time.sleep(LOOK_SECONDS)


def is_of_a_connection(error: BaseException) -> bool:
    """Whether a module's error may be that of a collective whose other side is gone."""
    if isinstance(error, ReshardError):
        return False
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def set_aside(parameters: Iterable[torch.Tensor]) -> Gradients:
    """Take away the gradients that are there already, so that what is summed over ranks is that of one step."""
    kept = []
    for parameter in parameters:
        if parameter.grad is not None:
            kept.append((parameter, parameter.grad))
            parameter.grad = None
    return kept


def put_back(kept: Gradients) -> None:
    """Add to them what there is now, in their memory as autograd would, and put them back."""
    with torch.no_grad():
        for parameter, gradient in kept:
            new = parameter.grad
            if new is None:
                parameter.grad = gradient
            elif gradient.is_sparse:
                parameter.grad = new + gradient  # a dense one first, as torch wants it
            else:
                gradient += new
                parameter.grad = gradient


#: Of a gradient; sparse ones count from here the dims that their indices have.
_NONE, _DENSE = 0, 2**20


def _kind(gradient: torch.Tensor | None) -> int:
    return _NONE if gradient is None else _NONE + gradient.sparse_dim() if gradient.is_sparse else _DENSE


def _sparse(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """A parameter's gradient, coalesced and with indices of so many dims; without elements where there is none."""
    if parameter.grad is None:
        dtype, shape = _gradient_dtype(parameter), parameter.shape
        indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
        values = torch.empty((0, *shape[sparse_dim:]), dtype=dtype, device=parameter.device)
        empty: torch.Tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
        return empty.coalesce()
    if parameter.grad.sparse_dim() != sparse_dim:
        return parameter.grad.to_dense().to_sparse(sparse_dim).coalesce()
    return parameter.grad.coalesce()


def _gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype that a parameter's gradients have."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    """Its elements in order, as flat bytes."""
    return buffer.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    some: list[torch.Tensor] = []
    for gradient in gradients:
        if some and sum(each.nbytes for each in some) + gradient.nbytes > BUCKET_BYTES:
            yield some
            some = []
        some.append(gradient)
    yield some
