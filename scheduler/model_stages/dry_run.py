"""Run the modules of stages without data, to check before a step that they accept the sizes of its batch."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Mapping

import torch

from reshard.errors import ArgumentError
from reshard.formatting import count_of

from ..runtime.schedule_engine import ScheduleEngine
from .partition.batches import BatchEntry, BatchOutline
from .partition.stage_mesh import is_grid, num_sample_shards
from .stage_planner import MAX_GRAPHS, StagePlanner

#: Stage, number of samples, and entries of a batch.
Key = tuple[int, int, tuple[BatchEntry, ...]]
#: ``shard(module)`` shards a copy of a stage's module in place, as this rank shards the stage, without moving data.
ShardModule = Callable[[torch.nn.Module], None]


class DryRun:
    """Finds the stages that do not run on a batch because of its sizes.

    Such a stage must be found before the step. If it failed inside the step, other ranks would wait in their
    collectives. Two kinds of stages can fail:

    - A stage under FSDP with more replicas than a microbatch has samples. The collectives of FSDP need all replicas, so
      a replica without samples runs too: on one sample that does not count, or on 0 samples if the stage is a grid.
      Some modules fail on so few samples, and some only when they are sharded.
    - A stage whose tensor-parallel plan divides the sequence over ``tp`` ranks. It may need a sequence length that
      ``tp`` divides.

    Args:
        engine: lets ranks exchange what they find.
        planner: plans the stages.
        fsdp_stages: stages under FSDP, the same on all ranks.
        shards: for each stage of this rank, the function that shards a copy of it; None: the stage is not sharded.
        sequence_parts: ``{stage: tp}`` of stages whose plan divides the sequence, the same on all ranks.
    """

    def __init__(
        self,
        engine: ScheduleEngine,
        planner: StagePlanner,
        fsdp_stages: Collection[int],
        shards: Mapping[int, ShardModule | None],
        sequence_parts: Mapping[int, int],
    ) -> None:
        self._engine, self._planner = engine, planner
        self._fsdp_stages, self._shards, self._sequence_parts = sorted(fsdp_stages), shards, sequence_parts
        # Text of the error of each run, or None if the stage ran; the same on all ranks.
        self._failures: collections.OrderedDict[Key, str | None] = collections.OrderedDict()

    def num_filler_samples(self, stage: int) -> int | None:
        """The number of filler samples of a replica of the stage that has no samples; None: it does not run."""
        if stage not in self._fsdp_stages:
            return None
        return 0 if is_grid(self._planner.meshes[stage]) else 1

    def check(self, outline: BatchOutline, fewest: int) -> None:
        """Raise ArgumentError, on all ranks alike, if a stage does not run on microbatches of ``fewest`` samples."""
        for stage, parts in self._sequence_parts.items():
            if any(size % parts for entry in outline.entries if entry.is_divided for size in entry.shape[:1]):
                failure = self._find_failure(stage, 1, outline)
                if failure is not None:
                    raise ArgumentError(
                        f"stage {stage} divides the sequence over tp={parts} ranks, and does not run on a batch of "
                        f"{outline} ({failure}); pad the sequence to a multiple of {parts}"
                    )
        for stage in self._fsdp_stages:
            replicas = num_sample_shards(self._planner.meshes[stage])
            if fewest < replicas:
                num_samples = self.num_filler_samples(stage) or 0
                failure = self._find_failure(stage, num_samples, outline)
                if failure is not None:
                    raise ArgumentError(
                        f"stage {stage} has {replicas} replicas under FSDP, which must all run, but a microbatch has "
                        f"{count_of(fewest, 'sample')}, and the stage does not run on "
                        f"{count_of(num_samples, 'sample')} ({failure}); pass more samples"
                    )

    def _find_failure(self, stage: int, num_samples: int, outline: BatchOutline) -> str | None:
        """Run a stage on ``num_samples`` samples. All ranks must call this.

        Returns:
            The error of the first rank of the stage that fails; None if no rank fails.
        """
        key = stage, num_samples, outline.entries
        if key not in self._failures:
            own = None
            if stage in self._shards:
                own = self._planner.find_failure(outline, num_samples, stage, self._shards[stage])
            failures = sorted(self._engine.exchange(own).items())
            self._failures[key] = next((failure for _, failure in failures if failure is not None), None)
            if len(self._failures) > MAX_GRAPHS:
                self._failures.popitem(last=False)
        return self._failures[key]
