"""Text files that a search reads and writes."""

from __future__ import annotations

from pathlib import Path

from reshard.errors import ArgumentError


def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
        ArgumentError: it cannot be read, or is not text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot read {path}: {error}") from error


def write_text(path: str | Path, text: str) -> None:
    """Write a file.

    Raises:
        ArgumentError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error}") from error
