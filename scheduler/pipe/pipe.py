"""``Pipe``: a model, where it is cut, and where its stages run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from reshard.errors import ArgumentError
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS
from reshard.topology import Topology

from ..graph import Pipeline, Stage
from ..ir.schedule import Schedule
from ..runtime import torch_compat
from ..runtime.tied_params import TiedParameter
from ..schedules.auto import auto_schedule
from .adapters import find_blocks
from .batches import name_batch, outline_batch
from .blocks import Block, BlockCut
from .engine import PipelineEngine, Plan
from .materialize import Init, is_on_meta, materialize
from .placement import Placement, find_meshes, find_rows, parse_placements
from .profile import Profile, ScheduleBuilder
from .stage_graph import Cut, Skeleton, find_ties
from .tensor_parallel import find_plan
from .tracing import TracedCut


class Pipe:
    """A model that is cut into pipeline stages, each with a placement.

    Args:
        model: the whole model, the same on all ranks. On the meta device, a rank gives data to its own stages only. Its
            modules are parallelized in place.
        cut_before: paths of the modules that begin the second and each further stage, in the order of the forward.
        stages: a :class:`Placement` for each stage, or ``"1x2,2x2"``: dp x tp of each stage.
        init: gives data to a model on the meta device, as ``model.apply(init)`` does in one process.
        autocast: dtype of ``torch.autocast`` in all stages. With ``torch.float16``, the engine scales the loss.
        loss: ``loss(output, ...)``, whose further parameters name inputs of the batch; default: the forward returns the
            loss, ``(loss, metrics)`` or a StageOutput.
        blocks: returns the blocks of the model (see :class:`Block`), for a model whose forward cannot be traced;
            default: ``model.pipeline_blocks`` or an adapter for the class of the model, if there is one.
        tp_plan: plan of all placements that have none.

    Raises:
        ArgumentError: the arguments do not fit each other.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cut_before: Sequence[str] = (),
        *,
        stages: str | Sequence[Placement],
        init: Init | None = None,
        autocast: torch.dtype | None = None,
        loss: Callable[..., Any] | None = None,
        blocks: Callable[[Any], Sequence[Block]] | None = None,
        tp_plan: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if isinstance(cut_before, str) or not all(isinstance(path, str) for path in cut_before):
            raise ArgumentError(f"cut_before must be a list of module paths, not {cut_before!r}")
        self.model, self.cut_before, self._init, self.autocast = model, tuple(cut_before), init, autocast
        self.placements = parse_placements(stages)
        if len(self.placements) != len(self.cut_before) + 1:
            raise ArgumentError(
                f"{len(self.cut_before)} cuts make {len(self.cut_before) + 1} stages, but stages has "
                f"{len(self.placements)} placements"
            )
        if init is not None and not is_on_meta(model):
            raise ArgumentError("init is only for a model on the meta device; this one has its values")
        self.meshes = find_meshes(self.placements)
        self._loss, self._blocks = loss, blocks if blocks is not None else find_blocks(model)
        self._tp_plans = [find_plan(each, model, tp_plan, stage) for stage, each in enumerate(self.placements)]

    @property
    def input_names(self) -> list[str]:
        """Names of the values of a batch that is a tuple: parameters of the forward, then those of the loss."""
        names = list(inspect.signature(self.model.forward).parameters)
        if self._loss is not None:
            names += list(inspect.signature(self._loss).parameters)[1:]
        return names

    def cut(self, inputs: Sequence[str]) -> Cut:
        """The model cut into stages, for a batch with these names."""
        if self._blocks is not None:
            return BlockCut(self._blocks, self.model, self.cut_before)
        return TracedCut(self.model, self.cut_before, inputs, self._loss)

    def pipeline(
        self, example: Any, microbatches: int, *, profile: Profile | None = None, topology: Topology | None = None
    ) -> Pipeline:
        """The pipeline without any process: shapes from a run without data, costs from a profile and a topology.

        Args:
            example: a whole batch. microbatches: number of microbatches that it is divided into.
            profile: seconds of each stage; default: estimated from counted operations.
            topology: hosts and links; default: one host per stage.
        """
        batch = name_batch(example, self.input_names)
        outline = outline_batch(batch)
        skeleton = Skeleton(self.model, self.cut(outline.names), autocast=self.autocast)
        plan = Plan(skeleton, self.meshes, [Stage(0, 0, 0, mesh=mesh) for mesh in self.meshes])
        if topology is None:
            topology = Topology(tuple(stage for stage, mesh in enumerate(self.meshes) for _ in mesh.ranks))
        if profile is None:
            profile = skeleton.estimate(outline, microbatches, self.meshes)
        return plan.pipeline(outline, -(-outline.rows // microbatches), topology, profile)

    def compile(
        self,
        example: Any,
        microbatches: int,
        *,
        schedule: Schedule | ScheduleBuilder = auto_schedule,
        profile: Profile | None = None,
        device: str | torch.device = "cpu",
        group: Any = None,
        topology: Topology | None = None,
        memory_limit_bytes: float | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> PipelineEngine:
        """Parallelize the stages of this rank and make the engine. Every rank must call this.

        Parameters, buffers, random number generators and ``.grad`` are left as they were.

        Args:
            example: a whole batch; the same on all ranks. Its values matter only if stage times are measured.
            microbatches: number of microbatches of a step; a batch with fewer rows has fewer.
            schedule: a schedule, or a function of a pipeline and a number of microbatches that returns one.
            profile: seconds of each stage, as :meth:`PipelineEngine.profile` returns; default: measured in two trial
                steps on ``example``.
            device: device of the parameters.
            group: process group whose ranks the placements name; default: the world.
            topology: hosts and links; default: hosts are found by host name.
            memory_limit_bytes: given to ``schedule`` if it is a function.
            timeout_seconds: see :class:`Engine`.

        Raises:
            ArgumentError: the model cannot be cut, or the ranks do not fit the placements.
            DisagreementError: ranks pass different arguments.
        """
        if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
            raise ArgumentError(f"microbatches is {microbatches!r}; it must be a positive integer")
        device = torch.device(device)
        batch = name_batch(example, self.input_names)
        outline = outline_batch(batch)
        cut = self.cut(outline.names)
        skeleton = Skeleton(self.model, cut, device.type, self.autocast)
        stages = list(cut.build(self.model))
        graph = skeleton.find(outline)
        for stage, module in enumerate(stages):
            if hasattr(module, "outputs"):
                module.outputs = tuple(value.name for value in graph.values if value.writer == stage)
        ties = find_ties(stages)
        shapes = [
            (tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
            for parameter in (stages[min(tie)].get_parameter(tie[min(tie)]) for tie in ties)
        ]
        rank = torch.distributed.get_rank(group)
        mine = [stage for stage, mesh in enumerate(self.meshes) if rank in mesh.ranks]
        if not mine:
            raise ArgumentError(f"rank {rank} is in no stage; the stages need {self._num_ranks()} ranks")
        with torch_compat.keep_rng(device.type) if not is_on_meta(self.model) else _nothing():
            if is_on_meta(self.model):
                materialize(self.model, [stages[stage] for stage in mine], self.cut_before, self._init)
        modules = self._parallelize(stages, mine, device)
        engine_stages = [Stage(1.0, 1.0, 1.0, mesh=mesh) for mesh in self.meshes]
        plan = Plan(skeleton, self.meshes, engine_stages)
        tied = [
            TiedParameter(_names_now(tie, modules), *shape, _tied_layouts(tie, modules, self.meshes))
            for tie, shape in zip(ties, shapes, strict=True)
        ]
        return PipelineEngine(
            plan,
            modules,
            batch,
            microbatches,
            build_schedule=schedule,
            profile=profile,
            ties=tied,
            row_of_stage=find_rows(self.meshes),
            input_names=self.input_names,
            group=group,
            topology=topology,
            autocast=self.autocast,
            device=device,
            memory_limit_bytes=memory_limit_bytes,
            timeout_seconds=timeout_seconds,
        )
