"""Plans in rounds: no deadlock, no mismatch, every element, for transports that match by order."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_transport import run_in_threads
from strategies_of_cases import cases
from tensors import same_bytes, take_shard, whole_tensor

from reshard import Layout, Mesh, Topology, make_plan
from reshard.demo import shard_of_positions
from reshard.errors import PlanError
from reshard.launch import run_processes
from reshard.plan import expand_messages
from reshard.program import build_program
from reshard.round_runner import RoundRunner
from reshard.rounds import calls_of, check_calls, find_rounds, rounds_of
from reshard.staging import TorchMemory, carrier
from reshard.strategies import STRATEGIES


def _calls(plan):
    round_of = find_rounds(plan)
    return {rank: calls_of(rounds_of(build_program(plan, rank), round_of)) for rank in plan.ranks}


@given(cases(), st.sampled_from(sorted(STRATEGIES)))
@settings(max_examples=40)
def test_rounds_of_any_plan_end_and_move_every_element(case, strategy):
    shape, src, dst, topology = case
    shape = tuple(size * 40 if i == 0 else size for i, size in enumerate(shape))
    if not isinstance(src, Layout) or not isinstance(dst, Layout):
        src = dst = Layout(Mesh.of("3"), ((),) * len(shape))
    plan = make_plan(src, dst, shape, "int64", strategy=strategy, topology=topology, staging_bytes=2**16)
    round_of = find_rounds(plan)
    messages = {message.id: message for message in expand_messages(plan)}
    assert set(round_of) == {i for i, message in messages.items() if message.sender != message.receiver}
    for ident, at in round_of.items():
        source = messages[ident].source
        if source is not None and source in round_of:
            assert round_of[source] < at
    check_calls(_calls(plan))
    whole = whole_tensor(shape)
    outs = {r: [s if s is None else torch.full_like(s, -1)] for r in plan.ranks for s in [take_shard(dst, r, whole)]}
    staged = run_in_threads(plan, {r: [take_shard(src, r, whole)] for r in plan.ranks}, outs, in_rounds=True)
    assert max(staged.values()) <= plan.staging_bytes
    for rank in dst.ranks:
        assert same_bytes(outs[rank][0], take_shard(dst, rank, whole))


def _boundary():
    src, dst = Layout(Mesh.of("2x2"), "S0 R"), Layout(Mesh.of("3x2", first_rank=4), "R S0")
    topology = Topology(tuple(rank // 2 for rank in range(10)), latency_seconds=1e-5)
    return src, dst, make_plan(src, dst, (256, 384), "float32", strategy="multicast", topology=topology)


def test_planted_faults_are_found():
    *_, plan = _boundary()
    good = _calls(plan)
    check_calls(good)
    rank, at = next((r, i) for r, groups in good.items() for i, group in enumerate(groups) if len(groups) > i + 1)

    def spoilt(change):
        calls = copy.deepcopy(good)
        change(calls[rank])
        return calls

    with pytest.raises(PlanError, match="wait for ever"):
        check_calls(spoilt(lambda groups: groups[at].pop()))
    with pytest.raises(PlanError, match="which receives"):
        check_calls(spoilt(lambda groups: groups[at].append((*groups[at].pop()[:2], 1))))
    crossed = {0: [[(True, 1, 8)], [(False, 1, 8)]], 1: [[(True, 0, 8)], [(False, 0, 8)]]}  # both send first
    with pytest.raises(PlanError, match=r"ranks \[0, 1\] wait for ever: rank 0 in its group 0 for 8 bytes to rank 1"):
        check_calls(crossed)
    check_calls({0: [[(True, 1, 8), (False, 1, 8)]], 1: [[(True, 0, 8), (False, 0, 8)]]})  # as one group they may
    with pytest.raises(PlanError, match="rank 0 sends 8 bytes to rank 1, which receives 4"):
        check_calls({0: [[(True, 1, 8)]], 1: [[(False, 0, 4)]]})


def _by_gloo(recvs, sends):
    ops = [dist.P2POp(dist.irecv, buffer, rank) for buffer, rank in recvs]
    ops += [dist.P2POp(dist.isend, buffer, rank) for buffer, rank in sends]
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()


def _move_in_rounds(rank):
    src, dst, plan = _boundary()
    runner = RoundRunner(build_program(plan, rank), find_rounds(plan), TorchMemory(torch.device("cpu")))
    source = shard_of_positions(src, rank, (256, 384), "float32")
    wanted = shard_of_positions(dst, rank, (256, 384), "float32")
    out = None if wanted is None else torch.zeros_like(wanted)
    sides = [[None if array is None else carrier(array)] for array in (source, out)]
    for _ in range(2):
        runner.run(*sides, _by_gloo)
    assert wanted is None or torch.equal(carrier(out), carrier(wanted))
    return runner.allocated_bytes


def test_rounds_on_processes():
    assert len(run_processes(_move_in_rounds, 10)) == 10
