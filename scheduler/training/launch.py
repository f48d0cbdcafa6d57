"""Start the ranks of a training run: as local processes, as processes of torchrun, or as actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from reshard.errors import ArgumentError
from reshard.testing import run_processes

from ..pipe.placement import parse_placements
from .loop import Job, TrainResult, make_loaders, make_pipe, train

if TYPE_CHECKING:
    from reshard.ray import ActorMesh

#: The longest time that the ranks may run.
_FOREVER_SECONDS = 1e6
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def launch(job: Job, device: str, on_ray: bool) -> TrainResult | None:
    """Train on all ranks of a job. Under torchrun, this process is one of them.

    Args:
        job: its device is replaced. device: "cpu", "cuda", or "auto" for CUDA if every rank can have a GPU.
        on_ray: start the ranks as actors of the Ray cluster to which this process is or can be connected.

    Returns:
        The result; None on other ranks than the first.

    Raises:
        ArgumentError: the options do not fit each other, the launcher or the machines.
        RemoteError: an actor died.
    """
    _ = make_loaders(job), make_pipe(job)  # errors of the options before any process starts
    num_ranks = sum(each.size for each in parse_placements(job.stages))
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if on_ray:
        if under_torchrun:
            raise ArgumentError("--launcher ray starts the ranks itself; run it without torchrun")
        return _train_on_ray(job, device, num_ranks)
    job = replace(job, device=_find_local_device(device, num_ranks))
    if under_torchrun:
        return _join_launcher(job, num_ranks)
    if job.device == "cpu":
        result: TrainResult = run_processes(train, num_ranks, job, timeout_seconds=_FOREVER_SECONDS)[0]
        return result
    arguments = num_ranks, job
    return run_processes(_train_on_gpu, num_ranks, *arguments, timeout_seconds=_FOREVER_SECONDS, init_group=False)[0]


def _find_local_device(wanted: str, num_ranks: int) -> str:
    """The device type of local ranks. Counting GPUs must not initialize CUDA, because local processes are forked."""
    if wanted == "cpu":
        return "cpu"
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if num_gpus < num_local and wanted == "cuda":
        raise ArgumentError(f"--device cuda needs {num_local} GPUs on this machine, which has {num_gpus}")
    return "cuda" if num_gpus >= num_local else "cpu"


def _join_launcher(job: Job, num_ranks: int) -> TrainResult | None:
    """Train as one rank of torchrun."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != num_ranks:
        raise ArgumentError(f"the stages {job.stages} need {num_ranks} ranks, but the launcher started {size}")
    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    dist.init_process_group(_BACKENDS[job.device])
    try:
        result = train(rank, job)
    finally:
        dist.destroy_process_group()
    return result if rank == 0 else None


def _train_on_gpu(rank: int, port: int, num_ranks: int, job: Job) -> TrainResult:
    """Train on one of the local processes, each with a GPU of its own."""
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(_BACKENDS["cuda"], store=store, rank=rank, world_size=num_ranks)
    return train(rank, job)


def _train_on_ray(job: Job, wanted: str, num_ranks: int) -> TrainResult:
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
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    if wanted == "cuda" and num_gpus < num_ranks:
        raise ArgumentError(f"--device cuda needs {num_ranks} GPUs in the Ray cluster, which has {num_gpus}")
    device = "cuda" if wanted != "cpu" and num_gpus >= num_ranks else "cpu"
    data, checkpoint = (None if path is None else str(Path(path).absolute()) for path in (job.data, job.checkpoint))
    job = replace(job, device=device, data=data, checkpoint=checkpoint)
    with contextlib.ExitStack() as stack:
        meshes: list[ActorMesh] = [
            stack.enter_context(
                ActorMesh(
                    tuple(each.axis_sizes.values()), name=f"stage {number}", num_gpus=1.0 if device == "cuda" else 0.0
                )
            )
            for number, each in enumerate(parse_placements(job.stages))
        ]
        results = run(meshes, train, job, timeout_seconds=_FOREVER_SECONDS, backend=_BACKENDS[device])
    result: TrainResult = results[0]
    return result
