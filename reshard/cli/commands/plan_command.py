"""The ``reshard plan`` command: the messages of a plan and its cost, of one tensor or of a whole model."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reshard.cli.model_plan import DIMENSIONS, describe_model_plan, describe_move, hosts_of_eight, plan_model
from reshard.cli.progress_bars import print_line, show_elapsed, track
from reshard.errors import ArgumentError, TopologyError
from reshard.formatting import did_you_mean, format_ranks
from reshard.planner import ALIASES, AUTO, STRATEGIES, make_plan
from reshard.sharding import Layout, Mesh
from reshard.topology import MACHINES, Topology, load_preset, read_topology

if TYPE_CHECKING:
    from reshard.plan import Plan

#: ``--format json`` refuses to print more messages than this.
MAX_PRINTED_MESSAGES = 1_000_000
HELP = "print the messages of a plan, and a lower bound on the time that the network needs"
EXAMPLES = (
    'reshard plan --shape 1024,1024 --src-mesh 2x2 --src "S0 R" --dst-mesh 1x2 --dst "R S1"',
    "reshard plan --shape 16384,16384 --src-mesh 8x8 --src S0 --dst-mesh 8x8 --topology dgx_h100 --strategy all",
    "reshard plan --shape 4096 --src-mesh 4 --src S0 --dst-mesh 2 --format html > plan.html",
    "reshard plan --model config.json --src fsdp=32 --dst tp=8,dp=4 --topology dgx_h100",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    _add_layouts(parser)
    _add_choices(parser)


def _add_layouts(parser: argparse.ArgumentParser) -> None:
    """Add the options for the tensor and for the layouts of its source and destination."""
    parser.add_argument("--shape", help="global shape, for example 1024,1024,512; empty for a scalar")
    parser.add_argument(
        "--model",
        help="in place of --shape and meshes: a config.json of transformers, its folder, or a name. --src and --dst "
        f"are then such as fsdp=32 or tp=8,dp=4, of {', '.join(DIMENSIONS)}; tp is inside hosts",
    )
    parser.add_argument("--dtype", help="element type (default: float32, or that of the model)")
    parser.add_argument("--src-mesh", help="source mesh, for example 2x4 or dp=2,tp=4")
    parser.add_argument(
        "--src",
        default="",
        help="source layout, for example 'S0 R R', '(dp, -, -)' or 'Shard(0), Replicate()'; empty: replicated",
    )
    parser.add_argument("--dst-mesh", help="destination mesh")
    parser.add_argument("--dst", default="", help="destination layout")
    parser.add_argument(
        "--dst-first-rank",
        type=int,
        help="first destination rank (default: the first after the source ranks; without --topology, on other hosts)",
    )


def _add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the options of the strategy, the network and the output."""
    parser.add_argument("--compression", help="a codec such as int8x128, or auto with codecs in --topology")
    parser.add_argument(
        "--max-error",
        type=float,
        help="with --compression auto: limit on the codec's relative error of normally distributed values",
    )
    parser.add_argument(
        "--strategy",
        help=f"auto (default), {', '.join((*STRATEGIES, *ALIASES))}; all: a table that compares them, for one tensor",
    )
    parser.add_argument(
        "--topology",
        help=f"{', '.join(MACHINES)}, or a JSON or YAML file: "
        '{"hosts": [{"devices": 8, "nics": "8 x 400 Gbit/s", "count": 16}], "hosts_per_pod": 4, '
        '"oversubscription": 2, "inside": "450 GB/s", "inside_latency_seconds": 5e-6}. Ranks fill the hosts in order. '
        "Without latencies, a message takes 100 us between hosts and 50 us inside. Default: the last axis of "
        "each mesh counts the devices of a host (with --model: 8), and each host has a 10 Gbit/s NIC",
    )
    parser.add_argument("--rank", type=int, help="print only the messages of this rank")
    parser.add_argument(
        "--format", choices=("text", "summary", "json", "html"), default="text", help="output format (default: text)"
    )


def run(options: argparse.Namespace) -> int:
    """Print a plan, and a lower bound on the time that the network needs."""
    if options.model is not None:
        return _plan_model(options)
    for name in ("shape", "src_mesh", "dst_mesh"):
        if getattr(options, name) is None:
            raise ArgumentError(
                f"--{name.replace('_', '-')} is missing; a plan needs --shape, --src-mesh and --dst-mesh, or --model; "
                "reshard plan --help has examples"
            )
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
            options.dtype or "float32",
            strategy=strategy,
            topology=topology,
            compression=options.compression,
            max_error=options.max_error,
        )

    if options.strategy == "all":
        if options.rank is not None or options.format != "text":
            raise ArgumentError("--strategy all prints a table; omit --rank and --format")
        return _compare(plan_with)
    with show_elapsed("planning"):
        plan = plan_with(options.strategy)
    _check_rank(options.rank, plan)
    is_named = options.strategy not in (None, AUTO)
    _print_plan(plan, options.format, options.rank, plan_auto=functools.partial(plan_with, None) if is_named else None)
    return 0


