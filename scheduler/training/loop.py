"""Train a preset over pipeline stages: optimizer, learning rate, evaluation, checkpoints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reshard.cli.progress_bars import show_elapsed
from reshard.compression import parse_policy
from reshard.errors import ArgumentError, TransferTimeoutError
from reshard.formatting import count_of
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS

from ..autoparallel import TrainingPlan
from ..checkpoint import find_model_shapes
from ..ir.schedule import Schedule
from ..model_stages.pipe import Pipe
from ..model_stages.placement import parse_placements
from ..model_stages.training_engine import PipelineEngine
from ..runtime.ready_order import OrderMode
from ..schedules.named_builders import NAMED_BUILDERS
from ..simulation.replay import PipelineTimeline
from ..simulation.schedule_lower_bound import LowerBound
from .data import BatchLoader, PictureLoader, TokenLoader, hold_out, read_tokens
from .dump import TensorDump, dumped_steps
from .models.making import find_cuts, layer_paths, make_model
from .models.model_presets import GPTConfig, Preset
from .recipe import describe_changes
from .training_progress import Progress
from .training_report import RunFolder

#: The learning rate ends at this share of its peak.
MIN_RATE = 0.1
#: AdamW of the GPT-3 paper: its betas, its weight decay, and the largest norm of the gradients.
BETAS, WEIGHT_DECAY, MAX_NORM = (0.9, 0.95), 0.1, 1.0
#: Seed of the held-out pictures, relative to that of the training.
_HELD_OUT_SEED = 1_000_003


@dataclass(frozen=True)
class TrainingJob:
    """A training run, the same on all ranks.

    Attributes:
        name: name of the run, for messages.
        preset: the model and how it is trained.
        steps: the number of the last step.
        stages: dp x tp of each stage.
        layers: number of layers of each stage; empty for those of the preset.
        schedule: name of a schedule.
        order: "planned" or "ready", see :class:`reshard.scheduler.runtime.schedule_engine.ScheduleEngine`.
        compression: text of a policy; None to encode nothing.
        data: file of tokens; None for the text that Python ships.
        warmup: steps in which the learning rate grows.
        seed: seed of the parameters and of the order of the data.
        device: "cpu" or "cuda".
        log_every: steps between messages and measured times.
        eval_every: steps between evaluations; 0: at the end only.
        eval_batches: batches of an evaluation.
        checkpoint: folder to save to; None: do not save.
        save_every: steps between saves; 0: at the end only.
        resume: continue from the newest checkpoint there, if there is one.
        trust_pickle: load a checkpoint even if it contains pickled objects.
        training_plan: cuts, placements, microbatches and schedule, in place of ``stages``, ``layers`` and ``schedule``.
        shrink_factor: bytes of an edge per operation of a stage, over those of the whole model.
        timeout_seconds: how long a rank may wait for another one.
        dump: folder for tensors of some steps; None: save none.
        report: folder for the losses, a trace and pictures; None: write none.
    """

    name: str
    preset: Preset
    steps: int
    stages: str
    layers: tuple[int, ...] = ()
    schedule: str = "auto"
    order: OrderMode = "planned"
    compression: str | None = None
    data: str | None = None
    warmup: int = 0
    seed: int = 0
    device: str = "cpu"
    log_every: int = 10
    eval_every: int = 0
    eval_batches: int = 1
    checkpoint: str | None = None
    save_every: int = 0
    resume: bool = False
    trust_pickle: bool = False
    dump: str | None = None
    report: str | None = None
    training_plan: TrainingPlan | None = None
    shrink_factor: int = 1
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS

    @property
    def recipe(self) -> dict[str, Any]:
        """The values by option that decide what a run computes, besides seed and batch, which loaders compare."""
        return {
            "steps": self.steps,
            "warmup": self.warmup,
            "learning-rate": self.preset.learning_rate,
            "data": "" if self.data is None else Path(self.data).name,
            "autocast": self.preset.autocast or "none",
            "compression": self.compression or "none",
            "order": self.order,
        }

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Sizes of the mesh axes of each stage."""
        placements = parse_placements(self.stages) if self.training_plan is None else self.training_plan.placements()
        return [tuple(placement.axis_sizes.values()) for placement in placements]


