"""Options that the cases share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence


class BenchmarkOptionError(Exception):
    """An option that excludes another one, or names nothing."""


def add_number(
    parser: argparse.ArgumentParser, name: str, default: float, text: str, low: float = 1, high: float = 1000
) -> None:
    """Add an option whose value, an integer if the default is one, must be ``low`` to ``high``."""
    kind = type(default)

    def number(word: str) -> float:
        value = kind(word)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {low:g} to {high:g}, not {word}")
        return value

    parser.add_argument(name, type=number, default=default, help=f"{text} ({default:g})")


def add_rates(parser: argparse.ArgumentParser, rates: Sequence[str]) -> None:
    """Add ``--rate``, which may be repeated; ``options.rate or rates`` are the rates to measure at."""
    parser.add_argument(
        "--rate", action="append", help=f"rate of each host's link ({', '.join(rates)}); may be repeated"
    )


def select(names: Iterable[str], parts: Sequence[str] | None) -> list[str]:
    """The names that contain one of the parts; all if there are no parts.

    Raises:
        BenchmarkOptionError: no name does.
    """
    known = list(names)
    selected = [name for name in known if not parts or any(part in name for part in parts)]
    if not selected:
        raise BenchmarkOptionError(
            f"no case contains {' or '.join(map(repr, parts or ()))}; the cases: {', '.join(known)}"
        )
    return selected
