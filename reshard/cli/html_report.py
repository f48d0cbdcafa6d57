"""A plan as an HTML page: bytes between hosts, port loads, broadcast trees, and a timeline of each host."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from reshard.cli.report import describe_plan
from reshard.cost import CostReport, Timeline, find_bound, find_loads, simulate
from reshard.errors import PlanError
from reshard.formatting import format_bytes, format_rate
from reshard.plan import Plan

Tree = tuple[tuple[int, int], ...]

#: Most trees that a page draws; the trees with the most bytes come first.
MAX_TREES = 24
#: Most rows of a page. If there are more hosts, each row is a group of consecutive hosts.
MAX_GROUPS = 32
#: Most ports in the table; the busiest come first.
MAX_PORTS = 2 * MAX_GROUPS
#: Two messages of one pair of hosts are drawn as one if the gap between them is at most this fraction of the time axis.
_MAX_GAP = 0.002
#: Sizes of the timeline in pixels. A lane is one direction of one host, and has one row or more.
_WIDTH, _LABEL_WIDTH, _ROW_HEIGHT, _MIN_LANE_HEIGHT = 1000, 110, 10, 14
_NUM_TICKS = 5
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1120px; padding: 0 1em; }
pre { background: #f4f4f4; padding: 0.8em; overflow-x: auto; }
table { border-collapse: collapse; } td, th { padding: 0.2em 0.7em; text-align: right; border: 1px solid #ddd; }
svg text { font: 11px system-ui, sans-serif; } .trees { display: flex; flex-wrap: wrap; gap: 1em; }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #dde; } pre { background: #22252b; } td, th { border-color: #444; }
  svg text { fill: #dde; } svg line, svg path { stroke: #aab; }
}
"""


