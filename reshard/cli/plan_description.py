"""A plan as text for people: what it moves, its cost, and its first transfers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from reshard.codecs import ELEMENT_VALUES, BlockCodec
from reshard.cost import CostReport, predict_makespan
from reshard.formatting import count_of, format_ranks
from reshard.plan import Plan
from reshard.planner import plan_tensors, predict

#: A plan of ``auto`` is named if it takes at most this many times the time of the plan shown.
_FASTER = 0.95


def describe_plan(
    plan: Plan, max_lines: int = 40, plan_auto: Callable[[], Plan] | None = None, report: CostReport | None = None
) -> str:
    """A summary of a plan, its cost, and at most ``max_lines`` of its transfers.

    Args:
        plan_auto: makes the plan of ``auto`` for the same move, if another strategy was named.
        report: its cost, if that is known.
    """
    report = report or CostReport(plan)
    across, inside, copied = plan.bytes_moved()
    body = plan.to_text(max_lines).splitlines()
    if plan.is_listed and len(plan.transfers) > max_lines:
        body.append(f"... {count_of(len(plan.transfers) - max_lines, 'more transfer')}; all of them with --format json")
    summary = [
        f"hash         {plan.plan_hash}",
        f"ranks        {format_ranks(plan.ranks)}",
        f"messages     {plan.num_messages} in "
        + (count_of(len(plan.transfers), "transfer") if plan.is_listed else "closed form"),
        f"bytes        {across} between hosts, {inside} inside hosts, {copied} copied within ranks",
        str(report),
        *_describe_compression(plan),
        *([] if plan_auto is None else _describe_faster(report, plan_auto)),
        "",
    ]
    return "\n".join(summary + body)


def _describe_faster(report: CostReport, plan_auto: Callable[[], Plan]) -> list[str]:
    """A line with the time of the plan of ``auto`` if that plan is clearly faster; else no line."""
    limit = _FASTER * report.predicted_seconds
    if report.lower_bound_seconds > limit:  # no plan is
        return []
    auto = plan_auto()
    seconds = predict_makespan(auto).seconds
    if seconds > limit:
        return []
    return [f"faster       without --strategy: {auto.strategy} takes {seconds:.6g} s"]


def _describe_compression(plan: Plan) -> list[str]:
    """A line with the predicted times of the plan without and with its codec; none if no tensor is encoded."""
    encoded = [spec for spec in plan.tensors if spec.codec is not None]
    if not encoded:
        return []
    plain = plan_tensors(
        [spec.plain for spec in plan.tensors], topology=plan.topology, staging_bytes=plan.staging_bytes
    )
    rates = {rate.codec: rate for rate in plan.topology.codec_rates}
    codec = encoded[0].codec
    rate = rates.get(codec.with_values(ELEMENT_VALUES[0]).name) if isinstance(codec, BlockCodec) else None
    note = "" if rate is not None else "; without the time of the codec, whose rate the topology does not have"
    text = f"{predict(plain)}, {replace(predict(plan, rate), codec=encoded[0].dtype)}{note}"
    return [f"compression  {text}; {len(encoded)} of {count_of(len(plan.tensors), 'tensor')} encoded"]
