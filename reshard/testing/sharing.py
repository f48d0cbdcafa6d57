"""Let several ranks of a machine use one GPU."""

from __future__ import annotations

import os

import torch

from reshard.errors import ArgumentError


def share_gpus(rank: int) -> torch.device:
    """Choose a GPU for this rank that other ranks of this machine may use too, to try out a program on few GPUs.

    Call it on every rank before ``init_process_group`` and before any other use of CUDA. To NCCL, each rank is then a
    different host, and ranks exchange data over sockets of the loopback interface. That shows what is right, not what
    is fast.

    Args:
        rank: rank in the world. GPUs are assigned in turn.

    Returns:
        The device, which is now the current one.

    Raises:
        ArgumentError: torch finds no GPU.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise ArgumentError("torch finds no GPU on this machine that ranks could share")
    os.environ["NCCL_HOSTID"] = f"reshard-{rank}"
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", rank % num_gpus)
    torch.cuda.set_device(device)
    return device


#: NCCL refuses two ranks of a host on one GPU, and a direct path needs one process per GPU.
_SETTINGS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def choose_gpu(rank: int, local_rank: int, shares_gpus: bool) -> None:
    """Make the GPU of a rank the current one: its own, or one that it shares."""
    if shares_gpus:
        share_gpus(rank)
    else:
        torch.cuda.set_device(local_rank)


def count_gpus() -> int:
    """The number of GPUs of this machine. CUDA is not initialized, so this process can still fork."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_num_gpus(num_ranks: int, shares_gpus: bool) -> None:
    """Raise ArgumentError unless this machine has a GPU for every rank, or at least one if ranks may share them."""
    num_gpus = count_gpus()
    if num_gpus < (1 if shares_gpus else num_ranks):
        how = "; with --share-gpus, ranks share them, which is slow" if num_gpus else ""
        raise ArgumentError(f"--device cuda needs {num_ranks} GPUs on this machine, which has {num_gpus}{how}")
