"""The ``reshard`` command line: plan, demo, info and doctor, and the commands of other packages.

Other packages register a module in the entry-point group :data:`COMMAND_GROUP`, under the name of the command. The
module has ``HELP``, ``EXAMPLES``, ``add_arguments(parser)`` and ``run(options) -> exit status``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from reshard import __version__
from reshard.errors import ArgumentError, ReshardError, TopologyError
from reshard.formatting import did_you_mean, format_ranks
from reshard.sharding import Layout, Mesh
from reshard.topology import MACHINES, Topology, load_preset, read_topology

if TYPE_CHECKING:
    from reshard.plan import Plan

#: ``--format json`` refuses to print more messages than this.
MAX_PRINTED_MESSAGES = 1_000_000
#: Entry points of further commands.
COMMAND_GROUP = "reshard.commands"
_MAX_ERROR_CHARS = 2000

_INTRO = """\
Move a sharded tensor from one device mesh and layout to another.

A mesh is a grid of ranks: 2x4 is 2 hosts of 4 devices (the last axis counts the devices of a host).
A layout lists, for each tensor dim, the mesh axes that shard it: R for none, S0 for axis 0, S1 for axis 1, and S01 for
both, with axis 0 major.
Axes may have names: the mesh dp=2,tp=4 and the layout "(dp, -, tp)".

  reshard plan --shape 1024,1024,512 --dtype float32 --src-mesh 2x4 --src "S0 R R" --dst-mesh 3x4 --dst "S0 R R"
      print all messages in order, and a lower bound on the time that the network needs
  reshard demo
      move real tensors between processes on this machine and check every element
  reshard info
      print versions and the available backends
  torchrun --nnodes ... -m reshard doctor
      find what keeps the ranks of a job from reaching each other: interfaces, ports, versions
  reshard train gpt3-125m --shrink 8 --meshes 1x2,2x2 --steps 200
      train a model over pipeline stages
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="reshard", description=_INTRO, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"reshard {__version__}")
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=COMMAND_GROUP)}
    names = ",".join(["plan", "demo", "info", "doctor", *sorted(entries)])
    commands = parser.add_subparsers(dest="command", metavar=f"{{{names}}}")
    _add_own_commands(commands)
    _check_command(parser, sys.argv[1:] if arguments is None else arguments, list(commands.choices) + sorted(entries))
    others = {name: entry.load() for name, entry in sorted(entries.items())}
    for name, module in others.items():
        command = commands.add_parser(name, help=module.HELP, description=_as_sentence(module.HELP))
        module.add_arguments(_with_examples(command, *module.EXAMPLES))
    options = parser.parse_args(arguments)
    try:
        if options.command == "plan":
            return _plan(options)
        if options.command == "demo":
            return _demo(options)
        if options.command == "info":
            return _info()
        if options.command == "doctor":
            return _doctor(options.timeout)
        if options.command in others:
            status: int = others[options.command].run(options)
            return status
    except ReshardError as error:
        text = str(error)
        if len(text) > _MAX_ERROR_CHARS:
            half = _MAX_ERROR_CHARS // 2
            text = f"{text[:half]}\n...\n{text[-half:]}"  # a traceback ends with the error
        print(f"reshard: {type(error).__name__}: {text}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as head, closed the pipe
        sys.stderr.close()
        return 0
    parser.print_help()
    return 2


def _check_command(parser: argparse.ArgumentParser, arguments: Sequence[str], commands: Sequence[str]) -> None:
    """End the process if the first argument is no command, and name a close one."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        meant = did_you_mean(arguments[0], commands)
        parser.error(f"there is no command {arguments[0]!r}; commands are {', '.join(commands)}{meant}")


def _add_own_commands(commands: Any) -> None:
    """Declare the commands that come with this package."""
    plan = commands.add_parser("plan", help="print the messages of a plan", description=_plan.__doc__)
    _add_plan(_with_examples(
        plan,
        'reshard plan --shape 1024,1024 --src-mesh 2x2 --src "S0 R" --dst-mesh 1x2 --dst "R S1"',
        "reshard plan --shape 16384,16384 --src-mesh 8x8 --src S0 --dst-mesh 8x8 --topology dgx_h100 --strategy all",
        "reshard plan --shape 4096 --src-mesh 4 --src S0 --dst-mesh 2 --format html > plan.html",
    ))  # fmt: skip
    help_of_demo = "move real tensors between processes"
    demo = commands.add_parser("demo", help=help_of_demo, description=_as_sentence(help_of_demo))
    _with_examples(
        demo,
        "reshard demo",
        "reshard demo --divide 8    # smaller tensors",
        "reshard demo --device cuda --share-gpus    # 4 ranks",
    )
    demo.add_argument(
        "--divide", type=int, default=4, help="divide each dim of the 2023 study's tensors by this (default: 4)"
    )
    demo.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the tensors (default: cpu)")
    demo.add_argument(
        "--share-gpus", action="store_true", help="let the 4 ranks of --device cuda share GPUs: right, but slow"
    )
    _with_examples(commands.add_parser("info", help="print versions and backends"), "reshard info")
    help_of_doctor = "find what is wrong with this machine; under torchrun, what keeps ranks from reaching each other"
    doctor = commands.add_parser("doctor", help=help_of_doctor, description=_as_sentence(help_of_doctor))
    of_a_job = "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m reshard doctor"
    _with_examples(doctor, "reshard doctor", of_a_job)
    doctor.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for all ranks (default: 60)")


def _as_sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _with_examples(parser: argparse.ArgumentParser, *examples: str) -> argparse.ArgumentParser:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n  ".join(["examples:", *examples])
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", required=True, help="global shape, for example 1024,1024,512; empty for a scalar")
    parser.add_argument("--dtype", default="float32", help="element type (default: float32)")
    parser.add_argument("--src-mesh", required=True, help="source mesh, for example 2x4 or dp=2,tp=4")
    parser.add_argument(
        "--src",
        default="",
        help="source layout, for example 'S0 R R', '(dp, -, -)' or 'Shard(0), Replicate()'; empty: replicated",
    )
    parser.add_argument("--dst-mesh", required=True, help="destination mesh")
    parser.add_argument("--dst", default="", help="destination layout")
    parser.add_argument(
        "--dst-first-rank",
        type=int,
        help="first destination rank (default: the first after the source ranks; without --topology, on other hosts)",
    )
    parser.add_argument("--compression", help="a codec such as int8x128, or auto with codecs in --topology")
    parser.add_argument(
        "--max-error",
        type=float,
        help="with --compression auto: limit on the codec's relative error of normally distributed values",
    )
    parser.add_argument(
        "--strategy",
        help="auto (default), multicast, send_recv, {local,global}_all_gather, broadcast_{naive,size,greedy,search}; "
        "all: a table that compares them",
    )
    parser.add_argument(
        "--topology",
        help=f"{', '.join(MACHINES)}, or a JSON or YAML file: "
        '{"hosts": [{"devices": 4, "nics": ["25 Gbit/s"]}, ...]}; for pods and rates see docs/concepts.md. A file '
        "assigns ranks to hosts; a preset fills its hosts in rank order. Default: the last axis of each mesh counts "
        "the devices of a host, each host has a 10 Gbit/s NIC, a message takes 100 us between hosts, 50 us inside",
    )
    parser.add_argument("--rank", type=int, help="print only the messages of this rank")
    parser.add_argument(
        "--format", choices=("text", "summary", "json", "html"), default="text", help="output format (default: text)"
    )


def _plan(options: argparse.Namespace) -> int:
    """Print a plan, and a lower bound on the time that the network needs."""
    from reshard.planner import make_plan

    src_mesh = Mesh.of(options.src_mesh)
    first = src_mesh.size if options.dst_first_rank is None else options.dst_first_rank
    dst_mesh = Mesh.of(options.dst_mesh, first_rank=first)
    topology = _topology(options.topology, src_mesh, dst_mesh)

    shape = _parse_shape(options.shape)

    def plan_with(strategy: str | None) -> Plan:
        return make_plan(
            Layout(src_mesh, options.src, ndim=len(shape)),
            Layout(dst_mesh, options.dst, ndim=len(shape)),
            shape,
            options.dtype,
            strategy=strategy,
            topology=topology,
            compression=options.compression,
            max_error=options.max_error,
        )

    if options.strategy == "all":
        if options.rank is not None or options.format != "text":
            raise ArgumentError("--strategy all prints a table; omit --rank and --format")
        return _compare(plan_with)
    plan = plan_with(options.strategy)
    if options.rank is not None and options.rank not in plan.ranks:
        raise ArgumentError(f"rank {options.rank} is not in the plan, whose ranks are {format_ranks(plan.ranks)}")
    _print_plan(plan, options.format, options.rank)
    return 0


def _print_plan(plan: Plan, form: str, rank: int | None) -> None:
    """Print a plan in the form that ``--format`` names; with ``rank``, only the messages of that rank."""
    from reshard.cli.html_report import plan_to_html
    from reshard.cli.report import describe_plan

    if form == "json":
        _print_json(plan, rank)
    elif form == "html":
        if rank is not None:
            raise ArgumentError("--format html draws the whole plan; omit --rank")
        print(plan_to_html(plan), end="")
    elif form == "summary":
        if rank is not None:
            raise ArgumentError("--format summary covers the whole plan; omit --rank")
        print(describe_plan(plan, max_lines=0).split("\n\n")[0])
    elif rank is None:
        print(describe_plan(plan))
    else:
        print(describe_plan(plan, max_lines=0).split("...")[0])
        _print_messages(plan, rank)


def _print_messages(plan: Plan, rank: int) -> None:
    from reshard.plan import expand_messages

    for message in expand_messages(plan, rank):
        boxes = " + ".join(
            f"t{tensor} [{', '.join(f'{a}:{b}' for a, b in zip(start, stop, strict=True))}]"
            for tensor, start, stop in message.boxes
        )
        after = "" if message.source is None else f" after {message.source}"
        print(f"{message.id}: {boxes} {message.sender} -> {message.receiver}{after}")


def _print_json(plan: Plan, rank: int | None) -> None:
    if rank is None and plan.num_messages > MAX_PRINTED_MESSAGES:
        raise ArgumentError(f"the plan has {plan.num_messages} messages; select one rank with --rank")
    if rank is not None and plan.count_messages(rank) > MAX_PRINTED_MESSAGES:
        raise ArgumentError(
            f"rank {rank} has {plan.count_messages(rank)} messages; at most {MAX_PRINTED_MESSAGES} can be printed"
        )
    sys.stdout.write(json.dumps(_to_json(plan, rank)))  # dumps is faster than dump: it encodes in C
    print()


def _to_json(plan: Plan, rank: int | None) -> dict[str, Any]:
    """The plan's JSON together with its cost."""
    from reshard.cost import CostReport
    from reshard.plan import plan_to_json

    report = CostReport(plan)
    cost = {
        "lower_bound_seconds": report.lower_bound_seconds,
        "lower_bound_reason": report.bound.reason,
        "predicted_seconds": report.predicted_seconds,
        "is_estimate": report.makespan.is_estimate,
    }
    return plan_to_json(plan, rank) | cost


def _compare(plan_with: Callable[[str | None], Plan]) -> int:
    """Print a table that compares all strategies."""
    from reshard.cli.progress import print_line, track
    from reshard.cost import CostReport, find_bound
    from reshard.planner import AUTO, STRATEGIES

    chosen = plan_with(None)
    bound = find_bound(chosen).seconds
    print(f"lower bound  {bound:.6g} s: {find_bound(chosen).reason}")
    titles = f"{'messages':>10} {'MiB between hosts':>18} {'MiB inside':>11} {'predicted, s':>13} {'x bound':>8}"
    print(f"{'':20} {titles} {'latency':>8}")
    for name in track([AUTO, *(name for name in STRATEGIES if name != AUTO)], "strategies"):
        plan = plan_with(name)
        across, inside, _ = plan.bytes_moved()
        report = CostReport(plan)
        seconds = report.predicted_seconds
        cells = [
            f"{'<' * report.makespan.is_estimate}{seconds:.6g}",
            f"{seconds / bound:.3f}" if bound else "-",
            "-" if report.makespan.is_estimate else f"{100 * report.latency_fraction:.0f} %",
        ]
        title = f"{name} ({plan.strategy})" if plan.strategy != name else name
        sizes = f"{across / 2**20:>18.1f} {inside / 2**20:>11.1f}"
        print_line(f"{title:20} {plan.num_messages:>10} {sizes} {cells[0]:>13} {cells[1]:>8} {cells[2]:>8}")
    print("latency: its share of the predicted time; the bound ignores latency; <: estimated, not simulated")
    return 0


def _parse_shape(text: str) -> list[int]:
    try:
        sizes = [size.strip() for size in text.split(",")] if text.strip() else []
        if not all(size.isascii() and size.isdigit() for size in sizes):
            raise ValueError
        return [int(size) for size in sizes]
    except ValueError:
        raise ArgumentError(f"shape {text!r} is not of the form 1024,1024,512") from None


def _topology(given: str | None, src: Mesh, dst: Mesh) -> Topology:
    """The topology of a preset or of a file; the default if ``given`` is None."""
    if given is None:
        return default_topology(src, dst)
    if given in MACHINES:
        return load_preset(given, 1 + max(*src.ranks, *dst.ranks))
    try:
        return read_topology(given)
    except TopologyError as error:
        if "." in given or "/" in given:
            raise
        raise TopologyError(f"{error}; presets are {', '.join(MACHINES)}{did_you_mean(given, MACHINES)}") from None


def default_topology(src: Mesh, dst: Mesh) -> Topology:
    """One host per row of each mesh, with 10 Gbit/s each way. The last axis counts the devices of a host.

    If a destination row contains source ranks, its other ranks are on the host of the first such rank.
    """
    host_of: dict[int, int] = {}
    count = 0
    for mesh in (src, dst):
        devices = mesh.sizes[-1] if mesh.sizes else 1
        for index in range(0, mesh.size, devices):
            row = mesh.ranks[index : index + devices]
            host = next((host_of[rank] for rank in row if rank in host_of), count)
            count = max(count, host + 1)
            for rank in row:
                host_of.setdefault(rank, host)
    return Topology(tuple(host_of.get(rank, count) for rank in range(1 + max(host_of))))


def _demo(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("torch") is None:
        raise ArgumentError("the demo needs torch: pip install 'reshard[torch]'")
    if not 1 <= options.divide <= 128:
        raise ArgumentError(f"--divide is {options.divide}; it must be from 1 to 128")
    from reshard.cli.demo import run_demo, run_demo_on_gpus

    if options.device == "cuda":
        return run_demo_on_gpus(options.share_gpus)
    if options.share_gpus:
        raise ArgumentError("--share-gpus needs --device cuda")
    return run_demo(options.divide)


def _doctor(timeout_seconds: float) -> int:
    """1 if there are problems, else 0."""
    if not {"RANK", "WORLD_SIZE"} & set(os.environ):
        from reshard.cli.machine import examine_machine

        return print_findings(*examine_machine())
    from reshard.cli.doctor import examine

    found = examine(timeout_seconds)
    return print_findings(*found) if os.environ.get("RANK") == "0" else int(bool(found[1]))


def print_findings(lines: Sequence[str], problems: Sequence[str]) -> int:
    """Print what a doctor found. Returns 1 if there are problems, else 0."""
    for line in (*lines, *(f"PROBLEM {problem}" for problem in problems), *([] if problems else ["no problems found"])):
        print(line)
    return 1 if problems else 0


def _info() -> int:
    rows = [("reshard", __version__), ("python", f"{platform.python_version()} on {platform.platform()}")]
    for package in ("numpy", "scipy", "torch", "jax", "cupy", "ray"):
        try:
            rows.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((package, "not installed"))
    backends = ["local (NumPy or torch arrays of one process)"]
    if importlib.util.find_spec("torch") is not None:
        import torch
        import torch.distributed as dist

        if dist.is_available() and dist.is_gloo_available():
            backends.append("torch (Gloo, CPU tensors)")
        if dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available():
            backends.append(f"torch (NCCL, {torch.cuda.device_count()} GPUs)")
        if importlib.util.find_spec("ray") is not None:
            backends.append("ray (actors, Gloo)")
    if importlib.util.find_spec("cupy") is not None:
        backends.append("cupy (NCCL)")
    rows.append(("backends", ", ".join(backends)))
    for name, value in rows:
        print(f"{name:12} {value}")
    return 0
