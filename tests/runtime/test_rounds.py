"""Rounds on transports that match messages by order: no deadlock, no mismatch, every element arrives."""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from reshard import Layout, Mesh, RegionLayout, Topology, check_plan, make_plan
from reshard.cli.demo_transfers import shard_of_positions
from reshard.errors import PlanError
from reshard.plan import expand_messages, message_nbytes
from reshard.planner.strategies.chunk_limits import MIN_STAGING_BYTES
from reshard.planner.strategy_registry import STRATEGIES
from reshard.runtime import build_program
from reshard.runtime.cpu.staging import TorchMemory, view_as_bits
from reshard.runtime.rounds import large_groups, round_assignment
from reshard.runtime.rounds.deadlock_check import Call, calls_of, check_calls
from reshard.runtime.rounds.round_assignment import ROUND_SECONDS, find_large_rounds, find_rounds, rounds_of
from reshard.runtime.rounds.runner import RoundRunner
from reshard.runtime.rounds.steps import ALIGN
from reshard.testing.processes import run_processes
from reshard.topology.topology_files import topology_from_json
from tests.support.memory_transport import run_in_threads
from tests.support.random_problems import random_problem
from tests.support.strategies_of_cases import cases
from tests.support.tensors import same_bytes, take_shard, whole_tensor


def runner_of(plan, rank, staging_bytes=None, memory=None, copier=None):
    memory = TorchMemory(torch.device("cpu")) if memory is None else memory
    itemsizes = [spec.itemsize for spec in plan.tensors]
    return RoundRunner(build_program(plan, rank), find_rounds(plan), memory, itemsizes, copier, staging_bytes)


def _calls(plan, find=find_rounds):
    round_of = find(plan)
    return {rank: calls_of(rounds_of(build_program(plan, rank), round_of)) for rank in plan.ranks}


@given(cases(), st.sampled_from(sorted(STRATEGIES)))
@settings(max_examples=40)
def test_rounds_of_any_plan_finish_and_move_every_element(case, strategy):
    shape, src, dst, topology = case
    shape = tuple(size * 40 if i == 0 else size for i, size in enumerate(shape))
    if not isinstance(src, Layout) or not isinstance(dst, Layout):
        src = dst = Layout(Mesh.of("3"), ((),) * len(shape))
    plan = make_plan(src, dst, shape, "int64", strategy=strategy, topology=topology, staging_bytes=2**16)
    round_of = find_rounds(plan)
    messages = {message.id: message for message in expand_messages(plan)}
    assert set(round_of) == {i for i, message in messages.items() if message.sender != message.receiver}
    for ident, index in round_of.items():
        source = messages[ident].source
        if source is not None and source in round_of:
            assert round_of[source] < index
    check_calls(_calls(plan))
    check_calls(_calls(plan, find_large_rounds))
    whole = whole_tensor(shape)
    outs = {r: [s if s is None else torch.full_like(s, -1)] for r in plan.ranks for s in [take_shard(dst, r, whole)]}
    staged = run_in_threads(plan, {r: [take_shard(src, r, whole)] for r in plan.ranks}, outs, in_rounds=True)
    assert max(staged.values()) <= plan.staging_bytes
    for rank in dst.ranks:
        assert same_bytes(outs[rank][0], take_shard(dst, rank, whole))


def _spread(array):
    """An equal array that is not contiguous, unless it has no dims."""
    if array is None or not array.dim():
        return array
    return torch.stack([array, array], dim=-1)[..., 0]


def _run_large_rounds(plan, src, dst, whole, in_rounds):
    """Every second rank has arrays that are not contiguous."""
    rounds = find_large_rounds(plan)
    sources, outs = ({r: take_shard(layout, r, whole) for r in plan.ranks} for layout in (src, dst))
    outs = {r: None if out is None else torch.full_like(out, -1) for r, out in outs.items()}
    sides = [{r: [_spread(a) if r % 2 else a] for r, a in side.items()} for side in (sources, outs)]
    run_in_threads(plan, *sides, seconds=30.0, in_rounds=in_rounds, round_of=rounds)
    for rank in dst.ranks:
        assert same_bytes(sides[1][rank][0].contiguous(), take_shard(dst, rank, whole))
    return rounds


