"""What torch's data parallelism needs around a pipeline's backwards: no sum per microbatch, one for all at the end.

Gradients are those of the total loss, so copies of a stage that see different data *add* theirs, whatever wrapper joins
them: stages may have different numbers of copies, and a mean over each stage's own would weigh them differently.

DDP's reducer sums inside a backward, where nobody sees a copy that has failed. So copies under DDP add their gradients
behind the last backward, over DDP's group, and the reducer never runs.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from reshard.errors import ArgumentError, RemoteError, ReshardError, TransferTimeoutError

from .pipeline import Pipeline

#: How often a copy that waits for the others looks whether they came, and whether one has failed.
SLEEP_SECONDS = 0.0005
LOOK_SECONDS = 0.2
#: How long whose connection inside a stage broke waits for others to say why.
HEAR_SECONDS = 1.5


def check_module(stage: int, module: Any, is_split: bool) -> None:
    """Raise ArgumentError unless a stage's module can be run as its schedule says."""
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"stage {stage} needs a torch.nn.Module, not {type(module).__name__}")
    for name, each in module.named_modules():
        inside = f"the module of stage {stage}" + (f" has {name!r}, which" if name else "")
        if isinstance(each, DistributedDataParallel) and each is not module:
            raise ArgumentError(
                f"{inside} is wrapped by DistributedDataParallel; only the whole module can be, outermost "
                "(DDP(torch.compile(module)), not the other way round), or its gradients would not be summed"
            )
        is_replicate = hasattr(each, "set_requires_gradient_sync") and not hasattr(each, "set_gradient_divide_factor")
        if is_replicate or type(each).__name__ == "FullyShardedDataParallel":
            wrapper = "replicate()" if is_replicate else "FullyShardedDataParallel"
            raise ArgumentError(f"{inside} is wrapped by {wrapper}; use DistributedDataParallel, or fully_shard")
    if isinstance(module, DistributedDataParallel) and module.static_graph:
        raise ArgumentError(f"stage {stage} is wrapped by DDP with static_graph=True, which cannot leave out its sums")
    if isinstance(module, DistributedDataParallel) and module._comm_hooks:
        raise ArgumentError(
            f"stage {stage} is wrapped by DDP with a communication hook, which would not be called: copies add their "
            "gradients once per step, behind the last backward"
        )
    if any(getattr(each, _SPOILT, False) for each in _fsdp_modules(module)):
        raise ArgumentError(
            f"stage {stage} is sharded by FSDP, and was in a step that failed: FSDP keeps gradients of it that nothing "
            "can reach; make the module anew, from a checkpoint say"
        )
    if is_split and _fsdp_modules(module):
        raise ArgumentError(
            f"stage {stage} is sharded by FSDP, which frees its weights with the first half of a backward; give it "
            "whole backwards, as fitted(..., can_split=False) does"
        )


_SPOILT = "_was_in_a_step_that_failed"


def spoil(module: Any) -> None:
    """Note that a step of the module failed."""
    for each in _fsdp_modules(module):
        setattr(each, _SPOILT, True)


def without_ddp(module: torch.nn.Module) -> torch.nn.Module:
    """The module that DDP wraps, or the module itself."""
    inside: torch.nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inside


def is_sharded(pipeline: Pipeline, stage: int) -> bool:
    """Whether ranks of a stage have parts of what crosses its edges."""
    sides = [spec.dst_shards for edge in pipeline.edges if edge.dst == stage for spec in edge.tensors]
    sides += [spec.src_shards for edge in pipeline.edges if edge.src == stage for spec in edge.tensors]
    return any(shards.local_shape(rank) != shards.shape for shards in sides for rank in shards.layout.ranks)


def warn_of_drift(pipeline: Pipeline, stage: int, module: torch.nn.Module) -> None:
    """Warn where ranks of a stage see different data, and nothing adds the gradients that each of them has."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    is_joined = isinstance(module, DistributedDataParallel) or any(hasattr(each, "to_local") for each in parameters)
    if parameters and not is_joined and is_sharded(pipeline, stage):
        warnings.warn(
            f"ranks of stage {stage} have shards of what crosses its edges, and its module is a plain one: each rank "
            "keeps the gradients of its own part. Wrap it by DistributedDataParallel or fully_shard, or add them "
            "yourself (then filter this warning)",
            stacklevel=3,
        )


def check_loss_shards(stage: int, module: Any, num_loss_shards: int) -> None:
    """Raise ArgumentError if a stage that gives a loss has other copies than the total is said to be the mean of."""
    if isinstance(module, DistributedDataParallel):
        wrapper, copies = "DDP", dist.get_world_size(module.process_group)
    else:
        wrapper, copies = "FSDP", _fsdp_copies(module)
    if copies not in (0, num_loss_shards):
        raise ArgumentError(
            f"stage {stage} gives a loss on {copies} copies under {wrapper}, which see different data, but "
            f"num_loss_shards is {num_loss_shards}; copies that see the same data need no {wrapper}"
        )


def quiet(module: Any) -> contextlib.AbstractContextManager[Any]:
    """Within it no copy of the module hears of the others."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()


def announce_backward(module: Any, *, is_last: bool) -> None:
    """Before each backward: FSDP sums gradients with the last one."""
    for each in _fsdp_modules(module):
        each.set_gradient_divide_factor(1.0)
        if hasattr(each, "set_force_sum_reduction_for_comms"):  # Gloo has no other reduction that takes a factor
            each.set_force_sum_reduction_for_comms(True)
        each.set_is_last_backward(is_last)
        each.set_requires_gradient_sync(is_last, recurse=False)


