"""Pipelines and programs for batches of any shape."""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from reshard.compression import Policy
from reshard.errors import ArgumentError
from reshard.sharding import Mesh
from reshard.topology import Topology

from ..ir.actions import StageChannel
from ..ir.schedule import Schedule
from ..ir.text import format_schedule, parse_schedule
from ..passes.edge_codecs import EdgeCodecs, choose_codecs, compress_edges
from ..pipeline import Pipeline, Stage
from ..runtime.schedule_engine import ScheduleEngine
from ..runtime.step_executor import StepProgram
from ..simulation.validate import check_peaks, check_schedule
from ..transfer_costs import price_edge
from .partition.batches import BatchEntry, BatchOutline
from .partition.stage_graph import FakeModel, StageGraph
from .profile import ScheduleBuilder, StageProfile

#: Largest number of programs that an engine keeps. Batches of different shapes need different programs.
MAX_PROGRAMS = 8
#: Largest number of stage graphs that an engine keeps, for batches of different outlines.
MAX_GRAPHS = 32


class StagePlanner:
    """Plans the stages of one model for batches of any shape. It does not communicate.

    Args:
        fake_model: finds the stage graph.
        meshes: mesh of each stage.
    """

    def __init__(self, fake_model: FakeModel, meshes: Sequence[Mesh]) -> None:
        self._fake_model, self.meshes = fake_model, tuple(meshes)
        self._graphs: collections.OrderedDict[tuple[BatchEntry, ...], StageGraph] = collections.OrderedDict()

    @property
    def first_rank(self) -> int:
        """The rank that decides for all."""
        return min(rank for mesh in self.meshes for rank in mesh.ranks)

    def mesh_of(self, rank: int) -> Mesh:
        """The mesh of the stages of a rank."""
        return next(mesh for mesh in self.meshes if rank in mesh.ranks)

    def graph(self, outline: BatchOutline) -> StageGraph:
        """The stage graph for batches of this outline, whatever their number of samples."""
        key = outline.entries
        if key not in self._graphs:
            self._graphs[key] = self._fake_model.find(outline)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def find_failure(
        self, outline: BatchOutline, num_samples: int, stage: int, shard: Callable[[torch.nn.Module], None] | None
    ) -> str | None:
        """See :meth:`FakeModel.find_failure`."""
        return self._fake_model.find_failure(outline, num_samples, self.graph(outline), stage, shard)

    def pipeline(self, outline: BatchOutline, num_samples: int) -> Pipeline:
        """The pipeline for microbatches of ``num_samples`` samples, without costs."""
        edges = self.graph(outline).edges(num_samples, self.meshes)
        return Pipeline(tuple(Stage(1.0, 1.0, 1.0, mesh=mesh) for mesh in self.meshes), edges)

    def priced(self, outline: BatchOutline, num_samples: int, topology: Topology, profile: StageProfile) -> Pipeline:
        """The pipeline with the costs of its stages and edges."""
        pipeline = profile.apply(self.pipeline(outline, num_samples), num_samples)
        return Pipeline(pipeline.stages, tuple(price_edge(edge, topology) for edge in pipeline.edges))


