"""Weights as differences over processes: bits, sizes, versions, and failures that leave or name a version."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from reshard import Layout, Mesh, Topology
from reshard.codecs.formats import known_formats
from reshard.compression import WeightSync
from reshard.errors import ArgumentError, DisagreementError, ReshardError, VerificationError
from reshard.runtime.transport.connections import GlooTransport
from reshard.testing.processes import run_processes
from tests.support.tensors import same_bytes
from tests.support.versions import DST, DTYPES, SHAPES, SRC, shards_of


def _sync(rank):
    sync = WeightSync(SRC, DST, SHAPES, DTYPES, topology=Topology((0, 0, 1, 1, 2)))
    out = None if rank < 3 else {name: torch.zeros_like(shard) for name, shard in shards_of(DST, rank, 0).items()}
    if out is not None:  # a shard with strides
        out["w"] = torch.zeros(out["w"].shape[::-1], dtype=out["w"].dtype).t()

    def send(version, **changes):
        return sync(changes.get("tensors", shards_of(SRC, rank, version)), out, version=version)

    def holds(version):
        wanted = shards_of(DST, rank, version) if out is not None else {}
        return sync.version == version and all(same_bytes(out[name], wanted[name]) for name in wanted)

    full = send(1)
    assert (full.base, full.because) == (None, "no rank holds a version") and holds(1)
    saved = out["scale"]._version if out is not None else -1
    second = send(2)
    assert out is None or out["scale"]._version > saved  # else autograd would not notice that weights change
    assert (second.version, second.base, second.because) == (2, 1, "") and holds(2)
    assert second.encoded_bytes < full.encoded_bytes / 5 and full.encoded_bytes < full.plain_bytes + 9 * 16

    with pytest.raises(DisagreementError, match="passes version 3, rank 2 version 4"):
        sync(shards_of(SRC, rank, 3), out, version=4 if rank == 2 else 3)
    with pytest.raises(ArgumentError, match=r"rank 1: .*all ranks keep version 2"):
        send(3, **({"tensors": {}} if rank == 1 else {}))
    for wrong in (None, 3.5, "3", True):
        with pytest.raises(ArgumentError, match=r"rank 1: .*version is .*must be an integer"):
            sync(shards_of(SRC, rank, 3), out, version=wrong if rank == 1 else 3)
    if rank == 1:
        tensors = shards_of(SRC, rank, 3) | {"other": torch.zeros(3)}
    with pytest.raises(ArgumentError, match=r"rank 1: .*the source has 'other', which the weights do not have"):
        send(3, **({"tensors": tensors} if rank == 1 else {}))
    spoiled = shards_of(SRC, rank, 3)
    if rank == 1:
        spoiled["scale"][0] += 1
    with pytest.raises(DisagreementError, match="ranks 0 and 1 hold the same regions, but other weights"):
        send(3, tensors=spoiled)
    assert holds(2)

    if rank == 4:
        out["w"][5, 5] += 1  # a receiver that lost its base
    with pytest.raises(VerificationError, match=r"rank 4: out does not hold version 2 .* in full; no out has changed"):
        send(3)
    assert sync.version is None
    wanted = shards_of(DST, rank, 2) if out is not None else {}
    assert rank == 4 or all(same_bytes(out[name], wanted[name]) for name in wanted)
    again = send(3)
    assert (again.base, again.because) == (None, "no rank holds a version") and holds(3)
    if rank == 4:
        sync.version = None  # as after a restart
    restarted = send(4)
    assert (restarted.base, restarted.because) == (None, "rank 4 holds no version") and holds(4)
    assert send(5).base == 4 and holds(5)

    transport = GlooTransport.send
    if rank == 0:

        def flip(self, data, *args):
            spoiled = data.clone()
            if data.numel() > 256:  # a bucket
                spoiled[data.numel() // 4] ^= 1
            return transport(self, spoiled, *args)

        GlooTransport.send = flip
    with pytest.raises(VerificationError, match=r"from ranks .* arrived with other bytes .* no out has changed"):
        send(6)
    GlooTransport.send = transport
    wanted = shards_of(DST, rank, 5) if out is not None else {}
    assert sync.version is None and all(same_bytes(out[name], wanted[name]) for name in wanted)
    assert send(6).base is None and holds(6)


def _make_one_wrongly(rank):
    """One rank passes another kind of topology. The other one hears of it in its first call, at once."""
    topology = 5 if rank else None
    shards = {"w": torch.ones(2, 4)}, {"w": torch.zeros(4, 2)}
    text = ""
    try:
        sync = WeightSync(
            Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2"), "R S0"), {"w": (4, 4)}, "float32", topology=topology
        )
        sync(*shards, version=1)
    except ArgumentError as error:
        text = str(error)
    sync = WeightSync(Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2"), "R S0"), {"w": (4, 4)}, "float32")
    sync(*shards, version=1)
    return text, bool((shards[1]["w"] == 1).all())


def test_a_weight_sync_that_one_rank_fails_to_make_fails_on_the_others():
    found = run_processes(_make_one_wrongly, 2)
    assert [text for text, _ in found] == [
        "rank 1: topology must be a Topology, not int",
        "topology must be a Topology, not int",
    ]
    assert all(is_right for _, is_right in found)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shape": 5}, "shape must be {name: global shape}"),
        ({"shape": {"w": 5}}, "shape 5 is not a sequence"),
        ({"src": {"v": SRC["w"]}}, "src has no entry for 'w'"),
        ({"dtype": "float31"}, "'float31' is not supported"),
    ],
)
def test_wrong_weights_are_named(change, text):
    with pytest.raises(ReshardError, match=text):
        WeightSync(**{"src": SRC["w"], "dst": DST["w"], "shape": {"w": (4, 4)}, "dtype": "float32"} | change)


def test_versions_arrive_bit_for_bit_and_failures_leave_or_name_a_version():
    run_processes(_sync, 5)


def _sync_with_an_empty_shard(rank):
    src, dst = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2", first_rank=2), "R S0")
    sync = WeightSync(src, dst, {"w": (1, 64)}, "bfloat16", timeout_seconds=20)
    shard = {"w": torch.ones(1 - rank, 64, dtype=torch.bfloat16)} if rank < 2 else None
    out = {"w": torch.zeros(1, 32, dtype=torch.bfloat16)} if rank >= 2 else None
    for version in (1, 2):
        if rank == 0:
            shard["w"] += 1
        sync(shard, out, version=version)
        assert out is None or (out["w"] == 1 + version).all()


def test_ranks_with_empty_shards_take_part():
    run_processes(_sync_with_an_empty_shard, 4)


def _sync_anew(rank, renewed):
    src, dst = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2", first_rank=2))
    reports, out = [], None if rank < 2 else {"w": torch.zeros(64, 64, dtype=torch.bfloat16)}
    for version in range(3):
        if version == 0 or (version == 1 and rank == renewed):
            sync = WeightSync(src, dst, {"w": (64, 64)}, "bfloat16", timeout_seconds=20)
        shard = {"w": torch.full((32, 64), version + 0.5, dtype=torch.bfloat16)} if rank < 2 else None
        reports.append(sync(shard, out, version=version).because)
        assert out is None or (out["w"] == version + 0.5).all()
    return reports


@pytest.mark.parametrize("renewed", [1, 2])
def test_one_rank_may_make_its_weight_sync_anew(renewed):
    because = ["no rank holds a version", f"rank {renewed} holds no version", ""]
    assert run_processes(_sync_anew, 4, renewed) == [because] * 4


def _sync_from_some_ranks_each(rank):
    """Each tensor has one source rank; the other passes None for it, or leaves it out."""
    alone = [Layout(Mesh.of("1", first_rank=number)) for number in range(2)]
    sync = WeightSync({"a": alone[0], "b": alone[1]}, Layout(Mesh.of("3")), {"a": (6,), "b": (6,)}, "float32")
    out = {"a": torch.zeros(6), "b": torch.zeros(6)}
    for version in (1, 2, 3):
        held = {name: torch.full((6,), version + item + 0.5) for item, name in enumerate("ab") if rank == item}
        sync(held if version == 3 else {"a": None, "b": None} | held, out, version=version)
        assert out["a"].tolist() == [version + 0.5] * 6 and out["b"].tolist() == [version + 1.5] * 6
    return sync.version


def test_a_rank_may_hold_some_of_the_tensors():
    assert run_processes(_sync_from_some_ranks_each, 3, timeout_seconds=30) == [3] * 3


def _sync_lazy_conjugates(rank):
    layout, other = Layout(Mesh.of("2"), "S0"), Layout(Mesh([1, 0], {"x": 2}), "S0")
    sync, out = WeightSync(layout, other, {"w": (8,)}, "complex64"), {"w": torch.zeros(4, dtype=torch.complex64)}
    for version in (1, 2):
        weights = torch.complex(torch.arange(8.0), torch.full((8,), float(version)))
        sync({"w": weights[4 * rank : 4 * rank + 4].conj()}, out, version=version)
        assert torch.equal(out["w"], weights.conj()[4 - 4 * rank : 8 - 4 * rank])
    mesh = init_device_mesh("cpu", (2,))
    wrapped = distribute_tensor(weights, mesh, [Shard(0)])
    sync({"w": wrapped}, out, version=3)
    assert torch.equal(out["w"], weights[4 - 4 * rank : 8 - 4 * rank])
    whole = distribute_tensor(weights, mesh, [Replicate()])
    with pytest.raises(ArgumentError, match=r"rank 0: the source DTensor of 'w' is .* they must match"):
        sync({"w": whole}, out, version=4)


def test_weights_may_be_dtensors_or_conjugated_lazily():
    run_processes(_sync_lazy_conjugates, 2)


def _send_unchanged_weights(rank):
    src, dst = Layout(Mesh.of("1"), "S0"), Layout(Mesh.of("1", first_rank=1), "S0")
    weights = torch.ones(64, dtype=torch.bfloat16)
    sync = WeightSync(src, dst, shape={"w": (64,)}, dtype="bfloat16")
    give = ({"w": weights}, None) if rank == 0 else (None, {"w": weights.clone()})
    sync(*give, version=0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("reshard.compression.weight_sync.plan_tensors", None)
        return [sync(*give, version=version).encoded_bytes for version in (1, 2, 3)]


def test_versions_without_changes_are_sent_without_a_new_plan():
    for sizes in run_processes(_send_unchanged_weights, 2):
        assert max(sizes) < 64


def _sync_in_each_format(rank):
    src, dst = Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("2", first_rank=1), "R S0")  # rank 1 is in both
    shapes, kinds = {"w": (512, 256), "scale": (300,)}, {"w": torch.bfloat16, "scale": torch.float32}
    generator, reports = torch.Generator().manual_seed(0), {}
    names = [
        name for name in ("auto", "raw", "delta", "bitmap", "xor-zstd") if name in known_formats() or name == "auto"
    ]
    syncs = {
        name: WeightSync(src, {"w": dst, "scale": Layout(Mesh.of("2", first_rank=1))}, shapes, kinds, compression=name)
        for name in names
    }
    outs = {
        name: {"w": torch.zeros(512, 128, dtype=torch.bfloat16), "scale": torch.zeros(300)} if rank else None
        for name in names
    }
    whole = {name: torch.randn(shape, generator=generator).to(kinds[name]) for name, shape in shapes.items()}
    for version in range(4):
        for item in whole.values():  # three words of four change
            words = item.view(torch.int16)
            words += ((torch.rand(words.shape, generator=generator) < 0.75) * 3).short()
        whole["w"][0, :2] = torch.tensor([float("nan"), -0.0])
        tensors = {
            name: item.tensor_split(2, dim=0)[rank].clone() if rank < 2 else None for name, item in whole.items()
        }
        for name, sync in syncs.items():
            reports[name] = sync(tensors if rank < 2 else None, outs[name], version=version)
            half = slice(128 * (rank - 1), 128 * rank)
            assert not rank or same_bytes(outs[name]["w"], whole["w"][:, half]), (name, version)
            assert not rank or same_bytes(outs[name]["scale"], whole["scale"]), (name, version)
    return {name: (report.formats, report.plain_bytes / report.encoded_bytes) for name, report in reports.items()}


def test_every_format_and_the_choice_among_them_arrive_bit_for_bit():
    first, *others = run_processes(_sync_in_each_format, 3)
    assert all(other == first for other in others)  # all ranks choose alike
    for name in set(first) - {"auto"}:
        assert set(first[name][0]) == {name}
    assert first["bitmap"][1] > 1.6 and first["delta"][1] > 1.2 and 0.99 < first["raw"][1] <= 1


def _sync_without_zstd(rank):
    layout, other = Layout(Mesh.of("2"), "S0"), Layout(Mesh([1, 0], {"x": 2}), "S0")
    shape, kind = {"w": (2**17,)}, "bfloat16"
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            known = {name: version for name, version in known_formats().items() if name != "xor-zstd"}
            patched.setattr("reshard.compression.sync_formats.known_formats", lambda: known)
        # a slow link and a fast codec: xor-zstd is the best format that this rank knows
        rates = dict.fromkeys(known_formats(), ((1e12, 1e12), (1e12, 1e12)))
        patched.setattr("reshard.compression.sync_formats.measure_format_rates", lambda: rates)
        topology = Topology.uniform((0, 1), 1e3)
        sync = WeightSync(layout, other, shape, kind, topology=topology)
        weights, out = torch.randn(2**16).bfloat16(), {"w": torch.zeros(2**16, dtype=torch.bfloat16)}
        for version in range(3):
            weights.view(torch.int16)[::2] += 1
            report = sync({"w": weights}, out, version=version)
        with pytest.raises(ArgumentError, match=r"'xor-zstd' needs the same zstd on all ranks: rank 1 cannot import"):
            WeightSync(layout, other, shape, kind, compression="xor-zstd")({"w": weights}, out, version=0)
        with pytest.raises(DisagreementError, match="rank 0 passes compression 'raw', rank 1 'delta'"):
            WeightSync(layout, other, shape, kind, compression=("raw", "delta")[rank])({"w": weights}, out, version=0)
    return set(report.formats)


def test_a_format_that_a_rank_lacks_is_never_chosen():
    assert run_processes(_sync_without_zstd, 2) == [{"bitmap"}] * 2


@pytest.mark.parametrize(
    ("compression", "text"),
    [("zip", r"compression of a WeightSync is 'zip'.*'auto', 'raw'"), ("bf16-lossless", "tensor 'w': .*not float32")],
)
def test_wrong_compressions_are_named(compression, text):
    with pytest.raises(ReshardError, match=text):
        WeightSync(SRC["w"], DST["w"], {"w": (4, 4)}, "float32", compression=compression)