@dataclass(frozen=True)
class TrainResult:
    """The result of training, the same on every rank.

    Attributes:
        start: first step of this run.
        losses: loss of each of its steps.
        held_out: loss on held-out data at the end.
        skipped: steps that were not finite and changed no parameter.
    """

    start: int
    losses: tuple[float, ...]
    held_out: float
    skipped: tuple[int, ...]


def train(rank: int, job: TrainingJob, shows: bool = True) -> TrainResult:
    """Train on one rank of an initialized process group; rank 0 shows the progress."""
    try:
        return _train(rank, job, shows)
    except TransferTimeoutError as error:
        raise TransferTimeoutError(
            f"{error}; if a stage computes for longer than --timeout, {job.timeout_seconds:g} s, pass a longer one, or "
            "fewer samples in --batch"
        ) from error


def _train(rank: int, job: TrainingJob, shows: bool) -> TrainResult:
    loader, held_out = make_loaders(job)
    device = torch.device(job.device, torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")
    torch.manual_seed(job.seed)
    with show_elapsed("building the stages and measuring a few steps", show=shows and rank == 0):
        engine = _compile_engine(job, _move(loader.batch(0), device), device)
    optimizer = make_optimizer(engine.param_groups(), job.preset.learning_rate)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factors(job.steps, job.warmup))
    folder = job.checkpoint or ""
    dump = None if job.dump is None else TensorDump(job.dump, rank, engine, optimizer)
    losses, skipped = [], []
    with engine:
        start, loader.recipe = 0, job.recipe
        if job.resume:
            start = engine.load(folder, optimizer, rates, loader, missing_ok=True, trust_pickle=job.trust_pickle)
        differences = describe_changes(loader.changes, start < job.steps)
        progress = Progress(job.name, start, job.steps, job.preset, job.log_every, shows and rank == 0)
        report = RunFolder(job.report, start, progress.note) if job.report is not None and rank == 0 else None
        measured = None
        with progress, report or contextlib.nullcontext():
            for text in [*differences, *_describe_start(job, start, engine)]:
                progress.note(text)
            predicted = _note_prediction(job, engine, progress) if rank == 0 else None
            for step, batch in zip(range(start, job.steps), loader, strict=False):
                caught = dump if dump is not None and step in dumped_steps(job.steps) else None
                with contextlib.nullcontext() if caught is None else caught.catch_activations():
                    result = engine.step(_move(batch, device), timeline=progress.wants_times(step))
                norm = engine.clip_grad_norm_(MAX_NORM)
                if caught is not None:
                    caught.keep_gradients()
                if result.finite:
                    optimizer.step()
                    rates.step()
                else:
                    skipped.append(step)
                if caught is not None:
                    caught.save(step + 1)
                optimizer.zero_grad()
                losses.append(result.loss)
                progress.advance(step, result, norm)
                measured = result.timeline or measured
                if report is not None:
                    report.add(step + 1, loss=result.loss)
                if job.eval_every and (step + 1) % job.eval_every == 0 and step + 1 < job.steps:
                    loss = _evaluate(engine, job, held_out, device)
                    progress.note(f"step {step + 1}: held-out loss {loss:.4f}")
                    if report is not None:
                        report.add(step + 1, held_out=loss)
                is_due = step + 1 == job.steps or (job.save_every and (step + 1) % job.save_every == 0)
                if folder and is_due:
                    engine.save(folder, optimizer, rates, loader, step + 1)
                    progress.note(f"step {step + 1}: saved a checkpoint in {folder}")
            final = _evaluate(engine, job, held_out, device)
            progress.note(f"step {max(start, job.steps)}: held-out loss {final:.4f}")
            if report is not None and predicted is not None:
                report.add(max(start, job.steps), held_out=final)
                progress.note(report.finish(job.name, engine.schedule, measured, predicted))
    return TrainResult(start, tuple(losses), final, tuple(skipped))


