"""DDP and FSDP in a pipeline: reduce gradients over replicas once per step instead of once per microbatch.

Gradients are those of the total loss. So replicas of a stage that see different data *add* their gradients, under DDP
and FSDP. A mean over replicas would scale the gradients of stages with different numbers of replicas differently.

This module configures the wrappers and refuses wrappers that cannot run. :mod:`.grad_sync` runs the all-reduce of
gradients under DDP.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from reshard.errors import ArgumentError, DisagreementError
from reshard.formatting import unwrapped_name

from .. import torch_compat
from ..pipeline import Pipeline


class FrozenReplicas(torch.nn.Module):
    """Wraps a replicated module without trainable parameters, which DDP refuses.

    Like DDP, the constructor copies the parameters and buffers of the first replica to all replicas. The engine
    synchronizes buffers before each step, as it does under DDP.
    """

    def __init__(self, module: torch.nn.Module, process_group: Any) -> None:
        super().__init__()
        self.module, self.process_group = module, process_group
        self.broadcast_buffers = self.require_forward_param_sync = True
        self.parameters_to_ignore: frozenset[str] = frozenset()
        for item in (*module.parameters(), *module.buffers()):
            dist.broadcast(item.detach(), group=process_group, group_src=0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)


#: Wrappers of a whole stage whose replicas the engine synchronizes.
REPLICATED = (DistributedDataParallel, FrozenReplicas)


def check_module(stage: int, module: Any) -> None:
    """Raise ArgumentError unless the module can run in a pipeline."""
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"stage {stage} needs a torch.nn.Module, not {type(module).__name__}")
    for name, submodule in module.named_modules():
        inside = f"the module of stage {stage}" + (f" has {name!r}, which" if name else "")
        if isinstance(submodule, DistributedDataParallel) and submodule is not module:
            raise ArgumentError(
                f"{inside} is wrapped by DistributedDataParallel; only the whole module can be, outermost "
                "(DDP(torch.compile(module)), not the other way round), or its gradients would not be summed"
            )
        is_replicate = hasattr(submodule, "set_requires_gradient_sync") and not hasattr(
            submodule, "set_gradient_divide_factor"
        )
        if is_replicate or type(submodule).__name__ == "FullyShardedDataParallel":
            wrapper = "replicate()" if is_replicate else "FullyShardedDataParallel"
            raise ArgumentError(
                f"{inside} is wrapped by {wrapper}, which is not supported; use DistributedDataParallel or fully_shard"
            )
    if isinstance(module, DistributedDataParallel) and module.static_graph:
        raise ArgumentError(
            f"stage {stage} is wrapped by DDP with static_graph=True, which cannot skip gradient sums in a backward"
        )
    if isinstance(module, DistributedDataParallel) and torch_compat.has_comm_hooks(module):
        raise ArgumentError(
            f"stage {stage} is wrapped by DDP with a communication hook, which would not be called: replicas add their "
            "gradients once per step, after the last backward"
        )
    if any(getattr(fsdp_submodule, _FAILED, False) for fsdp_submodule in _fsdp_modules(module)):
        raise ArgumentError(
            f"stage {stage} is sharded by FSDP, and was in a step that failed: FSDP holds partial gradients "
            "that cannot be cleared, and its process group may be out of sync; make a new group and a new module, for "
            "example from a checkpoint"
        )


def check_split(stage: int, module: Any) -> None:
    """Raise ArgumentError unless the backward of the module can be split into two passes."""
    if _fsdp_modules(module):
        raise ArgumentError(
            f"stage {stage} is sharded by FSDP, which frees its weights after the input-gradient pass; use whole "
            "backwards, for example auto_schedule(..., can_split=False)"
        )


#: Attribute that marks an FSDP module after a failed step.
_FAILED = "_was_in_a_step_that_failed"


def mark_failed(module: Any) -> None:
    """Mark the FSDP modules in the module, so that no later engine uses them."""
    for fsdp_submodule in _fsdp_modules(module):
        setattr(fsdp_submodule, _FAILED, True)


def find_parameter(module: torch.nn.Module, name: str) -> torch.nn.Parameter:
    """The parameter with this name, with or without the prefixes of wrappers.

    Raises:
        AttributeError: no parameter has this name.
    """
    for plain, parameter in plain_parameters(module, remove_duplicate=False):
        if plain == name:
            return parameter
    return module.get_parameter(name)


def plain_parameters(
    module: torch.nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a module with their names in the module without wrappers."""
    for name, parameter in without_ddp(module).named_parameters(remove_duplicate=remove_duplicate):
        yield unwrapped_name(name), parameter


def without_ddp(module: torch.nn.Module) -> torch.nn.Module:
    """The module that DDP or :class:`FrozenReplicas` wraps, or the module itself."""
    inside: torch.nn.Module = module.module if isinstance(module, REPLICATED) else module
    return inside


def is_sharded(pipeline: Pipeline, stage: int) -> bool:
    """Whether a tensor on an edge of the stage is sharded over the ranks of the stage."""
    sides = [spec.dst_tiles for edge in pipeline.edges if edge.dst == stage for spec in edge.tensors]
    sides += [spec.src_tiles for edge in pipeline.edges if edge.src == stage for spec in edge.tensors]
    return any(shards.local_shape(rank) != shards.shape for shards in sides for rank in shards.layout.ranks)


