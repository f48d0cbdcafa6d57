"""Let several ranks of a machine use one GPU."""

from __future__ import annotations

import os

import torch

from reshard.errors import ArgumentError
from reshard.formatting import count_of


def share_gpus(rank: int) -> torch.device:
    """Choose a GPU for this rank, to try out a program on few GPUs. Other ranks of this machine may use the same GPU.

    Call it on every rank before ``init_process_group`` and before any other use of CUDA. All ranks must be on one
    machine. It sets NCCL_HOSTID, and NCCL_MULTI_RANK_GPU_ENABLE, NCCL_SOCKET_IFNAME and NCCL_IB_DISABLE unless they are
    set: to NCCL, each rank is then a different host, and ranks exchange data over sockets of the loopback interface.
    Use it to test correctness, not speed.

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


#: Allow several ranks per GPU (newer NCCL), and use sockets of the loopback interface. Older NCCL rejects two ranks of
#: one host on one GPU, so NCCL_HOSTID also makes each rank a separate host.
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
    needed = 1 if shares_gpus else num_ranks
    if num_gpus < needed:
        how = "; with --share-gpus, ranks share them, which is slow" if num_gpus else ""
        raise ArgumentError(f"--device cuda needs {count_of(needed, 'GPU')} on this machine, which has {num_gpus}{how}")
