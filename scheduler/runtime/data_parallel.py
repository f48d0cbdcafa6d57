"""What torch's data parallelism needs around a pipeline's backwards: no sum per microbatch, one for all at the end.

Gradients are those of the total loss, so replicas of a stage that see different data *add* theirs, whatever wrapper
joins them: stages may have different numbers of replicas, and a mean over each stage's own would weigh them
differently.

What replicas under DDP do with each other is in :mod:`.replicas`; here is what a module's wrapper must be told, and
what cannot be run.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from reshard.errors import ArgumentError

from ..graph import Pipeline


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
            f"stage {stage} is wrapped by DDP with a communication hook, which would not be called: replicas add their "
            "gradients once per step, behind the last backward"
        )
    if any(getattr(each, _SPOILT, False) for each in _fsdp_modules(module)):
        raise ArgumentError(
            f"stage {stage} is sharded by FSDP, and was in a step that failed: FSDP keeps gradients of it that nothing "
            "can reach, and its group may be out of sync; make both anew, the module from a checkpoint say"
        )
    if is_split and _fsdp_modules(module):
        raise ArgumentError(
            f"stage {stage} is sharded by FSDP, which frees its weights with the first half of a backward; give it "
            "whole backwards, as auto_schedule(..., can_split=False) does"
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
    plain = [each for each in parameters if not hasattr(each, "to_local")]
    # of tensor parallel modules the plain ones are alike on all ranks
    is_joined = isinstance(module, DistributedDataParallel) or (
        len(plain) < len(parameters) and not _fsdp_modules(module)
    )
    if plain and not is_joined and is_sharded(pipeline, stage):
        warnings.warn(
            f"ranks of stage {stage} have shards of what crosses its edges, and {len(plain)} parameters of its module "
            "are plain ones: each rank keeps the gradients of its own part. Wrap the whole module by "
            "DistributedDataParallel or fully_shard, or add them yourself (then filter this warning)",
            stacklevel=3,
        )


#: How many replicas of the stages that give a loss see different data: of all of them, or of each.
LossShards = int | Mapping[int, int]


def loss_shards_of(stage: int, given: LossShards) -> int:
    """Over how many replicas of a stage the total is the mean of the loss that it gives."""
    return given.get(stage, 1) if isinstance(given, Mapping) else given


def check_loss_shards(given: Any, pipeline: Pipeline) -> None:
    """Raise ArgumentError unless these are numbers of replicas that stages can have."""
    ranks = {stage: len(each.mesh.ranks) for stage, each in enumerate(pipeline.stages) if each.mesh is not None}
    wanted: list[tuple[str, Any, int]] = [("num_loss_shards is", given, max(ranks.values()))]
    if isinstance(given, Mapping):
        unknown = [stage for stage in given if stage not in ranks]
        if unknown:
            raise ArgumentError(f"num_loss_shards names stage {unknown[0]!r}; there are 0 to {max(ranks)}")
        wanted = [(f"num_loss_shards of stage {stage} is", number, ranks[stage]) for stage, number in given.items()]
    for what, number, most in wanted:
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
            raise ArgumentError(
                f"{what} {number!r}; it must be an integer from 1 to {most}, the ranks of "
                f"{'that' if isinstance(given, Mapping) else 'the largest'} stage"
            )


def check_loss_replicas(stage: int, module: Any, given: LossShards, num_ranks: int) -> None:
    """Raise ArgumentError if a stage that gives a loss has other replicas than the total is said to be the mean of."""
    number = loss_shards_of(stage, given)
    if number > num_ranks:
        raise ArgumentError(
            f"stage {stage} gives a loss on {num_ranks} rank{'s' * (num_ranks > 1)}, but num_loss_shards is {number}; "
            "where stages with a loss differ, name each: num_loss_shards={stage: number, ...}"
        )
    if isinstance(module, DistributedDataParallel):
        wrapper, replicas = "DDP", dist.get_world_size(module.process_group)
    else:
        wrapper, replicas = "FSDP", len(fsdp_ranks(module))
    if replicas not in (0, number):
        raise ArgumentError(
            f"stage {stage} gives a loss on {replicas} replicas under {wrapper}, which see different data, but "
            f"num_loss_shards is {number}; replicas that see the same data need no {wrapper}, and stages that differ "
            "are named, {stage: number, ...}"
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


def fsdp_ranks(module: Any) -> list[int]:
    """The ranks of the world over which FSDP shards, and replicates, a module; none if it does not, or does not say."""
    for each in _fsdp_modules(module):
        with contextlib.suppress(AttributeError):  # torch has no public name for it
            return sorted(each._get_fsdp_state()._fsdp_param_group.mesh_info.mesh.mesh.flatten().tolist())
    return []


def _fsdp_modules(module: Any) -> list[Any]:
    return [each for each in module.modules() if hasattr(each, "set_requires_gradient_sync")]
