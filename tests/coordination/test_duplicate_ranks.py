"""If two processes join with the same rank, all ranks raise an error."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh
from reshard.testing import run_processes

SRC, DST = Layout(Mesh.of("3"), "S0 R"), Layout(Mesh.of("3"), "R S0")


def _join_as(process, port, ranks, on_loss):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with reshard.join(dist.PrefixStore("claims", store), ranks[process], 3) as group:
        begun = time.monotonic()
        texts = []
        while len(texts) < 2:  # the group is of no use after the first error either
            try:
                reshard.reshard(torch.zeros(2, 6), SRC, DST, group=group, timeout_seconds=30, on_loss=on_loss)
                assert not texts
                time.sleep(0.05)  # the process too many has not called yet
            except reshard.ArgumentError as error:
                texts.append(str(error))
        store.set(f"done/{process}", "")
        store.wait([f"done/{other}" for other in range(len(ranks))])
        return texts, time.monotonic() - begun, os.getpid(), group.hostname


@pytest.mark.parametrize(
    ("ranks", "twice", "on_loss"),
    [((0, 1, 1), 1, "raise"), ((0, 0, 2), 0, "raise"), ((0, 1, 2, 2), 2, "raise"), ((0, 1, 1), 1, "recover")],
)
def test_two_processes_with_one_rank_are_named_on_all_ranks(ranks, twice, on_loss):
    results = run_processes(_join_as, len(ranks), ranks, on_loss, init_group=False)
    (text,) = {text for texts, *_ in results for text in texts}
    assert f"as rank {twice}: " in text
    for rank, (_, seconds, pid, hostname) in zip(ranks, results, strict=True):
        assert (f"process {pid} on host {hostname}" in text) == (rank == twice)
        assert seconds < 5
