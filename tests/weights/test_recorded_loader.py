"""Loaders of engines, recorded: every parameter as the loader itself fills it, and each rank takes no more than it loads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from reshard.errors import ArgumentError, TransferTimeoutError
from reshard.testing.processes import run_processes
from reshard.weights import Publisher, Subscriber, record
from reshard.weights.mapping.strided import view_of_tensor
from reshard.weights.model.holdings import read_state
from reshard.weights.model.manifest import merge_states, state_of_rank
from reshard.weights.model.pieces import Side, match
from reshard.weights.recorded_loader import Recording, cover
from tests.support.loading_engine import EXPERTS, Engine, checkpoint
from tests.support.pausable_store import PausableStore
from tests.support.sharded_state import ShardedState, chunks, execute, whole
from tests.support.versioned_models import connect, wait_for_key


def _replay(source, recordings):
    """Move a state to what recordings take, by torch alone, and replay them."""
    manifest = merge_states({rank: each.state() for rank, each in enumerate(recordings)}, "it")
    target = ShardedState({}, 0, whole)
    target.manifest = recordings[0].without_unused(manifest)
    target.arrays = [
        {
            name: torch.full(each.shape(name), -1.0).to(getattr(torch, source.manifest.entries[name].dtype))
            for name in each.held
        }
        for each in recordings
    ]
    execute(match(source.manifest, target.manifest, "it"), source, target)
    for each, arrays in zip(recordings, target.arrays, strict=True):
        for region, arrived in each.replay(arrays):
            assert torch.equal(region, arrived.to(region.dtype))
    return [sum(array.numel() for array in arrays.values()) for arrays in target.arrays]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("is_expert_parallel", [False, True])
def test_each_rank_gets_what_its_loader_takes(size, is_expert_parallel):
    torch.manual_seed(1)
    state = checkpoint()
    expected = [Engine(rank, size, is_expert_parallel) for rank in range(size)]
    for engine in expected:
        engine.load_weights(state.items())
    engines = [Engine(rank, size, is_expert_parallel, dtype=torch.float64) for rank in range(size)]
    source = ShardedState(state, 3, chunks(0, 3))
    recordings = [Recording(record(engine.load_weights), engine, source.manifest) for engine in engines]
    assert all(bool((param == 7).all()) for engine in engines for param in engine.parameters())
    received = _replay(source, recordings)
    for engine, other in zip(engines, expected, strict=True):
        for (name, param), right in zip(engine.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(param, right.double()), name
    for rank, engine in enumerate(expected):
        padding = sum(int((param == 0).sum()) for param in engine.parameters())
        assert received[rank] == sum(param.numel() for param in engine.parameters()) - padding


def _manifest(state):
    return merge_states({0: state_of_rank(read_state(state))}, "it")


def _record(load, kept=(), model=None):
    """Record a loader of a model with parameters ``a`` of 6 x 4 and ``b`` of 4, from tensors ``x`` and ``y`` alike."""
    model = model or {"a": torch.full((6, 4), 7.0), "b": torch.full((4,), 7.0)}
    state = {"x": torch.arange(24.0).reshape(6, 4), "y": torch.arange(4.0)}

    def load_weights(weights):
        given = dict(weights)
        load(model, given["x"], given["y"])

    before = {name: value.clone() for name, value in model.items()}
    try:
        recording = Recording(record(load_weights, kept=kept), model, _manifest(state))
    finally:
        assert all(
            torch.equal(model[name], value) and model[name].shape == value.shape for name, value in before.items()
        )
    _replay(ShardedState(state, 1, whole), [recording])
    expected = {name: value.clone() for name, value in before.items()}
    load(expected, state["x"], state["y"])
    assert all(torch.equal(model[name], value) for name, value in expected.items())
    return recording


def _rows(m, x, y):
    m["a"].copy_(x)
    m["b"].copy_(y)


@pytest.mark.parametrize(
    "load",
    [
        _rows,
        lambda m, x, y: (m["a"].copy_(x), m["b"].copy_(x[2])),
        lambda m, x, y: (m["a"][::2].copy_(x[3:]), m["a"][1::2].copy_(x[:3]), m["b"].copy_(y)),
        lambda m, x, y: (m["a"].copy_(torch.cat([x[3:], x[:3]])), m["b"].copy_(y)),
        lambda m, x, y: (m["a"].t().copy_(x.t().contiguous()), m["b"].copy_(y.to(torch.float64))),
        lambda m, x, y: (m["a"].copy_(x.view(2, 3, 4).transpose(0, 1).reshape(6, 4)), m["b"].copy_(y)),
        lambda m, x, y: (m["a"].copy_(torch.stack([x[:, 0], x[:, 2], x[:, 1], x[:, 3]], dim=-1)), m["b"].copy_(y)),
        lambda m, x, y: (m["a"].copy_(x), m["b"].zero_(), m["b"][:2].copy_(y[2:])),
        lambda m, x, y: (m["a"].view(-1).copy_(x.flatten()), m["b"].__setitem__(slice(None), y.clone())),
        lambda m, x, y: (m["a"].zero_(), m["a"][:, :3].copy_(x[:, 1:]), m["b"].copy_(y)),
    ],
)
def test_views_joins_and_copies_are_recorded(load):
    _record(load)


def _scaled(x):
    torch._foreach_mul_([x], 2.0)
    return x


def _replace(m, x, y):
    _rows(m, x, y)
    m["a"].data = torch.zeros(6, 4)


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (lambda m, x, y: m["a"].copy_(x * 2), "computes aten.mul.Tensor with 'x'"),
        (lambda m, x, y: m["a"].copy_(x.flip(0)), "computes aten.flip.default with 'x'"),
        (lambda m, x, y: m["a"].add_(x), "computes aten.add_.Tensor with 'x'"),
        (lambda m, x, y: m["b"].copy_(y / y[0].item()), "computes aten._local_scalar_dense.default with 'y'"),
        (lambda m, x, y: x.zero_(), "computes aten.zero_.default with 'x'"),
        (lambda m, x, y: torch.zeros(6, 4).copy_(x), "computes aten.copy_.default with 'x'"),
        (lambda m, x, y: m["a"].copy_(y.expand(6, 4)), "with stride 0"),
        (lambda m, x, y: m["a"].view(torch.int32).copy_(x.view(torch.int32)), "computes aten.view.dtype with 'x'"),
        (
            lambda m, x, y: m["a"].view(4, 6).copy_(x.view(4, 6)),
            "a view with stride 6 of a tensor of shape .6, 4. cannot be traced",
        ),
        (lambda m, x, y: m["a"].copy_(_scaled(x)), "computes aten._foreach_mul_.Scalar with 'x'"),
        (lambda m, x, y: torch.add(torch.ones(4), 1, out=m["b"]), "changes 'b' by aten.add.out without a tensor"),
        (lambda m, x, y: torch._foreach_zero_([m["b"]]), "changes 'b' by aten._foreach_zero_.default without a tensor"),
        (lambda m, x, y: m["a"].mul_(2), "changes 'a' by aten.mul_.Tensor without a tensor of the checkpoint"),
        (lambda m, x, y: m["a"].copy_(x.half()), "casts 'x' to torch.float16 and then to torch.float32"),
        (lambda m, x, y: (_rows(m, x, y), m["a"][0].copy_(y)), "writes elements of 'a' twice"),
        (lambda m, x, y: (_rows(m, x, y), m["a"].zero_()), "writes elements of 'a' twice"),
        (lambda m, x, y: m["a"][:4].copy_(x[:4]), "leaves out 8 of 24 elements of 'a', 4 of 4 elements of 'b'"),
        (lambda m, x, y: m["c"].copy_(x), "fails at 'y' without storage.*KeyError: 'c'"),
        (_replace, "gives 'a' other memory"),
    ],
)
def test_what_cannot_be_recorded_is_named_and_changes_nothing(load, text):
    with pytest.raises(ArgumentError, match=text):
        _record(load)


def test_parameters_that_the_loader_leaves_are_named_by_the_user():
    recording = _record(lambda m, x, y: m["a"].copy_(x), kept=("b",))
    assert recording.held == {"x": (((0, 6), (0, 4)),)}


def test_transposed_and_tied_parameters_and_tied_tensors_are_recorded():
    weight = torch.zeros(4, 6)
    _record(_rows, model={"a": weight.t(), "b": torch.zeros(4)})
    model = {"a": weight.t(), "b": torch.zeros(4), "tied": weight.t()}
    load = lambda weights: _rows(model, *dict(weights).values())  # noqa: E731
    Recording(record(load), model, _manifest({"x": torch.ones(6, 4), "y": torch.ones(4)}))
    state = {"x": torch.ones(6, 4)}
    state["same"] = state["x"]
    model = {"a": torch.zeros(6, 4), "b": torch.zeros(6, 4)}

    def load_weights(weights):
        for name, value in weights:
            model["a" if name == "x" else "b"].copy_(value)

    recording = Recording(record(load_weights), model, _manifest(state))
    assert list(recording.held) == ["x"]


def test_regions_are_covered_by_few_boxes():
    def rows(*pairs):
        return [tuple(range(lo, hi) for lo, hi in pair) for pair in pairs]

    assert cover(rows(((0, 2), (0, 4)), ((2, 3), (0, 4)), ((5, 6), (0, 4)))) == (((0, 3), (0, 4)), ((5, 6), (0, 4)))
    experts = [((e, e + 1), (at, at + 2), (0, 3)) for e in range(3) for at in (0, 4)]
    assert cover(rows(*experts)) == (((0, 3), (0, 2), (0, 3)), ((0, 3), (4, 6), (0, 3)))
    assert cover(rows(((0, 1), (0, 1)), ((1, 2), (1, 2)))) == (((0, 2), (0, 2)),)
    assert cover([(range(0, 8, 2),), (range(1, 8, 2),)]) == (((0, 8),),)
    assert cover([()]) == ((),)


OPERATIONS = st.tuples(
    st.sampled_from(["narrow", "step", "swap", "select", "split", "flatten"]), *[st.integers(0, 11)] * 3
)


@given(st.lists(st.integers(1, 6), max_size=4), st.lists(OPERATIONS, max_size=5))
def test_views_are_found_from_their_strides(shape, operations):
    base = torch.arange(math.prod(shape)).reshape(shape)
    view = base
    for kind, first, second, third in operations:
        if not view.ndim:
            break
        dim, other, size = first % view.ndim, second % view.ndim, view.shape[first % view.ndim]
        if kind == "narrow":
            view = view.narrow(dim, second % size, third % (size - second % size + 1))
            if not view.numel():
                break
        elif kind == "step":
            view = view.unfold(dim, 1, 1 + second % 3).squeeze(-1)
        elif kind == "swap":
            view = view.transpose(dim, other)
        elif kind == "select":
            view = view.select(dim, second % size)
        elif kind == "split" and size % (1 + second % 3) == 0:
            view = view.unflatten(dim, (1 + second % 3, -1))
        elif kind == "flatten":
            flat = view.flatten(min(dim, other), max(dim, other))
            view = flat if flat.data_ptr() == base.data_ptr() + view.storage_offset() * 8 else view
    try:
        made = view_of_tensor("x", base.shape, view.shape, view.stride(), view.storage_offset())
    except ArgumentError as error:
        assert "joins dims in part" in str(error) or "no slices of its dims" in str(error)
        return
    found = torch.full(view.shape, -1)
    for part in made.parts:
        along = [dim for dim, at in enumerate(part.dims) if at >= 0]
        held = tuple(tuple((0, size) for size in each.shape) for each in (base, found))
        place = Side("x", part.place, tuple(part.dims[dim] for dim in along)).view(found, held[1:])
        place.copy_(Side("x", part.region, tuple(along)).view(base, held[:1]))
    assert torch.equal(found, view)


def _published(rank, _, store):
    """Ranks 1 and 2 are an engine whose loader is recorded; rank 2 has fewer experts to take than the trainer sends."""
    torch.manual_seed(rank)
    if rank == 0:
        raw = connect(store, (), rank, 1)
        with Publisher(checkpoint(), raw) as publisher:
            for version in (1, 2):
                torch.manual_seed(100 + version)
                for name, value in checkpoint().items():
                    publisher._snapshot._reader._model[name].copy_(value)
                assert set(publisher.publish(version).wait(60).engines.values()) == ({""} if version == 2 else set())
                if version == 1:
                    raw.set("published", "")
                    wait_for_key(raw, "updated1"), wait_for_key(raw, "updated2")
            wait_for_key(raw, "ended1"), wait_for_key(raw, "ended2")
        return
    raw, at = connect(store, ("engine", rank - 1), rank, 2), rank - 1
    engine, calls = Engine(at, 2, is_expert_parallel=True, dtype=torch.bfloat16), []

    def load_weights(weights):
        calls.append(1)
        engine.load_weights(weights)

    with Subscriber(engine, raw, rules=record(load_weights)) as subscriber:
        for version in (1, 2):
            assert subscriber.update(60) == version
            expected = Engine(at, 2, is_expert_parallel=True, dtype=torch.bfloat16)
            torch.manual_seed(100 + version)
            expected.load_weights(checkpoint().items())
            for (name, param), right in zip(engine.named_parameters(), expected.parameters(), strict=True):
                assert torch.equal(param, right), name
            raw.set(f"{'updated' if version == 1 else 'ended'}{rank}", "")
        shadow = subscriber._receiver._shadow
    assert len(calls) == 1 and len([name for name in shadow if ".experts." in name]) == 3 * EXPERTS // 2


@pytest.mark.integration
def test_versions_go_the_ways_of_a_recorded_loader():
    with PausableStore(3) as store:
        run_processes(_published, 3, store, init_group=False)


def test_a_recorded_loader_needs_a_trainer_and_a_model():
    with PausableStore(1) as store:
        raw = connect(store, (), 0, 1)
        with pytest.raises(TransferTimeoutError, match=r"no trainer publishes this name within 0\.2 s"):
            Subscriber({"a": torch.zeros(2)}, raw, rules=record(list), join_seconds=0.2)
        for options in ({"model": None, "load_weights": list}, {"mode": "in_place"}, {"shards": {}}):
            with pytest.raises(ArgumentError, match="needs a model"):
                Subscriber(**{"model": {"a": torch.zeros(2)}, "store": raw, "rules": record(list), **options})
    with pytest.raises(ArgumentError, match="load_weights"):
        record(3)
