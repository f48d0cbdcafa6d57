"""A trainer and engines as processes: versions arrive whole or not at all, whoever dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard.errors import ArgumentError, LayoutError, RemoteError, ReshardError, TransferTimeoutError
from reshard.testing.processes import LaunchError, run_processes
from reshard.topology import Host, Link, Topology
from reshard.weights import Publisher, PublishReport, Subscriber, publisher as publisher_module
from reshard.weights.model import verify
from reshard.weights.receiver import Receiver
from reshard.weights.routes.route import Route
from tests.support.pausable_store import PausableStore
from tests.support.versioned_models import (
    connect,
    is_version,
    make_model,
    make_trainer_model,
    set_version,
    tensors_of_version,
    wait_for_key,
)

pytestmark = pytest.mark.integration


def _shards_to_two_engines(rank, _, store):
    """Ranks 0 to 2 train with FSDP, 3 and 4 are an engine with tensor parallelism, 5 is an engine in bfloat16."""
    if rank < 3:
        raw = connect(store, ("trainer", rank), rank, 3)
        model = make_trainer_model(3)
        with Publisher(model, raw) as publisher:
            wait_for_key(raw, "ready3"), wait_for_key(raw, "ready5")
            for version in (1, 2, 3):
                set_version(model, version)
                handle = publisher.publish(version)
                set_version(model, 100)  # the optimizer goes on
                report = handle.wait(60)
                assert len(report.engines) == 2 and set(report.engines.values()) == {""}, report
                said = rf"version {version}: 2 engines hold it: 78.66 KiB in .+ \(predicted .+, lower bound 0, .+\)"
                assert re.fullmatch(said, str(report)), str(report)
                raw.set(f"published{version}", "")
        return report.nbytes
    raw = connect(store, ("engine", rank - 3), rank, 2 if rank < 5 else 1)
    model = make_model(2)
    if rank < 5:
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    else:
        model = model.to(torch.bfloat16)
    with Subscriber(model, raw) as subscriber:
        raw.set(f"ready{rank}", "")
        found = []
        while not found or found[-1] < 3:
            found.append(subscriber.update(60))
            if rank < 5:
                assert is_version(model, found[-1])
        with pytest.raises(TransferTimeoutError, match="the model keeps version 3"):
            subscriber.update(0.2)
    if rank == 5:
        for name, value in model.state_dict().items():
            assert torch.equal(value, tensors_of_version(3)[name].to(torch.bfloat16))
    return found


def test_versions_reach_engines_of_other_shardings_and_dtypes():
    with PausableStore(6) as store:
        results = run_processes(_shards_to_two_engines, 6, store, init_group=False)
    assert results[:3] == [4 * (13 * 7 + 7 + 7 * 5 + 5 * 4001)] * 3
    assert results[3] == results[4]


def _engine_dies(rank, _, store):
    """Rank 0 trains; ranks 1 and 2 are an engine of two ranks, of which one dies; rank 3 is another engine."""
    if rank == 0:
        raw = connect(store, (), rank, 1)
        model = make_trainer_model(1)
        with Publisher(model, raw) as publisher:
            for key in ("ready1", "ready2", "ready3"):
                wait_for_key(raw, key)
            set_version(model, 1)
            publisher.publish(1).wait(60)
            raw.set("die", "")
            time.sleep(0.5)
            begun = time.monotonic()
            set_version(model, 2)
            report = publisher.publish(2).wait(60)
            return sorted(report.engines.values()), time.monotonic() - begun
    raw = connect(store, ("engine", rank - 1), rank, 2 if rank < 3 else 1)
    model = make_model(2)
    with Subscriber(model, raw) as subscriber:
        raw.set(f"ready{rank}", "")
        assert subscriber.update(60) == 1 and is_version(model, 1)
        if rank == 2:
            wait_for_key(raw, "die")
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 3:
            assert subscriber.update(60) == 2 and is_version(model, 2)
        else:
            with pytest.raises(ReshardError):
                subscriber.update(10)
            assert subscriber.version == 1 and is_version(model, 1)
    return None


def test_engine_of_a_killed_rank_is_dropped_and_the_others_commit():
    with PausableStore(4) as store, pytest.raises(LaunchError) as caught:
        run_processes(_engine_dies, 4, store, init_group=False, grace_seconds=60)
    results = caught.value.results
    assert sorted(results) == [0, 1, 3], caught.value
    engines, seconds = results[0]
    assert engines[0] == "" and "dropped: rank 1 of the engine has ended" in engines[1]
    said = str(PublishReport(2, {"f00d": "", "beef": engines[1]}))
    assert said == f"version 2: 1 engine holds it; 1 engine does not hold it (engine beef: {engines[1]})"
    assert seconds < 10


def _trainer_dies(rank, _, store):
    """Rank 1 of the trainer dies; the engine, rank 2, keeps its version."""
    if rank < 2:
        raw = connect(store, ("trainer", rank), rank, 2)
        model = make_trainer_model(2)
        publisher = Publisher(model, raw)
        wait_for_key(raw, "ready")
        set_version(model, 1)
        publisher.publish(1).wait(60)
        set_version(model, 2)
        handle = publisher.publish(2)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        try:
            report = handle.wait(60)
            assert set(report.engines.values()) == {""}  # all had left before the kill
            raw.set("complete", "")
        except ReshardError as error:
            assert "rank 1 of the trainer is lost" in str(error)
        return time.monotonic() - begun
    raw = connect(store, (), rank, 1)
    model = make_model(2)
    with Subscriber(model, raw) as subscriber:
        raw.set("ready", "")
        version = subscriber.update(60)
        assert is_version(model, version)
        with contextlib.suppress(TransferTimeoutError):
            version = subscriber.update(10)
        assert is_version(model, version)
    return version


def test_engine_keeps_a_whole_version_if_a_rank_of_the_trainer_is_killed():
    with PausableStore(3) as store, pytest.raises(LaunchError) as caught:
        run_processes(_trainer_dies, 3, store, init_group=False, grace_seconds=60)
    assert sorted(caught.value.results) == [0, 2], caught.value
    assert caught.value.results[0] < 10


def _late_engine(rank, _, store):
    """The trainer, rank 0, ends. Then another engine, rank 2, fetches the version from the first one."""
    raw = connect(store, (), rank, 1)
    model = make_model(1 if rank == 0 else 2)
    if rank == 0:
        with Publisher(model, raw) as publisher:
            set_version(model, 7)
            report = publisher.publish(7).wait(60)
            assert report.engines == {}
            assert str(report) == "version 7: no engine is connected; engines that come later fetch it"
            raw.set("published", "")
            wait_for_key(raw, "first")  # this engine came after the version was sent
        raw.set("ended", "")
        return
    wait_for_key(raw, "published" if rank == 1 else "ended")
    with Subscriber(model, raw) as subscriber:
        assert subscriber.update(60) == 7 and is_version(model, 7)
        if rank == 1:
            raw.set("first", "")
            wait_for_key(raw, "second")
        else:
            raw.set("second", "")
    return


def test_late_engine_fetches_from_an_engine_that_holds_the_version():
    with PausableStore(3) as store:
        run_processes(_late_engine, 3, store, init_group=False)


def _mistakes(rank, _, store):
    raw = connect(store, (), rank, 1)
    if rank == 0:
        model = make_model(1)
        with Publisher(model, raw) as publisher:
            wait_for_key(raw, "ready")
            for bad in (True, "1"):
                with pytest.raises(ArgumentError, match="must be an integer"):
                    publisher.publish(bad)
            report = publisher.publish(3).wait(60)
            assert str(report).count("engine ") == 2, str(report)  # how many, and which one
            assert "has shape [5, 7], but" in str(report.engines) or "only the source has" in str(report.engines)
            with pytest.raises(ArgumentError, match="version 3 is not larger than 3"):
                publisher.publish(3)
            with pytest.raises(ArgumentError, match="already publishes this name"):
                Publisher(model, raw)
            with Publisher(model, raw, "other"):
                pass
        with Publisher(model, raw) as publisher, pytest.raises(ArgumentError, match="version 2 is not larger than 3"):
            publisher.publish(2)
        with pytest.raises(ArgumentError, match="must be a string"):
            Publisher(model, raw, "a/b")
        with pytest.raises(ArgumentError, match="not dict"):
            Publisher(model, {})
        return
    with Subscriber(torch.nn.Sequential(torch.nn.Linear(13, 7)), raw) as subscriber:
        raw.set("ready", "")
        with pytest.raises(ArgumentError, match=r"'1.weight'.*only the source has"):
            subscriber.update(60)
    return


def test_mistakes_are_named():
    with PausableStore(2) as store:
        run_processes(_mistakes, 2, store, init_group=False)


def _damaged(rank, _, store):
    """A bit changes in the shadow of the engine: once for version 2, at each try for version 3."""
    raw = connect(store, (), rank, 1)
    model = make_model(1 if rank == 0 else 2)
    if rank == 0:
        with Publisher(model, raw) as publisher:
            wait_for_key(raw, "ready")
            results = []
            for version in (1, 2, 3):
                set_version(model, version)
                results.append([*publisher.publish(version).wait(60).engines.values()])
            raw.set("published", "")
            wait_for_key(raw, "checked")
            return results
    damages = {2: 1, 3: 3}
    digest = verify.Checker.digest_target

    def corrupt(self, arrays, of_rank):
        version = subscriber._receiver._arrived
        if damages.get(version, 0) > 0 and arrays is subscriber._receiver._shadow:
            damages[version] -= 1
            arrays["0.weight"].view(torch.int32)[2, 3] ^= 1
        return digest(self, arrays, of_rank)

    verify.Checker.digest_target = corrupt
    with Subscriber(model, raw) as subscriber:
        raw.set("ready", "")
        found = []
        while not found or found[-1] != 2:
            found.append(subscriber.update(60))
            assert is_version(model, found[-1])
        wait_for_key(raw, "published")
        with pytest.raises(TransferTimeoutError, match=r"'0.weight' \[0:7, 0:13\] on rank 0: the digest"):
            subscriber.update(1)
        assert is_version(model, 2)
        raw.set("checked", "")
    return None


def test_damaged_version_is_sent_again_and_never_swapped_in():
    with PausableStore(2) as store:
        results = run_processes(_damaged, 2, store, init_group=False)[0]
    assert results[:2] == [[""], [""]]
    assert "failed 3 times: '0.weight' [0:7, 0:13] on rank 0" in results[2][0]


def _fails_to_receive(rank, _, store):
    """Ranks 1 and 2 are engines. Rank 2 fails at each try to receive version 2, so the sends to both fail."""
    raw = connect(store, (), rank, 1)
    model = make_model(2)
    if rank == 0:
        with Publisher(model, raw) as publisher:
            wait_for_key(raw, "ready1"), wait_for_key(raw, "ready2")
            results = []
            for version in (1, 2, 3):
                set_version(model, version)
                results.append(sorted(publisher.publish(version).wait(60).engines.values()))
                wait_for_key(raw, f"updated{version}")
            return results
    receive, number = Route.receive, iter(range(1, 100))

    def fail(self, arrays):
        if rank == 2 and 2 <= next(number) <= 4:
            raise RemoteError("cable pulled")
        receive(self, arrays)

    Route.receive = fail
    with Subscriber(model, raw) as subscriber:
        raw.set(f"ready{rank}", "")
        for version in (1, 2, 3) if rank == 1 else (1, 3):
            assert subscriber.update(60) == version and is_version(model, version)
            if rank == 1:
                raw.set(f"updated{version}", "")
    return None


def test_engine_does_not_miss_a_version_because_another_fails():
    with PausableStore(3) as store:
        results = run_processes(_fails_to_receive, 3, store, init_group=False)[0]
    assert results[0] == results[2] == ["", ""]
    assert results[1][0] == "" and results[1][1].startswith("failed 3 times"), results[1]


def _asks_while_a_version_arrives(rank, _, store):
    """Rank 0 publishes two versions. Rank 1, an engine, asks for one when the second has overwritten the first."""
    raw = connect(store, (), rank, 1)
    if rank == 0:
        model = make_trainer_model(1)
        with Publisher(model, raw) as publisher:
            wait_for_key(raw, "ready")
            for version in (1, 2):
                set_version(model, version)
                publisher.publish(version).wait(60)
        return None
    model, landed, go_on = make_model(2), threading.Event(), threading.Event()
    receive, number = Route.receive, iter((1, 2))

    def receive_slowly(self, arrays):
        receive(self, arrays)
        if next(number) == 2:
            landed.set()
            go_on.wait(10)

    Route.receive = receive_slowly
    threading.Thread(target=lambda: (landed.wait(60), time.sleep(1), go_on.set()), daemon=True).start()
    with Subscriber(model, raw) as subscriber:
        raw.set("ready", "")
        assert landed.wait(60)
        version = subscriber.update(60)
        return version, is_version(model, version)


def test_version_that_is_being_overwritten_is_not_swapped_in():
    with PausableStore(2) as store:
        _, result = run_processes(_asks_while_a_version_arrives, 2, store, init_group=False)
    assert result == (2, True)


def _loader(rank, _, store):
    """Ranks 1 and 2 are an engine with a loader of its own, which fails for version 2 on rank 2, after rank 1 has loaded."""
    if rank == 0:
        raw = connect(store, (), rank, 1)
        state = {"step": 0, "model": make_model(1).state_dict()}
        state["tied"] = state["model"]["0.weight"]
        with Publisher(state, raw) as publisher:
            wait_for_key(raw, "ready1"), wait_for_key(raw, "ready2")
            for version in (1, 2, 3):
                state["step"] = version
                for name, value in tensors_of_version(version).items():
                    state["model"][name].copy_(value)
                assert set(publisher.publish(version).wait(60).engines.values()) == {""}
                wait_for_key(raw, f"updated{version}")
        return
    raw = connect(store, ("engine", rank - 1), rank, 2)
    loaded = {}

    def load_weights(pairs):
        assert threading.current_thread() is threading.main_thread()  # which calls update
        for name, tensor in pairs:
            loaded[name] = tensor.chunk(2)[rank - 1].clone()
            if rank == 2 and float(tensor.flatten()[0]) == float(tensors_of_version(2)["0.weight"][0, 0]):
                raise ValueError("out of memory")

    def holds(version):
        assert torch.equal(loaded["tied"], loaded["model.0.weight"])
        return all(
            torch.equal(loaded[f"model.{name}"], value.chunk(2)[rank - 1])
            for name, value in tensors_of_version(version).items()
        )

    with Subscriber(None, raw, load_weights=load_weights) as subscriber:
        raw.set(f"ready{rank}", "")
        assert subscriber.update(60) == 1 and holds(1)
        raw.set("updated1", "")
        with pytest.raises(ReshardError, match="rank 1: ValueError: out of memory"):
            subscriber.update(60)
        assert subscriber.version == 1 and holds(1)
        raw.set("updated2", "")
        assert subscriber.update(60) == 3 and holds(3)
        raw.set("updated3", "")
    with pytest.raises(ArgumentError, match="takes a model, or load_weights"):
        Subscriber(None, raw)
    return


def test_failed_loader_gets_the_version_before_on_all_ranks():
    with PausableStore(3) as store:
        run_processes(_loader, 3, store, init_group=False)


def _fused_shards(rank, _, store):
    """Ranks 1 and 2 are an engine that keeps its heads of q, k and v in one plain tensor."""
    torch.manual_seed(9)
    state = {f"{part}_proj.weight": torch.randn(rows, 6) for part, rows in zip("qkv", (8, 4, 4), strict=True)}
    state = {f"attn.{name}": value for name, value in state.items()}
    if rank == 0:
        raw = connect(store, (), rank, 1)
        with Publisher(state, raw) as publisher:
            publisher.publish(1)
            wait_for_key(raw, "updated1"), wait_for_key(raw, "updated2")
        return
    raw, at = connect(store, ("engine", rank - 1), rank, 2), rank - 1
    name, model = "attn.qkv_proj.weight", {"attn.qkv_proj.weight": torch.zeros(8, 6)}
    rows = [(4 * at, 4 * at + 4), (8 + 2 * at, 10 + 2 * at), (12 + 2 * at, 14 + 2 * at)]
    regions = [(row, (0, 6)) for row in rows]
    with pytest.raises(ArgumentError, match=r"has regions of shape \[6, 6\], but the tensor has shape \[8, 6\]"):
        Subscriber(model, raw, shards={name: ((16, 6), regions[:2])})
    past = [*regions[:2], ((14 + 2 * at, 16 + 2 * at), (0, 6))]  # of rank 1 of the engine
    with pytest.raises(
        LayoutError, match=r"rank 1: shards\['attn.qkv_proj.weight'\]: region \[16:18, 0:6\] reaches past"
    ):
        Subscriber(model, raw, shards={name: ((16, 6), past)})
    with pytest.raises(ArgumentError, match="shards names 'qkv', which the model does not have"):
        Subscriber(model, raw, shards={"qkv": ((16, 6), regions)})
    for bad in (((16, 6), [((0, "x"), (0, 6))]), ((16, 6), 3), 7, ((16, 6), [])):
        with pytest.raises(ArgumentError, match="shards"):
            Subscriber(model, raw, shards={name: bad})
    with Subscriber(model, raw, shards={name: ((16, 6), regions)}) as subscriber:
        assert subscriber.update(60) == 1
        assert torch.equal(model[name], torch.cat([value.chunk(2)[at] for value in state.values()]))
        raw.set(f"updated{rank}", "")


def test_fused_shards_of_plain_tensors_are_stated():
    with PausableStore(3) as store:
        run_processes(_fused_shards, 3, store, init_group=False)


def _unequal_options(rank, _, store):
    """The trainer states the network, and the engine gives less memory than the trainer."""
    raw = connect(store, (), rank, 1)
    model = make_model(1 + rank)
    if rank == 0:
        for name, value in (("memory_bytes", 3 * 2**16 - 1), ("topology", "dgx_h100"), ("timeout_seconds", 0)):
            with pytest.raises(ArgumentError, match=name):
                Publisher(model, raw, **{name: value})
        hosts = Topology.uniform([0, 1], 1e5)
        with Publisher(model, raw, topology=hosts) as publisher:
            wait_for_key(raw, "ready")
            report = publisher.publish(1).wait(60)
            assert set(report.engines.values()) == {""}, report
            raw.set("end", "")
            return report.bound_seconds
    with Subscriber(model, raw, memory_bytes=3 * 2**16) as subscriber:
        raw.set("ready", "")
        assert subscriber.update(60) == 1
        wait_for_key(raw, "end")
        nbytes = sum(value.numel() * value.itemsize for value in model.parameters())
        return nbytes / 1e5


def test_trainer_and_engine_may_give_different_memory_and_one_states_the_network():
    with PausableStore(2) as store:
        bound, seconds = run_processes(_unequal_options, 2, store, init_group=False)
    assert bound == pytest.approx(seconds, rel=0.01)


def _place_in_topology(rank, _, store):
    """An engine says that it is rank 2 of the topology, behind the slowest link; then that it is the trainer's rank."""
    raw = connect(store, (), rank, 1)
    model = make_model(1 + rank)
    if rank == 0:
        hosts = [Host((Link(rate, rate),)) for rate in (1e7, 1e7, 1e5)]
        topology = Topology((0, 1, 2), tuple(hosts))
        with Publisher(model, raw, topology=topology, join_seconds=3) as publisher:
            wait_for_key(raw, "ready")
            report = publisher.publish(1).wait(60)
            assert set(report.engines.values()) == {""}, report
            wait_for_key(raw, "again")
            with pytest.raises(ArgumentError, match="are both rank 0 of the topology; pass each engine its own first"):
                publisher.publish(2).wait(60)
            raw.set("end", "")
            return report.bound_seconds
    with Subscriber(model, raw, first_rank=2) as subscriber:
        raw.set("ready", "")
        assert subscriber.update(60) == 1
    with Subscriber(model, raw, first_rank=0):
        raw.set("again", "")
        wait_for_key(raw, "end")
    nbytes = sum(value.numel() * value.itemsize for value in model.parameters())
    return nbytes / 1e5


