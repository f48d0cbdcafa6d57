"""Draw the chart in the README from a page of results: ``python -m microbench.harness.summary_plot PAGE OUT.svg``.

The page has one line per method, such as ``auto  1.035 times the bound (62 rows), worst 1.13``.
"""

from __future__ import annotations

import argparse
import math
import re
from html import escape
from pathlib import Path

#: The bars from top to bottom: the name of the method on the page, and its label in the chart.
BARS = (
    ("auto", "reshard"),
    ("send_recv", "each receiver fetches its part"),
    ("awex", "awex 0.9"),
    ("gloo broadcast", "broadcast of the whole tensor"),
    ("full_tensor + broadcast", "DTensor full_tensor, then broadcast"),
)
_LINE = re.compile(r"^(\S.*?) {2,}([\d.]+) times the bound \((\d+) rows\), worst ([\d.]+)$", flags=re.MULTILINE)
_WIDTH, _LEFT, _ROW_HEIGHT, _TOP = 700, 245, 34, 58


def draw(page: str) -> str:
    """Draw the chart as SVG: one bar per method of :data:`BARS`, on a logarithmic axis that starts at the bound.

    Raises:
        KeyError: the page lacks a method.
    """
    found: dict[str, tuple[float, int, float]] = {}
    for name, mean, rows, worst in _LINE.findall(page):
        found.setdefault(name, (float(mean), int(rows), float(worst)))  # keep the first table, which is of all suites
    axis_end = 64.0  # lines of worse rows end here
    scale = (_WIDTH - _LEFT - 20) / math.log(axis_end)
    height = _TOP + _ROW_HEIGHT * len(BARS) + 46
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' width='{_WIDTH}' height='{height}' "
        "font-family='Helvetica, Arial, sans-serif' font-size='13' fill='#222' role='img'>",
        "<title>Time over the lower bound, by method</title>",
        f"<rect width='{_WIDTH}' height='{height}' fill='#fff'/>",
        "<text x='12' y='22' font-size='15' font-weight='bold'>Transfer time over the network's lower bound</text>",
        "<text x='12' y='41' fill='#555'>bar: geometric mean of the rows; line: the worst row; 1 is the limit</text>",
    ]
    bottom = _TOP + _ROW_HEIGHT * len(BARS)
    for tick in (1, 2, 4, 8, 16, 32, 64):
        x = _LEFT + scale * math.log(tick)
        parts.append(f"<line x1='{x:.1f}' y1='{_TOP - 6}' x2='{x:.1f}' y2='{bottom}' stroke='#ddd'/>")
        parts.append(f"<text x='{x:.1f}' y='{bottom + 17}' text-anchor='middle' fill='#555'>{tick}x</text>")
    for index, (name, label) in enumerate(BARS):
        mean, rows, worst = found[name]
        y = _TOP + _ROW_HEIGHT * index
        colour = "#1a7f5a" if index == 0 else "#9aa5b1"
        mean_length, worst_length = scale * math.log(mean), scale * math.log(min(worst, axis_end))
        parts += [
            f"<text x='{_LEFT - 10}' y='{y + 16}' text-anchor='end'>{escape(label)}</text>",
            f"<rect x='{_LEFT}' y='{y + 2}' width='{max(mean_length, 3):.1f}' height='19' fill='{colour}'/>",
            f"<line x1='{_LEFT}' y1='{y + 25}' x2='{_LEFT + worst_length:.1f}' y2='{y + 25}' stroke='{colour}' "
            "stroke-width='2'/>",
            f"<text x='{_LEFT + max(mean_length, 3) + 6:.1f}' y='{y + 16}' font-weight='bold'>{mean:.4g}"
            f"<tspan font-weight='normal' fill='#555'> in {rows} rows, worst {worst:.1f}</tspan></text>",
        ]
    parts.append(f"<text x='{_LEFT}' y='{bottom + 36}' fill='#555'>time over the bound, logarithmic</text></svg>")
    return "\n".join(parts) + "\n"


def main() -> None:
    """Draw the chart in the README from a page of results."""
    parser = argparse.ArgumentParser(prog="python -m microbench.harness.summary_plot", description=main.__doc__)
    parser.add_argument("page", type=Path, help="page of results, such as docs/benchmarks/2026-11-22-emulated-hosts.md")
    parser.add_argument("out", type=Path, help="SVG file to write")
    options = parser.parse_args()
    options.out.write_text(draw(options.page.read_text()))


if __name__ == "__main__":
    main()
