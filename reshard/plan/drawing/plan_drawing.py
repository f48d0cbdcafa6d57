"""A plan as a drawing: hosts in pods, devices in hosts, and arrows as wide as the bytes between hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from reshard.drawing import colour_of, draw, draw_fragment, draw_keys
from reshard.formatting import count_of, format_bytes, format_ranks, format_seconds
from reshard.plan.drawing.drawing_frames import FLAT_LABEL, WIDTH, Frame, Placing, Point, cell_size, place_boxes
from reshard.plan.drawing.drawn_hosts import HostBox, HostBoxes, Traffic
from reshard.plan.value.plan import Plan
from reshard.plan.value.port_loads import describe_load, find_loads
from reshard.plan.value.rotation_plan import MAX_LISTED

#: Cells of all boxes: of a larger plan, none are drawn.
MAX_CELLS = 1024
_ROLES = {"src": "holds the source", "dst": "needs the destination", "both": "both"}


@draw.register(Plan)
def draw_plan(plan: Plan) -> str:
    """A plan for a notebook: the drawing, its bytes, and its busiest port; its text if it is too large to list.

    Returns:
        HTML of at most 200 kB that needs no other file.
    """
    if plan.num_messages > MAX_LISTED:
        return draw_fragment(f"<pre>{escape(str(plan))}</pre>")
    across, inside, copied = plan.bytes_moved()
    loads = find_loads(plan)
    text = "Nothing crosses hosts."
    marked: tuple[str, ...] = ()
    if loads:
        busiest = max(loads, key=lambda load: load.seconds)
        marked = (busiest.port,)
        needs = format_seconds(busiest.seconds)
        text = f"<b class='hot'>{describe_load(busiest)}</b>, which needs {needs}: no port is busier."
    boxes = HostBoxes.of(plan)
    drawn = draw_boxes(boxes, boxes.find_traffic(marked), marked)
    body = (
        f"<p><b>{escape(name_tensors(plan))}</b></p><p>{escape(plan.strategy)}: {format_bytes(across)} between hosts, "
        f"{format_bytes(inside)} inside hosts, {format_bytes(copied)} copied within ranks, in "
        f"{count_of(plan.num_messages, 'message')}. {text}</p>"
        f"<div style='max-width: 640px'>{drawn}</div>{draw_roles(boxes)}"
    )
    return draw_fragment(body)


def name_tensors(plan: Plan) -> str:
    """The first tensor of a plan, and how many more there are."""
    first = str(plan.tensors[0])
    first = first if len(first) <= 300 else f"{first[:297]}..."
    return first if len(plan.tensors) == 1 else f"{first}, and {count_of(len(plan.tensors) - 1, 'more tensor')}"


def draw_roles(boxes: HostBoxes) -> str:
    """The legend of the cells."""
    used = {role for box in boxes.all for role in box.cells}
    cells = {("device" if box.is_host else "host") for box in boxes.all}
    what = " or ".join(sorted(cells))
    return draw_keys({f"{what} that {_ROLES[r]}" if r != "both" else f"{what} of source and destination": f"var(--{r})"
                      for r in _ROLES if r in used})  # fmt: skip


def draw_boxes(boxes: HostBoxes, traffic: Traffic, marked: Sequence[str] = ()) -> str:
    """The SVG of hosts, pods and arrows. Ports in ``marked`` and what passes them are in another colour."""
    placing = place_boxes(boxes, traffic)
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {placing.height:.0f}' role='img'"
    lines = [f"{head} aria-label='hosts and the bytes between them'>"]
    lines += _draw_pods(placing, marked)
    order = sorted(range(len(traffic.nbytes)), key=lambda i: (bool(traffic.is_marked[i]), traffic.nbytes[i]))
    lines += [_draw_arrow(boxes, traffic, placing, arrow) for arrow in order]
    has_cells = sum(len(box.cells) for box in boxes.all) <= MAX_CELLS
    received = [0] * len(boxes.all)
    sent = [0] * len(boxes.all)
    for a, b, nbytes in zip(traffic.sender.tolist(), traffic.receiver.tolist(), traffic.nbytes.tolist(), strict=True):
        sent[a] += nbytes
        received[b] += nbytes
    for number, (box, frame) in enumerate(zip(boxes.all, placing.frames, strict=True)):
        moved = f"sends {format_bytes(sent[number])}, receives {format_bytes(received[number])}"
        title = f"{_describe_box(boxes.plan, box)}; {moved}, {format_bytes(int(traffic.inside[number]))} inside"
        shown = box if has_cells else replace(box, cells=())
        lines.append(_draw_box(number, shown, frame, title, boxes.is_marked(number, marked), received[number] > 0))
    if boxes.dst:
        for frame, name in ((placing.frames[0], "sources"), (placing.frames[len(boxes.src)], "destinations")):
            lines.append(f"<text class='soft' x='{frame.centre[0]:.1f}' y='14' text-anchor='middle'>{name}</text>")
    return "\n".join([*lines, "</svg>"])


def _describe_box(plan: Plan, box: HostBox) -> str:
    if len(box.hosts) > 1:
        return f"{box.label}: hosts {format_ranks(box.hosts)}"[:200]
    ranks = sorted(set(plan.topology.ranks_of_host(box.hosts[0])) & set(plan.ranks))
    pod = "" if box.pod is None else f" in pod {box.pod}"
    return f"{box.label}{pod}: ranks {format_ranks(ranks)}"[:200]


def _draw_pods(placing: Placing, marked: Sequence[str]) -> list[str]:
    hot = {int(name.split()[1]) for name in marked if name.startswith("pod")}
    lines = []
    for pod, frame in placing.pods:
        colour = "var(--hot)" if pod in hot else "var(--line)"
        lines.append(
            f"<rect x='{frame.x:.1f}' y='{frame.y:.1f}' width='{frame.width:.1f}' height='{frame.height:.1f}' rx='8' "
            f"fill='none' stroke='{colour}' stroke-dasharray='4 3'/>"
            f"<text class='soft' x='{frame.x + 6:.1f}' y='{frame.y + 12:.1f}'>pod {pod}</text>"
        )
    if placing.pod_arcs:
        centre, radius = (WIDTH / 2, placing.height / 2), WIDTH / 2 - 10
        squeeze = (placing.height / 2 - 10) / radius
        for pod, start, end in placing.pod_arcs:
            points = [
                (centre[0] + radius * math.cos(t), centre[1] + radius * squeeze * math.sin(t))
                for t in (start + (end - start) * step / 24 for step in range(25))
            ]
            colour = "var(--hot)" if pod in hot else "var(--line)"
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            lines.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='3'/>")
            middle = (start + end) / 2
            x, y = centre[0] + radius * math.cos(middle), centre[1] + radius * squeeze * math.sin(middle)
            x = min(max(x, 18), WIDTH - 18)
            lines.append(
                f"<text class='soft' x='{x:.1f}' y='{y + 4:.1f}' text-anchor='middle' stroke='var(--bg)' "
                f"stroke-width='6' paint-order='stroke'>pod {pod}</text>"
            )
    return lines


def _draw_arrow(boxes: HostBoxes, traffic: Traffic, placing: Placing, arrow: int) -> str:
    curve, width = placing.curves[arrow], placing.widths[arrow]
    a, b = int(traffic.sender[arrow]), int(traffic.receiver[arrow])
    colour = "var(--hot)" if traffic.is_marked[arrow] else "var(--flow)"
    shown = 0.85 if traffic.is_marked[arrow] or len(traffic.nbytes) <= 80 else 0.5
    tip, (x, y) = curve[3], curve[2]
    length = math.hypot(tip[0] - x, tip[1] - y) or 1.0
    ahead = ((tip[0] - x) / length, (tip[1] - y) / length)
    half, long = max(width / 2 + 1.5, 2.5), max(min(width, 9.0), 5.0)
    end = (tip[0] - ahead[0] * long, tip[1] - ahead[1] * long)
    head = (tip, *((end[0] + side * half * ahead[1], end[1] - side * half * ahead[0]) for side in (1, -1)))
    between = f"{boxes.all[a].label} to {boxes.all[b].label}" if a != b else f"between {boxes.all[a].label}"
    path = f"M{_format_point(curve[0])}C{_format_point(curve[1])} {_format_point(curve[2])} {_format_point(end)}"
    return (
        f"<g class='arrow' data-i='{arrow}' data-o='{shown}' opacity='{shown}'>"
        f"<path d='{path}' fill='none' stroke='{colour}' stroke-width='{width:.2f}'/>"
        f"<polygon points='{' '.join(map(_format_point, head))}' fill='{colour}'/>"
        f"<title>{between}: {format_bytes(int(traffic.nbytes[arrow]))}</title></g>"
    )


def _format_point(point: Point) -> str:
    return f"{point[0]:.1f},{point[1]:.1f}"


def _draw_box(number: int, box: HostBox, frame: Frame, title: str, is_marked: bool, receives: bool) -> str:
    stroke = "var(--hot)' stroke-width='2.5" if is_marked else "var(--line)"
    columns, side = cell_size(box, frame)
    small = frame.width < 70
    label = box.label.removeprefix("hosts ") if small else box.label
    if frame.is_flat:
        text = f"<text x='{frame.x + 6:.1f}' y='{frame.centre[1] + 4:.1f}'>{label}</text>"
        left, top = frame.x + FLAT_LABEL, frame.centre[1] - side * -(-len(box.cells) // max(columns, 1)) / 2
    else:
        style = " style='font-size: 10.5px'" if small else ""
        text = f"<text x='{frame.x + 6:.1f}' y='{frame.y + 15:.1f}'{style}>{label}</text>"
        left, top = frame.x + 6, frame.y + 20 - 2 * small
    colour = colour_of(box.hosts[0])
    strip = (
        f"<rect x='{frame.x:.1f}' y='{frame.y:.1f}' width='3' height='{frame.height:.1f}' fill='{colour}'/>"
        if box.is_host
        else ""
    )
    cells = [
        f"<rect x='{left + side * (cell % columns):.1f}' y='{top + side * (cell // columns):.1f}' "
        f"width='{side * 0.82:.1f}' height='{side * 0.82:.1f}' rx='1.5' fill='var(--{role})'/>"
        for cell, role in enumerate(box.cells if columns else ())
    ]
    bar = (
        f"<rect class='got' data-b='{number}' x='{frame.x:.1f}' y='{frame.y + frame.height - 3:.1f}' "
        f"width='{frame.width:.1f}' height='3' fill='var(--dst)'/>"
        if receives
        else ""
    )
    return (
        f"<g><rect x='{frame.x:.1f}' y='{frame.y:.1f}' width='{frame.width:.1f}' height='{frame.height:.1f}' rx='4' "
        f"fill='var(--panel)' stroke='{stroke}'/>{strip}{text}{''.join(cells)}{bar}<title>{escape(title)}</title></g>"
    )
