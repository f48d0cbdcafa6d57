"""A rank of a trainer is killed while a version is on its way: replicas of its weights serve, or nothing changes."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from reshard.errors import ReshardError, TransferTimeoutError
from reshard.testing.processes import LaunchError, run_processes
from reshard.weights import Publisher, Subscriber
from reshard.weights.routes.route import Route
from tests.support.pausable_store import PausableStore
from tests.support.versioned_models import wait_for_key

pytestmark = pytest.mark.integration


def _model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(13, 7), torch.nn.Linear(7, 4001, bias=False))


def _expected(version):
    return {name: value + version for name, value in _model().state_dict().items()}


def _set_version(model, version):
    with torch.no_grad():
        for name, value in model.state_dict().items():
            found = _expected(version)[name]
            if isinstance(value, DTensor):
                mesh = value.device_mesh
                parts = found.chunk(mesh.size(mesh.ndim - 1))
                at = mesh.get_coordinate()[-1]
                found, value = parts[at] if at < len(parts) else found[:0], value.to_local()
            value.copy_(found)


def _is_version(model, version):
    return all(torch.equal(value, _expected(version)[name]) for name, value in model.state_dict().items())


def _train(rank, _, kind, killed, store):
    """Ranks train; some are killed when they start to send version 2. The last rank is an engine."""
    size = len(store.ports) - 1
    raw = dist.TCPStore("127.0.0.1", store.ports[rank], is_master=False)
    model = _model()
    if rank == size:
        return _serve(raw, model, [each for each in range(size) if each not in killed])
    dist.init_process_group("gloo", store=dist.PrefixStore("trainer", raw), rank=rank, world_size=size)
    if kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards")))
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    publisher = Publisher(model, raw)
    wait_for_key(raw, "ready")
    _set_version(model, 1)
    publisher.publish(1).wait(60)
    start_sending = Route.start_sending

    def die(self, arrays):
        if rank in killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return start_sending(self, arrays)

    Route.start_sending = die
    _set_version(model, 2)
    handle = publisher.publish(2)
    begun = time.monotonic()
    try:
        found = list(handle.wait(60).engines.values())
    except ReshardError as error:
        found = str(error)
    seconds = time.monotonic() - begun
    raw.set(f"ended{rank}", "")
    wait_for_key(raw, "served")
    return found, seconds


def _serve(raw, model, survivors):
    with Subscriber(model, raw) as subscriber:
        raw.set("ready", "")
        found = [subscriber.update(60)]
        for rank in survivors:
            wait_for_key(raw, f"ended{rank}")
        try:
            found.append(subscriber.update(2))
        except TransferTimeoutError as error:
            found.append(str(error))
        assert _is_version(model, subscriber.version)
    with Subscriber(model, raw) as subscriber:  # after the other has left, only the trainer can serve
        if found[-1] == 2:
            assert subscriber.update(60) == 2 and _is_version(model, 2)
        raw.set("served", "")
    return found


def _run(kind, size, killed):
    with PausableStore(size + 1) as store, pytest.raises(LaunchError) as caught:
        run_processes(_train, size + 1, kind, killed, store, init_group=False, grace_seconds=90)
    results = caught.value.results
    assert sorted(results) == [rank for rank in range(size + 1) if rank not in killed], caught.value
    return results.pop(size), results


@pytest.mark.parametrize(
    ("kind", "size", "killed"),
    [("hsdp", 4, (3,)), ("hsdp", 4, (0,)), ("ddp", 3, (0, 1))],
)
def test_version_is_sent_by_replicas_of_the_ranks_that_are_killed(kind, size, killed):
    served, results = _run(kind, size, killed)
    assert served == [1, 2]
    for found, seconds in results.values():
        assert found == [""] and seconds < 30


@pytest.mark.parametrize(
    ("kind", "killed", "text"),
    [
        (
            "hsdp",
            (1, 3),
            "ranks 1,3 of the trainer are lost, and no other rank holds '0.weight' [4:7, 0:13], '0.bias' ",
        ),
        (
            "hsdp",
            (0, 2),
            "ranks 0,2 of the trainer are lost, and no other rank holds '0.weight' [0:4, 0:13], '0.bias' ",
        ),
        ("fsdp", (0,), "rank 0 of the trainer is lost, and no other rank holds '0.weight' [0:2, 0:13], '0.bias' "),
    ],
)
def test_engines_keep_their_version_if_the_only_holder_is_killed_and_the_error_names_the_regions(kind, killed, text):
    served, results = _run(kind, 4, killed)
    assert served[0] == 1 and "the model keeps version 1" in served[1]
    for found, seconds in results.values():
        assert text in found and seconds < 30
