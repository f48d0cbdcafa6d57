"""A rank's program and its execution on the CPU: order, buffers, notifications, progress and rejected plans."""

from __future__ import annotations

import functools
import itertools
import threading
import time

import pytest
import torch

from reshard import Layout, Mesh, RegionLayout, Topology, check_plan, make_plan
from reshard.errors import PlanError, TransferTimeoutError
from reshard.plan import parse_plan
from reshard.planner.planning import plan_tensors
from reshard.runtime import build_program
from reshard.runtime.cpu import program_executor
from reshard.runtime.cpu.program_executor import RunOptions, WrongCopyError, run_program
from reshard.runtime.cpu.staging import MANY_BOXES, MAX_WINDOW, Pool, Staging, view_as_bits
from reshard.runtime.cpu.transfer_progress import Tally, describe_progress
from reshard.runtime.cpu.verification import TransferDigests, find_fault
from reshard.runtime.transport import ABORT_TAG
from reshard.sharding.tensor_spec import TensorSpec
from reshard.topology.topology_files import topology_from_json
from tests.support.memory_transport import MemoryHub, MemoryTransport, run_in_threads
from tests.support.random_problems import random_problem
from tests.support.tensors import same_bytes, take_shard, whole_tensor


@pytest.mark.parametrize("in_rounds", [False, True])
@pytest.mark.parametrize("contiguous", [True, False])
def test_messages_with_many_boxes_of_two_tensors_are_delivered(contiguous, in_rounds):
    stripes = {rank: [[(0, 6), (2 * i + rank, 2 * i + rank + 1)] for i in range(9)] for rank in (0, 1)}
    src = RegionLayout(stripes, join_dim=1)
    dst = Layout(Mesh([2, 3], {"x": 2}), "S0")
    shapes = {"a": (6, 18), "b": (6, 18)}
    plan = make_plan(src, dst, shapes, "float32")
    check_plan(plan)
    assert max(plan.transfers.num_boxes) == 2 * 9 >= MANY_BOXES
    whole = whole_tensor((6, 18), torch.float32)

    def placed(shard):
        return shard if contiguous or shard is None else shard.t().contiguous().t()

    sources = {r: [placed(take_shard(src, r, whole + k)) for k in range(2)] for r in plan.ranks}
    sources = {r: [None if r not in src.ranks else x for x in row] for r, row in sources.items()}
    outs = {r: [placed(torch.zeros(3, 18)) if r in dst.ranks else None for _ in range(2)] for r in plan.ranks}
    run_in_threads(plan, sources, outs, in_rounds=in_rounds)
    for rank in dst.ranks:
        for k in range(2):
            assert same_bytes(outs[rank][k], take_shard(dst, rank, whole + k))


@pytest.mark.parametrize("in_rounds", [False, True])
def test_messages_of_many_boxes_are_forwarded(in_rounds):
    """Both destination ranks need the whole shard of rank 0. One of them forwards it out of its own destination shard."""
    stripes = [[(0, 60), (2 * i, 2 * i + 1)] for i in range(9)]
    src, dst = RegionLayout({0: stripes}, join_dim=1), RegionLayout(dict.fromkeys((1, 2), stripes), join_dim=1)
    plan = make_plan(src, dst, (60, 18), "int8", topology=Topology((0, 1, 1)), strategy="multicast")
    check_plan(plan)
    sends = [send for rank in dst.ranks for send in build_program(plan, rank).sends_inside]
    assert any(send.forwards is not None and len({str(box.dst) for box in send.boxes}) > 1 for send in sends)
    whole = whole_tensor((60, 18), torch.int8)
    sources = {rank: [take_shard(src, rank, whole)] for rank in plan.ranks}
    outs = {r: [torch.zeros_like(s) if (s := take_shard(dst, r, whole)) is not None else None] for r in plan.ranks}
    run_in_threads(plan, sources, outs, in_rounds=in_rounds)
    for rank in dst.ranks:
        assert same_bytes(outs[rank][0], take_shard(dst, rank, whole))


