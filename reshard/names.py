"""Names of tensors in errors: those that differ, not all of hundreds."""

from __future__ import annotations

from collections.abc import Iterable

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
