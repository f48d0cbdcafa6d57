"""The ``profile`` subcommand of ``reshard``: the layers of a model and their times, as ``search`` reads them."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.cli.progress_bars import show_elapsed
from reshard.errors import ArgumentError
from reshard.formatting import brief, count_of, format_names, format_seconds

from .cpu_limits import describe_slow_float16, read_flags
from .models.model_presets import PRESETS, GPTConfig, find_preset

if TYPE_CHECKING:
    from ..autoparallel.modules.layer_tracing import TracedModel

HELP = "measure the layers of a model, for reshard search"
EXAMPLES = (
    "reshard profile gpt3-125m --shrink 8",
    'reshard profile my_model.py:build --cuts "blocks.*"    # build() returns the model and a batch',
    "reshard search graph.json --profile profile.json --topology dgx_a100 --devices 8 --memory 80GB --samples 64",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add(
        "model",
        help=f"{', '.join(PRESETS)}, or FILE.py:FUNCTION; the function returns (model, batch)",
    )
    add(
        "--cuts",
        action="append",
        default=[],
        metavar="PATHS",
        help="modules of your model before which a stage may begin, such as 'blocks.*'; may be repeated (default: "
        "none, so that the model is one layer)",
    )
    add("--max-tp", type=int, metavar="N", help="largest degree of tensor parallelism of your model (default: 1)")
    add(
        "--shrink",
        type=int,
        default=1,
        metavar="N",
        help="divide width and depth of a preset by N, as in reshard train",
    )
    add("--sequence", type=int, help="tokens of a sample of a preset (default: that of the preset)")
    add("--autocast", choices=("float16", "bfloat16", "none"), help="dtype of computations (default: the preset's)")
    add("--device", default="cpu", help="what to measure on, such as cuda (default: cpu)")
    add("--sample-counts", default="1,2,4", metavar="N,N", help="samples of a measured forward (default: 1,2,4)")
    add("--repeats", type=int, default=5, metavar="N", help="measurements of each, whose median counts (default: 5)")
    add("--graph", default="graph.json", metavar="FILE", help="where to write the layers (default: graph.json)")
    add("--profile", default="profile.json", metavar="FILE", help="where to write the times (default: profile.json)")


def run(options: argparse.Namespace) -> int:
    """Measure, write both files, and print what they contain."""
    if importlib.util.find_spec("torch") is None:
        raise ArgumentError("measuring layers needs torch: pip install 'reshard[torch]'")
    from ..autoparallel.inputs.text_files import check_place, write_text

    counts = _parse_counts(options.sample_counts)
    _check_preset(options)
    for option in ("graph", "profile"):
        check_place(option, getattr(options, option))
    with show_elapsed("loading torch and finding layers"):
        traced = _trace(options)
    from ..autoparallel import profile_layers
    from ..autoparallel.searching import describe_noise

    autocast = options.autocast or (PRESETS[options.model].autocast if options.model in PRESETS else "")
    slow = describe_slow_float16(options.device, autocast, read_flags())
    if slow:
        print(slow, file=sys.stderr, flush=True)
    with show_elapsed("measuring layers") as report:
        profile = profile_layers(traced, options.device, sample_counts=counts, repeats=options.repeats, progress=report)
    write_text(options.graph, traced.graph.to_json())
    profile.save(options.profile)
    print(f"{traced.graph.name}: {count_of(len(traced.graph.layers), 'layer')} of {len(profile.classes)} classes")
    for key in profile.classes:
        names = [layer.name for layer in traced.graph.layers if layer.key == key]
        times = ", ".join(
            f"{format_seconds(one.forward_seconds)} forward and {format_seconds(one.backward_seconds)} backward of "
            f"{count_of(one.num_samples, 'sample')}"
            for one in profile.classes[key][1].measured[-1:]
        )
        print(f"  {format_names(names)}: {times}")
    noise = describe_noise(traced.graph.name, profile.spread(traced.graph))
    if noise:
        print(f"warning: {noise}", file=sys.stderr)
    print(f"wrote {options.graph} and {options.profile}")
    print(
        f"next: reshard search {options.graph} --profile {options.profile} --topology FILE --memory 80GB --samples N "
        "--output plan.json"
    )
    return 0


def _parse_counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ArgumentError(f"--sample-counts is {brief(text)}; it must be numbers of samples, such as 1,2,4")
    return [int(part) for part in parts]


def _trace(options: argparse.Namespace) -> TracedModel:
    """The layers of a preset, or of the model that a function returns.

    Raises:
        ArgumentError: there is no such model, or an option does not fit it.
    """
    import torch

    place, colon, name = options.model.rpartition(":")
    if not colon and name.endswith(".py"):
        raise ArgumentError(f"{name} is a file; pass {name}:FUNCTION, where FUNCTION returns (model, batch)")
    if not colon:
        return _trace_preset(options)
    for option, default in (("shrink", 1), ("sequence", None)):
        if getattr(options, option) != default:
            raise ArgumentError(f"--{option} is for presets; omit it, and let {name} return the model that you want")
    from ..autoparallel import trace_module

    made = _find_function(place, name)()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], torch.nn.Module):
        raise ArgumentError(f"{options.model} returned {brief(made)}; it must return (model, batch)")
    autocast = None if options.autocast in (None, "none") else getattr(torch, options.autocast)
    return trace_module(*made, options.cuts, max_tp=options.max_tp or 1, autocast=autocast)


def _check_preset(options: argparse.Namespace) -> None:
    """Check a preset and its options before torch is loaded, which takes seconds.

    Raises:
        ArgumentError: there is no such preset, or an option does not fit it.
    """
    if ":" in options.model or options.model.endswith(".py"):
        return
    preset = find_preset(options.model)
    for option in ("cuts", "max_tp"):
        if getattr(options, option):
            raise ArgumentError(f"--{option.replace('_', '-')} is for models of your own; omit it for a preset")
    if options.shrink < 1:
        raise ArgumentError(f"--shrink is {options.shrink}; it must be positive")
    if options.sequence is not None:
        if options.sequence < 1:
            raise ArgumentError(f"--sequence is {options.sequence}; it must be positive")
        if not isinstance(preset.config, GPTConfig):
            raise ArgumentError(f"{options.model} has no sequence; omit --sequence")


def _trace_preset(options: argparse.Namespace) -> TracedModel:
    preset = find_preset(options.model).shrunk(options.shrink, 1)
    if options.sequence is not None and isinstance(preset.config, GPTConfig):
        preset = replace(preset, config=replace(preset.config, sequence=options.sequence))
    if options.autocast is not None:
        preset = replace(preset, autocast="" if options.autocast == "none" else options.autocast)
    from .loop import TrainingJob
    from .plan_search import trace_job

    name = options.model if options.shrink == 1 else f"{options.model}/{options.shrink}"
    return trace_job(TrainingJob(name, preset, 1, ""))


def _find_function(place: str, name: str) -> Callable[[], Any]:
    """The function ``name`` of a Python file.

    Raises:
        ArgumentError: there is none.
    """
    path = Path(place)
    if path.suffix != ".py" or not path.is_file():
        raise ArgumentError(f"there is no Python file {place!r}; pass FILE.py:FUNCTION, or a preset")
    if path.stem in sys.modules or path.stem in sys.stdlib_module_names:
        raise ArgumentError(f"{place} has the name of a module that Python or this package uses; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that classes of the file find their module
    sys.path.insert(0, str(path.parent))  # for other files beside it
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ArgumentError(f"{place} has no function {name!r}; pass the function that returns (model, batch)")
    checked: Callable[[], Any] = function
    return checked
