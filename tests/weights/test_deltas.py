"""Versions as differences: exact, only for engines that hold the base, and whole for all others."""

from __future__ import annotations

import random
import types

import pytest
import torch

from reshard.errors import ArgumentError
from reshard.testing.processes import run_processes
from reshard.weights import Publisher, Subscriber
from reshard.weights.model import verify
from reshard.weights.routes import encoded_transfers
from reshard.weights.routes.format_choice import FormatChoice
from reshard.weights.routes.learned_times import LearnedTimes
from reshard.weights.routes.route import Route
from tests.support.pausable_store import PausableStore
from tests.support.tensors import same_bytes
from tests.support.versioned_models import connect, wait_for_key

pytestmark = pytest.mark.integration

SHAPES = {"embed.weight": (257, 640), "down.weight": (640, 1030), "norm.weight": (7,), "steps": (3, 5), "scale": ()}
#: Bytes per second of a link on which differences pay.
SLOW = 1e5


def _version(number):
    """The weights of a version: each changes some words of the one before."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    found["steps"] = torch.full(SHAPES["steps"], number, dtype=torch.int64)
    found["down.weight"][0, :2] = torch.tensor([float("nan"), -0.0])
    for step in range(1, number + 1):
        for value in found.values():
            if value.is_floating_point():
                value.view(-1)[step::20] *= 1.02
    return found


def _trainer(model, raw, **options):
    return Publisher(model, raw, dtype=torch.bfloat16, compression="delta", **options)


def _cut(rank, size, dim):
    """The region of each tensor that a rank holds: one of equal parts along a dim."""
    found = {}
    for name, shape in SHAPES.items():
        if not shape:
            found[name] = []
            continue
        along = dim if len(shape) > dim else 0
        ends = [shape[along] * part // size for part in (rank, rank + 1)]
        found[name] = [tuple(ends) if each == along else (0, length) for each, length in enumerate(shape)]
    return found


def _parts(number, cut):
    return {
        name: value[tuple(slice(lo, hi) for lo, hi in cut[name])].clone() for name, value in _version(number).items()
    }


def _write(model, number, cut):
    for name, value in _parts(number, cut).items():
        model[name].copy_(value)


def _holds(model, number, cut):
    for name, value in _parts(number, cut).items():
        sent = value.to(torch.bfloat16) if value.is_floating_point() else value
        if not same_bytes(model[name].to(sent.dtype), sent):
            return False
    return True


def _note_arrivals(monkeypatch):
    """The base of each version that arrives in this process, or "whole"."""
    found = []
    find_buffers = Route.find_buffers

    def note_arrival(self, arrays, base=None):
        found.append("whole" if base is None else "differences")
        return find_buffers(self, arrays, base)

    monkeypatch.setattr(Route, "find_buffers", note_arrival)
    return found


def _all_kinds(rank, _, store):
    """Ranks 0 and 1 train; 2 and 3 are an engine with other shards in bfloat16; 4 an engine in float32, which fails to
    get version 3; 5 an engine that comes after version 2. Then the trainer starts anew."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(FormatChoice, "link_rate", SLOW)
        arrivals = _note_arrivals(monkeypatch)
        if rank < 2:
            raw = connect(store, ("trainer", rank), rank, 2)
            cut, reports = _cut(rank, 2, 0), []
            model, shards = _parts(0, cut), {name: (SHAPES[name], [cut[name]]) for name in SHAPES}
            for versions in (range(1, 5), range(5, 7)):
                with _trainer(model, raw, shards=shards) as publisher:
                    for key in ("ready2", "ready3", "ready4"):
                        wait_for_key(raw, key)
                    for version in versions:
                        _write(model, version, cut)
                        handle = publisher.publish(version)
                        _write(model, 50, cut)  # the optimizer goes on
                        reports.append(handle.wait(100))
                        raw.set(f"published{version}", "")
                        for engine in (2, 3, 5) if version > 1 else (2, 3):
                            wait_for_key(raw, f"updated{version} {engine}")
            return [(sorted(map(bool, each.engines.values())), each.base, each.encoded_bytes) for each in reports]
        raw = connect(store, ("engine", rank - 2) if rank < 4 else (), rank, 2 if rank < 4 else 1)
        cut = _cut(rank - 2, 2, 1) if rank < 4 else _cut(0, 1, 0)
        model, shards = _parts(0, cut), {name: (SHAPES[name], [cut[name]]) for name in SHAPES}
        if rank < 4:
            model = {name: value if name == "steps" else value.to(torch.bfloat16) for name, value in model.items()}
        if rank == 5:
            wait_for_key(raw, "published2")
        digest = verify.Checker.digest_target

        def corrupt(self, arrays, of_rank):
            if subscriber._receiver._arrived == 3 and arrays is subscriber._receiver._shadow:
                arrays["down.weight"].view(torch.int16)[4, 4] ^= 1
            return digest(self, arrays, of_rank)

        if rank == 4:
            monkeypatch.setattr(verify.Checker, "digest_target", corrupt)
        with Subscriber(model, raw, shards=shards) as subscriber:
            raw.set(f"ready{rank}", "")
            found = []
            while not found or found[-1] < 6:
                found.append(subscriber.update(100))
                assert _holds(model, found[-1], cut), found
                raw.set(f"updated{found[-1]} {rank}", "")
        assert 3 not in found or rank != 4
        return arrivals


