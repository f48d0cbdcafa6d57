"""Find a training plan for a preset: measure the layers of its model on one rank, then search."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from reshard.cli.progress_bars import show_elapsed
from reshard.codecs import measure_rates, parse_codec
from reshard.compression import Policy, parse_policy
from reshard.coordination import all_gather_json, describe_error, rebuild_error
from reshard.errors import ArgumentError, RemoteError, ReshardError
from reshard.topology import MACHINES, CodecRate, Topology

from ..autoparallel import (
    ChoiceRules,
    Cluster,
    LayerProfile,
    StateBytes,
    TrainingPlan,
    profile_layers,
    trace_module,
    tune,
)
from ..autoparallel.costs.search_problem import SearchProblem
from ..autoparallel.modules.layer_tracing import TracedModel
from ..autoparallel.search_command import find_topology, parse_bytes, parse_fixed
from ..autoparallel.searching import choose_training_plan, make_problem, warn_if_noisy
from ..autoparallel.tuning import Measurement, Tuned
from .loop import TrainingJob, make_loaders, make_pipe
from .models.making import layer_paths, make_model
from .models.model_presets import GPTConfig

#: Numbers of samples for which a forward is measured. Numbers above the samples of a step are skipped.
SAMPLE_COUNTS = (1, 2, 4, 8)
#: Number of measured steps of a training plan.
MEASURED_STEPS = 3
#: Bytes per parameter of AdamW with float32 parameters and gradients.
STATES = StateBytes(4.0, 4.0, 8.0)
#: Fraction of the memory of a device that a training plan may use unless ``--memory`` is given.
USABLE = 0.9
#: Rate inside a host if no topology is given, in bytes per second.
INSIDE_BYTES_PER_SECOND = 5e9


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search for a training plan, in addition to the preset.

    Attributes:
        devices: number of ranks; None: the number of ranks of the topology.
        topology: name of a machine, or path of a topology file; None: one host.
        memory: memory limit of a device, such as ``"16GB"``; None: :data:`USABLE` of what it has.
        fixed: ``(name, value)`` pairs of fixed parts, see :func:`reshard.scheduler.autoparallel.search`.
        measures: whether to run steps of the chosen training plan, correct the layer times by them, and search again.
        output: path of the file for the training plan; None: none.
        compression: text of a policy whose codecs the training plan may use; None: none.
    """

    devices: int | None = None
    topology: str | None = None
    memory: str | None = None
    fixed: tuple[tuple[str, int], ...] = ()
    measures: bool = False
    output: str | None = None
    compression: str | None = None

    @classmethod
    def of(cls, options: Any) -> SearchOptions:
        """Read the options of the command line, which have been checked."""
        fixed = parse_fixed(options.fixed)
        if options.num_microbatches is not None:
            fixed.setdefault("num_microbatches", options.num_microbatches)
        return cls(
            options.devices,
            options.topology,
            options.memory,
            tuple(sorted(fixed.items())),
            options.plan == "tune",
            options.save_plan,
            None if options.compression is None else str(parse_policy(options.compression)),
        )

    def find_topology(self, num_ranks: int | None) -> Topology:
        """The hosts and links of all ranks.

        Args:
            num_ranks: number of ranks that a launcher has started; None if there is no launcher.

        Raises:
            ArgumentError: the number of ranks is unknown or differs from ``num_ranks``, or the ranks are on several
                hosts and no topology is given.
        """
        devices = self.devices if self.devices is not None else num_ranks
        if self.topology is None:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", devices or 0))
            if devices is None:
                raise ArgumentError("--plan auto needs --devices N, the number of ranks, or --topology FILE")
            if num_ranks is not None and local < num_ranks:
                raise ArgumentError(
                    f"the launcher started {num_ranks} ranks with {local} on each host; pass --topology with the rates "
                    "of the links between hosts"
                )
            topology = replace(Topology.uniform((0,) * devices), inside_bytes_per_second=INSIDE_BYTES_PER_SECOND)
        else:
            topology = find_topology(self.topology, devices if self.topology in MACHINES else None)
        if num_ranks is not None and num_ranks != (self.devices or len(topology.host_of_rank)):
            raise ArgumentError(
                f"the training plan is for {self.devices or len(topology.host_of_rank)} devices, but the launcher "
                f"started {num_ranks} ranks"
            )
        return topology


def trace_job(job: TrainingJob) -> TracedModel:
    """Trace the model of a job, cut into layers before each path of :func:`layer_paths`."""
    config = job.preset.config
    return trace_module(
        make_model(config),
        make_loaders(job)[0].batch(0),
        layer_paths(config),
        max_tp=config.num_heads & -config.num_heads if isinstance(config, GPTConfig) else 1,
        name=job.name,
        autocast=getattr(torch, job.preset.autocast) if job.preset.autocast else None,
    )


def profile_job(traced: TracedModel, job: TrainingJob) -> LayerProfile:
    """Measure the layers on the device of this process."""
    sample_counts = [num_samples for num_samples in SAMPLE_COUNTS if num_samples <= job.preset.num_samples]
    with show_elapsed("measuring layers") as report:
        return profile_layers(traced, job.device, sample_counts=sample_counts, repeats=3, progress=report)