def test_an_engine_states_its_place_in_the_topology():
    with PausableStore(2) as store:
        bound, seconds = run_processes(_place_in_topology, 2, store, init_group=False)
    assert bound == pytest.approx(seconds, rel=0.01)


def _store_dies(rank, _, store):
    raw = connect(store, (), rank, 1)
    model = make_model(1 + rank)
    side = Publisher(model, raw) if rank == 0 else Subscriber(model, raw)
    if rank == 0:
        side.publish(1).wait(60)
        wait_for_key(raw, "updated")
        os.kill(store.pid, signal.SIGKILL)
        time.sleep(1.0)
        with pytest.raises(RemoteError, match="the store that trainer and engines share is lost"):
            side.publish(2).wait(30)
    else:
        assert side.update(60) == 1
        raw.set("updated", "")
        with pytest.raises(RemoteError, match="the store"):
            side.update(30)
        assert side.version == 1 and is_version(model, 0)
    begun = time.monotonic()
    side.close()
    assert time.monotonic() - begun < 10


def test_lost_store_is_named_and_the_engine_keeps_its_version():
    with PausableStore(2) as store:
        run_processes(_store_dies, 2, store, init_group=False)


FAULTS = {
    "a skipped tensor": lambda arrays: arrays["down.weight"].zero_(),
    "q and k exchanged": lambda arrays: _exchange(arrays["q.weight"], arrays["k.weight"]),
    "two experts exchanged": lambda arrays: _exchange(arrays["experts"][0], arrays["experts"][1]),
    "a square matrix transposed": lambda arrays: arrays["q.weight"].copy_(arrays["q.weight"].t().clone()),
    "a stale tied head": lambda arrays: arrays["embed.weight"][3].zero_(),
    "one bit": lambda arrays: arrays["k.weight"].view(torch.int32)[0, 0].bitwise_xor_(1),
}


