"""Hostile input is refused quickly with a ReshardError; odd but valid input works."""

from __future__ import annotations

import contextlib
import socket
import time

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import reshard.api.call
from reshard import Layout, Mesh, RegionLayout, ReshardError, Topology, check_plan, make_plan, reshard_local
from reshard.cli.main import main
from reshard.errors import PlanError
from reshard.plan import layout_from_json, parse_layout, parse_plan, plan_from_json, plan_to_json
from reshard.sharding.tiles import cut_tiles
from reshard.testing.processes import run_processes
from reshard.topology.topology_files import topology_from_json
from tests.support.memory_transport import run_in_threads

HEAD = "plan x staging_bytes=67108864\ntopology nic_bytes_per_second=1.0 hosts 0*8\n"
ONE = "tensor 0 int32 [8] from () on Mesh(0=1; ranks 0) to "


@pytest.mark.parametrize(
    "text",
    [
        ONE + "Regions(ndim=1 join=0; 1: [0:4] [4:8])\n0: t0 [0:8] 0 -> 1 splits 1 window 4",
        ONE + "Regions(ndim=1 join=0; 1: [0:4]; 2: [0:8])\n0: t0 [0:8] 0 -> 1 -> 2 splits 1 window 4",
        "tensor 0 int32 [8] from Regions(ndim=1 join=0; 0: [0:4] [4:8]) to () on Mesh(ranks 1)\n"
        "0: t0 [0:8] 0 -> 1 splits 1 window 4",
        ONE + "() on Mesh(0=1; ranks 1)\n0: t0 [0:8] 0 -> 2 -> 1 splits 1 window 4",
        "tensor 0 int8 [3] named \"a\" from () on Mesh(ranks 0) to () on Mesh(ranks 1)\n"
        "tensor 1 int32 [3] named \"b\" from () on Mesh(ranks 0) to () on Mesh(ranks 1)\n"
        "0: t0 [0:3] + t1 [0:3] 0 -> 1 splits 1 window 4",
        ONE + "() on Mesh(0=1; ranks 9)\n0: t0 [0:8] 0 -> 9 splits 1 window 4",
        ONE.replace("[8]", "[4611686018427387]") + "() on Mesh(0=1; ranks 1)\n"
        "0: t0 [0:4611686018427387] 0 -> 1 splits 999999999 window 4",
    ],
)  # fmt: skip
def test_invalid_plans_are_refused(text):
    with pytest.raises(ReshardError):
        check_plan(parse_plan(HEAD + text))


@pytest.mark.parametrize(
    "rows", ["0: [:4, 0:8]", "0: [0:4, 0]", "0: [,]", "x: [0:4, 0:8]", "-1: [0:4, 0:8]", "0: [0:4"]
)
def test_malformed_rows_of_boxes_are_refused(rows):
    with pytest.raises(PlanError, match="is not"):
        parse_layout(f"Regions(ndim=2 join=0; {rows})")


@given(st.text(max_size=200))
def test_random_text_never_crashes(text):
    for parse in (parse_plan, lambda t: parse_plan(HEAD + t), lambda t: parse_plan(HEAD + ONE + t)):
        with pytest.raises(PlanError):
            parse(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["ranks", "spec", "axes", "regions", "ndim", "join_dim", "0"]), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
def test_random_json_never_crashes(data):
    for read in (plan_from_json, layout_from_json, topology_from_json):
        with contextlib.suppress(ReshardError):
            read(data)
    with pytest.raises(ReshardError):
        plan_from_json({"tensors": [{"shape": [4], "dtype": "int8", "src": data, "dst": data}], "transfers": []})


@given(JSON, JSON)
def test_random_constructor_arguments_never_crash(a, b):
    for build in (
        lambda: Mesh(a, b),
        lambda: Mesh.of(a, axes=b),
        lambda: Mesh.from_array(a, b),
        lambda: Layout(Mesh.of(2), a),
        lambda: RegionLayout(a, join_dim=b),
        lambda: Topology(a, b),
        lambda: cut_tiles(Layout(Mesh.of(2)), a),
        lambda: make_plan(Layout(Mesh.of(2)), Layout(Mesh.of(2)), a, b),
    ):
        with contextlib.suppress(ReshardError):
            build()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--shape", "8", "--src-mesh", "999999999", "--dst-mesh", "1"],
        ["--shape", "8", "--src-mesh", "1", "--dst-mesh", "1", "--dst-first-rank", "2000000000"],
        ["--shape", "2000000000,100000000", "--src-mesh", "1", "--dst-mesh", "1", "--format", "json", "--rank", "0"],
        ["--shape", "8", "--src-mesh", "x".join(["1"] * 70), "--dst-mesh", "1"],
    ],
)
def test_huge_command_line_requests_are_refused(arguments, capsys):
    assert main(["plan", *arguments]) == 2
    assert capsys.readouterr().err.startswith("reshard: ")


def test_huge_texts_and_regions_are_refused():
    mesh = "() on Mesh(0=16777216; ranks 0-16777215)"
    with pytest.raises(PlanError):
        parse_plan(HEAD + f"tensor 0 int8 [8] from {mesh} to {mesh}")
    with pytest.raises(PlanError):
        parse_plan(HEAD + "tensor 0 int8 [8] from " + "a) to " * 30000)
    nested = RegionLayout({i: [[(i, 4000 - i)] * 2] for i in range(300)})
    with pytest.raises(ReshardError, match="cells"):
        cut_tiles(nested, (4000, 4000))
    with pytest.raises(ReshardError):
        topology_from_json({"host_of_rank": [0, 2147483647]})


