"""Records of a run as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_records(path: Path | None, records: Iterable[Mapping[str, Any]], mode: str = "w") -> None:
    """Write one line for each record; nothing without a path.

    Args:
        path: file to write.
        records: objects of JSON.
        mode: "w" for a new file, or "a" to append.
    """
    if path is not None:
        with path.open(mode) as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
