"""Plots of a run: mean ratio to the lower bound, and link use of one transfer over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from microbench.cases.rows import describe_tensors
from microbench.harness.message_trace import Trace
from reshard.cost import find_bound
from reshard.topology import Topology


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
    axes.set_title(
        "Transfer time over the network's lower bound: mean of the rows (bar), worst row (line)",
        fontsize=8,
        loc="right",
    )
    save_figure(figure, path)


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
