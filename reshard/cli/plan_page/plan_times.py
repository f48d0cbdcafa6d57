"""The times of a plan on a page: the arrived part of each arrow, and the rates of each host, over time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from reshard.cost import Timeline
from reshard.drawing import colour_of
from reshard.formatting import format_seconds
from reshard.plan import HostBoxes, Traffic

#: Moments at which the page knows how much of each arrow has arrived.
NUM_MOMENTS = 80
#: Largest number of pairs of hosts whose messages the time chart shows one by one.
MAX_PAIRS = 32
#: Largest number of spans of the time chart. Spans of one pair of hosts are joined until there are no more.
MAX_SPANS = 4000
#: Gap between two messages of one pair of hosts, as a fraction of the time axis, up to which both are drawn as one.
_GAP = 0.002
_ROW_HEIGHT, _MIN_LANE_HEIGHT, _AREA_HEIGHT = 9, 12, 20
_NUM_TICKS = 4
#: Parts of a lane's width.
_WIDE = 1000
STYLE = """
.reshard .times { position: relative; font-size: 12px; }
.reshard .lane { display: grid; grid-template-columns: 7em minmax(0, 1fr); gap: 8px; margin: 1px 0; }
.reshard .lane b { font-weight: 400; text-align: right; white-space: nowrap; overflow: hidden; line-height: 1.1; }
@media (max-width: 600px) { .reshard .lane { grid-template-columns: 6.4em minmax(0, 1fr); font-size: 11px; } }
.reshard .lane > div, .reshard .lane svg { background: var(--panel); }
.reshard .over { position: absolute; inset: 0; pointer-events: none; margin: 0; }
.reshard .over > div { position: relative; background: none; }
.reshard .over i { position: absolute; top: 0; bottom: 0; border-left: 2px solid var(--fg); }
.reshard .over i.bound { border-left: 1.5px dashed var(--hot); }
.reshard .ticks > div { display: flex; justify-content: space-between; background: none; color: var(--soft); }
"""


def sample_progress(boxes: HostBoxes, traffic: Traffic, timeline: Timeline) -> np.ndarray:
    """``(arrows, NUM_MOMENTS + 1)`` bytes of each arrow that have arrived at each moment, if messages flow evenly."""
    _, a, b, start, finish, nbytes = _between_hosts(boxes, timeline)
    arrows = traffic.sender * len(boxes.all) + traffic.receiver
    arrow = np.searchsorted(arrows, a * len(boxes.all) + b)
    arrived = np.zeros((len(arrows), NUM_MOMENTS + 1))
    length = np.maximum(finish - start, 1e-15)
    for moment, seconds in enumerate(np.linspace(0.0, timeline.makespan_seconds, NUM_MOMENTS + 1).tolist()):
        part = np.clip((seconds - start) / length, 0.0, 1.0)
        arrived[:, moment] = np.bincount(arrow, part * nbytes, minlength=len(arrows))
    return arrived


def _between_hosts(boxes: HostBoxes, timeline: Timeline) -> tuple[np.ndarray, ...]:
    """Of each message between hosts: its row, both boxes, start and finish in seconds, and bytes."""
    hosts, messages = boxes.plan.topology.host_array, timeline.messages
    indices = np.flatnonzero(hosts[messages.sender] != hosts[messages.receiver])
    a, b = boxes.of_rank[messages.sender[indices]], boxes.of_rank[messages.receiver[indices]]
    return indices, a, b, timeline.start[indices], timeline.finish[indices], messages.nbytes[indices].astype(float)


def write_progress(boxes: HostBoxes, traffic: Traffic, progress: np.ndarray, seconds: float) -> str:
    """The data of the page's script, as JSON."""
    parts = np.rint(1000 * progress / np.maximum(traffic.nbytes[:, None], 1)).astype(int)
    data = {
        "seconds": seconds,
        "from": traffic.sender.tolist(),
        "to": traffic.receiver.tolist(),
        "bytes": traffic.nbytes.tolist(),
        "parts": parts.tolist(),
    }
    return json.dumps(data, separators=(",", ":"))


def draw_times(
    boxes: HostBoxes, traffic: Traffic, timeline: Timeline, progress: np.ndarray, bound_seconds: float
) -> str:
    """A chart of times as HTML: a heading, and two lanes for each box, one for its sends and one for its receives.

    With few hosts, a lane shows messages. With many, it shows the used fraction of the rate of the box's NICs.
    """
    end = max(timeline.makespan_seconds, bound_seconds) or 1.0
    lanes: list[tuple[int, int]] = []
    for number in range(len(boxes.all)):
        for side, boxes_of in enumerate((traffic.sender, traffic.receiver)):
            if (boxes_of == number).any():
                lanes.append((number, side))
    labels = (boxes.all[number].label.removeprefix("hosts ") for number, _ in lanes)
    names = {lane: f"{label} {('out', 'in')[lane[1]]}" for label, lane in zip(labels, lanes, strict=True)}
    if all(box.is_host for box in boxes.all) and len(traffic.nbytes) <= MAX_PAIRS:
        charts = _draw_spans(boxes, timeline, lanes, end)
        what = "Messages out of and into each host. The colour is that of the other host, as at the left of its box."
    else:
        charts = {lane: _draw_area(boxes, traffic, progress, lane, timeline.makespan_seconds, end) for lane in lanes}
        what = (
            f"The part of the rate of its NICs that each {'host' if boxes.all[0].is_host else 'group of hosts'} uses."
        )
    lines = [f"<p>{what} The dashed line is the lower bound.</p><div class='times'>"]
    lines += [f"<div class='lane'><b>{names[lane]}</b>{charts[lane]}</div>" for lane in lanes]
    ticks = "".join(f"<span>{format_seconds(end * tick / _NUM_TICKS)}</span>" for tick in range(_NUM_TICKS + 1))
    lines.append(f"<div class='lane ticks'><b></b><div>{ticks}</div></div>")
    shown = timeline.makespan_seconds / end
    lines.append(
        f"<div class='lane over'><b></b><div><i class='bound' style='left: {100 * bound_seconds / end:.2f}%'></i>"
        f"<i id='now' data-end='{100 * shown:.2f}' style='left: {100 * shown:.2f}%'></i></div></div></div>"
    )
    return "\n".join(lines)


