"""Start the ranks of a training run: as local processes, as processes of torchrun, or as actors of a Ray cluster."""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reshard.errors import ArgumentError, RemoteError, ReshardError
from reshard.formatting import describe_ranks
from reshard.testing import LaunchError, run_processes
from reshard.testing.sharing import check_num_gpus, choose_gpu, count_gpus

from ..autoparallel import TrainingPlan
from ..autoparallel.tuning import Tuned
from .cpu_limits import describe_shared_cores, describe_slow_float16, read_flags
from .loop import TrainingJob, TrainResult, check_order, check_resumed, make_loaders, make_pipe, train
from .plan_search import SearchOptions, find_training_plan, share_training_plan, tune_training_plan
from .training_report import check_report

if TYPE_CHECKING:
    from reshard.ray import ActorMesh

#: The longest time that the ranks may run.
_FOREVER_SECONDS = 1e6
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def launch(
    job: TrainingJob, device: str, on_ray: bool, options: SearchOptions | None = None, shares_gpus: bool = False
) -> TrainResult | None:
    """Train on all ranks of a job. Under torchrun, this process is one of them.

    Args:
        job: its device is replaced.
        device: "cpu", "cuda", or "auto" for CUDA if every rank can have a GPU.
        on_ray: start the ranks as actors of the Ray cluster to which this process is or can be connected.
        options: search for the training plan of the job first, on one rank, or on all if its steps are measured too.
        shares_gpus: let ranks share GPUs, see :func:`reshard.testing.share_gpus`.

    Returns:
        The result; None on other ranks than the first.

    Raises:
        ArgumentError: the options do not fit each other, the launcher or the machines.
        RemoteError: a rank or an actor died.
        LaunchError: ranks failed because of a fault of the program; the text has their tracebacks.
    """
    make_loaders(job)  # raises errors of the options before any process starts
    check_resumed(job)
    if options is None:
        check_order(job)
        make_pipe(job)
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if job.report is not None and not on_ray and (not under_torchrun or os.environ["RANK"] == "0"):
        check_report(job.report)
    if on_ray:
        if under_torchrun:
            raise ArgumentError("--launcher ray starts the ranks itself; run it without torchrun")
        if shares_gpus:
            raise ArgumentError("--share-gpus is for ranks on this machine; omit it or --launcher ray")
        return _train_on_ray(job, device, options)
    if under_torchrun:
        return _join_launcher(_with_local_device(job, device, 1, shares_gpus), options, shares_gpus)
    num_ranks = (
        sum(map(math.prod, job.shapes))
        if options is None
        else options.devices or len(options.find_topology(None).host_of_rank)
    )
    job = _with_local_device(job, device, num_ranks, shares_gpus)
    if options is not None:
        if options.measures:
            job = _with_training_plan(job, options, _tune_locally(job, options, num_ranks, shares_gpus))
        else:
            job = _with_training_plan(job, options, _run_alone(find_training_plan, job, options))
    num_ranks = sum(map(math.prod, job.shapes))
    job = replace(job, device=_find_local_device(device, num_ranks, shares_gpus))
    if job.device == "cpu":
        if job.training_plan is not None and (options is None or not options.measures):
            _print_if_any(describe_shared_cores(num_ranks))
        result: TrainResult = run_locally(train, num_ranks, job)
        return result
    return run_locally(_on_gpu, num_ranks, num_ranks, shares_gpus, train, job, init_group=False)


def _print_if_any(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)


def run_locally(function: Callable[..., Any], num_ranks: int, *args: Any, init_group: bool = True) -> Any:
    """The result of rank 0 of local processes. An error that users can cause is raised without tracebacks."""
    try:
        return run_processes(function, num_ranks, *args, timeout_seconds=_FOREVER_SECONDS, init_group=init_group)[0]
    except LaunchError as error:
        raise summarize_failures(error) from None


