"""A plan as an HTML page: bytes between hosts, port loads, broadcast trees, and a timeline of each host."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from reshard.cli.report import describe_plan
from reshard.cost.lower_bound import find_bound
from reshard.cost.port_loads import find_loads
from reshard.cost.report import CostReport
from reshard.cost.simulator import Timeline, simulate
from reshard.formatting import format_bytes, format_rate
from reshard.plan.model import Plan

Tree = tuple[tuple[int, int], ...]

#: Trees that a page draws, largest first.
MAX_TREES = 24
#: Rows of a page. If there are more hosts, each row is a group of consecutive hosts.
MAX_GROUPS = 32
#: Ports in the table, busiest first.
MAX_PORTS = 2 * MAX_GROUPS
#: Messages of one pair of hosts are drawn as one if the gap between them is at most this fraction of the makespan.
_GAP = 0.002
_WIDTH, _LANE, _ROW, _LEFT, _TICKS = 1000, 14, 10, 110, 5
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
class _Groups:
    """The hosts of a plan, in groups of ``size`` consecutive hosts."""

    num_hosts: int
    size: int

    @classmethod
    def of(cls, plan: Plan) -> _Groups:
        return cls(plan.topology.num_hosts, -(-plan.topology.num_hosts // MAX_GROUPS))

    def by_rank(self, plan: Plan) -> np.ndarray:
        return plan.topology.host_by_rank // self.size

    def label(self, group: int) -> str:
        first, last = group * self.size, min((group + 1) * self.size, self.num_hosts) - 1
        return f"host {first}" if first == last else f"hosts {first}-{last}"


def format_html(plan: Plan) -> str:
    """A self-contained HTML page.

    A page for more than :data:`MAX_GROUPS` hosts shows groups of hosts. A plan that is too large to simulate is drawn
    without times.
    """
    groups = _Groups.of(plan)
    timeline = None if CostReport(plan).predicted_seconds is None else simulate(plan)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>reshard plan</title>",
        f"<style>{_STYLE}</style></head><body><h1>{escape(str(plan.tensors[0]))}</h1>",
    ]
    if len(plan.tensors) > 1:
        parts.append(f"<p>and {len(plan.tensors) - 1} more tensors</p>")
    parts.append(f"<pre>{escape(describe_plan(plan, max_lines=0).split('...')[0].strip())}</pre>")
    parts.append("<h2>Links</h2><p>Bytes from the host of the row to the host of the column.</p>")
    parts.append(_links(plan, groups))
    parts.append("<h2>Ports</h2><p>The bytes through each port, and the time that they take.</p>")
    parts.append(_ports(plan, find_bound(plan).seconds if timeline is None else timeline.makespan_seconds))
    if groups.size == 1:
        parts.append("<h2>Trees</h2><p>The paths of regions between hosts, and the bytes of all regions on each.</p>")
        parts.append(_trees(plan))
    if timeline is None:
        parts.append(f"<p>Times are not drawn: {plan.num_messages:,} messages are too many to simulate.</p>")
    else:
        parts.append(
            "<h2>Times</h2><p>Simulated times of the messages that leave and enter each host. The colour is that of "
            "the other host; the dashed line is the lower bound.</p>"
        )
        parts.append(_legend(plan, groups))
        parts.append(_timeline_of_hosts(plan, timeline, groups))
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def _colour(host: int) -> str:
    red, green, blue = colorsys.hls_to_rgb(host * 0.618034 % 1.0, 0.55, 0.6)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _inter_host_edges(plan: Plan, groups: _Groups) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The transfer, source group, destination group and bytes of each edge between hosts: ``(edges,)`` each."""
    hosts, transfers = plan.topology.host_by_rank, plan.transfers
    edges = np.flatnonzero(hosts[transfers.sender] != hosts[transfers.receiver])
    transfer, group = transfers.transfer_of_edge[edges], groups.by_rank(plan)
    return transfer, group[transfers.sender[edges]], group[transfers.receiver[edges]], plan.message_bytes[transfer]


def _links(plan: Plan, groups: _Groups) -> str:
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


def _ports(plan: Plan, seconds: float) -> str:
    end = seconds or 1.0
    lines = ["<table><tr><th></th><th>bytes</th><th>rate</th><th>busy, s</th><th>of the whole</th></tr>"]
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


def _legend(plan: Plan, groups: _Groups) -> str:
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
    """``(tree, bytes of the regions that take it)``, most bytes first. A tree is the set of host pairs of a region."""
    transfers = plan.transfers
    transfer_of, a, b, nbytes = _inter_host_edges(plan, _Groups(plan.topology.num_hosts, 1))
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


