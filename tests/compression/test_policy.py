"""Policies in the engine and in ``Pipe``: bytes on the wire per dimension, and errors for dimensions a job lacks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.device_mesh
import torch.distributed.tensor
from torch import nn

import reshard.scheduler as rs
from reshard import Topology
from reshard.compression import Policy, parse_policy
from reshard.errors import ArgumentError
from reshard.runtime.transport import GlooTransport
from reshard.scheduler.gradients.replica_sync import ReplicaSync
from reshard.testing.processes import run_processes
from tests.support.torch_names import GATHER, REDUCE_SCATTER
from tests.support.whole_models import find_shapes

WIDTH, ROWS = 128, 64


def test_policies_have_a_text_form():
    policy = Policy(dp="int4x128-bf16", pp=("int8x128", None), zero="fp8x128", force_pp=True)
    assert str(policy) == "dp=int4x128-bf16,pp=int8x128/raw,zero=fp8x128/fp8x128,force-pp"
    assert parse_policy(str(policy)) == dataclasses.replace(policy, zero=("fp8x128", "fp8x128"))
    assert parse_policy("dp=int8x128, tp=int6x128") == Policy(dp="int8x128", tp="int6x128")
    fed_back = Policy(dp="int8x128", feedback=("dp",), raw_steps=10)
    assert str(fed_back) == "dp=int8x128,feedback,raw-steps=10" and parse_policy(str(fed_back)) == fed_back
    both = Policy(dp="int8x128", zero=(None, "int4x128"), feedback=("zero", "dp"))
    assert str(both) == "dp=int8x128,zero=raw/int4x128,feedback=dp/zero" and parse_policy(str(both)) == both
    for options, message in (
        ({"feedback": ("pp",)}, "only sums of gradients"), ({"feedback": ("dp", "dp")}, "each dimension once"),
        ({"feedback": ("zero",)}, "reduce-scatters of zero=, which is None"), ({"raw_steps": -1}, "at least 0"),
        ({"zero": ("int8x128", None), "feedback": ("zero",)}, "reduce-scatters of zero=, which is .'int8x128', None"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            Policy(dp="int8x128", **options)
    for text, message in (
        ("pp=int8x128,raw-steps=3", "need dp="), ("dp=int8x128,raw-steps=x", "raw-steps= with a number"),
        ("dp=int9", "no codec 'int9'"), ("ep=int8x128", "has 'ep=int8x128'"), ("dp=int8x128,dp=int8x128", "each once"),
        ("force-pp", "needs pp="), ("zero=raw/raw", "one codec or two"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            parse_policy(text)


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return ((x - y) ** 2).mean()


def _make_batch():
    x, y = torch.randn(2, ROWS, WIDTH)
    return {"x": x, "y": y}


@pytest.fixture(scope="module", autouse=True)
def cached():
    """What torch and Python load once per process, so that forked ranks inherit it."""
    find_shapes(rs.Pipe(_Model(), ["layers.1"], stages="1x1,1x1"), _make_batch())


def _engine(compression, stages="1x1,2x1", **options):
    torch.manual_seed(0)
    batch = _make_batch()
    pipe = rs.Pipe(_Model(), ["layers.1"], stages=stages)
    options = {"topology": Topology.uniform((0, 1, 2), 1e8), "schedule": rs.one_f_one_b} | options
    return pipe.compile(batch, 1, compression=compression, **options), batch


class _Wire:
    """Counts the bytes that this rank sends: between stages, in sums over replicas, and in FSDP's collectives."""

    def __init__(self, patch):
        self.pp = self.dp = self.zero = 0
        send, exchange, reduce = GlooTransport.send, ReplicaSync._exchange, ReplicaSync._post_sum

        def count_send(transport, buffer, *arguments):
            self.pp += buffer.nbytes
            return send(transport, buffer, *arguments)

        def count_exchange(sync, check, received, sent, rows):
            own = sync.members.index(dist.get_rank())
            self.dp += sent.nbytes // len(sent) * (sum(rows) - rows[own])
            exchange(sync, check, received, sent, rows)

        def count_sum(sync, array, *arguments, **options):
            self.dp += array.nbytes if array.is_floating_point() else 0
            return reduce(sync, array, *arguments, **options)

        patch.setenv("RESHARD_SHARED_MEMORY", "0")  # all transfers go over Gloo, where they are counted
        patch.setattr(GlooTransport, "send", count_send)
        patch.setattr(ReplicaSync, "_exchange", count_exchange)
        patch.setattr(ReplicaSync, "_post_sum", count_sum)


def _count(rank, policies):
    """Bytes per dimension of one step under each policy, and the gradients."""
    results = []
    for policy in policies:
        with pytest.MonkeyPatch.context() as patch:
            engine, batch = _engine(policy)
            with engine:
                wire = _Wire(patch)
                engine.step(batch)
                results.append((wire.pp, wire.dp, [parameter.grad.clone() for parameter in engine.parameters()]))
    return results


