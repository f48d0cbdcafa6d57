"""A simulated or measured schedule as a page: rows over time, waits, memory and its limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from reshard.drawing import draw_bar, draw_page
from reshard.errors import ArgumentError
from reshard.formatting import count_of, format_bytes, format_seconds

from ..ir.schedule import Schedule
from ..ir.schedule_drawing import MAX_PP_RANKS, STYLE, DrawnSpan, draw_kinds, draw_rows
from ..pipeline import Pipeline, check_limits
from .replay import PipelineTimeline

#: Largest number of spans that a page draws: the first ones.
MAX_SPANS = 8000


def to_html(
    schedule: Schedule,
    timeline: PipelineTimeline,
    pipeline: Pipeline | None = None,
    activation_limit_bytes: float | Sequence[float] | None = None,
) -> str:
    """A self-contained HTML page of at most 2 MB: one row per pp rank over time, with actions coloured by kind.

    Args:
        schedule, timeline: a schedule, and its predicted or measured times.
        pipeline: given, each row shows the peak of the activations that a device keeps.
        activation_limit_bytes: limit of these activations, or one limit for each pp rank; drawn beside the peak.

    Returns:
        The text of the page, to be written to a file.

    Raises:
        ArgumentError: an argument has the wrong type or value, or a limit is given without a pipeline.
        ScheduleError: the schedule is for another pipeline.
    """
    if not isinstance(timeline, PipelineTimeline):
        raise ArgumentError(f"a PipelineTimeline is needed, not {type(timeline).__name__}")
    if not isinstance(schedule, Schedule):
        raise ArgumentError(f"a Schedule is needed, not {type(schedule).__name__}")
    if activation_limit_bytes is not None and pipeline is None:
        raise ArgumentError("activation_limit_bytes needs pipeline, which has the bytes of activations")
    num_pp_ranks = len(schedule.rank_actions)
    limits = check_limits(math.inf if activation_limit_bytes is None else activation_limit_bytes, num_pp_ranks)
    end = timeline.makespan_seconds or 1.0
    pieces = _pieces_of(timeline)
    beside = [f"{seconds / end:.0%} busy" for seconds in _busy_seconds(timeline, num_pp_ranks)]
    text = ""
    if pipeline is not None:
        peaks = schedule.peak_bytes(pipeline)
        beside = [
            f"{share}{_memory_bar(peak, limit, max(peaks))}"
            for share, peak, limit in zip(beside, peaks, limits, strict=True)
        ]
        text = _describe_memory(peaks, limits)
    cut = [f"the first {MAX_SPANS} of {len(timeline.spans)} spans"] * (len(timeline.spans) > MAX_SPANS)
    cut += [f"the first {MAX_PP_RANKS} of {num_pp_ranks} pp ranks"] * (num_pp_ranks > MAX_PP_RANKS)
    drawn = f" Drawn are {' and '.join(cut)}." if cut else ""
    body = (
        f"<h1>{escape(schedule.name)}: {format_seconds(timeline.makespan_seconds)}</h1>"
        f"<p>{count_of(schedule.num_stages, 'stage')} on {count_of(num_pp_ranks, 'pp rank')}, "
        f"{count_of(schedule.num_microbatches, 'microbatch')}. Each row is a pp rank, and numbers are "
        f"microbatches.{drawn} {text}</p>"
        f"{draw_kinds(pieces)}{draw_rows(pieces, num_pp_ranks, end, beside)}"
        f"<div class='row'><b></b><p class='ends'><span>0 s</span><span>{format_seconds(end)}</span></p></div>"
    )
    style = f"{STYLE}.reshard .ends {{ display: flex; justify-content: space-between; margin: 0; }}"
    return draw_page(f"schedule {schedule.name}", body, style)


def _pieces_of(timeline: PipelineTimeline) -> list[DrawnSpan]:
    pieces = []
    for span in timeline.spans[:MAX_SPANS]:
        if span.exposed_seconds:
            wait = f"{span.action} waits {format_seconds(span.exposed_seconds)} for a transfer"
            pieces.append(DrawnSpan(span.pp_rank, span.start - span.exposed_seconds, span.start, None, wait))
        if not span.action.kind.is_transfer:
            text = f"{span.action}: {format_seconds(span.start)} to {format_seconds(span.end)}"
            pieces.append(DrawnSpan(span.pp_rank, span.start, span.end, span.action, text))
    return pieces


def _busy_seconds(timeline: PipelineTimeline, num_pp_ranks: int) -> list[float]:
    """The time that each pp rank computes."""
    busy = [0.0] * num_pp_ranks
    for span in timeline.spans:
        busy[span.pp_rank] += 0.0 if span.action.kind.is_transfer else span.end - span.start
    return busy


def _memory_bar(peak: int, limit: float, max_bytes: float) -> str:
    title = f"peak {format_bytes(peak)}" + (f" of {format_bytes(limit)}" if math.isfinite(limit) else "")
    return draw_bar([(peak, "var(--both)", title)], limit, max_bytes)


def _describe_memory(peaks: Sequence[int], limits: Sequence[float]) -> str:
    worst = max(range(len(peaks)), key=lambda pp_rank: (peaks[pp_rank] / (limits[pp_rank] or 1), peaks[pp_rank]))
    of = f" of {format_bytes(limits[worst])}" if math.isfinite(limits[worst]) else ""
    line = "; the line is the limit" if of else ""
    return (
        f"The bar at the right is the peak of the activations that a device keeps{line}. The fullest is pp rank "
        f"{worst}: {format_bytes(peaks[worst])}{of}."
    )
