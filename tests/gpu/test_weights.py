"""Whole models on GPUs: versions from a trainer with FSDP to engines, and from one sharding to another in a job."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard.testing import run_processes
from reshard.weights import Publisher, Subscriber, transfer_state_dict
from tests.gpu.ranks import BACKEND, DEVICE, MARKS, run, set_up

pytestmark = MARKS
VERSIONS = 3


def make_model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(13, 6), torch.nn.Linear(6, 5, bias=False), torch.nn.Linear(5, 40001, bias=False)
    ).to(DEVICE)


def wholes(model):
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }


def shard_for_engine(model):
    return parallelize_module(model, init_device_mesh(DEVICE, (2,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})


def publish_or_subscribe(rank, port):
    """Ranks 0 and 1 train; 2 and 3 are an engine with tensor parallelism, 4 an engine in host memory."""
    set_up(rank)
    raw = dist.TCPStore("127.0.0.1", port, is_master=False)
    role, inner = ("trainer", rank) if rank < 2 else ("engine", rank - 2)
    if rank < 4:
        dist.init_process_group(BACKEND, store=dist.PrefixStore(role, raw), rank=inner, world_size=2)
    if rank < 2:
        model = make_model(1)
        fully_shard(model, mesh=init_device_mesh(DEVICE, (2,)))
        seen = []
        with Publisher(model, raw) as publisher:
            while not raw.check(["ready2", "ready4"]):
                time.sleep(0.02)
            for version in range(1, VERSIONS + 1):
                with torch.no_grad():
                    for value in model.parameters():
                        value.to_local().add_(1)
                handle = publisher.publish(version)
                with torch.no_grad():  # the optimizer goes on at once
                    for value in model.parameters():
                        value.to_local().mul_(2)
                report = handle.wait(60)
                with torch.no_grad():
                    for value in model.parameters():
                        value.to_local().div_(2)
                seen.append(sorted(report.engines.values()))
        return seen
    wanted = make_model(1).state_dict()
    model = make_model(2)
    model = shard_for_engine(model) if rank < 4 else model.cpu()
    with Subscriber(model, raw) as subscriber:
        raw.set(f"ready{rank}", "")
        while subscriber.version is None or subscriber.version < VERSIONS:
            version = subscriber.update(60)
            for name, value in wholes(model).items():
                torch.testing.assert_close(value.to(DEVICE), wanted[name] + version, rtol=1e-6, atol=1e-6)
    return subscriber.version


def test_versions_reach_engines_on_gpus_and_in_host_memory():
    results = run_processes(publish_or_subscribe, 5, init_group=False)
    assert results == [[["", ""]] * VERSIONS] * 2 + [VERSIONS] * 3


def transfer(rank):
    expected = make_model(1).state_dict()
    source, target = make_model(1), make_model(2)
    fully_shard(source, mesh=init_device_mesh(DEVICE, (2,)))
    transfer_state_dict(source, shard_for_engine(target))
    for name, value in wholes(target).items():
        assert torch.equal(value, expected[name]), name


def test_state_dicts_move_between_shardings():
    run(transfer, ranks=2)
