"""Plans that the planner of this process did not make are checked before they run."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import reshard
import reshard.cupy
import reshard.plan.check.plan_checker
from reshard import Layout, Mesh, RegionLayout, make_plan
from reshard.api.one_process import execute_local, reshard_local
from reshard.errors import PlanError
from reshard.plan import PlanTransfers, parse_plan, plan_from_json, plan_to_json
from reshard.planner.strategies.routes import Routes
from reshard.planner.strategies.sends_and_all_gathers import send_recv
from reshard.testing.processes import run_processes
from tests.support.fake_cupy import make_module, run_ranks
from tests.support.tensors import same_bytes, take_shard, whole_tensor

SRC, DST = Layout(Mesh.of(1)), Layout(Mesh.of(2, first_rank=1), "S0")
TEXT = """\
plan by_hand staging_bytes=67108864
topology nic_bytes_per_second=1.0 hosts 0*3
tensor 0 float32 [8, 2] from () on Mesh(ranks 0) to (0, -) on Mesh(0=2; ranks 1,2)
0: t0 [0:4, 0:1] 0 -> 1 splits 1x1 window 4
1: t0 [0:4, 1:2] 0 -> 1 splits 1x1 window 4
2: t0 [4:8, 0:2] 0 -> 2 splits 1x1 window 4
"""
#: One box is sent twice and another never; the number of elements is right.
TWICE = TEXT.replace("[0:4, 1:2]", "[0:4, 0:1]")
REPEATED = "message 1: [0:4, 0:1] delivers 4 elements to rank 1 a second time"


def _shards(plan):
    whole = np.arange(16, dtype=np.float32).reshape(8, 2)
    return [{0: whole}], {rank: take_shard(DST, rank, whole) for rank in (1, 2)}


def _move(plan):
    shards, wanted = _shards(plan)
    found = execute_local(plan, shards)[0]
    assert all((found[rank] == wanted[rank]).all() for rank in wanted)


def _in_json(text):
    plan = parse_plan(text)
    return plan_from_json(json.loads(json.dumps(plan_to_json(plan))))


@pytest.mark.parametrize(
    "read",
    [parse_plan, _in_json, lambda text: pickle.loads(pickle.dumps(parse_plan(text)))],
    ids=["text", "JSON", "pickle"],
)
def test_parsed_plans_are_checked_before_they_run(read):
    _move(read(TEXT))
    with pytest.raises(PlanError) as caught:
        _move(read(TWICE))
    assert str(caught.value) == REPEATED


def _counted(monkeypatch):
    checked = []
    real = reshard.plan.check.plan_checker.check_plan
    monkeypatch.setattr(
        reshard.plan.check.plan_checker, "check_plan", lambda plan: (checked.append(plan), real(plan))[1]
    )
    return checked


def test_plans_are_checked_once_and_planner_plans_never(monkeypatch):
    checked = _counted(monkeypatch)
    made = make_plan(SRC, DST, (8, 2), "float32")
    for strategy in ("send_recv", send_recv):
        _move(make_plan(SRC, DST, (8, 2), "float32", strategy=strategy))
    _move(made)
    assert not checked
    copies = [
        replace(made),
        replace(made, staging_bytes=made.staging_bytes * 2),
        copy.copy(made),
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        parse_plan(str(made)),
        plan_from_json(plan_to_json(made)),
    ]
    for plan in copies:
        _move(plan)
        _move(plan)
    assert [id(plan) for plan in checked] == [id(plan) for plan in copies]
    assert copies[0] == made and hash(copies[0]) == hash(made)


def test_arrays_of_unpickled_plans_are_read_only():
    plan = pickle.loads(pickle.dumps(make_plan(SRC, DST, (8, 2), "float32")))
    with pytest.raises(ValueError, match="read-only"):
        plan.transfers.box_start[0, 0] = 1


def _doubles(problem):
    """A strategy that sends the first region in place of every region."""
    routes = send_recv(problem)
    return Routes.direct(problem, 0 * routes.task, routes.sender, routes.receiver)


def test_plans_of_custom_strategies_are_checked():
    src, dst = Layout(Mesh.of(1)), RegionLayout({1: [[(0, 4)], [(4, 8)]]})
    plan = make_plan(src, dst, (8,), "float32", strategy=_doubles)
    whole = np.arange(8, dtype=np.float32)
    with pytest.raises(PlanError, match="delivers 4 elements to rank 1 a second time"):
        execute_local(plan, [{0: whole}])
    with pytest.raises(PlanError, match="delivers 4 elements to rank 1 a second time"):
        reshard_local({0: whole}, src, dst, shape=(8,), strategy=_doubles)


def test_plans_with_too_many_messages_are_refused():
    text = TEXT.split("0: t0", maxsplit=1)[0].replace("[8, 2]", "[8000, 8000]")
    plan = parse_plan(text + "0: t0 [0:8000, 0:8000] 0 -> 1 splits 8000x8000 window 4\n")
    with pytest.raises(
        PlanError, match="the messages of the plan have 64000000 boxes; at most 16777216 can be checked"
    ):
        execute_local(plan, [{0: np.zeros((8000, 8000), dtype=np.float32)}])


def _moved(rank, text, wrong_ranks):
    plan = parse_plan(TWICE if rank in wrong_ranks else text)
    whole = whole_tensor((8, 2), torch.float32)
    try:
        with reshard.Mover(plan, timeout_seconds=20) as mover:
            found = mover(take_shard(SRC, rank, whole))
        assert same_bytes(found, take_shard(DST, rank, whole)) if rank else found is None
        failure = None
    except reshard.ReshardError as error:
        failure = type(error).__name__, str(error)
    good = reshard.reshard(take_shard(SRC, rank, whole), SRC, DST)  # the group still works
    assert same_bytes(good, take_shard(DST, rank, whole)) if rank else good is None
    return failure


def _reshard_by(rank):
    """The error of reshard() with a custom strategy."""
    src, dst = Layout(Mesh.of(1)), RegionLayout({1: [[(0, 4)], [(4, 8)]], 2: [[(0, 8)]]})
    try:
        reshard.reshard(torch.arange(8.0) if rank == 0 else None, src, dst, strategy=_doubles, timeout_seconds=20)
    except PlanError as error:
        return str(error)
    return "nothing was raised"


def _run_movers(rank):
    failures = [_moved(rank, TEXT, ()), _moved(rank, TWICE, ()), _moved(rank, TEXT, (2,))]
    return failures, _reshard_by(rank)


def test_mover_raises_the_same_error_on_every_rank():
    for failures, by_strategy in run_processes(_run_movers, 3):
        assert failures == [None, ("PlanError", REPEATED), ("PlanError", f"rank 2: {REPEATED}")]
        assert "delivers 4 elements to rank 1 a second time" in by_strategy


def test_cupy_mover_checks_plans(monkeypatch):
    for name, module in make_module().items():
        monkeypatch.setitem(sys.modules, name, module)
    plan = parse_plan(TWICE)

    errors = run_ranks(3, lambda comm: reshard.cupy.Mover(plan, comm))
    assert [(type(error), str(error)) for error in errors] == [(PlanError, REPEATED)] * 3


@pytest.mark.parametrize("moves", [True, False])
def test_plans_without_transfers_are_refused_if_data_must_move(moves):
    text = TEXT.split("0: t0", maxsplit=1)[0].replace("[8, 2]", "[8, 2]" if moves else "[8, 0]")
    head = parse_plan(TEXT if moves else text)
    empty = replace(head, transfers=_none(head))
    data = plan_to_json(empty)
    assert data["messages"] == data["transfers"] == []
    for read in (lambda: parse_plan(text), lambda: plan_from_json(data)):
        if moves:
            with pytest.raises(PlanError, match="the plan has no transfers, but rank 1 needs 8 elements"):
                read()
        else:
            found = execute_local(read(), [{0: np.zeros((8, 0), dtype=np.float32)}])[0]
            assert {rank: array.shape for rank, array in found.items()} == {1: (4, 0), 2: (4, 0)}


def _none(plan):
    nothing = {name: np.zeros(0, dtype=np.int64) for name in PlanTransfers.__dataclass_fields__}
    ndim = plan.tensors[0].ndim
    tables = {name: np.zeros((0, ndim), dtype=np.int64) for name in ("box_start", "box_stop", "splits")}
    return PlanTransfers(**(nothing | tables | {"box_offsets": [0], "edge_offsets": [0]}))


def test_messages_in_json_must_match_the_transfers():
    data = plan_to_json(parse_plan(TEXT))
    for wrong, message in (
        ([], "messages lists 0, but the transfers make 3 messages"),
        (data["messages"][:2], "messages lists 2, but the transfers make 3 messages"),
        (None, "messages is not a list, but the transfers make 3 messages"),
        ([data["messages"][0] | {"sender": 2}, *data["messages"][1:]], "edit transfers and omit messages"),
    ):
        with pytest.raises(PlanError, match=message):
            plan_from_json(data | {"messages": wrong})
    del data["messages"]
    assert plan_from_json(data) == parse_plan(TEXT)
    two = TEXT.split("0: t0", maxsplit=1)[0] + (
        "0: t0 [0:4, 0:1] + t0 [0:4, 1:2] 0 -> 1 splits 1x1 window 4\n2: t0 [4:8, 0:2] 0 -> 2 splits 1x1 window 4\n"
    )
    data = plan_to_json(parse_plan(two))
    assert len(data["messages"]) == 3
    with pytest.raises(
        PlanError, match="messages lists 2, but the transfers make 2 messages with 3 boxes, each listed on its own"
    ):
        plan_from_json(data | {"messages": data["messages"][:2]})
