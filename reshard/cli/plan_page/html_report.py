"""A plan as an HTML page: hosts and what they send each other, played through time; trees; times; tables."""

from __future__ import annotations

import math
from html import escape

import numpy as np

from reshard.cli.plan_description import describe_plan
from reshard.cli.plan_page import plan_player, plan_times, plan_trees
from reshard.cost import Bound, CostReport, Makespan, describe_ties, find_busiest_ports, predict_timeline
from reshard.drawing import draw_page
from reshard.errors import PlanError
from reshard.formatting import count_of, format_bytes, format_rate, format_seconds
from reshard.plan import HostBoxes, Load, Plan, Traffic, describe_load, draw_boxes, draw_roles, find_loads, name_tensors

#: Largest number of rows of a table; those with the most bytes, or the busiest, come first.
MAX_ROWS = 64
#: Largest number of characters of the plan's text.
MAX_TEXT = 100_000
#: The busiest port is named in place of the bound if it needs more than this many times the bound.
_ABOVE_BOUND = 1.001
_STYLE = """
.reshard .hosts { max-width: 660px; }
.reshard .said { font-size: 1.15em; border-left: 4px solid var(--hot); padding-left: 0.7em; }
@media (min-width: 960px) {
  .reshard .top { display: grid; grid-template-columns: minmax(0, 660px) minmax(260px, 1fr); gap: 28px; }
}
"""