def _exchange(first, second):
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def _tied_state(seed):
    torch.manual_seed(seed)
    shapes = {
        "embed.weight": (9, 6),
        "q.weight": (6, 6),
        "k.weight": (6, 6),
        "experts": (2, 4, 6),
        "down.weight": (6, 4),
    }
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    return state | {"head.weight": state["embed.weight"]}


def _faults(rank, _, store):
    """Something goes wrong between the trainer's tensors and the engine's, once for each version."""
    raw = connect(store, (), rank, 1)
    state = _tied_state(rank)
    if rank == 0:
        with Publisher(state, raw) as publisher:
            wait_for_key(raw, "ready")
            versions = range(1, len(FAULTS) + 1)
            results = [list(publisher.publish(version).wait(60).engines.values()) for version in versions]
            raw.set("done", "")
            return results
    digest = verify.Checker.digest_target

    def corrupt(self, arrays, of_rank):
        if arrays is subscriber._receiver._shadow:
            [*FAULTS.values()][subscriber._receiver._arrived - 1](arrays)
        return digest(self, arrays, of_rank)

    verify.Checker.digest_target = corrupt
    with Subscriber(state, raw) as subscriber:
        raw.set("ready", "")
        wait_for_key(raw, "done")
        with pytest.raises(TransferTimeoutError):
            subscriber.update(0.1)
        assert all(torch.equal(value, _tied_state(1)[name]) for name, value in state.items())
    return None