@pytest.mark.nightly
def test_each_dimension_sends_fewer_bytes():
    policies = (None, Policy(pp="int8x128", force_pp=True), Policy(pp=("int8x128", None), force_pp=True),
                Policy(dp="int8x128"))  # fmt: skip
    ranks = run_processes(_count, 3, policies)
    values, elements = ROWS * WIDTH, ROWS
    summed = WIDTH * WIDTH + WIDTH
    parts = -(-summed // 256) * 132  # bytes of half of the gradients
    for rank, results in enumerate(ranks):
        raw, both, forward, dp = results
        sends = 4 * values if rank == 0 else 2 * values
        encoded = 132 * elements if rank == 0 else 66 * elements
        assert [raw[0], both[0], dp[0]] == [sends, encoded, sends]
        assert forward[0] == (encoded if rank == 0 else sends)
        if rank:
            assert [raw[1], both[1], dp[1]] == [4 * summed, 4 * summed, 2 * parts]
        for _, _, gradients in results[1:]:
            for gradient, exact in zip(gradients, raw[2], strict=True):
                error = float((gradient - exact).norm() / exact.norm())
                assert 1e-4 < error < 0.03 or torch.equal(gradient, exact)
    for number in range(len(policies)):
        for item, other in zip(ranks[1][number][2], ranks[2][number][2], strict=True):
            assert torch.equal(item, other)  # replicas
    assert not torch.equal(ranks[1][3][2][0], ranks[1][0][2][0])


def _count_fsdp(rank, policies):
    """Bytes handed to torch's gathers, exchanges and reduce-scatters in a step, by policy, and the gradients."""
    results = []
    for policy in policies:
        engine, batch = _engine(policy, [rs.Placement(), rs.Placement(dp=2, wrap=rs.fsdp)])
        with engine, pytest.MonkeyPatch.context() as patch:
            wire = {GATHER: 0, "all_to_all_single": 0, REDUCE_SCATTER: 0}

            def count(name, wire, patch):
                collective = getattr(dist, name)

                def counted(*arrays, **options):
                    wire[name] += (arrays[1] if len(arrays) > 1 else options["input"]).nbytes
                    return collective(*arrays, **options)

                patch.setattr(dist, name, counted)

            for name in wire:
                count(name, wire, patch)
            engine.step(batch)
            gradients = [parameter.grad.full_tensor() if rank else parameter.grad for parameter in engine.parameters()]
            results.append((tuple(wire.values()), gradients))
    return results


@pytest.mark.nightly
def test_collectives_of_fsdp_send_fewer_bytes():
    policies = (None, Policy(zero="int8x128"), Policy(zero=(None, "int4x128-bf16")))
    half = (WIDTH * WIDTH + WIDTH) // 2
    elements = -(-half // 128)
    for raw, both, scatters in run_processes(_count_fsdp, 3, policies)[1:]:
        assert raw[0] == (4 * half, 0, 8 * half)
        assert both[0] == (132 * elements, 2 * 132 * elements, 0)
        assert scatters[0] == (4 * half, 2 * 72 * elements, 0)
        for gradient, exact in zip(both[1], raw[1], strict=True):
            assert 1e-4 < float((gradient - exact).norm() / exact.norm()) < 0.03


def _choices(rank, rates):
    texts = []
    for rate in rates:
        with _engine(Policy(pp="int8x128"), topology=Topology.uniform((0, 1, 2), rate))[0] as engine:
            texts.append(engine.compression)
    return texts


@pytest.mark.nightly
def test_an_edge_is_encoded_only_where_the_iteration_gets_shorter():
    slow, fast = run_processes(_choices, 3, (1e5, 1e12))[2]
    assert "0 -> 1 activations: int8x128" in slow and "1 -> 0 gradients: int8x128" in slow
    assert "0 -> 1 activations: raw" in fast and "1 -> 0 gradients: raw" in fast


def _refused(rank, cases):
    for policy, stages, message in cases:
        with pytest.raises(ArgumentError, match=message):
            _engine(policy, stages)


@pytest.mark.integration
def test_dimensions_that_a_job_has_not_are_errors():
    cases = (
        (Policy(dp="int8x128"), "1x1,1x1", "has dp=, but no stage has replicas under DDP or a tied parameter"),
        (Policy(zero="int8x128"), "1x1,1x1", "has zero=, but no stage is sharded"),
        (Policy(tp="int8x128"), "1x1,1x1", "has tp=, but no stage is on a grid"),
        (Policy(optimizer="int8x128"), "1x1,1x1", "moves no optimizer state"),
        ("int8x128", "1x1,1x1", "must be a Policy"),
    )
    run_processes(_refused, 2, cases)


def _sum_steps(policy, steps, folder=None, resume=0, stages="1x1,2x1"):
    """The gradients of some steps on the same batch and parameters, after those of a checkpoint."""
    gradients = []
    engine, batch = _engine(policy, stages)
    with engine:
        if resume:
            assert engine.load(folder) == resume
        for step in range(resume, steps):
            engine.step(batch)
            found = [
                parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                for parameter in engine.parameters()
            ]
            gradients.append(torch.cat([item.reshape(-1) for item in found]))
            for parameter in engine.parameters():
                parameter.grad = None
            if folder and step == 2:
                engine.save(folder, step=3)
    return gradients


def _feed_back(rank, folder):
    exact = _sum_steps(None, 1)[0]
    plain = _sum_steps(Policy(dp="int4x128-bf16"), 2)
    policy = Policy(dp="int4x128-bf16", feedback=("dp",), raw_steps=2)
    fed_back = _sum_steps(policy, 10, folder)
    resumed = _sum_steps(policy, 10, folder, resume=3)
    assert all(map(torch.equal, resumed, fed_back[3:]))
    if not rank:  # its stage has no replicas
        return
    assert torch.equal(plain[0], plain[1]) and torch.equal(fed_back[0], exact) and torch.equal(fed_back[1], exact)
    assert torch.equal(fed_back[2], plain[0])  # there is no error yet
    assert not torch.equal(fed_back[3], fed_back[2])
    mean = torch.stack(fed_back[2:]).mean(0)
    assert (mean - exact).norm() < (plain[0] - exact).norm() / 3


@pytest.mark.nightly
def test_errors_of_sums_are_fed_back_after_raw_steps_and_saved(tmp_path):
    run_processes(_feed_back, 3, str(tmp_path))


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle = nn.Embedding(200, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 200, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(torch.tanh(self.middle(self.embed(x)))), y)


def _sum_ties(rank, policies):
    """Bytes that this rank sends, and the gradient of the tied parameter, in the first and in the second step."""
    results = []
    x, y = torch.arange(2 * ROWS).remainder(200).reshape(2, ROWS)
    for policy in policies:
        torch.manual_seed(0)
        pipe = rs.Pipe(_Tied(), ["middle"], stages="1x1,2x1")
        options = {"topology": Topology.uniform((0, 1, 2), 1e8), "schedule": rs.one_f_one_b}
        with pipe.compile({"x": x, "y": y}, 1, compression=policy, **options) as engine:
            parameter = next(
                item for name, item in engine.named_parameters() if name in ("embed.weight", "head.weight")
            )
            steps = []
            for _ in range(2):
                with pytest.MonkeyPatch.context() as patch:
                    wire = _Wire(patch)
                    engine.step({"x": x, "y": y})
                steps.append((wire.pp, parameter.grad.clone()))
                parameter.grad = None
            results.append(steps)
    return results


@pytest.mark.nightly
def test_gradients_of_tied_parameters_are_encoded_and_stay_equal():
    policies = (None, Policy(dp="int8x128"), Policy(dp="int8x128", raw_steps=1))
    ranks = run_processes(_sum_ties, 3, policies)
    raw, encoded, late = ranks[0]
    fewer = 200 * (4 * WIDTH - 132)  # the embedding of 200 blocks goes to one rank, which passes it on
    assert raw[0][0] - encoded[0][0] == fewer and late[0][0] == raw[0][0] and late[1][0] == encoded[1][0]
    for policy in range(3):
        for step in range(2):
            one, *others = (ranks[rank][policy][step][1] for rank in range(3))
            assert all(torch.equal(one, other) for other in others)
    exact = raw[0][1]
    assert torch.equal(late[0][1], exact)
    assert 1e-4 < float((encoded[0][1] - exact).norm() / exact.norm()) < 0.03


def _feed_back_scatters(rank, folder):
    stages = [rs.Placement(), rs.Placement(dp=2, wrap=rs.fsdp)]
    exact = _sum_steps(None, 1, stages=stages)[0]
    plain = _sum_steps(Policy(zero=(None, "int4x128-bf16")), 2, stages=stages)
    policy = Policy(zero=(None, "int4x128-bf16"), feedback=("zero",))
    fed_back = _sum_steps(policy, 8, folder, stages=stages)
    resumed = _sum_steps(policy, 8, folder, resume=3, stages=stages)
    assert all(map(torch.equal, resumed, fed_back[3:]))
    if not rank:  # its stage is not sharded
        return
    assert torch.equal(plain[0], plain[1]) and torch.equal(fed_back[0], plain[0])
    assert (torch.stack(fed_back).mean(0) - exact).norm() < (plain[0] - exact).norm() / 3


@pytest.mark.nightly
def test_errors_of_reduce_scatters_are_fed_back_and_saved(tmp_path):
    run_processes(_feed_back_scatters, 3, str(tmp_path))