def summarize_failures(error: LaunchError) -> ReshardError:
    """One error for all ranks that failed.

    If all ranks raised the same error of this package, it is that error. If ranks died or raised different errors, it
    is a RemoteError with the first line of each. It is ``error``, with tracebacks, if no rank died and a rank raised an
    error that is not ours.
    """
    died = any(failure.error is None for failure in error.failures)
    if not died and not all(isinstance(failure.error, ReshardError) for failure in error.failures):
        return error
    ranks_of: dict[str, list[int]] = {}
    for failure in error.failures:
        raised = failure.error
        first_line = str(raised).partition("\n")[0]
        kind = "" if isinstance(raised, RemoteError) else f"{type(raised).__name__}: "
        text = failure.text if raised is None else f"{kind}{first_line}"
        ranks_of.setdefault(text, []).append(failure.rank)
    first = error.failures[0].error
    if not died and len(ranks_of) == 1 and isinstance(first, ReshardError):
        return first
    return RemoteError("\n".join(f"{describe_ranks(ranks)}: {text}" for text, ranks in ranks_of.items()))


def _find_local_device(wanted: str, num_ranks: int, shares_gpus: bool) -> str:
    """The device type of local ranks."""
    if shares_gpus and wanted != "cuda":
        raise ArgumentError("--share-gpus needs --device cuda")
    if wanted == "cpu":
        return "cpu"
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if wanted == "cuda":
        check_num_gpus(num_local, shares_gpus)
    return "cuda" if shares_gpus or count_gpus() >= num_local else "cpu"


def _with_local_device(job: TrainingJob, wanted: str, num_ranks: int, shares_gpus: bool) -> TrainingJob:
    """The job on the device type of local ranks, after a warning if it will be slow there."""
    job = replace(job, device=_find_local_device(wanted, num_ranks, shares_gpus))
    if os.environ.get("RANK", "0") == "0":
        _print_if_any(describe_slow_float16(job.device, job.preset.autocast, read_flags()))
    return job


def _run_alone(function: Callable[..., Any], job: TrainingJob, *args: Any) -> Any:
    """Run ``function(job, ...)`` in a separate process. This process can still fork, and has no CUDA context."""
    return run_locally(_call, 1, function, job, *args, init_group=False)


def _call(_rank: int, _port: int, function: Callable[..., Any], job: TrainingJob, *args: Any) -> Any:
    if job.device == "cuda":
        torch.cuda.set_device(0)
    return function(job, *args)


def _tune_locally(job: TrainingJob, options: SearchOptions, num_ranks: int, shares_gpus: bool) -> Tuned:
    on_gpu = job.device == "cuda"
    function, more = (_on_gpu, (num_ranks, shares_gpus, tune_training_plan)) if on_gpu else (tune_training_plan, ())
    tuned: Tuned = run_locally(function, num_ranks, *more, job, options, init_group=not on_gpu)
    return tuned


def _with_training_plan(
    job: TrainingJob, options: SearchOptions, plan_or_tuned: TrainingPlan | Tuned, shows: bool = True
) -> TrainingJob:
    """The job with the training plan that was found, which is shown and saved."""
    training_plan = plan_or_tuned.training_plan if isinstance(plan_or_tuned, Tuned) else plan_or_tuned
    if shows:
        print(plan_or_tuned, file=sys.stderr)
        if options.output is not None:
            training_plan.save(options.output)
    return replace(job, training_plan=training_plan)