@dataclass(frozen=True)
class _HostGroups:
    """The hosts of a plan, in groups of ``size`` consecutive hosts."""

    num_hosts: int
    size: int

    @classmethod
    def of(cls, plan: Plan) -> _HostGroups:
        return cls(plan.topology.num_hosts, -(-plan.topology.num_hosts // MAX_GROUPS))

    def by_rank(self, plan: Plan) -> np.ndarray:
        return plan.topology.host_by_rank // self.size

    def label(self, group: int) -> str:
        first, last = group * self.size, min((group + 1) * self.size, self.num_hosts) - 1
        return f"host {first}" if first == last else f"hosts {first}-{last}"


def plan_to_html(plan: Plan) -> str:
    """Draw a plan as a self-contained HTML page: bytes between hosts, loads of ports, trees and simulated times.

    A page for more than :data:`MAX_GROUPS` hosts shows groups of hosts. If the plan is too large to simulate, the page
    has no timeline.

    Returns:
        The text of the page, to be written to a file.

    Raises:
        PlanError: not a plan.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"plan_to_html needs a Plan, not {type(plan).__name__}")
    groups = _HostGroups.of(plan)
    timeline = None if CostReport(plan).makespan.is_estimate else simulate(plan)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>reshard plan</title>",
        f"<style>{_STYLE}</style></head><body><h1>{escape(str(plan.tensors[0]))}</h1>",
    ]
    if len(plan.tensors) > 1:
        parts.append(f"<p>and {len(plan.tensors) - 1} more tensors</p>")
    parts.append(f"<pre>{escape(describe_plan(plan, max_lines=0).split('...')[0].strip())}</pre>")
    parts.append("<h2>Links</h2><p>Bytes from the host of the row to the host of the column.</p>")
    parts.append(_link_table(plan, groups))
    parts.append("<h2>Ports</h2><p>The bytes through each port, and the time to transfer them at its rate.</p>")
    parts.append(_port_table(plan, find_bound(plan).seconds if timeline is None else timeline.makespan_seconds))
    if groups.size == 1:
        parts.append(
            "<h2>Trees</h2><p>How regions pass between hosts, and the bytes of all regions that take each tree.</p>"
        )
        parts.append(_tree_figures(plan))
    if timeline is None:
        parts.append(f"<p>There is no timeline: {plan.num_messages:,} messages are too many to simulate.</p>")
    else:
        parts.append(
            "<h2>Times</h2><p>Simulated times of the messages that leave and enter each host. The colour shows the "
            "other host. The dashed line is the lower bound.</p>"
        )
        parts.append(_legend(plan, groups))
        parts.append(_draw_timeline(plan, timeline, groups))
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def _colour(host: int) -> str:
    red, green, blue = colorsys.hls_to_rgb(host * 0.618034 % 1.0, 0.55, 0.6)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _inter_host_edges(plan: Plan, groups: _HostGroups) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The transfer, source group, destination group and bytes of each edge between hosts: ``(edges,)`` each."""
    hosts, transfers = plan.topology.host_by_rank, plan.transfers
    edges = np.flatnonzero(hosts[transfers.sender] != hosts[transfers.receiver])
    transfer, group = transfers.transfer_of_edge[edges], groups.by_rank(plan)
    return transfer, group[transfers.sender[edges]], group[transfers.receiver[edges]], plan.message_bytes[transfer]


def _link_table(plan: Plan, groups: _HostGroups) -> str:
    _, a, b, nbytes = _inter_host_edges(plan, groups)
    if not len(a):
        return "<p>Nothing crosses hosts.</p>"
    total: dict[tuple[int, int], int] = {}
    for pair in zip(a.tolist(), b.tolist(), nbytes.tolist(), strict=True):
        total[pair[:2]] = total.get(pair[:2], 0) + pair[2]
    rows = sorted({pair[0] for pair in total})
    columns = sorted({pair[1] for pair in total})
    most = max(total.values())
    lines = ["<table><tr><th></th>", *(f"<th>{groups.label(column)}</th>" for column in columns), "<th>sends</th></tr>"]
    for row in rows:
        lines.append(f"<tr><th>{groups.label(row)}</th>")
        for column in columns:
            cell = total.get((row, column), 0)
            shade = f" style='background: rgba(70, 130, 220, {0.6 * cell / most:.2f})'" if cell else ""
            lines.append(f"<td{shade}>{format_bytes(cell) if cell else ''}</td>")
        lines.append(f"<td>{format_bytes(sum(total.get((row, column), 0) for column in columns))}</td></tr>")
    lines.append("<tr><th>receives</th>")
    lines.extend(f"<td>{format_bytes(sum(total.get((row, column), 0) for row in rows))}</td>" for column in columns)
    lines.append("<td></td></tr></table>")
    return "\n".join(lines)


def _port_table(plan: Plan, seconds: float) -> str:
    end = seconds or 1.0
    lines = ["<table><tr><th></th><th>bytes</th><th>rate</th><th>busy, s</th><th>busy, %</th></tr>"]
    loads = find_loads(plan)
    if len(loads) > MAX_PORTS:
        loads = sorted(loads, key=lambda load: -load.seconds)
    for load in loads[:MAX_PORTS]:
        part = load.seconds / end
        shade = (
            f" style='background: linear-gradient(to right, rgba(70, 130, 220, 0.5) {100 * part:.1f}%, transparent 0)'"
        )
        lines.append(
            f"<tr><th>{load.port}</th><td>{format_bytes(load.nbytes)}</td><td>{format_rate(load.bytes_per_second)}</td>"
            f"<td>{load.seconds:.4g}</td><td{shade}>{part:.1%}</td></tr>"
        )
    more = f"<p>and {len(loads) - MAX_PORTS} less busy ports</p>" if len(loads) > MAX_PORTS else ""
    return "\n".join([*lines, "</table>", more])


def _legend(plan: Plan, groups: _HostGroups) -> str:
    _, a, b, _ = _inter_host_edges(plan, groups)
    hosts = sorted({*a.tolist(), *b.tolist()})
    return (
        "<p>"
        + " ".join(
            f"<span style='background: {_colour(host)}; color: #000; padding: 0 0.5em'>{groups.label(host)}</span>"
            for host in hosts
        )
        + "</p>"
    )


def _find_trees(plan: Plan) -> list[tuple[Tree, int]]:
    """Pairs ``(tree, bytes of the regions that take it)``, most bytes first.

    A tree is the set of ``(sending host, receiving host)`` pairs of one region.
    """
    transfers = plan.transfers
    transfer_of, a, b, nbytes = _inter_host_edges(plan, _HostGroups(plan.topology.num_hosts, 1))
    first = transfers.first_box
    key = np.concatenate([transfers.box_tensor[first, None], transfers.box_start[first]], axis=1)
    edges: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    size: dict[tuple[int, ...], int] = {}
    for transfer, x, y, n in zip(transfer_of.tolist(), a.tolist(), b.tolist(), nbytes.tolist(), strict=True):
        region = tuple(key[transfer].tolist())
        edges.setdefault(region, []).append((x, y))
        size[region] = n
    total: dict[Tree, int] = {}
    for region, row in edges.items():
        tree = tuple(sorted(set(row)))
        total[tree] = total.get(tree, 0) + size[region]
    return sorted(total.items(), key=lambda entry: (-entry[1], entry[0]))


def _tree_figures(plan: Plan) -> str:
    found = _find_trees(plan)
    lines = ["<div class='trees'>"]
    for tree, nbytes in found[:MAX_TREES]:
        lines.append(f"<figure>{_draw_tree(tree)}<figcaption>{format_bytes(nbytes)}</figcaption></figure>")
    lines.append("</div>")
    if len(found) > MAX_TREES:
        lines.append(f"<p>and {len(found) - MAX_TREES} more trees</p>")
    return "\n".join(lines)


def _draw_tree(tree: Tree) -> str:
    """An SVG of a tree. The column of a host is its number of hops from a source."""
    entered = {host for _, host in tree}
    depth = {host: 0 for host, _ in tree if host not in entered}
    while any(x not in depth or y not in depth for x, y in tree):
        more = {y: depth[x] + 1 for x, y in tree if x in depth and y not in depth}
        # Hosts that exchange replicas in both directions have no source among them: start with one of their senders.
        depth.update(more or {next(x for x, _ in tree if x not in depth): 0})
    columns: dict[int, list[int]] = {}
    for host, column in sorted(depth.items()):
        columns.setdefault(column, []).append(host)
    at = {host: (22 + 60 * column, 18 + 30 * i) for column, row in columns.items() for i, host in enumerate(row)}
    width, height = 44 + 60 * max(columns), 36 + 30 * (max(map(len, columns.values())) - 1)
    lines = [f"<svg width='{width}' height='{height}'>"]
    for x, y in tree:
        if x in at and y in at:
            (x0, y0), (x1, y1) = at[x], at[y]
            lines.append(f"<line x1='{x0}' y1='{y0}' x2='{x1}' y2='{y1}' stroke='#888'/>")
    for host, (x, y) in at.items():
        lines.append(f"<circle cx='{x}' cy='{y}' r='12' fill='{_colour(host)}'/>")
        lines.append(f"<text x='{x}' y='{y + 4}' text-anchor='middle'>{host}</text>")
    lines.append("</svg>")
    return "".join(lines)


def _draw_timeline(plan: Plan, timeline: Timeline, groups: _HostGroups) -> str:
    hosts, group = plan.topology.host_by_rank, groups.by_rank(plan)
    messages = timeline.messages
    a, b = group[messages.sender], group[messages.receiver]
    between = np.flatnonzero(hosts[messages.sender] != hosts[messages.receiver])
    if not len(between):
        return "<p>Nothing crosses hosts.</p>"
    end = max(timeline.makespan_seconds, find_bound(plan).seconds)
    scale = (_WIDTH - _LABEL_WIDTH - 40) / end
    lines: list[str] = []
    top = 4
    for host in sorted({*a[between].tolist(), *b[between].tolist()}):
        for side, (mine, other) in enumerate(((a, b), (b, a))):
            which = between[mine[between] == host]
            spans = sorted(_merge_spans(which, other, timeline, _MAX_GAP * end), key=lambda span: span[1:])
            rows: list[float] = [0.0]  # end of the last span in each row; spans that overlap go to different rows
            name = f"{groups.label(host)} {('out', 'in')[side]}"
            lines.append(f"<text x='{_LABEL_WIDTH - 6}' y='{top + 10}' text-anchor='end'>{name}</text>")
            for peer, start, stop in spans:
                free = next((i for i, until in enumerate(rows) if until <= start + _MAX_GAP * end), len(rows))
                if free == len(rows):
                    rows.append(0.0)
                rows[free] = stop
                lines.append(
                    f"<rect x='{_LABEL_WIDTH + start * scale:.2f}' y='{top + free * _ROW_HEIGHT}' "
                    f"width='{max((stop - start) * scale, 0.3):.2f}' height='{_ROW_HEIGHT - 1}' fill='{_colour(peer)}'>"
                    f"<title>{('to', 'from')[side]} {groups.label(peer)}: {start:.6g} to {stop:.6g} s</title></rect>"
                )
            top += max(_MIN_LANE_HEIGHT, _ROW_HEIGHT * len(rows) + 3)
    for tick in range(_NUM_TICKS + 1):
        x = _LABEL_WIDTH + tick / _NUM_TICKS * end * scale
        lines.append(f"<line x1='{x:.2f}' y1='0' x2='{x:.2f}' y2='{top}' stroke='#888' stroke-opacity='0.3'/>")
        lines.append(f"<text x='{x:.2f}' y='{top + 14}' text-anchor='middle'>{tick / _NUM_TICKS * end:.3g} s</text>")
    x = _LABEL_WIDTH + find_bound(plan).seconds * scale
    lines.append(f"<line x1='{x:.2f}' y1='0' x2='{x:.2f}' y2='{top + 18}' stroke='#c22' stroke-dasharray='4 3'/>")
    lines.append(f"<text x='{x:.2f}' y='{top + 30}' text-anchor='middle'>bound {find_bound(plan).seconds:.4g} s</text>")
    size = f"viewBox='0 0 {_WIDTH} {top + 36}' style='width: 100%; max-width: {_WIDTH}px'"
    return "\n".join([f"<svg {size}>", *lines, "</svg>"])


def _merge_spans(
    which: np.ndarray, other: np.ndarray, timeline: Timeline, gap: float
) -> Iterator[tuple[int, float, float]]:
    """Spans ``(peer, start, stop)``. Messages of one peer form one span if their gaps are at most ``gap`` seconds."""
    order: Sequence[int] = which[np.argsort(timeline.start[which], kind="stable")].tolist()
    current: dict[int, tuple[float, float]] = {}
    for message in order:
        peer = int(other[message])
        start, stop = float(timeline.start[message]), float(timeline.finish[message])
        if peer in current and start <= current[peer][1] + gap:
            current[peer] = current[peer][0], max(stop, current[peer][1])
            continue
        if peer in current:
            yield peer, *current[peer]
        current[peer] = start, stop
    for peer, (start, stop) in current.items():
        yield peer, start, stop
