"""Actors on a real Ray cluster of emulated hosts: transfers, invalid calls, dead actors, recovery."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch

from microbench.emulation import namespaces
from reshard.errors import ArgumentError

pytest.importorskip("ray", reason="ray is not installed: pip install 'reshard[ray]'")

_reason = namespaces.why_unsupported()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(_reason is not None, reason=str(_reason)),
]


def _whole(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def _move_there_and_back():
    import reshard.ray as actors

    whole = _whole(13, 6)
    with (
        actors.ActorMesh("2x2", num_hosts=2, name="trainer") as trainer,
        actors.ActorMesh(3, num_hosts=3, name="server") as server,
    ):
        assert len(set(trainer.addresses)) == 2
        assert len(set(server.addresses)) == 3
        weights = trainer.put(whole, "S0 S1")
        served = actors.reshard(weights, trainer, server, dst_spec="R S0")
        assert served.shards()[2].tolist() == whole[:, 4:].tolist()
        back = actors.reshard(served, server, trainer, dst_spec="S01")
        assert back.gather().equal(whole)
        turned = actors.reshard(back, trainer, trainer, dst_spec="R S0")  # on the same mesh
        assert turned.gather().equal(whole)
        assert weights.gather().equal(whole)
        both = {
            "a": trainer.make((8, 4), "bfloat16", "S0", _ones),
            "b": trainer.put(whole.numpy(), None),
        }
        moved = actors.reshard(both, trainer, server, dst_spec={"a": None, "b": "S0"})
        assert moved["a"].shards()[1].equal(torch.ones(8, 4, dtype=torch.bfloat16))
        assert moved["b"].gather().equal(whole)


def _masked(index):
    return np.ma.array(np.ones(4), mask=[True, False, True, False])[index]


def _ones(index):
    return torch.ones([cut.stop - cut.start for cut in index], dtype=torch.bfloat16)


@pytest.mark.nightly
def test_arrays_move_between_meshes_of_actors(drive):
    drive(_move_there_and_back)


def _wrong_calls():
    import reshard.ray as actors

    found = []

    def note(call):
        try:
            call()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("no error")

    with actors.ActorMesh(2, name="left") as left, actors.ActorMesh(2, name="right") as right:
        held = left.put(_whole(4, 4), "S0")
        note(lambda: actors.reshard(held, right, left))
        note(lambda: actors.reshard(_whole(2), left, right))
        note(lambda: actors.reshard(held, left, right, dst_spec="S0 S0"))
        note(lambda: actors.reshard(held, left, right, strategy="magic"))
        note(lambda: left.make((4, 4), "float32", "S0", _ones))
        note(lambda: actors.ActorMesh(3, num_hosts=2))
        note(lambda: actors.ActorMesh(40, num_hosts=4, timeout_seconds=1.0))
        note(lambda: actors.run([left], _fail_on_one))
        note(lambda: actors.run([left], _exit_on_one))
        begun = time.monotonic()
        note(lambda: actors.run([left], _fail_while_others_work))
        assert time.monotonic() - begun < 5  # the driver raises without waiting for the actor that sleeps 8 s
        note(lambda: actors.run([left], _fail_on_one, timeout_seconds=1.0))  # left[0] is still busy
        note(lambda: actors.run(left, _fail_on_one))
        note(lambda: actors.run([left, left], _fail_on_one))
        note(lambda: actors.run([left], lambda rank: held))
        lock = threading.Lock()
        note(lambda: actors.run([left], lambda rank: lock.locked()))
        note(lambda: left.put(["a", "b"]))
        note(lambda: actors.ActorMesh(2, num_cpus=-1))
        note(lambda: actors.ActorMesh(2, name=3))
        note(lambda: actors.reshard(held, left, right, timeout_seconds="soon"))
        note(lambda: left.put(np.ma.array([1.0, 2.0], mask=[True, False])))
        note(lambda: left.make((4,), "float64", "S0", _masked))
        note(lambda: actors.reshard(held, left, right, on_loss=np.arange(2)))
        note(lambda: actors.reshard(held, left, right, compression=np.arange(2)))
        note(lambda: actors.reshard({}, left, right))
        note(lambda: actors.run(5, _fail_on_one))
        turned = torch.complex(torch.ones(4), torch.ones(4)).conj()
        assert left.put(turned, "S0").gather().equal(turned.resolve_conj())
        for array in (np.float32(3.0), np.zeros((0, 4)), np.arange(6.0)[::-1]):
            there = actors.reshard(left.put(array), left, right, verify=True)
            assert there.shape == np.shape(array) and np.array_equal(there.gather().numpy(), array)
        uneven = left.put(np.zeros((3, 0)), "S0 R")  # empty shards of two shapes
        assert actors.reshard(uneven, left, right, dst_spec="R S0").gather().shape == (3, 0)
        good = actors.reshard(held, left, right, dst_spec="R S0")  # the actors still work after all errors
        assert good.gather().equal(_whole(4, 4))
        wide = np.random.default_rng(0).standard_normal((64, 128), dtype=np.float32)
        encoded = actors.reshard(left.put(wide, "S0"), left, right, dst_spec="R S0", compression="int8x128").gather()
        assert 0.005 < np.linalg.norm(encoded.numpy() - wide) / np.linalg.norm(wide) < 0.01
        old, new = left.put(wide, "S0"), left.put(wide + (wide > 2), "S0")
        out = actors.reshard(old, left, right, dst_spec="R S0", compression="delta")  # there is no base: in full
        assert np.array_equal(out.gather().numpy(), wide)
        changed = {"dst_spec": "R S0", "compression": "delta", "base": old, "out": out}
        assert actors.reshard(new, left, right, **changed) is out
        assert np.array_equal(out.gather().numpy(), wide + (wide > 2))
        for wrong in ({"out": old}, {"base": out}, {"out": left.put(wide)}, {"compression": None}):
            with pytest.raises(ArgumentError, match=r"out is on|base is on|base= and out= are for"):
                actors.reshard(new, left, right, **(changed | wrong))
        right.close()
        note(lambda: actors.reshard(held, left, right))
        there = left.make((4, 4), "float64", "S0", _part_of_read_only_array)
        assert np.array_equal(there.gather().numpy(), _read_only_array())
    return found


def _read_only_array():
    whole = np.arange(16.0).reshape(4, 4)
    whole.setflags(write=False)
    return whole


def _part_of_read_only_array(index):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return _read_only_array()[index]


def _use_after_shutdown():
    import ray

    import reshard.ray as actors

    left = actors.ActorMesh(1, name="left")
    held = left.put(_whole(4, 4))
    address = ray.get_runtime_context().gcs_address
    ray.shutdown()
    found = []
    for again in (False, True):
        if again:
            ray.init(address=address, log_to_driver=False)
        for use in (held.gather, held.shards, lambda: left.put(_whole(2)), lambda: actors.run([left], _ones)):
            try:
                use()
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
            else:
                found.append("no error")
        left.close() if again else None
    with actors.ActorMesh(1, name="left") as left:
        assert left.put(_whole(4, 4)).gather().equal(_whole(4, 4))
    return found


@pytest.mark.nightly
def test_use_after_ray_shutdown_is_an_error(drive):
    found = drive(_use_after_shutdown)
    assert len(found) == 8
    for error in found:
        assert "ArgumentError: 'left' and its arrays ended with the connection to Ray" in error


def _run_on_shards():
    import reshard.ray as actors

    whole = _whole(6, 4)
    with actors.ActorMesh(2, name="trainer") as trainer, actors.ActorMesh(2, name="server") as server:
        weights = trainer.put(whole, "S0")
        served = actors.reshard(weights, trainer, server, dst_spec="R S0")
        added = actors.run([trainer, server], _add_one, {"trained": weights}, [served])
        assert weights.gather().equal(whole + 1) and served.gather().equal(
            whole
        )  # functions get the shards themselves, not copies
    return added


def _add_one(rank, by_name, listed):
    trained, served = by_name["trained"], listed[0]
    if trained is not None:
        trained += 1.0
    return rank, None if trained is None else list(trained.shape), None if served is None else served.tolist()


@pytest.mark.nightly
def test_functions_get_the_shards_of_their_actor(drive):
    added, whole = drive(_run_on_shards), _whole(6, 4)
    assert [item[:2] for item in added] == [(0, [3, 4]), (1, [3, 4]), (2, None), (3, None)]
    assert [item[2] for item in added] == [None, None, whole[:, :2].tolist(), whole[:, 2:].tolist()]


def _exit_on_one(rank):
    if rank:
        sys.exit(3)


def _fail_on_one(rank):
    if rank:
        raise ValueError("not today")


def _fail_while_others_work(rank):
    if rank:
        raise ValueError("not now")
    time.sleep(8)


@pytest.mark.nightly
def test_errors_of_wrong_calls_name_the_cause(drive):
    found = drive(_wrong_calls)
    starts = [
        "ArgumentError: the array is on left",
        "ArgumentError: the array is Tensor, not a ShardedArray",
        "LayoutError: ",
        "ArgumentError: ",
        "ArgumentError: the function returned bfloat16",
        "MeshError: 3 ranks of 'mesh' cannot be divided evenly over 2 hosts",
        r"TransferTimeoutError: 'mesh' needs 4 nodes .* Add nodes, close meshes .* its --num-cpus may exceed",
        r"RemoteError: left\[1\] at [0-9.]+: ValueError: not today",
        r"RemoteError: left\[1\] at [0-9.]+: SystemExit: 3",
        r"RemoteError: left\[1\] at [0-9.]+: ValueError: not now",
        r"TransferTimeoutError: not all 2 actors started within 1 s; one may be busy with another run",
        "ArgumentError: run needs a list of ActorMeshes",
        "ArgumentError: run needs different meshes: each actor is one rank",
        "ArgumentError: arguments of actors must be picklable: ",
        "ArgumentError: arguments of actors must be picklable: ",
        "ArgumentError: put needs an array of numbers",
        "ArgumentError: num_cpus of 'mesh' is -1",
        "MeshError: name is 3; it must be a text",
        "ArgumentError: timeout_seconds is 'soon'",
        "ArgumentError: put got a MaskedArray, whose mask would be lost",
        "ArgumentError: the function returned a MaskedArray, whose mask would be lost",
        r"ArgumentError: on_loss is array\(.*; it must be 'raise' or 'recover'",
        "ArgumentError: .*compression",
        "ArgumentError: reshard needs at least one array",
        "ArgumentError: run needs a list of ActorMeshes",
        "ArgumentError: 'right' is closed",
    ]
    for error, start in zip(found, starts, strict=True):
        assert re.match(start, error), error


def _kill_one():
    import ray

    import reshard
    import reshard.ray as actors

    with actors.ActorMesh(2, num_hosts=2, name="left") as left, actors.ActorMesh(2, num_hosts=2, name="right") as right:
        held = left.put(_whole(64, 64), "S0")
        actors.reshard(held, left, right, dst_spec="R S0")
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(right.actors[1].__ray_call__.remote(_end))
        begun = time.monotonic()
        try:
            actors.reshard(held, left, right, dst_spec="S0")
        except reshard.ReshardError as error:
            first, took = f"{type(error).__name__}: {error}", time.monotonic() - begun
        try:
            actors.reshard(held, left, right, dst_spec="S0")
        except reshard.ReshardError as error:
            second = str(error)
        assert held.gather().equal(_whole(64, 64))  # the source is unchanged
        with actors.ActorMesh(1, name="spare") as spare:
            assert actors.reshard(held, left, spare).gather().equal(_whole(64, 64))
    return first, second, took


def _end(actor):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.nightly
def test_dead_actor_is_named(drive):
    first, second, took = drive(_kill_one)
    assert re.match(r"RemoteError: rank 1 of 'right', right\[1\] at 10\.77\.\d\.1, died: ", first), first
    assert "right[1]" in second
    assert took < 15


def _recover():
    """Two actors die, one before a move and one in the next; replicas remain. A third death loses data."""
    import ray

    import reshard
    import reshard.ray as actors

    with (
        actors.ActorMesh("2x2", num_hosts=2, name="left") as left,
        actors.ActorMesh("2x2", num_hosts=2, name="right") as right,
    ):
        held = left.put(_whole(64, 64), "R S1")
        actors.reshard(held, left, right, dst_spec="S0 R")
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(left.actors[1].__ray_call__.remote(_end))
        first = actors.reshard(held, left, right, dst_spec="S0 R", on_loss="recover")
        good = [first.gather().equal(_whole(64, 64)), sorted(left.dead), sorted(first.lost)]
        ray.get(right.actors[2].__ray_call__.remote(_end_in_transfer))
        second = actors.reshard(held, left, right, dst_spec="S0 R", on_loss="recover")
        good += [second.gather().equal(_whole(64, 64)), sorted(second.shards()), sorted(second.lost)]
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(left.actors[3].__ray_call__.remote(_end))
        try:
            actors.reshard(held, left, right, dst_spec="S0 R", on_loss="recover")
        except reshard.errors.RankLostError as error:
            good.append(str(error))
    return good


def _end_in_transfer(actor):
    from reshard.runtime.transport import GlooTransport

    GlooTransport.recv = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.nightly
def test_survivors_recover_after_actors_die(drive):
    *good, error = drive(_recover)
    assert good == [True, [1], [], True, [0, 1, 3], [2]]
    assert error.startswith("ranks 1,3,6 are lost, and with them "), error
    assert "rank 6 is right[1,0] at " in error


STOPPED_SECONDS = 12


def _stop_for_a_while(actor):
    stopped = os.getpid()
    if os.fork() == 0:
        time.sleep(STOPPED_SECONDS - 1)
        os.kill(stopped, signal.SIGCONT)
        os._exit(0)
    os.kill(stopped, signal.SIGSTOP)


def _recover_without_a_stopped_one():
    """A stopped actor is excluded. After it resumes, it stays excluded and sends no data of an earlier step."""
    import reshard.ray as actors

    with actors.ActorMesh(2, name="left") as left, actors.ActorMesh(2, name="right") as right:
        held = [left.put(np.full((4, 4), float(step)), None) for step in range(3)]
        actors.reshard(held[0], left, right, dst_spec="S0", on_loss="recover")
        left.actors[1].__ray_call__.remote(_stop_for_a_while)
        time.sleep(0.5)
        begun, found = time.monotonic(), []
        moved = actors.reshard(held[1], left, right, dst_spec="S0", on_loss="recover", timeout_seconds=3.0)
        found.append((moved.gather().unique().tolist(), sorted(left.dead), time.monotonic() - begun < 25))
        time.sleep(max(0.0, begun + STOPPED_SECONDS - time.monotonic()))
        begun = time.monotonic()
        moved = actors.reshard(held[2], left, right, dst_spec="S0", on_loss="recover", timeout_seconds=3.0)
        found.append((moved.gather().unique().tolist(), sorted(left.dead), time.monotonic() - begun < 12))
    return found


@pytest.mark.nightly
@pytest.mark.slow
def test_survivors_recover_without_a_stopped_actor(drive):
    assert drive(_recover_without_a_stopped_one) == [([1.0], [1], True), ([2.0], [1], True)]