def _trees(plan: Plan) -> str:
    found = _find_trees(plan)
    lines = ["<div class='trees'>"]
    for tree, nbytes in found[:MAX_TREES]:
        lines.append(f"<figure>{_draw_tree(tree)}<figcaption>{format_bytes(nbytes)}</figcaption></figure>")
    lines.append("</div>")
    if len(found) > MAX_TREES:
        lines.append(f"<p>and {len(found) - MAX_TREES} more trees</p>")
    return "\n".join(lines)


def _draw_tree(tree: Tree) -> str:
    """An SVG with the hosts in columns, by their distance from a source."""
    entered = {host for _, host in tree}
    depth = {host: 0 for host, _ in tree if host not in entered}
    while True:
        more = {y: depth[x] + 1 for x, y in tree if x in depth and y not in depth}
        if not more:
            break
        depth.update(more)
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


def _timeline_of_hosts(plan: Plan, timeline: Timeline, groups: _Groups) -> str:
    hosts, group = plan.topology.host_by_rank, groups.by_rank(plan)
    messages = timeline.messages
    a, b = group[messages.sender], group[messages.receiver]
    between = np.flatnonzero(hosts[messages.sender] != hosts[messages.receiver])
    if not len(between):
        return "<p>Nothing crosses hosts.</p>"
    end = max(timeline.makespan_seconds, find_bound(plan).seconds)
    scale = (_WIDTH - _LEFT - 40) / end
    lines: list[str] = []
    top = 4
    for host in sorted({*a[between].tolist(), *b[between].tolist()}):
        for side, (mine, other) in enumerate(((a, b), (b, a))):
            which = between[mine[between] == host]
            spans = sorted(_join(which, other, timeline, _GAP * end), key=lambda span: span[1:])
            rows: list[float] = [0.0]  # end of the last span of each row; overlapping spans get different rows
            name = f"{groups.label(host)} {('out', 'in')[side]}"
            lines.append(f"<text x='{_LEFT - 6}' y='{top + 10}' text-anchor='end'>{name}</text>")
            for peer, start, stop in spans:
                free = next((i for i, until in enumerate(rows) if until <= start + _GAP * end), len(rows))
                if free == len(rows):
                    rows.append(0.0)
                rows[free] = stop
                lines.append(
                    f"<rect x='{_LEFT + start * scale:.2f}' y='{top + free * _ROW}' "
                    f"width='{max((stop - start) * scale, 0.3):.2f}' height='{_ROW - 1}' fill='{_colour(peer)}'>"
                    f"<title>{('to', 'from')[side]} {groups.label(peer)}: {start:.6g} to {stop:.6g} s</title></rect>"
                )
            top += max(_LANE, _ROW * len(rows) + 3)
    for tick in range(_TICKS + 1):
        x = _LEFT + tick / _TICKS * end * scale
        lines.append(f"<line x1='{x:.2f}' y1='0' x2='{x:.2f}' y2='{top}' stroke='#888' stroke-opacity='0.3'/>")
        lines.append(f"<text x='{x:.2f}' y='{top + 14}' text-anchor='middle'>{tick / _TICKS * end:.3g} s</text>")
    x = _LEFT + find_bound(plan).seconds * scale
    lines.append(f"<line x1='{x:.2f}' y1='0' x2='{x:.2f}' y2='{top + 18}' stroke='#c22' stroke-dasharray='4 3'/>")
    lines.append(f"<text x='{x:.2f}' y='{top + 30}' text-anchor='middle'>bound {find_bound(plan).seconds:.4g} s</text>")
    size = f"viewBox='0 0 {_WIDTH} {top + 36}' style='width: 100%; max-width: {_WIDTH}px'"
    return "\n".join([f"<svg {size}>", *lines, "</svg>"])


def _join(which: np.ndarray, other: np.ndarray, timeline: Timeline, gap: float) -> Iterator[tuple[int, float, float]]:
    """``(peer, start, stop)`` of messages, merging those of one peer with gaps of at most ``gap`` seconds."""
    order: Sequence[int] = which[np.argsort(timeline.start[which], kind="stable")].tolist()
    open_: dict[int, tuple[float, float]] = {}
    for message in order:
        peer = int(other[message])
        start, stop = float(timeline.start[message]), float(timeline.finish[message])
        if peer in open_ and start <= open_[peer][1] + gap:
            open_[peer] = open_[peer][0], max(stop, open_[peer][1])
            continue
        if peer in open_:
            yield peer, *open_[peer]
        open_[peer] = start, stop
    for peer, (start, stop) in open_.items():
        yield peer, start, stop
