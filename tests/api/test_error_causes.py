"""Errors name the rank, tensor or argument that is wrong, and nothing else."""

from __future__ import annotations

import time

import pytest
import torch

import reshard
from reshard import Layout, Mesh
from reshard.errors import ArgumentError
from reshard.formatting import compare_names
from reshard.runtime.transport import Connections
from reshard.testing.processes import run_processes
from tests.support.tensors import result_or_error

BOTH = Layout(Mesh.of("2"))
NAMES = [f"layer.{number}.weight" for number in range(300)]


def _call_late(rank, leaves):
    """Rank 0 times out after 0.5 s; with ``leaves`` its process has exited when rank 1 calls."""
    if rank == 1:
        time.sleep(2.0)
    result = result_or_error(
        lambda: reshard.reshard(torch.zeros(4), BOTH, BOTH, timeout_seconds=0.5 if rank == 0 else 10)
    )
    if rank == 0 and not leaves:
        time.sleep(3.0)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [True, False])
def test_late_rank_gets_the_timeout_error_of_the_others(leaves):
    first, late = run_processes(_call_late, 2, leaves)
    assert first.startswith("TransferTimeoutError: rank 1 did not call within 0.5 s"), first
    assert "out of sync (rank 1 did not call within 0.5 s" in late, late
    assert "SOCKET_IFNAME" not in late


def _fail_to_connect(rank):
    """Rank 1 cannot start the thread of a Gloo group, which closes its connections before it reports why."""
    make = Connections._make_group

    def fail(*arguments):
        group = make(*arguments)
        group.barrier().wait()
        del group
        time.sleep(0.3)
        raise RuntimeError("Resource temporarily unavailable")

    def meet(*arguments):
        group = make(*arguments)
        for _ in range(2):
            group.barrier().wait()
        return group

    Connections._make_group = fail if rank == 1 else meet
    return result_or_error(
        lambda: reshard.reshard(torch.zeros(4), BOTH, Layout(Mesh.of("2"), "S0"), timeout_seconds=10)
    )


@pytest.mark.integration
def test_rank_that_fails_to_connect_is_named():
    for text in run_processes(_fail_to_connect, 2):
        assert text == "RemoteError: rank 1: ConnectionError: cannot connect: Resource temporarily unavailable"


def _names(rank):
    tensors = {name: torch.zeros(1) for name in NAMES}
    changed = dict(tensors)
    changed.pop(NAMES[17])
    texts = [
        result_or_error(lambda: reshard.reshard(tensors, dict.fromkeys(changed, BOTH), BOTH)),
        result_or_error(lambda: reshard.reshard(changed if rank == 1 else tensors, BOTH, BOTH)),
        result_or_error(
            lambda: reshard.reshard(
                tensors, BOTH, BOTH, shape={name: (1 + (rank and name == NAMES[9]),) for name in NAMES}
            )
        ),
    ]
    tied = torch.zeros(1)
    outs = {name: torch.zeros(1) for name in NAMES} | {NAMES[3]: tied, NAMES[250]: tied}
    texts.append(result_or_error(lambda: reshard.reshard(tensors, BOTH, BOTH, out=outs if rank == 1 else None)))
    return texts


def test_error_about_many_tensors_names_the_wrong_ones():
    for texts in run_processes(_names, 2):
        assert "src_mesh lacks 'layer.17.weight'" in texts[0]
        assert "rank 0 passes" in texts[1] and "'layer.17.weight'" in texts[1]
        assert "tensor 'layer.9.weight'" in texts[2]
        assert "rank 1: out of 'layer.250.weight' and out of 'layer.3.weight' share memory" in texts[3] or (
            "rank 1: out of 'layer.3.weight' and out of 'layer.250.weight' share memory" in texts[3]
        )
        assert max(map(len, texts)) < 800, [len(text) for text in texts]


def _different_strategy(rank):
    return result_or_error(
        lambda: reshard.reshard(
            torch.zeros(4), Layout(Mesh.of("4")), Layout(Mesh.of("4")), strategy="send_recv" if rank == 1 else None
        )
    )


def test_disagreement_names_the_rank_in_the_minority():
    for text in run_processes(_different_strategy, 4):
        assert "ranks disagree on strategy: ranks 0,2-3 pass auto, rank 1 passes send_recv" in text


def test_compare_names_and_wrong_names_for_a_plan():
    assert compare_names(["a", "b"], ["b", "a"]) == ""
    assert compare_names(["b", "x"], ["a", "b"]) == "lacks 'a' and has unexpected 'x'"
    assert compare_names([], NAMES).startswith(
        "lacks 'layer.0.weight', 'layer.1.weight', 'layer.10.weight' and 297 more"
    )
    plan = reshard.make_plan(BOTH, BOTH, dict.fromkeys(NAMES, (1,)), "bf16")
    with pytest.raises(ArgumentError, match=r"lacks 'layer.17.weight'; the plan has 300 tensors"):
        plan.by_tensor(dict.fromkeys(name for name in NAMES if name != NAMES[17]))