def plan_to_html(plan: Plan, title: str | None = None) -> str:
    """Draw a plan as a self-contained HTML page of at most 2 MB.

    The page begins with its hosts, the bytes between them as arrows, and a sentence that names the bottleneck. A slider
    plays the simulated transfer through time. Trees, a chart of times, and tables follow. If there are more than 16
    hosts on a side, each box is a group of hosts. A plan that is too large to simulate is drawn without times.

    Args:
        plan: the plan.
        title: the heading. Default: the bytes of the tensors, and the number of ranks and hosts on each side.

    Returns:
        The text of the page, to be written to a file.

    Raises:
        PlanError: not a plan.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"plan_to_html needs a Plan, not {type(plan).__name__}")
    makespan, timeline = predict_timeline(plan)
    report, loads, boxes = CostReport(plan), find_loads(plan), HostBoxes.of(plan)
    bound = report.bound
    sentence, marked = find_bottleneck(bound, loads, makespan)
    traffic = boxes.find_traffic(marked)
    drawn = f"<div class='hosts'>{draw_boxes(boxes, traffic, marked)}{plan_player.CONTROLS}</div>"
    named = f"<p>{escape(name_tensors(plan))}</p>"
    beside = [named, _describe_bytes(plan), draw_roles(boxes), _describe_arrows(traffic)]
    parts = [
        f"<h1>{escape(title or _describe_move(plan))}</h1>",
        f"<p class='said'>{sentence}</p>{_describe_causes(report)}",
        f"<div class='top'>{drawn}<div>{''.join(beside)}</div></div>",
    ]
    if all(box.is_host for box in boxes.all) and len(traffic.nbytes):
        parts.append(f"<h2>Trees</h2>{plan_trees.draw_trees(plan)}")
    progress = np.zeros((0, 0))
    if timeline is None:
        parts.append(f"<p>There are no times: {plan.num_messages:,} messages are too many to simulate.</p>")
    elif len(traffic.nbytes):
        progress = plan_times.sample_progress(boxes, traffic, timeline)
        times = plan_times.draw_times(boxes, traffic, timeline, progress, bound.seconds)
        parts.append(f"<h2>Times</h2>{times}")
    parts.append(_tables(report, boxes, traffic, loads, makespan.seconds))
    if len(progress):
        data = plan_times.write_progress(boxes, traffic, progress, makespan.seconds)
        parts.append(f"<script type='application/json' id='progress'>{data}</script>")
        parts.append(f"<script>{plan_player.SCRIPT}</script>")
    style = _STYLE + plan_player.STYLE + plan_times.STYLE + plan_trees.STYLE
    return draw_page("reshard plan", "\n".join(parts), style)


def find_bottleneck(bound: Bound, loads: list[Load], makespan: Makespan) -> tuple[str, tuple[str, ...]]:
    """A sentence of HTML that names the bottleneck of a plan, and the names of its ports."""
    takes = f"{'at most ' * makespan.is_estimate}{format_seconds(makespan.seconds)}"
    if makespan.is_estimate:
        takes += " (estimated, not simulated)"
    if not loads:
        return f"Nothing crosses hosts; this plan takes {takes}.", ()
    limit = f"no plan{'' if bound.holds_with_relays else ' without relays'} is faster than "
    busiest = max(loads, key=lambda load: load.seconds)
    if busiest.seconds <= bound.seconds * _ABOVE_BOUND:
        ties = describe_ties(len(find_busiest_ports(loads)) - len(bound.ports), "; ")
        text = f"<b class='hot'>{bound.reason[:1].upper()}{bound.reason[1:]}</b>: {limit}"
        return f"{text}{format_seconds(bound.seconds)}; this one takes {takes}{ties}.", bound.ports
    text = (
        f"<b class='hot'>{describe_load(busiest)}</b>, which needs {format_seconds(busiest.seconds)}: this plan takes "
        f"{takes}. {limit[:1].upper()}{limit[1:]}{format_seconds(bound.seconds)}, because {bound.reason}."
    )
    return text, (busiest.port,)


def _describe_move(plan: Plan) -> str:
    nbytes = sum(math.prod(spec.shape) * spec.itemsize for spec in plan.tensors)
    sides = []
    for layouts in ([spec.src for spec in plan.tensors], [spec.dst for spec in plan.tensors]):
        ranks = {rank for layout in {id(layout): layout for layout in layouts}.values() for rank in layout.ranks}
        hosts = {plan.topology.host_of_rank[rank] for rank in ranks}
        sides.append(f"{count_of(len(ranks), 'rank')} on {count_of(len(hosts), 'host')}")
    return f"{format_bytes(nbytes)} from {sides[0]} to {sides[1]}"


def _describe_causes(report: CostReport) -> str:
    lines = (line.split(maxsplit=2)[2] for line in report.causes)  # after the two words of its label
    labels = ("Beyond the bound", "What would help")
    return "".join(f"<p>{label}: {escape(line)}.</p>" for label, line in zip(labels, lines, strict=False))


def _describe_bytes(plan: Plan) -> str:
    across, inside, copied = plan.bytes_moved()
    return (
        f"<p>{escape(plan.strategy)}: {format_bytes(across)} between hosts, {format_bytes(inside)} inside hosts, "
        f"{format_bytes(copied)} copied within ranks, in {count_of(plan.num_messages, 'message')}.</p>"
    )


def _describe_arrows(traffic: Traffic) -> str:
    if not len(traffic.nbytes):
        return ""
    smallest, largest = format_bytes(traffic.nbytes.min()), format_bytes(traffic.nbytes.max())
    widths = f"each is {largest}" if smallest == largest else f"the widest is {largest}, the thinnest {smallest}"
    return (
        f"<p>Arrows are as wide as the bytes between two boxes: {widths}. The bar at the bottom of a box fills as its "
        "bytes arrive. A port is one direction of a NIC or of the uplink of a pod.</p>"
    )


def _tables(report: CostReport, boxes: HostBoxes, traffic: Traffic, loads: list[Load], seconds: float) -> str:
    summary = describe_plan(report.plan, max_lines=0, report=report).split("...")[0].strip()[:MAX_TEXT]
    folded = [
        ("Bytes between hosts", _link_table(boxes, traffic)),
        ("Ports", _port_table(loads, seconds)),
        ("The plan as text", f"<pre>{escape(summary)}</pre>"),
    ]
    parts = (f"<details><summary>{name}</summary><div class='scroll'>{table}</div></details>" for name, table in folded)
    return f"<h2>Tables</h2>{''.join(parts)}"


def _link_table(boxes: HostBoxes, traffic: Traffic) -> str:
    lines = ["<table><tr><th>from</th><th>to</th><th>bytes</th></tr>"]
    order = np.argsort(-traffic.nbytes, kind="stable")
    for arrow in order[:MAX_ROWS].tolist():
        names = (boxes.all[int(ends[arrow])].label for ends in (traffic.sender, traffic.receiver))
        cells = "".join(f"<th>{name}</th>" for name in names)
        lines.append(f"<tr>{cells}<td>{format_bytes(int(traffic.nbytes[arrow]))}</td></tr>")
    return "\n".join([*lines, "</table>", _and_more(len(order), "smaller pair")])


def _port_table(loads: list[Load], seconds: float) -> str:
    end = seconds if seconds and math.isfinite(seconds) else 1.0
    lines = ["<table><tr><th></th><th>bytes</th><th>rate</th><th>busy</th><th>busy, %</th></tr>"]
    for load in sorted(loads, key=lambda load: -load.seconds)[:MAX_ROWS]:
        shade = f"linear-gradient(to right, var(--flow) {100 * load.seconds / end:.1f}%, transparent 0)"
        lines.append(
            f"<tr><th>{load.port}</th><td>{format_bytes(load.nbytes)}</td><td>{format_rate(load.bytes_per_second)}</td>"
            f"<td>{format_seconds(load.seconds)}</td><td style='background: {shade}'>{load.seconds / end:.1%}</td></tr>"
        )
    return "\n".join([*lines, "</table>", _and_more(len(loads), "less busy port")])


def _and_more(count: int, noun: str) -> str:
    return f"<p>and {count_of(count - MAX_ROWS, noun)}</p>" if count > MAX_ROWS else ""
