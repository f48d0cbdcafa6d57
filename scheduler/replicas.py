"""What torch's data parallelism needs around a pipeline's backwards: no sum per microbatch, one for all at the end.

Gradients are those of the total loss, so copies of a stage that see different data *add* theirs, whatever wrapper joins
them: stages may have different numbers of copies, and a mean over each stage's own would weigh them differently.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from reshard.errors import ArgumentError, RemoteError, ReshardError, TransferTimeoutError

#: How often a copy that waits for the others looks whether they came, and whether one has failed.
SLEEP_SECONDS = 0.0005
LOOK_SECONDS = 0.2


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
    if getattr(module, "static_graph", False) and isinstance(module, DistributedDataParallel):
        raise ArgumentError(f"stage {stage} is wrapped by DDP with static_graph=True, which cannot leave out its sums")
    if is_split and _fsdp_modules(module):
        raise ArgumentError(
            f"stage {stage} is sharded by FSDP, which frees its weights with the first half of a backward; give it "
            "whole backwards, as fitted(..., can_split=False) does"
        )


def check_loss_shards(stage: int, module: Any, num_loss_shards: int) -> None:
    """Raise ArgumentError if a stage that gives a loss has other copies than the total is said to be the mean of."""
    if isinstance(module, DistributedDataParallel):
        copies = dist.get_world_size(module.process_group)
        if copies != num_loss_shards:
            raise ArgumentError(
                f"stage {stage} gives a loss on {copies} copies under DDP, which see different data, but "
                f"num_loss_shards is {num_loss_shards}; copies that see the same data need no DDP"
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
            else:
                parameter.grad += gradient


def copied_parameters(module: Any) -> list[torch.Tensor]:
    """Those whose gradients :func:`sum_over_copies` adds."""
    return list(module.parameters()) if isinstance(module, DistributedDataParallel) else []


def share_buffers(stage: int, module: Any, timeout_seconds: float, look: Callable[[], None]) -> None:
    """Before the first forward: DDP's copies take the buffers of the first one, as its own first forward would.

    That would wait in torch for a copy which failed before it.

    Args:
        look: called now and then while copies wait for each other; raises when one has failed.

    Raises:
        TransferTimeoutError, RemoteError: some copy did not come.
    """
    if isinstance(module, DistributedDataParallel) and module.broadcast_buffers and module.require_forward_param_sync:
        first = dist.get_global_rank(module.process_group, 0)
        for buffer in module.buffers():
            work = dist.broadcast(buffer.detach(), first, group=module.process_group, async_op=True)
            _wait(work, stage, "share their buffers", timeout_seconds, look)
        module.require_forward_param_sync = False


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
        raise RemoteError(f"a copy of stage {stage} is gone where copies {what}: {error}") from error


def sum_over_copies(stage: int, module: Any, timeout_seconds: float, look: Callable[[], None]) -> None:
    """After the last backward: DDP's copies add their gradients, in its buckets and by its hook.

    Raises:
        TransferTimeoutError, RemoteError: some copy did not come to it; or what ``look`` raises, see
            :func:`share_buffers`.
    """
    if not isinstance(module, DistributedDataParallel):
        return
    copies = dist.get_world_size(module.process_group)
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return
    has_one = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
    work = dist.all_reduce(has_one, dist.ReduceOp.MAX, group=module.process_group, async_op=True)
    _wait(work, stage, "add their gradients", timeout_seconds, look)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(copies)  # DDP takes the mean
    # DDP sums where a parameter's gradient is accumulated, once for each that has one: so add nothing to every one.
    # torch's own pipeline runtime calls its reducer in the same way.
    with torch.enable_grad():
        aliases = [parameter.view_as(parameter) for parameter in parameters]
    module.reducer.prepare_for_backward(aliases if module.find_unused_parameters else [])
    torch.autograd.backward(aliases, [torch.zeros_like(parameter) for parameter in parameters])
    for parameter, is_used in zip(parameters, has_one.tolist(), strict=True):
        if not is_used:  # by no copy: an optimizer would decay it for a gradient of zeros
            parameter.grad = None


def _fsdp_modules(module: Any) -> list[Any]:
    return [each for each in module.modules() if hasattr(each, "set_requires_gradient_sync")]
