"""A rank that runs out of file descriptors says so, and the others hear it."""

from __future__ import annotations

import itertools
import os
import resource

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard import Mesh
from reshard.testing.processes import run_processes

NUM_RANKS = 3


def _move(rank, group, on_loss="raise"):
    side = Mesh.of("3")
    specs = {"src_spec": "S0 R", "dst_spec": "R S0"}
    shard = torch.full((1, 3), float(rank))
    out = reshard.reshard(shard, side, side, **specs, group=group, timeout_seconds=20, on_loss=on_loss)
    assert out.flatten().tolist() == [0.0, 1.0, 2.0]


def _leave_room(descriptors):
    """Lower the limit until so many may be opened; returns it."""
    found = set(os.listdir("/dev/fd"))
    free = (number for number in itertools.count() if str(number) not in found)
    limit = next(itertools.islice(free, descriptors, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return limit


def _fill(rank, port, poor):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = _leave_room(80) if rank == poor else None
    groups, texts = [], []
    for number in range(20):
        groups.append(reshard.join(dist.PrefixStore(str(number), store), rank, NUM_RANKS))
        try:
            _move(rank, groups[-1])
        except reshard.ResourceError as error:
            texts.append(str(error))
            break
    for group in groups[:-1]:
        group.close()
    _move(rank, groups[-1])
    return texts, len(groups), limit


@pytest.mark.parametrize("poor", [0, 2])
def test_the_group_that_is_one_too_many_is_refused_and_works_once_others_are_closed(poor):
    found = run_processes(_fill, NUM_RANKS, poor, init_group=False)
    assert len({(tuple(texts), number) for texts, number, _ in found}) == 1
    (text,), number, _ = found[poor]
    assert number > 3
    assert f"rank {poor} has " in text
    assert f" of {found[poor][2]} file descriptors open" in text
    assert "ulimit -n" in text


def _squeeze(rank, port, poor, room):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == poor:
        _leave_room(room)
    group = reshard.join(store, rank, NUM_RANKS)
    try:
        _move(rank, group)
    except reshard.ResourceError as error:
        text = str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for on_loss in ("raise", "recover"):
        _move(rank, group, on_loss)
    return text


@pytest.mark.parametrize("room", [0, 1, 4, 8, 9, 12])
@pytest.mark.parametrize("poor", [0, 2])
def test_every_rank_names_the_one_without_descriptors_however_few_there_are(poor, room):
    texts = run_processes(_squeeze, NUM_RANKS, poor, room, init_group=False)
    assert all(f"rank {poor} has " in text for text in texts), texts
