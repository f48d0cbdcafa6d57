"""The relative error of each codec against the bits of a value, as a table and a plot.

The error is the L2 norm of the error over the L2 norm of the values, for fp32 values. Casts to bf16 and fp16 are drawn
for comparison.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from microbench.harness.plots import new_figure, save_figure
from reshard.codecs import BLOCK_CODECS, parse_codec

NUM_VALUES = 2**20
#: Distributions of the values: a label, and the degrees of freedom of Student's t; infinity is the normal distribution.
DISTRIBUTIONS = (("normally distributed values", math.inf), ("heavy tails (Student's t, 4 degrees of freedom)", 4.0))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="SVG file to write, such as docs/images/codec-errors.svg")


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
        encoded = torch.empty(codec.nbytes(values.shape), dtype=torch.uint8)
        codec.encode(values, encoded)
        codec.decode(encoded, decoded)
        found[name] = 8 * encoded.numel() / values.numel(), float((decoded - values).norm() / values.norm())
    for name, dtype in (("cast to bf16", torch.bfloat16), ("cast to fp16", torch.float16)):
        found[name] = 16.0, float((values.to(dtype).float() - values).norm() / values.norm())
    return found


def run(options: argparse.Namespace) -> None:
    """Print the errors, and draw them."""
    errors = {label: measure(make_values(degrees)) for label, degrees in DISTRIBUTIONS}
    figure, ((axes,),) = new_figure(7, 4)
    for index, (label, found) in enumerate(errors.items()):
        bits, relative = zip(*found.values(), strict=True)
        axes.scatter(bits, relative, label=label, edgecolors="C2", facecolors="none" if index else "C2")
    for name, (bits_of_value, error) in errors[DISTRIBUTIONS[0][0]].items():
        print(f"{name:14} {bits_of_value:6.3f} bits", *(f"{found[name][1]:9.4%}" for found in errors.values()))
        is_left = bits_of_value == min(found.values())[0]  # whose label would hit the next point on its right
        place, side = ((-8, -3), "right") if is_left else ((8, -3), "left")
        axes.annotate(name, (bits_of_value, error), place, textcoords="offset points", ha=side)
    axes.set_yscale("log")
    axes.set_xlim(2, 20)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.set_xlabel("bits per value on the wire, with scales")
    axes.set_title("Relative error against bits per value")
    axes.grid(visible=True, color="#eee")
    axes.legend()
    save_figure(figure, options.out)