def test_planted_faults_are_caught_with_tensor_and_rank():
    with PausableStore(2) as store:
        results = run_processes(_faults, 2, store, init_group=False)[0]
    names = "down.weight", "q.weight", "experts", "q.weight", "embed.weight", "k.weight"
    for name, (result,) in zip(names, results, strict=True):
        assert f"{name!r} " in result and "on rank 0" in result, results


def _slow_rank(rank, _, store):
    """Rank 1 of the trainer comes back from publish after the version has reached the engine, rank 2."""
    raw = connect(store, ("trainer", rank) if rank < 2 else (), rank, 2 if rank < 2 else 1)
    if rank == 2:
        with Subscriber(make_model(1), raw) as subscriber:
            raw.set("ready", "")
            assert subscriber.update(60) == 1
            wait_for_key(raw, "done1")
        return

    class LateHandle(publisher_module.PublishHandle):
        def __init__(self, version):
            if rank == 1:
                wait_for_key(raw, "done0")
                time.sleep(0.5)
            super().__init__(version)

    publisher_module.PublishHandle = LateHandle
    with Publisher(make_trainer_model(2), raw) as publisher:
        wait_for_key(raw, "ready")
        assert set(publisher.publish(1).wait(20).engines.values()) == {""}
        raw.set(f"done{rank}", "")
        wait_for_key(raw, "done1")


def test_a_version_that_is_done_early_is_done_on_each_rank():
    with PausableStore(3) as store:
        run_processes(_slow_rank, 3, store, init_group=False)


def _busy_engine(_, __):
    """A trainer and an engine whose thread comes late, in one process."""
    store, act = dist.HashStore(), Receiver.handle_message

    def act_late(receiver, message):
        time.sleep(0.5)
        act(receiver, message)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Receiver, "handle_message", act_late)
        with Subscriber(make_model(2), store), Publisher(make_model(1), store) as publisher:
            assert set(publisher.publish(1).wait(60).engines.values()) == {""}


def test_a_version_is_for_each_engine_that_was_constructed():
    run_processes(_busy_engine, 1, init_group=False)
