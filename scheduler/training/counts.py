"""Counted communication and computation of a model on stages, found on tensors without data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from reshard.sharding import Mesh

from ..model_stages.partition.batches import outline_batch
from ..model_stages.partition.stage_graph import FakeModel
from ..model_stages.partition.traced_cut import TracedCut
from .models.making import find_cuts, make_model
from .models.model_presets import GPTConfig, Preset


@dataclass(frozen=True)
class EdgeCount:
    """Costs of one sample of a batch on one edge in a forward.

    Attributes:
        src, dst: stages.
        nbytes: sent by the edge.
        flops: floating-point operations of the larger of both stages.
    """

    src: int
    dst: int
    nbytes: int
    flops: int

    @property
    def ratio(self) -> float:
        """Bytes per operation: communication over computation, up to the rates of the links and the devices."""
        return self.nbytes / self.flops


def count_edges(preset: Preset, layers: Sequence[int]) -> list[EdgeCount]:
    """The counts of all edges, with ``layers`` layers on each stage. Nothing is computed."""
    config = preset.config
    if isinstance(config, GPTConfig):
        tokens = torch.zeros(1, config.sequence, dtype=torch.int64)
        batch = {"tokens": tokens, "targets": tokens}
    else:
        batch = {name: torch.zeros(1, 3, config.side, config.side) for name in ("pictures", "clean")}
    model = make_model(config)
    cut = TracedCut(model, find_cuts(config, tuple(layers)), batch)
    autocast = getattr(torch, preset.autocast) if preset.autocast else None
    graph = FakeModel(model, cut, autocast=autocast).find(outline_batch(batch))
    flops, made = [], {name: item.to("meta") for name, item in batch.items()}
    for stage in cut.build(model):
        names = [str(node.target) for node in stage.graph.nodes if node.op == "placeholder"]
        with FlopCounterMode(display=False) as counter:
            output = stage(**{name: made[name] for name in names})
        flops.append(counter.get_total_flops())
        if isinstance(output, dict):
            made |= output
    meshes = [Mesh([stage], {"dp": 1, "tp": 1}) for stage in range(len(flops))]
    return [
        EdgeCount(
            edge.src,
            edge.dst,
            sum(math.prod(spec.shape) * spec.itemsize for spec in edge.tensors),
            max(flops[edge.src], flops[edge.dst]),
        )
        for edge in graph.edges(1, meshes)
    ]
