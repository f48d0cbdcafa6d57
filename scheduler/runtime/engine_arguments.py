"""Checks of the arguments of an engine, and their description for the comparison between ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.compression import Policy
from reshard.errors import ArgumentError
from reshard.formatting import format_ranks
from reshard.planner import Strategy
from reshard.topology import Topology, topology_to_json

from ..graph import Pipeline
from ..ir.schedule import Schedule
from ..ir.text import format_schedule
from .data_parallel import LossShards
from .tied_params import TiedParameter


@dataclass(frozen=True)
class EngineOptions:
    """The optional arguments of an engine; its docstring explains them."""

    topology: Topology | None
    strategy: str | Strategy | None
    last_pipeline: Pipeline | None
    ties: Sequence[TiedParameter]
    num_loss_shards: LossShards
    autocast: torch.dtype | None
    compression: Policy | None
    signal_only: bool
    timeout_seconds: float

    @property
    def policy(self) -> Policy:
        """The codecs of each parallel dimension, or none."""
        return self.compression or Policy()

    @property
    def tied_stages(self) -> set[int]:
        """Stages that share a parameter with another."""
        return {stage for tie in self.ties for stage in tie.names}

    def check_pipelines(self, schedule: Any, pipeline: Any) -> None:
        """Raise ArgumentError unless these arguments, which say what all ranks do, have the right types."""
        wanted: list[tuple[str, Any, type]] = [("schedule", schedule, Schedule), ("pipeline", pipeline, Pipeline)]
        if self.last_pipeline is not None:
            wanted.append(("last_pipeline", self.last_pipeline, Pipeline))
        if not isinstance(self.ties, Sequence):
            raise ArgumentError(f"ties must be a list of TiedParameter, not {type(self.ties).__name__}")
        _check_types([*wanted, *(("a tie", tie, TiedParameter) for tie in self.ties)])

    def check_types(self) -> None:
        """Raise ArgumentError unless the other arguments have the right types."""
        given = [("topology", self.topology, Topology), ("compression", self.compression, Policy)]
        _check_types([each for each in given if each[1] is not None])

    def describe(self, schedule: Schedule, pipeline: Pipeline) -> list[tuple[str, str]]:
        """Arguments that must be equal on all ranks, as (name, text)."""
        topology, shards = self.topology, self.num_loss_shards
        described = [
            ("the schedule", schedule.name),
            ("the number of microbatches", str(schedule.num_microbatches)),
            ("the schedule's actions", hashlib.sha256(format_schedule(schedule).encode()).hexdigest()[:16]),
        ]
        for name, one in (("pipeline", pipeline), ("last_pipeline", self.last_pipeline)):
            for edge in one.edges if one is not None else ():
                tensors = "; ".join(map(str, edge.tensors))
                names = f"{sorted(edge.without_gradient)} {sorted(edge.passed_on)}"
                described.append((f"edge {edge.src} -> {edge.dst} of {name}", f"{tensors} {names}"))
        return [
            *described,
            ("strategy", getattr(self.strategy, "__name__", str(self.strategy))),
            ("topology", "by host names" if topology is None else str(topology_to_json(topology))),
            ("the number of ties", str(len(self.ties))),
            *((f"tie {i}", str(tie)) for i, tie in enumerate(self.ties)),
            ("num_loss_shards", str(dict(sorted(shards.items())) if isinstance(shards, Mapping) else shards)),
            ("signal_only", str(self.signal_only)),
            ("autocast", str(self.autocast)),
            ("compression", str(self.compression)),
        ]


def _check_types(values: Sequence[tuple[str, Any, type]]) -> None:
    for what, value, kind in values:
        if not isinstance(value, kind):
            raise ArgumentError(f"{what} must be a {kind.__name__}, not {type(value).__name__}")


def weigh_last(pipeline: Pipeline, last: Pipeline | None) -> float:
    """Size of the last microbatch relative to the others: the ratio that all its smaller tensors have in common."""
    if last is None:
        return 1.0
    both = [
        (math.prod(b.shape), math.prod(a.shape))
        for edge, last_edge in zip(pipeline.edges, last.edges, strict=True)
        for a, b in zip(edge.tensors, last_edge.tensors, strict=True)
        if a.shape != b.shape
    ]
    ratios = {small / whole for small, whole in both if whole}
    if len(ratios) > 1:
        raise ArgumentError(
            f"tensors of last_pipeline have {', '.join(f'{ratio:.3g}' for ratio in sorted(ratios))} times the size of "
            "those of pipeline, so the weight of the last loss is ambiguous; change only the rows per microbatch"
        )
    if 0 in ratios:
        raise ArgumentError("tensors of last_pipeline are empty; omit the last microbatch")
    return ratios.pop() if ratios else 1.0


def find_ranks(pipeline: Pipeline) -> tuple[int, ...]:
    """All ranks of the pipeline, ascending."""
    ranks: set[int] = set()
    for stage, each in enumerate(pipeline.stages):
        if each.mesh is None:
            raise ArgumentError(f"stage {stage} has no mesh; an Engine needs one for every stage")
        ranks.update(each.mesh.ranks)
    return tuple(sorted(ranks))


def find_rows(schedule: Schedule, pipeline: Pipeline) -> list[tuple[int, ...]]:
    """The ranks of each row, ascending."""
    rows: list[tuple[int, ...] | None] = [None] * len(schedule.rows)
    for stage, row in enumerate(schedule.row_of_stage):
        mesh = pipeline.stages[stage].mesh
        assert mesh is not None
        ranks = tuple(sorted(mesh.ranks))
        if rows[row] is None:
            rows[row] = ranks
        elif rows[row] != ranks:
            raise ArgumentError(
                f"row {row} has stages on ranks {format_ranks(rows[row] or ())} and on ranks {format_ranks(ranks)}; "
                "all stages of a row must be on the same ranks"
            )
    found = [row for row in rows if row is not None]
    if len(found) < len(rows):
        raise ArgumentError(f"row {rows.index(None)} has no stage")
    owner: dict[int, int] = {}
    for row, ranks in enumerate(found):
        for rank in ranks:
            if owner.setdefault(rank, row) != row:
                raise ArgumentError(f"rank {rank} is on rows {owner[rank]} and {row}; it must be on one row")
    for edge in pipeline.edges:
        if not edge.tensors:
            raise ArgumentError(f"edge {edge.src} -> {edge.dst} has no tensors; an Engine needs them")
    return found


def check_last(pipeline: Pipeline, last: Pipeline | None) -> None:
    """Raise ArgumentError unless the last microbatch may use this pipeline."""
    if last is None:
        return

    def outline(one: Pipeline) -> list[Any]:
        return [
            (
                edge.src,
                edge.dst,
                edge.without_gradient,
                edge.passed_on,
                [(t.name, t.dtype, t.src.ranks, t.dst.ranks) for t in edge.tensors],
            )
            for edge in one.edges
        ]

    if outline(pipeline) != outline(last) or len(pipeline.stages) != len(last.stages):
        raise ArgumentError(
            "last_pipeline must have the stages and edges of the pipeline, with the same tensors except for shapes"
        )


def check_feed(feed: Any, num_microbatches: int, num_stages: int) -> None:
    """Raise ArgumentError unless ``feed`` is ``{stage: [{name: tensor} of each microbatch]}``."""
    if not isinstance(feed, Mapping):
        raise ArgumentError(f"feed must be {{stage: [{{name: tensor}}, ...]}}, not {type(feed).__name__}")
    for stage, rows in feed.items():
        if not isinstance(rows, Sequence):
            raise ArgumentError(
                f"stage {stage} is fed {type(rows).__name__}; it needs a list with one entry per microbatch"
            )
        if stage not in range(num_stages):
            raise ArgumentError(f"feed names stage {stage!r}; there are stages 0 to {num_stages - 1}")
        if len(rows) != num_microbatches or not all(isinstance(row, Mapping) for row in rows):
            raise ArgumentError(
                f"stage {stage} is fed {len(rows)} microbatches; it needs {num_microbatches}, each {{name: tensor}}"
            )


def read_loss_weights(given: Sequence[float] | None, num_microbatches: int, last: float) -> list[float]:
    """The weight of each microbatch's loss. Default: equal weights that sum to 1, the last one times ``last``."""
    if given is None:
        parts = [1.0] * (num_microbatches - 1) + [last]
        return [part / sum(parts) for part in parts]
    try:
        if isinstance(given, str):
            raise TypeError
        weights = [float(weight) for weight in given]
    except (TypeError, ValueError):
        raise ArgumentError(f"loss_weights must be {num_microbatches} numbers, not {given!r}") from None
    if len(weights) != num_microbatches or not all(map(math.isfinite, weights)):
        raise ArgumentError(f"loss_weights must be {num_microbatches} finite numbers, not {given!r}")
    return weights
