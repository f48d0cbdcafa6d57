"""Plans that one rank of each host makes, and the other ranks map."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import reshard
from reshard import Layout, Mesh, Topology, _native
from reshard.api.preparation import plan_per_host, prepare
from reshard.cli.demo_transfers import count_unlike, shard_of_positions
from reshard.errors import PlanError, RankLostError, RemoteError, TransferTimeoutError
from reshard.testing.processes import LaunchError, run_processes
from reshard.weights import transfer_state_dict

pytestmark = pytest.mark.skipif(not hasattr(_native, "create_memory"), reason="shared memory needs Linux")

SRC, DST = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2", first_rank=2), "R S0")
SHAPES = {f"w{number}": (16 + number, 24) for number in range(5)}


def count_plans(machine=None, *, make=prepare.plan_tensors):
    """Share all plans of this rank, and count those that it makes; ``machine`` replaces the name of its machine."""
    made = []
    plan_per_host.SHARED_FROM_SECONDS = 0.0
    if machine is not None:
        plan_per_host._name_machine = lambda call_group: machine

    def make_counted(tensors, **options):
        made.append(tensors)
        return make(tensors, **options)

    prepare.plan_tensors = make_counted
    return made


def move(rank, **options):
    """Move all tensors; returns the number of wrong elements."""
    options = {"topology": Topology((0, 0, 1, 1))} | options
    sources = {name: shard_of_positions(SRC, rank, shape, "float32") for name, shape in SHAPES.items()}
    result = reshard.reshard(sources, SRC, DST, shape=SHAPES, **options)
    if rank not in DST.ranks:
        return 0
    return sum(count_unlike(result[name], shard_of_positions(DST, rank, SHAPES[name], "float32")) for name in SHAPES)


def plans_of_channel():
    (call_group,) = [
        call_group for group in reshard.coordination.known_groups(None) for call_group in group.call_groups.values()
    ]
    return [plan for plan, _, _ in call_group.cache.values()]


def open_files():
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return sum("memfd:reshard" in str(link.readlink()) for link in links if link.is_symlink())


def check_sharing(rank):
    os.environ["RESHARD_SHARED_MEMORY"] = "0"  # so that the plan is all that is mapped
    made = count_plans(machine=f"machine {rank // 2}")
    assert move(rank) == 0
    (plan,) = plans_of_channel()
    assert len(made) == (rank % 2 == 0)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:reshard" in line]
    assert [line.split()[1] for line in mapped] == ["r--s"]  # nobody can write
    alone = plan_per_host.plan_tensors(plan.tensors, topology=plan.topology, staging_bytes=plan.staging_bytes)
    assert plan == alone
    del plan.__dict__["plan_hash"]  # a rank that maps a plan takes the hash of its planner
    assert plan.plan_hash == alone.plan_hash
    assert not plan.transfers.sender.flags.writeable
    assert move(rank) == 0  # by the plan of the first call
    assert len(made) == (rank % 2 == 0)
    assert move(rank, strategy="send_recv") == 0
    assert len(made) == 2 * (rank % 2 == 0)
    return open_files(), plan.plan_hash


def test_one_rank_of_each_host_plans():
    results = run_processes(check_sharing, 4)
    assert [files for files, _ in results] == [0] * 4
    assert len({plan_hash for _, plan_hash in results}) == 1


def fail_to_plan(tensors, **options):
    raise PlanError("no plan today")


def check_fallbacks(rank):
    # ranks that seem to share a machine, but cannot open files of each other
    opened = plan_per_host.open_memory_file
    made = count_plans(machine="one")

    def refuse(*file):
        if file[0] != os.getpid() and rank == 3:
            raise PermissionError
        return opened(*file)

    plan_per_host.open_memory_file = refuse
    assert move(rank) == 0
    assert len(made) == (rank in (0, 3))
    # a file that has changed
    mapped = plan_per_host.map_memory_file

    def change(descriptor, nbytes):
        array = mapped(descriptor, nbytes).copy()
        array[8] ^= rank == 2
        return array

    plan_per_host.map_memory_file = change
    assert move(rank, strategy="send_recv") == 0
    assert len(made) == {0: 2, 1: 0, 2: 1, 3: 2}[rank]
    # the planner has too little memory for a file
    made = count_plans(machine="one")
    written = plan_per_host._write

    def write(plan):
        raise OSError(errno.ENOMEM, "too little memory")

    plan_per_host._write = write
    assert move(rank, strategy="broadcast_greedy") == 0
    assert len(made) == 1
    plan_per_host._write = written
    # no two ranks share a machine
    made = count_plans(machine=f"container {rank}")
    assert move(rank, strategy="local_all_gather") == 0
    assert len(made) == 1
    # the planner fails, so each rank does
    made = count_plans(machine="one", make=fail_to_plan)
    with pytest.raises(PlanError, match=r"^no plan today$"):
        move(rank, strategy="global_all_gather")
    assert len(made) == 1
    return open_files()


def test_ranks_plan_by_themselves_where_they_cannot_share():
    assert run_processes(check_fallbacks, 4) == [0] * 4


def test_machines_differ_between_process_tables(monkeypatch):
    class Alone:
        class group:  # noqa: N801
            rank, hostname = 3, "box"

    names = {plan_per_host._name_machine(Alone)}
    monkeypatch.setattr(Path, "readlink", lambda path: Path("pid:[1]"))
    names.add(plan_per_host._name_machine(Alone))
    monkeypatch.setattr(Path, "read_text", lambda path: "another boot")
    names.add(plan_per_host._name_machine(Alone))
    assert len(names) == 3


def die(tensors, **options):
    os.kill(os.getpid(), signal.SIGKILL)


def stop(tensors, **options):
    os.kill(os.getpid(), signal.SIGSTOP)


def check_lost(rank, planner, on_loss, victim):
    count_plans(machine=f"machine {rank // 2}", make=victim if rank == planner else plan_per_host.plan_tensors)
    begun = time.monotonic()
    try:
        move(rank, on_loss=on_loss, timeout_seconds=6)
    except RankLostError as error:
        found = f"lost {error.ranks}"
    except (RemoteError, TransferTimeoutError) as error:
        found = str(error)
    assert time.monotonic() - begun < 60
    return found, open_files()


def run_lost(planner, on_loss="raise", victim=die):
    with pytest.raises(LaunchError) as caught:
        run_processes(check_lost, 4, planner, on_loss, victim, timeout_seconds=90, grace_seconds=60)
    assert [failure.rank for failure in caught.value.failures] == [planner]
    return [caught.value.results[rank] for rank in range(4) if rank != planner]


@pytest.mark.integration
@pytest.mark.parametrize("planner", [0, 2])
def test_a_planner_that_dies_ends_the_call(planner):
    for found, files in run_lost(planner):
        assert f"rank {planner}" in found, found
        assert files == 0


@pytest.mark.integration
def test_survivors_plan_after_their_planner_has_died():
    for found, files in run_lost(2, on_loss="offer"):
        assert found == "lost (2,)"
        assert files == 0


@pytest.mark.nightly
def test_a_planner_that_is_late_ends_the_call(monkeypatch):
    monkeypatch.setattr(plan_per_host, "_PATIENCE", 1)
    for found, _ in run_lost(2, victim=stop):
        assert "rank 2" in found, found


def check_model(rank):
    plan_per_host.SHARED_FROM_SECONDS = 0.0
    make, made = plan_per_host.plan_tensors, []
    plan_per_host.plan_tensors = lambda tensors, **options: made.append(tensors) or make(tensors, **options)
    source = {f"{number}.weight": torch.full((8, 8), float(number)) for number in range(9)} if rank == 0 else None
    target = {f"{number}.weight": torch.zeros(8, 8) for number in range(9)} if rank else None
    transfer_state_dict(source, target)
    assert target is None or all((target[f"{number}.weight"] == number).all() for number in range(9))
    return len(made), open_files()


def test_whole_models_are_planned_once_per_host():
    assert run_processes(check_model, 3) == [(1, 0), (0, 0), (0, 0)]
