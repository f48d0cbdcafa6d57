"""The ``search`` subcommand of ``reshard``."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reshard.cli.model_shapes import read_model
from reshard.cli.progress_bars import show_elapsed
from reshard.errors import ArgumentError
from reshard.formatting import count_of
from reshard.topology import MACHINES, Topology, load_preset, read_topology

from .costs.layer_costs import MIXED_PRECISION, StateBytes
from .inputs.cluster import MIN_MEMORY_BYTES, Cluster
from .inputs.layer_graph import LayerGraph
from .inputs.layer_profile import EFFICIENCY, LayerProfile
from .inputs.model_graph import make_model_graph
from .inputs.text_files import check_place, read_text, read_value, write_text
from .methods.auto_method import METHODS
from .searching import search

HELP = "search for a training plan: stages, devices, parallelism, schedule and microbatches"
EXAMPLES = (
    "reshard search transformer:layers=24,hidden=2048,heads=16,sequence=2048,vocabulary=50257 --topology dgx_a100 "
    "--devices 16 --memory 80GB --flops 312T --samples 256 --mixed",
    "reshard search --model config.json --sequence 4096 --topology dgx_h100 --devices 64 --memory 80GB --flops 989T "
    "--samples 256 --mixed",
    "reshard search graph.json --topology hosts.json --memory 40GB --profile profile.json --samples 64 --output "
    "plan.json",
)
_UNITS = {
    "": 1.0,
    "B": 1.0,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KIB": 2.0**10,
    "MIB": 2.0**20,
    "GIB": 2.0**30,
}
#: Units of operations per second.
_PREFIXES = {"": 1.0, "G": 1e9, "T": 1e12, "P": 1e15}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add(
        "graph",
        nargs="?",
        help="JSON of a LayerGraph, or transformer:layers=24,hidden=2048,heads=16,sequence=2048,vocabulary=50257; "
        "tied=1 if the head shares the table of the embedding",
    )
    add(
        "--model",
        help="in place of a graph: a config.json of transformers, its folder, or a name on the Hugging Face Hub",
    )
    add("--sequence", type=int, help="with --model: tokens of a sample")
    add("--topology", required=True, help=f"{', '.join(MACHINES)}, or a JSON or YAML file of hosts")
    add("--devices", type=int, help="number of devices; needed with the name of a machine (default: all of the file)")
    add("--memory", required=True, help="memory of a device, for example 80GB")
    add("--samples", type=int, required=True, help="samples of a step")
    add("--profile", help="JSON of a LayerProfile, as reshard profile writes it")
    add(
        "--flops",
        help="without --profile: peak operations per second of a device, such as 989T or 989e12, to estimate times",
    )
    add("--efficiency", type=float, help=f"fraction of --flops that layers reach (default: {EFFICIENCY})")
    add("--mixed", action="store_true", help="16-bit parameters with float32 optimizer states (default: float32)")
    add("--method", choices=["auto", *METHODS], default="auto", help="search method (default: auto)")
    add(
        "--fixed",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="fix num_microbatches, tp, zero, recompute, idle=0, or grid=2x2x1",
    )
    add("--compression", metavar="POLICY", help="codecs that may be used, such as dp=int8x128,pp=int8x128; lossy")
    add("--html", metavar="FILE", help="draw a page: time and memory of each stage with the limits, and the schedule")
    add("--svg", metavar="FILE", help="draw the stages on their hosts")
    add("--output", metavar="FILE", help="write the training plan here")


def run(options: argparse.Namespace) -> int:
    """Search, and print where time and memory go."""
    for option in ("html", "svg", "output"):
        if getattr(options, option):
            check_place(option, getattr(options, option))
    if (options.profile is None) == (options.flops is None):
        raise ArgumentError("pass either --profile (measured times) or --flops (estimated times)")
    if options.profile is not None and options.efficiency is not None:
        raise ArgumentError("--efficiency is for times that --flops estimates; omit it or pass --flops, not --profile")
    flops = None if options.flops is None else parse_flops(options.flops)
    cluster = Cluster(
        find_topology(options.topology, options.devices), parse_bytes(options.memory), options.devices or 0
    )
    fixed = parse_fixed(options.fixed)
    graph = _find_graph(options)
    efficiency = EFFICIENCY if options.efficiency is None else float(options.efficiency)
    if flops is None:
        profile = LayerProfile.read(options.profile)
    else:
        profile = LayerProfile.estimate(graph, flops_per_second=flops, efficiency=efficiency)
    with show_elapsed("searching") as report:
        training_plan = search(
            graph,
            cluster,
            profile,
            num_samples=options.samples,
            fixed=fixed,
            method=options.method,
            states=MIXED_PRECISION if options.mixed else StateBytes(),
            compression=None if options.compression is None else _read_policy(options.compression),
            progress=report,
        )
    if flops is not None:
        print(f"estimated times: layers reach {efficiency:g} of --flops {flops:g} (--efficiency)")
    print(f"topology: {cluster.topology.describe()}")
    print(training_plan.explain())
    if options.html:
        write_text(options.html, training_plan.to_html())
    if options.svg:
        write_text(options.svg, training_plan.to_svg())
    if options.output:
        training_plan.save(options.output)
    written = [name for name in (options.html, options.svg, options.output) if name]
    if written:
        print(f"wrote {' and '.join(written)}")
    if not options.output:
        print(
            "next: --output plan.json keeps this training plan; TrainingPlan.read reads it for "
            "Pipe(model, training_plan=...)"
        )
    return 0


def find_topology(text: str, devices: int | None) -> Topology:
    """The topology of ``--topology``: that of a machine for a number of devices, or that of a file.

    Raises:
        ArgumentError: the machine needs a number of devices.
    """
    if text not in MACHINES:
        return read_topology(text)
    if devices is None:
        raise ArgumentError(f"--topology {text} needs --devices")
    return load_preset(text, devices)


def parse_flops(text: str) -> float:
    """Operations per second from ``"989e12"``, ``"989T"`` or ``"989 TFLOPS"``.

    Raises:
        ArgumentError: it is not a positive number, or the unit is unknown.
    """
    pattern = r"\s*([0-9]+(?:\.[0-9]*)?(?:e\+?[0-9]+)?)\s*([gtp]?)(?:flops|flop/s)?\s*"
    match = re.fullmatch(pattern, text, flags=re.IGNORECASE)
    flops = float(match[1]) * _PREFIXES[match[2].upper()] if match is not None else 0.0
    if not 0 < flops < math.inf:
        raise ArgumentError(f"--flops {text!r} must be a positive number of operations per second, such as 989T")
    return flops


def parse_bytes(text: str) -> float:
    """Bytes from ``"80GB"`` or ``"64 GiB"``.

    Raises:
        ArgumentError: the unit is unknown, or it is too little for a device.
    """
    pattern = r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-z]*)\s*"
    match = re.fullmatch(pattern, text, flags=re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS or math.isinf(float(match[1])):
        raise ArgumentError(f"--memory {text!r} must be a number of bytes with a unit, such as 80GB")
    nbytes = float(match[1]) * _UNITS[match[2].upper()]
    if nbytes < MIN_MEMORY_BYTES:
        raise ArgumentError(f"--memory {text!r} is {nbytes:,.0f} bytes; a device needs at least 1 MiB, such as 80GB")
    return nbytes


def _read_policy(text: str) -> Any:
    from reshard.compression import parse_policy  # imports torch

    return parse_policy(text)


def _find_graph(options: argparse.Namespace) -> LayerGraph:
    """The graph of the options: from a file or sizes, or of a model of transformers."""
    if (options.graph is None) == (options.model is None):
        raise ArgumentError("pass either a graph, such as graph.json or transformer:layers=..., or --model config.json")
    if (options.model is None) != (options.sequence is None):
        raise ArgumentError("--model and --sequence need each other: --model config.json --sequence 4096")
    if options.graph is not None:
        return _read_graph(options.graph)
    if not 1 <= options.sequence <= 2**40:
        raise ArgumentError(f"--sequence is {options.sequence}; it must be from 1 to {2**40}")
    model = read_model(options.model, None)
    graph = make_model_graph(model, options.sequence)
    print(f"model {model.name}: {count_of(len(graph.layers) - 2, 'layer')}, {graph.num_params / 1e9:.3g} B parameters")
    if all(layer.tp_limit == 1 for layer in graph.layers[:-1]):
        print(f"tp stays 1: transformers has no tensor-parallel plan for the layers of {model.name}")
    return graph


def _read_graph(text: str) -> LayerGraph:
    kind, separator, sizes = text.partition(":")
    if not separator:
        path = Path(text)
        if not path.is_file():
            raise ArgumentError(f"there is no file {text!r}; pass the JSON of a LayerGraph, or transformer:layers=...")
        if '"model_type"' in read_text(path):
            raise ArgumentError(f"{text} is the config of a model; pass it as --model {text}, with --sequence")
        return read_value(path, LayerGraph.from_json)
    if kind != "transformer":
        raise ArgumentError(f"no model {kind!r}; write transformer:layers=24,hidden=2048,heads=16,sequence=2048")
    values: dict[str, Any] = {}
    for part in sizes.split(","):
        name, _, value = part.partition("=")
        if name in values:
            raise ArgumentError(f"{text!r} names {name} twice")
        if name == "tied" and value in ("0", "1"):
            values[name] = value == "1"
        elif name in ("layers", "hidden", "heads", "sequence", "vocabulary") and value.isdecimal():
            values[name] = int(value)
        else:
            raise ArgumentError(
                f"{part!r} of {text!r} must be layers, hidden, heads, sequence or vocabulary = a number, or tied=1"
            )
    missing = sorted({"layers", "hidden", "heads", "sequence"} - set(values))
    if missing:
        raise ArgumentError(f"{text!r} lacks {', '.join(missing)}")
    return LayerGraph.transformer(**values)


def parse_fixed(parts: Sequence[str]) -> dict[str, Any]:
    """The parts that ``--fixed NAME=NUMBER`` fixes, and ``grid=ROWSxCOLSxDEPTH`` or ``grid=none``.

    Raises:
        ArgumentError: a part is malformed.
    """
    kept: dict[str, Any] = {}
    for text in parts:
        name, _, value = text.partition("=")
        if name in kept:
            raise ArgumentError(f"--fixed names {name!r} twice")
        if name == "grid" and (value == "none" or re.fullmatch(r"\d+x\d+x\d+", value)):
            kept[name] = None if value == "none" else tuple(map(int, value.split("x")))
        elif name != "grid" and value.isdecimal():
            kept[name] = int(value)
        else:
            raise ArgumentError(f"--fixed {text!r} must be NAME=NUMBER, such as tp=8 or recompute=1, or grid=2x2x1")
    return kept
