"""Native loops of the planner make the choices of their reference implementations: schedules, senders, broadcast trees."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from reshard import _native
from reshard.cost.serial_ports import serial_seconds
from reshard.planner import STRATEGIES, plan_tensors
from reshard.planner.multicast.classes import Classes, group_rows
from reshard.planner.multicast.native_schedule import make_schedule
from reshard.planner.multicast.strategy import make_workload, nics_of
from reshard.planner.strategies.chunk_limits import INSIDE_WINDOW, WINDOW
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.sender_selection import SendLoads, pick_sender, pick_senders, real_ranks
from reshard.planner.strategies.trees import along_trees
from reshard.ragged import NO_RANK
from reshard.sharding import Layout, Mesh
from reshard.sharding.tensor_spec import TensorSpec
from reshard.topology import MAX_NICS, Topology
from tests.reference.circulant_broadcast import send_in_circles
from tests.reference.exchange import direct_loads_python, number_rows_python, rotate_python
from tests.reference.schedule import schedule_python
from tests.reference.serial_ports import serial_seconds_python
from tests.reference.trees import grow_python
from tests.support.random_problems import random_problem

#: Seeds of rare cases: a slow port sends the last chunk, a relay gets the first message, or staging changes the order.
RARE_SEEDS = (105, 199, 285, 561, 872, 1045)


@pytest.mark.parametrize("seed", [*range(60), *RARE_SEEDS])
def test_native_and_reference_schedules_are_equal(seed):
    src, dst, shape, topology = random_problem(seed)
    problem = PlanProblem.of([TensorSpec(shape, "float32", src, dst)], topology, staging_bytes=2 ** (16 + seed % 5))
    workload = replace(make_workload(problem)[0], near_first=seed % 3 == 1, keeps_partners=seed % 3 == 2)
    nics = nics_of(problem)
    native, twin = make_schedule(nics, workload), schedule_python(nics, workload)
    for name in native.__dataclass_fields__:
        assert (getattr(native, name) == getattr(twin, name)).all(), name
    assert (native.source >= -1).all()


@pytest.mark.parametrize("num_hosts", [2, 3, 6, 13, 32])
@pytest.mark.parametrize("spec", ["S1 R", "R R"])
def test_native_and_reference_broadcasts_are_equal(num_hosts, spec):
    """n chunks from one host to h others pass in n - 1 + ceil(log2(h + 1)) slots, and at most three more."""
    topology = Topology.uniform([rank // 2 for rank in range(2 * num_hosts)]).without_latency()
    src, dst = Layout(Mesh.of((1, 2)), "S1 R"), Layout(Mesh.of((num_hosts - 1, 2), first_rank=2), spec)
    problem = PlanProblem.of([TensorSpec((4096, 96), "float32", src, dst)], topology)
    workload, nics = replace(make_workload(problem)[0], is_broadcast=True), nics_of(problem)
    native, twin = make_schedule(nics, workload), schedule_python(nics, workload)
    for name in native.__dataclass_fields__:
        assert (getattr(native, name) == getattr(twin, name)).all(), name
    assert workload.has_one_holder
    chunks, sends = len(workload.host_class_of), send_in_circles(nics, workload)
    assert len(sends.chunk) == chunks * (num_hosts - 1)
    assert max(sends.end) <= chunks - 1 + math.ceil(math.log2(num_hosts)) + 3


def test_what_is_no_broadcast_is_refused():
    src, dst, shape, topology = random_problem(0)
    problem = PlanProblem.of([TensorSpec(shape, "float32", src, dst)], topology)
    workload = replace(make_workload(problem)[0], is_broadcast=True)
    assert not workload.has_one_holder
    with pytest.raises(ValueError, match="the chunks are not a broadcast from one host"):
        make_schedule(nics_of(problem), workload)


def test_chunks_without_a_holder_are_refused():
    src, dst, shape, topology = random_problem(0)
    problem = PlanProblem.of([TensorSpec(shape, "float32", src, dst)], topology, staging_bytes=2**16)
    workload, nics = make_workload(problem)[0], nics_of(problem)
    nobody = np.zeros_like(workload.host_class_holders[0]), workload.host_class_holders[1][:0]
    assert len(nobody[0]) > 1
    workload = replace(workload, host_class_holders=nobody)
    with pytest.raises(ValueError, match=r"^make_schedule: a chunk cannot reach a host that needs it$"):
        make_schedule(nics, workload)


@pytest.mark.parametrize("seed", range(60))
def test_native_and_reference_senders_and_trees_are_equal(seed):
    src, dst, shape, topology = random_problem(seed)
    problem = PlanProblem.of([TensorSpec(shape, "float32", src, dst)], topology)
    task, replica = np.nonzero(problem.receivers != NO_RANK)
    receiver, loads = problem.receivers[task, replica], SendLoads(problem)
    rows = zip(task.tolist(), receiver.tolist(), strict=True)
    picked = [pick_sender(loads, real_ranks(problem.holders[t]), r, int(problem.nbytes[t])) for t, r in rows]
    assert pick_senders(problem, task, receiver).tolist() == picked
    chance = random.Random(seed)
    tasks = chance.sample(range(len(problem)), len(problem))
    order = [(t, chance.choice(real_ranks(problem.holders[t]))) for t in tasks]
    routes = along_trees(problem, order)
    assert list(zip(routes.sender.tolist(), routes.receiver.tolist(), strict=True)) == grow_python(problem, order)
    assert np.diff(routes.edge_offsets).tolist() == (problem.receivers[tasks] != NO_RANK).sum(axis=1).tolist()


@pytest.mark.parametrize("seed", range(60))
def test_native_and_reference_rotations_are_equal(seed):
    chance = random.Random(seed)
    src, dst, shape, topology = random_problem(seed)
    problem = PlanProblem.of([TensorSpec(shape, "float32", src, dst)], topology)
    classes = Classes.of(problem)
    if not len(classes):
        pytest.skip("nothing moves")
    holder = [chance.choice(real_ranks(row)) for row in classes.holders]
    piece_offsets = [0, *np.cumsum([chance.randint(1, 3) for _ in holder]).tolist()]
    rotates = chance.random() < 0.5
    most_bytes = float(classes.nbytes.sum()) * chance.choice((0.2, 1.0, 10.0))
    expected = rotate_python(classes, holder, piece_offsets, topology, rotates, most_bytes)
    count = int((np.diff(piece_offsets) * (classes.receivers != NO_RANK).sum(axis=1)).sum())
    names = ("region", "sender", "receiver", "window", "source", "after_offsets", "after")
    found = {name: np.empty(count, dtype=np.int64) for name in names[:5]}
    found |= {"after_offsets": np.empty(count + 1, dtype=np.int64), "after": np.empty(2 * count, dtype=np.int64)}
    host = topology.host_array
    nic = host * MAX_NICS + topology.nic_array
    arrays = classes.receivers, np.array(holder), classes.nbytes, np.array(piece_offsets), host, nic
    limits = topology.num_hosts * MAX_NICS, rotates, most_bytes, WINDOW, INSIDE_WINDOW
    num_after = _native.rotate(*arrays, *limits, **found)
    if expected is None:
        assert num_after == -1
        return
    rows = [[*row] for row in zip(*(found[name].tolist() for name in names[:4]), strict=True)]
    after = np.split(found["after"][:num_after], found["after_offsets"][1:-1])
    assert [[*row[:4], row[4], row[5]] for row in expected] == [
        [*row, each.tolist(), source] for row, each, source in zip(rows, after, found["source"].tolist(), strict=True)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_native_and_reference_loads_and_rows_are_equal(seed):
    src, dst, shape, topology = random_problem(seed)
    problem = PlanProblem.of([TensorSpec(shape, "float32", src, dst)], topology)
    host = topology.host_array
    nic = host * MAX_NICS + topology.nic_array
    loads = {name: np.zeros(topology.num_hosts * MAX_NICS) for name in ("sent", "received", "pairs")}
    holder = np.ascontiguousarray(problem.holders[:, 0])
    receivers = np.where(problem.receivers == holder[:, None], NO_RANK, problem.receivers)
    problem = replace(problem, holders=holder[:, None], destinations=receivers)
    _native.add_direct_loads(holder, receivers, problem.nbytes, host, nic, *loads.values())
    found = {
        (name, int(at) // MAX_NICS, int(at) % MAX_NICS): load[at]
        for name, load in loads.items()
        for at in np.flatnonzero(load)
    }
    assert found == direct_loads_python(problem)
    rows = np.random.default_rng(seed).integers(-1, 3, (50, 3))
    assert [array.tolist() for array in group_rows(rows)] == list(number_rows_python(rows))


@pytest.mark.parametrize("seed", range(40))
def test_native_and_reference_serial_times_are_equal(seed):
    chance = random.Random(seed)
    src, dst, shape, topology = random_problem(seed)
    topology = replace(topology, sender_change_seconds=chance.choice((0.0, 1e-4)))
    topology = replace(topology, inside_total_bytes_per_second=(None, 2e9, 3e8)[seed % 3])
    spec = TensorSpec(shape, "float32", src, dst)
    plan = plan_tensors([spec], topology=topology, strategy=chance.choice(list(STRATEGIES)), staging_bytes=2**16)
    seconds = serial_seconds(plan)
    assert seconds == serial_seconds_python(plan)
    assert (seconds > 0) == bool((plan.transfers.sender != plan.transfers.receiver).any())


def test_wrong_arrays_of_an_exchange_are_refused():
    one, none = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    outputs = [np.zeros(1, dtype=np.int64) for _ in range(4)]
    with pytest.raises(IndexError, match=r"^rotate: receivers holds an index that does not exist$"):
        _native.rotate(
            np.array([[3]]), one, one, np.array([0, 1]), one, one, 1, False, 1.0, 8, 4, *outputs, *outputs[:3]
        )
    with pytest.raises(ValueError, match=r"^rotate: an output has the wrong size$"):
        _native.rotate(
            np.array([[0]]), one, one, np.array([0, 1]), one, one, 1, False, 1.0, 8, 4, none, *outputs, *outputs[:2]
        )
    with pytest.raises(IndexError, match=r"^add_direct_loads: holder holds an index that does not exist$"):
        _native.add_direct_loads(np.array([1]), np.array([[0]]), one, one, one, *(np.zeros(1) for _ in range(3)))