@pytest.mark.parametrize(("dst_spec", "is_staged"), [("S1 R", False), ("R S1", True)])
def test_large_boxes_of_a_message_travel_from_array_to_array(dst_spec, is_staged):
    src, dst = Layout(Mesh.of(2), "S0 R"), Layout(Mesh.of("2x2", first_rank=2), dst_spec)
    shapes = {"a": (512, 512), "b": (512, 512), "c": (512, 512), "norm": (8, 8)}
    plan = make_plan(src, dst, shapes, "float32", strategy="multicast")
    large = [op for rank in plan.ranks for op in build_program(plan, rank).recvs if len(op.boxes) > 1 < len(op.parts)]
    assert {op.num_forwards for op in large} == {0, 1}
    wholes = [whole_tensor(shape, torch.float32) for shape in shapes.values()]
    sources = {r: [take_shard(src, r, whole) if r in src.ranks else None for whole in wholes] for r in plan.ranks}
    wanted = {r: [take_shard(dst, r, whole) if r in dst.ranks else None for whole in wholes] for r in plan.ranks}
    outs = {r: [None if x is None else torch.zeros_like(x) for x in row] for r, row in wanted.items()}
    digests = {rank: TransferDigests() for rank in plan.ranks}
    staged = run_in_threads(plan, sources, outs, digests=digests)
    sent, received = ({k: v for d in digests.values() for k, v in getattr(d, s).items()} for s in ("sent", "received"))
    assert find_fault(plan, sent, received) is None
    assert any(nbytes >= 2**18 for nbytes in staged.values()) == is_staged, staged
    for rank in dst.ranks:
        assert all(map(same_bytes, outs[rank], wanted[rank]))


def test_digest_of_a_relayed_message_is_of_its_buffer(monkeypatch):
    """Columns become rows between hosts with two NICs, so that some ranks relay messages that they do not need."""
    src, dst = Layout(Mesh.of("2x2"), "R S01"), Layout(Mesh.of("2x2", first_rank=4), "S01 R")
    topology = topology_from_json({"hosts": [{"count": 4, "devices": 2, "nics": ["500 Mbit/s", "500 Mbit/s"]}]})
    plan = make_plan(src, dst, (20, 64), "float32", strategy="multicast", topology=topology.without_latency())
    relays = {recv.id for rank in plan.ranks for recv in build_program(plan, rank).recvs if recv.is_relay}
    assert relays
    whole = whole_tensor((20, 64), torch.float32)
    sources = {rank: [take_shard(src, rank, whole)] for rank in plan.ranks}

    def run():
        digests = {rank: TransferDigests() for rank in plan.ranks}
        outs = {r: [torch.zeros_like(s) if (s := take_shard(dst, r, whole)) is not None else None] for r in plan.ranks}
        run_in_threads(plan, sources, outs, digests=digests)
        sides = [
            dict(one for rank in plan.ranks for one in getattr(digests[rank], name).items())
            for name in ("sent", "received")
        ]
        assert sides[0].keys() == sides[1].keys() >= relays
        return find_fault(plan, *sides)

    assert run() is None
    finish = program_executor._Execution.finish_recv

    def spoil(self, op, slot):
        if op.id in relays:
            slot[0] ^= 1
        finish(self, op, slot)

    monkeypatch.setattr(program_executor._Execution, "finish_recv", spoil)
    assert "passed on other bytes" in run()


def test_tag_ranges_are_disjoint():
    firsts = 0, program_executor.NOTIFY_TAG, program_executor.VERIFY_TAG, ABORT_TAG
    assert all(end - start >= program_executor.NOTIFY_TAG for start, end in itertools.pairwise(firsts))


def test_program_that_cannot_proceed_fails_at_once():
    plan = make_plan(Layout(Mesh.of(2), "R S0"), Layout(Mesh.of(2, first_rank=2), "S0"), (4, 6), "int8")
    program = build_program(plan, 2)
    staging = Staging(program, plan.staging_bytes)
    staging.recv = Pool([], 0)  # no slot for a message that must be unpacked
    out = torch.zeros(2, 6, dtype=torch.uint8)
    with pytest.raises(PlanError, match=r"rank 2: message \d can never start"):
        run_program(
            program, MemoryTransport(MemoryHub(), 2), [None], [out], staging, RunOptions(deadline=time.monotonic() + 60)
        )


