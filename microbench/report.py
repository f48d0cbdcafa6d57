"""Tables from the records of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]
#: Rows shorter than this say more about start-up than about links.
LONG_SECONDS = 0.2


def rows_of(records: Iterable[Record]) -> list[Record]:
    """The records of rows that ran."""
    return [record for record in records if record["kind"] == "row" and "refused" not in record]


def predicted(records: Iterable[Record]) -> list[Record]:
    """Those with a plan that last long enough for the simulator to be judged on them, each plan once."""
    return [
        record
        for record in rows_of(records)
        if "predicted_seconds" in record and record["median_seconds"] >= LONG_SECONDS and "same_as" not in record
    ]


def format_table(records: Sequence[Record]) -> str:
    """One line per row and contender."""
    lines = [
        f"{'row':46} {'contender':24} {'median s':>9} {'min':>8} {'max':>8} {'x bound':>8} {'pred/meas':>9} "
        f"{'first s':>8} {'MB across':>9}  ok"
    ]
    last = None
    for record in records:
        if record["kind"] != "row":
            continue
        name = f"{record['suite']}: {record['row']}"
        if name != last:
            lines.append(f"{name}  [{record['title']}], bound {record['bound_seconds']:.4f} s")
            last = name
        if "refused" in record:
            lines.append(f"{'':46} {record['contender']:24} does not apply: {record['refused'].splitlines()[0][:80]}")
            continue
        if "same_as" in record:
            lines.append(f"{'':46} {record['contender']:24} the same plan as {record['same_as']}")
            continue
        seconds = record["seconds"]
        ratio = "" if record["ratio"] is None else f"{record['ratio']:8.3f}"
        agrees = f"{record['predicted_over_measured']:9.3f}" if "predicted_over_measured" in record else f"{'':9}"
        across = sum(left for host in record["crossed_bytes"] for left, _ in host) / 1e6
        lines.append(
            f"{'':46} {record['contender']:24} {record['median_seconds']:9.4f} {min(seconds):8.4f} {max(seconds):8.4f} "
            f"{ratio:>8} {agrees} {record['first_use_seconds']:8.3f} {across:9.1f}  "
            f"{'yes' if not record['wrong'] else str(record['wrong']) + ' WRONG'}"
        )
    return "\n".join(lines)


def format_summary(records: Sequence[Record]) -> str:
    """How good the links, the predictions and the strategies were."""
    lines = []
    for record in records:
        if record["kind"] == "cluster":
            lines.append(
                f"cluster {record['cluster']:9} set up in {record['set_up_seconds']:.2f} s; links moved by "
                f"{100 * record['moved']:.1f} %, at most {100 * record['off']:.1f} % from what they should carry"
                f"{'' if record['valid'] else '  NOT VALID'}"
            )
    judged = predicted(records)
    if judged:
        off = sorted(abs(record["predicted_over_measured"] - 1) for record in judged)
        near = sum(part <= 0.05 for part in off)
        lines.append(
            f"predicted over measured, {len(off)} plans of {LONG_SECONDS} s and more: within 5 % on {near} "
            f"({100 * near / len(off):.0f} %), worst {100 * off[-1]:.1f} %"
        )
    by_contender: dict[str, list[float]] = {}
    for record in rows_of(records):
        if record["ratio"] and record["median_seconds"] >= LONG_SECONDS:
            by_contender.setdefault(record["contender"], []).append(record["ratio"])
    for name, ratios in sorted(by_contender.items(), key=lambda item: _mean(item[1])):
        lines.append(
            f"{name:24} {_mean(ratios):6.3f} times the bound (geometric mean of {len(ratios)} rows), "
            f"worst {max(ratios):.2f}"
        )
    took = next((record["took_seconds"] for record in records if record["kind"] == "end"), None)
    if took is not None:
        lines.append(f"took {took:.0f} s")
    return "\n".join(lines)


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
