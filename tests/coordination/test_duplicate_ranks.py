"""If two processes join with the same rank, all ranks raise an error."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh
from reshard.coordination.groups.store import Store, StoreSilentError
from reshard.testing import run_processes
from tests.support.tensors import result_or_error

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
            except reshard.errors.ArgumentError as error:
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
        assert seconds < 20


def _join_late(process, port):
    """Two jobs of two ranks join under one prefix; rank 0 of one and rank 1 of the other call first."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    job, rank = divmod(process, 2)
    with reshard.join(dist.PrefixStore("jobs", store), rank, 2) as group:
        store.set(f"joined/{process}", "")
        store.wait([f"joined/{number}" for number in range(4)])
        time.sleep(0.0 if job == rank else 1.0)
        rows, columns = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2"), "R S0")
        return result_or_error(
            lambda: reshard.reshard(
                torch.full((2, 4), 1000.0 * job + rank), rows, columns, group=group, timeout_seconds=10
            ).tolist()
        )


def test_two_jobs_that_join_as_one_group_never_share_data():
    for text in run_processes(_join_late, 4, init_group=False):
        assert isinstance(text, str) and "two processes joined" in text


def _join_as_job(process, port, num_ranks, late_seconds, prefix):
    """Two jobs of two ranks, of which rank 0 of one and rank 1 of the other call first. A launcher started each job."""
    job, rank = divmod(process, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(29500 + job)}
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    place, alone = (rank, Layout(Mesh.of("2"), "S0 R")) if num_ranks == 2 else (process, Layout(Mesh.of("4"), "S0 R"))
    if num_ranks == 2:
        time.sleep(0.0 if job == rank else late_seconds)
    with reshard.join(dist.PrefixStore(prefix, store), place, num_ranks) as group:
        columns = Layout(alone.mesh, "R S0")
        source = torch.full((2, 4), 1000.0 * job + rank)
        text = result_or_error(
            lambda: reshard.reshard(source, alone, columns, group=group, timeout_seconds=10).tolist()
        )
        store.set(f"{prefix}/done/{process}", "")
        store.wait([f"{prefix}/done/{number}" for number in range(4)])
        return text


def test_two_jobs_of_launchers_never_share_data_however_late_their_other_ranks_join():
    results = run_processes(_join_as_job, 4, 2, 0.8, "late", init_group=False)
    assert all(isinstance(text, str) for text in results), results
    assert "rank 0 and rank 1 are of different jobs" in results[0] == results[3]


def test_two_jobs_of_launchers_form_one_group_of_both():
    results = run_processes(_join_as_job, 4, 4, 0.0, "both", init_group=False)
    assert [row[0] for row in results[0]] == [0.0, 0.0, 1.0, 1.0, 1000.0, 1000.0, 1001.0, 1001.0]


def _claim_slowly(rank, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    answers = []

    def late(self, key, expected, desired, *rest):
        answer = plain(self, key, expected, desired, *rest)
        if key.startswith("claim/") and not answers:
            answers.append(answer)
            raise StoreSilentError("the answer is late")
        return answer

    plain, Store.compare_set = Store.compare_set, late
    with reshard.join(dist.PrefixStore("slow", store), rank, 2) as group:
        assert answers
        rows, columns = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2"), "R S0")
        moved = reshard.reshard(torch.full((2, 4), float(rank)), rows, columns, group=group, timeout_seconds=10)
        assert moved[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
        store.set(f"done/{rank}", "")
        store.wait(["done/0", "done/1"])


def test_late_answer_to_a_claim_is_not_a_second_process():
    run_processes(_claim_slowly, 2, init_group=False)
