"""A rank that runs out of file descriptors raises an error, and so do the other ranks."""

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


def _limit_descriptors(descriptors):
    """Lower the limit so that exactly ``descriptors`` more can be opened; returns the limit."""
    found = set(os.listdir("/dev/fd"))
    free = (number for number in itertools.count() if str(number) not in found)
    limit = next(itertools.islice(free, descriptors, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return limit


def _join_until_refused(rank, port, limited_rank):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = _limit_descriptors(80) if rank == limited_rank else None
    groups, texts = [], []
    for number in range(20):
        groups.append(reshard.join(dist.PrefixStore(str(number), store), rank, NUM_RANKS))
        try:
            _move(rank, groups[-1])
        except reshard.errors.ResourceError as error:
            texts.append(str(error))
            break
    for group in groups[:-1]:
        group.close()
    _move(rank, groups[-1])
    return texts, len(groups), limit


@pytest.mark.parametrize("limited_rank", [0, 2])
def test_group_over_the_limit_is_refused_until_others_are_closed(limited_rank):
    found = run_processes(_join_until_refused, NUM_RANKS, limited_rank, init_group=False)
    assert len({(tuple(texts), number) for texts, number, _ in found}) == 1
    (text,), number, _ = found[limited_rank]
    assert number > 3
    assert f"rank {limited_rank} has " in text
    assert f" of {found[limited_rank][2]} file descriptors open" in text
    assert "ulimit -n" in text


def _call_with_few_descriptors(rank, port, limited_rank, room):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == limited_rank:
        _limit_descriptors(room)
    group = reshard.join(store, rank, NUM_RANKS)
    try:
        _move(rank, group)
    except reshard.errors.ResourceError as error:
        text = str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for on_loss in ("raise", "recover"):
        _move(rank, group, on_loss)
    return text


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 1, 4, 8, 9, 12])
@pytest.mark.parametrize("limited_rank", [0, 2])
def test_every_rank_names_the_rank_without_descriptors(limited_rank, room):
    texts = run_processes(_call_with_few_descriptors, NUM_RANKS, limited_rank, room, init_group=False)
    assert all(f"rank {limited_rank} has " in text for text in texts), texts
