"""One of two ranks that move tensors and fork. Run by test_forked_children."""

import multiprocessing
import os
import sys
import time

import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh

ROWS, COLS = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2"), "R S0")
CHILD_SECONDS = 20


def move(rank, group):
    out = reshard.reshard(torch.full((2, 4), float(rank)), ROWS, COLS, group=group, timeout_seconds=20)
    assert out[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


def refused(call):
    """The text of the ArgumentError that a call must raise."""
    try:
        call()
    except reshard.errors.ArgumentError as error:
        return str(error)
    raise AssertionError(f"{call} raised no ArgumentError")


def misuse(rank, group, mover, handle, plan, parent):
    """Check in a child process that calls with inherited groups, Movers and handles fail, and that closing is safe."""
    tensor = torch.ones(2, 4)
    calls = [
        lambda: move(rank, group),
        lambda: mover(tensor),
        lambda: mover.start(tensor),
        handle.wait,
        lambda: reshard.Mover(plan, group),
        lambda: reshard.find_topology(group),
    ]
    for call in calls:
        text = refused(call)
        assert str(parent) in text and str(os.getpid()) in text, text
    mover.close()
    if isinstance(group, reshard.Group):
        group.close()
        with group:
            pass


def make_own_groups(rank, port, name):
    """Check in a child that it may create new groups."""
    store = dist.PrefixStore(f"children {name}", dist.TCPStore("127.0.0.1", port, is_master=False))
    with reshard.join(store, rank, 2) as group:
        move(rank, group)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    move(rank, None)
    dist.destroy_process_group()


def fork(rank, port, kind, how, group, mover, handle, plan):
    """Fork a child that runs the checks and ends as ``how`` says, and wait for it."""
    parent = os.getpid()
    if how == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(
            target=misuse, args=(rank, group, mover, handle, plan, parent)
        )
        child.start()
        assert wait_for(child.pid) == 0
    elif (pid := os.fork()) == 0:
        misuse(rank, group, mover, handle, plan, parent)
        make_own_groups(rank, port, f"{kind} {how}")
        if how == "_exit":
            os._exit(0)
        if how == "raise":
            raise KeyError("raised by the child")
        sys.exit(0)
    else:
        assert wait_for(pid) == (1 if how == "raise" else 0)


def wait_for(pid):
    deadline = time.monotonic() + CHILD_SECONDS
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child did not end within {CHILD_SECONDS} s")


def main():
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    with reshard.join(store, rank, 2) as group:
        check_forks(rank, port, "joined", group)
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=2)
    check_forks(rank, port, "world", None)
    reshard.close_group()
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < 2:  # rank 0 serves the store
        time.sleep(0.01)
    dist.destroy_process_group()
    print("well", flush=True)


def check_forks(rank, port, kind, group):
    """Move tensors before, during and after forks of each kind of child."""
    move(rank, group)
    plan = reshard.make_plan(ROWS, COLS, (4, 4), "float32")
    with reshard.Mover(plan, group) as mover:
        for how in ("exit", "_exit", "raise", "multiprocessing"):
            handle = mover.start(torch.full((2, 4), float(rank)))
            fork(rank, port, kind, how, group, mover, handle, plan)
            handle.wait()
            assert mover(torch.full((2, 4), float(rank)))[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
            move(rank, group)


if __name__ == "__main__":
    main()
