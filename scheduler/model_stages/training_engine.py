"""``PipelineEngine``: train, evaluate, clip, save and resume a model that ``Pipe`` has cut and placed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from reshard.arguments import check_arguments
from reshard.compression import Policy
from reshard.errors import ArgumentError

from .. import checkpoint
from ..gradients.data_parallel import is_fsdp, plain_parameters
from ..gradients.gradient_norm import LossScale, are_finite, check_clip, combine_norm, local_power_sum, scale_gradients
from ..gradients.replica_sync import restore_gradients, stash_gradients
from ..ir.schedule import Schedule
from ..runtime.local_tensors import is_dtensor
from ..runtime.schedule_engine import ScheduleEngine, ending_calls
from ..runtime.step_executor import RankStepResult, StageTotals, StepInputs
from ..schedules.classic import zb_h1
from ..simulation.replay import PipelineTimeline, simulate_schedule
from ..simulation.schedule_lower_bound import LowerBound, find_lower_bound
from .dry_run import DryRun, ShardModule
from .feeding import MAX_SAMPLES, Feeder
from .partition.batches import BatchOutline, take_samples, take_unused_sample
from .partition.stage_mesh import ranks_with_own_loss
from .profile import ScheduleBuilder, StageProfile, count_saved_bytes, profile_timelines, restore_training_state
from .stage_planner import Programs, StagePlanner
from .totals import StepResult, Totals, combine_totals
from .tp_gradients import ReplicatedGradients


@dataclass(frozen=True)
class CompileOptions:
    """Options of an engine, which :meth:`Pipe.compile` sets.

    Attributes:
        num_microbatches: number of microbatches of a step.
        schedule: a schedule, or a function that builds one.
        input_names: names for the values of a batch that is a tuple, in order.
        example: outline of the batch given to ``compile``.
        ties: ``{stage: name}`` of each parameter that several stages share.
        device: device of the parameters.
        scales_loss: whether to scale the loss, as float16 needs.
        activation_limit_bytes: given to ``schedule`` if it is a function.
        process_group: process group of the ranks; None: the world.
        policy: codecs of each parallel dimension.
        shards, sequence_parts: how stages are sharded; see :class:`DryRun`.
    """

    num_microbatches: int
    schedule: Schedule | ScheduleBuilder
    input_names: Sequence[str]
    example: BatchOutline
    ties: Sequence[Mapping[int, str]]
    device: torch.device
    scales_loss: bool = False
    activation_limit_bytes: int | None = None
    process_group: Any = None
    policy: Policy | None = None
    shards: Mapping[int, ShardModule | None] = field(default_factory=dict)
    sequence_parts: Mapping[int, int] = field(default_factory=dict)


class PipelineEngine:
    """Runs a model over pipeline stages. Every rank makes one by :meth:`Pipe.compile`; all ranks make the same calls.

    Attributes:
        modules: ``{stage: module}`` of this rank, parallelized.
        schedule: schedule of a step on a batch like the example.
        tied_stages: stages that share a parameter with another.
    """

    def __init__(
        self,
        engine: ScheduleEngine,
        planner: StagePlanner,
        modules: Mapping[int, torch.nn.Module],
        options: CompileOptions,
    ) -> None:
        self._engine, self._planner, self.modules, self._options = engine, planner, dict(modules), options
        self._usual_num_microbatches = options.num_microbatches
        own = [stage for stage, module in modules.items() if is_fsdp(module)]
        fsdp_stages = {stage for stages in engine.exchange(own).values() for stage in stages}
        dry_run = DryRun(engine, planner, fsdp_stages, options.shards, options.sequence_parts)
        self._num_filler_samples = dry_run.num_filler_samples
        self._feeder = Feeder(engine, planner, options.input_names, options.num_microbatches, dry_run, options.example)
        self._replicated = ReplicatedGradients(engine, planner, self.modules)
        self._loss_scale = LossScale() if options.scales_loss else None
        self._rank, self._is_first = engine.rank, engine.rank == planner.first_rank
        self.tied_stages = {stage for tie in options.ties for stage in tie}
        self._tied_elsewhere: dict[int, set[str]] = {}
        for tie in options.ties:
            for stage in sorted(tie)[1:]:
                self._tied_elsewhere.setdefault(stage, set()).add(tie[stage])
        self._empty_parameter = torch.nn.Parameter(torch.empty(0, device=options.device))
        self._can_split = not fsdp_stages
        hints: dict[str, Any] = {"can_split": self._can_split, "activation_limit_bytes": options.activation_limit_bytes}
        pp_rank_of_stage = engine.schedule.pp_rank_of_stage
        self._is_chain = list(pp_rank_of_stage) == list(range(len(pp_rank_of_stage)))
        if not self._is_chain:
            hints["pp_rank_of_stage"] = pp_rank_of_stage
        self._programs = Programs(engine, planner, options.schedule, hints, options.policy or Policy())

    # Parameters

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of this rank's stages, each once, for an optimizer. With tensor parallelism: param_groups().

        If no parameter is trainable, the list has one without elements, because torch makes no optimizer without
        parameters.
        """
        own = [parameter for _, parameter in self.named_parameters()]
        return own if any(item.requires_grad for item in own) else [*own, self._empty_parameter]

    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters as two groups for an optimizer, on every rank: plain tensors, and DTensors.

        An optimizer of torch updates the tensors of a group at once on a GPU, and raises an error if only some of them
        are DTensors, as in a stage with ``parallelize_module``. A group may be empty.
        """
        own = self.parameters()
        return [{"params": [item for item in own if is_dtensor(item) is sharded]} for sharded in (False, True)]

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters of this rank's stages under the names of the whole model, each once."""
        named: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for module in self.modules.values():
            for name, parameter in plain_parameters(module):
                named.setdefault(id(parameter), (name, parameter))
        return list(named.values())

    # Steps

    @property
    def schedule(self) -> Schedule:
        """The schedule of a step on a batch like the example."""
        return self._programs.schedules[self._usual_num_microbatches]

    @property
    def compression(self) -> str:
        """Codecs between stages, and the simulated seconds with and without them; empty without a policy for them."""
        return self._programs.choices

    @ending_calls
    def step(
        self, batch: Any = None, *, accumulate: int = 1, local_batch: bool = False, timeline: bool = False
    ) -> StepResult:
        """Add the gradients of the mean loss over all samples of a batch to each parameter's ``.grad``.

        Args:
            batch: ``{name: tensor}``, a tensor or a tuple, the same on all ranks; None on ranks whose stages read no
                input. Its sizes may differ from the example's. A batch of few samples has fewer microbatches.
            accumulate: number of parts of the batch that run one after the other, each with its own microbatches.
            local_batch: whether the batch has only the samples of this rank, in the order of :meth:`local_samples`.
            timeline: measure the times of the last part.

        Raises:
            ArgumentError: the batch does not fit the model, on all ranks alike; the engine can still be used.
            DisagreementError: ranks pass different batches; the engine can still be used.
            ReshardError: a rank failed in the step; the engine cannot be used again.
        """
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        earlier = stash_gradients(parameters := self.parameters())
        try:
            steps, num_samples = self._run(batch, accumulate, local_batch, scale=scale, is_measured=timeline)
            measured = self._engine.timeline() if timeline else None
            totals = self._exchange_totals(steps, num_samples, are_finite(parameters))
            self._replicated.check(totals.finite)
            factor = totals.gradient_factor / scale
            if factor != 1.0:
                scale_gradients(parameters, factor)
            self._engine.sums.count_step()
        finally:
            restore_gradients(earlier)
        if self._loss_scale is not None:
            self._loss_scale.update(totals.gradients_finite)
        return StepResult(totals.loss, totals.metrics, totals.finite, measured)

    @ending_calls
    def evaluate(self, batch: Any = None, *, local_batch: bool = False) -> StepResult:
        """The mean loss over all samples of a batch, in evaluation mode and without gradients.

        Arguments: :meth:`step`.
        """
        modes = [(submodule, submodule.training) for module in self.modules.values() for submodule in module.modules()]
        for module in self.modules.values():
            module.eval()
        try:
            totals = self._exchange_totals(*self._run(batch, 1, local_batch, train=False), True)
            return StepResult(totals.loss, totals.metrics, totals.finite)
        finally:
            for mode, was_training in modes:
                mode.training = was_training

    @check_arguments(num_samples=(1, MAX_SAMPLES), accumulate=(1, MAX_SAMPLES))
    def local_samples(self, num_samples: int, accumulate: int = 1) -> torch.Tensor:
        """Indices (int64) of the samples that this rank passes with ``local_batch=True``, in order, of ``num_samples``
        in all.
        """
        parts = self._feeder.divide(num_samples, accumulate)
        return torch.tensor(
            [sample for part in parts for samples in part for sample in self._feeder.own_samples(samples)]
        ).long()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale the gradients of the whole model so that their norm is at most ``max_norm``. Returns the norm before.

        The same as ``torch.nn.utils.clip_grad_norm_`` on the model in one process: tied parameters count once.

        Raises:
            ArgumentError: ``max_norm`` is negative or NaN, or ``norm_type`` is not above 0.
            DisagreementError: ranks pass different arguments.
        """
        ranks = {stage: self._planner.meshes[stage].size for stage in self.modules}
        own, failure = [], None
        try:
            max_norm, norm_type = check_clip(max_norm, norm_type)
            own = [max_norm, norm_type, local_power_sum(self.modules, ranks, self._tied_elsewhere, norm_type)]
        except ArgumentError as error:
            failure = error
        norm = combine_norm(self._engine.exchange(own, failure))
        scale_gradients(self.parameters(), min(1.0, max_norm / (norm + 1e-6)))
        return norm

    # Checkpoints

    @ending_calls
    def save(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        loader: Any = None,
        step: int = 0,
        *,
        keep: int = 2,
    ) -> None:
        """Save the model, the given objects and the random number generators in ``path/step-XXXXXXXX``.

        Error feedback of the policy is saved too.

        Args:
            path: folder on a file system that all ranks share.
            optimizer: optimizer of :meth:`parameters`.
            lr_scheduler, loader: objects with a ``state_dict()``. It may hold None, bool, int, float, str, bytes, list,
                tuple, dict, OrderedDict, Counter, tensors and NumPy arrays; tensors come back on the CPU.
            step: number of steps taken, which :meth:`load` returns.
            keep: number of newest checkpoints to keep; older ones are deleted.

        Raises:
            ArgumentError: the folder cannot be made, some ranks see another folder, a state holds something else, or
                another argument is invalid. All ranks raise it.
            DisagreementError: ranks pass different steps.
        """
        state = self._training_state(optimizer, lr_scheduler, loader, step)
        folder = self._run_and_agree(lambda: checkpoint.check_saved(path, state, keep))
        checkpoint.save(folder, state, self._exchange_files, keep)

    @ending_calls
    def load(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        loader: Any = None,
        *,
        step: int | None = None,
        missing_ok: bool = False,
        trust_pickle: bool = False,
    ) -> int:
        """Load the newest complete checkpoint at ``path``, saved with any cut into stages. Returns its step.

        The random number generators are restored only if the number of ranks is the same as at the save, and error
        feedback only if the stages are the same too.

        Args:
            step: load the checkpoint of this step.
            missing_ok: return 0 if there is none. Others: see :meth:`save`.
            trust_pickle: also load a checkpoint in the pickled format of ``torch.distributed.checkpoint``, which can
                run any code. Earlier versions wrote it. A folder ``step-XXXXXXXX`` with the keys "model" and
                "optimizer" may also be of another program; its step counts as 0.

        Raises:
            ArgumentError: there is no checkpoint; or the checkpoint lacks an entry that this call loads, has a
                parameter or buffer that no stage has, has a damaged file, or is pickled and not trusted.
            DisagreementError: ranks pass a different step or ``trust_pickle``.
        """
        stored = checkpoint.choose_checkpoint(
            path, step, trust_pickle, self._rank, self._is_first, self._exchange_files
        )
        if stored is None and missing_ok:
            return 0
        if stored is None:
            raise ArgumentError(f"there is no complete checkpoint at {path}; pass missing_ok=True to start without one")
        state = self._training_state(optimizer, lr_scheduler, loader, 0)
        self._run_and_agree(lambda: checkpoint.check_objects(state, "load_state_dict"))
        request = self._run_and_agree(lambda: checkpoint.find_entries(stored, state))
        numbers = self._exchange_files(checkpoint.find_model_entries(request, state), None)
        checkpoint.check_model_entries(request, numbers.values())
        counters = self._run_and_agree(lambda: checkpoint.load(request, state))
        if self._loss_scale is not None and counters.get("loss_scale") is not None:
            self._loss_scale.load_state_dict(counters["loss_scale"])
        return int(counters.get("step", 0))

    def _run_and_agree(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` on each rank, and return this rank's result. If the call fails on one rank, all ranks raise."""
        result, failure = None, None
        try:
            result = call()
        except Exception as error:
            failure = error
        self._exchange_files(None, failure)
        return result

    def _exchange_files(self, value: Any, error: BaseException | None) -> Mapping[int, Any]:
        """The values of all ranks, which may wait for a rank that reads or writes files."""
        return self._engine.exchange(value, error, timeout_seconds=checkpoint.CHECKPOINT_TIMEOUT_SECONDS)

    def _training_state(self, optimizer: Any, lr_scheduler: Any, loader: Any, step: int) -> checkpoint.TrainingState:
        scale = None if self._loss_scale is None else self._loss_scale.state_dict()
        counters = {
            "step": step,
            "loss_scale": scale,
            "world_size": torch.distributed.get_world_size(self._options.process_group),
            "encoded_steps": self._engine.sums.state_dict()["steps"],
        }
        return checkpoint.TrainingState(
            self._rank,
            self._is_first,
            self.modules,
            self._options.ties,
            optimizer,
            lr_scheduler,
            loader,
            counters,
            self._engine.sums,
        )

    def close(self) -> None:
        """Stop the threads that move tensors. Process groups end when the module is collected, at the next compile."""
        self._programs.close()
        self._engine.close()

    def __enter__(self) -> PipelineEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # One step

    def _run(
        self,
        batch: Any,
        accumulate: int,
        is_local: bool,
        *,
        train: bool = True,
        scale: float = 1.0,
        schedule: Schedule | None = None,
        is_measured: bool = False,
    ) -> tuple[list[RankStepResult], int]:
        """Run all parts of a batch. Returns the result of each part, and the number of samples of the batch."""
        tensors, outline = self._feeder.agree(batch, accumulate, is_local, is_measured=is_measured)
        graph = self._planner.graph(outline)
        parts = self._feeder.divide(outline.num_samples, accumulate)
        programs = [self._programs.find(outline, tuple(map(len, part)), schedule) for part in parts]
        steps, num_taken = [], 0
        for part, program in zip(parts, programs, strict=True):
            feed: dict[int, list[dict[str, Any]]] = {stage: [] for stage in self.modules}
            weights, fillers = [], []
            for microbatch, samples in enumerate(part):
                own_samples = self._feeder.own_samples(samples)
                weights.append(float(self._feeder.num_samples_of_loss(samples)))
                source = range(num_taken, num_taken + len(own_samples)) if is_local else own_samples
                num_taken += len(own_samples)
                for stage, fed in feed.items():
                    if not own_samples and self._num_filler_samples(stage):
                        fillers.append((stage, microbatch))
                        fed.append(take_unused_sample(tensors, outline, graph.inputs[stage], not is_local))
                    else:
                        fed.append(take_samples(tensors, outline, graph.inputs[stage], source))
            inputs = StepInputs(feed, weights, scale / outline.num_samples, train, fillers)
            steps.append(self._engine.run(program, inputs))
        return steps, outline.num_samples

    def _exchange_totals(self, steps: Sequence[RankStepResult], num_samples: int, finite: bool) -> Totals:
        """The totals of all parts over all ranks. If several ranks have the same loss, only one of them counts."""
        own: list[Any] = []
        if self._rank in ranks_with_own_loss(self._planner.mesh_of(self._rank)):
            own = [[stage, asdict(totals)] for step in steps for stage, totals in step.totals.items()]
        gathered = self._engine.exchange([own, finite])
        by_stage: dict[int, list[StageTotals]] = {}
        for values, _ in gathered.values():
            for stage, item in values:
                by_stage.setdefault(stage, []).append(StageTotals(**item))
        return combine_totals(by_stage, num_samples, all(value[1] for value in gathered.values()))

    # Profile

    def prepare(self, example: Any, profile: StageProfile | None) -> None:
        """Measure the stages unless a profile is given, and make the program for batches like the example."""
        self._programs.profile = profile if profile is not None else self.measure(example)
        _, outline = self._feeder.agree(example, 1, False)
        sizes = tuple(map(len, self._feeder.divide(outline.num_samples, 1)[0]))
        self._usual_num_microbatches = len(sizes)
        self._programs.find(outline, sizes, None)
        self._usual = outline, sizes

    def profile(self) -> StageProfile:
        """The profile that the schedule was made for: seconds of each stage."""
        assert self._programs.profile is not None
        return self._programs.profile

    def predict(self) -> tuple[PipelineTimeline, LowerBound]:
        """The simulated step on a batch like the example, and a lower bound for every schedule of these stages."""
        schedule, pipeline = self.schedule, self._programs.priced(*self._usual)
        bound = find_lower_bound(
            pipeline,
            schedule.num_microbatches,
            pp_rank_of_stage=schedule.pp_rank_of_stage,
            can_split=self._can_split,
        )
        return simulate_schedule(schedule, pipeline), bound

    def measure(self, batch: Any) -> StageProfile:
        """Measure the seconds of each stage, and the bytes that it saves for the backward, in trial steps on a batch.

        Trial steps do not change parameters, buffers, random number generators or ``.grad``.
        """
        named, outline = self._feeder.agree(batch, 1, False)
        sizes = [len(item) for item in self._feeder.divide(outline.num_samples, 1)[0]]
        pipeline = self._planner.pipeline(outline, sizes[0])
        trials = [self._engine.schedule]
        if self._can_split and self._is_chain:
            trials.append(zb_h1(pipeline, len(sizes)))
        with restore_training_state(self.parameters(), self.modules, self._engine.sums, self._options.device.type):
            with count_saved_bytes() as saved:
                self._run(named, 1, False, schedule=self._engine.schedule)
            timelines = []
            for schedule in trials:
                self._run(named, 1, False, schedule=schedule)
                timelines.append(self._engine.timeline())
        gathered = self._engine.exchange([sorted(self.modules), saved.nbytes / len(sizes) / len(self.modules)])
        activation_bytes = [1] * len(pipeline.stages)
        for stages, nbytes in gathered.values():
            for stage in stages:
                activation_bytes[stage] = max(activation_bytes[stage], round(nbytes))
        return profile_timelines(timelines, len(pipeline.stages), sizes[0], activation_bytes)
