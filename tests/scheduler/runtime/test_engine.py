"""The engine on real processes: losses and gradients equal those of a single process."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from reshard import Layout, Mesh, Topology
from reshard.api.transfers.queued_transfers import QueuedTransfers
from reshard.scheduler import Edge, Pipeline, Stage, StageOutput, auto_schedule, gpipe, one_f_one_b, zb_h1
from reshard.scheduler.passes.transfer_overlap import block_transfers, defer_recvs
from reshard.scheduler.runtime.p2p import PendingTransfer, plan_channels
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.scheduler.schedules.classic import eager_1f1b
from reshard.sharding.tensor_spec import TensorSpec
from reshard.testing.processes import run_processes

BATCH, WIDTH, NUM = 4, 6, 5


class Skip(torch.nn.Module):
    """Stage 0. Returns the main output, a skip tensor used by both later stages, and a mask without gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return {"h": h, "skip": self.b(h), "mask": h > 0}


class Middle(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.norm = torch.nn.Linear(WIDTH + 3, WIDTH), torch.nn.LayerNorm(WIDTH)

    def forward(self, h, skip):
        return self.norm(self.c(torch.cat([h, skip], 1)).relu())


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.d = torch.nn.Linear(WIDTH + 3, 1)

    def forward(self, g, skip, mask, target):
        y = self.d(torch.cat([g * mask, skip * skip], 1))
        return StageOutput(loss=((y - target) ** 2).mean())


def make_modules(dtype):
    torch.manual_seed(0)
    return [module.to(dtype) for module in (Skip(), Middle(), Head())]


def make_pipeline(ranks, dtype="float64", batch=BATCH):
    meshes = [Mesh([rank] if isinstance(rank, int) else rank) for rank in ranks]

    def spec(name, src, dst, width, kind=dtype):
        return TensorSpec((batch, width), kind, Layout(meshes[src], "S0 R"), Layout(meshes[dst], "S0 R"), name)

    stages = [Stage(1.0, 1.0, 1.0, mesh=mesh) for mesh in meshes]
    edges = [
        Edge(0, 1, 0.5, 0.5, tensors=(spec("h", 0, 1, WIDTH), spec("skip", 0, 1, 3))),
        Edge(0, 2, 0.5, 0.5, tensors=(spec("skip", 0, 2, 3), spec("mask", 0, 2, WIDTH, "bool"))),
        Edge(1, 2, 0.5, 0.5, tensors=(spec("g", 1, 2, WIDTH),)),
    ]
    return Pipeline(tuple(stages), tuple(edges))


def make_data(dtype, sizes):
    torch.manual_seed(1)
    return [(torch.randn(n, WIDTH, dtype=dtype), torch.randn(n, 1, dtype=dtype)) for n in sizes]


def single_process(dtype, sizes):
    modules = make_modules(dtype)
    losses = []
    for x, target in make_data(dtype, sizes):
        first = modules[0](x)
        g = modules[1](first["h"], first["skip"])
        loss = modules[2](g, first["skip"], first["mask"], target).loss
        losses.append(float(loss.detach()))
        (loss * len(x) / sum(sizes)).backward()
    return losses, [{n: p.grad for n, p in module.named_parameters()} for module in modules]


def run_rank(rank, make, ranks, dtype, sizes, num_steps):
    torch_dtype = getattr(torch, dtype)
    pipeline, last = make_pipeline(ranks, dtype), make_pipeline(ranks, dtype, sizes[-1])
    schedule = make(pipeline, len(sizes))
    mine = [s for s, its in enumerate(ranks) if its == rank]
    modules = {s: make_modules(torch_dtype)[s] for s in mine}
    data = make_data(torch_dtype, sizes)
    feed = {0: [{"x": x} for x, _ in data], 2: [{"target": y} for _, y in data]}
    out = []
    with ScheduleEngine(schedule, pipeline, modules, last_pipeline=last, timeout_seconds=30) as engine:
        for number in range(num_steps):
            for module in modules.values():
                module.zero_grad()
            # without loss_weights, the engine derives the last microbatch's weight from its tensors
            step = engine.step(feed, loss_weights=[n / sum(sizes) for n in sizes] if number else None)
            grads = {
                s: {n: p.grad.numpy().copy() for n, p in module.named_parameters()} for s, module in modules.items()
            }
            out.append((step.losses, grads))
            assert 0 <= step.waited_seconds < step.seconds
        timeline = engine.timeline()
    return out, timeline


def interleaved_pp_ranks(pipeline, num):
    return auto_schedule(pipeline, num, pp_rank_of_stage=[0, 1, 0])


BUILDERS = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "eager_1f1b": eager_1f1b,
    "zb_h1": zb_h1,
    "auto_schedule": auto_schedule,
    "blocking": lambda p, m: block_transfers(one_f_one_b(p, m), p),
    "at_consumer": lambda p, m: defer_recvs(one_f_one_b(p, m), p),
    "interleaved": interleaved_pp_ranks,
}


