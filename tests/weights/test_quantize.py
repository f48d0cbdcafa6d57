"""Quantized shards equal the quantized tensor of transformers to the last bit, whatever the sharding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from reshard.errors import ArgumentError
from reshard.testing.processes import run_processes
from reshard.weights import Publisher, Quantize, Subscriber, transfer_state_dict
from reshard.weights.model.holdings import Holding
from reshard.weights.model.quantize import Quantizer
from tests.support.pausable_store import PausableStore
from tests.support.sharded_state import ShardedState, chunks, whole

FLOAT8 = torch.float8_e4m3fn


def _quantize_whole(value, block):
    """By transformers, after zeros fill the last blocks."""
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = SimpleNamespace(weight_block_size=block, scale_fmt="float")
    quantize = module.Fp8Quantize(SimpleNamespace(quantization_config=config))
    rows, columns = value.shape[-2:]
    padded = torch.nn.functional.pad(value, (0, -columns % block[1], 0, -rows % block[0]))
    found = quantize.convert({"w.weight": padded})
    return found["w.weight"][..., :rows, :columns].contiguous(), found["w.weight_scale_inv"]


def _bits(array):
    return array.view(torch.uint8 if array.itemsize == 1 else torch.int32)


def _two_runs(name, shape, rank):
    """Ranks hold two runs of rows each, which share blocks."""
    cuts = [0, *(shape[-2] * at // 8 + at % 3 for at in range(1, 8)), shape[-2]]
    runs = [(cuts[at], cuts[at + 1]) for at in (rank, rank + 4)]
    return [(*((0, size) for size in shape[:-2]), run, (0, shape[-1])) for run in runs]


def _overlapping(name, shape, rank):
    """Rank 0 holds all, the others an odd part."""
    lo = (37 * rank) % shape[-2]
    hi = shape[-2] if rank == 0 else min(shape[-2], lo + 61)
    return [(*((0, size) for size in shape[:-2]), (lo, hi), (0, shape[-1]))]


SHARDINGS = {
    "whole": (1, whole),
    "uneven rows": (3, chunks(0, 3)),
    "columns": (4, chunks(1, 4)),
    "two runs of rows": (4, _two_runs),
    "overlapping rows": (3, _overlapping),
}


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(
    ("shape", "block", "dtype"),
    [
        ((256, 384), (128, 128), torch.bfloat16),
        ((300, 200), (128, 128), torch.float32),
        ((97, 65), (32, 16), torch.float16),
        ((4, 96, 70), (32, 32), torch.bfloat16),
    ],
)
def test_shards_equal_the_quantized_whole(sharding, shape, block, dtype):
    torch.manual_seed(1)
    value = torch.randn(shape).mul(torch.randn(shape[-1]).exp()).to(dtype)
    value[..., : block[0], : block[1]] = 0
    size, regions = SHARDINGS[sharding]
    source = ShardedState({"w.weight": value}, size, regions)
    quantizer = Quantizer([Quantize("{p}.weight", block)], source.manifest)
    entry = source.manifest.entries["w.weight"]
    holdings = [
        {name: Holding(array, shape, dict(entry.held)[rank]) for name, array in arrays.items()}
        for rank, arrays in enumerate(source.arrays)
    ]
    measured = [quantizer.measure(held) for held in holdings]
    expected = _quantize_whole(value, block)
    for rank, held in enumerate(holdings):
        found: dict[str, torch.Tensor] = {}
        quantizer.quantize(held, measured, found)
        assert found.keys() == ({"w.weight", "w.weight_scale_inv"} if held else set())
        for name, whole_tensor in zip(sorted(found), expected, strict=False):
            boxes = dict(quantizer.manifest.entries[name].held)[rank]
            parts = [whole_tensor[tuple(slice(*pair) for pair in box)] for box in boxes]
            dim = next((d for d in range(len(shape)) if any(box[d] != boxes[0][d] for box in boxes)), 0)
            assert torch.equal(_bits(found[name]), _bits(torch.cat(parts, dim))), (name, rank)


def test_a_value_that_is_no_number_spreads_over_its_block_on_each_rank():
    value = torch.ones(8, 8)
    value[1, 1] = float("nan")
    source = ShardedState({"w": value}, 2, chunks(0, 2))
    quantizer = Quantizer([Quantize("w", (8, 4))], source.manifest)
    held = [
        {"w": Holding(arrays["w"], (8, 8), dict(source.manifest.entries["w"].held)[rank])}
        for rank, arrays in enumerate(source.arrays)
    ]
    measured = [quantizer.measure(each) for each in held]
    for each in held:
        found: dict[str, torch.Tensor] = {}
        quantizer.quantize(each, measured, found)
        assert found["w"][:, :4].isnan().all() and (found["w"][:, 4:].float() == 448).all()


def test_what_cannot_be_quantized_is_named():
    state = {"w.weight": torch.ones(4, 4), "b.weight": torch.ones(4), "n.weight": torch.ones(4, 4, dtype=torch.int32)}
    manifest = ShardedState(state, 1, whole).manifest
    for rule, text in (
        (lambda: Quantize("x"), "Quantize.*name='x'.* matches no tensor"),
        (lambda: Quantize("b.weight"), r"'b.weight' has shape \[4\], which has no blocks"),
        (lambda: Quantize("n.weight"), "'n.weight' is int32"),
        (lambda: "w.weight", "'w.weight', which is not a Quantize"),
        (lambda: Quantize("w.weight", (0, 4)), "a side of block is 0"),
        (lambda: Quantize("w.weight", 128), "block is 128"),
        (lambda: Quantize("w.weight", suffix=""), "suffix is empty"),
    ):
        with pytest.raises(ArgumentError, match=text):
            Quantizer([rule()], manifest)
    with pytest.raises(ArgumentError, match="quantized twice"):
        Quantizer([Quantize("w.weight"), Quantize("w.{t}")], manifest)


def _state(version):
    torch.manual_seed(version)
    return {"a.weight": torch.randn(70, 48), "b.weight": torch.randn(5, 40, 33), "norm.weight": torch.randn(48)}


def _whole_float8(version):
    state = _state(version)
    for name in ("a.weight", "b.weight"):
        state[name], state[f"{name}_scale_inv"] = _quantize_whole(state[name], (32, 32))
    return state


def _publish(rank, _, store):
    """Ranks 0 to 2 train in float32; ranks 3 and 4 are an engine in float8 whose columns are cut inside a block."""
    raw = dist.TCPStore("127.0.0.1", store.ports[rank], is_master=False)
    is_engine = rank > 2
    group = dist.PrefixStore("engine" if is_engine else "trainer", raw)
    dist.init_process_group("gloo", store=group, rank=rank - 3 * is_engine, world_size=2 if is_engine else 3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if not is_engine:
        model = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in _state(1).items()}
        with Publisher(model, raw, quantize=RULES) as publisher:
            for version in (1, 2):
                for name, value in model.items():
                    value.to_local().copy_(distribute_tensor(_state(version)[name], mesh, [Shard(0)]).to_local())
                publisher.publish(version)
                raw.wait([f"updated{version}-0", f"updated{version}-1"])
        return
    at, model, shards = rank - 3, {}, {}
    for name, value in _whole_float8(1).items():
        half = -(-value.shape[-1] // 2)
        lo, hi = (0, half) if at == 0 else (value.shape[-1] - half, value.shape[-1])
        shards[name] = value.shape, [(*((0, size) for size in value.shape[:-1]), (lo, hi))]
        model[name] = torch.zeros_like(value[..., lo:hi])
    with Subscriber(model, raw, shards=shards) as subscriber:
        for version in (1, 2):
            assert subscriber.update(60) == version
            for name, value in _whole_float8(version).items():
                lo, hi = shards[name][1][0][-1]
                assert torch.equal(_bits(model[name]), _bits(value[..., lo:hi].contiguous())), name
            raw.set(f"updated{version}-{at}", "")


RULES = [Quantize("a.weight", (32, 32)), Quantize("b.weight", (32, 32))]


@pytest.mark.integration
def test_engine_in_float8_gets_versions_of_a_trainer_in_float32():
    with PausableStore(5) as store:
        run_processes(_publish, 5, store, init_group=False)


def _transfer(rank):
    mesh = init_device_mesh("cpu", (3,))
    source = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in _state(3).items()}
    target = {name: torch.zeros_like(value) for name, value in _whole_float8(3).items()}
    with pytest.raises(ArgumentError, match=r"'norm.weight' has shape \[48\]"):
        transfer_state_dict(source, target, quantize=[Quantize("norm.weight")])
    transfer_state_dict(source, target, quantize=RULES)
    for name, value in _whole_float8(3).items():
        assert torch.equal(_bits(target[name]), _bits(value)), name


def test_a_transfer_quantizes_on_its_way():
    run_processes(_transfer, 3)