def _join_launcher(job: TrainingJob, options: SearchOptions | None, shares_gpus: bool) -> TrainResult | None:
    """Train as one rank of torchrun."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    num_ranks = size if options is not None else sum(map(math.prod, job.shapes))
    if size != num_ranks:
        what = f"the stages {job.stages}" if job.training_plan is None else "the training plan"
        raise ArgumentError(
            f"{what} need{'s' * (job.training_plan is not None)} {num_ranks} ranks, but the launcher started {size}"
        )
    if job.device == "cuda":
        choose_gpu(rank, int(os.environ.get("LOCAL_RANK", rank)), shares_gpus)
    atexit.register(_skip_last_collection)
    dist.init_process_group(_BACKENDS[job.device])
    try:
        if options is not None:
            job = _with_training_plan(job, options, _find_on_all_ranks(job, options), shows=rank == 0)
        result = train(rank, job)
    finally:
        dist.destroy_process_group()
    return result if rank == 0 else None


def _skip_last_collection() -> None:
    """Spare the end of Python a search of all objects for cycles, which takes a second or more.

    With Triton, Python must search: otherwise Triton reports objects that remain, in some 30 lines of each rank.
    """
    if sys.modules.get("triton") is None:
        gc.freeze()


def _find_on_all_ranks(job: TrainingJob, options: SearchOptions) -> TrainingPlan | Tuned:
    """The training plan that rank 0 finds, or its error, on all ranks alike; on rank 0 what was tried, too."""
    if options.measures:
        return tune_training_plan(dist.get_rank(), job, options)
    plan_or_error: TrainingPlan | ReshardError | None = None
    if dist.get_rank() == 0:
        try:
            plan_or_error = find_training_plan(job, options, dist.get_world_size())
        except ArgumentError as error:
            plan_or_error = error
    return share_training_plan(plan_or_error)[0]


def _on_gpu(rank: int, port: int, num_ranks: int, shares_gpus: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(rank, ...)`` on one of the local processes, each with its own GPU unless they share them."""
    choose_gpu(rank, rank, shares_gpus)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(_BACKENDS["cuda"], store=store, rank=rank, world_size=num_ranks)
    return function(rank, *args)


def _search_on_actor(_rank: int, job: TrainingJob, options: SearchOptions) -> TrainingPlan:
    return find_training_plan(job, options)


def _train_on_ray(job: TrainingJob, wanted: str, options: SearchOptions | None) -> TrainResult:
    """Train on actors: one mesh of actors per stage, on one node. Files must be at the same paths on all nodes."""
    try:
        import ray

        from reshard.ray import ActorMesh, run
    except ImportError:
        raise ArgumentError("--launcher ray needs Ray: pip install 'reshard[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"))
        except ConnectionError:
            raise ArgumentError(
                "--launcher ray finds no Ray cluster: run `ray start --head` on this machine, or set RAY_ADDRESS"
            ) from None
    if options is not None:
        num_ranks = options.devices or len(options.find_topology(None).host_of_rank)
    else:
        num_ranks = sum(map(math.prod, job.shapes))
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    if wanted == "cuda" and num_gpus < num_ranks:
        raise ArgumentError(f"--device cuda needs {num_ranks} GPUs in the Ray cluster, which has {num_gpus}")
    device = "cuda" if wanted != "cpu" and num_gpus >= num_ranks else "cpu"
    paths = {name: getattr(job, name) for name in ("data", "checkpoint", "dump", "report")}
    paths = {name: None if path is None else str(Path(path).absolute()) for name, path in paths.items()}
    job = replace(job, device=device, **paths)
    gpus = 1.0 if device == "cuda" else 0.0
    if options is not None:
        shape, function = ((1, num_ranks), tune_training_plan) if options.measures else ((1, 1), _search_on_actor)
        with ActorMesh(shape, name="search", num_gpus=gpus) as actors:
            returned = run(
                [actors], function, job, options, timeout_seconds=_FOREVER_SECONDS, backend=_BACKENDS[device]
            )
        job = _with_training_plan(job, options, returned[0])
    with contextlib.ExitStack() as stack:
        meshes: list[ActorMesh] = [
            stack.enter_context(ActorMesh(shape, name=f"stage {number}", num_gpus=gpus))
            for number, shape in enumerate(job.shapes)
        ]
        results = run(meshes, train, job, timeout_seconds=_FOREVER_SECONDS, backend=_BACKENDS[device])
    result: TrainResult = results[0]
    return result
