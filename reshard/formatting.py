"""Format ranks, names, bytes and rates as readable text."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

#: Maximum number of names that an error lists.
MAX_SHOWN = 3
#: Maximum number of characters in a line of an error.
MAX_LINE = 2000


def brief(value: Any, limit: int = 60) -> str:
    """A short text for any value, for error messages: its ``repr``, of at most ``limit`` characters."""
    if type(value) is str and len(value) < limit:
        return repr(value)
    try:
        if isinstance(value, int) and value.bit_length() > 10_000:  # Python refuses to print thousands of digits
            return "a huge number"
        text = reprlib.repr(value)  # repr() would print every use of a YAML alias in full
    except Exception:  # the repr is the caller's
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """The end of an error that refuses a name: ``"; did you mean 'int8x128'?"``, or empty if no known name is close."""
    import difflib  # only errors need it

    if not isinstance(name, str) or len(name) >= 100:
        return ""
    spelling = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), list(spelling), 1)
    return f"; did you mean {spelling[close[0]]!r}?" if close else ""


def cut_lines(text: str) -> str:
    """The text, with the middle of each very long line left out."""
    if len(text) <= MAX_LINE:
        return text
    half = MAX_LINE // 2
    return "\n".join(
        line
        if len(line) <= MAX_LINE
        else f"{line[:half]} ... ({len(line) - 2 * half} characters left out) ... {line[-half:]}"
        for line in text.split("\n")
    )


def format_names(names: Iterable[object]) -> str:
    """Sorted names, shortened: ``'a', 'b', 'c' and 4 more``."""
    ordered = sorted(map(str, names))
    shown = ", ".join(map(repr, ordered[:MAX_SHOWN]))
    return shown if len(ordered) <= MAX_SHOWN else f"{shown} and {len(ordered) - MAX_SHOWN} more"


def compare_names(given: Iterable[object], expected: Iterable[object]) -> str:
    """Describe how two sets of names differ: ``lacks 'a' and has unexpected 'b'``; empty if they are equal."""
    given, expected = set(given), set(expected)
    parts = []
    if expected - given:
        parts.append(f"lacks {format_names(expected - given)}")
    if given - expected:
        parts.append(f"has unexpected {format_names(given - expected)}")
    return " and ".join(parts)


def format_ranks(ranks: Sequence[int]) -> str:
    """``0-3,8,6`` for ``[0, 1, 2, 3, 8, 6]``: consecutive ranks become a range; the order stays."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def describe_ranks(ranks: Sequence[int]) -> str:
    """``rank 6``, or ``ranks 0-3,6``."""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}"


def count_of(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``, ``3 axes``, ``4 microbatches``."""
    if number == 1:
        return f"1 {noun}"
    if noun == "axis":
        return f"{number} axes"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def format_bytes(nbytes: float) -> str:
    """``1.5 MiB`` or ``17 bytes``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes:.4g} bytes"


def format_rate(rate: float) -> str:
    """Bytes per second as ``1.25 GB/s``."""
    for unit, name in ((1e9, "GB/s"), (1e6, "MB/s")):
        if rate >= unit:
            return f"{rate / unit:.4g} {name}"
    return f"{rate:.4g} bytes/s"


def format_seconds(seconds: float) -> str:
    """``3.36 ms``, ``12.5 us`` or ``0 s``; ``21.8 min`` from two minutes on, ``3.5 h`` from two hours on."""
    for unit, name, min_count in ((3600.0, "h", 2.0), (60.0, "min", 2.0), (1.0, "s", 1.0), (1e-3, "ms", 1.0)):
        if seconds >= min_count * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-6:.3g} us" if seconds else "0 s"


def unwrapped_name(name: str) -> str:
    """The name of a parameter or buffer without the parts that torch.compile and checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))
