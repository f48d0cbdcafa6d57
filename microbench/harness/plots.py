"""Plots of a run: ratios to the lower bound as bars, and measured and predicted link use of one transfer over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from microbench.harness.message_trace import Trace
from reshard.cost import find_bound
from reshard.topology import Topology

#: Longer bars are cut off here and labelled with their ratio.
MAX_RATIO = 5.0


def _figure(width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update(
        {"svg.hashsalt": "reshard", "svg.fonttype": "none", "font.size": 8, "font.family": "sans-serif"}
    )
    from matplotlib import pyplot as plt

    return plt.subplots(rows, 1, figsize=(width, height), sharex=rows > 1, squeeze=False, layout="constrained")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def draw_bars(records: Sequence[dict[str, Any]], contenders: Sequence[str], path: Path) -> None:
    """Plot the ratio to the lower bound of each row and contender. Ticks: predicted. Whiskers: min and max."""
    rows = list(dict.fromkeys((record["suite"], record["row"]) for record in records))
    figure, ((axes,),) = _figure(8, 0.8 + 0.13 * len(rows) * (len(contenders) + 1))
    thick = 1 / (len(contenders) + 1)
    for number, contender in enumerate(contenders):
        found = {(r["suite"], r["row"]): r for r in records if r["contender"] == contender and "refused" not in r}
        at, widths, errors, ticks = [], [], [], []
        for place, row in enumerate(rows):
            record = found.get(row)
            if record is None or not record["bound_seconds"]:
                continue
            y = place + (number + 0.5) * thick
            ratio, bound = record["ratio"], record["bound_seconds"]
            at.append(y)
            widths.append(min(ratio, MAX_RATIO))
            low, high = min(record["seconds"]) / bound, max(record["seconds"]) / bound
            errors.append(
                (
                    max(0.0, widths[-1] - low) if ratio < MAX_RATIO else 0.0,
                    max(0.0, min(high, MAX_RATIO) - widths[-1]),
                )
            )
            if ratio >= MAX_RATIO:
                axes.text(MAX_RATIO, y, f" {ratio:.1f}", va="center", fontsize=6)
            if "predicted_ratio" in record:
                ticks.append((min(record["predicted_ratio"], MAX_RATIO), y))
        axes.barh(at, widths, thick, xerr=np.array(errors).T.reshape(2, -1), label=contender, error_kw={"lw": 0.6})
        for ratio, y in ticks:
            axes.plot([ratio, ratio], [y - thick / 2, y + thick / 2], color="black", lw=1.2)
    axes.axvline(1.0, color="black", lw=0.8, ls=":")
    axes.set_yticks([place + 0.5 - thick / 2 for place in range(len(rows))], [f"{suite}: {row}" for suite, row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, MAX_RATIO * 1.06)
    axes.set_xlabel("time / lower bound at the measured link rates (median; tick: predicted)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=len(contenders), fontsize=7, frameon=False)
    axes.margins(y=0.01)
    _save(figure, path)


def draw_links(trace: Trace, path: Path) -> None:
    """Plot when each direction of each NIC was busy: measured above, predicted below, one colour per transfer."""
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
    figure, axes = _figure(8, 1.2 + 0.32 * len(links), rows=2)
    limit = max(trace.seconds, trace.timeline.makespan_seconds)
    for axis, spans, title, end in (
        (axes[0][0], measured, "measured", trace.seconds),
        (axes[1][0], simulated, "predicted", trace.timeline.makespan_seconds),
    ):
        for place, (_, rows) in enumerate(links.items()):
            for row in rows:
                begin, finish = spans[row]
                colour = f"C{int(messages.transfer[row]) % 10}"
                axis.barh(place, finish - begin, 0.8, left=begin, color=colour, alpha=0.45, linewidth=0)
        axis.axvline(end, color="black", lw=0.8)
        axis.set_yticks(range(len(links)), list(links))
        axis.invert_yaxis()
        axis.set_title(f"{title}: {end:.3f} s, bound {find_bound(trace.plan).seconds:.3f} s", loc="left", fontsize=8)
        axis.set_xlim(0, limit * 1.02)
    axes[1][0].set_xlabel("seconds")
    _save(figure, path)


def _links(messages: Any, topology: Topology) -> dict[str, list[int]]:
    """Row numbers of the messages between hosts, by the NIC and direction that they use."""
    links: dict[str, list[int]] = {}
    hosts, nics = topology.host_of_rank, topology.nic_of_rank
    for row in range(len(messages)):
        sender, receiver = int(messages.sender[row]), int(messages.receiver[row])
        if hosts[sender] != hosts[receiver]:
            for rank, direction in ((sender, "out"), (receiver, "in")):
                nic = f".{nics[rank]}" if len(topology.host(hosts[rank]).nics) > 1 else ""
                links.setdefault(f"host {hosts[rank]}{nic} {direction}", []).append(row)
    return dict(sorted(links.items()))