def test_engines_that_hold_the_base_get_differences_and_others_whole_versions():
    with PausableStore(6) as store:
        results = run_processes(_all_kinds, 6, store, init_group=False, timeout_seconds=180)
    reports, plain = results[0], 2 * (257 * 640 + 640 * 1030 + 7) + 8 * 15
    assert results[0] == results[1]
    assert [each[0] for each in reports] == [[False, False]] * 2 + [[False, False, True]] + [[False] * 3] * 3
    # the last attempt of version 3 sends it whole, as does the second one of version 4, to the engine that failed
    assert [each[1] for each in reports] == [None, 1, None, None, None, 5]
    assert all((each[2] < plain / 4) == (each[1] is not None) for each in reports)
    assert [each[2] >= plain for each in reports] == [False, False, True, False, False, False]  # raw after a failure
    assert results[2] == results[3] == ["whole", *["differences"] * 3, "whole", "differences"]
    assert results[4] == ["whole", "differences", "differences", "whole", "whole", "whole", "whole", "differences"]
    assert results[5] == ["whole", "differences", "differences", "whole", "differences"]


def _other_modes(rank, _, store):
    """Rank 0 trains with little memory; rank 1 has no shadow; rank 2 has a loader of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(FormatChoice, "link_rate", SLOW)
        arrivals = _note_arrivals(monkeypatch)
        raw = connect(store, (), rank, 1)
        cut = _cut(0, 1, 0)
        model = _parts(0, cut)
        if rank == 0:
            with pytest.raises(ArgumentError, match="compression is 'zip'; it must be None, 'delta' or 'lossless'"):
                Publisher(model, raw, compression="zip")
            with _trainer(model, raw, memory_bytes=3 << 19) as publisher:
                wait_for_key(raw, "ready1"), wait_for_key(raw, "ready2")
                for version in (1, 2, 3):
                    _write(model, version, cut)
                    report = publisher.publish(version).wait(100)
                    assert set(report.engines.values()) == {""}, report
                    assert report.base == (version - 1 or None) and (version == 1 or report.encoded_bytes < 5e5)
                    wait_for_key(raw, f"updated{version} 1"), wait_for_key(raw, f"updated{version} 2")
                rounds = publisher._sender._encoded.num_rounds
            with Publisher(model, raw, dtype=torch.bfloat16, compression="lossless", memory_bytes=3 << 19) as publisher:
                _write(model, 4, cut)
                report = publisher.publish(4).wait(100)
                assert set(report.engines.values()) == {""} and report.base is None
                wait_for_key(raw, "updated4 1"), wait_for_key(raw, "updated4 2")
            return rounds, report.formats
        model = {name: value if name == "steps" else value.to(torch.bfloat16) for name, value in model.items()}

        def load(pairs):
            for name, value in pairs:
                model[name].copy_(value)

        options = {"load_weights": load} if rank == 2 else {"mode": "in_place"}
        with Subscriber(None if rank == 2 else model, raw, memory_bytes=3 << 19, **options) as subscriber:
            raw.set(f"ready{rank}", "")
            for version in (1, 2, 3, 4):
                assert subscriber.update(100) == version and _holds(model, version, cut)
                raw.set(f"updated{version} {rank}", "")
        return arrivals


def test_differences_arrive_in_place_and_through_loaders_within_little_memory():
    with PausableStore(3) as store:
        (rounds, formats), *arrivals = run_processes(_other_modes, 3, store, init_group=False)
    assert rounds > 1 and formats["bf16-lossless"] > 1e6
    assert arrivals == [["whole", "differences", "differences", "whole"]] * 2


def _fast_link(rank, _, store):
    """A link so fast that nothing pays, after one version whose formats were compared."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(FormatChoice, "link_rate", 1e15)
        made = []
        monkeypatch.setattr(encoded_transfers.SendingHandle, "__init__", lambda *_: made.append(1) or 1 / 0)
        raw, cut = connect(store, (), rank, 1), _cut(0, 1, 0)
        model = _parts(0, cut)
        if rank == 0:
            with _trainer(model, raw) as publisher:
                publisher._sender._choice.agree(
                    {0: {"known": dict.fromkeys(RATES, ""), "rates": RATES, "setups": SETUPS}}
                )
                wait_for_key(raw, "ready")
                for version in (1, 2):
                    _write(model, version, cut)
                    report = publisher.publish(version).wait(100)
                    assert report.formats.keys() == {"raw"} and set(report.engines.values()) == {""}, report
            return
        with Subscriber(model, raw) as subscriber:
            raw.set("ready", "")
            while subscriber.update(100) < 2:
                pass
            assert _holds(model, 2, cut)


