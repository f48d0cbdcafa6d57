"""Start ranks that share the GPUs of this machine. With ``RESHARD_GPU_TESTS_ON=cpu`` the tests here run without a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from reshard.testing import run_processes, share_gpus
from tests.support.devices import HAS_GPU

DEVICE = os.environ.get("RESHARD_GPU_TESTS_ON", "cuda")
#: Collectives of CUDA tensors run on NCCL, as in users' programs. In torch 2.11, those on Gloo can crash the process.
BACKEND = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"
RANKS = 4
#: For the ``pytestmark`` of each file.
MARKS = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cuda" and not HAS_GPU, reason="this machine has no NVIDIA GPU")]


def set_up(rank):
    """Choose the GPU of a rank, before it uses CUDA or NCCL."""
    os.environ.setdefault("NCCL_DEBUG", "WARN")  # NCCL prints its version, and which call failed
    if DEVICE == "cuda":
        share_gpus(rank)


def on_ranks(rank, port, num_ranks, function, *args):
    set_up(rank)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group(BACKEND, store=store, rank=rank, world_size=num_ranks)
    result = function(rank, *args)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return result


def run(function, *args, ranks=RANKS, **options):
    """The results of ``function(rank, ...)`` on all ranks."""
    options = {"timeout_seconds": 120.0, **options}
    return run_processes(on_ranks, ranks, ranks, function, *args, init_group=False, **options)


def to_device(values):
    """The tensors of a tensor, list, tuple or dict, on the device of the tests."""
    if isinstance(values, torch.Tensor):
        return values.to(DEVICE)
    if isinstance(values, dict):
        return {key: to_device(value) for key, value in values.items()}
    return type(values)(map(to_device, values))