@pytest.mark.parametrize("others", [0, 1])
def test_progress_is_described_in_messages_and_bytes(others):
    """Rank 2 receives from two ranks. The second one never sends."""
    specs = [TensorSpec((4, 6), "int8", Layout(Mesh.of(2), "R S0"), Layout(Mesh([2])), "w"), *[SMALL] * others]
    plan = plan_tensors(specs, strategy="send_recv", staging_bytes=2**20)
    hub, tally, out = MemoryHub(), Tally(), torch.zeros(4, 6, dtype=torch.uint8)
    program = build_program(plan, 2)
    first = program.recvs[0]
    MemoryTransport(hub, first.sender).send(torch.ones(first.nbytes, dtype=torch.uint8), 2, 0)
    outs = [out, *[torch.zeros(2, dtype=torch.uint8)] * others]
    with pytest.raises(TransferTimeoutError, match=r"rank 2: message \d+ from rank \d did not finish in time"):
        run_program(
            program, MemoryTransport(hub, 2), [None] * len(specs), outs, Staging(program, plan.staging_bytes),
            RunOptions(deadline=time.monotonic() + 0.5, tally=tally),
        )  # fmt: skip
    total, more = (24, "") if not others else (26, " and 1 more tensor")
    text = describe_progress(plan, program, tally)
    assert text.startswith(f"rank 2 had received 1 of 2 messages, {first.nbytes} of {total} bytes, of"), text
    assert f"{more} (plan {plan.plan_hash[:12]})" in text and "w int8 [4, 6]" in text, text


class _Failing(MemoryTransport):
    def recv(self, buffer, rank, tag):
        raise ConnectionError("gone")


@pytest.mark.parametrize(("transport", "copied"), [(_Failing, False), (MemoryTransport, True)])
def test_local_copies_count_after_they_are_made(transport, copied):
    plan = make_plan(Layout(Mesh.of(2), "S0"), Layout(Mesh([1])), (4,), "int8", strategy="send_recv")
    program, tally = build_program(plan, 1), Tally()
    assert len(program.copies) == len(program.recvs) == 1
    out = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises((ConnectionError, TransferTimeoutError)):
        run_program(
            program, transport(MemoryHub(), 1), [torch.ones(2, dtype=torch.uint8)], [out],
            Staging(program, plan.staging_bytes), RunOptions(deadline=time.monotonic() + 0.1, tally=tally),
        )  # fmt: skip
    assert tally == Tally(copied, 0, 0) and out.tolist() == [0, 0, copied, copied]


SMALL = TensorSpec((2,), "int8", Layout(Mesh([0])), Layout(Mesh([2])), "v")


class _CountingAborts(MemoryTransport):
    aborts = 0

    def abort(self):
        self.aborts += 1


@pytest.mark.parametrize(("rank", "aborts"), [(2, 0), (0, 0), (1, 1)], ids=["receives", "sends", "does both"])
def test_failing_rank_aborts_the_transport_once(rank, aborts):
    """Rank 1 both receives and sends. No other rank takes part, so every wait times out."""
    specs = [TensorSpec((4,), "int8", Layout(Mesh([a])), Layout(Mesh([b])), f"{a}") for a, b in ((0, 1), (1, 2))]
    plan = plan_tensors(specs, strategy="send_recv")
    program = build_program(plan, rank)
    sides = [
        [torch.zeros(4, dtype=torch.uint8) if rank in layout.ranks else None for layout in layouts]
        for layouts in ([spec.src for spec in specs], [spec.dst for spec in specs])
    ]
    transport = _CountingAborts(MemoryHub(), rank)
    with pytest.raises(TransferTimeoutError):
        run_program(
            program,
            transport,
            *sides,
            Staging(program, plan.staging_bytes),
            RunOptions(deadline=time.monotonic() + 0.2),
        )
    assert transport.aborts == aborts


@pytest.mark.parametrize("sends", ["sends_across", "sends_inside"])
def test_send_queue_uses_a_quarter_of_the_staging_bytes(sends):
    topology = Topology((0, 1, 1) if sends == "sends_across" else (0, 0, 0))
    spec = TensorSpec((1024, 2048), "int8", Layout(Mesh([0])), Layout(Mesh([1, 2]), "R S0"))
    plan = plan_tensors([spec], topology=topology, strategy="send_recv", staging_bytes=2**18)
    program = build_program(plan, 0)
    largest = max(send.nbytes for send in getattr(program, sends))
    for slots in (1, 2, 3, MAX_WINDOW, 2 * MAX_WINDOW):
        for extra in (0, 4 * largest - 4):
            pool = getattr(Staging(program, 4 * largest * slots + extra), sends.removeprefix("sends_"))
            taken = 0
            while pool.take() is not None:
                taken += 1
            assert taken == min(slots, MAX_WINDOW), (slots, extra)