def _note_prediction(job: TrainingJob, engine: PipelineEngine, progress: Progress) -> PipelineTimeline:
    """Print the predicted step, and what a smaller model changes; return the predicted step."""
    predicted, bound = engine.predict()
    progress.note(describe_prediction(engine.schedule, predicted, bound))
    if job.shrink_factor > 1:
        progress.note(describe_shrinking(job))
    return predicted


def _describe_start(job: TrainingJob, start: int, engine: PipelineEngine) -> list[str]:
    """The lines that a run prints before its first step."""
    texts = (
        [f"there is no checkpoint in {job.checkpoint}: starting from the beginning"] if job.resume and not start else []
    )
    if job.resume and start >= job.steps:
        texts.append(
            f"nothing is left to train: the checkpoint is of step {start}, and --steps {job.steps} is the last"
        )
    return [*texts, engine.compression] if engine.compression else texts


def _compile_engine(job: TrainingJob, batch: Any, device: torch.device) -> PipelineEngine:
    """The engine of a job, for batches of this shape."""
    check_order(job)
    options: dict[str, Any] = {"order": job.order, "timeout_seconds": job.timeout_seconds}
    if job.training_plan is None:
        options |= {"num_microbatches": job.preset.num_microbatches, "schedule": NAMED_BUILDERS[job.schedule]}
    if job.compression is not None:
        options["compression"] = parse_policy(job.compression)
    return make_pipe(job).compile(batch, device=device, **options)


def check_order(job: TrainingJob) -> None:
    """Raise ArgumentError unless ranks can compute the stages of a job in its order."""
    if job.order == "planned":
        return
    if job.device != "cpu":
        raise ArgumentError(f"--order {job.order} needs stages on CPUs; pass --device cpu or --order planned")
    for stage, shape in enumerate(job.shapes):
        if math.prod(shape) > 1:
            raise ArgumentError(
                f"--order {job.order} needs each stage on one rank, but stage {stage} is on {math.prod(shape)}, which "
                "could receive their messages in different orders; pass --order planned or meshes of 1x1"
            )


def describe_prediction(schedule: Schedule, predicted: PipelineTimeline, bound: LowerBound) -> str:
    """The schedule, its simulated step time, and the lower bound, as text."""
    seconds = predicted.makespan_seconds
    over = f", {seconds / bound.seconds:.3f} times the" if bound.seconds else "; the"
    return f"schedule {schedule.name}: predicted step {seconds:.4g} s{over} lower bound of all schedules, {bound}"


def describe_shrinking(job: TrainingJob) -> str:
    """The effect of a smaller model on transfers, as text."""
    factor = job.shrink_factor
    return (
        f"{job.name} is a smaller model: its edges carry {factor} times as many bytes per operation as those of the "
        f"whole model, so transfers take {factor} times as large a part of a step, unless links are {factor} times as "
        "fast"
    )


def make_pipe(job: TrainingJob) -> Pipe:
    """The model of a job on the meta device, cut at layers and placed."""
    model = make_model(job.preset.config)
    options: dict[str, Any] = {
        "init": type(model).initialize,
        "autocast": getattr(torch, job.preset.autocast) if job.preset.autocast else None,
    }
    if job.training_plan is not None:
        check_training_plan(job.training_plan, job)
        return Pipe(model, training_plan=job.training_plan, **options)
    num_stages = job.stages.count(",") + 1
    layers = job.layers or job.preset.divide_layers(num_stages)
    job.preset.check_layers(layers, num_stages, job.name)
    return Pipe(model, find_cuts(job.preset.config, layers), stages=job.stages, **options)


