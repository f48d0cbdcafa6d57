"""Write timelines as Chrome traces, which Perfetto also reads, and as Gantt charts in SVG."""

from __future__ import annotations

import json
from html import escape

from reshard.errors import ArgumentError

from ..ir.actions import Kind
from ..ir.schedule import Schedule
from .replay import PipelineTimeline

#: Colour of each kind of computation, and of exposed communication.
COLOURS = {Kind.F: "#4c8bd6", Kind.B: "#d98a3d", Kind.I: "#d98a3d", Kind.W: "#8bb56a"}
WAIT = "#c9c9c9"
_WIDTH, _ROW_HEIGHT, _LEFT_MARGIN = 1200, 22, 70  # in SVG units


def to_chrome_trace(timeline: PipelineTimeline) -> str:
    """JSON for ``chrome://tracing`` or ui.perfetto.dev, with times in microseconds.

    Process 0 has one thread per pp rank of the schedule. Process 1 has one thread per channel.

    Raises:
        ArgumentError: the argument is not a timeline.
    """
    _check_timeline(timeline)
    events: list[dict[str, object]] = []
    channels = sorted({c.channel for c in timeline.transfers}, key=lambda c: (c.sender, c.receiver, c.is_forward))
    pp_ranks = sorted({span.pp_rank for span in timeline.spans})
    for pid, name in ((0, "stages"), (1, "transfers")):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
    for pp_rank in pp_ranks:
        events.append(
            {"ph": "M", "pid": 0, "tid": pp_rank, "name": "thread_name", "args": {"name": f"pp rank {pp_rank}"}}
        )
    for tid, channel in enumerate(channels):
        name = f"{channel.sender} > {channel.receiver} {'forward' if channel.is_forward else 'backward'}"
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}})
    for span in timeline.spans:
        events.append(_event(str(span.action), 0, span.pp_rank, span.start, span.end, exposed_s=span.exposed_seconds))
    for transfer in timeline.transfers:
        name = f"microbatch {transfer.microbatch}"
        tid = channels.index(transfer.channel)
        events.append(_event(name, 1, tid, transfer.start, transfer.end, waited_s=transfer.start - transfer.ready))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _check_timeline(timeline: object) -> None:
    if not isinstance(timeline, PipelineTimeline):
        raise ArgumentError(f"a PipelineTimeline is needed, not {type(timeline).__name__}")


def _event(name: str, pid: int, tid: int, start: float, end: float, **args: float) -> dict[str, object]:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": 1e6 * start,
        "dur": 1e6 * (end - start),
        "args": args,
    }


def to_svg(schedule: Schedule, timeline: PipelineTimeline) -> str:
    """An SVG Gantt chart with one line per pp rank of the schedule, labelled in seconds.

    Grey boxes show exposed communication: waits for data that is already computed.

    Raises:
        ArgumentError: an argument is not a schedule or not a timeline.
    """
    _check_timeline(timeline)
    if not isinstance(schedule, Schedule):
        raise ArgumentError(f"a Schedule is needed, not {type(schedule).__name__}")
    end = timeline.makespan_seconds or 1.0
    scale = (_WIDTH - _LEFT_MARGIN - 10) / end
    height = _ROW_HEIGHT * len(schedule.rank_actions) + 30
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' "
        "font-family='sans-serif' font-size='10'>"
    ]
    for pp_rank in range(len(schedule.rank_actions)):
        lines.append(
            f"<text x='{_LEFT_MARGIN - 6}' y='{_ROW_HEIGHT * pp_rank + 15}' text-anchor='end'>pp rank {pp_rank}</text>"
        )
    for span in timeline.spans:
        y = _ROW_HEIGHT * span.pp_rank + 3
        if span.exposed_seconds:
            x = _LEFT_MARGIN + (span.start - span.exposed_seconds) * scale
            lines.append(_box(x, y, span.exposed_seconds * scale, WAIT, f"{span.action} waits"))
        if span.action.kind.is_transfer:
            continue
        x, width = _LEFT_MARGIN + span.start * scale, (span.end - span.start) * scale
        lines.append(
            _box(x, y, width, COLOURS[span.action.kind], f"{span.action}: {span.start:.4g} to {span.end:.4g} s")
        )
        if width > 14:
            lines.append(
                f"<text x='{x + width / 2:.1f}' y='{y + 12}' text-anchor='middle'>{span.action.microbatch}</text>"
            )
    bottom = _ROW_HEIGHT * len(schedule.rank_actions) + 20
    lines.append(f"<text x='{_LEFT_MARGIN}' y='{bottom}'>{escape(schedule.name)}</text>")
    lines.append(f"<text x='{_WIDTH - 10}' y='{bottom}' text-anchor='end'>{end:.4g} s</text></svg>")
    return "\n".join(lines)


def _box(x: float, y: float, width: float, colour: str, title: str) -> str:
    return (
        f"<rect x='{x:.2f}' y='{y}' width='{max(width, 0.3):.2f}' height='{_ROW_HEIGHT - 5}' fill='{colour}' "
        f"stroke='#fff' stroke-width='0.5'><title>{escape(title)}</title></rect>"
    )
