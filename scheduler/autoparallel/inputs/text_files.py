"""Text files that a search reads and writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from reshard.arguments import check_arguments
from reshard.errors import ArgumentError

Value = TypeVar("Value")


def read_value(path: str | Path, parse: Callable[[str], Value]) -> Value:
    """The value in a file, which ``parse`` makes of its text.

    Raises:
        ArgumentError: the file cannot be read, or ``parse`` raises one; the text names the file.
    """
    text = read_text(path)
    try:
        return parse(text)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from error


def read_object(text: str) -> dict[str, Any]:
    """The JSON object in a text.

    Raises:
        ValueError: the text holds none.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"it is JSON of {type(data).__name__!r}, not of an object")
    return data


def explain_refusal(error: Exception) -> str:
    """The text of ``error``, which was raised while an object was read from a file."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


@check_arguments()
def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
        ArgumentError: it cannot be read, or is not text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error  # str(error) repeats the name
        raise ArgumentError(f"cannot read {path}: {reason}") from error


def check_place(option: str, path: str) -> None:
    """Check that the file of an option can be written, before work that takes long.

    Raises:
        ArgumentError: there is no such folder, or the path is a folder itself.
    """
    if not Path(path).parent.is_dir():
        raise ArgumentError(f"--{option} is {path}; there is no such folder")
    if Path(path).is_dir():
        raise ArgumentError(f"--{option} is {path}, which is a folder; pass the name of a file")


@check_arguments()
def write_text(path: str | Path, text: str) -> None:
    """Write a file.

    Raises:
        ArgumentError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot write {path}: {error}") from error
