"""Tables, a page and a plot from the records that ``hosts --out`` wrote."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from microbench.harness.case_options import BenchmarkOptionError
from microbench.harness.machine_description import format_machine, stderr

Record = dict[str, Any]
#: In shorter rows the start-up cost dominates the time on the links.
LONG_SECONDS = 0.2


def rows_of(records: Iterable[Record]) -> list[Record]:
    """The records of rows that ran."""
    return [record for record in records if record["kind"] == "row" and "refused" not in record]


def predicted(records: Iterable[Record]) -> list[Record]:
    """The records to judge the simulator by: each plan once, without rows shorter than :data:`LONG_SECONDS`."""
    return [
        record
        for record in rows_of(records)
        if "predicted_seconds" in record and record["median_seconds"] >= LONG_SECONDS and "same_as" not in record
    ]


_LEGEND = (
    "x bound: median / lower bound; pred/meas: predicted / measured; first s: first turn, including set-up;\n"
    "busy: CPU use; MB: sent by each host > received by each host, in the last turn"
)
#: A higher latency means that something other than the emulated links delayed the messages.
_MAX_LATENCY_SECONDS = 2e-3


def format_table(records: Sequence[Record]) -> str:
    """A text table with one line per row and contender, and a legend of the columns."""
    lines = [
        f"  {'contender':24} {'median s':>9} {'min':>8} {'max':>8} {'x bound':>8} {'pred/meas':>9} {'first s':>8} "
        f"{'busy':>5}  elements  MB sent > received per host"
    ]
    last = None
    for record in records:
        if record["kind"] != "row":
            continue
        name = f"{record['suite']}: {record['row']}"
        if name != last:
            title = "" if record["title"] == record["row"] else f"  [{record['title']}]"
            lines.append(f"{name}{title}, bound {record['bound_seconds']:.4f} s")
            last = name
        if "refused" in record:
            lines.append(f"  {record['contender']:24} does not apply: {record['refused'].splitlines()[0][:80]}")
            continue
        if "same_as" in record:
            lines.append(f"  {record['contender']:24} the same plan as {record['same_as']}")
            continue
        seconds = record["seconds"]
        ratio = "" if record["ratio"] is None else f"{record['ratio']:8.3f}"
        agrees = f"{record['predicted_over_measured']:9.3f}" if "predicted_over_measured" in record else f"{'':9}"
        lines.append(
            f"  {record['contender']:24} {record['median_seconds']:9.4f} {min(seconds):8.4f} {max(seconds):8.4f} "
            f"{ratio:>8} {agrees} {record['first_use_seconds']:8.3f} {record['busy']:5.0%}  "
            f"{str(record['wrong']) + ' WRONG' if record['wrong'] else 'all':8}  {_crossed(record['crossed_bytes'])}"
            + (f"  {record['disturbed']} of {len(seconds)} turns DISTURBED" if record.get("disturbed") else "")
        )
    if last is not None:
        lines.append(_LEGEND)
    return "\n".join(lines)


def _crossed(hosts: Sequence[Sequence[Sequence[int]]] | None) -> str:
    """Megabytes that each host sent and received, as ``33.6+33.6+0 > 0+0+67.2``."""
    if not hosts:
        return ""
    out, into = ("+".join(f"{sum(nic[i] for nic in host) / 1e6:.3g}" for host in hosts) for i in (0, 1))
    return f"{out} > {into}"


def format_summary(records: Sequence[Record]) -> str:
    """A text summary: link rates, accuracy of the predictions, and mean ratio to the bound of each contender."""
    lines = []
    for record in records:
        if record["kind"] == "cluster":
            lines.append(
                f"cluster {record['cluster']:9} set up in {record['set_up_seconds']:.2f} s; link rates changed by "
                f"{100 * record['moved']:.1f} %, at most {100 * record['off']:.1f} % from expected, "
                f"latency {1e6 * record.get('latency_seconds', 0.0):.0f} us"
                f"{', HIGH' if record.get('latency_seconds', 0.0) > _MAX_LATENCY_SECONDS else ''}"
                f"{'' if record['valid'] else '  NOT VALID'}"
            )
    turns = sum(len(record["seconds"]) for record in rows_of(records))
    repeated, disturbed = (
        sum(record.get(name, 0) for record in rows_of(records)) for name in ("repeated", "disturbed")
    )
    lines.append(
        f"{turns} turns; {repeated} more were discarded because of steal time, {disturbed} were kept in spite of it"
    )
    judged = predicted(records)
    if judged:
        off = sorted(abs(record["predicted_over_measured"] - 1) for record in judged)
        near = sum(part <= 0.05 for part in off)
        plans = f"{len(off)} plan{'s' * (len(off) > 1)}"
        lines.append(
            f"predicted / measured, {plans} of at least {LONG_SECONDS} s: within 5 % on {near} "
            f"({100 * near / len(off):.0f} %), worst error {100 * off[-1]:.1f} %"
        )
    by_contender = ratios_of_contenders(records)
    if by_contender:
        lines.append(
            f"time / lower bound, geometric mean over the rows that the contender supports and whose bound is at least "
            f"{LONG_SECONDS / 2:g} s:"
        )
    for name, ratios in sorted(by_contender.items(), key=lambda item: _mean(item[1])):
        lines.append(
            f"{name:24} {_mean(ratios):6.3f} times the bound ({len(ratios)} row{'s' * (len(ratios) > 1)}), "
            f"worst {max(ratios):.2f}"
        )
    took = next((record["took_seconds"] for record in records if record["kind"] == "end"), None)
    if took is not None:
        lines.append(f"took {took:.0f} s")
    return "\n".join(lines)


def ratios_of_contenders(records: Iterable[Record]) -> dict[str, list[float]]:
    """Time over the bound in each row that is not short, by contender."""
    ratios: dict[str, list[float]] = {}
    for record in rows_of(records):
        if record["ratio"] and record["bound_seconds"] >= LONG_SECONDS / 2:
            ratios.setdefault(record["contender"], []).append(record["ratio"])
    return ratios


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def format_markdown(records: Sequence[Record], contenders: Sequence[str]) -> str:
    """A Markdown table: the bound of each row, and the measured (predicted) ratio to it of each contender."""
    run_record = next(record for record in records if record["kind"] == "run")
    lines = [
        f"{format_machine(run_record)} Cells: median time / lower bound at the measured link rates, in brackets the "
        "prediction of the simulator. Contenders ran in turns.",
        "",
        "| | bound, s | " + " | ".join(contenders) + " |",
        "|---|---|" + "---|" * len(contenders),
    ]
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        if record["kind"] == "row":
            rows.setdefault((record["suite"], record["row"]), {})[record["contender"]] = record
    for (suite, row), row_records in rows.items():
        bound = next(iter(row_records.values()))["bound_seconds"]
        cells = [_cell(row_records.get(contender)) for contender in contenders]
        lines.append(f"| {suite}: {row} | {bound:.3g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def format_suites(records: Sequence[Record], contenders: Sequence[str]) -> str:
    """A short Markdown table: per suite and contender the geometric mean ratio to the bound, and the worst row.

    Rows with a bound below 0.1 s share a separate line, because the cost per message dominates them.
    """
    suites: dict[str, dict[str, dict[str, float]]] = {}
    for record in rows_of(records):
        if record["ratio"]:
            is_long = record["bound_seconds"] >= LONG_SECONDS / 2
            suite = suites.setdefault(record["suite"] if is_long else f"under {LONG_SECONDS / 2:g} s, all suites", {})
            suite.setdefault(record["row"], {})[record["contender"]] = record["ratio"]
    lines = ["| suite | rows | " + " | ".join(contenders) + " |", "|---|---|" + "---|" * len(contenders)]
    for name, rows in sorted(suites.items(), key=lambda item: item[0].startswith("under")):
        cells = []
        for contender in contenders:
            ratios = [row[contender] for row in rows.values() if contender in row]
            few = f" of {len(ratios)}" if len(ratios) < len(rows) else ""
            cells.append(f"{_mean(ratios):.2f} ({max(ratios):.2f}{few})" if ratios else "-")
        lines.append(f"| {name} | {len(rows)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(record: Record | None) -> str:
    if record is None or "refused" in record or record["ratio"] is None:
        return "-"
    text = f"{record['ratio']:.2f}"
    return text + (f" ({record['predicted_ratio']:.2f})" if "predicted_ratio" in record else "")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", type=Path, help="JSON lines written by python -m microbench hosts --out")
    parser.add_argument(
        "--into", type=Path, required=True, help="output path without suffix; writes INTO.md and INTO-summary.svg"
    )


def run(options: argparse.Namespace) -> None:
    """Write the page and the plots of a run."""
    try:
        records = [json.loads(line) for line in options.records.read_text().splitlines()]
        has_rows = any(record["kind"] == "row" for record in records)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchmarkOptionError(f"{options.records} has no valid records of a run: {error}") from None
    if not has_rows:
        raise BenchmarkOptionError(f"{options.records} has no row")
    if not options.into.parent.is_dir():
        raise BenchmarkOptionError(f"--into {options.into}: no folder {options.into.parent}")
    write_page(records, options.into)


def write_page(records: Sequence[Record], into: Path) -> None:
    """Write ``into.md`` with summary and tables, and the plot ``into-summary.svg``."""
    from microbench.harness.plots import draw_summary
    from microbench.harness.suite import ALSO_BY_DEFAULT, DEFAULT_CONTENDERS

    ran = [record for record in records if record["kind"] == "row"]
    contenders = list(dict.fromkeys(record["contender"] for record in ran))
    also = [name for names in ALSO_BY_DEFAULT.values() for name in names]
    shown = [name for name in (*DEFAULT_CONTENDERS, *also) if name in contenders]
    summary = into.with_name(into.name + "-summary.svg")
    draw_summary(ratios_of_contenders(records), summary)
    page = into.with_suffix(".md") if into.suffix else into.with_name(into.name + ".md")
    parts = [
        "# Emulated hosts",
        f"```text\n{format_summary(records)}\n```",
        f"![time / lower bound]({summary.name})",
        format_suites(records, shown),
        format_markdown(records, contenders),
        "## Every measurement",
        f"```text\n{format_table(records)}\n```",
    ]
    page.write_text("\n\n".join(parts) + "\n")
    stderr(f"wrote {page} and {summary}")