class Programs:
    """The schedules and programs of one engine. All ranks keep the same ones.

    Args:
        engine: the engine that runs them.
        planner: plans the stages.
        build: a schedule, or a function that builds one.
        options: keyword arguments for ``build``, each passed only if ``build`` has a parameter of this name.
        policy: compression policy. Its codec between stages encodes a transfer if this shortens the simulated
            iteration.

    Attributes:
        choices: text that describes the last choice of codecs; the same on all ranks.
    """

    def __init__(
        self,
        engine: ScheduleEngine,
        planner: StagePlanner,
        build: Schedule | ScheduleBuilder,
        options: dict[str, Any],
        policy: Policy,
    ) -> None:
        self._engine, self._planner, self._build, self._options = engine, planner, build, options
        self._policy = policy
        self.profile: StageProfile | None = None
        self.schedules: dict[int, Schedule] = {}  # by number of microbatches
        self._codecs: dict[int, dict[StageChannel, str]] = {}  # by number of microbatches
        self.choices = ""
        self._programs: collections.OrderedDict[Any, StepProgram] = collections.OrderedDict()

    def find(self, outline: BatchOutline, sizes: tuple[int, ...], schedule: Schedule | None) -> StepProgram:
        """The program for microbatches of these numbers of samples. All ranks keep the same programs."""
        key = (self._planner.graph(outline), sizes, schedule)  # not the outline: scalars may change with each batch
        if key in self._programs:
            self._programs.move_to_end(key)
            return self._programs[key]
        distinct = sorted(set(sizes), reverse=True)
        pipelines = [self._planner.pipeline(outline, size) for size in distinct]
        if schedule is None:
            schedule = self._schedule_for(len(sizes), outline, sizes[0])
            pipelines = [compress_edges(pipeline, self._codecs[len(sizes)]) for pipeline in pipelines]
        program = self._engine.make_program(schedule, pipelines, [distinct.index(size) for size in sizes])
        self._programs[key] = program
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)[1].close()
        return program

    def priced(self, outline: BatchOutline, sizes: tuple[int, ...]) -> Pipeline:
        """The pipeline of the first of these microbatches, with the costs of its stages and of its encoded edges."""
        assert self.profile is not None
        topology, codecs = self._engine.topology, self._codecs.get(len(sizes), {})
        pipeline = compress_edges(self._planner.priced(outline, sizes[0], topology, self.profile), codecs)
        if not codecs:
            return pipeline
        return Pipeline(pipeline.stages, tuple(price_edge(edge, topology) for edge in pipeline.edges))

    def _schedule_for(self, num_microbatches: int, outline: BatchOutline, num_samples: int) -> Schedule:
        """The schedule for a number of microbatches, which the first rank builds for all."""
        if num_microbatches in self.schedules:
            return self.schedules[num_microbatches]
        chosen: list[Any] | None = None
        failure: Exception | None = None
        if self._engine.rank == self._planner.first_rank:
            try:
                choice = self._choose(num_microbatches, outline, num_samples)
                self._check_activations(choice.schedule, outline, num_samples)
                codecs = [
                    [codec.sender, codec.receiver, codec.is_forward, name] for codec, name in choice.codecs.items()
                ]
                chosen = [format_schedule(choice.schedule), codecs, str(choice) if choice.gains else ""]
            except Exception as error:  # whatever the user's function raises must reach the other ranks
                failure = error
        gathered = self._engine.exchange(chosen, failure)
        text, codecs, self.choices = next(item for item in gathered.values() if item is not None)
        schedule = parse_schedule(text)
        check_schedule(schedule, self._planner.pipeline(outline, num_samples))
        self._check_fit(schedule, num_microbatches)
        self.schedules[num_microbatches] = schedule
        self._codecs[num_microbatches] = {StageChannel(*channel): name for *channel, name in codecs}
        return schedule

    def _check_fit(self, schedule: Schedule, num_microbatches: int) -> None:
        """Raise ArgumentError unless a schedule runs each stage on its ranks, and has this number of microbatches."""
        pp_ranks, expected = list(schedule.pp_rank_of_stage), list(self._engine.schedule.pp_rank_of_stage)
        if pp_ranks != expected:
            raise ArgumentError(
                f"the schedule {schedule.name!r} has stages on pp ranks {pp_ranks}, but by their ranks they are on "
                f"{expected}; pass a schedule of these pp ranks, such as auto_schedule"
            )
        if schedule.num_microbatches != num_microbatches:
            raise ArgumentError(
                f"the schedule {schedule.name!r} has {schedule.num_microbatches} microbatches, but the step has "
                f"{num_microbatches}"
            )

    def _check_activations(self, schedule: Schedule, outline: BatchOutline, num_samples: int) -> None:
        """Raise ScheduleError if a schedule keeps more activations than the options allow."""
        limit = self._options.get("activation_limit_bytes")
        if limit is not None:
            assert self.profile is not None
            check_peaks(
                schedule, self._planner.priced(outline, num_samples, self._engine.topology, self.profile), limit
            )

    def _choose(self, num_microbatches: int, outline: BatchOutline, num_samples: int) -> EdgeCodecs:
        """The schedule and the codecs between stages."""
        build = functools.partial(self._build_schedule, num_microbatches)
        topology = self._engine.topology
        if self._policy.pp is None and isinstance(self._build, Schedule):
            return EdgeCodecs({}, build(None), 0.0, 0.0, {})
        assert self.profile is not None
        pipeline = self._planner.priced(outline, num_samples, topology, self.profile)
        if self._policy.pp is None:
            return EdgeCodecs({}, build(pipeline), 0.0, 0.0, {})
        return choose_codecs(
            pipeline,
            build,
            functools.partial(price_edge, topology=topology),
            self._policy.pair("pp"),
            is_forced=self._policy.force_pp,
        )

    def _build_schedule(self, num_microbatches: int, pipeline: Pipeline | None) -> Schedule:
        if isinstance(self._build, Schedule):
            if self._build.num_microbatches < num_microbatches:
                raise ArgumentError(
                    f"the schedule {self._build.name!r} has {self._build.num_microbatches} microbatches, but this "
                    f"batch has {num_microbatches}; pass a function such as auto_schedule instead"
                )
            return self._build.first(num_microbatches)
        accepted = inspect.signature(self._build).parameters
        options = {name: value for name, value in self._options.items() if name in accepted}
        return self._build(pipeline, num_microbatches, **options)

    def close(self) -> None:
        """Close the Movers of all programs."""
        for program in self._programs.values():
            program.close()