def test_impossible_local_copy_is_rejected():
    """The plan lets rank 0 copy [1:3], but its destination shard is [0:2]."""
    plan = make_plan(Layout(Mesh([0])), Layout(Mesh.of(2), "S0"), (4,), "float32", strategy="send_recv")
    text = str(plan)
    copied = next(line for line in text.splitlines() if "0 -> 0" in line)
    with pytest.raises(PlanError, match=r"rank 0 cannot copy \[1:3\]"):
        build_program(parse_plan(text.replace(copied, copied.replace("[0:2]", "[1:3]"))), 0)


@pytest.mark.parametrize("in_rounds", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "float64", "complex128"])
def test_elements_of_any_size_are_sent_as_bytes(dtype, in_rounds):
    src, dst = Layout(Mesh.of(2), "R S0"), Layout(Mesh.of(2, first_rank=2), "S0")
    plan = make_plan(src, dst, (4, 6), dtype)
    whole = whole_tensor((4, 6), getattr(torch, dtype))
    sources = {rank: [take_shard(src, rank, whole)] for rank in plan.ranks}
    outs = {rank: [None if (s := take_shard(dst, rank, whole)) is None else torch.zeros_like(s)] for rank in plan.ranks}
    run_in_threads(plan, sources, outs, in_rounds=in_rounds)
    for rank in dst.ranks:
        assert same_bytes(outs[rank][0], take_shard(dst, rank, whole))


def test_slot_is_kept_only_for_forwards_before_the_next_receive():
    """Later forwards read the destination shard, except on a relay, which has none."""
    found = set()
    for seed in (5, 16, 48, 54):
        src, dst, shape, topology = random_problem(seed)
        plan = make_plan(src, dst, shape, "float32", topology=topology, staging_bytes=2**16)
        for rank in plan.ranks:
            program = build_program(plan, rank)
            sends = [*program.sends_across, *program.sends_inside]
            for index, recv in enumerate(program.recvs):
                forwards = [send.id for send in sends if send.forwards == index]
                following = [other.id for other in program.recvs[index + 1 :]]
                is_late = bool(forwards and following) and max(forwards) > following[0]
                assert recv.num_forwards == (0 if is_late and not recv.is_relay else len(forwards))
                found.add((is_late, recv.is_relay, len(forwards) > 0))
    assert {(is_late, is_relay, True) for is_late in (True, False) for is_relay in (True, False)} <= found


class _CheckingWaits(MemoryTransport):
    """Checks that the events that a message waits for are done when it is posted."""

    def __init__(self, hub, program, done):
        super().__init__(hub, program.rank)
        self.done, self.recvs = done, iter(program.recvs)
        self.sends = {}
        for op in (*program.sends_across, *program.sends_inside):
            self.sends.setdefault(op.receiver, []).append(op)

    def check(self, work, op, is_send):
        assert self.done.issuperset(op.waits), f"message {op.id} is posted before {op.waits}"
        wait = work.wait

        def waited(timeout):
            wait(timeout)
            self.done.add((op.id, is_send))

        work.wait = waited
        return work

    def send(self, buffer, rank, tag):
        work = super().send(buffer, rank, tag)
        return work if tag else self.check(work, self.sends[rank].pop(0), True)

    def recv(self, buffer, rank, tag):
        work = super().recv(buffer, rank, tag)
        return work if tag else self.check(work, next(self.recvs), False)


@pytest.mark.parametrize("seed", [5, 16, 42, 50, 56])
def test_message_is_posted_only_after_its_waits(seed):
    src, dst, shape, topology = random_problem(seed)
    plan = make_plan(src, dst, shape, "int8", topology=topology)
    programs = {rank: build_program(plan, rank) for rank in plan.ranks}
    ops = [op for program in programs.values() for op in (*program.recvs, *program.sends_across, *program.sends_inside)]
    assert {bool(op.waits) for op in ops if hasattr(op, "sender")} == {True, False}
    assert any(op.waits for op in ops if not hasattr(op, "sender")) and any(
        program.awaited for program in programs.values()
    )
    whole = whole_tensor(shape, torch.int8)
    done, hub, errors = set(), MemoryHub(), []
    sides = {
        rank: ([take_shard(src, rank, whole)], [None if s is None else torch.zeros_like(s)])
        for rank in plan.ranks
        for s in [take_shard(dst, rank, whole)]
    }

    def run(rank):
        arrays = [[None if x is None else view_as_bits(x) for x in side] for side in sides[rank]]
        staging = Staging(programs[rank], plan.staging_bytes)
        try:
            transport = _CheckingWaits(hub, programs[rank], done)
            run_program(programs[rank], transport, *arrays, staging, RunOptions(deadline=time.monotonic() + 5))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in plan.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for rank in dst.ranks:
        assert same_bytes(sides[rank][1][0], take_shard(dst, rank, whole))


