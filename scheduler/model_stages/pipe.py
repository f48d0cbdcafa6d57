"""``Pipe``: a model, the modules at which it is cut, and the placement of each stage."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from reshard.arguments import check_arguments
from reshard.compression import Policy
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError
from reshard.formatting import brief, count_of
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS
from reshard.topology import Topology

from ..gradients.tied_params import TiedParameter
from ..ir.schedule import Schedule
from ..pipeline import MAX_COUNT, Pipeline
from ..runtime.ready_order import OrderMode
from ..runtime.schedule_engine import ScheduleEngine
from ..schedules.classic import one_f_one_b
from ..schedules.schedule_search import auto_schedule
from .dry_run import ShardModule
from .partition.adapters import find_blocks
from .partition.batches import name_batch, outline_batch, split_microbatches
from .partition.blocks import Block, BlockCut, BlockStage, blocks_of_modules, copy_stage
from .partition.materialize import Init, is_on_meta, materialize
from .partition.single_block import whole_model
from .partition.stage_graph import Cut, FakeModel, StageGraph, find_ties
from .partition.traced_cut import TracedCut, UntraceableError
from .placement import (
    PlacedStages,
    Placement,
    check_world,
    ddp,
    find_meshes,
    find_pp_ranks,
    fsdp,
    make_device_mesh,
    parse_placements,
)
from .profile import ScheduleBuilder, StageProfile
from .rank_exchange import RankExchange
from .stage_planner import StagePlanner
from .tensor_parallel import divides_sequence, find_plan, parallelize, put_on_grid
from .training_engine import CompileOptions, PipelineEngine


class Pipe:
    """A model that is cut into pipeline stages, each with a placement.

    Args:
        model: the whole model, the same on all ranks, or a list with the module of each stage. Its modules are
            parallelized in place. Of a model on the meta device, each rank allocates only its own stages. In a list,
            the parameters of each forward name what the stage reads: inputs of the batch, or tensors of earlier stages.
            Each forward returns a :class:`StageOutput`, or ``{name: tensor}``.
        cut_before: paths of the modules that begin the second and each further stage, in the order of the forward.
            Omit this for a list of modules.
        stages: a :class:`Placement` for each stage, or a text such as ``"1x2,2x2x1"``: dp x tp of each stage, or
            rows x cols x depth of a grid.
        training_plan: cuts, placements, microbatches and schedule that ``reshard.scheduler.autoparallel.search`` found,
            in place of ``cut_before`` and ``stages``.
        init: initializes a model on the meta device, as ``model.apply(init)`` does in one process; default: each
            module's ``reset_parameters``.
        autocast: dtype of ``torch.autocast`` in all stages. With ``torch.float16``, the engine scales the loss.
        loss: ``loss(output, ...)``, whose other parameters name inputs of the batch; default: the forward returns the
            loss, ``(loss, metrics)`` or a StageOutput.
        blocks: returns the blocks of the model (see :class:`Block`), for a model whose forward cannot be traced;
            default: ``model.pipeline_blocks`` or an adapter for the class of the model, if there is one.
        tp_plan: the ``tp_plan`` of each placement that has none.

    Raises:
        ArgumentError: an argument is malformed, or two arguments contradict each other.
    """

    @check_arguments()
    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        cut_before: Sequence[str] = (),
        *,
        stages: str | Sequence[Placement] = (),
        training_plan: PlacedStages | None = None,
        init: Init | None = None,
        autocast: torch.dtype | None = None,
        loss: Callable[..., Any] | None = None,
        blocks: Callable[[Any], Sequence[Block]] | None = None,
        tp_plan: Mapping[str, Any] | None = None,
    ) -> None:
        if training_plan is not None:
            if not hasattr(training_plan, "cut_before"):
                raise ArgumentError(
                    f"training_plan is a {type(training_plan).__name__}, not a TrainingPlan; read a file with "
                    "TrainingPlan.read(path)"
                )
            if cut_before or stages:
                raise ArgumentError(
                    "a training plan has its own cuts and placements; pass no cut_before or stages with it"
                )
            cut_before, stages = training_plan.cut_before, list(training_plan.placements())
        if isinstance(model, (list, tuple)) and model and all(isinstance(item, torch.nn.Module) for item in model):
            if cut_before or blocks is not None or loss is not None:
                raise ArgumentError("a list of modules is already cut; it takes no cut_before, blocks or loss")
            model, blocks = torch.nn.ModuleList(model), blocks_of_modules
            cut_before = [str(stage) for stage in range(1, len(model))]
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(
                f"model must be a torch.nn.Module, or a list with the module of each stage, not {type(model).__name__}"
            )
        if isinstance(cut_before, str) or not all(isinstance(path, str) for path in cut_before):
            raise ArgumentError(f"cut_before must be a list of module paths, not {brief(cut_before)}")
        self.model, self.cut_before, self._init, self.autocast = model, tuple(cut_before), init, autocast
        self.placements, self._training_plan = parse_placements(stages), training_plan
        if len(self.placements) != len(self.cut_before) + 1:
            num_cuts, num_stages = len(self.cut_before), len(self.cut_before) + 1
            raise ArgumentError(
                f"{count_of(num_cuts, 'cut')} make{'s' * (num_cuts == 1)} {count_of(num_stages, 'stage')}, but stages "
                f"has {count_of(len(self.placements), 'placement')}"
            )
        if init is not None and not is_on_meta(model):
            raise ArgumentError("init is only for a model on the meta device; this model already has values")
        if blocks is not None and loss is not None:
            raise ArgumentError("blocks give the loss themselves, as StageOutput(loss=...); pass no loss=")
        self.meshes = find_meshes(self.placements)
        self._loss, self._blocks = loss, blocks if blocks is not None else find_blocks(model)
        self._tp_plans = [find_plan(item, model, tp_plan, stage) for stage, item in enumerate(self.placements)]
        self._sequence_parts = {
            stage: placement.tp
            for stage, placement in enumerate(self.placements)
            if divides_sequence(self._tp_plans[stage])
        }

    @property
    def input_names(self) -> list[str]:
        """Names for the values of a batch that is a tuple: the parameters of the forward, then those of the loss.

        Empty for a list of modules.
        """
        if self._blocks is blocks_of_modules:
            return []
        names = list(inspect.signature(self.model.forward).parameters)
        if self._loss is not None:
            names += list(inspect.signature(self._loss).parameters)[1:]
        return names

    @check_arguments()
    def cut(self, inputs: Sequence[str]) -> Cut:
        """The model cut into stages. ``inputs`` are the names of the values of a batch.

        A model without cuts is one stage, whether its forward can be traced or not.
        """
        if self._blocks is not None:
            return BlockCut(self._blocks, self.model, self.cut_before)
        try:
            return TracedCut(self.model, self.cut_before, inputs, self._loss)
        except UntraceableError:
            if self.cut_before:
                raise
            return BlockCut(functools.partial(whole_model, loss=self._loss), self.model, ())

    @check_arguments(num_microbatches=(1, MAX_COUNT))
    def pipeline(self, example: Any, num_microbatches: int, profile: StageProfile, topology: Topology) -> Pipeline:
        """The pipeline with the costs of its stages and edges, for one microbatch. One process suffices.

        Args:
            example: a whole batch; the values of its tensors do not matter.
            num_microbatches: number of microbatches that the batch is divided into.
            profile: seconds of each stage.
            topology: hosts and links of all ranks.

        Raises:
            ArgumentError: the model cannot be cut, or does not accept the batch.
        """
        outline = outline_batch(name_batch(example, self.input_names))
        fake_model = FakeModel(self.model, self.cut(outline.names), autocast=self.autocast)
        num_samples = split_microbatches(outline.num_samples, num_microbatches, self.meshes)[0]
        return StagePlanner(fake_model, self.meshes).priced(outline, num_samples, topology, profile)

    def _with_plan(
        self, num_microbatches: int | None, schedule: Any, compression: Policy | None
    ) -> tuple[int | None, Any, Policy | None]:
        """Arguments of :meth:`compile`, by default those of the training plan."""
        plan = self._training_plan
        if plan is None:
            return num_microbatches, schedule, compression
        number = plan.num_microbatches if num_microbatches is None else num_microbatches
        return number, schedule or _schedule_of(plan), compression or plan.compression

    def compile(
        self,
        example: Any,
        num_microbatches: int | None = None,
        *,
        schedule: Schedule | ScheduleBuilder | None = None,
        profile: StageProfile | None = None,
        device: str | torch.device = "cpu",
        group: Any = None,
        topology: Topology | None = None,
        activation_limit_bytes: int | None = None,
        compression: Policy | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        order: OrderMode = "planned",
    ) -> PipelineEngine:
        """Parallelize the stages of this rank and make the engine. Every rank must call this.

        Trial steps do not change parameters, buffers, random number generators or ``.grad``.

        Args:
            example: a whole batch; the same on all ranks. Its values matter only if stage times are measured.
            num_microbatches: number of microbatches of a step. A step has fewer if a microbatch would have fewer
                samples than replicas. Default: that of the training plan.
            schedule: a schedule, or a function of a pipeline and a number of microbatches that returns one. If a batch
                has fewer microbatches, a schedule runs only for its first ones. Default: that of the training plan, or
                :func:`auto_schedule`.
            profile: seconds of each stage, as :meth:`PipelineEngine.profile` returns; default: measured in two or three
                trial steps on ``example``.
            device: device of the parameters.
            group: process group whose ranks the placements name; default: the world.
            topology: hosts and links; default: hosts are found by host name.
            activation_limit_bytes: limit on the activations of a device. A ``schedule`` that is a function gets it
                if it has a parameter of this name. A schedule that keeps more is an error.
            compression: codecs of each parallel dimension; default: those of the training plan, or none. Transfers
                between stages are encoded where this shortens the simulated iteration; ``engine.compression`` lists
                them.
            timeout_seconds, order: see :class:`ScheduleEngine`.

        Raises:
            ArgumentError: the model cannot be cut, or the ranks do not fit the placements.
            DisagreementError: ranks pass different arguments.
            ScheduleError: the schedule keeps more activations than ``activation_limit_bytes``.
        """
        num_microbatches, schedule, compression = self._with_plan(num_microbatches, schedule, compression)
        exchange = RankExchange(group, timeout_seconds)
        with exchange.share_error():
            num_microbatches = _check_compile(schedule, num_microbatches)
            check_world(self.meshes, torch.distributed.get_world_size(group))
            device = _read_device(device)
            batch = name_batch(example, self.input_names)
            outline = outline_batch(batch)
            cut = self.cut(outline.names)
            planner = StagePlanner(FakeModel(self.model, cut, device.type, self.autocast), self.meshes)
            stages, ties, mine = self._make_stages(cut, planner.graph(outline), torch.distributed.get_rank(group))
            kinds = _kinds_of_ties(stages, ties)
        with exchange.share_error():
            device_meshes = {
                stage: make_device_mesh(self.meshes[stage], device, group, timeout_seconds) for stage in mine
            }
            modules = self._parallelize({item: stages[item] for item in mine}, device, device_meshes, timeout_seconds)
        layouts = exchange.tied_layouts(ties, modules, self.meshes)
        tied = [TiedParameter(tie, *kind, layouts=where) for tie, kind, where in zip(ties, kinds, layouts, strict=True)]
        sizes = split_microbatches(outline.num_samples, num_microbatches, self.meshes)
        first = planner.pipeline(outline, sizes[0])
        del stages, cut  # traces and the modules of other stages refer to each other in cycles
        gc.collect()  # otherwise parameters of the whole model remain until Python's collector runs
        settings: dict[str, Any] = {"group": group, "topology": topology, "timeout_seconds": timeout_seconds}
        settings |= {"ties": tied, "autocast": self.autocast, "compression": compression, "order": order}
        engine = ScheduleEngine(self._trial_schedule(first, len(sizes)), first, modules, **settings)
        options = CompileOptions(
            num_microbatches,
            schedule or auto_schedule,
            self.input_names,
            outline,
            ties,
            device,
            scales_loss=self.autocast is torch.float16,
            activation_limit_bytes=activation_limit_bytes,
            process_group=group,
            policy=compression,
            shards={stage: self._shard_of(stage, device_mesh) for stage, device_mesh in device_meshes.items()},
            sequence_parts=self._sequence_parts,
        )
        made = PipelineEngine(engine, planner, modules, options)
        made.prepare(batch, profile)
        return made

    def _make_stages(
        self, cut: Cut, graph: StageGraph, rank: int
    ) -> tuple[list[torch.nn.Module], list[dict[int, str]], list[int]]:
        """The modules of all stages, the parameters that they share, and the stages of this rank, which have values."""
        stages = list(cut.build(self.model))
        for stage, module in enumerate(stages):
            if isinstance(module, BlockStage):
                module.outputs = tuple(value.name for value in graph.values if value.writer == stage)
        ties = find_ties(stages)
        mine = [stage for stage, mesh in enumerate(self.meshes) if rank in mesh.ranks]
        if is_on_meta(self.model):
            materialize(self.model, [stages[stage] for stage in mine], self.cut_before, self._init)
        _copy_tied(stages, mine)
        return stages, ties, mine

    def _trial_schedule(self, pipeline: Pipeline, num_microbatches: int) -> Schedule:
        """A schedule without split backwards, with which the stages are measured."""
        pp_rank_of_stage = find_pp_ranks(self.meshes)
        if pp_rank_of_stage == list(range(len(pp_rank_of_stage))):
            return one_f_one_b(pipeline, num_microbatches)
        return auto_schedule(pipeline, num_microbatches, pp_rank_of_stage=pp_rank_of_stage, can_split=False)

    def _parallelize(
        self, modules: Mapping[int, Any], device: torch.device, device_meshes: Mapping[int, Any], timeout_seconds: float
    ) -> dict[int, torch.nn.Module]:
        """Shard and wrap the modules of this rank."""
        made: dict[int, torch.nn.Module] = {}
        for stage, module in modules.items():
            placement, device_mesh = self.placements[stage], device_meshes[stage]
            module = module.to(device)
            if placement.grid is not None:
                module = put_on_grid(module, device_mesh, timeout_seconds, placement.keep_inputs)
            elif placement.tp > 1:
                parallelize(module, device_mesh["tp"], self._tp_plans[stage])
            if placement.prepare is not None:
                whole = module
                module = placement.prepare(whole)
                if isinstance(whole, BlockStage):
                    whole.rebind()
            if placement.grid is not None:
                if placement.wrap is not None and placement.grid[2] > 1:
                    module = placement.wrap(module, device_mesh["depth"])
            elif placement.dp > 1:
                wrap = placement.wrap or (fsdp if placement.tp > 1 else ddp)
                module = wrap(module, device_mesh["dp"])
            made[stage] = module
        return made

    def _shard_of(self, stage: int, device_mesh: Any) -> ShardModule | None:
        """A function that shards a copy of a stage without data as this rank shards the stage; None on one rank."""
        if self.placements[stage].tp == 1:
            return None
        return functools.partial(
            parallelize, device_mesh=device_mesh["tp"], plan=self._tp_plans[stage], moves_data=False
        )


def _read_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except Exception as error:
        raise ArgumentError(f"device is {brief(device)}; torch has no such device: {error}") from None


def _check_compile(schedule: Any, num_microbatches: Any) -> int:
    """Raise ArgumentError unless these arguments of ``compile`` have the right types. Returns the microbatches."""
    if schedule is not None and not isinstance(schedule, Schedule) and not callable(schedule):
        raise ArgumentError(
            f"schedule is {brief(schedule)}; it must be a Schedule, or a function that makes one, such as "
            "reshard.scheduler.one_f_one_b"
        )
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ArgumentError(f"num_microbatches is {brief(num_microbatches)}; it must be a positive integer")
    return num_microbatches


def _schedule_of(training_plan: PlacedStages) -> ScheduleBuilder:
    """A builder of the training plan's schedule. For another number of microbatches, it runs :func:`auto_schedule`."""

    def build(
        pipeline: Pipeline, num_microbatches: int, can_split: bool = True, activation_limit_bytes: int | None = None
    ) -> Schedule:
        if num_microbatches == training_plan.num_microbatches:
            return training_plan.schedule
        return auto_schedule(
            pipeline, num_microbatches, can_split=can_split, activation_limit_bytes=activation_limit_bytes
        )

    return build


def _kinds_of_ties(
    stages: Sequence[torch.nn.Module], ties: Sequence[Mapping[int, str]]
) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of each parameter that several stages share."""
    shared = [stages[min(tie)].get_parameter(tie[min(tie)]) for tie in ties]
    return [(tuple(item.shape), dtype_name(item.dtype)) for item in shared]


def _copy_tied(stages: list[torch.nn.Module], mine: Sequence[int]) -> None:
    """Copy each stage of this rank that shares a parameter with an earlier stage of this rank.

    A :class:`TiedParameter` then keeps the copies equal, as it does across ranks.
    """
    seen: set[int] = set()
    for stage in mine:
        parameters = set(map(id, stages[stage].parameters()))
        if parameters & seen:
            stages[stage] = copy_stage(stages[stage])
        seen |= parameters
