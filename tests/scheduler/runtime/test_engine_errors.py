"""If one rank fails in a step, all ranks soon raise the same error."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace

import pytest
import torch

from reshard import Layout, Mesh, Topology
from reshard.errors import ArgumentError, DisagreementError, ReshardError, ScheduleError
from reshard.scheduler import Edge, Pipeline, Stage, StageOutput, gpipe, one_f_one_b
from reshard.scheduler.gradients.tied_params import TiedParameter
from reshard.scheduler.ir.actions import Action, Kind
from reshard.scheduler.ir.schedule import Schedule
from reshard.scheduler.runtime import schedule_engine as engine_module
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.sharding.tensor_spec import TensorSpec
from reshard.testing.processes import LaunchError, run_processes

NUM_MICROBATCHES = 4


def _raise(gradient):
    raise ValueError("the last backward is bad")


class FaultyStage(torch.nn.Module):
    """A linear stage with a fault. Most faults occur in the third forward, "late" in the last backward."""

    def __init__(self, stage, fault):
        super().__init__()
        self.layer, self.stage, self.fault, self.calls = torch.nn.Linear(3, 3), stage, fault, 0

    def forward(self, x):
        self.calls += 1
        y = self.layer(x)
        if self.fault == "late" and self.calls == NUM_MICROBATCHES:
            y.register_hook(_raise)
        if self.calls == 3:
            if self.fault == "sometimes":
                return StageOutput({"x": y}, y.sum())
            if self.fault == "raises":
                raise ValueError("the third is bad")
            if self.fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "shape":
                y = y[:1]
            if self.fault == "detached":
                y = y.detach()
            if self.fault == "no loss":
                return {"Loss": y.sum()}
            if self.fault == "name":
                return {"z": y}
            if self.fault == "dtype":
                y = y.double()
            if self.fault == "sparse":
                y = y.to_sparse()
        return {"x": y} if self.stage < 2 else StageOutput(loss=y.sum() * (1j if self.fault == "complex loss" else 1))


def make_pipeline(num=3):
    meshes = [Mesh([rank]) for rank in range(num)]
    edges = [
        Edge(s, s + 1, 1, 1, tensors=(TensorSpec((2, 3), "float32", Layout(meshes[s]), Layout(meshes[s + 1]), "x"),))
        for s in range(num - 1)
    ]
    return Pipeline(tuple(Stage(1, 1, 1, mesh=mesh) for mesh in meshes), tuple(edges))


def run_rank(rank, fault):
    """Run a step with a fault on one rank. Returns the class, text and seconds of the error; None without an error."""
    faulty_rank = 2 if fault in ("no loss", "complex loss") else 1
    pipeline, build, num = make_pipeline(), one_f_one_b, NUM_MICROBATCHES
    modules = {rank: FaultyStage(rank, fault if rank == faulty_rank else None)}
    ties = ()
    start = time.monotonic()
    try:
        if rank == 1:
            if fault == "schedule":
                build = gpipe
            if fault == "count":
                num += 1
            if fault == "no schedule":
                build = lambda pipeline, num: [one_f_one_b(pipeline, num)]  # noqa: E731
            if fault == "modules":
                modules = {}
            if fault == "modules are None":
                modules = None
            if fault == "no module":
                modules = {1: "layer"}
            if fault == "tie":
                ties = (TiedParameter({0: "layer.weight", 1: "layer.wait"}, (3, 3)),)
            if fault == "mixed keys":
                modules = {"1": modules[1], 1: modules[1]}
        elif fault == "tie":
            ties = (TiedParameter({0: "layer.weight", 1: "layer.wait"}, (3, 3)),)
        if fault == "tied twice":
            ties = (
                TiedParameter({0: "layer.weight", 1: "layer.weight"}, (3, 3)),
                TiedParameter({1: "layer.weight", 2: "layer.bias"}, (3,)),
            )
        if fault == "tie elsewhere":
            layouts = {1: Layout(Mesh([2]))}
            ties = (TiedParameter({0: "layer.weight", 1: "layer.weight"}, (3, 3), layouts=layouts),)
        if fault == "late":  # rank 2 then waits for the tied parameter of rank 0
            ties = (TiedParameter({0: "layer.weight", 2: "layer.weight"}, (3, 3)),)
        engine = ScheduleEngine(
            build(pipeline, num),
            pipeline,
            modules,
            ties=ties,
            topology="here" if (fault, rank) == ("no topology", 1) else None,
            timeout_seconds=-1 if (fault, rank) == ("bad timeout", 1) else 60,
        )
        feed = {0: [{"x": torch.ones(2, 3)}] * NUM_MICROBATCHES}
        if fault == "feed" and rank == 0:
            feed[0] = feed[0][1:]
        if fault == "two inputs" and rank == 1:
            feed = {1: [{"x": torch.ones(2, 3)}] * NUM_MICROBATCHES}
        if fault == "wrong input name" and rank == 0:
            feed = {0: [{"x": torch.ones(2, 3)}, {"y": torch.ones(2, 3)}, *feed[0][2:]]}
        weights = {"loss weights": ["a", 1, 1, 1], "weights are a string": "1111"}.get(fault) if rank == 1 else None
        start = time.monotonic()
        try:
            engine.step(feed, loss_weights=weights)
        except Exception:
            with pytest.raises(ArgumentError, match="this engine failed"):
                engine.step(feed)
            raise
        return None
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start


#: Class and text of the error that each fault causes.
FAULTS = {
    "raises": ("RemoteError", "rank 1 in 1F2, microbatch 2 of stage 1: ValueError: the third is bad"),
    "late": ("RemoteError", "rank 1 in 1B3, microbatch 3 of stage 1: ValueError: the last backward is bad"),
    "shape": (
        "ArgumentError",
        r"stage 1 gives 'x' as float32 \[1, 3\]; the edge to stage 2 says float32 \[2, 3\] on rank 1",
    ),
    "dtype": (
        "ArgumentError",
        r"stage 1 gives 'x' as float64 \[2, 3\]; the edge to stage 2 says float32 \[2, 3\] on rank 1",
    ),
    "name": ("ArgumentError", r"stage 1 returns \['z'\], not 'x', which stage 2 needs"),
    "detached": ("ArgumentError", r"stage 1 gives 'x' without a gradient: was it detached\?"),
    "no loss": ("ArgumentError", r"returns the tensors \['Loss'\] without a loss"),
    "sometimes": ("ArgumentError", "stage 1 gives a loss for some microbatches and none for others, see microbatch 2"),
    "feed": ("ArgumentError", "stage 0 is fed 3 microbatches; it needs 4"),
    "two inputs": ("ArgumentError", r"stage 1 receives \['x'\] from another stage and from feed"),
    "schedule": ("DisagreementError", "ranks disagree on the schedule: ranks 0,2 pass 1f1b, rank 1 passes gpipe"),
    "count": ("DisagreementError", "number of microbatches: ranks 0,2 pass 4, rank 1 passes 5"),
    "modules": ("ArgumentError", r"rank 1 computes stages \[1\], but has modules for \[\]"),
    "mixed keys": ("ArgumentError", r"rank 1 computes stages \[1\], but has modules for \['1', 1\]"),
    "sparse": ("ArgumentError", "'x' of stage 1: rank 1 passes a sparse or quantized tensor"),
    "complex loss": ("ArgumentError", "stage 2 gives a loss of complex64; it must be real"),
    "wrong input name": ("ArgumentError", r"stage 0 cannot be called with \['y'\]"),
    "tied twice": ("ArgumentError", "'layer.weight' of stage 1 is in two ties"),
    "tie elsewhere": ("ArgumentError", "the layout of 'layer.weight' in a tie must be on the ranks of stage 1"),
    "no topology": ("ArgumentError", "rank 1: topology must be a Topology, not str"),
    "weights are a string": ("ArgumentError", "loss_weights must be 4 numbers, not '1111'"),
    "modules are None": ("ArgumentError", "rank 1: modules must be {stage: module}, not NoneType"),
    "bad timeout": ("ArgumentError", "rank 1: timeout_seconds is -1"),
    "loss weights": ("ArgumentError", r"loss_weights must be 4 finite numbers, not \['a', 1, 1, 1\]|must be 4 numbers"),
    "no module": ("ArgumentError", "stage 1 needs a torch.nn.Module, not str"),
    "tie": ("ArgumentError", "stage 1 has no parameter 'layer.wait', which a tie names"),
}


def run_all(rank):
    """Run all faults in turn. After each one but the last, the ranks must be able to create a new engine."""
    found = [run_rank(rank, fault) for fault in (*FAULTS, None, "no schedule")]
    time.sleep(0.5 * (rank == 1))  # otherwise the other ranks report that rank 1 has exited
    return found


@pytest.mark.nightly
def test_error_of_one_rank_is_raised_on_all():
    results = run_processes(run_all, 3, timeout_seconds=240)
    for rank, found in enumerate(results):
        assert found[-2] is None  # the run without a fault
        name, error, seconds = found[-1]
        assert (name, seconds < 20) == ("ArgumentError" if rank == 1 else "DisagreementError", True)
        assert "schedule must be a Schedule, not list" in error
        for (fault, (kind, text)), result in zip(FAULTS.items(), found, strict=False):
            assert result is not None, fault
            name, error, seconds = result
            assert seconds < 20
            if fault in ("raises", "late") and rank == 1:
                assert name == "ValueError"
                assert error in text
                continue
            assert name == kind, error
            assert re.search(text, error), error


def test_dead_rank_is_named():
    with pytest.raises(LaunchError) as caught:
        run_processes(run_rank, 3, "dies", timeout_seconds=60, grace_seconds=15)
    assert {failure.rank for failure in caught.value.failures} == {1}
    for rank in (0, 2):
        kind, error, seconds = caught.value.results[rank]
        assert kind == "RemoteError"
        assert "rank 1" in error
        assert seconds < 12


def make_invalid_engines(rank, cases):
    errors = []
    for pipeline, schedule in cases:
        with pytest.raises(ReshardError) as caught:
            ScheduleEngine(schedule, pipeline, {}, timeout_seconds=5)
        errors.append((type(caught.value), str(caught.value)))
    return errors


def test_pipelines_that_cannot_run_are_rejected():
    pipeline = make_pipeline(2)
    schedule = one_f_one_b(pipeline, 2)
    no_mesh = replace(pipeline, stages=(pipeline.stages[0], replace(pipeline.stages[1], mesh=None)))
    no_tensors = replace(pipeline, edges=(replace(pipeline.edges[0], tensors=()),))
    same = Mesh([0, 1])
    stages = tuple(Stage(1, 1, 1, mesh=same) for _ in range(2))
    shared_rank = Pipeline(
        stages, (Edge(0, 1, 1, 1, tensors=(TensorSpec((2,), "int8", Layout(same), Layout(same), "x"),)),)
    )
    short = replace(schedule, rank_actions=(schedule.rank_actions[0], schedule.rank_actions[1][:-1]))
    cases = {
        "stage 1 has no mesh": (ArgumentError, no_mesh, schedule),
        "edge 0 -> 1 has no tensors": (ArgumentError, no_tensors, schedule),
        "rank 0 is on pp ranks 0 and 1": (ArgumentError, shared_rank, schedule),
        "1SEND_B1>0 occurs 0 times, not 1": (ScheduleError, pipeline, short),
    }
    for found in run_processes(make_invalid_engines, 2, [case[1:] for case in cases.values()]):
        for (kind, error), (text, (expected, *_)) in zip(found, cases.items(), strict=True):
            assert kind is expected and text in error


class Reentrant(torch.nn.Module):
    """A stage whose forward calls ``step`` of its own engine."""

    def forward(self, x):
        self.engine.step({})


def run_reentrant(rank):
    pipeline = Pipeline((Stage(1, 1, 1, mesh=Mesh([0])),), ())
    module = Reentrant()
    with ScheduleEngine(one_f_one_b(pipeline, 1), pipeline, {0: module}, timeout_seconds=20) as engine:
        module.engine = engine
        with pytest.raises(ArgumentError, match="already in a step") as caught:
            engine.step({0: [{"x": torch.ones(1)}]})
    with pytest.raises(ArgumentError, match="this engine is closed"):
        engine.step({})
    return caught.value.__notes__


def test_step_inside_a_step_is_rejected():
    assert run_processes(run_reentrant, 1) == [["in 0F0, microbatch 0 of stage 0 of the schedule '1f1b'"]]


def run_on_topologies(rank):
    pipeline, used = Pipeline((Stage(1, 1, 1, mesh=Mesh([0])),), ()), []

    def record_topology(pipeline, pp_ranks, topology, strategy, **options):
        used.append(topology)
        return []

    engine_module.plan_channels = record_topology
    for given in (None, Topology.uniform((0,), 1e9)):
        ScheduleEngine(one_f_one_b(pipeline, 1), pipeline, {0: Reentrant()}, topology=given).close()
    return used


def test_given_topology_is_used():
    assert run_processes(run_on_topologies, 1) == [[Topology.from_hostnames(["here"]), Topology.uniform((0,), 1e9)]]


class Counter(torch.nn.Module):
    """Stage 0 increments a tensor in place and returns it. The tensor is a registered buffer or a plain attribute."""

    def __init__(self, stage, is_buffer):
        super().__init__()
        self.layer, self.stage = torch.nn.Linear(3, 3), stage
        if is_buffer:
            self.register_buffer("count", torch.zeros(2, 3))
        else:
            self.count = torch.zeros(2, 3)

    def forward(self, x, count=None):
        y = self.layer(x)
        if self.stage:
            return StageOutput(loss=y.sum() * 0 + count.mean())
        self.count += 1
        return {"x": y, "count": self.count}


def run_counter(rank, is_buffer, kind=None, signal_only=False):
    mesh = [Mesh([0]), Mesh([1])]
    x, count = (TensorSpec((2, 3), "float32", Layout(mesh[0]), Layout(mesh[1]), name) for name in ("x", "count"))
    edge = Edge(0, 1, 1, 1, tensors=(x, count), without_gradient={"count"})
    pipeline = Pipeline(tuple(Stage(1, 1, 1, mesh=item) for item in mesh), (edge,))
    module = (kind or Counter)(rank, is_buffer)
    engine = ScheduleEngine(gpipe(pipeline, 6), pipeline, {rank: module}, timeout_seconds=20, signal_only=signal_only)
    try:
        return engine.step({0: [{"x": torch.ones(2, 3)}] * 6}).losses
    except ArgumentError as error:
        return str(error)


def run_on_one_pp_rank(rank):
    mesh = Mesh([0])
    x, count = (TensorSpec((2, 3), "float32", Layout(mesh), Layout(mesh), name) for name in ("x", "count"))
    edge = Edge(0, 1, 1, 1, tensors=(x, count), without_gradient={"count"})
    pipeline = Pipeline((Stage(1, 1, 1, mesh=mesh),) * 2, (edge,))
    order = ["F0", "F1", "f0", "f1", "b0", "B0", "b1", "B1"]
    actions = tuple(Action(Kind(word[0].upper()), int(word[0].islower()), int(word[1])) for word in order)
    engine = ScheduleEngine(
        Schedule("one pp rank", (actions,), (0, 0), 2), pipeline, {s: Counter(s, False) for s in (0, 1)}
    )
    with pytest.raises(ArgumentError, match="stage 0 changed 'count' in place after returning it, so stage 1"):
        engine.step({0: [{"x": torch.ones(2, 3)}] * 2})
    shared = torch.nn.Linear(3, 3)
    modules = {0: torch.nn.Sequential(shared), 1: torch.nn.Sequential(shared)}
    with pytest.raises(ArgumentError, match="is the same Parameter as that of stage 0"):
        ScheduleEngine(
            Schedule("one pp rank", (actions,), (0, 0), 2),
            pipeline,
            modules,
            ties=[TiedParameter({0: "0.weight", 1: "0.weight"}, (3, 3))],
        )
    modules[1] = torch.nn.Sequential(torch.nn.Linear(3, 3).requires_grad_(False))
    with pytest.raises(DisagreementError, match=r"'0.weight' of stage 0 is trained, but '0.weight' of stage 1, which"):
        ScheduleEngine(
            Schedule("one pp rank", (actions,), (0, 0), 2),
            pipeline,
            modules,
            ties=[TiedParameter({0: "0.weight", 1: "0.weight"}, (3, 3))],
        )
    return True


def test_in_place_changes_are_found_between_stages_of_one_rank():
    assert run_processes(run_on_one_pp_rank, 1) == [True]


class InputChanger(Counter):
    """Stage 1 changes its input in place."""

    def forward(self, x, count=None):
        if self.stage:
            count += 1
        return super().forward(x, count)


def test_in_place_changes_of_sent_tensors_are_found_between_ranks():
    _, losses = run_processes(run_counter, 2, True, timeout_seconds=60)
    assert losses == (1, 2, 3, 4, 5, 6)
    _, losses = run_processes(run_counter, 2, True, None, True, timeout_seconds=60)
    assert losses == (0,) * 6  # no data is sent, so stage 1 computes on zeros
    error, _ = run_processes(run_counter, 2, False, timeout_seconds=60)
    assert "stage 0 changed 'count' in place after returning it, so stage 1" in error
    _, error = run_processes(run_counter, 2, True, InputChanger, timeout_seconds=60)
    assert "stage 1 changed its input 'count' in place, but the sending stage" in error
