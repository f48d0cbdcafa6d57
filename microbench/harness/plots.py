"""Plots of a run: bars of the ratio to the lower bound, and link use of one transfer over time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from microbench.cases.rows import describe_tensors
from microbench.harness.message_trace import Trace
from reshard.cost import find_bound
from reshard.formatting import format_bytes
from reshard.topology import Topology

#: A bar with a larger ratio is cut off at this ratio and labelled with its own.
MAX_RATIO = 5.0
_BAR_INCHES = 0.1


def new_figure(width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    """A figure of inches, and its axes, one below the other."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update(
        {"svg.hashsalt": "reshard", "svg.fonttype": "none", "font.size": 8, "font.family": "sans-serif"}
    )
    from matplotlib import pyplot as plt

    return plt.subplots(rows, 1, figsize=(width, height), sharex=rows > 1, squeeze=False, layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure as SVG. Its folder is created."""
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def draw_bars(records: Sequence[dict[str, Any]], contenders: Sequence[str], path: Path) -> None:
    """Plot one bar per row and contender: its median time divided by the lower bound.

    Whiskers show the fastest and the slowest turn; ticks show the prediction. A label names what its row moves; each
    suite has a heading.

    Args:
        records: records of the run, of kind ``row``; at least one.
        contenders: names of the contenders to draw, in order.
        path: SVG file to write. Its folder is created.
    """
    found = {(r["suite"], r["row"], r["contender"]): r for r in records if "refused" not in r and r["bound_seconds"]}
    labels, bars = _place_bars(records, contenders, found)
    height = max([*labels, *bars]) + 1
    figure, ((axes,),) = new_figure(8, 1.6 + _BAR_INCHES * height)
    for contender in contenders:
        places = [(y, found[row]) for y, row in bars.items() if row[2] == contender]
        widths, errors = [], []
        for y, record in places:
            ratio, bound = record["ratio"], record["bound_seconds"]
            widths.append(min(ratio, MAX_RATIO))
            low, high = min(record["seconds"]) / bound, max(record["seconds"]) / bound
            errors.append(
                (
                    max(0.0, widths[-1] - low) if ratio < MAX_RATIO else 0.0,
                    max(0.0, min(high, MAX_RATIO) - widths[-1]),
                )
            )
            if ratio >= MAX_RATIO:
                axes.text(MAX_RATIO * 1.01, y, f"{ratio:.1f}", va="center", fontsize=6)
            if "predicted_ratio" in record:
                predicted = min(record["predicted_ratio"], MAX_RATIO)
                axes.plot([predicted, predicted], [y - 0.5, y + 0.5], color="black", lw=1.2)
        xerr = np.array(errors).T.reshape(2, -1)
        axes.barh([y for y, _ in places], widths, 1.0, xerr=xerr, label=contender, error_kw={"lw": 0.6})
    axes.axvline(1.0, color="black", lw=0.8, ls=":")
    axes.set_yticks(list(labels), [name for name, _ in labels.values()])
    for tick, (_, is_heading) in zip(axes.get_yticklabels(), labels.values(), strict=True):
        tick.set_fontweight("bold" if is_heading else "normal")
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labeltop=True, top=True)
    axes.set_ylim(height, -1)
    axes.set_xlim(0, MAX_RATIO * 1.08)
    axes.set_xlabel("time / lower bound")
    axes.set_title(
        "bars: time / lower bound (median; whiskers: min and max; tick: predicted; dotted: the bound)\n"
        "rows: source layout on its mesh -> destination layout on its mesh, size of the tensors",
        fontsize=8,
        loc="right",
    )
    figure.legend(loc="outside upper center", ncols=min(3, len(contenders)), fontsize=7, frameon=False)
    save_figure(figure, path)


#: The bars of the summary from top to bottom: a contender, and its label.
SUMMARY = {
    "auto": "reshard",
    "send_recv": "each receiver fetches its part",
    "awex": "awex 0.9",
    "gloo broadcast": "broadcast of the whole tensor",
    "full_tensor + broadcast": "DTensor full_tensor, then broadcast",
}


def draw_summary(ratios: Mapping[str, Sequence[float]], path: Path) -> None:
    """Plot one bar per contender, on a logarithmic axis that starts at the bound: the picture in the README.

    Args:
        ratios: time over the bound in each row. Contenders that are not in :data:`SUMMARY` are left out.
        path: SVG file to write. Its folder is created.
    """
    shown = [name for name in SUMMARY if name in ratios]
    figure, ((axes,),) = new_figure(7, 0.8 + 0.4 * len(shown))
    for y, name in enumerate(shown):
        mean, worst = math.exp(sum(map(math.log, ratios[name])) / len(ratios[name])), max(ratios[name])
        colour = "C2" if y == 0 else "C7"
        axes.barh(y, max(mean - 1, 0.01), 0.55, left=1, color=colour)
        axes.plot([1, worst], [y + 0.38, y + 0.38], color=colour, lw=2)
        axes.text(max(mean, 1.03) * 1.03, y, f"{mean:.4g} in {len(ratios[name])} rows, worst {worst:.1f}", va="center")
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, 64)
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.set_yticks(range(len(shown)), [SUMMARY[name] for name in shown])
    axes.invert_yaxis()
    axes.set_title("Transfer time over the network's lower bound: mean of the rows (bar), worst row (line)", fontsize=9)
    save_figure(figure, path)


#: A bar, ``(suite, row, contender)``.
_Bar = tuple[str, str, str]


def _place_bars(
    records: Sequence[dict[str, Any]], contenders: Sequence[str], drawn: Collection[_Bar]
) -> tuple[dict[float, tuple[str, bool]], dict[float, _Bar]]:
    """Vertical positions of labels and bars: distance from the top, in heights of a bar.

    Returns:
        ``{y: (label, whether it is the heading of a suite)}`` and ``{y: bar}``. If several rows of a suite have the
        same layouts and bytes, their labels also contain the names of the rows.
    """
    suites: dict[str, dict[str, str]] = {}
    for record in records:
        size = "" if "MiB" in record["title"] else f", {format_bytes(record['bytes'])}"
        suites.setdefault(record["suite"], {})[record["row"]] = f"{record['title']}{size}"
    labels: dict[float, tuple[str, bool]] = {}
    bars: dict[float, _Bar] = {}
    y = 0.0
    for suite, rows in suites.items():
        labels[y] = suite, True
        y += 2
        count = Counter(rows.values())
        for row, name in rows.items():
            shown = [bar for contender in contenders if (bar := (suite, row, contender)) in drawn]
            bars |= {y + number: bar for number, bar in enumerate(shown)}
            labels[y + max(0, len(shown) - 1) / 2] = f"{name} ({row})" if count[name] > 1 else name, False
            y += max(1, len(shown)) + 1
        y += 1
    return labels, bars


def draw_links(trace: Trace, path: Path) -> None:
    """Plot when each direction of each NIC was busy: measured above, predicted below.

    Args:
        trace: measured and predicted times of all messages of one plan. Messages of one transfer share a colour.
        path: SVG file to write. Its folder is created.
    """
    messages, topology = trace.timeline.messages, trace.plan.topology
    measured: dict[int, tuple[float, float]] = {}
    last: dict[tuple[int, int], float] = {}
    for row in range(len(messages)):
        ident, pair = int(messages.id[row]), (int(messages.sender[row]), int(messages.receiver[row]))
        if ident in trace.measured:
            posted, arrived = trace.measured[ident]
            # messages between the same two ranks flow one after the other
            measured[row] = (min(max(posted, last.get(pair, 0.0)), arrived), arrived)
            last[pair] = max(arrived, last.get(pair, 0.0))
    simulated = {row: (float(trace.timeline.start[row]), float(trace.timeline.finish[row])) for row in measured}
    links = _links(messages, topology)
    figure, axes = new_figure(8, 1.5 + 0.32 * len(links), rows=2)
    figure.suptitle(describe_tensors(trace.plan.tensors), fontsize=9)
    limit = max(trace.seconds, trace.timeline.makespan_seconds)
    for axis, spans, title, end in (
        (axes[0][0], measured, "measured", trace.seconds),
        (axes[1][0], simulated, "predicted", trace.timeline.makespan_seconds),
    ):
        for line, (_, rows) in enumerate(links.items()):
            for row in rows:
                begin, finish = spans[row]
                colour = f"C{int(messages.transfer[row]) % 10}"
                axis.barh(line, finish - begin, 0.8, left=begin, color=colour, alpha=0.45, linewidth=0)
        axis.axvline(end, color="black", lw=0.8)
        axis.set_yticks(range(len(links)), list(links))
        axis.invert_yaxis()
        axis.set_title(f"{title}: {end:.3f} s, bound {find_bound(trace.plan).seconds:.3f} s", loc="left", fontsize=8)
        axis.set_xlim(0, limit * 1.02)
    axes[1][0].set_xlabel(
        "time since the start of the transfer, s (a colour is a transfer; ten colours repeat; line: end)"
    )
    figure.supylabel("NIC and direction", fontsize=8)
    save_figure(figure, path)


def _links(messages: Any, topology: Topology) -> dict[str, list[int]]:
    """``{"host 0.1 out": rows}``: the messages that pass each NIC in each direction, as rows of the message table."""
    links: dict[str, list[int]] = {}
    hosts, nics = topology.host_of_rank, topology.nic_of_rank
    for row in range(len(messages)):
        sender, receiver = int(messages.sender[row]), int(messages.receiver[row])
        if hosts[sender] != hosts[receiver]:
            for rank, direction in ((sender, "out"), (receiver, "in")):
                nic = f".{nics[rank]}" if len(topology.host(hosts[rank]).nics) > 1 else ""
                links.setdefault(f"host {hosts[rank]}{nic} {direction}", []).append(row)
    return dict(sorted(links.items()))
