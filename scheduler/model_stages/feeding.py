"""Agree on the batch of a step, and divide it into microbatches and samples of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import ArgumentError
from reshard.formatting import brief, count_of
from reshard.sharding import check_integer

from ..gradients.data_parallel import check_frozen
from ..gradients.tied_params import check_training
from ..runtime.schedule_engine import ScheduleEngine
from .dry_run import DryRun
from .partition.batches import (
    Batch,
    BatchOutline,
    check_dtypes,
    check_same_values,
    common_outline,
    digest_batch,
    has_no_sample,
    name_batch,
    outline_batch,
    replica_samples,
    split_microbatches,
    split_samples,
)
from .partition.stage_mesh import num_samples_of_loss
from .stage_planner import StagePlanner

#: Limit on the samples of a batch.
MAX_SAMPLES = 2**26


class Feeder:
    """Checks and divides the batches of one engine.

    Args:
        engine: exchanges outlines and digests of batches between ranks.
        planner: knows the inputs that each stage reads.
        input_names: names of the values of a batch that is a tuple.
        num_microbatches: number of microbatches of a part; fewer if it has fewer samples.
        dry_run: checks that stages accept the numbers of samples that they get.
        example: outline of the batch that the engine was compiled with; see :func:`check_dtypes`.
    """

    def __init__(
        self,
        engine: ScheduleEngine,
        planner: StagePlanner,
        input_names: Sequence[str],
        num_microbatches: int,
        dry_run: DryRun,
        example: BatchOutline,
    ) -> None:
        self._engine, self._planner = engine, planner
        self._input_names, self._num_microbatches = input_names, num_microbatches
        self._dry_run, self._example = dry_run, example

    def agree(
        self, batch: Any, accumulate: int, is_local: bool, *, is_measured: bool = False
    ) -> tuple[Batch, BatchOutline]:
        """Check the batch with all ranks. Returns the batch by name, and the outline of the whole batch.

        Stages that share a parameter must agree on whether it is trained.
        """
        named: Batch = {}
        own: BatchOutline | None = None
        failure: Exception | None = None
        digests: dict[str, int] = {}
        try:
            accumulate = check_integer(accumulate, "accumulate", 1, MAX_SAMPLES)
            for name, flag in (("local_batch", is_local), ("timeline", is_measured)):
                if not isinstance(flag, bool):
                    raise ArgumentError(f"{name} is {brief(flag)}; it must be True or False")
            if batch is not None:
                named = name_batch(batch, self._input_names)
                if is_local and has_no_sample(named):
                    named = {}
                else:
                    own = outline_batch(named)
                digests = {} if is_local else digest_batch(named)
        except Exception as error:  # any error of this rank must reach the other ranks
            failure = error
        passed: list[Any] = [own.to_json() if own else None, accumulate, is_local, digests]
        passed += [self._engine.tied_training(), self._engine.frozen_digests()]
        gathered = self._engine.exchange(None if failure else passed, failure)
        check_frozen({rank: value[5] for rank, value in gathered.items()})
        check_training(training for _, value in sorted(gathered.items()) for training in value[4])
        outlines = {rank: BatchOutline.from_json(value[0]) for rank, value in gathered.items() if value[0] is not None}
        outline = common_outline(outlines, {rank: value[1:3] for rank, value in gathered.items()}, self._planner.meshes)
        if not is_local:
            check_same_values({rank: gathered[rank][3] for rank in outlines})
        if outline.num_samples < accumulate:
            raise ArgumentError(
                f"accumulate is {accumulate}, but the batch has only {count_of(outline.num_samples, 'sample')}"
            )
        self._check_given(outline, outlines, is_local, accumulate)
        return named or outline.empty(0), outline

    def _check_given(
        self, outline: BatchOutline, outlines: Mapping[int, BatchOutline], is_local: bool, accumulate: int
    ) -> None:
        """Raise ArgumentError, on all ranks alike, unless each rank passes what its stages read."""
        graph = self._planner.graph(outline)
        check_dtypes(outline, self._example)
        parts = self.divide(outline.num_samples, accumulate)
        for stage, mesh in enumerate(self._planner.meshes):
            for rank in mesh.ranks:
                wanted = sum(len(self.own_samples(samples, rank)) for part in parts for samples in part)
                given = outlines[rank].num_samples if rank in outlines else 0
                if graph.inputs[stage] and rank not in outlines and not (is_local and wanted == 0):
                    raise ArgumentError(
                        f"rank {rank} passes no batch, but stage {stage} reads {', '.join(graph.inputs[stage])}"
                    )
                if is_local and rank in outlines and given != wanted:
                    raise ArgumentError(
                        f"rank {rank} passes {given} samples; of a batch of {outline.num_samples} samples, it computes "
                        f"{wanted} (see local_samples)"
                    )
        self._dry_run.check(outline, min(len(samples) for part in parts for samples in part))

    def divide(self, num_samples: int, accumulate: int) -> list[list[range]]:
        """The samples of each microbatch of each part."""
        parts, first = [], 0
        for size in split_samples(num_samples, accumulate):
            part = []
            for split_microbatch in split_microbatches(size, self._num_microbatches, self._planner.meshes):
                part.append(range(first, first + split_microbatch))
                first += split_microbatch
            parts.append(part)
        return parts

    def own_samples(self, samples: range, rank: int | None = None) -> range:
        """The samples of a microbatch that a rank computes; default: this rank."""
        rank = self._engine.rank if rank is None else rank
        own = replica_samples(len(samples), self._planner.mesh_of(rank), rank)
        return range(samples.start + own.start, samples.start + own.stop)

    def num_samples_of_loss(self, samples: range) -> int:
        """Number of samples of a microbatch over which the loss on this rank is a mean."""
        return num_samples_of_loss(
            self._planner.mesh_of(self._engine.rank), len(samples), len(self.own_samples(samples))
        )
