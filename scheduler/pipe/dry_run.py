"""Run stages without data before a step in which some replicas have no rows."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Mapping

import torch

from reshard.errors import ArgumentError
from reshard.formatting import count_of

from ..runtime.engine import Engine
from .partition.batches import BatchOutline, Entry
from .partition.stage_mesh import is_grid, num_row_shards
from .planner import MOST_GRAPHS, Planner

#: Shards the module of a stage in place, as on this rank, without moving data.
Shard = Callable[[torch.nn.Module], None]


class DryRun:
    """Finds the stages that do not run on replicas without rows.

    Replicas under FSDP run even without rows, because its collectives need them all: on one row that does not count,
    or, on a grid, on 0 rows. But some modules fail on so few rows, and others do so only if they are sharded. A failure
    inside a step would leave other ranks in their collectives.

    Args:
        engine: lets ranks exchange what they find.
        planner: plans the stages.
        fsdp_stages: stages under FSDP, the same on all ranks.
        shards: for each stage of this rank, how it is sharded; None: it is not.
    """

    def __init__(
        self, engine: Engine, planner: Planner, fsdp_stages: Collection[int], shards: Mapping[int, Shard | None]
    ) -> None:
        self._engine, self._planner = engine, planner
        self._fsdp_stages, self._shards = sorted(fsdp_stages), shards
        # for each outline without its number of rows, the errors of stages as text; the same on all ranks
        self._failures: collections.OrderedDict[tuple[Entry, ...], dict[int, str]] = collections.OrderedDict()

    def rows_without(self, stage: int) -> int | None:
        """The number of rows that a replica without rows runs on; None if it does not run."""
        if stage not in self._fsdp_stages:
            return None
        return 0 if is_grid(self._planner.meshes[stage]) else 1

    def check(self, outline: BatchOutline, fewest: int) -> None:
        """Raise ArgumentError, on all ranks alike, if a replica would get none of ``fewest`` rows and cannot run so."""
        short = [stage for stage in self._fsdp_stages if fewest < num_row_shards(self._planner.meshes[stage])]
        failures = self._find_failures(outline) if short else {}
        for stage in short:
            if stage in failures:
                replicas = num_row_shards(self._planner.meshes[stage])
                rows = count_of(self.rows_without(stage) or 0, "row")
                raise ArgumentError(
                    f"stage {stage} has {replicas} replicas under FSDP, which must all run, but a microbatch has "
                    f"{count_of(fewest, 'row')}, and the stage does not run on {rows} ({failures[stage]}); pass more "
                    "rows"
                )

    def _find_failures(self, outline: BatchOutline) -> dict[int, str]:
        """``{stage: error}`` of stages under FSDP. All ranks must call this."""
        key = outline.entries
        if key not in self._failures:
            own = []
            for stage in self._fsdp_stages:
                if stage in self._shards:
                    rows = self.rows_without(stage) or 0
                    own.append([stage, self._planner.find_failure(outline, rows, stage, self._shards[stage])])
            found = [each for values in self._engine.exchange(own).values() for each in values]
            self._failures[key] = {stage: failure for stage, failure in reversed(found) if failure is not None}
            if len(self._failures) > MOST_GRAPHS:
                self._failures.popitem(last=False)
        return self._failures[key]
