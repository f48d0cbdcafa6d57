"""Placements that run the stages of a training plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from reshard.errors import ArgumentError

from ...model_stages.placement import Placement, ddp
from ..inputs.stages import StagePlan


def make_placements(stages: Sequence[StagePlan], layer_names: Sequence[Sequence[str]]) -> list[Placement]:
    """A placement for each stage of a training plan.

    Args:
        stages: the stages.
        layer_names: for each stage, the module paths of its layers.

    Raises:
        ArgumentError: a stage mixes tp degrees or ZeRO stages, or uses something that ``Pipe`` does not run.
    """
    is_one_layer = [len(names) for names in layer_names] == [1]
    return [
        _make_placement(number, stage, () if is_one_layer else names)
        for number, (stage, names) in enumerate(zip(stages, layer_names, strict=True))
    ]


def _make_placement(number: int, stage: StagePlan, names: Sequence[str]) -> Placement:
    """The placement of a stage; ``names`` are empty if it is the whole model as one layer."""
    ways = {choice.stage_key for choice in stage.choices}
    if len(ways) > 1:
        raise ArgumentError(
            f"stage {number} mixes {len(ways)} kinds of parallelism ({stage}); Pipe needs one tp degree and one ZeRO "
            "stage for all of its layers: search with ChoiceRules(executable=True)"
        )
    tp, zero, grid = next(iter(ways))
    recomputed = [name for name, choice in zip(names, stage.choices, strict=False) if choice.recompute]
    prepare: Callable[[Any], Any] | None = None
    if recomputed:
        prepare = functools.partial(_recompute, names=tuple(recomputed))
    elif not names and stage.choices[0].recompute:
        prepare = _recompute_whole
    ranks = tuple(range(stage.first_rank, stage.end_rank))
    if grid:
        if zero in (1, 2):
            raise ArgumentError(
                f"stage {number} has {stage.choices[0]}, which Pipe does not run; on a grid it runs ZeRO 0 and 3: "
                "search with ChoiceRules(executable=True)"
            )
        wrap = functools.partial(_shard, names=tuple(names)) if zero else None
        return Placement(grid=grid, ranks=ranks, wrap=wrap, prepare=prepare)  # type: ignore[arg-type]
    replicas = stage.num_ranks // tp
    if zero in (1, 2) or (zero == 0 and tp > 1 and replicas > 1):
        raise ArgumentError(
            f"stage {number} has dp={replicas} {stage.choices[0]}, which Pipe does not run; it runs ZeRO 3, and "
            "ZeRO 0 with either replicas or tensor parallelism: search with ChoiceRules(executable=True)"
        )
    return Placement(
        dp=replicas,
        tp=tp,
        ranks=ranks,
        wrap=functools.partial(_shard, names=tuple(names)) if zero == 3 else ddp,
        prepare=prepare,
    )


def _shard(module: Any, device_mesh: Any, *, names: Sequence[str]) -> Any:
    """ZeRO 3: gather the parameters of each layer before its forward, and again before its backward."""
    from torch.distributed.fsdp import fully_shard

    for layer in _find_layers(module, names):
        fully_shard(layer, mesh=device_mesh, reshard_after_forward=True)
    return fully_shard(module, mesh=device_mesh, reshard_after_forward=True)


#: As with ``fsdp``, each parameter of the wrapped module is a shard.
_shard.shards_parameters = True  # type: ignore[attr-defined]


def _recompute(module: Any, *, names: Sequence[str]) -> Any:
    """Recompute the forward of layers in the backward. Their parameters keep their names."""
    for layer in _find_layers(module, names):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return module


def _recompute_whole(module: Any) -> Any:
    """Recompute the forward of a model that is one layer."""
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    return module


def _find_layers(module: Any, names: Sequence[str]) -> list[torch.nn.Module]:
    """The modules of these names that have parameters.

    The first layer of a model may have any name, and a block of a chain may have no module.
    """
    known = dict(module.named_modules())
    return [known[name] for name in names if name in known and any(True for _ in known[name].parameters())]
