"""Train GPT-3 or U-Transformer over pipeline stages: ``python -m reshard.scheduler.training.train gpt --steps 50``.

Without a launcher it starts one local process per device; under ``torchrun`` it joins that job. Inside a stage, torch
provides the parallelism: DistributedDataParallel over data-parallel axes, DTensor over tensor-parallel ones, and FSDP2
for stages with both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import ReshardError
from reshard.testing.processes import run_processes
from reshard.topology import Topology

from .. import (
    Pipeline,
    Schedule,
    Stage,
    auto_schedule,
    check_schedule,
    eager_1f1b,
    one_f_one_b,
    zb_h1,
)
from ..costs import price_edge
from ..runtime.engine import Engine
from .gpt import GPT_CONFIGS, GPTConfig, parallelize
from .u_transformer import U_TRANSFORMER_CONFIGS

MODELS: Mapping[str, Mapping[str, Any]] = {"gpt": GPT_CONFIGS, "u_transformer": U_TRANSFORMER_CONFIGS}
SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "auto": auto_schedule,
    "1f1b": one_f_one_b,
    "eager": eager_1f1b,
    "zb_h1": zb_h1,
}
#: Assumed duration of a forward, an input-gradient pass and a weight-gradient pass; stages are not measured.
GUESS_SECONDS = 0.05


@dataclass(frozen=True)
class Job:
    """A training run: a configuration, the name of a schedule, the number of steps, and settings of Adam."""

    config: Any
    schedule: str
    steps: int
    learning_rate: float = 3e-3
    seed: int = 0


def train(rank: int, job: Job, show: bool = True) -> list[float]:
    """Train on one rank. Returns the loss of each step; empty on ranks without a loss."""
    config = job.config
    meshes = config.meshes()
    stage = next(number for number, mesh in enumerate(meshes) if rank in mesh.ranks)
    module, can_split = make_module(config, meshes, stage)
    schedule, pipeline = make_schedule(config, meshes, job.schedule, can_split)
    shards = _num_replicas(config)
    last_group = dist.new_group(meshes[-1].ranks)
    feed_of = _feeder(config, meshes, stage, rank, job.seed)
    optimizer = torch.optim.Adam(module.parameters(), lr=job.learning_rate)
    losses: list[float] = []
    is_shown = show and rank == meshes[-1].ranks[0]
    with Engine(schedule, pipeline, {stage: module}, num_loss_shards=shards) as engine, _bar(is_shown, job) as advance:
        for number in range(job.steps):
            begun = time.monotonic()
            optimizer.zero_grad()
            step = engine.step(feed_of(number))
            optimizer.step()
            timeline = engine.timeline()
            rows = range(len(schedule.rows))
            exposed = max(timeline.exposed_seconds(row) for row in rows) / timeline.makespan_seconds
            if step.loss is not None:
                losses.append(_mean(step.loss, last_group))
                advance(losses[-1], config.batch / (time.monotonic() - begun), exposed)
    return losses


def make_module(config: Any, meshes: Sequence[Any], stage: int) -> tuple[torch.nn.Module, bool]:
    """The parallelized module of a stage, and whether its backward can be split. Every rank must call this."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    module = make_stages(config)[stage].to(getattr(torch, getattr(config, "dtype", "float32")))
    device_meshes = [DeviceMesh("cpu", torch.tensor(mesh.array), mesh_dim_names=mesh.axes) for mesh in meshes]
    mesh = device_meshes[stage]
    if isinstance(config, GPTConfig):
        if config.tp > 1:
            parallelize(module, mesh["tp"])
            if config.dp > 1:
                return fully_shard(module, mesh=mesh["dp"]), False
        if config.dp > 1:
            return torch.nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group("dp")), True
        return module, True
    groups = [dist.new_group(each.ranks) for each in meshes]
    if len(meshes[stage].ranks) > 1:
        return torch.nn.parallel.DistributedDataParallel(module, process_group=groups[stage]), True
    return module, True


