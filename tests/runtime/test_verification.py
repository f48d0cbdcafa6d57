"""With ``verify=True``, a changed byte raises the same error on every rank.

The error names the region, the hop and the ranks.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

import reshard
from reshard import Layout, Mesh, RegionLayout, Topology
from reshard.cli.demo_transfers import count_unlike, shard_of_positions
from reshard.plan import expand_messages, parse_plan
from reshard.runtime import build_program
from reshard.runtime.cpu import program_executor
from reshard.runtime.cpu.verification import MessageDigests, TransferDigests, compare_digests, describe_copy, find_fault
from reshard.runtime.transport import GlooTransport
from reshard.testing.processes import run_processes
from tests.support.memory_transport import MemoryHub, MemoryTransport

SHAPE = (64, 60)
SRC, DST = Layout(Mesh.of("2"), "R S0"), Layout(Mesh.of("2x2", first_rank=2), "S0 R")
TOPOLOGY = Topology((0, 0, 1, 1, 2, 2))  # a host receives each region once and forwards it inside


def _move(rank, spoil, verify=True):
    source, wanted = (shard_of_positions(layout, rank, SHAPE, "float32") for layout in (SRC, DST))
    if spoil is not None:
        spoil(rank)
    kept = None if source is None else source.clone()
    found = []
    plan = reshard.make_plan(SRC, DST, SHAPE, "float32", topology=TOPOLOGY)
    with reshard.Mover(plan, verify=verify) as mover:
        for _ in range(2):
            try:
                out = mover(source)
            except reshard.ReshardError as error:
                found.append(f"{type(error).__name__}: {error}")
            else:
                found.append(0 if wanted is None else count_unlike(out, wanted))
    assert kept is None or torch.equal(kept, source)
    return found


def test_hops_pair_forwarded_with_received_messages():
    plan = reshard.make_plan(
        Layout(Mesh([4])), Layout(Mesh([1, 7])), (8,), "int8", strategy="broadcast_naive", topology=Topology((0,) * 8)
    )
    messages = MessageDigests(plan)
    assert (messages.sender.tolist(), messages.receiver.tolist()) == ([4, 7], [7, 1])
    assert (messages.forwards.tolist(), messages.brought_by.tolist()) == (
        [1],
        [0],
    )  # hop 0 brings the data that hop 1 forwards


@pytest.mark.parametrize("side", ["sent", "received"])
def test_fault_is_found_after_local_copies(side):
    plan = reshard.make_plan(Layout(Mesh.of(2), "S0"), Layout(Mesh([1, 2])), (8,), "int8", strategy="send_recv")
    messages = list(expand_messages(plan))
    assert any(message.sender == message.receiver for message in messages)
    moved = [message for message in messages if message.sender != message.receiver]
    digests = {name: {item.id: item.id for item in moved} for name in ("sent", "received")}
    assert find_fault(plan, digests["sent"], digests["received"]) is None
    for item in moved:
        changed = digests | {side: digests[side] | {item.id: -1}}
        fault = find_fault(plan, changed["sent"], changed["received"])
        assert fault is not None and f"rank {item.receiver} does not hold what rank {item.sender} sent" in fault


def test_wrong_copy_error_names_the_region():
    plan = reshard.make_plan(Layout(Mesh([0])), Layout(Mesh([0])), {"a": (2,), "b": (3,)}, "int8", strategy="send_recv")
    copies = list(expand_messages(plan))
    assert {describe_copy(plan, 0, copies[0].id), describe_copy(plan, 0, copies[1].id)} == {
        f"[0:{size}] of {name!r}: rank 0 does not hold what it copied itself (message {copy.id})"
        for copy, name, size in zip(copies, "ab", (2, 3), strict=True)
    }


def test_wrong_copy_error_names_one_box_of_a_message():
    plan = parse_plan(
        "plan by_hand staging_bytes=65536\ntopology nic_bytes_per_second=1.0 hosts 0*1\n"
        "tensor 0 int8 [5] from () on Mesh(ranks 0) to () on Mesh(ranks 0)\n"
        "0: t0 [0:2] + t0 [2:5] 0 -> 0 splits 1 window 4\n"
    )
    assert [copy.id for copy in build_program(plan, 0).copies] == [0, 1]
    assert describe_copy(plan, 0, 1) == "[2:5]: rank 0 does not hold what it copied itself (message 0 (box id 1))"


class _Recording(MemoryTransport):
    """A transport that records every posted operation."""

    def __init__(self, hub, rank):
        super().__init__(hub, rank)
        self.posted = []

    def send(self, buffer, rank, tag):
        self.posted.append(super().send(buffer, rank, tag))
        return self.posted[-1]

    def recv(self, buffer, rank, tag):
        self.posted.append(super().recv(buffer, rank, tag))
        return self.posted[-1]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_comparison_waits_for_every_posted_operation(is_wrong):
    plan = reshard.make_plan(Layout(Mesh.of(2), "S0"), Layout(Mesh([2])), (8,), "int8", strategy="send_recv")
    messages, hub = MessageDigests(plan), MemoryHub()

    def compare(rank):
        digests, transport, waited = TransferDigests(), _Recording(hub, rank), []
        for message in expand_messages(plan, rank):
            side = digests.sent if message.sender == rank else digests.received
            side[message.id] = is_wrong and message.receiver == rank

        def wait(work, other):
            work.wait(timedelta(seconds=5))
            waited.append(work)

        try:
            compare_digests(messages, rank, digests, transport, 7, wait)
            text = ""
        except reshard.errors.VerificationError as error:
            text = str(error)
        assert len(waited) == len(transport.posted) > 0 and set(map(id, waited)) == set(map(id, transport.posted))
        return text

    with ThreadPoolExecutor(3) as pool:
        texts = set(pool.map(compare, plan.ranks))
    assert len(texts) == 1 and ("rank 2 does not hold what rank 0 sent" in texts.pop()) == is_wrong


def test_verification_accepts_correct_transfers():
    assert run_processes(_move, 6, None) == [[0, 0]] * 6


def _flip(tensor):
    flat = tensor.contiguous().view(torch.uint8).reshape(-1)
    flat[len(flat) // 2] ^= 1
    return flat.view(tensor.dtype).reshape(tensor.shape)


def _on_the_wire(rank):
    """Change the bytes of the first message that rank 1 sends, after their digest."""
    if rank == 1:
        send, sent = GlooTransport.send, []

        def changed(self, buffer, to, tag):
            sent.append(to)
            return send(self, _flip(buffer.clone()) if len(sent) == 1 else buffer, to, tag)

        GlooTransport.send = changed


def _in_a_shard(rank):
    """Change the shard of rank 3 after it has unpacked a message."""
    if rank == 3:
        unpack = program_executor._Execution.unpack

        def changed(self, op, slot):
            unpack(self, op, slot)
            array = self.dst[op.boxes[0].tensor]
            array.copy_(_flip(array))

        program_executor._Execution.unpack = changed


def _before_forwarding(rank):
    """Rank 2 changes a message between receiving and forwarding it."""
    if rank == 2:
        finish = program_executor._Execution.finish_recv

        def changed(self, op, slot):
            if slot is not None:
                slot.copy_(_flip(slot))
            finish(self, op, slot)

        program_executor._Execution.finish_recv = changed


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (_on_the_wire, ("does not hold what rank 1 sent", "from rank 1")),
        (_in_a_shard, ("rank 3 does not hold what rank",)),
        (_before_forwarding, ("rank 2 passed on other bytes to rank 3 than it had received",)),
    ],
)
def test_changed_bytes_raise_the_same_error_on_all_ranks(spoil, names):
    found = run_processes(_move, 6, spoil)
    assert len({errors[0] for errors in found}) == 1
    assert str(found[0][0]).startswith("VerificationError: [")
    assert all(name in found[0][0] for name in names), found[0][0]
    assert all(errors[1] == errors[0] for errors in found)  # a failed Mover raises its error again


def test_changed_bytes_pass_without_verify():
    found = run_processes(_move, 6, _on_the_wire, False)
    assert sum(wrong[0] for wrong in found) > 0


def _move_verified(rank):
    src = RegionLayout({0: [[(0, 3), (0, 4)], [(3, 5), (0, 4)]], 1: [[(5, 8), (0, 4)]]})
    dst = Layout(Mesh([1, 2]), "R S0")
    source = shard_of_positions(src, rank, (8, 4), "bfloat16")
    out = reshard.reshard(source, src, dst, shape=(8, 4), dtype="bfloat16", verify=True)
    wanted = shard_of_positions(dst, rank, (8, 4), "bfloat16")
    tensors = {"a": source, "b": source}
    both = reshard.reshard(tensors, src, dst, shape=(8, 4), dtype="bfloat16", verify=True)
    for moved in (out, both["a"], both["b"]):
        assert wanted is None or not count_unlike(moved, wanted)


def test_reshard_with_verify_delivers():
    run_processes(_move_verified, 3)


def _verify_on_rank_0(rank):
    try:
        reshard.reshard(
            torch.zeros(2, 2) if rank < 1 else None,
            Mesh.of(1),
            Mesh.of(1, first_rank=1),
            shape=(2, 2),
            verify=rank == 0,
        )
    except reshard.errors.DisagreementError as error:
        return str(error)
    return None


def test_ranks_must_agree_on_verify():
    errors = run_processes(_verify_on_rank_0, 2)
    assert errors[0] == errors[1]
    assert "verify" in errors[0]


@pytest.mark.parametrize(("boxes", "more"), [(3, ""), (4, " and 1 more")])
def test_fault_names_three_boxes_and_counts_the_rest(boxes, more):
    stripes = RegionLayout(
        {rank: [[(0, 2), (2 * i + rank, 2 * i + rank + 1)] for i in range(boxes)] for rank in (0, 1)}
    )
    plan = reshard.make_plan(stripes, Layout(Mesh([2])), (2, 2 * boxes), "int8")
    first, second = (message for message in expand_messages(plan))
    good = {first.id: 7, second.id: 8}
    assert find_fault(plan, good, good) is None
    fault = find_fault(plan, good, good | {second.id: 9})
    shown = ", ".join(f"[0:2, {2 * i + second.sender}:{2 * i + second.sender + 1}]" for i in range(3))
    assert fault == (
        f"{shown}{more} from rank {second.sender}: rank 2 does not hold what rank {second.sender} sent "
        f"(message {second.id})"
    )


def test_fault_names_a_rank_that_forwards_changed_bytes():
    plan = reshard.make_plan(
        Layout(Mesh([0])), Layout(Mesh([1, 2])), (8,), "int8", strategy="broadcast_naive", topology=Topology((0,) * 3)
    )
    first, second = (message for message in expand_messages(plan))
    assert second.source == first.id
    fault = find_fault(plan, {first.id: 1, second.id: 2}, {first.id: 1, second.id: 2})
    assert fault is not None
    assert f"from rank 0: rank {second.sender} passed on other bytes to rank {second.receiver} than" in fault
