"""A plan as text for people: what it moves, its cost, and its first transfers."""

from __future__ import annotations

from reshard.cost import CostReport
from reshard.formatting import format_ranks
from reshard.plan import Plan, format_plan


def describe_plan(plan: Plan, max_lines: int = 40) -> str:
    """A summary of a plan, its cost, and at most ``max_lines`` of its transfers."""
    across, inside, copied = plan.bytes_moved()
    text = format_plan(plan).splitlines()
    body = text[: 2 + len(plan.tensors) + max_lines]
    if len(text) > len(body):
        body.append(f"... {len(text) - len(body)} more transfers; all of them with --format json")
    summary = [
        f"hash         {plan.plan_hash}",
        f"ranks        {format_ranks(plan.ranks)}",
        f"messages     {plan.num_messages} in {len(plan.transfers)} transfers",
        f"bytes        {across} between hosts, {inside} inside hosts, {copied} copied within ranks",
        str(CostReport(plan)),
        "",
    ]
    return "\n".join(summary + body)
