"""Wrong arguments raise the same error on every calling rank, move no data, and leave the group usable."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

import reshard
import reshard.api.call
from reshard import Layout, Mesh, RegionLayout, Topology
from reshard.api.one_process import execute_local
from reshard.cli.plan_page.html_report import plan_to_html
from reshard.compression import parse_policy
from reshard.testing.processes import run_processes
from reshard.topology import topology_to_json
from tests.support.devices import HAS_GPU
from tests.support.interpreters import run_interpreters
from tests.support.tensors import check_group_works, take_shard, whole_tensor

ROWS = Layout(Mesh.of("2"), "S0")
COLS = Layout(Mesh.of("2", first_rank=2), "R S0")
WHOLE = whole_tensor((6, 4), torch.float32)


PLAN = reshard.make_plan(ROWS, COLS, (6, 4), "float32")
HALVES = {0: WHOLE[:3], 1: WHOLE[3:]}
HOSTS = Topology((0, 0, 1, 1))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: execute_local(str(PLAN), [HALVES]), "needs a Plan, not str"),
        (lambda: execute_local(PLAN, HALVES), "a list with {source rank"),
        (lambda: execute_local(PLAN, []), "moves 1 tensors, but shards has 0"),
        (lambda: execute_local(PLAN, [{0: 5, 1: 6}]), "rank 0 holds int"),
        (
            lambda: reshard.reshard_local(HALVES, ROWS, COLS, shape=(6, 4), compression="delta", base=[WHOLE]),
            "base must be {rank: array}, not list",
        ),
        (
            lambda: reshard.reshard_local(HALVES, ROWS, COLS, shape=(6, 4), compression="delta", out={2: 5}),
            "rank 2 holds int",
        ),
        (lambda: reshard.join(dist.HashStore(), "x", 2), "rank 'x' and world_size 2 must be integers"),
        (lambda: reshard.join(dist.HashStore(), 0.7, 2), "rank 0.7 and world_size 2 must be integers"),
        (lambda: reshard.join(dist.HashStore(), 0, torch.zeros(2)), "world_size tensor.* must be integers"),
        (lambda: reshard.join(dist.HashStore(), 0, 10**5000), "world_size is a huge number"),
        (lambda: reshard.make_plan(ROWS, COLS, (6, 4), dist.group), "dtype .* is not supported"),
        (lambda: Mesh.from_jax([0, 1]), "list is not a jax Mesh"),
        (lambda: ROWS.with_ranks("01"), "rank_of must be {rank: new rank}, not str"),
        (lambda: RegionLayout({0: [[(0, 6)]]}).with_ranks(5), "rank_of must be {rank: new rank}, not int"),
        (lambda: Topology.uniform(5), "must be integers"),
        (lambda: Topology.from_hostnames([["a"]]), "hostnames must be"),
        (lambda: Topology((0, 0), codec_rates=["int8x128"]), "codec_rates must be"),
        (lambda: reshard.load_preset(["tcp"], 4), "no preset"),
        (lambda: reshard.read_topology(5), "cannot read 5"),
        (lambda: reshard.read_topology("no.yaml"), "cannot read no.yaml: No such file or directory$"),
        (lambda: reshard.plan_to_json(str(PLAN)), "needs a Plan, not str"),
        (lambda: plan_to_html(str(PLAN)), "needs a Plan, not str"),
        (lambda: topology_to_json(5), "needs a Topology, not int"),
        (lambda: parse_policy(5), "parse_policy: text is 5; it must be a string"),
        (lambda: HOSTS.first("2"), "count is '2'; it must be an integer from 0 to 4,194,304"),
        (lambda: HOSTS.only([0, "1"]), "ranks must be a sequence of integers, not"),
        (lambda: HOSTS.only([9]), "rank 9 has no host: the topology covers ranks 0..3"),
        (lambda: HOSTS.only(5), "ranks must be a sequence of integers, not 5"),
        (lambda: HOSTS.nic(4), "rank 4 has no host: the topology covers ranks 0..3"),
        (lambda: HOSTS.nic(-1), "rank is -1; it must be an integer from 0"),
        (lambda: HOSTS.host(2.0), "the number of a host is 2.0; it must be an integer from 0"),
        (lambda: HOSTS.ranks_of_host(np.arange(2)), "the number of a host is array.*; it must be an integer"),
        (lambda: HOSTS.check_covers("ab"), "ranks must be a sequence of integers, not 'ab'"),
        (lambda: HOSTS.check_covers([-1]), "rank -1 is outside 0.."),
        (lambda: ROWS.to_2023(ndim="2"), "ndim is '2'; it must be an integer from 0 to 8"),
        (lambda: ROWS.local_shape((6, 4), np.arange(2)), "rank is array.*; it must be an integer from 0"),
        (lambda: ROWS.regions((6, 4), torch.arange(2)), r"rank is tensor.*; it must be an integer from 0"),
        (lambda: RegionLayout({0: [[(0, 6)]]}).local_shape((6,), np.arange(2)), "rank is array.*; it must be an"),
        (lambda: Layout(Mesh.of("2"), "S0", ndim="2"), "ndim is '2'; it must be an integer from 0 to 8"),
    ],
)
def test_arguments_of_wrong_types_are_named(call, text):
    with pytest.raises(reshard.ReshardError, match=text):
        call()


def test_integers_of_numpy_are_integers():
    one, two = np.int64(1), np.int32(2)
    assert Mesh.of(two, first_rank=one) == Mesh([1, 2]) == Mesh(np.array([1, 2]))
    assert ROWS.local_shape((np.int64(6), 4), one) == (3, 4) and ROWS.to_2023(two) == "S0 R"
    regions = RegionLayout({one: [[(0, two)]], two: [[(two, 4)]]}, join_dim=np.int8(0), ndim=one)
    assert regions == RegionLayout({1: [[(0, 2)]], 2: [[(2, 4)]]}) and regions.local_shape((4,), two) == (2,)
    assert (
        HOSTS.first(two) == Topology((0, 0)) and HOSTS.nic(one) == HOSTS.nic(1) and HOSTS.ranks_of_host(one) == [2, 3]
    )
    assert Topology((0,), burst_bytes=np.int64(5), latency_seconds=np.float32(0.5)) == Topology(
        (0,), burst_bytes=5, latency_seconds=0.5
    )
    plan = reshard.make_plan(ROWS, COLS, (6, 4), "float32", staging_bytes=np.int64(2**20))
    assert plan == reshard.make_plan(ROWS, COLS, (6, 4), "float32", staging_bytes=2**20)


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "call",
    [
        lambda: reshard.make_plan(ROWS, COLS, (6, 4), LONG),
        lambda: Layout(ROWS.mesh, LONG),
        lambda: Layout(ROWS.mesh, f"({LONG}, -)"),
        lambda: Layout(ROWS.mesh, (LONG,)),
        lambda: Mesh.of(LONG),
        lambda: Mesh([0], {LONG + "-": 1}),
        lambda: reshard.make_plan(ROWS, COLS, (6, 4), "float32", strategy=LONG),
        lambda: reshard.make_plan(ROWS, COLS, (6, 4), "float32", compression=LONG),
        lambda: reshard.make_plan(ROWS, COLS, {LONG: (6, "x")}, "float32"),
        lambda: reshard.load_preset(LONG, 4),
        lambda: reshard.read_topology(LONG),
        lambda: reshard.topology_from_json({"hosts": [{"devices": 1, LONG: 1}]}),
        lambda: reshard.parse_plan(LONG),
        lambda: reshard.plan_from_json({LONG: 1}),
    ],
)
def test_long_texts_are_cut_in_errors(call):
    with pytest.raises(reshard.ReshardError) as caught:
        call()
    assert len(str(caught.value)) < 2200


def _cut_storage(array):
    array.untyped_storage().resize_(40)
    return array


def _cases(rank):
    """``{case: (arguments of this rank, text that every rank's error must contain)}``."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import Partial, Shard

    source = take_shard(ROWS, rank, WHOLE)
    out = torch.full((6, 2), -1.0)
    shard = source if source is not None else torch.zeros(3, 4)  # only used on source ranks
    valid = {"tensor": source, "src_mesh": ROWS, "dst_mesh": COLS}
    by_mesh = {"tensor": source, "src_mesh": ROWS.mesh, "dst_mesh": COLS.mesh}
    gap = RegionLayout({0: [[(0, 2), (0, 4)]], 1: [[(3, 6), (0, 4)]]})
    return {
        "unknown axis": (by_mesh | {"src_spec": "S1 R"}, "names axis 1"),
        "repeated axis": (by_mesh | {"src_spec": ("0", "0")}, "names axis '0' twice"),
        "unknown axis on one rank": (
            by_mesh | {"dst_spec": (None, "x" if rank == 3 else "0"), "src_spec": "S0"},
            "rank 3: ",
        ),
        "partial": (by_mesh | {"src_spec": [Partial()], "dst_spec": [Shard(0)]}, "reduce it first"),
        "rank outside the group": (valid | {"dst_mesh": Layout(Mesh([2, 9], {"x": 2}), "S0")}, "ranks 0..3"),
        "shape that does not match": (valid | {"shape": (8, 4)}, "gives it [4, 4]"),
        "different shapes": (valid | {"shape": (6, 4 + (rank == 1))}, "disagree on the global shape"),
        "different dtype than the shards": (valid | {"dtype": "float64"}, "disagree on the dtype"),
        "different dtype of one shard": (
            valid | {"tensor": shard.double() if rank == 1 else source},
            "rank 0 holds float32, rank 1 holds float64",
        ),
        "shard of the wrong shape": (
            valid | {"tensor": shard[:2] if rank == 0 else source, "shape": (6, 4)},
            "rank 0 passes",
        ),
        "shard of the wrong ndim": (valid | {"tensor": shard[0] if rank == 1 else source}, "rank 1 passes"),
        "missing shard": (valid | {"tensor": None}, "is in the source layout, but passes None"),
        "shard outside the source": (
            valid | {"tensor": source if rank != 2 else torch.zeros(3, 4)},
            "rank 2 is not in",
        ),
        "not a tensor": (valid | {"tensor": [1, 2] if rank == 0 else source}, "passes list"),
        "sparse": (valid | {"tensor": shard.to_sparse() if rank == 0 else source}, "only dense"),
        "fake tensor": (
            valid | {"tensor": FakeTensorMode().from_tensor(shard) if rank == 0 else source, "shape": (6, 4)},
            "rank 0 passes a FakeTensor that has no storage",
        ),
        "storage shorter than the tensor": (
            valid | {"out": _cut_storage(out.clone()) if rank == 2 else None},
            "rank 2 passes a tensor that ends at byte 48 of a storage of 40 bytes",
        ),
        "out of the wrong shape": (
            valid | {"out": torch.zeros(2, 6) if rank == 3 else None},
            "rank 3 passes out= with float32 [2, 6]",
        ),
        "out of the wrong dtype": (valid | {"out": out.int() if rank == 3 else None}, "rank 3 passes out= with int32"),
        "out outside the destination": (
            valid | {"out": torch.zeros(6, 2) if rank == 0 else None},
            "rank 0 passes out=",
        ),
        "out on the source's storage": (
            valid | {"out": shard[:, :2] if rank == 0 else None},
            "out shares storage with a source",
        ),
        "different layout": (
            valid | {"dst_mesh": COLS if rank else Layout(COLS.mesh)},
            "disagree on the destination layout",
        ),
        "different strategy": (valid | {"strategy": "send_recv" if rank == 1 else None}, "disagree on strategy"),
        "unknown strategy": (valid | {"strategy": "teleport"}, "strategies are auto, send_recv"),
        "different topology": (valid | {"topology": Topology((0, 0, 1, 1)) if rank else None}, "disagree on topology"),
        "on_loss of the wrong kind on one rank": (
            valid | {"on_loss": np.array([1, 2]) if rank == 1 else "raise"},
            "on_loss is array([1, 2]); it must be one of",
        ),
        "topology too small": (valid | {"topology": Topology((0, 0))}, "rank 3 has no host"),
        "different names": (
            {"tensor": {"a" if rank else "b": source}, "src_mesh": ROWS, "dst_mesh": COLS},
            "disagree on the tensors",
        ),
        "None for named tensors on one rank": (
            {"tensor": None if rank == 3 else {"w": source}, "src_mesh": ROWS, "dst_mesh": COLS},
            "rank 3 passes one without a name; a rank without shards of named tensors passes {name: None}",
        ),
        "regions that no rank holds": (
            valid | {"src_mesh": gap, "tensor": shard[:2] if rank == 0 else source, "shape": (6, 4)},
            "holds only",
        ),
        "staging_bytes too small": (valid | {"staging_bytes": 10}, "at least 65536"),
        "topology of a wrong kind on rank 1": (valid | {"topology": "x" if rank == 1 else None}, "must be a Topology"),
        "strategy of a wrong kind on rank 2": (valid | {"strategy": [] if rank == 2 else None}, "name or a function"),
        "shape of floats on one rank": (
            valid | {"shape": (6.5, 4) if rank == 3 else None},
            "not a sequence of integers",
        ),
        "out with overlapping elements": (
            valid | {"out": torch.zeros(20).as_strided((6, 2), (1, 1)) if rank == 3 else None},
            "overlapping elements",
        ),
        "conjugated out": (
            valid | {"out": torch.zeros(6, 2, dtype=torch.complex64).conj() if rank == 3 else None},
            "conjugated",
        ),
        "negated out without elements": (
            valid | {"tensor": shard[:0] if rank < 2 else None, "out": torch._neg_view(out[:0]) if rank == 3 else None},
            "rank 3: out is a conjugated",
        ),
        "missing destination": (valid | {"dst_mesh": None}, "dst_mesh is missing"),
        "timeout that is not a number": (valid | {"timeout_seconds": float("nan")}, "timeout_seconds is nan"),
        "mesh of the wrong kind": (valid | {"dst_mesh": 7}, "must be a Mesh"),
    }


def _bad_calls(rank):
    errors = {}
    for name, (arguments, expected) in _cases(rank).items():
        before = None if arguments["tensor"] is None else str(arguments["tensor"])
        try:
            reshard.reshard(**arguments)
            errors[name] = ("nothing was raised", expected)
        except reshard.ReshardError as error:
            errors[name] = (f"{type(error).__name__}: {error}", expected)
        assert before is None or str(arguments["tensor"]) == before
    check_group_works(rank, ROWS, COLS, WHOLE)
    return errors


def test_wrong_arguments_raise_one_error_on_every_rank_and_the_next_call_works():
    by_rank = run_processes(_bad_calls, 4)
    for name, (text, expected) in by_rank[0].items():
        assert expected in text, (name, text)
        for rank in (1, 2, 3):
            assert by_rank[rank][name][0] == text, name


def _different_members(rank):
    """Rank 3 passes another destination mesh; in the second call, one that does not include rank 3."""
    texts = []
    for mine, theirs in [
        (Layout(Mesh([3, 1], {"x": 2}), "S0"), COLS),
        (Layout(Mesh([1, 2], {"x": 2}), "S0"), COLS),
    ]:
        begun = time.monotonic()
        try:
            reshard.reshard(take_shard(ROWS, rank, WHOLE), ROWS, mine if rank == 3 else theirs, timeout_seconds=60)
            texts.append("nothing was raised")
        except reshard.ReshardError as error:
            texts.append(str(error))
        assert time.monotonic() - begun < 30
        dist.barrier()
    check_group_works(rank, ROWS, COLS, WHOLE)
    return texts


def test_disagreement_on_members_is_reported_before_the_timeout():
    first, second = zip(*run_processes(_different_members, 4), strict=True)
    assert all("disagree on who takes part" in text or "is in neither layout" in text for text in (*first, *second))
    assert "rank 3 with ranks 0-2" in second[0]


def _invalid_mesh(rank):
    """Rank 3 passes an invalid mesh; the other ranks get its error and do not wait until the timeout."""
    begun = time.monotonic()
    try:
        reshard.reshard(take_shard(ROWS, rank, WHOLE), ROWS, "nonsense" if rank == 3 else COLS, timeout_seconds=30)
        text = "nothing was raised"
    except reshard.ReshardError as error:
        text = str(error)
    assert time.monotonic() - begun < 10
    dist.barrier()
    check_group_works(rank, ROWS, COLS, WHOLE)
    return text


def test_invalid_mesh_of_one_rank_is_reported_to_the_others():
    texts = run_processes(_invalid_mesh, 4)
    assert all("dst_mesh must be a Mesh" in text for text in texts), texts
    assert len(set(texts[:3])) == 1


SCRIPT = """
import torch, torch.distributed as dist, reshard
dist.init_process_group("gloo")
rank = dist.get_rank()
one, other = reshard.Layout(reshard.Mesh.of(1)), reshard.Layout(reshard.Mesh.of(1, first_rank=1))
mover = reshard.Mover(reshard.make_plan(one, other, (6, 4), "float32"))
try:
    mover(torch.zeros(6, 5) if rank == 0 else None)
    print("ok", flush=True)
except reshard.ReshardError as error:
    print("raised", flush=True)
"""


@pytest.mark.slow
def test_processes_exit_normally_after_an_error(tmp_path):
    """Runs interpreters that shut down normally, unlike the forked test ranks."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert [output for output, _ in run_interpreters(script, 2)] == ["raised\n"] * 2


def _mixed(rank):
    source = take_shard(ROWS, rank, WHOLE)
    if rank == 1:
        source = source.to("meta")
    try:
        reshard.reshard(source, ROWS, COLS, shape=(6, 4), dtype="float32", timeout_seconds=5.0)
    except reshard.ReshardError as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_tensors_on_unsupported_devices_are_rejected():
    errors = set(run_processes(_mixed, 4))
    assert errors == {"ArgumentError: the tensor: rank 1 passes a tensor on meta; only cpu and cuda are supported"}


def _make_cuda_mover(rank):
    try:
        reshard.Mover(reshard.make_plan(ROWS, COLS, (6, 4), "float32"), device="cuda", timeout_seconds=5.0)
    except reshard.ReshardError as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_rejected():
    errors = set(run_processes(_make_cuda_mover, 4))
    assert errors == {"ArgumentError: device is 'cuda', but this process has no CUDA device"}
