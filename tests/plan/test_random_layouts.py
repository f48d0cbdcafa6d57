"""For random layouts: plans pass the checker, deliver every element, round-trip, and run without deadlock."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings, strategies as st

from reshard import Layout, Mesh, Topology, check_plan, make_plan
from reshard.api.one_process import execute_local
from reshard.plan import expand_messages, parse_layout, parse_plan, plan_from_json, plan_to_json
from reshard.planner.strategy_registry import STRATEGIES
from reshard.sharding.spec import parse_axis_names, read_spec, write_axis_names
from tests.support.memory_transport import run_in_threads
from tests.support.strategies_of_cases import cases, layouts
from tests.support.tensors import same_bytes, take_shard, whole_tensor

DTYPES = ["uint8", "bfloat16", "float32", "complex64", "complex128"]


@pytest.mark.nightly
@given(cases(), st.sampled_from(sorted(STRATEGIES)), st.sampled_from(DTYPES))
@settings(max_examples=200)
def test_plans_of_random_layouts_deliver(case, strategy, dtype):
    shape, src, dst, topology = case
    plan = make_plan(src, dst, shape, dtype, strategy=strategy, topology=topology)
    check_plan(plan)
    whole = whole_tensor(shape, getattr(torch, dtype))
    sources = {rank: take_shard(src, rank, whole) for rank in src.ranks}
    kept = {rank: shard.clone() for rank, shard in sources.items()}
    out = execute_local(plan, [sources])[0]
    assert sorted(out) == sorted(dst.ranks)
    for rank in dst.ranks:
        assert same_bytes(out[rank], take_shard(dst, rank, whole))
    for rank in src.ranks:
        assert same_bytes(sources[rank], kept[rank])


@given(cases())
def test_plans_of_many_tasks_pass_the_checker(case):
    import reshard.planner.strategies.broadcast as module

    shape, src, dst, topology = case
    few, module._GREEDY_TASKS = module._GREEDY_TASKS, 0
    try:
        check_plan(make_plan(src, dst, shape, "float32", topology=topology))
    finally:
        module._GREEDY_TASKS = few


@given(cases(), st.sampled_from(sorted(STRATEGIES)))
def test_plans_round_trip_in_text_and_json(case, strategy):
    shape, src, dst, topology = case
    plan = make_plan(
        {"w": src, "é b": src}, dst, {"w": shape, "é b": shape}, "float16", strategy=strategy, topology=topology
    )
    assert parse_plan(str(plan)) == plan
    data = json.loads(json.dumps(plan_to_json(plan)))
    assert plan_from_json(data) == plan
    assert [m["id"] for m in data["messages"]] == list(range(plan.num_messages))
    assert parse_layout(str(src)) == src


@given(cases(), st.sampled_from(sorted(STRATEGIES)))
def test_expand_messages_of_a_rank_gives_its_part_of_all_messages(case, strategy):
    shape, src, dst, topology = case
    plan = make_plan(src, dst, shape, "float32", strategy=strategy, topology=topology)
    everything = list(expand_messages(plan))
    for rank in plan.ranks:
        mine = [m for m in everything if rank in (m.sender, m.receiver)]
        assert list(expand_messages(plan, rank)) == mine


@given(cases(), st.sampled_from(sorted(STRATEGIES)))
@settings(max_examples=40)
def test_executor_delivers_between_threads(case, strategy):
    shape, src, dst, topology = case
    shape = tuple(size * 40 if i == 0 else size for i, size in enumerate(shape))
    if not isinstance(src, Layout) or not isinstance(dst, Layout):
        src = dst = Layout(Mesh.of("3"), ((),) * len(shape))
    plan = make_plan(src, dst, shape, "int64", strategy=strategy, topology=topology, staging_bytes=2**16)
    whole = whole_tensor(shape)
    outs = {r: [s if s is None else torch.full_like(s, -1)] for r in plan.ranks for s in [take_shard(dst, r, whole)]}
    staged = run_in_threads(plan, {r: [take_shard(src, r, whole)] for r in plan.ranks}, outs)
    assert max(staged.values()) <= plan.staging_bytes
    for rank in dst.ranks:
        assert same_bytes(outs[rank][0], take_shard(dst, rank, whole))


@given(st.integers(0, 3).flatmap(layouts))
def test_layout_notations_round_trip(layout):
    assert parse_axis_names(write_axis_names(layout.spec)) == layout.spec
    if all(isinstance(step, str) for steps in layout.spec for step in steps):
        assert read_spec(layout.mesh, layout.to_2023()) == layout.spec


@given(layouts(2, strided=False), st.integers(1, 3), st.integers(1, 3))
def test_torch_placements_round_trip_for_even_sizes(layout, a, b):
    """Shards are the same after conversion to placements (a shard order becomes _StridedShard) and back."""
    size = [a, b]
    for dim, steps in enumerate(layout.spec):
        for axis in steps:
            size[dim] *= layout.mesh.axis_size(axis)
    again = Layout(layout.mesh, layout.to_placements())
    whole = whole_tensor(tuple(size))
    for rank in layout.ranks:
        assert same_bytes(take_shard(layout, rank, whole), take_shard(again, rank, whole))


@given(cases())
def test_planning_twice_gives_equal_plans(case):
    shape, src, dst, topology = case
    first, second = (make_plan(src, dst, shape, "float32", topology=topology) for _ in range(2))
    assert first == second
    assert first.plan_hash == second.plan_hash
    assert hash(first) == hash(second)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_large_slices_are_chunked_within_staging(strategy):
    """Trees over two hosts are chunked; relays and packing stay within their buffers."""
    src, dst = Layout(Mesh.of("2x2"), "S0 S1"), Layout(Mesh.of("2x2", first_rank=4), "R S01")

    plan = make_plan(
        src,
        dst,
        (512, 500),
        "float64",
        strategy=strategy,
        topology=Topology((0, 0, 1, 1, 2, 2, 3, 3)),
        staging_bytes=2**18,
    )
    check_plan(plan)
    assert plan.num_messages > 50
    whole = whole_tensor((512, 500), torch.float64)
    outs = {r: [s if s is None else torch.zeros_like(s)] for r in plan.ranks for s in [take_shard(dst, r, whole)]}
    staged = run_in_threads(plan, {r: [take_shard(src, r, whole)] for r in plan.ranks}, outs)
    assert 0 < max(staged.values()) <= 2**18
    for rank in dst.ranks:
        assert same_bytes(outs[rank][0], take_shard(dst, rank, whole))
