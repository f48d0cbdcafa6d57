"""Write ``bounds.txt`` in this folder: the lower bounds of random problems, with the reason for each.

A change to the lower bound changes lines of the file. Review the diff before you commit it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from reshard.cost.lower_bound import find_bound
from reshard.sharding.tensor_spec import TensorSpec
from tests.support.random_problems import random_problem

FILE = Path(__file__).with_name("bounds.txt")
#: Seeds of problems whose bound combines several links.
RARE = (
    138, 154, 238, 349, 586, 910, 921, 960, 995, 1095, 1140, 1301, 1388, 1445, 1504, 1584, 1658, 1677, 1752, 1822, 1949,
    2175,
)  # fmt: skip


def make_lines() -> Iterator[str]:
    """The lines of the file."""
    for seed in (*range(120), *RARE):
        src, dst, shape, topology = random_problem(seed)
        bound = find_bound([TensorSpec(shape, "float32", src, dst)], topology)
        yield f"{seed}: {bound.seconds:.9g} s, {bound.reason}"


def main() -> int:
    """Write the file."""
    FILE.write_text("".join(f"{line}\n" for line in make_lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
