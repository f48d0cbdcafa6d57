"""Tables of text whose lines appear as they are measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reshard.cli.progress_bars import print_line


class Table:
    """Prints a header, and then a line for each row.

    Args:
        columns: heading of each column, and the format of its values, such as ``{"ranks": ">6", "ratio": ">8.3f"}``. A
            column is at least as wide as its heading.
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._formats = []
        for heading, spec in columns.items():
            align, width, kind = re.fullmatch(r"([<>])(\d*)(.*)", spec).groups()  # type: ignore[union-attr]
            self._formats.append((f"{align}{max(len(heading), int(width or 0))}", kind))
        print_line("  ".join(f"{heading:{place}}" for heading, (place, _) in zip(columns, self._formats, strict=True)))

    def add(self, *values: Any) -> None:
        """Print a row; None leaves a cell empty."""
        cells = zip(values, self._formats, strict=True)
        texts = ("" if value is None else format(value, kind) for value, (_, kind) in cells)
        print_line("  ".join(f"{text:{place}}" for text, (place, _) in zip(texts, self._formats, strict=True)).rstrip())
