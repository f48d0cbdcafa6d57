"""A training plan as a page: a bar per stage with its time, its memory and the limits, its schedule, and tables."""

from __future__ import annotations

from html import escape

from reshard.drawing import draw_bar, draw_fragment, draw_keys, draw_page
from reshard.formatting import count_of, describe_ranks, format_bytes, format_seconds

from ...ir.schedule_drawing import STYLE as ROWS, draw_in_units
from .explain import explain_training_plan
from .record import TrainingPlanRecord
from .reports import StageReport

#: Largest number of stages that are drawn, and of characters of the text below.
MAX_STAGES, MAX_TEXT = 128, 200_000
_TIME = {"busy": "var(--src)", "waits for transfers": "var(--wait)"}
_MEMORY = {
    "states": "var(--both)",
    "activations": "var(--src)",
    "working memory": "var(--warm)",
    "buffers": "var(--dst)",
    "sums of shared gradients": "var(--wait)",
}
_STYLE = """
.reshard .stage { display: grid; grid-template-columns: minmax(0, 15em) minmax(0, 1fr) minmax(0, 1fr); gap: 3px 16px;
  border-top: 1px solid var(--line); padding: 6px 0; font-size: 13px; align-items: center; overflow-wrap: anywhere; }
.reshard .stage small { color: var(--soft); font-size: 12px; }
@media (max-width: 600px) { .reshard .stage { grid-template-columns: minmax(0, 1fr); } }
"""


def training_plan_to_html(training_plan: TrainingPlanRecord) -> str:
    """A self-contained HTML page: stages with bars of time and memory, the schedule, and the explanation as text."""
    text = escape(explain_training_plan(training_plan)[:MAX_TEXT])
    body = (
        f"<h1>{_title(training_plan)}</h1>{_describe(training_plan)}{_draw_stages(training_plan, MAX_STAGES)}"
        f"<h2>Schedule: {escape(training_plan.schedule.name)}</h2>{draw_in_units(training_plan.schedule)}"
        f"<details><summary>Edges, other candidates, and all figures</summary><pre>{text}</pre></details>"
    )
    return draw_page("reshard search", body, _STYLE + ROWS)


def draw_stages(training_plan: TrainingPlanRecord) -> str:
    """The stages for a notebook: HTML of at most 200 kB."""
    body = f"<p><b>{_title(training_plan)}</b></p>{_describe(training_plan)}{_draw_stages(training_plan, 32)}"
    return draw_fragment(body, _STYLE)


def _title(training_plan: TrainingPlanRecord) -> str:
    guess = " (a guess: the profile is an estimate)" if training_plan.is_guess else ""
    return (
        f"A step takes {format_seconds(training_plan.seconds)}{guess}, for "
        f"{count_of(training_plan.num_samples, 'sample')} in {count_of(training_plan.num_microbatches, 'microbatch')}"
    )


def _describe(training_plan: TrainingPlanRecord) -> str:
    """The slowest stage, the stage nearest to its memory limit, and the legend."""
    reports = training_plan.reports
    busiest = max(range(len(reports)), key=lambda number: reports[number].busy_seconds)
    fullest = max(range(len(reports)), key=lambda number: _share(reports[number]))
    share = training_plan.bound_seconds / (training_plan.seconds or 1.0)
    return (
        f"<p>The method {escape(training_plan.method)} found this plan. "
        f"The busiest is <b class='hot'>stage {busiest}</b>: "
        f"{format_seconds(reports[busiest].busy_seconds)} of a step of {format_seconds(training_plan.seconds)}; no "
        f"plan takes less than {format_seconds(training_plan.bound_seconds)} ({share:.0%}). The fullest is stage "
        f"{fullest}: {_memory(reports[fullest])}.</p>{draw_keys(_TIME, 'time')}{draw_keys(_MEMORY, 'memory')}"
        "<p>The line in a bar of time is the end of the step; in a bar of memory it is the limit of a device.</p>"
    )


def _share(report: StageReport) -> float:
    return report.memory_bytes / report.limit_bytes if report.limit_bytes else 0.0


def _memory(report: StageReport) -> str:
    return f"{format_bytes(report.memory_bytes)} of {format_bytes(report.limit_bytes)} ({_share(report):.0%})"


def _draw_stages(training_plan: TrainingPlanRecord, max_stages: int) -> str:
    fullest = max(max(report.memory_bytes, report.limit_bytes) for report in training_plan.reports)
    lines = []
    for number, (stage, report) in enumerate(zip(training_plan.stages, training_plan.reports, strict=True)):
        ranks = range(stage.first_rank, stage.end_rank)
        hosts = [host for host, first, end in training_plan.hosts if first < stage.end_rank and end > stage.first_rank]
        where = f"{describe_ranks(ranks)} on {count_of(len(hosts), 'host')}" if hosts else describe_ranks(ranks)
        names = training_plan.layer_names[number]
        layers = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        times = [report.busy_seconds, report.exposed_seconds]
        parts = [
            (value, _TIME[name], f"{name}: {format_seconds(value)}") for name, value in zip(_TIME, times, strict=True)
        ]
        time = draw_bar(parts, training_plan.seconds, training_plan.seconds)
        memory = draw_bar(_memory_parts(report), report.limit_bytes, fullest)
        busy = f"{format_seconds(report.busy_seconds)} busy, {format_seconds(report.exposed_seconds)} waiting"
        lines.append(
            f"<div class='stage'><div><b>stage {number}</b>: {escape(str(stage)[:200])}<br><small>{where}; "
            f"{escape(layers[:160])}</small></div>"
            f"<div>{time}<small>{busy}</small></div><div>{memory}<small>{_memory(report)}</small></div></div>"
        )
    more = f"<p>and {count_of(len(lines) - max_stages, 'more stage')}</p>" if len(lines) > max_stages else ""
    return "".join(lines[:max_stages]) + more


def _memory_parts(report: StageReport) -> list[tuple[float, str, str]]:
    values = [report.state_bytes, report.activation_bytes, report.working_bytes, report.buffer_bytes]
    values.append(max(report.memory_bytes - sum(values), 0.0))
    return [
        (value, colour, f"{name}: {format_bytes(value)}")
        for (name, colour), value in zip(_MEMORY.items(), values, strict=True)
    ]