class _CountingRecvs(MemoryTransport):
    """Counts the receives under way, and their maximum."""

    under_way = most = 0

    def recv(self, buffer, rank, tag):
        work = super().recv(buffer, rank, tag)
        if tag == 0:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            wait = work.wait

            def waited(timeout):
                wait(timeout)
                self.under_way -= 1

            work.wait = waited
        return work


def test_receives_under_way_stay_within_the_limit():
    plan = make_plan(Layout(Mesh([0])), Layout(Mesh([1])), (4096, 64), "float32", staging_bytes=2**16)
    programs = {rank: build_program(plan, rank) for rank in (0, 1)}
    ahead = {recv.ahead for recv in programs[1].recvs}
    assert len(ahead) == 1 and len(programs[1].recvs) > max(ahead)
    hub = MemoryHub()
    transports = {0: MemoryTransport(hub, 0), 1: _CountingRecvs(hub, 1)}
    whole, out = torch.arange(4096 * 64, dtype=torch.int32).reshape(4096, 64), torch.zeros(4096, 64, dtype=torch.int32)
    sides = {0: ([whole], [None]), 1: ([None], [out])}

    def run(rank):
        staging = Staging(programs[rank], plan.staging_bytes)
        run_program(programs[rank], transports[rank], *sides[rank], staging, RunOptions(deadline=time.monotonic() + 20))

    sender = threading.Thread(target=run, args=(0,))
    sender.start()
    run(1)
    sender.join()
    assert out.equal(whole)
    assert transports[1].most == max(ahead)


@pytest.mark.parametrize("verifies", [False, True])
def test_local_copy_is_verified_only_with_digests(verifies, monkeypatch):
    plan = make_plan(Layout(Mesh([0])), Layout(Mesh([0])), (4,), "int8")
    program = build_program(plan, 0)
    monkeypatch.setattr(program_executor, "is_copy_of", lambda target, source: False)  # pretend that the copy differs
    sides = [torch.ones(4, dtype=torch.uint8)], [torch.zeros(4, dtype=torch.uint8)]
    digests = TransferDigests() if verifies else None
    run = functools.partial(
        run_program, program, MemoryTransport(MemoryHub(), 0), *sides, Staging(program, plan.staging_bytes),
        options=RunOptions(time.monotonic() + 5, digests=digests),
    )  # fmt: skip
    if verifies:
        with pytest.raises(WrongCopyError) as caught:
            run()
        assert caught.value.id == program.copies[0].id
    else:
        run()
    assert sides[1][0].tolist() == [1] * 4


def test_plan_that_delivers_too_little_to_a_rank_is_rejected():
    plan = make_plan(Layout(Mesh.of(2), "S0"), Layout(Mesh([2])), (4,), "int8", strategy="send_recv")
    lines = str(plan).splitlines()
    last = max(i for i, line in enumerate(lines) if " -> 2" in line)
    short = parse_plan("\n".join(lines[:last] + lines[last + 1 :]) + "\n")
    with pytest.raises(PlanError, match="rank 2"):
        build_program(short, 2)


def test_partially_needed_message_is_rejected():
    stripes = [[(0, 6), (2 * i, 2 * i + 1)] for i in range(3)]
    src, dst = (RegionLayout({rank: boxes}, join_dim=1) for rank, boxes in ((0, stripes), (1, stripes[:2])))
    text = str(make_plan(src, dst, (6, 6), "int8", strategy="send_recv"))
    assert text.count("t0 [0:6, 2:3] ") == 1
    more = parse_plan(text.replace("t0 [0:6, 2:3] ", "t0 [0:6, 2:3] + t0 [0:6, 4:5] "))
    with pytest.raises(PlanError, match="message 0: rank 1 needs some of its boxes only"):
        build_program(more, 1)