@pytest.mark.parametrize("limit", [600, 2**20])
@pytest.mark.parametrize("seed", range(8))
def test_large_rounds_move_every_element(monkeypatch, seed, limit):
    monkeypatch.setattr(round_assignment, "UNBUFFERED_ROUND_BYTES", limit)
    src, dst, shape, topology = random_problem(seed)
    if seed % 2:
        src, dst = Layout(src.mesh, "S0 R"), Layout(dst.mesh, "S0 R")
    strategy = ["send_recv", "multicast", "send_recv", "auto"][seed % 4]
    plan = make_plan(src, dst, shape, "float32", strategy=strategy, topology=topology, staging_bytes=2**16)
    rounds = _run_large_rounds(plan, src, dst, whole_tensor(shape, torch.float32), "streams" if seed % 3 else True)
    if seed % 2 and strategy == "send_recv":
        small = find_rounds(plan)
        assert max(rounds.round_of.values()) <= max(small.values()) and len(rounds.unbuffered) == len(small)
        assert rounds.joined.keys() == small.keys()


def test_adjacent_messages_are_sent_as_one(monkeypatch):
    monkeypatch.setattr(round_assignment, "UNBUFFERED_ROUND_BYTES", 2**24)
    plan = make_plan(Layout(Mesh([0])), Layout(Mesh([1])), (2**13, 1024), "float32", strategy="send_recv")
    assert plan.num_messages == 4
    groups = []
    for rank, arrays in ((0, [[torch.zeros(2**13, 1024)], [None]]), (1, [[None], [torch.zeros(2**13, 1024)]])):
        memory = TorchMemory(torch.device("cpu"))
        runner = RoundRunner(build_program(plan, rank), find_large_rounds(plan), memory, [4], None, plan.staging_bytes)
        runner.run(*arrays, lambda *posted: groups.append([buffer.numel() for side in posted for buffer, _ in side]))
        assert runner.allocated_bytes == 0
    assert groups == [[2**24], [2**24]] * 2


@pytest.mark.parametrize("limit", [6000, 2**20])
@pytest.mark.parametrize(
    ("src", "dst"),
    [("R R", "R R"), ("S0 R", "R R"), ("R S0", "R R")],
    ids=lambda spec: spec.replace(" ", ""),
)
@pytest.mark.parametrize("in_rounds", [True, "streams"])
def test_data_for_all_other_ranks_is_broadcast(monkeypatch, src, dst, in_rounds, limit):
    monkeypatch.setattr(large_groups, "UNBUFFERED_ROUND_BYTES", limit)
    first = Mesh.of("1") if src == "R R" else Mesh.of("4")
    is_turned = src == "R S0"
    src, dst = Layout(first, src), Layout(Mesh.of("4"), dst)
    plan = make_plan(src, dst, (96, 40), "float32", strategy="multicast", staging_bytes=2**16)
    rounds = _run_large_rounds(plan, src, dst, whole_tensor((96, 40), torch.float32), in_rounds)
    sizes = {message.id: message_nbytes(plan, message) for message in expand_messages(plan)}
    of_number = {}
    for ident, key in rounds.broadcast_of.items():
        of_number.setdefault(key[0], {})[key] = sizes[ident]
    assert sum(sum(parts.values()) for parts in of_number.values()) == 96 * 40 * 4
    if limit > 96 * 40 * 4 and not is_turned:
        assert len(of_number) == first.size and max(rounds.round_of.values()) == 0
    for rank in plan.ranks:  # one call for all receivers
        for item in rounds_of(build_program(plan, rank), rounds):
            assert item.broadcasts and not item.recvs and not item.sends


def test_merged_small_tensors_are_broadcast_beside_large_ones():
    """The planner merges boxes of several tensors into one message, which has to be packed."""
    mesh, shapes = Mesh.of("4"), {"w": (512, 64), "a": (8,), "b": (12,)}
    src, dst = dict.fromkeys(shapes, Layout(Mesh.of("1"))), dict.fromkeys(shapes, Layout(Mesh.of("3", first_rank=1)))
    plan = make_plan(src, dst, shapes, dict.fromkeys(shapes, "float32"), strategy="multicast")
    assert any(len(message.boxes) > 1 for message in expand_messages(plan))
    rounds = find_large_rounds(plan)
    assert rounds.broadcast_of
    wholes = [whole_tensor(shape, torch.float32) for shape in shapes.values()]
    sources = {r: [whole if r == 0 else None for whole in wholes] for r in mesh.ranks}
    outs = {r: [torch.full_like(whole, -1) if r else None for whole in wholes] for r in mesh.ranks}
    run_in_threads(plan, sources, outs, seconds=30.0, in_rounds=True, round_of=rounds)
    for rank in (1, 2, 3):
        assert all(same_bytes(out, whole) for out, whole in zip(outs[rank], wholes, strict=True))


