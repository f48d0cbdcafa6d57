"""Colours for light and dark screens, and the frame of a page or of a notebook's output, for all drawings."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from functools import singledispatch
from html import escape

#: All rules begin with ``.reshard``, so that a drawing changes nothing else in a notebook.
_STYLE = """
.reshard { --bg: #fff; --fg: #1d2430; --soft: #5b6577; --line: #ced5df; --panel: #f4f6f9; --src: #3b7dd8;
  --dst: #2f9a68; --both: #8a63d2; --flow: #8ea6c8; --hot: #d9480f; --warm: #d98a3d; --pale: #f0c48f; --wait: #b9c0ca;
  background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { .reshard { --bg: #14171c; --fg: #e2e7ee; --soft: #9aa5b5; --line: #3a424e;
  --panel: #1d2229; --src: #5b9af0; --dst: #46b883; --both: #a98bea; --flow: #56708f; --hot: #ff7a3d;
  --warm: #e09a55; --wait: #566070; } }
.reshard svg { display: block; width: 100%; height: auto; }
.reshard text { font: 12px system-ui, sans-serif; fill: var(--fg); }
.reshard .soft { fill: var(--soft); font-size: 11px; }
.reshard .key { display: inline-block; width: 0.8em; height: 0.8em; margin: 0 0.35em 0 0.9em; border-radius: 2px; }
.reshard .bar { position: relative; height: 12px; background: var(--panel); }
.reshard .bar i { position: absolute; top: 0; bottom: 0; }
.reshard .bar em { position: absolute; top: -2px; bottom: -2px; border-right: 2px solid; }
.reshard .hot { color: var(--hot); }
.reshard p { margin: 0.5em 0; overflow-wrap: anywhere; }
"""
_PAGE_STYLE = """
html, body { margin: 0; }
body.reshard { min-height: 100vh; }
.reshard main { max-width: 1180px; margin: 0 auto; padding: 16px; box-sizing: border-box; }
.reshard h1 { font-size: 1.25em; margin: 0.2em 0; overflow-wrap: anywhere; }
.reshard h2 { font-size: 1.05em; margin: 1.6em 0 0.3em; }
.reshard details { border-top: 1px solid var(--line); padding: 0.5em 0; }
.reshard summary { cursor: pointer; font-weight: 600; }
.reshard .scroll { overflow-x: auto; }
.reshard pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); padding: 0.8em; }
.reshard table { border-collapse: collapse; font-size: 13px; }
.reshard td, .reshard th { padding: 0.15em 0.6em; text-align: right; border: 1px solid var(--line); font-weight: 400; }
"""


@singledispatch
def draw(value: object) -> str | None:
    """The drawing of a value for a notebook, as HTML, which a drawing module registers for its class; else None."""
    return None


class Drawn:
    """A value that notebooks show as its drawing."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        return draw(self)


def draw_fragment(body: str, style: str = "") -> str:
    """The output of a ``_repr_html_`` method: a body, HTML already, with the colours and rules that it uses."""
    return f"<div class='reshard' style='padding: 8px'><style>{_STYLE}{style}</style>{body}</div>"


def draw_page(title: str, body: str, style: str = "") -> str:
    """A whole page that needs no other file: a body, HTML already, under a title, which may be any text."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'><link rel='icon' href='data:,'>"
        f"<title>{escape(title)}</title><style>{_STYLE}{_PAGE_STYLE}{style}</style></head>"
        f"<body class='reshard'><main>\n{body}\n</main></body></html>\n"
    )


def draw_image(svg: str) -> str:
    """An SVG of a page as a separate file."""
    head, _, rest = svg.partition(">")
    return f"{head} class='reshard' style='background: var(--bg)'><style>{_STYLE}</style>{rest}"


def colour_of(number: int) -> str:
    """A colour for the number of a host or stage: neighbours differ, none is the red of a bottleneck."""
    hue = 0.13 + 0.8 * ((number + 1) * 0.618034 % 1.0)
    red, green, blue = colorsys.hls_to_rgb(hue, 0.62, 0.55)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def draw_bar(parts: Sequence[tuple[float, str, str]], limit: float, scale_end: float) -> str:
    """A bar of parts ``(value, colour, title)``, with a line at the limit.

    Args:
        parts: parts from left to right. Titles may be any text.
        limit: value of the line, which is shown if it is finite.
        scale_end: value at the right end; a larger limit or sum of the parts takes its place.
    """
    total = sum(value for value, _, _ in parts)
    end = max(scale_end, total, limit if math.isfinite(limit) else 0.0) or 1.0
    left, lines = 0.0, []
    for value, colour, title in parts:
        lines.append(
            f"<i style='left: {100 * left / end:.2f}%; width: {100 * value / end:.2f}%; background: {colour}' "
            f"title='{escape(title, quote=True)}'></i>"
        )
        left += value
    if math.isfinite(limit):
        over = "hot" if total > limit else "fg"
        lines.append(f"<em style='left: calc({100 * limit / end:.2f}% - 2px); border-color: var(--{over})'></em>")
    return f"<div class='bar'>{''.join(lines)}</div>"


def draw_keys(keys: dict[str, str], title: str = "") -> str:
    """A legend: names and colours, as CSS writes them, after a title."""
    parts = (f"<span class='key' style='background: {colour}'></span>{escape(name)}" for name, colour in keys.items())
    return f"<p>{escape(title)}{''.join(parts)}</p>"
