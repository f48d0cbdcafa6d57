"""The plan checker accepts the same plans as a reference checker, which replays them message by message."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reshard import Layout, Mesh, RegionLayout, ReshardError, Topology, check_plan, make_plan
from reshard.errors import PlanError
from reshard.plan import Plan, PlanTransfers, expand_messages, message_nbytes, parse_plan, tabulate_messages
from reshard.planner.strategy_registry import STRATEGIES
from reshard.sharding.box_search import find_overlapping, locate_points
from tests.support import reference_check
from tests.support.changed import change_plan, relayed_plan
from tests.support.random_problems import random_problem
from tests.support.strategies_of_cases import cases


def _accepts(check, plan):
    try:
        check(plan)
    except PlanError:
        return False
    return True


def _agree(text):
    """Assert that both checkers agree on a plan. Returns whether they accept it; None if the text does not parse."""
    try:
        plan = parse_plan(text)
    except ReshardError:
        return None
    good = _accepts(reference_check.check_plan, plan)
    assert _accepts(check_plan, plan) == good, text
    return good


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_checkers_agree_on_mutated_plans(seed):
    rng = random.Random(seed)
    src, dst, shape, topology = random_problem(seed)
    found = []
    for strategy in STRATEGIES:
        plan = make_plan(src, dst, shape, "int8", strategy=strategy, topology=topology, staging_bytes=2**16)
        text = str(plan)
        assert _agree(text)
        for _ in range(12):
            changed = change_plan(text, rng)
            found.append(_agree(changed if rng.random() < 0.7 else change_plan(changed, rng)))
    assert found.count(True) > 2 and found.count(False) > 2, found


@pytest.mark.slow
def test_checkers_agree_on_plans_with_much_staging():
    rng, found = random.Random(0), []
    for seed in range(150):
        text = relayed_plan(seed)
        found.append(_agree(text))
        for _ in range(4):
            found.append(_agree(change_plan(text, rng)))
    assert found.count(True) > 60 and found.count(False) > 60, found


@pytest.mark.integration
@given(cases(), st.sampled_from(sorted(STRATEGIES)), st.randoms(use_true_random=False))
def test_checkers_agree_on_random_cases(case, strategy, rng):
    shape, src, dst, topology = case
    text = str(make_plan(src, dst, shape, "int16", strategy=strategy, topology=topology))
    assert _agree(text)
    for _ in range(4):
        _agree(change_plan(text, rng))


STAGED = """\
plan by_hand staging_bytes=64
topology nic_bytes_per_second=1.0 hosts 0*5
tensor 0 int8 [8] from () on Mesh(ranks 0) to Regions(ndim=1 join=0; 1: none; 3: [0:8]; 4: [0:8])
0: t0 [0:8] 0 -> 1 splits 1 window 4
1: t0 [0:8] 1 -> 3 splits 1 window 4 from 0
"""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("2: t0 [0:4] 0 -> 1\n3: t0 [0:4] 1 -> 4 from 2\n4: t0 [4:8] 0 -> 1\n5: t0 [4:8] 1 -> 4 from 4", None),
        (
            "2: t0 [0:4] 0 -> 1\n3: t0 [0:4] 1 -> 4 from 2\n4: t0 [4:8] 0 -> 4\n5: t0 [0:8] 1 -> 2 from 0",
            "rank 2 takes part in a transfer, but is in neither layout",
        ),
        (
            "2: t0 [0:4] 0 -> 4\n3: t0 [2:8] 0 -> 1\n4: t0 [2:8] 1 -> 4 from 3",
            "delivers 2 elements to rank 4 a second time",
        ),
        ("2: t0 [0:4] 0 -> 4\n3: t0 [4:8] 1 -> 4 from 0", "passes on other boxes than message 0 brings"),
        ("2: t0 [0:4] 0 -> 4\n3: t0 [0:4] 0 -> 4", r"message 3: \[0:4\] delivers 4 elements to rank 4 a second time"),
    ],
)
def test_a_staged_box_is_replaced_by_a_box_that_it_contains(lines, message):
    text = STAGED + "".join(
        line.replace(" from", " splits 1 window 4 from") + ("" if "from" in line else " splits 1 window 4") + "\n"
        for line in lines.split("\n")
    )
    assert _agree(text) == (message is None)
    if message is not None:
        with pytest.raises(PlanError, match=message):
            check_plan(parse_plan(text))


def test_a_replaced_staged_box_cannot_be_forwarded():
    text = STAGED + (
        "2: t0 [0:4] 0 -> 1 splits 1 window 4\n3: t0 [0:4] 1 -> 4 splits 1 window 4 from 2\n"
        "4: t0 [4:8] 0 -> 4 splits 1 window 4\n"
    )
    late = text.replace("1: t0 [0:8] 1 -> 3 splits 1 window 4 from 0\n", "").replace("2: t0", "1: t0")
    late = late.replace("3: t0 [0:4] 1 -> 4 splits 1 window 4 from 2", "2: t0 [0:4] 1 -> 4 splits 1 window 4 from 1")
    late = late.replace("4: t0", "3: t0") + "4: t0 [0:8] 1 -> 3 splits 1 window 4 from 0\n"
    assert _agree(text) and _agree(late) is False


def _boxes(rng, ndim, count, size):
    start = rng.integers(0, size, (count, ndim))
    return start, start + rng.integers(1, 1 + size // 4, (count, ndim))


@pytest.mark.parametrize("ndim", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [4, 30, 400, 2**50])
def test_find_overlapping_matches_comparing_all_pairs(ndim, size):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        start, stop = _boxes(rng, ndim, 300, size)
        group = rng.integers(0, 1 + 20 * (seed % 3), 300)
        overlaps = ((start[:, None] < stop[None]) & (start[None] < stop[:, None])).all(axis=2)
        overlaps &= (group[:, None] == group[None]) & ~np.eye(300, dtype=bool)
        assert (find_overlapping(group, start, stop) == overlaps.any(axis=1)).all()


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_locate_points_matches_comparing_all_pairs(ndim):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        start, stop = _boxes(rng, ndim, 2000, 60)
        disjoint: list[int] = []
        for i in range(len(start)):  # random boxes, no two of which overlap
            if not ((start[disjoint] < stop[i]) & (start[i] < stop[disjoint])).all(axis=1).any():
                disjoint.append(i)
        start, stop = start[disjoint], stop[disjoint]
        point = rng.integers(-3, 80, (1000, ndim))
        holds = ((start[None] <= point[:, None]) & (point[:, None] < stop[None])).all(axis=2)
        wanted = np.where(holds.any(axis=1), holds.argmax(axis=1), -1)
        assert (locate_points(point, start, stop) == wanted).all()


def test_message_table_matches_expansion():
    """In this tree, rank 1 receives a huge box twice, in many chunks, and forwards the last copy."""
    dst = RegionLayout({rank: [[(0, 2**50)]] for rank in (1, 2, 3)})
    plan = make_plan(Layout(Mesh.of(1)), dst, (2**50,), "int8", strategy="send_recv", topology=Topology((0, 1, 2, 3)))
    edges = [(0, 1), (1, 2), (0, 1), (1, 3), (2, 2), (2, 3)]
    tree = PlanTransfers(
        box_offsets=[0, 1],
        box_tensor=[0],
        box_start=[[0]],
        box_stop=[[2**50 - 1]],
        edge_offsets=[0, len(edges)],
        sender=[a for a, _ in edges],
        receiver=[b for _, b in edges],
        splits=[[3000]],
        window=[2],
    )
    table = tabulate_messages(replace(plan, transfers=tree))
    for row, message in enumerate(expand_messages(replace(plan, transfers=tree))):
        source = -1 if table.source[row] < 0 else table.id[table.source[row]]
        assert (table.id[row], source) == (message.id, -1 if message.source is None else message.source)
        assert table.nbytes[row] == message_nbytes(plan, message)


def test_message_table_of_a_transfer_without_edges():
    """Two transfers have two edges, but the first one has none."""
    plan = make_plan(Layout(Mesh.of(1)), Layout(Mesh.of("2", first_rank=1), "R"), (8,), "int8", strategy="send_recv")
    transfers = PlanTransfers(
        box_offsets=[0, 1, 2], box_tensor=[0, 0], box_start=[[0], [4]], box_stop=[[1], [8]], edge_offsets=[0, 0, 2],
        sender=[0, 0], receiver=[1, 2], splits=[[1], [1]], window=[2, 2],
    )  # fmt: skip
    table = tabulate_messages(replace(plan, transfers=transfers))
    rows = [(message.id, message.transfer, 4) for message in expand_messages(replace(plan, transfers=transfers))]
    assert [*zip(table.id.tolist(), table.transfer.tolist(), table.nbytes.tolist(), strict=True)] == rows
    assert [row[:2] for row in rows] == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("edge_offsets", [0, 5]),
        ("region", [7]),
        ("box_tensor", [2]),
        ("splits", [[0]]),
        ("window", [0]),
        ("receiver", [-1]),
        ("box_start", [0]),
        ("after_offsets", [0, 1]),
        ("splits", [[2**40]]),
    ],
)
def test_inconsistent_transfer_arrays_are_refused(name, value):
    plan = make_plan(Layout(Mesh.of(1)), Layout(Mesh.of(1, first_rank=1)), (8,), "int8", strategy="send_recv")
    fields = {field: getattr(plan.transfers, field) for field in PlanTransfers.__dataclass_fields__}
    bad: Plan = replace(plan, transfers=PlanTransfers(**(fields | {name: value})))
    with pytest.raises(PlanError):
        check_plan(bad)


def test_source_must_be_in_after():
    plan = make_plan(Layout(Mesh.of(1)), Layout(Mesh.of(1, first_rank=1)), (8,), "int8", strategy="send_recv")
    fields = {field: getattr(plan.transfers, field) for field in PlanTransfers.__dataclass_fields__}
    with pytest.raises(PlanError, match="gets data from transfer 0, but does not come after it"):
        PlanTransfers(**(fields | {"source": [0]}))
