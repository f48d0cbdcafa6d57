"""Run a schedule on processes: each rank does the actions of its pp rank in order, with transfers in the background.

All ranks of a pp rank do the same actions. Stages are ordinary modules; torch handles parallelism inside a stage.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from reshard.api.mover import Mover
from reshard.compression import Policy
from reshard.coordination import (
    RoundRequest,
    check_inside,
    describe_error,
    explain_lost_store,
    find_call_group,
    find_group,
    leave_interrupted,
    mark_published,
    publish_exceptions,
    publishing_lost_ranks,
    report_error,
)
from reshard.errors import ArgumentError, ReshardError
from reshard.planner import Strategy, plan_tensors
from reshard.sharding import TensorSpec
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS
from reshard.topology import Topology

from .. import torch_compat
from ..gradients.compression_policy import (
    StageSums,
    add_codec_rates,
    check_policy,
    code_modules,
    compress_pipelines,
    compress_sums,
    describe_modules,
    find_reduce_scatters,
    measure_codecs,
)
from ..gradients.data_parallel import LossShards, check_frozen, fsdp_ranks, warn_if_replicas_diverge
from ..gradients.replica_sync import ReplicaSync, wait_for_root_cause
from ..gradients.tied_params import TiedParameter, TiedParameters, check_training, training_of
from ..ir.schedule import Schedule
from ..pipeline import Pipeline
from ..simulation.replay import PipelineTimeline
from .engine_arguments import (
    EngineOptions,
    agree_on_arguments,
    check_feed,
    check_runnable,
    find_pipeline_ranks,
    find_replica_ranks,
    read_loss_weights,
)
from .gradient_passes import GradientPasses
from .observe import gather_timeline, gather_values, name_action
from .p2p import StageTransfers, plan_channels
from .ready_order import OrderMode
from .stage import StageRun
from .step_executor import EngineState, RankStep, RankStepResult, StepInputs, StepProgram

logger = logging.getLogger(__name__)

#: An exception before or after the actions of a step ends the step on all ranks, too.
_ending_step = publish_exceptions(lambda error, args, _: args[0].fail(args[0]._program, error))
#: The same for methods of an object with an ``_engine``, which also agree with the other ranks outside of steps.
ending_calls = publish_exceptions(lambda error, args, _: args[0]._engine.interrupt(error))
#: ``{stage: [{name: tensor} of each microbatch]}``
Feed = Mapping[int, Sequence[Mapping[str, Any]]]


class ScheduleEngine:
    """Runs a schedule, one iteration per :meth:`step`. Every rank of the pipeline makes an engine and calls each step.

    A step adds the gradients of the total loss to each parameter's ``.grad``. The total loss is the weighted sum, over
    microbatches, of the mean loss of the replicas that see different data. The caller runs the optimizer.

    Args:
        schedule: schedule to run.
        pipeline: its pipeline, with a mesh for every stage and tensors for every edge.
        modules: ``{stage: module}`` for the stages of this rank. A module takes local shards as keyword arguments: the
            tensors of incoming edges and those in ``feed``. It returns a :class:`StageOutput`, ``{name: tensor}``
            for its outgoing edges, or one tensor.
        group: process group whose ranks the meshes name; default: the world.
        topology, strategy: used to plan transfers; default: hosts are found by host name, and the default strategy.
        last_pipeline: the pipeline with the tensor shapes of a smaller last microbatch. Its loss then has less weight.
        ties: parameters that several stages share. The constructor copies the values of the first stage to the others.
        num_loss_shards: replicas that see different data on the stage with the loss; the total is the mean over them.
            For several such stages, ``{stage: number}``; the default is 1.
        autocast: dtype of ``torch.autocast`` in the forwards; default: no autocast.
        compression: codecs of each parallel dimension. The codec between stages (``pp``) replaces the codec of an edge
            if this shortens the simulated iteration. The simulation uses the costs of the pipeline's stages.
        signal_only: move one element instead of each tensor and compute on zeros, to measure communication costs.
        timeout_seconds: limit for the constructor's agreement between ranks, and for each transfer including the
            sender's computation. Silent ranks are detected after 30 s; with a shorter timeout, errors may name a rank
            that waits for the silent one.
        order: ``"planned"`` computes in the order of the schedule. ``"ready"`` computes what has arrived: the first
            computation of the schedule whose inputs are there. Gradients are equal to the last bit, and no rank needs
            more memory. Ready order needs stages on CPUs, each on one rank.

    Attributes:
        sums: encoded sums of gradients; a checkpoint saves ``sums.state_dict()``.

    Raises:
        ScheduleError: the schedule does not fit the pipeline.
        ArgumentError: modules, meshes or other arguments do not fit.
        DisagreementError: ranks pass different arguments, or some froze a parameter that others train.
    """

    def __init__(
        self,
        schedule: Schedule,
        pipeline: Pipeline,
        modules: Mapping[int, torch.nn.Module],
        *,
        group: Any = None,
        topology: Topology | None = None,
        strategy: str | Strategy | None = None,
        last_pipeline: Pipeline | None = None,
        ties: Sequence[TiedParameter] = (),
        num_loss_shards: LossShards = 1,
        autocast: torch.dtype | None = None,
        compression: Policy | None = None,
        signal_only: bool = False,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        order: OrderMode = "planned",
    ) -> None:
        self.schedule, self.pipeline = schedule, pipeline
        others = autocast, compression, signal_only, timeout_seconds, order
        self._options = options = EngineOptions(topology, strategy, last_pipeline, ties, num_loss_shards, *others)
        self._group = find_group(group)
        self._error: BaseException | None = None  # of the step that failed
        self._closed, self._stepping = False, threading.Lock()
        self._stages: dict[int, StageRun] = {}
        self._rank_step: RankStep | None = None
        try:
            options.check_pipelines(schedule, pipeline)
            ranks = find_pipeline_ranks(pipeline)
            check_inside(self._group, ranks)
        except ReshardError as error:
            report_error(self._group, error)
            raise
        self._call_group = find_call_group(self._group, ranks)
        part, hostnames = agree_on_arguments(options, schedule, pipeline, modules, self._group, self._call_group)
        self.pp_rank, self._stages, self._device = part.pp_rank, part.stages, part.device
        self._last_weight, self._timeout_seconds = part.last_weight, part.timeout_seconds
        names = [hostnames.get(rank, "") for rank in range(ranks[-1] + 1)]
        self._topology, policy = topology or Topology.from_hostnames(names), options.policy
        pipelines = tuple(item for item in (pipeline, last_pipeline) if item is not None)
        if policy.dimensions:
            pipelines = self._code(modules, pipelines)
        pipeline_of = (*(0,) * (schedule.num_microbatches - 1), len(pipelines) - 1)
        self._program = self.make_program(schedule, pipelines, pipeline_of)
        for stage, run in self._stages.items():
            warn_if_replicas_diverge(pipeline, stage, run.module)
        replicas = self._make_replicas(modules)
        tied = TiedParameters(ties, pipeline, modules, self._group.rank, self._open_mover, policy)
        tied.share_values()
        encoded = {replica.stage: replica.encoded for replica in replicas}
        self.sums = StageSums(encoded, find_reduce_scatters(modules), tied)
        parts = self._stages, replicas, tied, num_loss_shards, self._device, GradientPasses(self._stages)
        self._state = EngineState(self.rank, self.pp_rank, *parts)

    def _code(self, modules: Mapping[int, torch.nn.Module], pipelines: tuple[Pipeline, ...]) -> tuple[Pipeline, ...]:
        """Replace collectives of the modules by encoded ones. Returns the pipelines with the codecs of their edges."""
        policy, strategy = self._options.policy, self._options.strategy
        described = self.exchange(describe_modules(modules, self.schedule, self._options.tied_stages))
        check_policy(policy, list(described.values()), self._device)
        self.exchange(error=code_modules(modules, policy))
        self._topology = add_codec_rates(self._topology, self.exchange(measure_codecs(policy, self._topology)))
        return compress_pipelines(policy, self.schedule, pipelines, self._topology, strategy)

    def _open_mover(self, spec: TensorSpec) -> Mover:
        """A Mover of one tied parameter, which several stages send and receive."""
        plan = plan_tensors([spec], strategy=self._options.strategy, topology=self._topology)
        return Mover(plan, self._group, timeout_seconds=self._timeout_seconds, device=self._device, both_ways=True)

    def _make_replicas(self, modules: Mapping[int, torch.nn.Module]) -> tuple[ReplicaSync, ...]:
        """Make a ReplicaSync for each replicated stage of this rank, once all ranks train the same parameters.

        Any error is raised on all ranks. Else ranks of other stages would wait for this rank in their first step.
        """
        policy, rank = self._options.policy, self._group.rank
        replicas: tuple[ReplicaSync, ...] = ()
        failure: ReshardError | None = None
        try:
            replicas = tuple(
                ReplicaSync(
                    stage,
                    self._stages[stage].module,
                    self._group,
                    members,
                    self._device,
                    self._timeout_seconds,
                    compress_sums(policy, self._topology, members, rank, self._stages[stage].module),
                )
                for stage, members in find_replica_ranks(self._group, self.pipeline, self._stages).items()
            )
        except ReshardError as error:
            failure = error
        frozen = self.frozen_digests()
        shared = {str(stage): frozen[str(stage)] for stage, run in self._stages.items() if fsdp_ranks(run.module)}
        trained = training_of(self._options.ties, modules)
        gathered = sorted(self.exchange([trained, shared], failure).items())
        check_training(training for _, (trainings, _) in gathered for training in trainings)
        check_frozen({item: digests for item, (_, digests) in gathered})
        return replicas

    def make_program(
        self, schedule: Schedule, pipelines: Sequence[Pipeline], pipeline_of: Sequence[int]
    ) -> StepProgram:
        """Make the program of ``schedule`` for the tensor shapes of ``pipelines``. All ranks pass the same arguments.

        Args:
            schedule: a checked schedule with the pp ranks of this engine.
            pipelines: pipelines that differ from that of this engine in tensor shapes and costs only.
            pipeline_of: for each microbatch, the index of its pipeline.
        """
        check_runnable(schedule, self.pp_rank, self._stages, self._device)
        transfers = []
        for pipeline in pipelines:
            options = {"signal_only": self._options.signal_only}
            channels = plan_channels(
                pipeline, schedule.pp_rank_of_stage, self._topology, self._options.strategy, **options
            )
            for channel in channels:
                logger.debug("rank %d plans %s", self._group.rank, channel)
            transfers.append(
                StageTransfers(channels, self._group, self._timeout_seconds, device=self._device, **options)
            )
        program = StepProgram.of(
            schedule, pipelines, transfers, pipeline_of, self._group.rank, self.pp_rank, self._stages
        )
        return program.in_ready_order() if self._options.order == "ready" else program

    @_ending_step
    def step(self, feed: Feed | None = None, *, loss_weights: Sequence[float] | None = None) -> RankStepResult:
        """Run one iteration: forward and backward of every microbatch, then the all-reduces of gradients over replicas.

        Args:
            feed: ``{stage: [{name: tensor} per microbatch]}``, the inputs of this rank's stages that no edge brings.
                Other stages are ignored.
            loss_weights: weight of each microbatch's loss in the total, the same on all ranks; default: equal weights
                that sum to 1, with less for a smaller last microbatch.

        Raises:
            ReshardError: this rank or another failed. All ranks raise, and the engine cannot be used again.
        """
        step = self.run(self._program, lambda: self._read_inputs(feed, loss_weights, train=True))
        self.sums.count_step()
        return step

    @_ending_step
    def evaluate(self, feed: Feed | None = None, *, loss_weights: Sequence[float] | None = None) -> RankStepResult:
        """Run the forward of every microbatch without gradients. Arguments and errors are those of :meth:`step`.

        The engine does not change the mode of the modules: call ``module.eval()`` first if it matters.
        """
        return self.run(self._program, lambda: self._read_inputs(feed, loss_weights, train=False))

    def _read_inputs(self, feed: Feed | None, loss_weights: Sequence[float] | None, train: bool) -> StepInputs:
        num = self.schedule.num_microbatches
        feed = {} if feed is None else feed
        check_feed(feed, num, len(self.pipeline.stages))
        fed = {stage: feed.get(stage, ({},) * num) for stage in self._stages}
        return StepInputs(fed, read_loss_weights(loss_weights, num, self._last_weight), train=train)

    def run(self, program: StepProgram, inputs: StepInputs | Callable[[], StepInputs]) -> RankStepResult:
        """Run one iteration of a program, the same on all ranks.

        Args:
            program: the program.
            inputs: inputs of this rank, or a function that returns them.
        """
        self._group.check_usable()
        if self._closed:
            raise ArgumentError("this engine is closed")
        if self._error is not None:
            raise ArgumentError(f"this engine failed ({self._error}); make a new one") from self._error
        if not self._stepping.acquire(blocking=False):
            raise ArgumentError("this engine is already in a step, called by another thread or by one of its modules")
        try:
            self._rank_step = None
            self._rank_step = RankStep(self._state, program, inputs() if callable(inputs) else inputs)
            with publishing_lost_ranks(self._group, self._call_group):
                return self._rank_step.run()
        except BaseException as error:
            cause = self._find_cause(error)
            self.fail(program, cause)
            if cause is error:
                raise
            raise cause from error
        finally:
            self._stepping.release()

    def _find_cause(self, error: BaseException) -> BaseException:
        """The root cause of a broken connection, such as a rank that is gone; else the error itself."""
        try:
            if torch_compat.is_connection_error(error):  # of a collective inside a stage
                wait_for_root_cause(self._check_reported)
        except (ReshardError, RuntimeError) as cause:
            error = cause
        return explain_lost_store(self._group, error) if torch_compat.is_store_error(error) else error

    def _check_reported(self) -> None:
        """Raise the error that another rank reported, or one that names a lost rank; without these, do nothing."""
        if self._rank_step is not None:
            self._rank_step.check_errors()
        self._call_group.check_reported(self._call_group.generation)

    def fail(self, program: StepProgram, error: BaseException) -> None:
        """End a step on all ranks with the error of this rank. The engine cannot be used again."""
        self._error = error
        mark_published(error)
        doing = None if self._rank_step is None else self._rank_step.doing
        error = name_action(error, doing, self.schedule.name, self._group.rank)
        logger.debug("rank %d ends the step: %s", self._group.rank, error)
        for stage in self._stages.values():
            stage.forget()
        for transfers in program.transfers:
            transfers.fail(error)
        for replicas in self._state.replicas:
            replicas.fail(error)
        self._state.ties.fail(error)

    def interrupt(self, error: BaseException) -> None:
        """End a call on all ranks with the error of this rank, whatever they wait for."""
        self.fail(self._program, error)
        leave_interrupted(error, self._group)

    @property
    def rank(self) -> int:
        """The rank of this process in the group of the engine."""
        return self._group.rank

    def tied_training(self) -> list[tuple[int, str, bool]]:
        """See :meth:`TiedParameters.training`."""
        return self._state.ties.training()

    def frozen_digests(self) -> dict[str, str]:
        """For each stage of this rank, a digest of the names of its frozen parameters."""
        return {
            str(stage): hashlib.sha256(
                repr(
                    [name for name, parameter in run.module.named_parameters() if not parameter.requires_grad]
                ).encode()
            ).hexdigest()
            for stage, run in self._stages.items()
        }

    @property
    def topology(self) -> Topology:
        """Hosts and links of the ranks."""
        return self._topology

    def exchange(
        self, value: Any = None, error: BaseException | None = None, *, timeout_seconds: float | None = None
    ) -> dict[int, Any]:
        """The values of all ranks, by rank. Every rank of the pipeline must call this; the engine stays usable.

        Args:
            value: plain values that JSON can hold.
            error: an error of this rank, raised on all ranks.
            timeout_seconds: time limit for the other ranks, if longer than that of the engine.

        Raises:
            ReshardError: the error of the first rank that passes one, or a rank does not call.
        """
        self._group.check_usable()
        failure = None if error is None else describe_error(error)
        request = RoundRequest(self._group.rank, hostname=self._group.hostname, error=failure, payload=value)
        seconds = max(self._timeout_seconds, timeout_seconds or 0.0)
        _, decision = self._call_group.agree(request, gather_values, seconds)
        return dict(decision.payloads)

    def timeline(self) -> PipelineTimeline:
        """Measured times of the last step, of all pp ranks. Every rank of the pipeline must call this.

        Raises:
            ArgumentError: there was no step yet.
            TransferTimeoutError: another rank does not call.
        """
        if self._rank_step is None:
            raise ArgumentError("there is no timeline before the first step")
        return gather_timeline(self._rank_step.measured, self._call_group, self._timeout_seconds)

    def close(self) -> None:
        """Stop the threads that move tensors."""
        self._closed = True
        self._program.close()
        self._state.ties.close()

    def __enter__(self) -> ScheduleEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