RATES = {name: [[1e10] * 4] * 2 for name in ("raw", "delta")}
SETUPS = dict.fromkeys(RATES, (1e-5, 1e-5))


def test_nothing_is_compared_where_no_format_can_pay():
    with PausableStore(2) as store:
        run_processes(_fast_link, 2, store, init_group=False)


def _little_memory(rank, _, store):
    """Rank 0 trains; rank 1 gives so little memory that a version would take more rounds than are allowed."""
    encoded_transfers.MAX_ROUNDS = 8
    raw, cut = connect(store, (), rank, 1), _cut(0, 1, 0)
    model = _parts(0, cut)
    if rank == 0:
        with _trainer(model, raw) as publisher:
            wait_for_key(raw, "ready")
            with pytest.raises(ArgumentError, match="26 rounds, because memory_bytes is 196,608 on a rank; it must be"):
                publisher.publish(1).wait(60)
        with Publisher(model, raw, dtype=torch.bfloat16) as publisher:
            report = publisher.publish(2).wait(60)
            assert set(report.engines.values()) == {""}, report
        return
    with Subscriber(model, raw, memory_bytes=3 << 16) as subscriber:
        raw.set("ready", "")
        assert subscriber.update(100) == 2 and _holds(model, 0, cut)


def test_a_model_of_too_many_rounds_is_an_error_of_the_handle():
    with PausableStore(2) as store:
        run_processes(_little_memory, 2, store, init_group=False)


def _odd_clocks(rank, _, store):
    """Ranks 0 and 1 hold replicas, and 2 is an engine. Each measures other times of coding."""
    chance, now = random.Random(rank), [0.0]

    def read_clock():
        now[0] += 10.0 ** chance.uniform(-6.0, 0.0)
        return now[0]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(FormatChoice, "link_rate", 1e8)
        monkeypatch.setattr(LearnedTimes, "add_version", lambda *args: None)
        monkeypatch.setattr(encoded_transfers, "time", types.SimpleNamespace(perf_counter=read_clock))
        raw = connect(store, ("trainer", rank) if rank < 2 else (), rank, 2 if rank < 2 else 1)
        cut = _cut(0, 1, 0)
        model = {name: value.bfloat16() if name != "steps" else value for name, value in _parts(0, cut).items()}
        with (_trainer if rank < 2 else Subscriber)(model, raw) as side:
            if rank == 2:
                raw.set("joined", "")
            wait_for_key(raw, "joined")
            found = []
            nbytes = sum(value.nbytes for value in model.values())  # both ranks hold all of it
            for version in range(1, 10):
                if version == 9:  # is not encoded
                    monkeypatch.setattr(FormatChoice, "may_pay", lambda choice: False)
                if rank < 2:
                    _write(model, version, cut)
                    report = side.publish(version).wait(100)
                    assert sum(report.formats.values()) == nbytes, report
                    found.append((report.base, sorted(report.formats.items())))
                    wait_for_key(raw, f"updated{version}")
                else:
                    found.append(side.update(100) == version and _holds(model, version, cut))
                    raw.set(f"updated{version}", "")
            return found, (side._sender._learned.factors if rank == 0 else {})


def test_ranks_choose_alike_although_each_measures_other_times():
    with PausableStore(3) as store:
        (first, factors), (second, _), (engine, _) = run_processes(_odd_clocks, 3, store, init_group=False)
    assert first == second and all(engine)
    assert [base for base, _ in first[1:]] == [*range(1, 8), None]  # otherwise the first attempt would have failed
    assert max(map(max, factors.values())) == 4.0  # at other times, another format is fastest
    assert len({str(formats) for _, formats in first}) > 2
