"""Types of the native module, see native/runs.cpp."""

from typing import Any

def copy_runs(src: Any, dst: Any, src_at: Any, dst_at: Any, length: Any) -> None:
    """Copy length[i] bytes from src[src_at[i]] to dst[dst_at[i]], for every i."""