def _draw_area(
    boxes: HostBoxes, traffic: Traffic, progress: np.ndarray, lane: tuple[int, int], seconds: float, end: float
) -> str:
    """The rate of a box over time, as a part of the rates of its NICs."""
    number, side = lane
    mine = (traffic.sender, traffic.receiver)[side] == number
    rate = np.diff(progress[mine].sum(axis=0)) * NUM_MOMENTS / max(seconds, 1e-15)
    topology = boxes.plan.topology
    name = ("egress_bytes_per_second", "ingress_bytes_per_second")[side]
    limit = sum(getattr(topology.host(host), name) for host in boxes.all[number].hosts)
    step = _WIDE * seconds / end / NUM_MOMENTS
    tops = (_AREA_HEIGHT * (1 - np.clip(rate / limit, 0.0, 1.0))).tolist()
    path = "".join(f"L{step * k:.1f},{top:.1f}H{step * (k + 1):.1f}" for k, top in enumerate(tops))
    peak = f"at most {rate.max(initial=0.0) / limit:.0%} of the rate of its NICs"
    return (
        f"<svg viewBox='0 0 {_WIDE} {_AREA_HEIGHT}' preserveAspectRatio='none' style='height: {_AREA_HEIGHT}px'>"
        f"<path d='M0,{_AREA_HEIGHT}{path}V{_AREA_HEIGHT}Z' fill='var(--{('src', 'dst')[side]})'/>"
        f"<title>{peak}</title></svg>"
    )


def _draw_spans(
    boxes: HostBoxes, timeline: Timeline, lanes: Sequence[tuple[int, int]], end: float
) -> dict[tuple[int, int], str]:
    """The chart of each lane: spans of messages, whose colour is that of the other host."""
    _, a, b, start, finish, _ = _between_hosts(boxes, timeline)
    gap = _GAP
    while True:
        spans = {}
        for number, side in lanes:
            mine, other = ((a, b), (b, a))[side]
            indices = np.flatnonzero(mine == number)
            merged = _merge_spans(other[indices], start[indices], finish[indices], gap * end)
            spans[number, side] = sorted(merged, key=lambda span: span[1:])
        if sum(map(len, spans.values())) <= MAX_SPANS or gap > 1:
            return {lane: _draw_lane(boxes, lane[1], spans[lane], gap * end, end) for lane in lanes}
        gap *= 2


def _draw_lane(boxes: HostBoxes, side: int, spans: Sequence[tuple[int, float, float]], gap: float, end: float) -> str:
    rows: list[float] = [0.0]  # end of the last span in each row; spans that overlap go to different rows
    lines = []
    for other, start, stop in spans:
        free = next((i for i, until in enumerate(rows) if until <= start + gap), len(rows))
        if free == len(rows):
            rows.append(0.0)
        rows[free] = stop
        box = boxes.all[other]
        lines.append(
            f"<rect x='{_WIDE * start / end:.1f}' y='{free * _ROW_HEIGHT}' "
            f"width='{max(_WIDE * (stop - start) / end, 0.6):.1f}' height='{_ROW_HEIGHT - 1}' "
            f"fill='{colour_of(box.hosts[0])}'><title>{('to', 'from')[side]} {box.label}: {format_seconds(start)} to "
            f"{format_seconds(stop)}</title></rect>"
        )
    height = max(_MIN_LANE_HEIGHT, _ROW_HEIGHT * len(rows))
    head = f"<svg viewBox='0 0 {_WIDE} {height}' preserveAspectRatio='none' style='height: {height}px'>"
    return "\n".join([head, *lines, "</svg>"])


def _merge_spans(
    other: np.ndarray, start: np.ndarray, finish: np.ndarray, gap: float
) -> Iterator[tuple[int, float, float]]:
    """Spans ``(other box, start, stop)``. Messages of one pair form one span if their gaps are at most ``gap``."""
    order = np.argsort(start, kind="stable")
    current: dict[int, tuple[float, float]] = {}
    for box, begin, end in zip(other[order].tolist(), start[order].tolist(), finish[order].tolist(), strict=True):
        if box in current and begin <= current[box][1] + gap:
            current[box] = current[box][0], max(end, current[box][1])
            continue
        if box in current:
            yield box, *current[box]
        current[box] = begin, end
    for box, (begin, end) in current.items():
        yield box, begin, end
