"""The ``train`` subcommand of ``reshard``. Torch is imported when it runs."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.cli.progress_bars import show_elapsed
from reshard.errors import ArgumentError
from reshard.formatting import count_of
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS

from ..model_stages.placement import parse_placements
from ..schedules.named_builders import NAMED_BUILDERS
from .models.model_presets import PRESETS, GPTConfig, Preset, find_preset

if TYPE_CHECKING:
    from ..autoparallel import TrainingPlan
    from .loop import TrainingJob

HELP = "train GPT or U-Transformer over pipeline stages"
EXAMPLES = (
    "reshard train gpt3-125m --shrink 8 --meshes 1x2,2x2,1x4 --steps 200    # 10 local processes",
    "reshard train gpt3-125m --meshes 1x2,2x2,1x4 --data FILE --steps 1000 --resume",
    "reshard train gpt3-125m --shrink 8 --plan auto --devices 4 --steps 200    # it searches for the stages",
    "reshard train u-transformer-470m --shrink 20 --meshes 2x1,4x1,4x1",
    "torchrun --nproc-per-node 8 -m reshard train gpt3-1.3b --meshes 2x2,2x2 --batch 64",
    "reshard train gpt3-1.3b --meshes 2x2,2x2 --batch 64 --launcher ray    # actors of a Ray cluster",
)
#: Values of ``--plan`` that search.
SEARCHES = ("auto", "tune")
#: Values of ``--order``.
ORDERS = ("planned", "ready")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    _add_recipe(parser.add_argument)
    _add_search(parser.add_argument)
    _add_devices(parser.add_argument)
    _add_reports(parser.add_argument)


def _add_recipe(add: Callable[..., Any]) -> None:
    """Model, data, and how it trains."""
    add("preset", help=f"model and recipe: {', '.join(PRESETS)}")
    add(
        "--meshes",
        help="dp x tp of each stage, or rows x cols x depth of a grid: 1x2,2x2,2x2x1 (default: those of the preset)",
    )
    add(
        "--layers",
        help="layers of each stage, which add up to those of the model: 4,4,4 (default: that of the preset, or equal "
        "shares)",
    )
    add(
        "--shrink",
        type=int,
        default=1,
        metavar="N",
        help="divide width, depth and sequence by N, and take at most 4 rows of a batch for each microbatch; see "
        "docs/training-presets.md",
    )
    add("--steps", type=int, default=100, help="number of the last step (default: 100)")
    add("--batch", type=int, help="samples of a batch (default: that of the preset)")
    add(
        "--microbatches", type=int, dest="num_microbatches", help="microbatches of a step (default: that of the preset)"
    )
    add("--sequence", type=int, help="tokens of a sample (default: that of the preset)")
    add("--data", metavar="FILE", help="text, .bin (uint16 tokens) or .npy (default: text that Python ships, as bytes)")
    add("--learning-rate", type=float, help="peak learning rate (default: that of the preset)")
    add("--warmup", type=int, help="first steps, in which the learning rate rises (default: a tenth of all)")
    add("--schedule", choices=NAMED_BUILDERS, default="auto", help="pipeline schedule (default: auto)")
    add(
        "--order",
        choices=ORDERS,
        default="planned",
        help="a rank computes in the order of the schedule (planned) or what has arrived (ready), which needs CPUs and "
        "each stage on one rank (default: planned)",
    )
    add(
        "--compression",
        metavar="POLICY",
        help="codecs on the wire, such as dp=int4x128-bf16,pp=int8x128; a search encodes where steps get shorter",
    )
    add("--autocast", choices=("float16", "bfloat16", "none"), help="dtype of computations (default: the preset's)")
    add("--seed", type=int, default=0, help="seed of the initial parameters and of the order of the data (default: 0)")


def _add_search(add: Callable[..., Any]) -> None:
    """A training plan, found or read."""
    add(
        "--plan",
        metavar="auto|tune|FILE",
        help="search for the stages with measured times of layers (auto), correct these times by steps of the choice "
        "and search again (tune), or read a training plan",
    )
    add("--save-plan", metavar="FILE", help="write the training plan that was found")
    add("--devices", type=int, help="number of ranks that a search may use (default: all of the topology)")
    add("--topology", help="hosts and links for a search, as for reshard search (default: one host)")
    add("--memory", help="memory of a device for a search, such as 16GB (default: 90 %% of what it has)")
    add(
        "--fixed",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="fix a part of the training plan in a search, such as tp=2",
    )


def _add_devices(add: Callable[..., Any]) -> None:
    """Add the options that say where the ranks run."""
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device of each rank (default: cuda if there is one for every rank)",
    )
    add(
        "--share-gpus",
        action="store_true",
        help="let ranks share GPUs, with --device cuda: right, but slow, to try things out on few GPUs",
    )
    add(
        "--launcher",
        choices=("auto", "ray"),
        default="auto",
        help="ray: actors of a Ray cluster (default: the ranks of torchrun if it runs, else local processes)",
    )
    add(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help=f"how long a rank may wait for another one, which may compute (default: {DEFAULT_TIMEOUT_SECONDS:g})",
    )


def _add_reports(add: Callable[..., Any]) -> None:
    """Reports and checkpoints."""
    add("--log-every", type=int, default=10, metavar="N", help="report every N steps (default: 10)")
    add("--eval-every", type=int, default=0, metavar="N", help="also evaluate on held-out data every N steps")
    add("--eval-batches", type=int, default=1, metavar="N", help="batches of an evaluation (default: 1)")
    add(
        "--checkpoint",
        metavar="PATH",
        help="folder for checkpoints of weights, optimizer and data: save here at the end, and resume from here "
        "(default with --resume or --save-every: PRESET.checkpoint; with none of the three, nothing is saved)",
    )
    add("--save-every", type=int, default=0, metavar="N", help="save every N steps, and at the end")
    add(
        "--report",
        metavar="PATH",
        help="folder for losses.csv, pictures of the losses and of the schedule, and a Chrome trace of the last "
        "reported step, or none (default: PRESET.report)",
    )
    add("--dump-tensors", metavar="PATH", help="save tensors of three steps here, for reshard profile-compression")
    add(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint in the folder of --checkpoint, or start from the beginning if there "
        "is none, and save at the end; --steps is the number of the last step: the same one to finish an interrupted "
        "run, a larger one to train further",
    )
    add(
        "--trust-pickle",
        action="store_true",
        help="with --resume: also load a checkpoint of an earlier version, which can run any code",
    )


def run(options: argparse.Namespace) -> int:
    """Train, and print the first and the last loss.

    It starts one local process or one Ray actor for each rank. Under torchrun, it joins that job.
    """
    if importlib.util.find_spec("torch") is None:
        raise ArgumentError("training needs torch: pip install 'reshard[torch]'")
    preset = find_preset(options.preset)
    check_options(options)
    stages = "" if options.plan else options.meshes or preset.stages
    is_first = os.environ.get("RANK", "0") == "0"
    with show_elapsed("loading torch", show=is_first and "torch" not in sys.modules):
        job = make_job(options, preset, stages)
    from .launch import launch
    from .plan_search import SearchOptions

    wanted = SearchOptions.of(options) if options.plan in SEARCHES else None
    if wanted is not None:
        job = replace(job, compression=None)  # the training plan names the codecs that it uses
    try:
        result = launch(job, options.device, options.launcher == "ray", wanted, options.share_gpus)
    except KeyboardInterrupt:
        if job.checkpoint is not None:
            from ..checkpoint.folders import find_checkpoints

            saved = find_checkpoints(job.checkpoint)
            newest = f"continues from step {saved[-1][0]}" if saved else "begins again, because none is complete"
            print(f"checkpoints are in {job.checkpoint}: --resume {newest}", file=sys.stderr)
        raise
    if result is not None:
        losses = f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}, " if result.losses else ""
        skipped = f", {count_of(len(result.skipped), 'step')} skipped" if result.skipped else ""
        steps = f"steps {result.start} to {max(result.start, job.steps)}"
        print(f"{job.name} on {stages or 'a training plan'}, {steps}: {losses}held-out {result.held_out:.4f}{skipped}")
        print(_describe_next(job, max(result.start, job.steps)), file=sys.stderr)
    return 0


def _describe_next(job: TrainingJob, last_step: int) -> str:
    """A sentence on what a user may do after a run."""
    if job.checkpoint is None:
        return "nothing was saved; with --checkpoint FOLDER a run is saved, and --resume continues it"
    return (
        f"to train further: the same command with --resume and --steps above {last_step} continues from "
        f"{job.checkpoint}, and its learning rate follows the new number"
    )


def check_options(options: argparse.Namespace) -> None:
    """Check what can be checked before torch is loaded, which takes seconds.

    Raises:
        ArgumentError: an option is out of range, does not fit another one, or names a file that is not there.
    """
    for name in ("shrink", "steps", "batch", "num_microbatches", "sequence", "log_every", "eval_batches"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ArgumentError(f"--{name.removeprefix('num_').replace('_', '-')} is {value}; it must be positive")
    for name in ("warmup", "eval_every", "save_every", "seed"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise ArgumentError(f"--{name.replace('_', '-')} is {value}; it must not be negative")
    if not 0 < options.timeout <= 1e6:
        raise ArgumentError(f"--timeout is {options.timeout:g}; it must be above 0 and at most a million seconds")
    if options.seed >= 2**63:
        raise ArgumentError(f"--seed is {options.seed}; it must be below 2**63")
    rate = options.learning_rate
    if rate is not None and not 0 < rate < math.inf:
        raise ArgumentError(f"--learning-rate is {rate}; it must be positive and finite")
    is_text = isinstance(PRESETS[options.preset].config, GPTConfig)
    if options.sequence is not None and not is_text:
        raise ArgumentError(f"{options.preset} has no sequence; omit --sequence")
    if options.trust_pickle and not options.resume:
        raise ArgumentError("--trust-pickle is for --resume; omit it, or pass both")
    if options.data is not None and not is_text:
        raise ArgumentError(f"{options.preset} trains on pictures that it draws itself; omit --data")
    if options.data is not None and not Path(options.data).exists():
        raise ArgumentError(f"the data {options.data} cannot be read: there is no such file")
    _check_plan(options)
    if options.plan is None:
        _check_stages(options)


def make_job(options: argparse.Namespace, preset: Preset, stages: str) -> TrainingJob:
    """The job of options that :func:`check_options` has checked.

    Raises:
        ArgumentError: the training plan is none, or the preset has fewer layers than stages.
    """
    from reshard.compression import parse_policy

    from .loop import TrainingJob

    training_plan = _read_training_plan(options)
    num_stages = stages.count(",") + 1 if training_plan is None else 1  # the search shrinks the preset for one stage
    factor = round(preset.config.shrink_factor(options.shrink)) if options.shrink > 1 else 1
    preset = preset.shrunk(options.shrink, num_stages)
    changes: dict[str, Any] = {"num_samples": options.batch, "num_microbatches": options.num_microbatches}
    changes["learning_rate"] = options.learning_rate
    changes["autocast"] = "" if options.autocast == "none" else options.autocast
    preset = replace(preset, **{name: value for name, value in changes.items() if value is not None})
    if options.sequence is not None and isinstance(preset.config, GPTConfig):
        preset = replace(preset, config=replace(preset.config, sequence=options.sequence))
    saves = options.checkpoint or options.resume or options.save_every
    return TrainingJob(
        name=_job_name(options),
        preset=preset,
        steps=options.steps,
        stages=stages,
        layers=_parse_layers(options.layers),
        schedule=options.schedule,
        order=options.order,
        compression=None if options.compression is None else str(parse_policy(options.compression)),
        data=options.data,
        warmup=options.steps // 10 if options.warmup is None else options.warmup,
        seed=options.seed,
        log_every=options.log_every,
        eval_every=options.eval_every,
        eval_batches=options.eval_batches,
        checkpoint=(options.checkpoint or f"{options.preset}.checkpoint") if saves else None,
        save_every=options.save_every,
        resume=options.resume,
        trust_pickle=options.trust_pickle,
        training_plan=training_plan,
        shrink_factor=factor,
        timeout_seconds=options.timeout,
        dump=options.dump_tensors,
        report=None if options.report == "none" else options.report or f"{options.preset}.report",
    )


def _check_stages(options: argparse.Namespace) -> None:
    """Raise ArgumentError if ``--meshes`` or ``--layers`` are malformed, or do not fit each other and the model."""
    preset, layers = find_preset(options.preset), _parse_layers(options.layers)
    num_stages = len(parse_placements(options.meshes or preset.stages))
    if layers:
        preset.shrunk(options.shrink, num_stages).check_layers(layers, num_stages, _job_name(options))


def _job_name(options: argparse.Namespace) -> str:
    return options.preset if options.shrink == 1 else f"{options.preset}/{options.shrink}"


def _check_plan(options: argparse.Namespace) -> None:
    """Raise ArgumentError if there is no file of ``--plan``, or options of plans and searches do not fit each other."""
    if options.plan is None:
        _refuse_search_options(options, "pass --plan auto with it")
        return
    for name in ("meshes", "layers"):
        if getattr(options, name) is not None:
            raise ArgumentError(f"a training plan has its own stages; omit --{name} or --plan")
    if options.schedule != "auto":
        raise ArgumentError("a training plan has its own schedule; omit --schedule or --plan")
    if options.plan in SEARCHES:
        _check_search(options)
        return
    if not Path(options.plan).is_file():
        raise ArgumentError(
            f"there is no training plan {options.plan!r}; pass auto, tune, or the file of a training plan"
        )
    _refuse_search_options(options, f"the training plan {options.plan} has been found already: omit one of the two")


def _check_search(options: argparse.Namespace) -> None:
    from ..autoparallel.search_command import find_topology, parse_bytes, parse_fixed

    if options.devices is not None and options.devices < 1:
        raise ArgumentError(f"--devices is {options.devices}; it must be positive")
    num_ranks = options.devices or int(os.environ.get("WORLD_SIZE", "0")) or None
    if options.topology is not None:
        find_topology(options.topology, num_ranks)
    elif num_ranks is None:
        raise ArgumentError(f"--plan {options.plan} needs --devices N, the number of ranks, or --topology FILE")
    parse_fixed(options.fixed)
    if options.memory is not None:
        parse_bytes(options.memory)


def _read_training_plan(options: argparse.Namespace) -> TrainingPlan | None:
    """The training plan of a file; None if there is none, or one is still to be searched for.

    Raises:
        ArgumentError: the file is not a training plan, or has other microbatches than the options.
    """
    if options.plan is None or options.plan in SEARCHES:
        return None
    from ..autoparallel import TrainingPlan

    training_plan = TrainingPlan.read(options.plan)
    if options.num_microbatches not in (None, training_plan.num_microbatches):
        raise ArgumentError(
            f"the training plan {options.plan} has {count_of(training_plan.num_microbatches, 'microbatch')}, not "
            f"{options.num_microbatches}; omit --microbatches"
        )
    return training_plan


def _refuse_search_options(options: argparse.Namespace, rule: str) -> None:
    for name in ("devices", "topology", "memory", "fixed", "save_plan"):
        if getattr(options, name):
            raise ArgumentError(f"--{name.replace('_', '-')} is for a search; {rule}")


def _parse_layers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise ArgumentError(f"--layers is {text!r}; it must be the layers of each stage, such as 4,4,4")
    return tuple(int(part) for part in text.split(","))
