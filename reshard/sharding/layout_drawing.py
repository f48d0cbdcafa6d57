"""A layout as a drawing: the parts of a tensor, and the ranks that hold each."""

from __future__ import annotations

import math
from html import escape

import numpy as np

from reshard.drawing import colour_of, draw, draw_fragment
from reshard.formatting import count_of, describe_ranks, format_ranks
from reshard.sharding.layout import Layout
from reshard.sharding.spec import Strided, axis_of

#: Largest number of parts of a dim that are drawn, and of parts whose ranks are written inside them.
MAX_PARTS, _MAX_NAMED = 32, 64
_WIDTH, _LEFT, _TOP = 460, 54, 20


@draw.register(Layout)
def draw_layout(layout: Layout) -> str:
    """A layout for a notebook: a grid of the parts of the first two dims that it shards.

    Returns:
        HTML of at most 200 kB that needs no other file.
    """
    counts = [math.prod(layout.mesh.axis_size(axis_of(step)) for step in steps) for steps in layout.spec]
    sharded = [dim for dim, count in enumerate(counts) if count > 1]
    words = []
    for dim in sharded:
        over = ", ".join(axis_of(step) for step in layout.spec[dim])
        spread = " that alternate" if any(isinstance(step, Strided) for step in layout.spec[dim]) else ""
        words.append(f"dim {dim} in {count_of(counts[dim], 'part')}{spread} over {over}")
    num_replicas = layout.mesh.size // math.prod(counts)
    held = f"{'each part' if sharded else 'the whole tensor'} on {count_of(num_replicas, 'rank')}"
    text = f"<p><b>{escape(str(layout))}</b></p><p>{escape('; '.join([*words, held]))}</p>"
    dims = sharded[:2]
    if any(counts[dim] > MAX_PARTS for dim in dims):
        return draw_fragment(text)
    grid = _draw_grid(layout, [dims[0] if dims else None, dims[1] if len(dims) > 1 else None])
    return draw_fragment(f"{text}<div style='max-width: 560px'>{grid}</div>")


def _ranks_of_parts(layout: Layout, dims: list[int | None]) -> dict[tuple[int, ...], list[int]]:
    """The ranks of each pair of parts of two dims; None stands for a dim of one part."""
    mesh = layout.mesh
    coords = np.unravel_index(np.arange(mesh.size), mesh.sizes) if mesh.sizes else ()
    at = dict(zip(mesh.axes, coords, strict=True))
    parts = np.zeros((2, mesh.size), dtype=np.int64)
    for row, dim in enumerate(dims):
        for step in layout.spec[dim] if dim is not None else ():
            parts[row] = parts[row] * mesh.axis_size(axis_of(step)) + at[axis_of(step)]
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    for rank, *key in zip(mesh.ranks, *parts.tolist(), strict=True):
        ranks_of.setdefault(tuple(key), []).append(rank)
    return ranks_of


def _draw_grid(layout: Layout, dims: list[int | None]) -> str:
    held = _ranks_of_parts(layout, dims)
    rows, columns = (1 + max(key[side] for key in held) for side in (0, 1))
    height = min(max(rows * 34, 60), 420)
    tall, wide = height / rows, (_WIDTH - _LEFT) / columns
    lines = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height + _TOP + 2:.0f}' role='img'>"]
    for (row, column), ranks in sorted(held.items()):
        x, y = _LEFT + column * wide, _TOP + row * tall
        number = row * columns + column
        lines.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{max(wide - 1.5, 1):.1f}' height='{max(tall - 1.5, 1):.1f}' "
            f"fill='{colour_of(number)}'><title>{describe_ranks(ranks)[:200]}</title></rect>"
        )
        label = format_ranks(ranks)
        if len(held) <= _MAX_NAMED and len(label) * 6.6 < wide and tall > 13:
            lines.append(
                f"<text x='{x + wide / 2:.1f}' y='{y + tall / 2 + 4:.1f}' text-anchor='middle' style='fill: #000'>"
                f"{label}</text>"
            )
    for dim, x, y in ((dims[0], _LEFT - 8, _TOP + 14), (dims[1], _LEFT + 34, _TOP - 6)):
        if dim is not None:
            lines.append(f"<text class='soft' x='{x}' y='{y}' text-anchor='end'>dim {dim}</text>")
    return "\n".join([*lines, "</svg>"])