def find_cluster(options: SearchOptions, device: str, num_ranks: int | None) -> Cluster:
    """The devices of a search.

    The default memory limit is :data:`USABLE` of this GPU's free memory, or of a rank's share of this host's memory.
    """
    topology = options.find_topology(num_ranks)
    if options.memory is not None:
        memory = parse_bytes(options.memory)
    elif device == "cuda":
        memory = USABLE * torch.cuda.mem_get_info()[0]
    else:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = USABLE * whole / max(len(topology.ranks_of_host(host)) for host in range(topology.num_hosts))
    return Cluster(topology, memory, options.devices or 0)


def make_job_problem(job: TrainingJob, options: SearchOptions, num_ranks: int | None = None) -> SearchProblem:
    """The search problem of a job, with layer times that this process measures."""
    cluster = find_cluster(options, job.device, num_ranks)
    policy = None
    if options.compression is not None:
        policy = parse_policy(options.compression)
        cluster = replace(cluster, topology=_with_rates(cluster.topology, policy, job.device))
    traced = trace_job(job)
    profile = profile_job(traced, job)
    problem = make_problem(
        traced.graph, cluster, profile, job.preset.num_samples, dict(options.fixed), STATES, ChoiceRules()
    )
    warn_if_noisy(problem)
    return problem.changed(compression=policy)


def _with_rates(topology: Topology, policy: Policy, device: str) -> Topology:
    """The topology with the rates of all codecs of a policy; this process measures the missing ones.

    Raises:
        ArgumentError: the device is not a CPU; engines code CPU tensors only.
    """
    if device != "cpu":
        raise ArgumentError(f"engines code CPU tensors only, so --compression {policy} cannot be used on {device}")
    known = {rate.codec for rate in topology.codec_rates}
    wanted = {policy.dp, policy.tp, *policy.pair("pp"), *policy.pair("zero")} - known - {None}
    measured = tuple(CodecRate(name, *measure_rates(parse_codec(name))) for name in sorted(map(str, wanted)))
    return replace(topology, codec_rates=(*topology.codec_rates, *measured))


def find_training_plan(job: TrainingJob, options: SearchOptions, num_ranks: int | None = None) -> TrainingPlan:
    """Measure the layers of a job in this process, and search.

    Raises:
        ArgumentError: no training plan fits the memory, or the options contradict each other.
    """
    problem = make_job_problem(job, options, num_ranks)
    with show_elapsed("searching"):
        return choose_training_plan(problem)


def tune_training_plan(rank: int, job: TrainingJob, options: SearchOptions) -> Tuned | TrainingPlan:
    """Search, run steps of the choice on all ranks, correct the layer times, and search again. Every rank calls this.

    Rank 0 measures the layers and searches. All ranks run the training plans that it chooses.

    Returns:
        What was tried, on rank 0; the training plan, on other ranks.

    Raises:
        ArgumentError: rank 0 finds no training plan that fits. Every rank raises the same error.
    """
    if rank:
        while True:
            training_plan, is_last = share_training_plan(None)
            if is_last:
                return training_plan
            measure_steps(rank, replace(job, training_plan=training_plan))
    is_measuring = False

    def measure(training_plan: TrainingPlan) -> Measurement:
        nonlocal is_measuring
        is_measuring = True  # an error in here ends all ranks, so none waits for a training plan
        share_training_plan(training_plan, is_last=False)
        measured = measure_steps(rank, replace(job, training_plan=training_plan))
        is_measuring = False
        return measured

    try:
        problem = make_job_problem(job, options, dist.get_world_size())
        with show_elapsed("searching and measuring steps"):
            tuned = tune(problem, choose_training_plan, measure)
    except Exception as error:
        if not is_measuring:
            own = RemoteError(f"rank 0 cannot search: {type(error).__name__}: {error}")
            with contextlib.suppress(ReshardError):
                share_training_plan(error if isinstance(error, ReshardError) else own)
        raise
    share_training_plan(tuned.training_plan)
    return tuned


def share_training_plan(
    plan_or_error: TrainingPlan | ReshardError | None, is_last: bool = True
) -> tuple[TrainingPlan, bool]:
    """The training plan of rank 0, and its ``is_last``, on all ranks. Every rank calls this.

    Args:
        plan_or_error: the training plan, or why there is none; ignored on other ranks than 0.
        is_last: whether no more follow.

    Raises:
        ReshardError: rank 0 passes an error.
    """
    is_error = isinstance(plan_or_error, ReshardError)
    text = (
        describe_error(plan_or_error)
        if isinstance(plan_or_error, ReshardError)
        else None
        if plan_or_error is None
        else plan_or_error.to_json()
    )
    value, is_last, is_error = all_gather_json([text, is_last, is_error])[0]
    if is_error:
        raise rebuild_error(*value)
    return TrainingPlan.from_json(value), is_last


def measure_steps(rank: int, job: TrainingJob) -> Measurement:
    """Measure steps on the first batch, after a warm-up. Every rank calls this.

    Each measured step runs twice: first for its seconds (of the slowest rank), then for its timeline.
    """
    device = torch.device(job.device, torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")
    batch = {name: value.to(device) for name, value in make_loaders(job)[0].batch(0).items()}
    seconds, timelines = [], []
    with make_pipe(job).compile(batch, device=device) as engine:
        for step in range(1 + MEASURED_STEPS):
            begun = time.perf_counter()
            engine.step(batch)
            if job.device == "cuda":
                torch.cuda.synchronize()
            took = [time.perf_counter() - begun]
            result = engine.step(batch, timeline=True)
            if step and result.timeline is not None:
                slowest = torch.tensor(took)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                seconds.append(float(slowest))
                timelines.append(result.timeline)
    return Measurement(tuple(seconds), tuple(timelines))
