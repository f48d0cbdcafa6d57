"""Ranks, names, bytes and rates as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Names that an error shows of each kind.
MAX_SHOWN = 3


def show_names(names: Iterable[object]) -> str:
    """``'a', 'b', 'c' and 4 more``."""
    ordered = sorted(map(str, names))
    shown = ", ".join(map(repr, ordered[:MAX_SHOWN]))
    return shown if len(ordered) <= MAX_SHOWN else f"{shown} and {len(ordered) - MAX_SHOWN} more"


def compare_names(given: Iterable[object], expected: Iterable[object]) -> str:
    """How names differ from those expected: ``lacks 'a' and has 'b' besides``; empty if they do not."""
    given, expected = set(given), set(expected)
    parts = []
    if expected - given:
        parts.append(f"lacks {show_names(expected - given)}")
    if given - expected:
        parts.append(f"has {show_names(given - expected)} besides")
    return " and ".join(parts)


def format_ranks(ranks: Sequence[int]) -> str:
    """``0-3,8,6`` for ``[0, 1, 2, 3, 8, 6]``: runs of consecutive ranks are folded, order is kept."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def say_ranks(ranks: Sequence[int]) -> str:
    """``rank 6``, or ``ranks 0-3,6``."""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}"


def format_bytes(nbytes: float) -> str:
    """As ``1.5 MiB`` or ``17 bytes``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes:.4g} bytes"


def format_rate(rate: float) -> str:
    """As ``1.25 GB/s``."""
    for unit, name in ((1e9, "GB/s"), (1e6, "MB/s")):
        if rate >= unit:
            return f"{rate / unit:.4g} {name}"
    return f"{rate:.4g} bytes/s"
