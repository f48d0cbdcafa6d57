"""Measure the relative error of each codec, and draw it against the bits of a value.

Run it with ``python -m microbench.kernels.codec_errors docs/images/codec-errors.svg``. The error is the L2 norm of the
error over the L2 norm of the values, for fp32 values. Casts to bf16 and fp16 are drawn for comparison.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from reshard.codecs import BLOCK_CODECS, parse_codec

NUM_VALUES = 2**20
#: Distributions of the values: a label, and the degrees of freedom of Student's t; infinity is the normal distribution.
DISTRIBUTIONS = (("normally distributed values", math.inf), ("heavy tails (Student's t, 4 degrees of freedom)", 4.0))
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 700, 400, 70, 30, 62, 345
_BITS, _ERRORS = (2.0, 18.0), (1e-4, 1.0)


def make_values(degrees: float) -> torch.Tensor:
    """``(NUM_VALUES,)`` fp32 values of Student's t distribution."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(NUM_VALUES, generator=generator)
    if math.isinf(degrees):
        return normal
    squares = torch.randn(int(degrees), NUM_VALUES, generator=generator).square().sum(0)
    return normal / (squares / degrees).sqrt()


def measure(values: torch.Tensor) -> dict[str, tuple[float, float]]:
    """``{name: (bits per value, relative error)}`` of the codecs and of two casts."""
    found = {}
    for name in BLOCK_CODECS:
        codec, decoded = parse_codec(name), torch.empty_like(values)
        coded = torch.empty(codec.nbytes(values.shape), dtype=torch.uint8)
        codec.encode(values, coded)
        codec.decode(coded, decoded)
        found[name] = 8 * coded.numel() / values.numel(), float((decoded - values).norm() / values.norm())
    for name, dtype in (("cast to bf16", torch.bfloat16), ("cast to fp16", torch.float16)):
        found[name] = 16.0, float((values.to(dtype).float() - values).norm() / values.norm())
    return found


def draw(errors: dict[str, dict[str, tuple[float, float]]]) -> str:
    """Draw ``{distribution: {name: (bits, error)}}`` as SVG; the axis of errors is logarithmic."""

    def at(bits: float, error: float) -> tuple[float, float]:
        down = math.log(_ERRORS[1] / error) / math.log(_ERRORS[1] / _ERRORS[0])
        across = (bits - _BITS[0]) / (_BITS[1] - _BITS[0])
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _TOP + down * (_BOTTOM - _TOP)

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' "
        f"height='{_HEIGHT}' font-family='Helvetica, Arial, sans-serif' font-size='13' fill='#222' role='img'>",
        "<title>Relative error of each codec against the bits of a value</title>",
        f"<rect width='{_WIDTH}' height='{_HEIGHT}' fill='#fff'/>",
        "<text x='12' y='22' font-size='15' font-weight='bold'>Relative error against bits per value</text>",
    ]
    for power in range(-4, 1):
        y = at(_BITS[0], 10.0**power)[1]
        parts.append(f"<line x1='{_LEFT}' y1='{y:.1f}' x2='{_WIDTH - _RIGHT}' y2='{y:.1f}' stroke='#ddd'/>")
        parts.append(
            f"<text x='{_LEFT - 8}' y='{y + 4:.1f}' text-anchor='end' fill='#555'>{100 * 10.0**power:g} %</text>"
        )
    for mark in range(4, 17, 2):
        x = at(mark, 1.0)[0]
        parts.append(f"<line x1='{x:.1f}' y1='{_TOP}' x2='{x:.1f}' y2='{_BOTTOM}' stroke='#eee'/>")
        parts.append(f"<text x='{x:.1f}' y='{_BOTTOM + 18}' text-anchor='middle' fill='#555'>{mark}</text>")
    parts.append(f"<text x='{_LEFT}' y='{_BOTTOM + 40}' fill='#555'>bits per value on the wire, with scales</text>")
    for index, (label, found) in enumerate(errors.items()):
        fill = "#1a7f5a" if index == 0 else "#fff"
        parts.append(
            f"<circle cx='{20 + 230 * index}' cy='42' r='5' fill='{fill}' stroke='#1a7f5a' stroke-width='1.5'/>"
            f"<text x='{31 + 230 * index}' y='46' fill='#555'>{label}</text>"
        )
        for name, (bits, error) in found.items():
            x, y = at(bits, error)
            parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='5' fill='{fill}' stroke='#1a7f5a' stroke-width='1.5'/>")
            if index == 0:  # the label of the leftmost point is on its left, where it hits no other point
                side = (x - 10, "end") if bits == min(found.values())[0] else (x + 10, "start")
                parts.append(f"<text x='{side[0]:.1f}' y='{y + 4:.1f}' text-anchor='{side[1]}'>{name}</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Print the errors, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="SVG file to write")
    options = parser.parse_args()
    errors = {label: measure(make_values(degrees)) for label, degrees in DISTRIBUTIONS}
    for name, (bits, _) in errors[DISTRIBUTIONS[0][0]].items():
        print(f"{name:14} {bits:6.3f} bits", *(f"{found[name][1]:9.4%}" for found in errors.values()))
    options.out.write_text(draw(errors))


if __name__ == "__main__":
    main()
