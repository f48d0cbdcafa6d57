"""Every cost that a topology describes is in every model of a plan's time, and in the texts of topologies and plans."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from reshard import Layout, Mesh, Topology, make_plan, parse_plan, plan_from_json, plan_to_json, simulate
from reshard.cost import encoded_makespan, find_latency_bounds, predict_makespan, prediction
from reshard.plan import RotationPlan
from reshard.planner import PlanProblem, StrategyBounds
from reshard.topology import CodecRate, topology_from_json, topology_to_json

#: A value of each cost that makes the plan below much slower, or, for the last two, faster.
COSTS = {
    "inside_bytes_per_second": 1e6,
    "inside_total_bytes_per_second": 1e6,
    "latency_seconds": 1.0,
    "inside_latency_seconds": 1.0,
    "sender_change_seconds": 1.0,
    "start_seconds": 1.0,
    "send_buffer_bytes": 2**20,
    "burst_bytes": 2**20,
}
#: Fields that place ranks and ports, whose rates other tests vary, and the rates of codecs.
OTHERS = {"host_of_rank", "hosts", "nic_of_rank", "pods", "codec_rates"}
#: Costs that only the simulator knows: an estimate without them is too high, so it stays an upper one.
SIMULATED_ONLY = {"send_buffer_bytes", "burst_bytes"}

SRC, DST, SHAPE = Layout(Mesh.of((4, 2)), "S01 R"), Layout(Mesh.of((4, 2), first_rank=8), "R S0"), (2048, 1024)
FREE = Topology.uniform([rank // 2 for rank in range(16)]).without_latency()


def test_every_field_of_a_topology_is_tested_here():
    assert {field.name for field in dataclasses.fields(Topology)} == COSTS.keys() | OTHERS


def _plan(topology, strategy="multicast"):
    return make_plan(SRC, DST, SHAPE, "int32", topology=topology, strategy=strategy)


def _rotation(topology):
    return RotationPlan.find(_plan(FREE).tensors, topology, 2**26, 2**26)


@pytest.mark.parametrize("name", COSTS)
def test_models_have_the_cost(name, monkeypatch):
    costly = replace(FREE, **{name: COSTS[name]})
    plan = _plan(FREE, "send_recv" if name == "send_buffer_bytes" else "multicast")
    starts = [simulate(plan, topology).start for topology in (FREE, costly)]
    assert (starts[0] != starts[1]).any()
    monkeypatch.setattr(prediction, "MAX_OPERATIONS", 0)
    monkeypatch.setattr(prediction, "MAX_IN_ORDER", 0)
    for plans in ([replace(plan, topology=topology) for topology in (FREE, costly)], [*map(_rotation, (FREE, costly))]):
        seconds = [predict_makespan(item).seconds for item in plans]
        assert name in SIMULATED_ONLY or seconds[1] > 1.01 * seconds[0]


def test_encoding_begins_when_the_transfer_does():
    plan = make_plan(SRC, DST, SHAPE, "float32", topology=FREE, compression="int8x128")
    slow = CodecRate("int8x128", 1e6, 1e9)
    seconds = [encoded_makespan(plan, slow, replace(FREE, start_seconds=start)) for start in (0.0, 1.0)]
    assert seconds[1] == pytest.approx(seconds[0] + 1.0)


@pytest.mark.parametrize("name", COSTS)
def test_no_bound_or_floor_is_above_the_simulated_time(name):
    costly = replace(FREE, **{"latency_seconds": 1e-4, name: COSTS[name]})
    bounds = StrategyBounds(PlanProblem.of(_plan(FREE).tensors, costly))
    for strategy, bound in (("send_recv", bounds.of_direct), ("multicast", bounds.of_trees)):
        plan = _plan(costly, strategy)
        seconds = simulate(plan).makespan_seconds * (1 + 1e-9)
        assert costly.start_seconds <= bounds.of_ungathered <= bound <= seconds
        bound = find_latency_bounds(plan)
        assert bound is None or costly.start_seconds <= bound.any_plan_seconds <= seconds
    rotation = _rotation(costly)
    bound = find_latency_bounds(rotation)
    assert bound is None or costly.start_seconds <= bound.any_plan_seconds <= simulate(rotation).makespan_seconds


@pytest.mark.parametrize("name", COSTS)
def test_topologies_and_texts_have_the_cost(name):
    costly = replace(FREE, **{name: COSTS[name]})
    if name.endswith("_seconds"):
        assert costly.without_latency() == FREE
    assert topology_from_json(topology_to_json(costly)) == costly
    plan = _plan(costly)
    assert parse_plan(str(plan)).topology == plan_from_json(plan_to_json(plan)).topology == costly
