"""Models of a trainer and of engines whose values tell their version, and the store that they share."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def make_model(seed):
    torch.manual_seed(seed)
    # the last layer is too large to travel with others
    return torch.nn.Sequential(
        torch.nn.Linear(13, 7), torch.nn.Linear(7, 5, bias=False), torch.nn.Linear(5, 4001, bias=False)
    )


def whole_tensors(model):
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in model.state_dict().items()
    }


def tensors_of_version(version):
    """The tensors of ``make_model`` in a version: those of version 0 plus its number."""
    return {name: value + version for name, value in make_model(1).state_dict().items()}


def is_version(model, version):
    return all(torch.equal(value, tensors_of_version(version)[name]) for name, value in whole_tensors(model).items())


def connect(store, place, rank, size):
    """Connect a process to the store. If the trainer or engine has several ranks, start its process group.

    Args:
        place: its name and the number of this rank in it, if it has several.
    """
    raw = dist.TCPStore("127.0.0.1", store.ports[rank], is_master=False)
    if size > 1:
        name, number = place
        dist.init_process_group("gloo", store=dist.PrefixStore(name, raw), rank=number, world_size=size)
    return raw


def make_trainer_model(size):
    model = make_model(1)
    if size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return model


def set_version(model, version):
    with torch.no_grad():
        for name, value in model.state_dict().items():
            whole = tensors_of_version(version)[name]
            if isinstance(value, DTensor):
                size, rank = dist.get_world_size(), dist.get_rank()
                parts = whole.chunk(size)
                value.to_local().copy_(parts[rank] if rank < len(parts) else whole[:0])
            else:
                value.copy_(whole)


def wait_for_key(raw, key, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not raw.check([key]):
        assert time.monotonic() < deadline, key
        time.sleep(0.02)
