"""Synchronization of the replicas of a stage under DDP: buffers before a step, all-reduce of gradients at its end.

DDP's reducer never runs. It would sum during the backward, where a rank blocks in torch if a replica fails. DDP's
process group is not used either. After a failed step, collectives that only some replicas have posted would match
those of the next step. So each ``ReplicaSync`` has its own connections, and an engine made after an error makes new
ones.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from reshard.api.arrays.tensor_checks import has_overlapping_elements
from reshard.coordination import Group, Monitor, RoundRequest, all_gather_json, find_call_group, resolve
from reshard.errors import ArgumentError, DisagreementError, RemoteError, ReshardError, TransferTimeoutError
from reshard.formatting import describe_ranks
from reshard.sharding import Mesh

from .. import torch_compat
from .compression_policy import CompressedSums
from .data_parallel import REPLICATED, fsdp_ranks

#: Intervals at which a waiting replica polls its collective, and checks for errors of other ranks.
SUM_POLL_INTERVAL_SECONDS = 0.0005
SUM_CHECK_INTERVAL_SECONDS = 0.2
#: Time limit for another rank to report the root cause after a connection of this rank broke.
SUM_ROOT_CAUSE_GRACE_SECONDS = 1.5
#: Largest number of bytes of gradients in one all-reduce, unless one gradient is larger.
REPLICA_BUCKET_BYTES = 2**25

#: Raises an error that another rank reported, if any.
CheckErrors = Callable[[], None]
Gradients = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _StartedSum:
    """The sum of a bucket in progress: its parameters, the shapes and strides of their gradients, and the values."""

    parameters: list[torch.Tensor]
    shapes: list[tuple[torch.Size, tuple[int, ...]]]
    flat: torch.Tensor
    work: Any


@dataclass(frozen=True, slots=True)
class _Forms:
    """Parameters of a sum by the form of their gradients.

    Attributes:
        buckets: those with dense gradients.
        sparse: those with sparse gradients, each with the number of sparse dims.
        unused: those without gradients.
    """

    buckets: list[list[torch.Tensor]] = field(default_factory=list)
    sparse: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    unused: list[torch.Tensor] = field(default_factory=list)


def find_replicas(group: Group, stage: int, module: Any, mesh: Mesh) -> tuple[int, ...]:
    """Ranks of the replicas in DDP's process group, ascending, as ranks of ``group``; empty if not under DDP.

    Raises:
        ArgumentError: the process group of DDP or FSDP has a rank that is not in the mesh of the stage.
    """
    if not isinstance(module, REPLICATED):
        if group.process_group is not None:
            _check_inside(stage, "FSDP", [group.translate(rank) for rank in fsdp_ranks(module)], mesh)
        return ()
    world = dist.get_process_group_ranks(module.process_group)
    if group.process_group is None:  # a group of reshard.join numbers its ranks itself
        return tuple(sorted(all_gather_json(group.rank, module.process_group)))
    ranks = tuple(sorted(group.translate(rank) for rank in world))
    _check_inside(stage, "DDP", ranks, mesh)
    return ranks


def _check_inside(stage: int, wrapper: str, ranks: Sequence[int], mesh: Mesh) -> None:
    others = sorted(set(ranks) - set(mesh.ranks))
    if others:
        raise ArgumentError(
            f"the module of stage {stage} is wrapped by {wrapper} over {describe_ranks(ranks)}, but "
            f"{describe_ranks(others)} {'are' if len(others) > 1 else 'is'} not of that stage, which is on "
            f"{describe_ranks(mesh.ranks)}: give {wrapper} a process group of the ranks of its stage"
        )


class ReplicaSync:
    """Synchronizes the replicas of one stage under DDP. Each replica makes one.

    Args:
        stage: index of the stage.
        module: the module, wrapped by DDP or FrozenReplicas.
        group: group of the engine.
        ranks: ranks of the replicas in ``group``, ascending.
        device: device type of the module.
        timeout_seconds: time limit of the agreement, and of each collective.
        encoded: compresses sums of gradients; None: they are sent raw.

    Raises:
        DisagreementError: parameters or buffers of the replicas differ in name, dtype or shape, or some are frozen on
            some replicas only.
        RemoteError, TransferTimeoutError: a replica failed or did not arrive.
    """

    def __init__(
        self,
        stage: int,
        module: Any,
        group: Group,
        ranks: tuple[int, ...],
        device: str,
        timeout_seconds: float,
        encoded: CompressedSums | None = None,
    ) -> None:
        self.stage, self._module, self._device = stage, module, device
        self._timeout_seconds, self.encoded = timeout_seconds, encoded
        self._group, self._call_group = group, find_call_group(group, ranks)
        outline = [(f"{what} of stage {stage}", text) for what, text in self._outline()]
        request = RoundRequest(group.rank, outline, hostname=group.hostname)
        _, decision = self._call_group.agree(request, lambda requests: resolve(requests, {}), timeout_seconds)
        self._generation, self._in_step = decision.generation, False
        self._connections = self._call_group.collectives(decision.generation, torch.device(device), timeout_seconds)
        self._started: deque[_StartedSum] = deque()
        self._forms = _Forms()  # of the sum that has started
        group.resources.add_user(self)

    # Interface :class:`reshard.coordination.liveness.heartbeat.Watched`

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of all replicas."""
        return self._call_group.members

    def reported_error(self) -> ReshardError | None:
        """The error that another replica reported, if any."""
        return self._call_group.reported_error(self._generation)

    def stop(self, error: ReshardError) -> None:
        """Fail the collectives of this step on all replicas."""
        self._call_group.fail(self._generation, error)

    def poll(self) -> bool:
        """Always False: there is nothing to poll, because the thread of the step waits for its collectives itself."""
        return False

    # Interface :class:`reshard.coordination.groups.process_group.ConnectionUser`, used when the group closes

    def finish(self, timeout_seconds: float | None) -> None:
        """Do nothing: a step in progress fails when :meth:`release` drops its connections."""

    def release(self) -> None:
        """Drop the connections."""
        self._connections = None

    # A step

    def check_errors(self) -> None:
        """Raise an error that another replica reported, if any."""
        self._call_group.check_reported(self._generation)

    def fail(self, error: BaseException) -> None:
        """Fail the collectives of this step on all replicas."""
        self._call_group.fail(self._generation, error)

    def begin(self, check_errors: CheckErrors, sum_place: int | None = None) -> None:
        """Before the first forward, check that replicas match, and broadcast the buffers of the first replica.

        Args:
            check_errors: called regularly while waiting; raises when a rank has failed.
            sum_place: index of the action before which the sum of gradients starts; None: after the last action.

        Raises:
            DisagreementError: replicas have different parameters or buffers, or froze different ones.
            TransferTimeoutError, RemoteError: a replica failed or did not arrive.
        """
        self._in_step, self._syncs_in_forward = True, self._module.require_forward_param_sync
        self._module.require_forward_param_sync = False  # else a forward blocks in torch if a replica has failed
        torch_compat.reset_reducer(self._module)  # a forward between steps may have prepared it for a backward
        if self._connections is None:
            return
        Monitor.of(self._group).watch(self)
        where = "after the last action" if sum_place is None else f"before action {sum_place}"
        outline = [*self._outline(), ("parameters in common with other stages", f"its sum of gradients {where}")]
        # One all-reduce shows whether all hashes are equal: the maximum of -h is minus the minimum of h.
        hashes = [int(hashlib.sha256(text.encode()).hexdigest()[:15], 16) for _, text in outline]
        extremes = self._on_device([sign * digest for digest in hashes for sign in (1, -1)])
        self._all_reduce(extremes, check_errors, "begin a step", dist.ReduceOp.MAX)
        for (what, text), high, low in zip(outline, extremes.tolist()[::2], extremes.tolist()[1::2], strict=True):
            if high != -low:
                raise DisagreementError(
                    f"replicas of stage {self.stage} have different {what}; "
                    f"rank {self._call_group.group.rank} has {text}"
                )
        self._broadcast_buffers(check_errors)

    def end(self) -> None:
        """After a step, even a failed one, restore DDP's settings."""
        if not self._in_step:
            return
        self._in_step, self._module.require_forward_param_sync = False, self._syncs_in_forward
        self._started, self._forms = deque(), _Forms()
        if self._connections is not None:
            Monitor.of(self._group).forget(self)

    def add_gradients(self, check_errors: CheckErrors, parameters: Sequence[torch.Tensor]) -> None:
        """After the last backward, sum gradients over replicas. A parameter that no replica used gets none.

        Args:
            check_errors: see :meth:`begin`.
            parameters: those of :meth:`parameters` that no other stage of this rank sums.

        Raises:
            TransferTimeoutError, RemoteError: a replica failed or did not arrive. Also what ``check_errors`` raises.
        """
        self._group.check_usable()
        if parameters and self._connections is not None:
            forms = self._agree_on_forms(check_errors, parameters)
            self._sum_sparse(check_errors, forms.sparse)
            for bucket in forms.buckets:
                self._sum_bucket(check_errors, bucket)

    def start_sum(self, check_errors: CheckErrors, parameters: Sequence[torch.Tensor]) -> None:
        """Start the sums of :meth:`add_gradients`. :meth:`finish_sum` waits for them; until then ``.grad`` is None.

        Sparse and compressed gradients take several steps, so :meth:`finish_sum` sums them. All replicas start at the
        same place of their actions. They wait here for each other, and not for other ranks.
        """
        self._group.check_usable()
        if not parameters or self._connections is None:
            return
        self._forms = forms = self._agree_on_forms(check_errors, parameters)
        for bucket in forms.buckets if self.encoded is None else ():
            gradients = [_grad_of(parameter) for parameter in bucket]
            shapes = [(gradient.shape, gradient.stride()) for gradient in gradients]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            for parameter in bucket:  # so that a gradient and its part of the bucket do not both take memory
                parameter.grad = None
            self._started.append(_StartedSum(bucket, shapes, flat, self._post_sum(flat)))

    def finish_sum(self, check_errors: CheckErrors) -> None:
        """Wait for the sums of :meth:`start_sum`, and put them into ``.grad``.

        Raises:
            ArgumentError: a parameter has got another gradient since. Also what :meth:`add_gradients` raises.
        """
        forms, self._forms = self._forms, _Forms()
        self._check_unchanged([*forms.unused, *(item for done in self._started for item in done.parameters)])
        while self._started:
            item = self._started.popleft()
            self._wait(item.work, "add its gradients", check_errors)
            parts = item.flat.split([shape.numel() for shape, _ in item.shapes])
            for parameter, (shape, stride), part in zip(item.parameters, item.shapes, parts, strict=True):
                gradient = torch.empty_strided(shape, stride, dtype=part.dtype, device=part.device)
                parameter.grad = gradient.copy_(part.view(shape))
        self._sum_sparse(check_errors, forms.sparse)
        for bucket in forms.buckets if self.encoded is not None else ():
            self._sum_bucket(check_errors, bucket)

    def _check_unchanged(self, without_gradient: Sequence[torch.Tensor]) -> None:
        late = [id(parameter) for parameter in without_gradient if parameter.grad is not None]
        if late:
            name = next(name for name, item in self._module.module.named_parameters() if id(item) in late)
            raise ArgumentError(
                f"parameter {name!r} of stage {self.stage} got a gradient after the last backward of its stage: "
                "another stage of the rank uses it, so it must be a parameter of that stage too"
            )

    def _agree_on_forms(self, check_errors: CheckErrors, parameters: Sequence[torch.Tensor]) -> _Forms:
        """The form in which replicas sum each gradient, so that all call the same collectives."""
        numbers = self._on_device([_form(parameter.grad) for parameter in parameters])
        self._all_reduce(numbers, check_errors, op=dist.ReduceOp.MAX)
        forms = _Forms()
        dense: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter, form in zip(parameters, numbers.tolist(), strict=True):
            if form == _DENSE:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=torch_compat.gradient_dtype(parameter))
                elif parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
                dense.setdefault((parameter.grad.dtype, parameter.device), []).append(parameter)
            elif form == _NONE:
                forms.unused.append(parameter)
            else:
                forms.sparse.append((parameter, form - _NONE))
        forms.buckets.extend(bucket for alike in dense.values() for bucket in _buckets(alike))
        return forms

    def _sum_sparse(self, check_errors: CheckErrors, sparse: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Sum sparse gradients. Each parameter comes with the number of sparse dims of its gradient."""
        for parameter, sparse_dim in sparse:
            parameter.grad = gradient = _sparse(parameter, sparse_dim)
            self._all_reduce(gradient, check_errors)

    def _sum_bucket(self, check_errors: CheckErrors, bucket: Sequence[torch.Tensor]) -> None:
        """Sum the gradients of a bucket of parameters in place."""
        gradients = [_grad_of(parameter) for parameter in bucket]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        if self.encoded is not None and self.encoded.can_compress(flat):
            names = {id(parameter): name for name, parameter in self._module.module.named_parameters()}
            parts = [(names[id(parameter)], parameter.numel()) for parameter in bucket]
            self.encoded.add(flat, parts, functools.partial(self._exchange, check_errors))
        else:
            self._wait(self._post_sum(flat), "add its gradients", check_errors)
        for gradient, part in zip(gradients, flat.split([item.numel() for item in gradients]), strict=True):
            gradient.copy_(part.view(gradient.shape))

    def parameters(self) -> list[torch.Tensor]:
        """Parameters whose gradients :meth:`add_gradients` sums."""
        return [parameter for name, parameter in self._module.module.named_parameters() if self._is_synced(name)]

    def _is_synced(self, name: str) -> bool:
        return name not in self._module.parameters_to_ignore

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Dense buffers that DDP would broadcast."""
        named = self._module.module.named_buffers() if self._module.broadcast_buffers else ()
        return [(name, item) for name, item in named if self._is_synced(name) and item.layout is torch.strided]

    def _outline(self) -> list[tuple[str, str]]:
        """Descriptions of the parameters and the buffers, which must be equal on all replicas, as (name, text)."""

        def describe(named: Iterable[tuple[str, torch.Tensor]]) -> str:
            return ", ".join(f"{name} {torch_compat.gradient_dtype(item)} {list(item.shape)}" for name, item in named)

        parameters = [element for element in self._module.module.named_parameters() if self._is_synced(element[0])]
        frozen = ", ".join(name for name, parameter in parameters if not parameter.requires_grad) or "none"
        buffers = describe(self._buffers())
        return [("parameters", describe(parameters)), ("frozen parameters", frozen), ("buffers", buffers)]

    def _broadcast_buffers(self, check_errors: CheckErrors) -> None:
        """Copy the buffers of the first replica to the others, as bytes, so that any dtype and strides work."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for name, buffer in self._buffers():
            if has_overlapping_elements(buffer):
                raise ArgumentError(
                    f"buffer {name!r} of stage {self.stage} has overlapping elements (strides {buffer.stride()}); "
                    "it cannot be synchronized between replicas"
                )
            by_device.setdefault(buffer.device, []).append(buffer.detach())
        for buffers in by_device.values():
            flat = torch.cat([_bytes_of(buffer) for buffer in buffers])
            self._wait(self._broadcast(flat), "share its buffers", check_errors)
            if self._call_group.group.rank != self.members[0]:
                parts = flat.split([math.prod(buffer.shape) * buffer.itemsize for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    # Collectives

    def _on_device(self, numbers: list[int]) -> torch.Tensor:
        """Integers as an int64 tensor on the device of the module, from which its connections can send."""
        named = itertools.chain(self._module.module.named_parameters(), self._buffers())
        first = next((item for name, item in named if self._is_synced(name)), None)
        return torch.tensor(numbers, dtype=torch.int64, device=self._device if first is None else first.device)

    def _all_reduce(
        self,
        array: torch.Tensor,
        check_errors: CheckErrors,
        purpose: str = "add its gradients",
        op: Any = dist.ReduceOp.SUM,
    ) -> None:
        self._wait(self._post_sum(array, op), purpose, check_errors)

    def _post_sum(self, array: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        if array.is_complex() and array.layout is torch.strided:
            array = torch.view_as_real(array)
        return self._connections.allreduce([array], options)

    def _exchange(self, check_errors: CheckErrors, received: torch.Tensor, sent: torch.Tensor, rows: list[int]) -> None:
        """All-to-all: send ``rows[i]`` rows to replica ``i``, and receive as many from it."""
        self._wait(self._connections.alltoall_base(received, sent, rows, rows), "add its gradients", check_errors)

    def _broadcast(self, array: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return self._connections.broadcast([array], options)

    def _wait(self, work: Any, purpose: str, check_errors: CheckErrors) -> None:
        """Wait for a collective. Its own ``wait`` would take minutes to notice that a replica has failed."""
        deadline = time.monotonic() + self._timeout_seconds
        checked = time.monotonic()
        try:
            while not work.is_completed():
                now = time.monotonic()
                if now > deadline:
                    raise TransferTimeoutError(
                        f"a replica of stage {self.stage} did not {purpose} within {self._timeout_seconds:g} s"
                    )
                if now - checked > SUM_CHECK_INTERVAL_SECONDS:
                    checked = now
                    check_errors()
                time.sleep(SUM_POLL_INTERVAL_SECONDS)
            work.wait()
        except RuntimeError as error:
            if isinstance(error, ReshardError):
                raise
            wait_for_root_cause(functools.partial(self._check_exited, purpose, check_errors))
            raise RemoteError(
                f"the connection to a replica of stage {self.stage} broke before it could {purpose}: {error}"
            ) from error

    def _check_exited(self, purpose: str, check_errors: CheckErrors) -> None:
        """Raise the error that another rank reported, or else an error that names a replica whose process exited."""
        check_errors()
        rank = self._call_group.rounds.links.find_left()
        if rank is not None:
            raise RemoteError(f"rank {rank}, a replica of stage {self.stage}, exited before it could {purpose}")


def wait_for_root_cause(check_errors: CheckErrors) -> None:
    """After a connection broke, wait ``SUM_ROOT_CAUSE_GRACE_SECONDS`` for the cause from another rank, and raise it."""
    deadline = time.monotonic() + SUM_ROOT_CAUSE_GRACE_SECONDS
    while time.monotonic() < deadline:
        check_errors()
        time.sleep(SUM_CHECK_INTERVAL_SECONDS)


def stash_gradients(parameters: Iterable[torch.Tensor]) -> Gradients:
    """Remove and return the gradients of earlier steps. Then only the gradients of this step are summed over ranks."""
    stashed = []
    for parameter in parameters:
        if parameter.grad is not None:
            stashed.append((parameter, parameter.grad))
            parameter.grad = None
    return stashed


def restore_gradients(stashed: Gradients) -> None:
    """Add the current gradients to the stashed ones, in place as autograd does, and put the sums into ``.grad``."""
    with torch.no_grad():
        for parameter, gradient in stashed:
            new = parameter.grad
            if new is None:
                parameter.grad = gradient
            elif gradient.is_sparse:
                parameter.grad = new + gradient  # torch requires the dense operand first
            else:
                gradient += new
                parameter.grad = gradient


#: Form of a gradient: none, its number of sparse dims, or dense. Replicas use the maximum of their forms.
_NONE, _DENSE = 0, 2**20


def _form(gradient: torch.Tensor | None) -> int:
    return _NONE if gradient is None else _NONE + gradient.sparse_dim() if gradient.is_sparse else _DENSE


def _sparse(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """A parameter's gradient as a coalesced tensor of ``sparse_dim`` sparse dims; empty if there is no gradient."""
    if parameter.grad is None:
        dtype, shape = torch_compat.gradient_dtype(parameter), parameter.shape
        indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
        values = torch.empty((0, *shape[sparse_dim:]), dtype=dtype, device=parameter.device)
        empty: torch.Tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
        return empty.coalesce()
    if parameter.grad.sparse_dim() != sparse_dim:
        return parameter.grad.to_dense().to_sparse(sparse_dim).coalesce()
    return parameter.grad.coalesce()


def _bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    """The elements of a buffer in order, as flat bytes."""
    return buffer.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _grad_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _buckets(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Buckets of consecutive parameters, whose gradients have at most ``REPLICA_BUCKET_BYTES``, or one larger one."""
    bucket: list[torch.Tensor] = []
    for parameter in parameters:
        if bucket and sum(_grad_of(item).nbytes for item in bucket) + _grad_of(parameter).nbytes > REPLICA_BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