def _plan_model(options: argparse.Namespace) -> int:
    """Print the plan of a whole model."""
    for name in ("shape", "src_mesh", "dst_mesh", "dst_first_rank"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ArgumentError(f"{flag} and --model exclude each other: --src and --dst then give the parallelism")
    if options.strategy == "all":
        raise ArgumentError("--strategy all compares plans of one tensor; with --model omit it, or name one strategy")
    given = options.topology
    planned = plan_model(
        options.model,
        options.src,
        options.dst,
        hosts_of_eight if given is None else functools.partial(_topology_of_name, given),
        dtype=options.dtype,
        strategy=options.strategy,
        compression=options.compression,
        max_error=options.max_error,
    )
    _check_rank(options.rank, planned.plan)
    if options.format in ("text", "summary") and options.rank is None:
        with show_elapsed("predicting its time"):
            text = describe_model_plan(planned, lists_classes=options.format == "text")
        print(text)
    else:
        _print_plan(planned.plan, options.format, options.rank, describe_move(planned, options.src, options.dst))
    return 0


def _check_rank(rank: int | None, plan: Plan) -> None:
    if rank is not None and rank not in plan.ranks:
        raise ArgumentError(f"rank {rank} is not in the plan, whose ranks are {format_ranks(plan.ranks)}")


def _print_plan(
    plan: Plan,
    form: str,
    rank: int | None,
    title: str | None = None,
    plan_auto: Callable[[], Plan] | None = None,
) -> None:
    """Print a plan in the form that ``--format`` names; with ``rank``, only the messages of that rank.

    Args:
        title: the heading of a page.
        plan_auto: makes the plan of ``auto``, if another strategy was named.
    """
    from reshard.cli.plan_description import describe_plan
    from reshard.cli.plan_page.html_report import plan_to_html

    if form == "json":
        _print_json(plan, rank)
    elif form == "html":
        if rank is not None:
            raise ArgumentError("--format html draws the whole plan; omit --rank")
        print(plan_to_html(plan, title), end="")
    elif form == "summary":
        if rank is not None:
            raise ArgumentError("--format summary covers the whole plan; omit --rank")
        print(describe_plan(plan, max_lines=0, plan_auto=plan_auto).split("\n\n")[0])
    elif rank is None:
        print(describe_plan(plan, plan_auto=plan_auto))
    else:
        print(describe_plan(plan, max_lines=0, plan_auto=plan_auto).split("...")[0])
        _print_messages(plan, rank)


def _print_messages(plan: Plan, rank: int) -> None:
    from reshard.plan import expand_messages

    for message in expand_messages(plan, rank):
        boxes = " + ".join(
            f"t{tensor} [{', '.join(f'{a}:{b}' for a, b in zip(start, stop, strict=True))}]"
            for tensor, start, stop in message.boxes
        )
        sources = {ident for ident in (message.source, *message.gathered) if ident is not None}
        after = f" after {','.join(map(str, sorted(sources)))}" if sources else ""
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
    with_latency = report.latency_bounds
    cost = {
        "lower_bound_seconds": report.lower_bound_seconds,
        "lower_bound_reason": report.bound.reason,
        "latency_bound_seconds": None if with_latency is None else with_latency.any_plan_seconds,
        "unmerged_bound_seconds": None if with_latency is None else with_latency.unmerged_seconds,
        "predicted_seconds": report.predicted_seconds,
        "is_estimate": report.makespan.is_estimate,
    }
    return plan_to_json(plan, rank) | cost


def _compare(plan_with: Callable[[str | None], Plan]) -> int:
    """Print a table that compares all strategies."""
    from reshard.cost import CostReport, find_bound

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
    return _topology_of_name(given, 1 + max(*src.ranks, *dst.ranks))


def _topology_of_name(given: str, num_ranks: int) -> Topology:
    """The topology of a preset for this many ranks, or of a file."""
    if given in MACHINES:
        return load_preset(given, num_ranks)
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
            host_ranks = mesh.ranks[index : index + devices]
            host = next((host_of[rank] for rank in host_ranks if rank in host_of), count)
            count = max(count, host + 1)
            for rank in host_ranks:
                host_of.setdefault(rank, host)
    return Topology(tuple(host_of.get(rank, count) for rank in range(1 + max(host_of))))
