"""Steps that compute what has arrived: results of the planned order, whatever the times of messages."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reshard import Layout, Mesh
from reshard.errors import ArgumentError, ReshardError
from reshard.scheduler import (
    Edge,
    Pipeline,
    Stage,
    StageOutput,
    auto_schedule,
    interleaved_zero_bubble,
    one_f_one_b,
    zb_h1,
)
from reshard.scheduler.ir.actions import Action, Kind
from reshard.scheduler.ir.communication import add_transfers
from reshard.scheduler.ir.schedule import in_flight_change
from reshard.scheduler.ir.text import parse_action
from reshard.scheduler.runtime.engine_arguments import check_order
from reshard.scheduler.runtime.gradient_passes import GradientPasses
from reshard.scheduler.runtime.rank_actions import compile_actions
from reshard.scheduler.runtime.ready_order import ReadyPlan, ReadyQueue
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.sharding.tensor_spec import TensorSpec
from reshard.testing.processes import run_processes

NUM, ROWS, WIDTH = 6, 4, 8
CHAIN = ((0, 1), (1, 2), (2, 3))
SKIPS = (*CHAIN, (0, 3))


class Block(nn.Module):
    """A stage with random numbers, a buffer, and a parameter of both passes of a split backward if ``is_tied``."""

    def __init__(self, stage, pipeline, width, pause=None, is_tied=False):
        super().__init__()
        torch.manual_seed(stage)
        small = min(width, 16)
        self.stage, self.outputs, self.pause, self.log = stage, pipeline.outputs[stage], pause, []
        self.shape, self.is_tied = (-1, small), is_tied
        self.layers = nn.Sequential(nn.Linear(small, small), nn.BatchNorm1d(small), nn.Dropout(0.5), nn.Tanh())
        self.tied = nn.Parameter(torch.randn(small, small))

    def forward(self, **inputs):
        self.rest("F")
        x = sum(inputs[name] for name in sorted(inputs))
        x = Pause.apply(x, self.rest) if x.requires_grad else x
        y = self.layers(x.reshape(self.shape))
        if self.is_tied:
            y = nn.functional.linear(y, self.tied) + self.tied[torch.arange(len(y)) % len(self.tied)]
        y = y.reshape(x.shape)
        loss = None if self.outputs else (y**2).mean()
        return StageOutput({f"from{self.stage}to{other}": y for other in self.outputs}, loss)

    def rest(self, what):
        self.log.append(what)
        if self.pause is not None:
            self.pause(what)


class Pause(torch.autograd.Function):
    """Calls a function in the backward."""

    @staticmethod
    def forward(ctx, x, rest):
        ctx.rest = rest
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.rest("B")
        return gradient.clone(), None


def make_pipeline(ranks, edges, width=WIDTH):
    meshes = [Mesh([rank] if isinstance(rank, int) else rank) for rank in ranks]
    stages = tuple(Stage(1.0, 1.0, 1.0, activation_bytes=10, mesh=mesh) for mesh in meshes)

    def spec(a, b):
        return TensorSpec((ROWS, width), "float32", *(Layout(meshes[s], "R R") for s in (a, b)), f"from{a}to{b}")

    return Pipeline(stages, tuple(Edge(a, b, 0.1, 0.1, tensors=(spec(a, b),)) for a, b in edges))


def looped(pipeline, num):
    return interleaved_zero_bubble(pipeline, num, 2)


def in_v(pipeline, num):
    return auto_schedule(pipeline, num, pp_rank_of_stage=[0, 1, 1, 0])


def in_two_orders(pipeline, num):
    """Rank 1 computes the microbatches in another order than rank 0, whose forwards come first."""
    swapped = ("1F1 1F0 1B1 1B0 1F3 1F2 1B3 1B2 1F5 1F4 1B5 1B4", "0B1 0B0 0B3 0B2 0B5 0B4")
    return make_schedule(pipeline, f"0F0 0F1 0F2 0F3 0F4 0F5 {swapped[1]}\n{swapped[0]}", num)


#: Name -> ranks of the stages, edges, width of the tensors between stages, builder.
CASES = {
    "1F1B on two rows": ([0, 1], ((0, 1),), WIDTH, one_f_one_b),
    "zero bubble with skips": ([0, 1, 2, 3], SKIPS, WIDTH, zb_h1),
    "two orders": ([0, 1], ((0, 1),), WIDTH, in_two_orders),
    "looped": ([0, 1, 0, 1], CHAIN, WIDTH, looped),
    "V, messages of 1.3 MB": ([0, 1, 1, 0], SKIPS, 80_000, in_v),
}


def run_cases(rank, names):
    """Results of a rank in the planned order without pauses, and in ready order with two series of pauses."""
    kinds = ("planned", None), ("ready", 1), ("ready", 2)
    return {name: [run_case(rank, name, *kind) for kind in kinds] for name in names if rank in CASES[name][0]}


def run_case(rank, name, order, seed):
    """Losses, gradients and buffers of two steps of a rank."""
    ranks, edges, width, build = CASES[name]
    pipeline = make_pipeline(ranks, edges, width)
    pauses = random.Random(f"{seed} {rank}")
    pause = None if seed is None else lambda _: time.sleep(pauses.choice((0.0, 0.0, 0.03)))
    torch.set_num_threads(1)
    modules = {s: Block(s, pipeline, width, pause, is_tied=s == 1) for s, its in enumerate(ranks) if its == rank}
    torch.manual_seed(9)
    feed = {0: [{"x": torch.randn(ROWS, width)} for _ in range(NUM)]}
    with ScheduleEngine(build(pipeline, NUM), pipeline, modules, order=order, timeout_seconds=60) as engine:
        steps = [engine.step(feed) for _ in range(2)]
    state = {s: [p.grad for p in m.parameters()] + [*m.buffers()] for s, m in modules.items()}
    return [(step.losses, step.loss) for step in steps], state


@pytest.mark.integration
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_results_have_the_bits_of_the_planned_order_whatever_the_times(num_ranks):
    names = [name for name, (ranks, *_) in CASES.items() if len(set(ranks)) == num_ranks]
    for results in run_processes(run_cases, num_ranks, names):
        for name, ((losses, state), *others) in results.items():
            for their_losses, their_state in others:
                assert their_losses == losses, name
                for stage, tensors in state.items():
                    for one, other in zip(tensors, their_state[stage], strict=True):
                        assert (one is None and other is None) or one.equal(other), (name, stage)


def make_schedule(pipeline, text, num):
    actions = [[parse_action(word) for word in line.split()] for line in text.splitlines()]
    return add_transfers("by hand", actions, pipeline, [stage.mesh.ranks[0] for stage in pipeline.stages], num)


def run_late(rank):
    """The order in which rank 1 computes and the timeline, if forward 1 of rank 0 waits for backward 0 of rank 1."""
    pipeline, flag, count = make_pipeline([0, 1], ((0, 1),)), torch.zeros(1), iter(range(NUM))

    def wait_for_backward(what):
        if what == "F" and next(count) == 1:
            dist.recv(flag, 1)

    def tell(what):
        if what == "B" and module.log.count("B") == 1:
            dist.send(flag, 0)

    module = Block(rank, pipeline, WIDTH, tell if rank else wait_for_backward)
    feed = {0: [{"x": torch.randn(ROWS, WIDTH)} for _ in range(3)]}
    schedule = make_schedule(pipeline, "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2", 3)
    with ScheduleEngine(schedule, pipeline, {rank: module}, order="ready", timeout_seconds=60) as engine:
        engine.step(feed)
        spans = engine.timeline().spans
    return "".join(module.log), [str(span.action) for span in spans if span.pp_rank == 1]


def test_rank_computes_a_backward_while_a_forward_is_late():
    log, shown = run_processes(run_late, 2)[1]
    assert log.startswith("FBF") and shown[:3] == ["1F0", "1B0", "1F1"]


class Wrong(Block):
    """A stage whose backward draws random numbers, changes a buffer, or fails."""

    def forward(self, **inputs):
        x = nn.functional.relu(sum(inputs.values()) + self.tied.sum())
        does = {"draws": lambda: torch.rand(1), "counts": lambda: self.layers[1].running_mean.add_(1)}
        do = does.get(self.kind, self.fail)
        self.pause = lambda what: do() if what == "B" else None
        return StageOutput({"from0to1": Pause.apply(x, self.rest)}) if self.outputs else StageOutput(loss=x.sum())

    def fail(self):
        if self.log.count("B") == 2:
            raise ValueError("injected fault")


def run_wrong(rank):
    """The errors of this rank in engines or steps that must fail."""
    chain, errors = make_pipeline([0, 1, 2], CHAIN[:2]), []
    wide, plan = make_pipeline([0, [1, 2]], CHAIN[:1]), "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    feed = {0: [{"x": torch.randn(ROWS, WIDTH)} for _ in range(NUM)]}
    for kind, order in (
        ("fast", "fast"),
        ("differ", "ready" if rank else "planned"),
        ("draws", "ready"),
        ("counts", "ready"),
        ("fails", "ready"),
    ):
        module = (Wrong if rank == 0 and kind in ("draws", "counts", "fails") else Block)(rank, chain, WIDTH)
        module.kind = kind
        begun = time.monotonic()
        try:
            with ScheduleEngine(
                one_f_one_b(chain, NUM), chain, {rank: module}, order=order, timeout_seconds=60
            ) as engine:
                engine.step(feed)
        except (ReshardError, ValueError) as error:
            errors.append(str(error))
        assert time.monotonic() - begun < 40
    try:
        stage = min(rank, 1)
        ScheduleEngine(make_schedule(wide, plan, 2), wide, {stage: Block(stage, wide, WIDTH)}, order="ready")
    except ReshardError as error:
        errors.append(str(error))
    return errors


def test_what_ready_order_cannot_run_is_an_error_on_all_ranks():
    for fast, differ, draws, counts, fails, wide in run_processes(run_wrong, 3):
        assert "order is 'fast'; it must be 'planned' or 'ready'" in fast
        assert "ranks disagree on order: ranks 1-2 pass ready, rank 0 passes planned" in differ
        assert "stage 0 draws random numbers in the backward of microbatch 0" in draws
        assert "stage 0 changes its buffer 'layers.1.running_mean' in the backward of microbatch 0" in counts
        assert "injected fault" in fails
        assert 'order="ready" needs each stage on one rank, but stage 1 is on ranks 1-2: messages may' in wide


def test_gpus_are_refused():
    with pytest.raises(ArgumentError, match="stages on CPUs, not on cuda: there, all pp ranks must post"):
        check_order("ready", make_pipeline([0, 1], CHAIN[:1]), "cuda")


def run_queue(plan, has_arrived, may_move):
    """The order in which a rank computes, and its largest memory in use, if it posts all receives at once."""
    made, in_use, peak, order = set(), 0, 0, []

    def is_posted(port):
        return not port.is_local or port.slot in made

    def is_there(port):
        return port.slot in made if port.is_local else has_arrived()

    for turn in ReadyQueue(plan, is_posted, is_there, lambda _: may_move, lambda _: None):
        item = plan.computations[turn.place]
        in_use += in_flight_change(item.action.kind) * (7, 40, 19, 11)[item.action.stage]
        peak, order = max(peak, in_use), [*order, turn.place]
        made |= {port.slot for port in item.outputs if port.is_local}
    return order, peak


@pytest.mark.parametrize("name", CASES)
def test_memory_is_within_the_peak_of_the_plan_whatever_arrives_first(name):
    ranks, edges, _, build = CASES[name]
    pipeline = make_pipeline(ranks, edges)
    stages = tuple(replace(stage, activation_bytes=(7, 40, 19, 11)[s]) for s, stage in enumerate(pipeline.stages))
    pipeline = replace(pipeline, stages=stages)
    schedule, rng, orders = build(pipeline, NUM), random.Random(5), set()
    for rank, peak in enumerate(schedule.peak_bytes(pipeline)):
        runs = {s: SimpleNamespace(module=nn.Linear(1, 1)) for s, its in enumerate(ranks) if its == rank}
        actions = compile_actions(schedule, [pipeline], [None], [0] * NUM, rank, rank, runs)
        plan = ReadyPlan.of(actions, schedule, pipeline)
        for _ in range(30):
            order, used = run_queue(plan, lambda: rng.random() < 0.3, may_move=True)
            assert used <= peak and sorted(order) == list(range(len(plan.computations)))
            kinds = [plan.computations[index].action.kind for index in order]
            assert [i for i, kind in zip(order, kinds, strict=True) if kind == "F"] == [
                i for i, item in enumerate(plan.computations) if item.action.kind == "F"
            ]
            orders.add((rank, *order))
    assert len(orders) > len(set(ranks)) or name.startswith("1F1B")  # which has no memory for other orders


def test_passes_that_add_to_one_gradient_keep_their_order():
    module = nn.Linear(2, 2)
    passes = GradientPasses({0: SimpleNamespace(module=module)})

    def run(kind, name, is_moved=False):
        with passes.watch(Action(kind, 0, 3), is_moved):
            parameter = getattr(module, name)
            parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad.add_(1)

    assert not passes.may_move(0)
    run(Kind.I, "bias")
    run(Kind.W, "weight")
    assert passes.may_move(0)
    run(Kind.W, "weight", is_moved=True)
    with pytest.raises(ArgumentError, match="stage 0 add to the gradient of 'weight' since microbatch 3"):
        run(Kind.I, "weight")
    assert not passes.may_move(0)
    passes.begin()
    run(Kind.I, "weight")


def test_stages_that_share_a_parameter_keep_the_order_of_their_passes():
    pipeline = make_pipeline([0, 1, 1, 0], CHAIN)
    schedule, shared = in_v(pipeline, NUM), nn.Linear(1, 1)
    for modules in ((shared, nn.Linear(1, 1)), (shared, shared)):
        runs = {stage: SimpleNamespace(module=module) for stage, module in zip((0, 3), modules, strict=True)}
        plan = ReadyPlan.of(compile_actions(schedule, [pipeline], [None], [0] * NUM, 0, 0, runs), schedule, pipeline)
        stages = [{plan.computations[i].action.stage for i in queue.indices} for queue in plan.queues]
        assert stages.count({0, 3}) == (3 if plan.shared else 1) and plan.shared == (
            {0, 3} if modules[1] is shared else set()
        )
