"""The plot of a run: mean ratio to the lower bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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
