"""A training plan as a drawing: stages on hosts, and the edges between them."""

from __future__ import annotations

import math
from html import escape

from reshard.formatting import count_of, format_bytes

from .record import TrainingPlanRecord

#: Sizes in pixels.
_WIDTH, _HOST_WIDTH, _ROW, _GAP, _LEFT = 1000, 120, 58, 46, 10


def draw_training_plan(training_plan: TrainingPlanRecord) -> str:
    """An SVG: one column of hosts, one box for each stage beside the hosts of its ranks, and a line for each edge.

    A stage says its layers, ranks, busy seconds of a step and memory; an edge its bytes and seconds for one microbatch
    forward and backward, and the port that is busiest.
    """
    tops = [_GAP + number * (_ROW + _GAP) for number in range(len(training_plan.stages))]
    height = tops[-1] + _ROW + _GAP
    box = _LEFT + _HOST_WIDTH + 20
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' font-family='sans-serif' "
        "font-size='12'>",
        f"<text x='{_LEFT}' y='20'>{escape(str(training_plan).partition(':')[0])}: {training_plan.seconds:.4g} s for "
        f"{count_of(training_plan.num_samples, 'sample')} in "
        f"{count_of(training_plan.num_microbatches, 'microbatch')}</text>",
    ]
    longest = max(report.busy_seconds for report in training_plan.reports) or 1.0
    for number, (stage, report, top) in enumerate(zip(training_plan.stages, training_plan.reports, tops, strict=True)):
        hosts = [host for host, first, end in training_plan.hosts if first < stage.end_rank and end > stage.first_rank]
        name = "hosts" if len(hosts) > 1 else "host"
        ranks = f"ranks {stage.first_rank}-{stage.end_rank - 1}" if stage.num_ranks > 1 else f"rank {stage.first_rank}"
        busy = (_WIDTH - box - 20) * report.busy_seconds / longest
        share = report.memory_bytes / report.limit_bytes if report.limit_bytes else math.inf
        lines += [
            f"<rect x='{_LEFT}' y='{top}' width='{_HOST_WIDTH}' height='{_ROW}' fill='#eee' stroke='#999'/>",
            f"<text x='{_LEFT + 6}' y='{top + 22}'>{name} {', '.join(map(str, hosts)) or '?'}</text>",
            f"<text x='{_LEFT + 6}' y='{top + 42}'>{ranks}</text>",
            f"<rect x='{box}' y='{top}' width='{_WIDTH - box - 20}' height='{_ROW}' fill='#fff' stroke='#4c8bd6'/>",
            f"<rect x='{box}' y='{top}' width='{busy:.1f}' height='{_ROW}' fill='#4c8bd6' opacity='0.25'/>",
            f"<text x='{box + 6}' y='{top + 22}'>stage {number}: {escape(str(stage))}</text>",
            f"<text x='{box + 6}' y='{top + 42}'>{report.busy_seconds:.3g} s busy, {report.exposed_seconds:.3g} s "
            f"waiting for transfers; {format_bytes(round(report.memory_bytes))} of "
            f"{format_bytes(round(report.limit_bytes))} ({share:.0%})</text>",
        ]
    for place, edge in enumerate(training_plan.edges):
        start, end = tops[edge.src] + _ROW, tops[edge.dst]
        is_skip = edge.dst != edge.src + 1
        x = _WIDTH - 12 - 4 * (place % 3) if is_skip else box + 40
        port = f", {edge.busiest_port} busy for {edge.port_seconds:.3g} s" if edge.busiest_port else ""
        lines += [
            f"<line x1='{x}' y1='{start}' x2='{x}' y2='{end}' stroke='#d98a3d' stroke-width='2'/>",
            f"<text x='{x + (-8 if is_skip else 8)}' y='{end - (8 if is_skip else 24)}' "
            f"text-anchor='{'end' if is_skip else 'start'}'>{edge.src} to {edge.dst}: "
            f"{escape(format_bytes(edge.nbytes))}, {edge.forward_seconds:.3g} s forward, {edge.backward_seconds:.3g} s "
            f"backward{escape(port)}</text>",
        ]
    return "\n".join([*lines, "</svg>"])
