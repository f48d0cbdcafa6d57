"""Whole models between shardings: every element, tied and nested state, and errors before a byte moves."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard.errors import ArgumentError, VerificationError
from reshard.testing.processes import run_processes
from reshard.weights import Rename, transfer_state_dict
from reshard.weights.model import verify
from reshard.weights.model.holdings import StateReader


class _Model(torch.nn.Module):
    """Odd sizes, tied weights, a bias, a buffer."""

    def __init__(self, seed, is_tied=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(17, 6)
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6)
        self.head = torch.nn.Linear(6, 17, bias=False)
        self.register_buffer("scale", torch.rand(()))
        if is_tied:
            self.head.weight = self.embed.weight


def _whole(model):
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }


def _from_fsdp(rank, is_tied):
    expected = _Model(1).state_dict()
    model = _Model(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
    target = _Model(2, is_tied)
    mesh = init_device_mesh("cpu", (3,))
    parallelize_module(target, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    transfer_state_dict(model, target)
    whole = _whole(target)
    assert whole.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(whole[name], value), name
    return (target.head.weight is target.embed.weight) == is_tied


@pytest.mark.parametrize("is_tied", [True, False])
def test_fsdp_to_tensor_parallel(is_tied):
    assert all(run_processes(_from_fsdp, 3, is_tied))


def _nested(rank):
    """Optimizer state with numbers, a strided shard, bfloat16, and ranks that hold other names."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(torch.nn.Linear(5, 10), torch.nn.Linear(10, 5))
    expected = {name: value.clone() for name, value in blocks.state_dict().items()}
    parallelize_module(blocks, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(blocks, mesh=mesh["dp"])  # its rows are strided
    copy = {name: torch.zeros(value.shape) for name, value in blocks.state_dict().items()}
    transfer_state_dict(blocks, copy if rank == 2 else None)
    assert rank != 2 or all(torch.equal(copy[name], value) for name, value in expected.items())
    source = {"state": {"w": {"step": 3, "moments": [distribute_tensor(whole, mesh, [Shard(0), Shard(1)])]}}}
    if rank == 3:
        source["only"] = whole[0].to(torch.bfloat16)
    target = {"state": {"w": {"step": 0, "moments": [torch.zeros(7, 5, dtype=torch.float64)]}}, "only": torch.zeros(5)}
    transfer_state_dict(source, target if rank == 1 else None)
    if rank == 1:
        assert target["state"]["w"]["step"] == 3
        assert torch.equal(target["state"]["w"]["moments"][0], whole.double())
        assert torch.equal(target["only"], whole[0])


def test_nested_state_with_numbers_and_casts():
    run_processes(_nested, 4)


def _bad(rank):
    source = {"a": torch.ones(3), "b": torch.ones(4), "c": torch.ones(2, device="cpu")}
    texts = []
    for target in (
        {"a": torch.zeros(3), "b": torch.zeros(4)},
        {"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(2)},
        {**{name: source[name] for name in "ab"}, "e": torch.zeros(2)},
        {**source, "d": torch.zeros(1), "a": torch.zeros(3)},
        {**source, "b": torch.zeros(4, 1)},
        {**source, "b": torch.zeros(4, dtype=torch.int8)},
        {**source, "b": torch.zeros(4, device="meta")},
        {**source, "b": object()},
        3,
    ):
        with pytest.raises(ArgumentError) as caught:
            transfer_state_dict(source if rank == 0 else None, target if rank == 1 else None)
        texts.append(str(caught.value))
    with pytest.raises(ArgumentError, match="no rank passes dst="):
        transfer_state_dict(source)
    return texts


def test_mistakes_are_named_on_all_ranks_alike():
    texts, others = run_processes(_bad, 2)
    assert texts == others
    for text, part in zip(
        texts,
        (
            "'c') that only the source has; name them in a weights.Drop of rules= if they are not needed",
            "'b' has shape [2], but [4] on the source; if a rank holds a part of it, pass a DTensor, or state the part by "
            "shards=",
            "('e') that the source does not have, and 1 tensor ('c') that only the source has; if the sides name or divide "
            "the same weights in different ways, say how by rules=",
            "'d') that the source does not have; pass a mapping without them if they keep their values",
            "'b' has shape [4, 1], but [4] on the source",
            "cannot cast float32 to int8",
            "'b' is on the meta device",
            "'b' is a object",
            "not int",
        ),
        strict=True,
    ):
        assert part in text


def _misnamed(rank):
    source, target = ({f"model.{name}.weight": torch.ones(4)} for name in ("norm", "nrom"))
    rules = [Rename("layers.{p}", "model.{p}"), Rename("decoder.{p}", "model.{p}")]
    with pytest.raises(ArgumentError) as caught:
        transfer_state_dict(source if rank == 0 else None, target if rank == 1 else None, rules=rules)
    return str(caught.value)


def test_close_names_and_rules_that_fit_no_tensor_are_named():
    for text in run_processes(_misnamed, 2):
        assert "; did you mean 'model.norm.weight'?; 2 rules changed nothing: Rename(" in text


def _fused_wrongly(rank):
    """Half of a fused tensor, as an engine with tensor parallelism holds it; then one part of three that is missing."""
    prefix, texts = "model.layers.0.self_attn", []
    parts = {f"{prefix}.{name}_proj.weight": torch.ones(rows, 4) for name, rows in (("q", 8), ("k", 4), ("v", 4))}
    fused, half = ({f"{prefix}.qkv_proj.weight": torch.zeros(rows, 4)} for rows in (16, 8))
    without_k, without_q = ({n: t for n, t in parts.items() if f".{part}_proj" not in n} for part in "kq")
    for source, target in ((parts, half), (without_k, fused), (without_q, fused), (fused, without_k)):
        with pytest.raises(ArgumentError) as caught:
            transfer_state_dict(source if rank == 0 else None, target if rank == 1 else None)
        texts.append(str(caught.value))
    return texts


def test_wrong_parts_of_a_fused_tensor_are_named():
    of_shape, of_k, of_q, of_split = run_processes(_fused_wrongly, 2)[0]
    name = "model.layers.0.self_attn.{}_proj.weight"
    assert f"{name.format('qkv')!r} has shape [8, 4], but [16, 4] as Concatenate(" in of_shape
    assert "state the part by shards=" in of_shape
    assert f"would join or split them, but the source lacks {name.format('k')!r};" in of_k
    assert f"would join or split them, but the source lacks {name.format('q')!r};" in of_q
    assert f"would join or split them, but the destination lacks {name.format('k')!r};" in of_split


def _flipped(rank):
    source, target = {"a": torch.ones(6, 2), "b": torch.ones(3)}, {"a": torch.zeros(6, 2), "b": torch.zeros(3)}
    digest = verify.Checker.digest_target

    def corrupt(self, arrays, of_rank):
        if of_rank == 1:
            arrays["a"].view(torch.int32)[3, 1] ^= 1
        return digest(self, arrays, of_rank)

    verify.Checker.digest_target = corrupt
    with pytest.raises(VerificationError, match=r"'a' \[0:6, 0:2\] on rank 1: the digest"):
        transfer_state_dict(source if rank == 0 else None, target if rank else None)


def test_changed_bit_is_named_with_tensor_and_rank():
    run_processes(_flipped, 3)


def test_a_state_is_read_anew_if_memory_or_values_are_new():
    model = torch.nn.Linear(4, 3)
    state = {"model": model.state_dict(keep_vars=True), "step": 1}
    reader = StateReader(state, None)
    first = reader.read()
    with torch.no_grad():
        model.weight.add_(1)
    assert reader.read() is first  # in the same memory, with new numbers
    for change in (
        lambda: setattr(model.weight, "data", model.weight.data.clone()),
        lambda: setattr(model.weight, "data", model.weight.data[:2]),  # begins at the same address
        lambda: setattr(model.weight, "data", model.weight.data.t()),
        lambda: setattr(model.weight, "data", model.weight.data.to(torch.bfloat16)),
        lambda: state.update(step=2),
        lambda: state.update(step=True),
        lambda: state["model"].pop("bias"),
    ):
        before = reader.read()
        change()
        after = reader.read()
        assert after is not before and after is reader.read()
        found = after.holdings["model.weight"]
        assert found.array.data_ptr() == model.weight.data_ptr() and found.shape == tuple(model.weight.shape)
        assert after.values == {"step": state["step"]} and ("model.bias" in after.holdings) == (
            "bias" in state["model"]
        )