Gradients = list[tuple[torch.Tensor, torch.Tensor]]


def set_aside(parameters: Iterable[torch.Tensor]) -> Gradients:
    """Take away the gradients that are there already, so that what is summed over ranks is that of one step."""
    kept = []
    for parameter in parameters:
        if parameter.grad is not None:
            kept.append((parameter, parameter.grad))
            parameter.grad = None
    return kept


def put_back(kept: Gradients) -> None:
    """Add them again."""
    with torch.no_grad():
        for parameter, gradient in kept:
            if parameter.grad is None:
                parameter.grad = gradient
            elif parameter.grad.is_sparse and not gradient.is_sparse:
                parameter.grad = gradient + parameter.grad  # the other way round torch refuses
            else:
                parameter.grad += gradient


def copied_parameters(module: Any) -> list[torch.Tensor]:
    """Those whose gradients :func:`sum_over_copies` adds."""
    if not isinstance(module, DistributedDataParallel):
        return []
    return [each for name, each in module.module.named_parameters() if name not in module.parameters_to_ignore]


def share_buffers(stage: int, module: Any, timeout_seconds: float, look: Callable[[], None]) -> None:
    """Before the first forward of a step: DDP's copies take the buffers of the first one, as its own forward would.

    That would wait in torch for a copy which failed before it.

    Args:
        look: called now and then while copies wait for each other; raises when one has failed.

    Raises:
        TransferTimeoutError, RemoteError: some copy did not come.
    """
    if isinstance(module, DistributedDataParallel) and module.broadcast_buffers:
        module.require_forward_param_sync = False
        first = dist.get_global_rank(module.process_group, 0)
        works = [
            dist.broadcast(buffer.detach(), first, group=module.process_group, async_op=True)
            for name, buffer in module.module.named_buffers()
            if name not in module.parameters_to_ignore
        ]
        for work in works:
            _wait(work, stage, "share their buffers", timeout_seconds, look)


def _wait(work: Any, stage: int, what: str, timeout_seconds: float, look: Callable[[], None]) -> None:
    """As the work's own wait, which would not notice that a copy has failed for minutes."""
    deadline = time.monotonic() + timeout_seconds
    looked = time.monotonic()
    try:
        while not work.is_completed():
            now = time.monotonic()
            if now > deadline:
                raise TransferTimeoutError(
                    f"a copy of stage {stage} did not come within {timeout_seconds:g} s to where copies {what}"
                )
            if now - looked > LOOK_SECONDS:
                looked = now
                look()
            time.sleep(SLEEP_SECONDS)
        work.wait()
    except RuntimeError as error:
        if isinstance(error, ReshardError):
            raise
        hear(look)
        raise RemoteError(f"a copy of stage {stage} is gone where copies {what}: {error}") from error


def hear(look: Callable[[], None]) -> None:
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


def sum_over_copies(
    stage: int, module: Any, timeout_seconds: float, look: Callable[[], None], summed: set[int]
) -> None:
    """After the last backward: DDP's copies add their gradients. What no copy used keeps none.

    Args:
        summed: ids of parameters that are dealt with already, as another stage has them too; grows.

    Raises:
        TransferTimeoutError, RemoteError: some copy did not come to it; or what ``look`` raises, see
            :func:`share_buffers`.
    """
    parameters = [parameter for parameter in copied_parameters(module) if id(parameter) not in summed]
    summed.update(map(id, parameters))
    if not parameters:
        return

    def add(array: torch.Tensor, how: Any = dist.ReduceOp.SUM) -> None:
        work = dist.all_reduce(array, how, group=module.process_group, async_op=True)
        _wait(work, stage, "add their gradients", timeout_seconds, look)

    kinds = torch.tensor([_kind(parameter.grad) for parameter in parameters], device=parameters[0].device)
    add(kinds, dist.ReduceOp.MAX)
    dense: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter, kind in zip(parameters, kinds.tolist(), strict=True):
        if kind == _DENSE:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            dense.setdefault((parameter.dtype, parameter.device), []).append(parameter.grad)
        elif kind == _SPARSE:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, layout=torch.sparse_coo)
            gradient = parameter.grad.coalesce()
            add(gradient)
            parameter.grad = gradient
    for gradients in dense.values():
        for some in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in some])
            add(flat)
            for gradient, part in zip(some, flat.split([each.numel() for each in some]), strict=True):
                gradient.copy_(part.view(gradient.shape))


_NONE, _SPARSE, _DENSE = range(3)
#: How much is added at once.
BUCKET_BYTES = 2**25


def _kind(gradient: torch.Tensor | None) -> int:
    return _NONE if gradient is None else _SPARSE if gradient.is_sparse else _DENSE


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    some: list[torch.Tensor] = []
    for gradient in gradients:
        if some and sum(each.nbytes for each in some) + gradient.nbytes > BUCKET_BYTES:
            yield some
            some = []
        some.append(gradient)
    yield some


def _fsdp_copies(module: Any) -> int:
    """Over how many ranks FSDP shards, and replicates, a module; 0 if it does not, or does not say."""
    for each in _fsdp_modules(module):
        with contextlib.suppress(AttributeError):  # torch has no public name for it
            return int(each._get_fsdp_state()._fsdp_param_group.mesh_info.mesh.size())
    return 0


def _fsdp_modules(module: Any) -> list[Any]:
    return [each for each in module.modules() if hasattr(each, "set_requires_gradient_sync")]
