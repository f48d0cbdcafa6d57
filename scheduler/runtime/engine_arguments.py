"""Checks of the arguments of an engine, and their description for the comparison between ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import ArgumentError
from reshard.formatting import format_ranks
from reshard.topology import Topology, topology_to_json

from ..graph import Pipeline
from ..ir.schedule import Schedule
from ..ir.text import format_schedule
from .data_parallel import LossShards
from .tied_params import TiedParameter


def check_types(schedule: Any, pipeline: Any, last_pipeline: Any, ties: Any) -> None:
    """Raise ArgumentError unless the arguments have the right types."""
    wanted = [("schedule", schedule, Schedule), ("pipeline", pipeline, Pipeline)]
    if last_pipeline is not None:
        wanted.append(("last_pipeline", last_pipeline, Pipeline))
    if not isinstance(ties, Sequence):
        raise ArgumentError(f"ties must be a list of TiedParameter, not {type(ties).__name__}")
    for what, value, kind in [*wanted, *(("a tie", tie, TiedParameter) for tie in ties)]:
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


def format_loss_shards(given: LossShards) -> str:
    """``num_loss_shards`` as text that does not depend on the order of a dict."""
    return str(dict(sorted(given.items())) if isinstance(given, Mapping) else given)


def describe_arguments(
    schedule: Schedule, pipeline: Pipeline, last: Pipeline | None, strategy: Any, topology: Topology | None
) -> list[tuple[str, str]]:
    """Arguments that must be equal on all ranks, as (name, text)."""
    text = format_schedule(schedule)
    described = [
        ("the schedule", schedule.name),
        ("the number of microbatches", str(schedule.num_microbatches)),
        ("the schedule's actions", hashlib.sha256(text.encode()).hexdigest()[:16]),
    ]
    for name, one in (("pipeline", pipeline), ("last_pipeline", last)):
        for edge in one.edges if one is not None else ():
            tensors = "; ".join(map(str, edge.tensors))
            names = f"{sorted(edge.without_gradient)} {sorted(edge.passed_on)}"
            described.append((f"edge {edge.src} -> {edge.dst} of {name}", f"{tensors} {names}"))
    described.append(("strategy", getattr(strategy, "__name__", str(strategy))))
    described.append(("topology", "by host names" if topology is None else str(topology_to_json(topology))))
    return described