def test_second_buffer_is_no_larger_than_a_round(monkeypatch):
    """Small messages that cannot be joined, because the source has two regions, into an array that is not contiguous."""
    monkeypatch.setattr(round_assignment, "UNBUFFERED_ROUND_BYTES", 4096)
    source = RegionLayout({0: [[(0, 2048)], [(2048, 4096)]]})
    plan = make_plan(source, Layout(Mesh([1])), (4096,), "int8", strategy="send_recv")
    twice = {name: np.repeat(getattr(plan.transfers, name), 2) for name in ("sender", "receiver", "window", "source")}
    twice |= {name: np.arange(3) for name in ("box_offsets", "edge_offsets")} | {
        "region": np.arange(2),
        "after_offsets": np.zeros(3, int),
    }
    plan = dataclasses.replace(
        plan, transfers=dataclasses.replace(plan.transfers, splits=np.full((2, 1), 512), **twice)
    )
    check_plan(plan)
    whole = torch.arange(4096).to(torch.int8)
    out, rounds = _spread(torch.zeros(4096, dtype=torch.int8)), find_large_rounds(plan)
    assert not rounds.joined or len(set(rounds.joined.values())) == 1024
    runner = RoundRunner(
        build_program(plan, 1), rounds, TorchMemory(torch.device("cpu")), [1], None, plan.staging_bytes
    )
    steps = runner._find_steps((None, runner._kind_of(out)))
    assert 0 < max(step.extra_bytes for step in steps) <= 4096
    run_in_threads(plan, {0: [whole], 1: [None]}, {0: [None], 1: [out]}, 30.0, in_rounds=True, round_of=rounds)
    assert torch.equal(out, whole)


