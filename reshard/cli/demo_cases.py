"""Layout pairs for the demo: those of the 2023 resharding study, and some that no system in the study supports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reshard.sharding import AnyLayout, Layout, Mesh, RegionLayout, Strided


@dataclass(frozen=True)
class DemoCase:
    """One pair of layouts.

    Attributes:
        title: description to print.
        devices_per_host: number of consecutive ranks on each host.
    """

    name: str
    title: str
    shape: tuple[int, ...]
    dtype: str
    src: AnyLayout
    dst: AnyLayout
    devices_per_host: int = 4

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the case needs: the highest rank plus one."""
        return 1 + max(self.src.ranks + self.dst.ranks)


def study_cases(divisor: int = 1) -> list[DemoCase]:
    """The nine n-to-m cases of the 2023 cross-mesh resharding study (arXiv 2211.05322).

    ``divisor`` divides every dim of the study's tensors, to make them smaller.

    In the study's published code, case 8 is a copy of case 7. Here case 8 is S0 R R -> R S1 R.
    """
    table = [
        ("1", "2x4", "S0 R R", "2x4", "S0 R R"),
        ("2", "2x4", "R R R", "2x4", "S0 R R"),
        ("3", "2x4", "R S0 R", "2x4", "S0 R R"),
        ("4", "2x4", "R S01 R", "2x4", "S01 R R"),
        ("5", "2x4", "S1 R R", "2x4", "S0 R R"),
        ("6", "2x4", "S0 R R", "3x4", "S0 R R"),
        ("7", "1x4", "S1 R R", "2x4", "R R R"),
        ("8", "1x4", "S0 R R", "2x4", "R S1 R"),
        ("9", "2x4", "R S0 R", "2x4", "R R S0"),
    ]
    cases = []
    for name, src_grid, src_spec, dst_grid, dst_spec in table:
        full = (3072, 1024, 170) if name == "6" else (1024, 1024, 512)
        shape = (full[0] // divisor, full[1] // divisor, full[2] // divisor)
        src = Mesh.of(src_grid)
        dst = Mesh.of(dst_grid, first_rank=src.size)
        title = f"{src_spec} on {src_grid} -> {dst_spec} on {dst_grid}"
        cases.append(DemoCase(f"study {name}", title, shape, "float32", Layout(src, src_spec), Layout(dst, dst_spec)))
    return cases


def hard_cases(rows: int = 512) -> list[DemoCase]:
    """Uneven, in-place, overlapping, empty and irregular layouts. ``rows`` scales the larger tensors."""

    def layout_on(grid: str, spec: Any = None, first_rank: int = 0) -> Layout:
        return Layout(Mesh.of(grid, first_rank=first_rank), spec)

    part_rows = rows // 4  # number of rows that one rank holds of each of Q, K and V
    fused = RegionLayout(
        {
            rank: [[((4 * part + rank) * part_rows, (4 * part + rank + 1) * part_rows), (0, rows)] for part in range(3)]
            for rank in range(4)
        }
    )
    layouts: dict[str, tuple[AnyLayout, Layout]] = {
        "uneven": (layout_on("3", "S0"), layout_on("4", "R S0", 3)),
        "in place": (layout_on("4", "S0"), layout_on("4", "R S0")),
        "overlapping": (layout_on("2x2", "S0 S1"), layout_on("2x3", "S1 S0", 2)),
        "axis order": (layout_on("2x2", "S01 R"), layout_on("2x2", "S10 R")),
        "0-d": (layout_on("1"), layout_on("5", first_rank=3)),
        "empty shards": (layout_on("4", "S0"), layout_on("5", "S0", 4)),
        "fused": (fused, layout_on("2", "S0", 4)),
        "strided": (layout_on("2x2", ((Strided("0", 2), "1"),)), layout_on("3", first_rank=4)),
    }
    tensors: list[tuple[str, str, tuple[int, ...], str]] = [
        ("uneven", f"{rows * 4 + 3} rows over 3 ranks -> columns over 4", (rows * 4 + 3, 257), "bfloat16"),
        ("in place", "rows -> columns on the same 4 ranks", (rows * 4, rows), "float32"),
        ("overlapping", "ranks 0-3 -> ranks 2-7, two hosts", (rows * 6, rows), "float32"),
        ("axis order", "S01 -> S10, the major axis changes", (rows * 4 + 1, rows), "float16"),
        ("0-d", "a scalar from 1 rank to 5", (), "float64"),
        ("empty shards", "3 rows over 4 ranks -> 5 ranks, some get none", (3, 7), "complex64"),
        ("fused", "Q, K and V split by head in one tensor -> plain rows", (12 * part_rows, rows), "float32"),
        ("strided", "torch's _StridedShard, 2 x 2 -> replicated on 3", (rows * 2, rows), "float8_e4m3fn"),
    ]
    return [DemoCase(*tensor, *layouts[tensor[0]]) for tensor in tensors]


def gpu_cases(rows: int = 2048) -> list[DemoCase]:
    """Cases for four ranks, which share one host. ``rows`` scales the larger tensors."""
    pairs = {
        "columns": ("rows over 2 ranks -> columns over 2", "float32", (2, 0, "S0 R"), (2, 2, "R S0")),
        "replicate": ("1 rank -> replicated on 3", "bfloat16", (1, 0, "R R"), (3, 1, "R R")),
        "uneven": ("rows over 3 ranks -> 1 rank", "float16", (3, 0, "S0 R"), (1, 3, "R R")),
        "overlapping": ("ranks 0-2 -> ranks 1-3", "complex64", (3, 0, "R S0"), (3, 1, "S0 R")),
    }
    cases = []
    for name, (title, dtype, *sides) in pairs.items():
        src, dst = (Layout(Mesh.of(size, first_rank=first), spec) for size, first, spec in sides)
        cases.append(DemoCase(name, title, (rows + 1, rows), dtype, src, dst))
    return cases + [case for case in hard_cases(rows // 4) if case.num_ranks <= GPU_RANKS]


#: Ranks of :func:`gpu_cases`.
GPU_RANKS = 4
