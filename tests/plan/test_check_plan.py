"""The checker finds planted faults, and the plan order prevents deadlock."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from microbench.planner import check_speed
from reshard import Layout, Mesh, Topology, check_plan, make_plan
from reshard.errors import PlanError
from reshard.plan import PlanTransfers, parse_plan
from reshard.planner.strategy_registry import STRATEGIES
from reshard.runtime import build_program
from tests.support.memory_transport import run_in_threads
from tests.support.tensors import same_bytes, take_shard, whole_tensor

SRC, DST = Layout(Mesh.of("2x2"), "S0 S1"), Layout(Mesh.of("2x2", first_rank=4), "R S0")
TOPOLOGY = Topology((0, 0, 1, 1, 2, 2, 3, 3))


def _plan(strategy="broadcast_greedy"):
    return make_plan(SRC, DST, (12, 16), "float32", strategy=strategy, topology=TOPOLOGY)


def _with(plan, **arrays):
    old = plan.transfers
    fields = {name: getattr(old, name) for name in PlanTransfers.__dataclass_fields__}
    return replace(plan, transfers=PlanTransfers(**(fields | arrays)))


def _drop_last_edge(plan):
    t = plan.transfers
    edge_offsets = t.edge_offsets.copy()
    edge_offsets[-1] -= 1
    return _with(plan, edge_offsets=edge_offsets, sender=t.sender[:-1], receiver=t.receiver[:-1])


def _shift(name, amount):
    def plant(plan):
        array = getattr(plan.transfers, name).copy()
        array[-1, 0] += amount
        return _with(plan, **{name: array})

    return plant


def _empty(plan):
    stop = plan.transfers.box_stop.copy()
    stop[-1, 1] = plan.transfers.box_start[-1, 1]
    return _with(plan, box_stop=stop)


def _rank(name, rank):
    def plant(plan):
        array = getattr(plan.transfers, name).copy()
        array[-1] = rank
        return _with(plan, **{name: array})

    return plant


def _wrong_sender(plan):
    """Make a source rank that holds another tile the sender of the last edge."""
    start, stop = plan.transfers.box_start[-1], plan.transfers.box_stop[-1]
    shards = plan.tensors[0].src_tiles
    holders = {
        rank
        for rank in SRC.ranks
        for lo, hi in zip(*shards.pieces_of(rank)[:2], strict=True)
        if (lo <= start).all() and (stop <= hi).all()
    }
    return _rank("sender", min(set(SRC.ranks) - holders))(plan)


def _twice(plan):
    """Repeat the last transfer."""
    t = plan.transfers
    edges = slice(t.edge_offsets[-2], t.edge_offsets[-1])
    return _with(
        plan,
        region=np.append(t.region, t.region[-1]),
        edge_offsets=np.append(t.edge_offsets, t.edge_offsets[-1] + t.edge_offsets[-1] - t.edge_offsets[-2]),
        sender=np.append(t.sender, t.sender[edges]),
        receiver=np.append(t.receiver, t.receiver[edges]),
        splits=np.concatenate([t.splits, t.splits[-1:]]),
        window=np.append(t.window, t.window[-1]),
        after_offsets=np.append(t.after_offsets, 2 * t.after_offsets[-1] - t.after_offsets[-2]),
        after=np.append(t.after, t.after[t.after_offsets[-2] :]),
        source=np.append(t.source, t.source[-1]),
    )


FAULTS = {
    "an edge is missing": (_drop_last_edge, "needs"),
    "a region is too small": (_shift("box_stop", -1), "needs"),
    "a region is shifted": (_shift("box_start", 1), "needs"),
    "a region reaches past the tensor": (_shift("box_stop", 99), "outside shape"),
    "an empty region": (_empty, "is empty or outside shape"),
    "the wrong rank sends": (_wrong_sender, "at that point"),
    "the wrong rank receives": (_rank("receiver", 0), "neither needs nor passes on"),
    "a transfer is repeated": (_twice, "a second time"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_planted_faults_are_found(fault, strategy):
    plant, text = FAULTS[fault]
    plan = _plan(strategy)
    check_plan(plan)
    with pytest.raises(PlanError) as caught:
        check_plan(plant(plan))
    assert text in str(caught.value) or fault.startswith(("the wrong rank", "a region"))


@pytest.mark.parametrize(
    ("dst", "refused"),
    [
        ([0, 1], "message 1: [0:4]: message 0 is a copy on rank 0, and copies cannot be passed on"),
        ([1, 2], "message 1: [0:4]: rank 0 sends 4 elements, but has only 0 at that point"),
    ],
    ids=["a copy", "a message to another rank"],
)
def test_a_rank_passes_on_only_received_messages(dst, refused):
    plan = make_plan(Layout(Mesh([0])), Layout(Mesh(dst)), (4,), "int8", strategy="send_recv")
    text = "".join(f"{line} from 0\n" if line.startswith("1: ") else f"{line}\n" for line in str(plan).splitlines())
    bad = parse_plan(text)
    assert str(bad) != str(plan)
    with pytest.raises(PlanError, match=re.escape(refused)):
        check_plan(bad)
    with pytest.raises(PlanError, match="message 1: rank 0 passes on message 0, which it has not received"):
        build_program(bad, 0)


@pytest.mark.parametrize("rank", [2, 9])
def test_ranks_outside_both_layouts_are_refused(rank):
    """Rank 2 has a host in the topology, rank 9 has none."""
    topology = Topology((0, 0, 1))
    text = str(make_plan(Layout(Mesh([0])), Layout(Mesh([1])), (4,), "int8", strategy="send_recv", topology=topology))
    bad = parse_plan(text.replace("0 -> 1", f"0 -> {rank}"))
    for use in (check_plan, lambda plan: build_program(plan, 0), lambda plan: build_program(plan, 1)):
        with pytest.raises(PlanError, match=f"rank {rank} takes part in a transfer, but is in neither layout"):
            use(bad)


def test_errors_name_ranks_boxes_and_numbers():
    text = str(make_plan(Layout(Mesh.of("1")), Layout(Mesh.of("1", first_rank=1)), (8, 1), "int8"))
    with pytest.raises(PlanError, match=r"rank 1 needs 8 elements, but is sent 4"):
        check_plan(parse_plan(text.replace("[0:8, 0:1]", "[0:4, 0:1]")))
    *head, line = text.splitlines()[:4]
    split = "\n".join([*head, line.replace("splits 1x1", "splits 2x1"), f"{line.replace('0:', '2:', 1)} after 0"])
    with pytest.raises(PlanError, match="comes after transfer 0, which is not an earlier transfer of a single message"):
        parse_plan(split)
    halves = Layout(Mesh.of("2", first_rank=1), "S0")
    text = str(make_plan(Layout(Mesh.of("1")), halves, (8, 1), "int8", strategy="send_recv"))
    with pytest.raises(
        PlanError, match="not inside one tile that rank 1 needs: it overlaps 1 such tiles in 4 of its 6 elements"
    ):
        check_plan(parse_plan(text.replace("[0:4, 0:1]", "[0:6, 0:1]")))


CROSSING = """\
plan by_hand staging_bytes={staging}
topology nic_bytes_per_second=1.0 hosts 0*1,1*1,2*1,3*1
tensor 0 uint8 [64, 2048] named "a" from () on Mesh(ranks 0) to (-, 0) on Mesh(0=2; ranks 2,1)
tensor 1 uint8 [64, 2048] named "b" from () on Mesh(ranks 3) to (-, 0) on Mesh(0=2; ranks 1,2)
"""
# Half of a goes to rank 2 over rank 1, half of b to rank 1 over rank 2. Each half is one message that fills a buffer.
GOOD = CROSSING + (
    "0: t0 [0:64, 0:1024] 0 -> 1 -> 2 splits 1x1 window 1\n"
    "2: t1 [0:64, 0:1024] 3 -> 2 -> 1 splits 1x1 window 1\n"
    "4: t0 [0:64, 1024:2048] 0 -> 1 splits 1x1 window 1\n"
    "5: t1 [0:64, 1024:2048] 3 -> 2 splits 1x1 window 1\n"
)


def _arrays_of_chains(plan):
    sources = {rank: [None, None] for rank in range(4)}
    outs = {rank: [None, None] for rank in range(4)}
    for i, spec in enumerate(plan.tensors):
        whole = whole_tensor(spec.shape, torch.uint8)
        for rank in range(4):
            sources[rank][i] = take_shard(spec.src, rank, whole)
            if rank in spec.dst.ranks:
                # not contiguous, so that every received message needs a buffer
                outs[rank][i] = torch.zeros(1024, 64, dtype=torch.uint8).t()
    return sources, outs


def test_opposite_chains_with_one_buffer_each_run_in_plan_order():
    plan = parse_plan(GOOD.format(staging=2 * 64 * 1024))
    check_plan(plan)
    sources, outs = _arrays_of_chains(plan)
    staged = run_in_threads(plan, sources, outs)
    assert max(staged.values()) <= plan.staging_bytes
    for i, spec in enumerate(plan.tensors):
        whole = whole_tensor(spec.shape, torch.uint8)
        for rank in spec.dst.ranks:
            assert same_bytes(outs[rank][i], take_shard(spec.dst, rank, whole))


def test_first_hops_first_is_refused_and_would_deadlock():
    """The order 0 -> 1, 3 -> 2, 1 -> 2, 2 -> 1: each relay holds its only buffer while it must receive."""
    lines = (
        "0: t0 [0:64, 0:1024] 0 -> 1 splits 1x1 window 1\n"
        "1: t1 [0:64, 0:1024] 3 -> 2 splits 1x1 window 1\n"
        "2: t0 [0:64, 0:1024] 1 -> 2 splits 1x1 window 1 from 0\n"
        "3: t1 [0:64, 0:1024] 2 -> 1 splits 1x1 window 1 from 1\n"
        "4: t0 [0:64, 1024:2048] 0 -> 1 splits 1x1 window 1\n"
        "5: t1 [0:64, 1024:2048] 3 -> 2 splits 1x1 window 1\n"
    )
    plan = parse_plan((CROSSING + lines).format(staging=2 * 64 * 1024))
    with pytest.raises(PlanError, match="it can stage at most 1 of"):
        check_plan(plan)
    with pytest.raises(Exception, match=r"did not finish in time|timed out waiting for a message"):
        run_in_threads(plan, *_arrays_of_chains(plan), seconds=1.0)


@pytest.mark.parametrize(
    ("edges", "message"), [("1 -> 2", "rank 1 sends 8 elements, but has only 0"), ("2 -> 1", "rank 2 sends")]
)
def test_senders_must_have_their_data(edges, message):
    """The sender holds nothing, or needs the data itself."""
    lines = [
        "plan by_hand staging_bytes=65536",
        "topology nic_bytes_per_second=1.0 hosts 0*3",
        "tensor 0 uint8 [8] from () on Mesh(ranks 0) to Regions(ndim=1 join=0; 1: none; 2: [0:8])",
        f"0: t0 [0:8] {edges} splits 1 window 1",
    ]
    with pytest.raises(PlanError, match=message):
        check_plan(parse_plan("\n".join(lines)))


@pytest.mark.parametrize(("dtype", "itemsize"), [("uint8", 1), ("float64", 8)])
def test_relays_above_staging_bytes_are_refused(dtype, itemsize):
    """Rank 1 stages one chunk at a time. One of eight chunks fits in ``staging_bytes``, one of two does not."""
    numel = 262144 // itemsize
    lines = [
        "plan by_hand staging_bytes=65536",
        "topology nic_bytes_per_second=1.0 hosts 0*3",
        f"tensor 0 {dtype} [{numel}] from () on Mesh(ranks 0) to Regions(ndim=1 join=0; 1: none; 2: [0:{numel}])",
        f"0: t0 [0:{numel}] 0 -> 1 -> 2 splits 8 window 1",
    ]
    check_plan(parse_plan("\n".join(lines)))  # eight smaller chunks fit
    lines[-1] = f"0: t0 [0:{numel}] 0 -> 1 -> 2 splits 2 window 1"
    with pytest.raises(PlanError, match="rank 1 would stage 131072 bytes, but staging_bytes is 65536"):
        check_plan(parse_plan("\n".join(lines)))


def test_relays_above_the_window_are_refused():
    """Rank 1 forwards its first two messages at once. Then it stages two more, which fit, and a third."""
    steps, ids, lines = ["R0", "S0", "R1", "S1", "R2", "R3", "R4", "S2", "S3", "S4"], {}, []
    for number, step in enumerate(steps):
        at = int(step[1])
        where = f"{number}: t0 [{at * 16384}:{(at + 1) * 16384}]"
        if step[0] == "R":
            ids[at] = number
            lines.append(f"{where} 0 -> 1 splits 1 window 1")
        else:
            lines.append(f"{where} 1 -> 2 splits 1 window 1 from {ids[at]}")
    head = [
        "plan by_hand staging_bytes=65536",
        "topology nic_bytes_per_second=1.0 hosts 0*3",
        "tensor 0 uint8 [81920] from () on Mesh(ranks 0) to Regions(ndim=1 join=0; 1: none; 2: [0:81920])",
    ]
    with pytest.raises(
        PlanError,
        match="message 6: rank 1 must receive it while staging 2 messages for others, but it can stage at most 2",
    ):
        check_plan(parse_plan("\n".join([*head, *lines])))


#: Rank 0 holds two stripes. Each message has two boxes, so the messages have ids 0 and 2.
STRIPES = """\
plan by_hand staging_bytes=65536
topology nic_bytes_per_second=1.0 hosts 0*4
tensor 0 int8 [4] named "a" from () on Mesh(ranks 0) to {dst}
tensor 1 int8 [6] named "b" from () on Mesh(ranks 0) to {dst}
"""


@pytest.mark.parametrize(
    ("dst", "lines", "refused"),
    [
        (
            "() on Mesh(ranks 2)",
            ["0: t0 [0:4] + t1 [0:6] 0 -> 2", "2: t0 [0:4] + t1 [0:6] 0 -> 2"],
            "message 2 (box id 2): [0:4] delivers 4 elements to rank 2 a second time",
        ),
        (
            "() on Mesh(ranks 2)",
            ["0: t0 [0:2] + t1 [0:6] 0 -> 2", "2: t0 [2:4] + t1 [2:6] 0 -> 2"],
            "message 2 (box id 3): [2:6] delivers 4 elements to rank 2 a second time",
        ),
        (
            "Regions(ndim=1 join=0; 2: none; 3: [0:4])",
            ["0: t0 [0:4] + t1 [0:4] 0 -> 3", "2: t0 [0:2] + t1 [0:2] 0 -> 2"],
            "message 2 (box id 2): [0:2] brings 2 bytes to rank 2, which neither needs nor forwards them",
        ),
        (
            "Regions(ndim=1 join=0; 2: [0:4]; 3: [0:4])",
            ["0: t0 [0:4] + t1 [0:4] 0 -> 2", "2: t1 [0:4] + t0 [0:4] 2 -> 3"],
            "message 2 (box id 2): [0:4]: rank 2 receives it with message 0, which is not in `after`",
        ),
        (
            "Regions(ndim=1 join=0; 2: [0:4]; 3: [0:4])",
            ["0: t1 [0:4] + t0 [0:4] 0 -> 2", "2: t0 [0:4] + t1 [0:4] 2 -> 3 from 0"],
            "message 2 (box id 2): [0:4]: rank 2 receives it with message 0, which is not in `after`",
        ),
        (
            "Regions(ndim=1 join=0; 2: [0:4]; 3: [0:4])",
            ["0: t0 [0:4] + t1 [0:4] 0 -> 2", "2: t0 [0:4] + t1 [2:4] 2 -> 3 from 0"],
            "message 2 (box id 3): [2:4]: rank 2 passes on other boxes than message 0 brings",
        ),
    ],
)
def test_errors_name_the_message_of_each_box(dst, lines, refused):
    text = STRIPES.format(dst=dst)
    for line in lines:
        head, *source = line.split(" from ")
        text += f"{head} splits 1 window 4{''.join(f' from {item}' for item in source)}\n"
    with pytest.raises(PlanError) as caught:
        check_plan(parse_plan(text))
    assert str(caught.value) == refused


def test_errors_count_messages_and_not_their_boxes(monkeypatch):
    """Too many boxes are staged; the error counts the 2 messages that brought the 4 boxes."""

    def refuse(*boxes):
        raise PlanError("too many")

    monkeypatch.setattr("reshard.plan.check.plan_checker.find_overlapping", refuse)
    text = STRIPES.format(dst="Regions(ndim=1 join=0; 2: none; 3: [0:4])")
    for line in ("0: t0 [0:2] + t1 [0:2] 0 -> 2 splits 1 window 4", "2: t0 [2:4] + t1 [2:4] 0 -> 2 splits 1 window 4"):
        text += f"{line}\n"
    with pytest.raises(PlanError, match=r"^staged boxes of 2 messages: too many$"):
        check_plan(parse_plan(text))
    needed = STRIPES.format(dst="() on Mesh(ranks 2)") + "0: t0 [0:2] + t0 [1:3] 0 -> 2 splits 1 window 4\n"
    with pytest.raises(PlanError, match=r"the boxes of its 1 messages: too many$"):
        check_plan(parse_plan(needed))


def test_a_copy_of_a_missing_box_names_its_message():
    text = STRIPES.format(dst="() on Mesh(ranks 0)").replace(
        'named "b" from () on Mesh(ranks 0)', 'named "b" from () on Mesh(ranks 1)'
    )
    bad = parse_plan(text + "0: t0 [0:4] + t1 [0:6] 0 -> 0 splits 1 window 4\n")
    with pytest.raises(PlanError, match=re.escape("message 0 (box id 1): rank 0 cannot copy [0:6]")):
        build_program(bad, 0)


@pytest.mark.parametrize("name", ["2 -> 4 ranks, send_recv", "2 -> 2 ranks, small boxes"])
def test_fifty_thousand_messages_are_checked_within_a_second(name):
    """The check takes 0.02 to 0.4 s of CPU time. A checker that compares all pairs of messages took 10 to 40 s."""
    plan = check_speed.CASES[name](50_000)
    assert plan.num_messages >= 49_000
    begun = time.process_time()
    check_plan(plan)
    assert time.process_time() - begun < 1