def test_plans_that_are_sent_directly_or_only_to_some_ranks_are_not_broadcast():
    src = Layout(Mesh.of("1"))
    for dst, strategy in (("3", "send_recv"), ("1", "multicast")):
        plan = make_plan(src, Layout(Mesh.of(dst, first_rank=1)), (64,), "float32", strategy=strategy)
        assert not find_large_rounds(plan).broadcast_of
    two = make_plan(Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2", first_rank=2)), (64,), "float32")
    assert not find_large_rounds(two).broadcast_of


@pytest.mark.parametrize("seed", range(8))
def test_streams_wait_for_each_other(seed):
    """Packing, exchange and unpacking run concurrently, so a missing wait would move wrong elements."""
    src, dst, shape, topology = random_problem(seed)
    strategy = ["multicast", "send_recv", "broadcast_greedy", "local_all_gather"][seed % 4]
    plan = make_plan(src, dst, shape, "float32", strategy=strategy, topology=topology, staging_bytes=2**16)
    whole = whole_tensor(shape, torch.float32)
    outs = {r: [s if s is None else torch.full_like(s, -1)] for r in plan.ranks for s in [take_shard(dst, r, whole)]}
    sources = {r: [take_shard(src, r, whole)] for r in plan.ranks}
    run_in_threads(plan, sources, outs, seconds=30.0, in_rounds="streams")
    for rank in dst.ranks:
        assert same_bytes(outs[rank][0], take_shard(dst, rank, whole))


def _boundary(staging_bytes=2**26):
    src, dst = Layout(Mesh.of("2x2"), "S0 R"), Layout(Mesh.of("3x2", first_rank=4), "R S0")
    topology = Topology(tuple(rank // 2 for rank in range(10)), latency_seconds=1e-5)
    return (
        src,
        dst,
        make_plan(
            src, dst, (256, 384), "float32", strategy="multicast", topology=topology, staging_bytes=staging_bytes
        ),
    )


def _replay_corrupted(calls, rank, change):
    corrupted = copy.deepcopy(calls)
    change(corrupted[rank])
    check_calls(corrupted)


def test_check_calls_finds_planted_faults():
    *_, plan = _boundary()
    good = _calls(plan)
    check_calls(good)
    rank, at = next((r, i) for r, groups in good.items() for i, group in enumerate(groups) if len(groups) > i + 1)
    with pytest.raises(PlanError, match="deadlock"):
        _replay_corrupted(good, rank, lambda groups: groups[at].pop())
    with pytest.raises(PlanError, match="which receives"):
        _replay_corrupted(good, rank, lambda groups: groups[at].append(groups[at].pop()._replace(nbytes=1)))
    send, receive = (lambda peer: Call("send", peer, 8)), (lambda peer: Call("receive", peer, 8))
    both_send_first = {0: [[send(1)], [receive(1)]], 1: [[send(0)], [receive(0)]]}
    with pytest.raises(
        PlanError, match=r"ranks \[0, 1\] deadlock: rank 0 waits in its group 0 to send 8 bytes to rank 1"
    ):
        check_calls(both_send_first)
    check_calls({0: [[send(1), receive(1)]], 1: [[send(0), receive(0)]]})  # correct in one group
    with pytest.raises(PlanError, match="rank 0 sends 8 bytes to rank 1, which receives 4"):
        check_calls({0: [[send(1)]], 1: [[Call("receive", 0, 4)]]})


def test_check_calls_finds_joined_messages_in_another_order():
    src, dst = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2", first_rank=2))
    shapes = {"a": (2**12, 1024), "b": (2**13, 1024)}
    sides = [dict.fromkeys(shapes, layout) for layout in (src, dst)]
    plan = make_plan(*sides, shapes, dict.fromkeys(shapes, "float32"), strategy="send_recv")
    good = _calls(plan, find_large_rounds)
    assert len(set(find_large_rounds(plan).joined.values())) > 1
    check_calls(good)
    with pytest.raises(PlanError, match="which receives"):
        _replay_corrupted(good, 2, lambda groups: groups[0].reverse())


def test_check_calls_finds_faults_of_broadcasts():
    plan = make_plan(Layout(Mesh([0])), Layout(Mesh.of("3", first_rank=1)), (4096,), "float32", strategy="multicast")
    good = _calls(plan, find_large_rounds)
    assert all(call.kind == "broadcast" for groups in good.values() for group in groups for call in group)
    check_calls(good)
    with pytest.raises(PlanError, match=r"ranks \[0, 1, 2\] deadlock: rank 0 waits in its group 0 to broadcast"):
        _replay_corrupted(good, 3, lambda groups: groups[0].pop())
    with pytest.raises(
        PlanError, match=r"rank 0 posts: broadcast 16384 bytes from rank 0; but rank 2 posts: .* rank 1"
    ):
        _replay_corrupted(good, 2, lambda groups: groups[0].append(groups[0].pop()._replace(peer=1)))


def _by_gloo(recvs, sends, broadcasts):
    assert not broadcasts
    ops = [dist.P2POp(dist.irecv, buffer, rank) for buffer, rank in recvs]
    ops += [dist.P2POp(dist.isend, buffer, rank) for buffer, rank in sends]
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()


def _move_in_rounds(rank):
    src, dst, plan = _boundary()
    runner = runner_of(plan, rank)
    source = shard_of_positions(src, rank, (256, 384), "float32")
    wanted = shard_of_positions(dst, rank, (256, 384), "float32")
    out = None if wanted is None else torch.zeros_like(wanted)
    sides = [[None if array is None else view_as_bits(array)] for array in (source, out)]
    for _ in range(2):
        runner.run(*sides, _by_gloo)
    assert wanted is None or torch.equal(view_as_bits(out), view_as_bits(wanted))
    return runner.allocated_bytes


def test_rounds_between_processes_deliver():
    assert len(run_processes(_move_in_rounds, 10)) == 10


def _turned(staging_bytes=2**26):
    """Columns become rows between hosts with two NICs, so that some ranks relay messages that they do not need."""
    src, dst = Layout(Mesh.of("2x4"), "R S01"), Layout(Mesh.of("2x4", first_rank=8), "S01 R")
    nics = ["500 Mbit/s", "500 Mbit/s"]
    topology = topology_from_json({"hosts": [{"count": 4, "devices": 4, "nics": nics}]}).without_latency()
    plan = make_plan(
        src, dst, (204, 4096), "float32", strategy="multicast", topology=topology, staging_bytes=staging_bytes
    )
    return src, dst, plan


@pytest.mark.parametrize("seed", [None, *range(12)])
def test_round_uses_at_most_half_of_the_staging_bytes(seed):
    staging_bytes = MIN_STAGING_BYTES
    if seed is None:
        _, _, plan = _turned(staging_bytes)
    else:
        src, dst, shape, topology = random_problem(seed)
        plan = make_plan(src, dst, shape, "float32", topology=topology, staging_bytes=staging_bytes)
    round_of = find_rounds(plan)
    for rank in plan.ranks:
        for item in rounds_of(build_program(plan, rank), round_of):
            for ops in (item.recvs, item.sends):
                assert sum(op.nbytes for op in ops) <= staging_bytes // 4


def test_relayed_messages_keep_disjoint_buffers_until_forwarded():
    src, dst, plan = _turned()
    reused = 0
    for rank in plan.ranks:
        program = build_program(plan, rank)
        runner = runner_of(plan, rank)
        assert runner.num_halves == min(max(len(runner.rounds), 1), 2)  # a round is packed while another is under way
        forwards = {send.forwards: number for number, item in enumerate(runner.rounds) for send in item.sends}
        live: dict[int, tuple[int, int]] = {}
        for number, item in enumerate(runner.rounds):
            live = {index: part for index, part in live.items() if forwards[index] >= number}
            for index, recv in enumerate(program.recvs):
                if recv.is_relay and recv in item.recvs:
                    first = runner.num_halves * runner._half_bytes + runner._relay_offsets[index]
                    end = first + recv.nbytes
                    assert first % ALIGN == 0
                    assert all(end <= start or stop <= first for start, stop in live.values())
                    assert end <= runner.nbytes
                    for lower in range(runner.num_halves * runner._half_bytes, first, ALIGN):  # first fit
                        assert any(lower < stop and start < lower + recv.nbytes for start, stop in live.values())
                    live[index] = first, end
        offsets = list(runner._relay_offsets.values())
        reused += len(offsets) - len(set(offsets))
        assert runner_of(plan, rank, runner.nbytes).num_halves == runner.num_halves
        if runner.nbytes:
            least = runner.nbytes - (runner.num_halves - 1) * runner._half_bytes
            assert runner_of(plan, rank, runner.nbytes - 1 if runner.num_halves == 2 else least).num_halves == 1
            with pytest.raises(PlanError, match=f"rank {rank} needs {least} bytes of buffers"):
                runner_of(plan, rank, least - 1)
    assert reused
    whole = whole_tensor((204, 4096), torch.float32)
    outs = {r: [s if s is None else torch.zeros_like(s)] for r in plan.ranks for s in [take_shard(dst, r, whole)]}
    run_in_threads(plan, {r: [take_shard(src, r, whole)] for r in plan.ranks}, outs, in_rounds=True)
    for rank in dst.ranks:
        assert same_bytes(outs[rank][0], take_shard(dst, rank, whole))


class _CountingCopies(TorchMemory):
    copies = 0

    def pack(self, views, buffer):
        self.copies += 1
        super().pack(views, buffer)

    def unpack(self, buffer, views):
        self.copies += 1
        super().unpack(buffer, views)


@pytest.mark.parametrize(("spec", "packs"), [("S0 R", 0), ("R S0", 1)])
def test_contiguous_boxes_are_sent_without_packing(spec, packs):
    src, dst = Layout(Mesh.of("1"), "R R"), Layout(Mesh.of("2", first_rank=1), spec)
    plan = make_plan(src, dst, (8, 4), "float32")
    memory = _CountingCopies(torch.device("cpu"))
    runner = runner_of(plan, 0, memory=memory)
    sent = []
    runner.run([torch.arange(32.0).reshape(8, 4)], [None], lambda recvs, sends, broadcasts: sent.extend(sends))
    assert len(sent) == plan.num_messages
    assert (memory.copies > 0) == (packs > 0)


def _on_one_host(staging_bytes):
    mesh, rows = Mesh.of("9"), (72, 1024)
    return make_plan(
        Layout(mesh, "S0"), Layout(mesh), rows, "float32", topology=Topology((0,) * 9), staging_bytes=staging_bytes
    )


def _room(plan):
    """The bytes that a rank may send, and receive, in a round: ``{is inside its host: bytes}``."""
    hosts = plan.topology.host_of_rank
    sizes = {False: [0], True: [0]}
    for message in expand_messages(plan):
        if message.sender != message.receiver:
            sizes[hosts[message.sender] == hosts[message.receiver]].append(message_nbytes(plan, message))
    across, inside = max(sizes[False]), max(sizes[True])
    rate = min(nic.egress_bytes_per_second for host in plan.topology.hosts for nic in host.nics)
    least = int(rate * ROUND_SECONDS)  # the topologies here give no rate inside hosts, so that of the NICs applies
    across = max(across, min(least, plan.staging_bytes // 8))
    return {False: across, True: max(inside, min(max(4 * inside, least), plan.staging_bytes // 4 - across))}


@pytest.mark.parametrize(
    ("make", "staging_bytes"),
    [
        (lambda staging: _boundary(staging)[2], 2**26),
        (lambda staging: _boundary(staging)[2], 2**20),
        (lambda staging: _turned(staging)[2], 2**26),
        (_on_one_host, 2**26),
        (_on_one_host, 2**18),
    ],
    ids=["boundary", "boundary, little staging", "turned", "on one host", "on one host, little staging"],
)
def test_each_message_is_in_the_first_round_with_room(make, staging_bytes):
    plan = make(staging_bytes)
    hosts, room = plan.topology.host_of_rank, _room(plan)
    used, rounds, found = {}, {}, find_rounds(plan)
    for message in expand_messages(plan):
        if message.sender == message.receiver:
            continue
        inside = hosts[message.sender] == hosts[message.receiver]
        nbytes = message_nbytes(plan, message)
        at = 0 if message.source not in rounds else rounds[message.source] + 1
        at = max([at, *(rounds[before] for before in message.after if before in rounds)])
        ends = [(message.sender, inside, True), (message.receiver, inside, False)]
        while any(used.get((*end, at), 0) + nbytes > room[inside] for end in ends):
            at += 1
        for end in ends:
            used[(*end, at)] = used.get((*end, at), 0) + nbytes
        rounds[message.id] = at
    assert found == rounds
    assert len({*rounds.values()}) > 1


def test_rank_with_only_local_copies_needs_no_buffer():
    plan = make_plan(Layout(Mesh([0])), Layout(Mesh([0])), (8,), "int8")
    runner = runner_of(plan, 0)
    assert runner.nbytes == 0


def test_buffer_is_allocated_by_the_first_run_and_released():
    *_, plan = _boundary()
    runner = runner_of(plan, 4)
    assert runner.nbytes > 0
    assert runner.allocated_bytes == 0
    sides = [[None], [torch.zeros(plan.tensors[0].dst_tiles.local_shape(4))]]
    runner.run(*sides, lambda recvs, sends, broadcasts: None)
    assert runner.allocated_bytes == runner.nbytes
    runner.release()
    assert runner.allocated_bytes == 0


class _CountingStreams:
    """One stream that counts events and waits."""

    def __init__(self):
        self.calls = []

    def on(self, stream):
        return contextlib.nullcontext()

    def mark(self):
        self.calls.append("mark")

    def wait(self, mark):
        self.calls.append("wait")


@pytest.mark.parametrize(
    ("rows", "turned", "num_groups"), [(256, False, 1), (2**14, False, 8), (256, True, 1), (2**14, True, 6)]
)
def test_rounds_need_events_only_to_pack_several_of_them(rows, turned, num_groups):
    dst = Layout(Mesh.of("2", first_rank=1), "R S0") if turned else Layout(Mesh([1]))
    plan = make_plan(Layout(Mesh([0])), dst, (rows, 1024), "float32", strategy="send_recv")
    array, groups, streams = torch.zeros(rows, 1024), [], _CountingStreams()
    runner = runner_of(plan, 0, plan.staging_bytes)
    runner.run([array], [None], lambda recvs, sends, broadcasts: groups.append((len(recvs), len(sends))), streams)
    assert len(groups) == num_groups
    assert bool(streams.calls) == (turned and num_groups > 1)