def warn_if_replicas_diverge(pipeline: Pipeline, stage: int, module: torch.nn.Module) -> None:
    """Warn if ranks of a stage see different data and nothing sums their gradients: their parameters would diverge."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    plain = [item for item in parameters if not hasattr(item, "to_local")]
    # a tensor-parallel module keeps its plain parameters equal on all ranks
    are_summed = isinstance(module, REPLICATED) or (len(plain) < len(parameters) and not _fsdp_modules(module))
    if plain and not are_summed and is_sharded(pipeline, stage):
        warnings.warn(
            f"ranks of stage {stage} hold shards of the tensors on its edges, but nothing sums the gradients of "
            f"{len(plain)} parameters over them. Wrap the whole module in DistributedDataParallel or fully_shard, or "
            "sum these gradients yourself and filter this warning",
            stacklevel=3,
        )


#: Number of replicas that see different data: an integer for all stages with a loss, or ``{stage: integer}``.
LossShards = int | Mapping[int, int]


def loss_shards_of(stage: int, num_loss_shards: LossShards) -> int:
    """Number of replicas of a stage that the total loss averages over."""
    return num_loss_shards if isinstance(num_loss_shards, int) else num_loss_shards.get(stage, 1)


def check_loss_shards(num_loss_shards: Any, pipeline: Pipeline) -> None:
    """Raise ArgumentError unless ``num_loss_shards`` fits the numbers of ranks of the stages."""
    ranks = {stage: len(item.mesh.ranks) for stage, item in enumerate(pipeline.stages) if item.mesh is not None}
    wanted: list[tuple[str, Any, int]] = [("num_loss_shards is", num_loss_shards, max(ranks.values()))]
    if isinstance(num_loss_shards, Mapping):
        unknown = [stage for stage in num_loss_shards if stage not in ranks]
        if unknown:
            raise ArgumentError(f"num_loss_shards names stage {unknown[0]!r}; there are stages 0 to {max(ranks)}")
        wanted = [
            (f"num_loss_shards of stage {stage} is", number, ranks[stage]) for stage, number in num_loss_shards.items()
        ]
    for what, number, max_number in wanted:
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= max_number:
            raise ArgumentError(
                f"{what} {number!r}; it must be an integer from 1 to {max_number}, the number of ranks of "
                f"{'that' if isinstance(num_loss_shards, Mapping) else 'the largest'} stage"
            )


def check_loss_replicas(stage: int, module: Any, num_loss_shards: LossShards, num_ranks: int) -> None:
    """Raise ArgumentError if ``num_loss_shards`` does not fit the replicas of a stage that returns a loss."""
    number = loss_shards_of(stage, num_loss_shards)
    if number > num_ranks:
        raise ArgumentError(
            f"stage {stage} gives a loss on {num_ranks} rank{'s' * (num_ranks > 1)}, but num_loss_shards is {number}; "
            "if stages with a loss differ, pass num_loss_shards={stage: number, ...}"
        )
    if isinstance(module, REPLICATED):
        wrapper, replicas = "DDP", dist.get_world_size(module.process_group)
    else:
        wrapper, replicas = "FSDP", len(fsdp_ranks(module))
    if replicas not in (0, number):
        raise ArgumentError(
            f"stage {stage} gives a loss on {replicas} replicas under {wrapper}, which see different data, but "
            f"num_loss_shards is {number}; if stages with a loss differ, pass {{stage: number, ...}}; if replicas see "
            f"the same data, do not use {wrapper}"
        )


_NOTHING = contextlib.nullcontext()


def no_grad_sync(module: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which DDP does not communicate."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else _NOTHING


def prepare_backward(module: Any, *, is_last: bool) -> None:
    """Before each backward: make FSDP reduce gradients in the last backward of a step only, as sums."""
    for fsdp_submodule in _fsdp_modules(module):
        fsdp_submodule.set_gradient_divide_factor(1.0)
        fsdp_submodule.set_force_sum_reduction_for_comms(True)  # Gloo supports no other reduction with a factor
        fsdp_submodule.set_is_last_backward(is_last)
        fsdp_submodule.set_requires_gradient_sync(is_last, recurse=False)


def reshard_parameters(module: Any) -> None:
    """After forwards without a backward: free FSDP's gathered parameters, so that the module has its sharded ones."""
    for fsdp_submodule in _fsdp_modules(module):
        fsdp_submodule.reshard()


def align_gradients(module: torch.nn.Module) -> None:
    """After the last backward: give each gradient that is a DTensor the placements of its parameter.

    Tensor parallelism leaves some gradients as partial sums or replicas, for example the gradient of an embedding that
    is sharded by vocabulary.
    """
    for parameter in module.parameters():
        gradient: Any = parameter.grad
        placements = getattr(parameter, "placements", None)
        if placements is not None and gradient is not None and gradient.placements != placements:
            parameter.grad = gradient.redistribute(placements=placements)


def fsdp_ranks(module: Any) -> list[int]:
    """World ranks of FSDP's shards and replicas, of all meshes that the parameters are on; empty without FSDP."""
    return sorted(
        {rank for fsdp_submodule in _fsdp_modules(module) for rank in torch_compat.fsdp_ranks(fsdp_submodule)}
    )


def is_fsdp(module: Any) -> bool:
    """Whether FSDP shards parameters of the module."""
    return bool(_fsdp_modules(module))


def _fsdp_modules(module: Any) -> list[Any]:
    return [submodule for submodule in module.modules() if hasattr(submodule, "set_requires_gradient_sync")]


def check_frozen(digests: Mapping[int, Mapping[str, str]]) -> None:
    """Raise DisagreementError, on all ranks alike, if ranks of a stage froze different parameters of it."""
    first: dict[str, tuple[int, str]] = {}
    for rank, stages in sorted(digests.items()):
        for stage, digest in stages.items():
            other, expected = first.setdefault(stage, (rank, digest))
            if digest != expected:
                raise DisagreementError(
                    f"ranks {other} and {rank} of stage {stage} froze different parameters; set requires_grad alike "
                    "on all ranks of a stage"
                )
