"""Checks of the arguments of an engine, on this rank and between ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.compression import Policy
from reshard.coordination import CallGroup, Group, RoundRequest, describe_error, resolve
from reshard.errors import ArgumentError
from reshard.formatting import brief, describe_ranks, format_ranks
from reshard.planner import Strategy
from reshard.runtime.cuda.stream import STREAMS
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout
from reshard.topology import Topology, topology_to_json

from ..gradients.data_parallel import LossShards, check_loss_shards, check_split
from ..gradients.replica_sync import find_replicas
from ..gradients.tied_params import TiedParameter, check_ties
from ..ir.actions import Kind
from ..ir.schedule import Schedule
from ..ir.text import format_schedule
from ..pipeline import Pipeline
from ..simulation.validate import check_one_order, check_schedule
from .p2p import find_device_type
from .ready_order import ORDERS, OrderMode
from .stage import StageRun


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
    order: OrderMode

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
        _check_types([item for item in given if item[1] is not None])

    def describe(self, schedule: Schedule, pipeline: Pipeline) -> list[tuple[str, str]]:
        """Arguments that must be equal on all ranks, as (name, text)."""
        topology, shards = self.topology, self.num_loss_shards
        described = [
            ("the schedule", schedule.name),
            ("the number of microbatches", str(schedule.num_microbatches)),
            ("the schedule's actions", hashlib.sha256(format_schedule(schedule).encode()).hexdigest()[:16]),
        ]
        for name, item in (("pipeline", pipeline), ("last_pipeline", self.last_pipeline)):
            for edge in item.edges if item is not None else ():
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
            ("order", str(self.order)),
        ]


@dataclass(frozen=True)
class LocalPart:
    """The part of this rank in the checked arguments of an engine.

    Attributes:
        pp_rank: pp rank of this rank in the schedule.
        stages: the stages of this rank.
        last_weight: weight of the last microbatch relative to the others.
        device: type of the device of the modules.
        timeout_seconds: of the engine.
    """

    pp_rank: int
    stages: dict[int, StageRun]
    last_weight: float
    device: str
    timeout_seconds: float


def agree_on_arguments(
    options: EngineOptions, schedule: Schedule, pipeline: Pipeline, modules: Any, group: Group, call_group: CallGroup
) -> tuple[LocalPart, Mapping[int, str]]:
    """Check the arguments and compare them with those of all ranks. Returns this rank's part, and ``{rank: host}``.

    Raises:
        ReshardError: the arguments of a rank are wrong, or those of two ranks differ; on all ranks alike.
    """
    part: LocalPart | None = None
    arguments: list[tuple[str, str]] = []
    failure, seconds = None, DEFAULT_TIMEOUT_SECONDS
    try:
        seconds = check_timeout(options.timeout_seconds)
        part = _find_part(options, schedule, pipeline, modules, group)
        arguments = [*options.describe(schedule, pipeline), ("the type of device", part.device)]
    except Exception as error:  # any error of this rank must reach the other ranks
        failure = describe_error(error)
    request = RoundRequest(group.rank, arguments, hostname=group.hostname, error=failure)
    _, decision = call_group.agree(request, lambda requests: resolve(requests, {}), seconds)
    assert part is not None
    return part, decision.hostnames


def _find_part(options: EngineOptions, schedule: Schedule, pipeline: Pipeline, modules: Any, group: Group) -> LocalPart:
    """Check all arguments on this rank."""
    options.check_types()
    check_schedule(schedule, pipeline)
    ranks_of_pp_rank = find_ranks_of_pp_ranks(schedule, pipeline)
    pp_rank = next(pp_rank for pp_rank, ranks in enumerate(ranks_of_pp_rank) if group.rank in ranks)
    check_last(pipeline, options.last_pipeline)
    last_weight = weigh_last(pipeline, options.last_pipeline)
    check_loss_shards(options.num_loss_shards, pipeline)
    stages = _make_stages(schedule, pp_rank, pipeline, modules, group.rank, options.autocast)
    if group.process_group is not None:
        find_replica_ranks(group, pipeline, stages)  # raises if a wrapper uses ranks of other stages
    check_ties(options.ties, pipeline, modules, group.rank)
    device = find_device_type(modules)
    check_order(options.order, pipeline, device)
    return LocalPart(pp_rank, stages, last_weight, device, float(options.timeout_seconds))


def _make_stages(
    schedule: Schedule, pp_rank: int, pipeline: Pipeline, modules: Any, rank: int, autocast_dtype: torch.dtype | None
) -> dict[int, StageRun]:
    ours = [stage for stage, stage_pp_rank in enumerate(schedule.pp_rank_of_stage) if stage_pp_rank == pp_rank]
    if not isinstance(modules, Mapping):
        raise ArgumentError(f"modules must be {{stage: module}}, not {type(modules).__name__}")
    if set(modules) != set(ours):
        raise ArgumentError(f"rank {rank} computes stages {ours}, but has modules for {[*modules]}")
    autocast = None if autocast_dtype is None else (find_device_type(modules), autocast_dtype)
    stages = {stage: StageRun(stage, modules[stage], pipeline, rank, autocast) for stage in ours}
    check_splits(schedule, pp_rank, stages)
    return stages


def check_splits(schedule: Schedule, pp_rank: int, stages: Mapping[int, StageRun]) -> None:
    """Raise ArgumentError if the schedule splits the backward of a stage of ``pp_rank`` that cannot be split."""
    for stage in {action.stage for action in schedule.rank_actions[pp_rank] if action.kind is Kind.W}:
        check_split(stage, stages[stage].module)


def check_runnable(schedule: Schedule, pp_rank: int, stages: Mapping[int, StageRun], device: str) -> None:
    """Raise an error unless the stages of a pp rank can run a valid schedule on this type of device.

    Raises:
        ArgumentError: the schedule splits the backward of a stage that cannot be split.
        ScheduleError: pp ranks could wait for each other on a GPU.
    """
    check_splits(schedule, pp_rank, stages)
    if device in STREAMS:
        check_one_order(schedule)


def check_order(order: Any, pipeline: Pipeline, device: str) -> None:
    """Raise ArgumentError unless ranks can compute the stages of a pipeline in this order."""
    if not isinstance(order, str) or order not in ORDERS:
        raise ArgumentError(f"order is {brief(order)}; it must be {' or '.join(map(repr, ORDERS))}")
    if order == "planned":
        return
    if device in STREAMS:
        raise ArgumentError(
            f'order="ready" needs stages on CPUs, not on {device}: there, all pp ranks must post their transfers in '
            'one order, or they could wait for each other; use order="planned"'
        )
    for stage, item in enumerate(pipeline.stages):
        if item.mesh is not None and item.mesh.size > 1:
            raise ArgumentError(
                f'order="ready" needs each stage on one rank, but stage {stage} is on '
                f"{describe_ranks(item.mesh.ranks)}: messages may arrive at them in different orders, and a rank could "
                'wait in a collective of the stage for one that computes something else; use order="planned"'
            )


def find_replica_ranks(group: Group, pipeline: Pipeline, stages: Mapping[int, StageRun]) -> dict[int, tuple[int, ...]]:
    """``{stage: ranks}`` of the replicas that DDP joins, for the stages of this rank under DDP."""
    replicas_of = {}
    for stage, run in stages.items():
        mesh = pipeline.stages[stage].mesh
        assert mesh is not None
        replicas_of[stage] = find_replicas(group, stage, run.module, mesh)
    return {stage: ranks for stage, ranks in replicas_of.items() if ranks}


def _check_types(values: Sequence[tuple[str, Any, type]]) -> None:
    for what, value, kind in values:
        if not isinstance(value, kind):
            raise ArgumentError(f"{what} must be a {kind.__name__}, not {type(value).__name__}")


def weigh_last(pipeline: Pipeline, last: Pipeline | None) -> float:
    """Size of the last microbatch relative to the others: the one ratio of sizes of all tensors that are smaller."""
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
            "those of pipeline, so the weight of the last loss is ambiguous; change only the pp ranks per microbatch"
        )
    if 0 in ratios:
        raise ArgumentError("tensors of last_pipeline are empty; omit the last microbatch")
    return ratios.pop() if ratios else 1.0


def find_pipeline_ranks(pipeline: Pipeline) -> tuple[int, ...]:
    """All ranks of the pipeline, ascending."""
    ranks: set[int] = set()
    for stage, item in enumerate(pipeline.stages):
        if item.mesh is None:
            raise ArgumentError(f"stage {stage} has no mesh; a ScheduleEngine needs one for every stage")
        ranks.update(item.mesh.ranks)
    return tuple(sorted(ranks))


def find_ranks_of_pp_ranks(schedule: Schedule, pipeline: Pipeline) -> list[tuple[int, ...]]:
    """The ranks of each pp rank, ascending."""
    ranks_of_pp_rank: list[tuple[int, ...] | None] = [None] * len(schedule.rank_actions)
    for stage, pp_rank in enumerate(schedule.pp_rank_of_stage):
        mesh = pipeline.stages[stage].mesh
        assert mesh is not None
        ranks = tuple(sorted(mesh.ranks))
        if ranks_of_pp_rank[pp_rank] is None:
            ranks_of_pp_rank[pp_rank] = ranks
        elif ranks_of_pp_rank[pp_rank] != ranks:
            raise ArgumentError(
                f"pp rank {pp_rank} has stages on ranks {format_ranks(ranks_of_pp_rank[pp_rank] or ())} and on ranks "
                f"{format_ranks(ranks)}; all stages of a pp rank must be on the same ranks"
            )
    ranks_of_pp_ranks = [ranks for ranks in ranks_of_pp_rank if ranks is not None]
    if len(ranks_of_pp_ranks) < len(ranks_of_pp_rank):
        raise ArgumentError(f"pp rank {ranks_of_pp_rank.index(None)} has no stage")
    owner: dict[int, int] = {}
    for pp_rank, ranks in enumerate(ranks_of_pp_ranks):
        for rank in ranks:
            if owner.setdefault(rank, pp_rank) != pp_rank:
                raise ArgumentError(
                    f"rank {rank} is on pp ranks {owner[rank]} and {pp_rank}; it must be on one pp rank"
                )
    for edge in pipeline.edges:
        if not edge.tensors:
            raise ArgumentError(f"edge {edge.src} -> {edge.dst} has no tensors; a ScheduleEngine needs them")
    return ranks_of_pp_ranks


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
    for stage, microbatches in feed.items():
        if not isinstance(microbatches, Sequence):
            raise ArgumentError(
                f"stage {stage} is fed {type(microbatches).__name__}; it needs a list with one entry per microbatch"
            )
        if stage not in range(num_stages):
            raise ArgumentError(f"feed names stage {stage!r}; there are stages 0 to {num_stages - 1}")
        if len(microbatches) != num_microbatches or not all(isinstance(inputs, Mapping) for inputs in microbatches):
            raise ArgumentError(
                f"stage {stage} is fed {len(microbatches)} microbatches; it needs {num_microbatches}, each {{name: "
                "tensor}}"
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
        raise ArgumentError(f"loss_weights must be {num_microbatches} numbers, not {brief(given)}") from None
    if len(weights) != num_microbatches or not all(map(math.isfinite, weights)):
        raise ArgumentError(f"loss_weights must be {num_microbatches} finite numbers, not {brief(given)}")
    return weights
