"""Gradient sums over replicas that start while the rank still computes backwards of its other stages."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reshard import Layout, Mesh
from reshard.compression import Policy
from reshard.errors import DisagreementError, ReshardError
from reshard.scheduler import Edge, Pipeline, Stage, StageOutput, auto_schedule, dualpipe_v, interleaved_1f1b, zb_v
from reshard.scheduler.gradients.replica_sync import ReplicaSync
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.sharding.tensor_spec import TensorSpec
from reshard.testing.processes import LaunchError, run_processes
from tests.support.nccl.streams import BlockingStream, use_streams

NUM, WIDTH, ROWS = 4, 6, 12
LARGE = 2**15  # samples of a microbatch: a message is larger than what sockets buffer


def in_a_loop(pipeline, num):
    return interleaved_1f1b(pipeline, num, len({stage.mesh.ranks for stage in pipeline.stages}))


def in_a_v(pipeline, num):
    return auto_schedule(pipeline, num, pp_rank_of_stage=[0, 1, 1, 0])


#: Name of a case -> (ranks of each stage, replicas of each stage if they are only a part of them, builder).
CASES = {
    # replicas that start a sum at different places would hang: rank 2 needs the gradients of both
    "loop": ([range(2), [2]] * 3, None, in_a_loop),
    "V": ([range(2), range(2, 4), range(2, 4), range(2)], None, in_a_v),
    "zb_v": ([range(2), range(2, 4), range(2, 4), range(2)], None, zb_v),
    "dualpipe_v": ([range(2), range(2, 4), range(2, 4), range(2)], None, dualpipe_v),
    "other replicas": ([range(4), range(4)], [[(0, 1), (2, 3)], [(0, 2), (1, 3)]], in_a_loop),
}


class Layers(nn.Module):
    """A stage that logs its backwards. ``table`` may get a sparse gradient. Only rank 0 uses ``rare``, and none ``idle``.

    ``late`` holds parameters that are not those of this stage, and ``fault`` is called after each backward.
    """

    def __init__(self, stage, log, is_last, has_sparse):
        super().__init__()
        torch.manual_seed(stage)
        self.stage, self.log, self.is_last, self.late, self.fault = stage, log, is_last, (), None
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.table = nn.Embedding(5, WIDTH, sparse=has_sparse)
        self.rare, self.idle = nn.Parameter(torch.ones(3, WIDTH)), nn.Parameter(torch.ones(5))
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x):
        out = self.layers(x) + self.table(torch.arange(len(x)) % 3) + sum(item.sum() for item in self.late)
        if dist.get_rank() == 0:
            out = out + self.rare.sum(0)
        out.register_hook(self.note)
        return StageOutput(loss=(out**2).mean()) if self.is_last else {"x": out}

    def note(self, gradient):
        self.log.append(f"backward {self.stage}")
        if self.fault is not None:
            self.fault()


def make_pipeline(rows, size=ROWS):
    meshes = [Mesh(list(row)) for row in rows]
    edges = []
    for stage in range(len(rows) - 1):
        x = TensorSpec((size, WIDTH), "float32", *(Layout(mesh, "S0 R") for mesh in meshes[stage : stage + 2]), "x")
        edges.append(Edge(stage, stage + 1, 0.1, 0.1, tensors=(x,)))
    return Pipeline(tuple(Stage(1.0, 1.0, 1.0, mesh=mesh) for mesh in meshes), tuple(edges))


def make_feed(rank, rows, size=ROWS):
    torch.manual_seed(20 + rank)
    return {0: [{"x": torch.randn(size // len(rows[0]), WIDTH)} for _ in range(NUM)]}


def step(
    rank,
    rows,
    log,
    *,
    starts_early=True,
    compression=None,
    shared_on=(),
    late_on=(),
    has_sparse=True,
    replicas=None,
    build=in_a_loop,
    size=ROWS,
):
    """Gradients of two steps of this rank, by stage."""
    pipeline = make_pipeline(rows, size)
    schedule = build(pipeline, NUM)
    replicas = replicas or [[tuple(row)] for row in rows]
    made = {ranks: dist.new_group(list(ranks)) for ranks in dict.fromkeys(r for parts in replicas for r in parts)}
    groups = [next((made[ranks] for ranks in parts if rank in ranks), None) for parts in replicas]
    stages = [stage for stage, row in enumerate(rows) if rank in row]
    inner = {stage: Layers(stage, log, stage == len(rows) - 1, has_sparse) for stage in stages}
    if rank in shared_on:
        inner[stages[0]].layers = inner[stages[1]].layers
    if rank in late_on:
        inner[stages[0]].late = [inner[stages[1]].layers[2].bias]
    modules = {s: DistributedDataParallel(item, process_group=groups[s]) for s, item in inner.items()}
    feed = make_feed(rank, rows, size)
    options = {"num_loss_shards": len(replicas[-1][0]), "compression": compression, "timeout_seconds": 60}
    with ScheduleEngine(schedule, pipeline, modules, **options) as engine:
        if not starts_early:
            engine._program = dataclasses.replace(engine._program, sum_places={})
        for _ in range(2):
            log.clear()
            engine.step(feed)
    return {s: gradients_of(item) for s, item in inner.items()}


def gradients_of(module):
    return {name: item.grad.to_dense().clone() for name, item in module.named_parameters() if item.grad is not None}


def log_sums(log):
    """Log each start of a sum of gradients and each end of the wait for it."""
    for name in ("start_sum", "finish_sum", "add_gradients"):
        inner = getattr(ReplicaSync, name)

        def call(self, *args, inner=inner, name=name):
            log.append(f"{name} {self.stage}")
            inner(self, *args)

        setattr(ReplicaSync, name, call)


def run_both(rank, compression):
    log, rows = [], [range(3), range(3)]
    plain = step(rank, rows, log, starts_early=False, compression=compression)
    log_sums(log)
    return plain, step(rank, rows, log, compression=compression), log


@pytest.mark.parametrize("compression", [None, Policy(dp="int8x128")])
def test_a_sum_starts_before_the_last_backward_of_another_stage_and_has_the_same_bits(compression):
    for plain, early, log in run_processes(run_both, 3, compression):
        start, end = log.index("start_sum 1"), log.index("finish_sum 1")
        assert log[:start].count("backward 1") == NUM and log[start:end].count("backward 0") == 1
        assert log[end - 1 :] == ["add_gradients 0", "finish_sum 1"]
        for stage, gradients in plain.items():
            assert (
                early[stage].keys() == gradients.keys() >= {"rare"} and not {"idle", "layers.0.bias"} & gradients.keys()
            )
            for name, one in gradients.items():
                assert one.equal(early[stage][name]) and one.stride() == early[stage][name].stride()


def run_sharing(rank, shared_on, late_on=()):
    log = []
    log_sums(log)
    try:
        step(rank, [range(2), range(2)], log, shared_on=shared_on, late_on=late_on)
    except ReshardError as error:
        return f"{type(error).__name__}: {error}"
    return log


def test_sums_of_stages_that_share_a_parameter_wait_for_the_last_action():
    for log in run_processes(run_sharing, 2, (0, 1)):
        assert log[-2:] == ["add_gradients 0", "add_gradients 1"] and "start_sum 1" not in log


def test_replicas_that_would_start_a_sum_at_different_places_raise():
    for error in run_processes(run_sharing, 2, (1,)):
        assert DisagreementError.__name__ in error
        assert "replicas of stage 1 have different parameters in common with other stages" in error


@pytest.mark.parametrize("late_on", [(0, 1), (1,)])
def test_a_gradient_that_comes_after_the_start_of_its_sum_is_an_error_on_all_replicas(late_on):
    for error in run_processes(run_sharing, 2, (), late_on):
        assert "parameter 'layers.2.bias' of stage 1 got a gradient after the last backward of its stage" in error


def run_failing(rank, fault):
    """A step in which rank 1 fails after all replicas have started a sum, and a step of a new engine."""
    log, rows = [], [range(2), range(2)]
    log_sums(log)
    pipeline, feed = make_pipeline(rows), make_feed(rank, rows)
    inner = {stage: Layers(stage, log, stage == 1, has_sparse=False) for stage in range(2)}
    modules = {stage: DistributedDataParallel(item) for stage, item in inner.items()}
    schedule, errors, gradients = in_a_loop(pipeline, NUM), [], []

    def fail():
        if "start_sum 1" in log:
            fault()

    for attempt in range(4):
        inner[0].fault = fail if rank == 1 and attempt == 2 else None
        if attempt == 3:
            for item in modules.values():
                item.zero_grad()
        log.clear()
        if attempt in (0, 3):
            engine = ScheduleEngine(schedule, pipeline, modules, num_loss_shards=2, timeout_seconds=60)
        begun = time.monotonic()
        try:
            engine.step(feed)
        except (ReshardError, ValueError, KeyboardInterrupt) as error:
            errors.append((f"{type(error).__name__}: {error}", time.monotonic() - begun, list(log)))
            if fault is leave:
                return errors
            engine.close()
        gradients.append(gradients_of(inner[1]))
    engine.close()
    return errors, gradients


def leave():
    os._exit(7)


def raise_error():
    raise ValueError("injected fault")


def press_ctrl_c():
    raise KeyboardInterrupt("injected fault")


@pytest.mark.parametrize("fault", [raise_error, press_ctrl_c])
def test_a_rank_that_fails_during_a_sum_fails_all_replicas_and_leaves_earlier_gradients(fault):
    for errors, (one, two, kept, again) in run_processes(run_failing, 2, fault):
        ((error, seconds, log),) = errors
        assert "injected fault" in error and seconds < 20 and "start_sum 1" in log and "finish_sum 1" not in log
        for name, gradient in one.items():
            assert kept[name].equal(two[name]) and again[name].equal(gradient), name


def test_a_rank_that_dies_during_a_sum_is_named():
    with pytest.raises(LaunchError) as caught:
        run_processes(run_failing, 2, leave, timeout_seconds=120, grace_seconds=60)
    ((error, seconds, log),) = caught.value.results[0]
    assert "rank 1" in error and seconds < 20 and "start_sum 1" in log


class SumMark:
    """The end of a collective of replicas, for a host that blocks until it."""

    def __init__(self, work):
        self.work = work

    def wait(self):
        while not self.work.is_completed():
            time.sleep(0.0005)


def block_for_sums():
    """Let the host block until the sums of gradients that it has posted are done, as it does for transfers."""
    post = ReplicaSync._post_sum

    def post_sum(self, *args):
        work = post(self, *args)
        BlockingStream.enqueued.append(SumMark(work))
        return work

    ReplicaSync._post_sum = post_sum


def run_case(rank, name, blocks):
    log, (rows, replicas, build) = [], CASES[name]
    options = {"has_sparse": False, "replicas": replicas, "build": build, "size": LARGE}
    if not blocks:
        return step(rank, rows, log, starts_early=False, **options)
    log_sums(log)
    block_for_sums()
    with BlockingStream.host():
        gradients = step(rank, rows, log, **options)
    return gradients, sum("start_sum" in item for item in log)


@pytest.mark.integration
@pytest.mark.parametrize("name", list(CASES))
def test_a_sum_in_the_drain_never_hangs_on_a_host_that_blocks(monkeypatch, standin, name):
    num_ranks = len({rank for row in CASES[name][0] for rank in row})
    wanted = run_processes(run_case, num_ranks, name, False)
    use_streams(monkeypatch, standin, BlockingStream)
    for rank, (got, num_started) in enumerate(run_processes(run_case, num_ranks, name, True)):
        assert num_started == len(got) - 1
        for stage, gradients in got.items():
            assert gradients.keys() == wanted[rank][stage].keys()
            assert all(gradient.equal(wanted[rank][stage][name]) for name, gradient in gradients.items())