def run_cases(rank, cases):
    return [run_rank(rank, *case) for case in cases]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [[0, 1, 2], [0, 1, 0]])
def test_losses_and_gradients_equal_a_single_process(ranks):
    sizes = [BATCH] * (NUM - 1) + [2]
    names = [name for name in BUILDERS if (name == "interleaved") == (ranks == [0, 1, 0])]
    kinds = [(name, "float64", 1e-10) for name in names]
    if "auto_schedule" in names:
        kinds.append(("auto_schedule", "float32", 1e-5))
    cases = [(BUILDERS[name], ranks, dtype, sizes, 2) for name, dtype, _ in kinds]
    results = run_processes(run_cases, max(ranks) + 1, cases)
    for (name, dtype, rtol), by_rank in zip(kinds, zip(*results, strict=True), strict=True):
        losses, grads = single_process(getattr(torch, dtype), sizes)
        for rank, (steps, _) in enumerate(by_rank):
            for found, by_stage in steps:
                if rank == ranks[2]:
                    assert found == pytest.approx(losses, rel=rtol), name
                for stage, named in by_stage.items():
                    for key, grad in named.items():
                        wanted = grads[stage][key]
                        torch.testing.assert_close(torch.from_numpy(grad), wanted, rtol=rtol, atol=rtol * 1e-2)
        timeline = by_rank[0][1]
        assert timeline.makespan_seconds > 0
        assert {span.pp_rank for span in timeline.spans} == set(ranks), name


def count_waits_for_sends(rank):
    """How often a step wakes the threads of the Movers that only send, without repetitions."""
    counts, hand_over = Counter(), QueuedTransfers._hand_over

    def counted(self, *args):
        if self._posted_program.only_sends:
            counts[id(self)] += 1
        return hand_over(self, *args)

    QueuedTransfers._hand_over = counted
    run_rank(rank, one_f_one_b, [0, 1, 2], "float64", [BATCH] * NUM, 1)
    return set(counts.values())


def test_one_wait_ends_all_sends_of_a_channel():
    assert run_processes(count_waits_for_sends, 3) == [{1}] * 3


def test_channels_within_a_rank_need_no_plan():
    mesh = Mesh([0, 1])
    whole, half = Layout(mesh), Layout(mesh, "S0")
    stays, also = (TensorSpec((4,), "float32", half, half, name) for name in "xz")
    goes = TensorSpec((4,), "float32", half, whole, "y")
    edges = (Edge(0, 1, tensors=(stays,)), Edge(1, 2, tensors=(goes,), without_gradient={"y"}))
    pipeline = Pipeline((Stage(1, 1, 1, mesh=mesh),) * 3, (*edges, Edge(0, 2, tensors=(stays, also))))
    mixed = Pipeline(pipeline.stages, (Edge(0, 1, tensors=(stays, goes)),))
    for of, pp_ranks, without in (
        (pipeline, (0, 0, 0), {(0, 1), (1, 0), (2, 1), (0, 2), (2, 0)}),
        (pipeline, (0, 1, 0), {(2, 1), (0, 2), (2, 0)}),
        (mixed, (0, 0, 0), set()),
    ):
        plans = plan_channels(of, pp_ranks, Topology((0, 0)), None)
        assert {(plan.channel.sender, plan.channel.receiver) for plan in plans if plan.plan is None} == without
    assert PendingTransfer(plans[0].channel, {"x": torch.ones(4)}).is_done()
