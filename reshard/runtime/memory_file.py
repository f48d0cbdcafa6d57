"""Unnamed files in memory, which processes of one host share. The kernel frees a file when no process has it open.

Linux only. Elsewhere, :func:`create_memory_file` raises OSError.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from reshard import _native


def create_memory_file(token: int, nbytes: int) -> int:
    """A descriptor of a new file. Its memory is reserved, so that writing to it cannot fail.

    Args:
        token: a random number, by which other processes recognize the file.

    Raises:
        OSError: this system has no such files, or too little memory.
    """
    if not hasattr(_native, "create_memory"):
        raise OSError("this system has no unnamed files in memory")
    descriptor: int = _native.create_memory(f"reshard-{token}")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_memory_file(process: int, descriptor: int, token: int, *, writes: bool = False) -> int:
    """A descriptor of a file of another process.

    Raises:
        OSError: the process has ended, or this one cannot open the file, such as one of another container.
    """
    path = Path(f"/proc/{process}/fd/{descriptor}")
    if not str(path.readlink()).startswith(f"/memfd:reshard-{token} "):  # the number of a process elsewhere
        raise FileNotFoundError(path)
    return os.open(path, (os.O_RDWR if writes else os.O_RDONLY) | os.O_CLOEXEC)


def map_memory_file(descriptor: int, nbytes: int) -> Any:
    """The bytes of a file as an array that cannot be written. Raises OSError if they cannot be mapped."""
    array = _native.map_shared(descriptor, 0, nbytes, writes=False)
    array.setflags(write=False)
    return array
