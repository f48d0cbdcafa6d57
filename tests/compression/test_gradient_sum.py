"""Encoded sums of gradients over processes, alone and in DDP and FSDP2: bits, errors, feedback, and wrong calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from reshard.codecs import parse_codec
from reshard.compression import CompressedAllGather, CompressedReduceScatter, GradientSum, ddp_hook, gradient_sum
from reshard.errors import ArgumentError, DisagreementError
from reshard.testing.processes import run_processes
from tests.support.torch_names import GATHER

HOSTS = (0, 0, 1, 1)
SHAPES = {"a": (300, 70), "b": (5,), "c": (64, 128)}


def _gradients(rank, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def _flat(gradients):
    return torch.cat([gradient.reshape(-1).float() for gradient in gradients.values()])


def _all_equal(tensor):
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor)
    return all(torch.equal(item.view(torch.int32), every[0].view(torch.int32)) for item in every)


def _sums(rank, piece_values):
    gradient_sum.PIECE_VALUES = piece_values
    wanted = sum(_flat(_gradients(other)).double() for other in range(4))
    errors = {}
    for codec in (None, "int8x128", "int4x128-bf16"):
        gradients = _gradients(rank)
        GradientSum(codec, host_of_rank=HOSTS, average=False)(gradients)
        assert _all_equal(_flat(gradients))
        errors[codec] = float((_flat(gradients) - wanted).norm() / wanted.norm())
    means = _gradients(rank, dtype=torch.bfloat16)
    GradientSum("int8x128", host_of_rank=HOSTS)(means)
    assert _all_equal(_flat(means))
    assert float((_flat(means) - wanted / 4).norm() / wanted.norm() * 4) < 0.02
    alone = {"c": _gradients(rank)["c"]}  # needs no padding
    GradientSum(None, host_of_rank=HOSTS)(alone)
    assert (alone["c"] - sum(_gradients(other)["c"] for other in range(4)) / 4).abs().max() < 1e-6
    spoiled = _gradients(rank)
    if rank == 1:
        spoiled["c"][3, 5] = torch.nan
    GradientSum("int8x128", host_of_rank=HOSTS)(spoiled)
    assert _all_equal(_flat(spoiled))
    found = spoiled["c"].isnan()
    assert found[3, 5] and found.sum() <= 64 and not spoiled["a"].isnan().any()
    for arguments, kind, text in (
        ({"codec": "int8x128", "host_of_rank": (0, 0, 0, 1)}, ArgumentError, "0 has 3, 1 has 1"),
        ({"codec": "int8x128" if rank else "int4x128"}, DisagreementError, "rank 1 passes ..int8x128"),
        ({"codec": "int9"}, ArgumentError, "there is no codec"),
    ):
        with pytest.raises(kind, match=text):
            GradientSum(**arguments)
    return errors


with torch.inference_mode():
    INFERENCE = torch.ones(8)


def _without_storage():
    gradient = torch.ones(8)
    gradient.untyped_storage().resize_(0)
    return gradient


def _wrong_gradients(rank):
    summed = GradientSum("int4x128", host_of_rank=HOSTS, feedback=True)
    for wrong, text in (
        ({"a": torch.ones(100 + rank, 40)}, r"rank 0 passes 'a' of float32 \[100, 40\], rank 1 'a' of float32 \[101"),
        ({"ab"[rank // 2]: torch.ones(100)}, "rank 0 passes 'a' of float32 .*, rank 2 'b' of"),
        ({"a": torch.ones(100)} if rank == 3 else {}, "rank 0 passes fewer, rank 3 'a' of"),
    ):
        with pytest.raises(DisagreementError, match=text):
            summed(wrong)
    summed({})
    summed({"a": torch.ones(8, requires_grad=True)})
    sharded = distribute_tensor(torch.ones(32), init_device_mesh("cpu", (4,)), [Shard(0)])
    GradientSum(None, host_of_rank=HOSTS, average=False)({"a": sharded})
    assert sharded.to_local().tolist() == [4.0] * 8
    for wrong, text in (
        (None, "is NoneType, not a torch tensor"),
        (torch.ones(8).to_sparse(), "must be a dense tensor on cpu or cuda"),
        (torch.ones(8, dtype=torch.float64), "is float64; supported are float32, bfloat16, float16"),
        (torch.ones(1).expand(8), "overlapping"),
        (_without_storage(), "a Tensor that has no storage"),
        (INFERENCE, "made in inference mode"),
        (DTensor.from_local(torch.ones(8), init_device_mesh("cpu", (4,)), [Partial()]), "a DTensor with a pending sum"),
        (torch.ones(8, device="meta"), "must be a dense tensor on cpu or cuda, not on meta"),
        (torch.ones(9), "has 9 values, but its kept error has 8"),
    ):
        with pytest.raises(ArgumentError, match=text):
            summed({"a": wrong})
    for wrong in (5, {"a": 5}):
        with pytest.raises(ArgumentError, match="a state of coding errors must be"):
            summed.load_state_dict(wrong)
    for broken in (torch.ones(4, 2), torch.ones(8, dtype=torch.int64), torch.full((8,), torch.nan)):
        with pytest.raises(ArgumentError, match="coding errors of 'a' must be finite, in float32 and flat, but are"):
            summed.load_state_dict({"a": broken})
    model = DistributedDataParallel(torch.nn.Linear(4, 4, dtype=torch.float64))
    model.register_comm_hook(GradientSum(None, host_of_rank=HOSTS), ddp_hook)
    with pytest.raises(ArgumentError, match="is float64; supported are"):
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()


def _wrong_on_one_rank(rank):
    """Every rank raises the error of rank 1, no gradient changes, and the next sum is right."""
    for name, wrong, text in (
        ("codec", "int9", "rank 1: there is no codec 'int9'"),
        ("host_of_rank", 5, "rank 1: host_of_rank is 5; it must have the host number of each rank"),
        ("average", None, "rank 1: average is None"),
        ("feedback", 1, "rank 1: feedback is 1"),
        ("module", 5, "rank 1: module must be a torch module, not int"),
    ):
        with pytest.raises(ArgumentError, match=text):
            GradientSum(**{"codec": None, "host_of_rank": HOSTS} | ({name: wrong} if rank == 1 else {}))
    summed = GradientSum(None, host_of_rank=HOSTS)
    torch.set_default_dtype(torch.bfloat16)
    for names in ("a", "b"):
        summed({names: torch.zeros(8, dtype=torch.float32)})
    for wrong, kind, text in (
        ({"a": None}, ArgumentError, "rank 1: the gradient of 'a' is NoneType"),
        (None, ArgumentError, "rank 1: gradients must be {name: gradient}, not NoneType"),
        ({"b": torch.ones(8, dtype=torch.float32)}, DisagreementError, "rank 0 passes 'a' of .*, rank 1 'b' of"),
    ):
        gradients = {"a": torch.full((8,), float(rank), dtype=torch.float32)}
        with pytest.raises(kind, match=text):
            summed(wrong if rank == 1 else gradients)
        assert gradients["a"][0] == rank
    summed({"empty": torch.zeros(0, 3, dtype=torch.float32)})
    fine = {"a": torch.full((8,), 1 + rank / 4096, dtype=torch.float32)}
    summed(fine)
    assert fine["a"].tolist() == [1 + 1.5 / 4096] * 8  # bf16 would round to 1


def _wrong_hook_on_one_rank(rank):
    """Every rank raises the error of rank 1 in its backward, and none waits for the others."""
    for feedback, dtype, text in (
        (True, torch.float32, "rank 1: a GradientSum with feedback needs module=, .* names 0 parameters, but not one"),
        (False, torch.float64, "rank 1: the gradient of '.*' is float64"),
    ):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model = DistributedDataParallel(module, bucket_cap_mb=1e-5)
        state = GradientSum(None, host_of_rank=HOSTS, feedback=feedback, module=None if rank == 1 else module)
        if rank == 1:
            check = state.check
            state.check = lambda given, check=check, dtype=dtype: check({k: v.to(dtype) for k, v in given.items()})
        model.register_comm_hook(state, ddp_hook)
        with pytest.raises(ArgumentError, match=text):
            model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("wrong", [_wrong_gradients, _wrong_on_one_rank, _wrong_hook_on_one_rank])
def test_wrong_gradients_raise_an_error_on_every_rank(wrong):
    run_processes(wrong, 4)


@pytest.mark.parametrize("piece_values", [gradient_sum.PIECE_VALUES, 4096], ids=["one piece", "pieces"])
def test_all_ranks_get_equal_bits_close_to_the_sum(piece_values):
    for errors in run_processes(_sums, 4, piece_values):
        assert errors[None] < 1e-6
        assert 1e-4 < errors["int8x128"] < 0.012  # two codings of errors up to 0.0083, of partial sums and of the sum
        assert 1e-2 < errors["int4x128-bf16"] < 0.13


def _feedback(rank):
    """The same gradients many times: with feedback, the mean of the sums has next to no error."""
    gradient_sum.PIECE_VALUES = 4096
    wanted, totals = sum(_flat(_gradients(other)) for other in range(4)), {}
    for feedback in (False, True):
        summed = GradientSum("int4x128", host_of_rank=HOSTS, average=False, feedback=feedback)
        totals[feedback] = torch.zeros_like(wanted)
        for step in range(16):
            gradients = _gradients(rank)
            if feedback and step == 8:  # restored into a new sum, with the parameters in another order
                state, summed = (
                    summed.state_dict(),
                    GradientSum("int4x128", host_of_rank=HOSTS, average=False, feedback=True),
                )
                summed.load_state_dict(state)
            if feedback and step >= 8:
                gradients = dict(reversed(gradients.items()))
            summed(gradients)
            totals[feedback] += _flat({name: gradients[name] for name in SHAPES}) / 16
        gradients = _gradients(rank)
        gradients["c"][0, 0] = float("nan") if rank == 0 else 1.0  # a step that a loss scaler skips
        summed(gradients)
        assert gradients["c"].isnan().any()
        summed(gradients := _gradients(rank))
        assert all(gradient.isfinite().all() for gradient in gradients.values())
    return [float((total - wanted).norm() / wanted.norm()) for total in totals.values()]


@pytest.mark.integration
def test_feedback_removes_the_error_over_steps_and_survives_new_buckets():
    for without, with_feedback in run_processes(_feedback, 4):
        assert with_feedback < without / 5


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))


def _train(rank, wrap):
    model = wrap(_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        x = torch.randn(32, 64, generator=generator)
        loss = (model(x) - x.cumsum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.requires_grad_(False)


def _ddp(rank):
    def encoded(module):
        wrapped = DistributedDataParallel(module, bucket_cap_mb=0.05)
        state = GradientSum("int8x128", host_of_rank=HOSTS, feedback=True, module=module)
        wrapped.register_comm_hook(state, ddp_hook)
        return wrapped

    found, wanted = (_train(rank, wrap).module for wrap in (encoded, DistributedDataParallel))
    for (name, a), b in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert _all_equal(a), name
        assert float((a - b).norm() / b.norm()) < 0.01, name
        assert not torch.equal(a, b)


def test_ddp_trains_with_encoded_sums():
    run_processes(_ddp, 4)


def _fsdp(rank):
    sent = []
    plain = getattr(dist, GATHER)
    setattr(dist, GATHER, lambda out, row, **kwargs: sent.append(row.nbytes) or plain(out, row, **kwargs))

    def encoded(module):
        for layer in (module[0], module[2]):
            fully_shard(layer)
        wrapped = fully_shard(module)
        for part in wrapped.modules():
            if isinstance(part, FSDPModule):
                part.set_custom_all_gather(CompressedAllGather("int8x128"))
                part.set_custom_reduce_scatter(CompressedReduceScatter("int8x128"))
        return wrapped

    found = [parameter.full_tensor() for parameter in _train(rank, encoded).parameters()]
    assert sent and max(sent) < 64 * 256 / 4 * 1.2  # bytes of a shard of the largest layer: one per value, not four
    wanted = list(_train(rank, DistributedDataParallel).parameters())
    for a, b in zip(found, wanted, strict=True):
        assert _all_equal(a) and float((a - b).norm() / b.norm()) < 0.02


@pytest.mark.integration
def test_fsdp_trains_with_encoded_gathers_and_sums():
    run_processes(_fsdp, 4)


def test_hooks_refuse_what_the_codec_does_not_compress():
    with pytest.raises(ArgumentError, match="not int64 on cpu"):
        CompressedAllGather("int8x128")(torch.zeros(8), torch.zeros(4, dtype=torch.int64), None)
    assert CompressedReduceScatter("int4x64").codec == parse_codec("int4x64")
