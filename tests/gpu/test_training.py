"""Training on GPUs that ranks share: the engine, ``Pipe`` and ``reshard train`` compute what one process computes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from reshard.scheduler import Pipe, auto_schedule, one_f_one_b, zb_h1
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.scheduler.training.models.gpt import GPT
from reshard.scheduler.training.models.model_presets import GPTConfig
from tests.gpu.ranks import DEVICE, MARKS, run, to_device
from tests.scheduler.runtime.test_engine import make_data, make_modules, make_pipeline, single_process
from tests.support import stages_with_replicas as replicas

pytestmark = MARKS
STEPS = 4
BUILDERS = {"auto": auto_schedule, "1f1b": one_f_one_b, "zb_h1": zb_h1}


def train_stage(rank, build, sizes):
    ranks = [0, 1, 2]
    pipeline, last = make_pipeline(ranks, "float64"), make_pipeline(ranks, "float64", sizes[-1])
    modules = {rank: make_modules(torch.float64)[rank].to(DEVICE)}
    data = make_data(torch.float64, sizes)
    feed = to_device({0: [{"x": x} for x, _ in data], 2: [{"target": y} for _, y in data]})
    schedule = BUILDERS[build](pipeline, len(sizes))
    with ScheduleEngine(schedule, pipeline, modules, last_pipeline=last, timeout_seconds=30) as engine:
        step = engine.step(feed, loss_weights=[n / sum(sizes) for n in sizes])
    return step.losses, {name: p.grad.cpu().numpy() for name, p in modules[rank].named_parameters()}


def reference(rank, sizes):
    """In a process of its own: autograd does not run in forks of a process that has used it beside a GPU."""
    losses, grads = single_process(torch.float64, sizes)
    return losses, [{name: grad.numpy() for name, grad in named.items()} for named in grads]


@pytest.mark.parametrize("build", BUILDERS)
def test_engine_does_not_hang_and_equals_one_process(build):
    sizes = [4, 4, 2]
    ((losses, grads),) = run(reference, sizes, ranks=1)
    for stage, (step_losses, named) in enumerate(run(train_stage, build, sizes, ranks=3)):
        assert stage != 2 or step_losses == pytest.approx(losses, rel=1e-10)
        for name, grad in named.items():
            torch.testing.assert_close(
                torch.from_numpy(grad), torch.from_numpy(grads[stage][name]), rtol=1e-10, atol=1e-12
            )


def train_replicas(rank):
    pipeline, inner = replicas.make_pipeline(2), (replicas.Last() if rank else replicas.First()).to(DEVICE)
    schedule, module = one_f_one_b(pipeline, replicas.NUM), replicas.wrap(rank, 2, inner)
    with ScheduleEngine(schedule, pipeline, {int(rank > 0): module}, num_loss_shards=2, timeout_seconds=30) as engine:
        engine.step(to_device(replicas.feed(rank, 2)))
    return replicas.gradients(inner.cpu())


def test_replicas_sum_their_gradients():
    (wanted,) = run(lambda rank: replicas.single_process(), ranks=1)
    for rank, grads in enumerate(run(train_replicas, ranks=3)):
        replicas.check(grads, wanted[rank > 0])


def make_model(seed=0):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(4, 4, 16, sequence=32, vocabulary=256))
    return model.apply(GPT.initialize)


def make_batch(step):
    tokens = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(step))
    return to_device({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})


def train_alone(rank):
    model = make_model().to(DEVICE)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
    for step in range(STEPS):
        loss = model(**make_batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train_pipe(rank, cuts, stages, autocast, folder):
    """Losses of all steps, and of those after a save in the middle, in a second engine."""

    def compile_pipe(seed):
        pipe = Pipe(make_model(seed), cut_before=cuts, stages=stages, autocast=autocast)
        engine = pipe.compile(make_batch(0), num_microbatches=4, device=DEVICE)
        return engine, torch.optim.AdamW(engine.param_groups(), 1e-3)

    def train(engine, optimizer, first):
        for step in range(first, STEPS):
            if folder and not first and step == STEPS // 2:
                engine.save(folder, optimizer, step=step)
            result = engine.step(make_batch(step))
            assert result.finite
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield float(result.loss)

    engine, optimizer = compile_pipe(0)
    with engine:
        losses = list(train(engine, optimizer, 0))
    if not folder:
        return losses, None
    engine, optimizer = compile_pipe(5)
    with engine:
        return losses, list(train(engine, optimizer, engine.load(folder, optimizer)))


CUTS = [f"blocks.{number}" for number in range(4)]
PIPES = {
    "two_stages": (2, CUTS[2:3], "1x1,1x1", None, 1e-4),
    "four_stages": (4, CUTS[1:], "1x1,1x1,1x1,1x1", None, 1e-4),
    "DDP": (4, CUTS[1:3], "1x1,1x1,2x1", None, 1e-4),
    "tensor_parallelism": (3, CUTS[2:3], "1x2,1x1", None, 1e-4),
    "grids": (4, CUTS[2:3], "1x2x1,2x1x1", None, 1e-4),
    "bf16": (3, CUTS[2:3], "1x1,2x1", torch.bfloat16, 0.05),
}


@pytest.mark.parametrize("name", PIPES)
def test_pipe_trains_as_one_process(name, tmp_path):
    ranks, cuts, stages, autocast, tolerance = PIPES[name]
    folder = str(tmp_path) if name in ("two_stages", "DDP") else None
    (wanted,) = run(train_alone, ranks=1)
    for losses, resumed in run(train_pipe, cuts, stages, autocast, folder, ranks=ranks):
        assert losses == pytest.approx(wanted, abs=tolerance)
        assert resumed is None or resumed == pytest.approx(losses[STEPS // 2 :], abs=1e-6)


def command(*arguments):
    run = subprocess.run(
        [sys.executable, "-m", "reshard", *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_train_command_on_shared_gpus_reaches_the_losses_of_the_cpu(tmp_path):
    options = ["gpt3-125m", "--shrink", "16", "--sequence", "64", "--batch", "8", "--autocast", "none", "--seed", "3"]
    options += ["--report", "none"]
    on_device = ["--device", DEVICE] + ["--share-gpus"] * (DEVICE == "cuda")
    found = {}
    for name, where in (("cpu", ["--device", "cpu"]), ("device", on_device)):
        text = command(
            "train", *options, "--meshes", "1x1,2x1", "--steps", "4", *where, "--checkpoint", str(tmp_path / name)
        )
        found[name] = list(map(float, re.findall(r"(\d+\.\d{4})", text)))
    assert len(found["cpu"]) == 3 and found["device"] == pytest.approx(found["cpu"], abs=2e-3)
    resumed = command(
        "train",
        *options,
        "--meshes",
        "1x1,2x1",
        "--steps",
        "6",
        *on_device,
        "--resume",
        "--checkpoint",
        str(tmp_path / "device"),
    )
    assert "steps 4 to 6" in resumed


@pytest.mark.skipif(DEVICE == "cpu", reason="the command needs a GPU")
def test_demo_moves_every_element():
    assert "18 of 18 runs moved every element correctly" in command("demo", "--device", "cuda", "--share-gpus")