def make_schedule(config: Any, meshes: Sequence[Any], name: str, can_split: bool) -> tuple[Schedule, Pipeline]:
    """The named schedule and its pipeline, with transfers planned for one host per stage and 10 Gbit/s NICs."""
    hosts = [number for number, mesh in enumerate(meshes) for _ in mesh.ranks]
    topology = Topology(tuple(hosts))
    edges = tuple(price_edge(edge, topology) for edge in config.edges(list(meshes)))
    stages = tuple(Stage(GUESS_SECONDS, GUESS_SECONDS, GUESS_SECONDS, mesh=mesh) for mesh in meshes)
    pipeline = Pipeline(stages, edges)
    options = {"can_split": can_split} if name == "auto" else {}
    if name == "zb_h1" and not can_split:
        raise SystemExit("zb_h1 splits backwards, which FSDP does not support; use --schedule 1f1b, eager or auto")
    schedule = SCHEDULES[name](pipeline, config.num_microbatches, **options)
    check_schedule(schedule, pipeline)
    return schedule, pipeline


def _num_replicas(config: Any) -> int:
    """Number of replicas of the last stage that see different rows."""
    return config.dp if isinstance(config, GPTConfig) else len(config.meshes()[-1].ranks)


def _feeder(config: Any, meshes: Sequence[Any], stage: int, rank: int, seed: int) -> Callable[[int], Any]:
    """A function from a step to the feed of this rank: its rows of each microbatch."""
    num_replicas = _num_replicas(config)
    replica = meshes[stage].ranks.index(rank)
    if isinstance(config, GPTConfig):
        replica //= config.tp

    def feed(step: int) -> Any:
        whole = config.feed(step, seed)
        mine = [{name: each.chunk(num_replicas)[replica] for name, each in row.items()} for row in whole.get(stage, ())]
        return {stage: mine} if mine else {}

    return feed


def _mean(loss: float, group: Any) -> float:
    """Mean of the loss over the ranks of the last stage. Ranks that see the same rows have the same loss."""
    total = torch.tensor([loss], dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return float(total) / dist.get_world_size(group)


@contextlib.contextmanager
def _bar(is_shown: bool, job: Job) -> Any:
    """A progress bar with loss, throughput and exposed communication; without a terminal, a line every ten steps."""
    count = 0
    if not is_shown:
        yield lambda loss, throughput, exposed: None
        return
    bar = None
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            bar = tqdm(total=job.steps, unit="step")

    def advance(loss: float, throughput: float, exposed: float) -> None:
        nonlocal count
        count += 1
        text = f"loss {loss:.4f}, {throughput:.1f} samples/s, {exposed:.1%} exposed communication"
        if bar is not None:
            bar.update()
            bar.set_postfix_str(text)
        elif count % 10 == 0 or count in (1, job.steps):
            print(f"step {count}: {text}", file=sys.stderr, flush=True)

    yield advance
    if bar is not None:
        bar.close()


def main(arguments: list[str] | None = None) -> int:
    """Run the command: train, and print the first and the last loss."""
    parser = argparse.ArgumentParser(prog="python -m reshard.scheduler.training.train", description=__doc__)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--config", default="small", help="name of a configuration of the model (default: small)")
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="auto", help="schedule (default: auto)")
    parser.add_argument("--steps", type=int, default=50, help="number of steps (default: 50)")
    parser.add_argument("--microbatches", type=int, help="number of microbatches (default: that of the configuration)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="learning rate of Adam (default: 0.003)")
    options = parser.parse_args(arguments)
    configs = MODELS[options.model]
    if options.config not in configs:
        parser.error(f"{options.model} has no configuration {options.config!r}; it has {', '.join(configs)}")
    if not 1 <= options.steps <= 1_000_000:
        parser.error("--steps must be from 1 to 1000000")
    config = configs[options.config]
    if options.microbatches is not None:
        if options.microbatches < 1 or config.batch % options.microbatches:
            parser.error(f"--microbatches must divide the batch of {config.batch}")
        config = replace(config, num_microbatches=options.microbatches)
    job = Job(config, options.schedule, options.steps, options.learning_rate)
    size = sum(len(mesh.ranks) for mesh in config.meshes())
    try:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group("gloo")
            if dist.get_world_size() != size:
                parser.error(f"{options.config!r} needs {size} ranks; the job has {dist.get_world_size()}")
            losses = train(dist.get_rank(), job)
            dist.destroy_process_group()
        else:
            losses = next(each for each in run_processes(train, size, job, timeout_seconds=1e6) if each)
    except ReshardError as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    if losses:
        print(f"{options.model} {options.config}, {job.schedule}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())


def make_stages(config: Any) -> list[torch.nn.Module]:
    """Modules of all stages, with the same weights on every rank."""
    torch.manual_seed(0)
    return [config.make_stage(number) for number in range(config.pp)]