def test_one_element_views_with_odd_strides_are_moved():
    plan = make_plan(Layout(Mesh([0], {"x": 1})), Layout(Mesh([1], {"x": 1})), (1, 1), "float32")
    source, out = torch.tensor([[0.0, 7.0]]).t()[1:], torch.zeros(3, 5)[::2, ::3][1:, 1:]
    assert out.shape == (1, 1)
    run_in_threads(plan, {0: [source], 1: [None]}, {0: [None], 1: [out]})
    assert out.item() == 7.0


def _functions_as_strategies(rank):
    """Functions of the same name are not mistaken for each other."""
    from reshard.planner.strategies.broadcast import broadcast_size
    from reshard.planner.strategies.sends_and_all_gathers import send_recv

    src, dst = Layout(Mesh.of(1)), Layout(Mesh.of(3, first_rank=1))
    called = []
    for function in (send_recv, broadcast_size, send_recv):

        def strategy(problem, function=function):
            called.append(function.__name__)
            return function(problem)

        out = reshard.reshard(torch.arange(8.0) if rank == 0 else None, src, dst, strategy=strategy)
        assert out is None or out.tolist() == list(range(8))
    return called


def test_strategy_functions_of_one_name_are_distinct():
    assert run_processes(_functions_as_strategies, 4) == [["send_recv", "broadcast_size", "send_recv"]] * 4


def test_shared_memory_in_different_storages_is_found():
    from reshard.api.arrays.tensor_checks import check_no_aliasing

    memory = np.arange(8, dtype=np.float32)
    source, out = torch.from_numpy(memory[:6]), torch.from_numpy(memory[2:])
    with pytest.raises(ReshardError, match="shares"):
        check_no_aliasing([source], [out], [None])


def _out_under_a_conjugated_source(rank):
    """Conjugation is lazy: a tensor and its conjugate share memory, which ``out`` must not share."""
    layout = Layout(Mesh.of(2))
    for source in (lambda x: x.conj(), lambda x: x.conj().imag):
        memory = torch.complex(torch.arange(4.0), torch.arange(4.0))
        given, kept = source(memory), memory.clone()
        out = memory if given.is_complex() else memory.imag
        with pytest.raises(ReshardError, match="shares storage"):
            reshard.reshard(given, layout, layout, out=out)
        with reshard.Mover(make_plan(layout, layout, (4,), given.dtype)) as mover, pytest.raises(ReshardError):
            mover(given, out=out)
        assert torch.equal(memory, kept)
    return True


def test_out_that_shares_memory_with_a_conjugated_source_is_refused():
    assert run_processes(_out_under_a_conjugated_source, 2) == [True] * 2


def test_invalid_local_shards_are_refused():
    rows = Layout(Mesh.of(2), "S0")
    with pytest.raises(ReshardError, match="no shard"):
        reshard_local({0: np.zeros((1, 2))}, rows, rows, shape=(2, 2))
    with pytest.raises(ReshardError):
        reshard_local([np.zeros((1, 2))], rows, rows, shape=(2, 2))
    with pytest.raises(ReshardError):
        reshard_local({0: [1], 1: [2]}, rows, rows, shape=(2, 2))


def test_is_closed_never_blocks():
    """An idle connection is not closed, and the check must not block its thread."""
    from reshard.coordination.hub_and_spokes import _Peer

    ours, theirs = socket.socketpair()
    peer = _Peer.__new__(_Peer)
    peer.connection = ours
    ours.settimeout(60.0)
    begun = time.monotonic()
    assert not peer.is_closed()
    theirs.sendall(b"x")
    assert not peer.is_closed()
    assert ours.recv(1) == b"x"
    theirs.close()
    assert peer.is_closed()
    ours.close()
    assert peer.is_closed()
    assert time.monotonic() - begun < 20.0


def test_malformed_meshes_in_text_and_json_are_refused():
    with pytest.raises(PlanError, match="'x=2 y=2' is not an axis"):
        parse_layout("('x', None) on Mesh(x=2 y=2; ranks 0-3)")
    with pytest.raises(PlanError, match="rows of equal length"):
        layout_from_json({"ranks": [[[0, 1], [2, 3]], [2, 3]], "axes": ["a", "b"], "spec": "S0 R"})
    with pytest.raises(PlanError, match="rows of equal length"):
        layout_from_json({"ranks": [10**30], "axes": ["a"], "spec": "S0 R"})


def test_ranks_without_a_host_are_refused():
    text = HEAD + ONE + "() on Mesh(0=1; ranks 9)\n0: t0 [0:8] 0 -> 9 splits 1 window 4"
    with pytest.raises(PlanError, match=r"rank 9 has no host: the topology covers ranks 0\.\.7"):
        parse_plan(text)
    data = plan_to_json(make_plan(Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2", first_rank=2)), (8,), "int32"))
    data["tensors"][0]["src"]["ranks"][0] = 16
    with pytest.raises(ReshardError, match="rank 16 has no host"):
        plan_from_json(data)


@pytest.mark.parametrize(("key", "value"), [("staging_bytes", -1), ("staging_bytes", 2**70), ("strategy", "a b")])
def test_errors_of_json_name_the_key(key, value):
    plan = reshard.make_plan(
        reshard.Layout(reshard.Mesh.of("2"), "S0"), reshard.Layout(reshard.Mesh.of("1")), (8,), "int8"
    )
    data = reshard.plan_to_json(plan) | {key: value}
    with pytest.raises(reshard.errors.PlanError, match=f"^{key} is "):
        reshard.plan_from_json(data)
