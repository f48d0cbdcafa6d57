"""The workload of the benchmarks of pipeline training: a model on stages, in float32, and its batches."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from reshard import Mesh
from reshard.scheduler import Edge, Pipe
from reshard.scheduler.model_stages.partition.batches import BatchOutline, outline_batch, split_samples, take_samples
from reshard.scheduler.model_stages.partition.stage_graph import FakeModel, StageGraph
from reshard.scheduler.training.data import BatchLoader, PictureLoader, TokenLoader, read_tokens
from reshard.scheduler.training.models.making import find_cuts, make_model
from reshard.scheduler.training.models.model_presets import GPTConfig, UTransformerConfig


@dataclass(frozen=True)
class TrainingWorkload:
    """A model, its division into stages, and the size of its batches.

    Attributes:
        config: sizes of the model.
        batch: number of samples of a batch.
        num_microbatches: must divide ``batch``.
        stages: dp x tp of each stage, as text.
        layers: number of layers of each stage.
    """

    config: GPTConfig | UTransformerConfig
    batch: int
    num_microbatches: int
    stages: str
    layers: tuple[int, ...]

    @property
    def pp(self) -> int:
        """Number of stages."""
        return len(self.layers)

    def meshes(self) -> list[Mesh]:
        """The mesh of each stage."""
        return list(self._pipe().meshes)

    def edges(self) -> list[Edge]:
        """The edges between the stages for one microbatch, without costs."""
        num_samples = split_samples(self.batch, self.num_microbatches)[0]
        return list(_find_graph(self)[0].edges(num_samples, self.meshes()))

    def make_model(self) -> Any:
        """The whole model, with the same values in every process."""
        torch.manual_seed(0)
        return make_model(self.config, "cpu")

    def make_stages(self) -> list[torch.nn.Module]:
        """The modules of all stages."""
        model = self.make_model()
        return list(self._pipe().cut(_find_graph(self)[1].names).build(model))

    def microbatches(self, step: int) -> list[dict[str, torch.Tensor]]:
        """The microbatches of a step: ``{name: tensor}`` of each."""
        batch = self._loader().batch(step)
        parts = [value.split(self.batch // self.num_microbatches) for value in batch.values()]
        return [dict(zip(batch, values, strict=True)) for values in zip(*parts, strict=True)]

    def feed(self, step: int) -> dict[int, list[dict[str, torch.Tensor]]]:
        """The inputs of a step: ``{stage: [{name: tensor} of each microbatch]}``, for stages that read the batch."""
        graph, outline = _find_graph(self)
        fed: dict[int, list[dict[str, torch.Tensor]]] = {}
        for stage, names in enumerate(graph.inputs):
            if names:
                every_sample = range(self.batch // self.num_microbatches)
                fed[stage] = [
                    take_samples(microbatch, outline, names, every_sample) for microbatch in self.microbatches(step)
                ]
        return fed

    def _loader(self) -> BatchLoader:
        if isinstance(self.config, GPTConfig):
            return TokenLoader(read_tokens(None), self.batch, self.config.sequence, self.config.vocabulary)
        return PictureLoader(self.batch, self.config.side)

    def _pipe(self) -> Pipe:
        return Pipe(make_model(self.config), find_cuts(self.config, self.layers), stages=self.stages)


@functools.cache
def _find_graph(workload: TrainingWorkload) -> tuple[StageGraph, BatchOutline]:
    """The tensors that stages exchange, and the names and shapes of the tensors of a batch."""
    pipe = workload._pipe()
    outline = outline_batch(workload._loader().batch(0))
    return FakeModel(pipe.model, pipe.cut(outline.names)).find(outline), outline