def check_training_plan(training_plan: TrainingPlan, job: TrainingJob) -> None:
    """Raise ArgumentError unless a training plan is of the model and the samples of a job."""
    names = [name for stage in training_plan.layer_names for name in stage][1:]
    paths = layer_paths(job.preset.config)
    if names != paths:
        raise ArgumentError(
            f"the training plan has {len(names) + 1} layers ({', '.join(names[:3])}, ...), but {job.name} has "
            f"{len(paths) + 1} ({', '.join(paths[:3])}, ...); pass the preset and the --shrink for which it was found, "
            "or search again with these"
        )
    if training_plan.num_samples != job.preset.num_samples:
        raise ArgumentError(
            f"the training plan is for {training_plan.num_samples} samples of a step, but {job.name} has "
            f"{job.preset.num_samples}; pass --batch {training_plan.num_samples} or search again"
        )


def check_resumed(job: TrainingJob) -> None:
    """Raise ArgumentError if a job would resume from a checkpoint of a model with other layers or sizes.

    Nothing is checked if this machine has no such checkpoint, or cannot read it: the ranks then say so.
    """
    newest = find_model_shapes(job.checkpoint) if job.resume and job.checkpoint is not None else None
    if newest is None:
        return
    folder, saved = newest
    config = job.preset.config
    wanted = {name: tuple(tensor.shape) for name, tensor in make_model(config).state_dict().items()}
    kind = "blocks" if isinstance(config, GPTConfig) else "layers"
    depth = len({name.split(".")[1] for name in saved if name.startswith(f"{kind}.")})
    if depth and depth != config.num_layers:
        stages = count_of(depth, "stage")
        here = job.name if job.training_plan or not job.stages else f"{job.name} on the stages {job.stages}"
        raise ArgumentError(
            f"the checkpoint {folder} is of a model of {count_of(depth, 'layer')}, but {here} has "
            f"{count_of(config.num_layers, 'layer')}; pass the preset and the --shrink of the run that saved it, and, "
            f"because a smaller model has at least one layer for each stage, --meshes of {stages}"
        )
    unlike = [name for name in saved if name not in wanted or wanted[name] != saved[name]]
    if unlike:
        name = unlike[0]
        here = f"has {list(wanted[name])} in" if name in wanted else "is not in"
        raise ArgumentError(
            f"the checkpoint {folder} is of another model: {name!r} has the sizes {list(saved[name])} there, and "
            f"{here} {job.name}; pass the preset, the --shrink and the --sequence of the run that saved it"
        )


def make_loaders(job: TrainingJob) -> tuple[BatchLoader, BatchLoader]:
    """The batches for training and those for evaluation."""
    config, num_samples = job.preset.config, job.preset.num_samples
    if not isinstance(config, GPTConfig):
        if job.data is not None:
            raise ArgumentError(f"{job.name} trains on pictures that it draws itself; omit --data")
        return PictureLoader(num_samples, config.side, job.seed), PictureLoader(
            num_samples, config.side, job.seed + _HELD_OUT_SEED
        )
    seen, unseen = hold_out(read_tokens(job.data), config.sequence)
    return (
        TokenLoader(seen, num_samples, config.sequence, config.vocabulary, job.seed),
        TokenLoader(unseen, num_samples, config.sequence, config.vocabulary),
    )


def make_optimizer(param_groups: Sequence[Mapping[str, Any]], learning_rate: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices and convolutions only, not on biases and normalizations."""
    groups = []
    for group in param_groups:
        for is_matrix, weight_decay in ((True, WEIGHT_DECAY), (False, 0.0)):
            params = [parameter for parameter in group["params"] if (parameter.dim() >= 2) is is_matrix]
            groups.append({"params": params, "weight_decay": weight_decay})
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS)


def rate_factors(steps: int, warmup: int) -> Callable[[int], float]:
    """The learning rate of a step relative to its peak: a linear warm-up, then a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return MIN_RATE + (1 - MIN_RATE) * (1 + math.cos(math.pi * progress)) / 2

    return factor


def _evaluate(engine: PipelineEngine, job: TrainingJob, held_out: BatchLoader, device: torch.device) -> float:
    """Mean loss on the same held-out batches each time."""
    batches = (_move(held_out.batch(number), device) for number in range(job.eval_batches))
    return math.fsum(engine.evaluate(batch).loss for batch in batches) / job.eval_batches


def _move(batch: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in batch.items()}
