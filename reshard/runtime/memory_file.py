"""Unnamed files in memory, which processes of one host share. The kernel frees a file when no process has it open.

Linux only. Elsewhere, :func:`create_memory_file` raises OSError.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from reshard import _native


def name_machine(hostname: str) -> bytes | None:
    """A name of 16 bytes that processes share only if they may open each other's files; None if this is not Linux.

    Each container has a process table, so processes of different containers have different names, whatever their host
    names are.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        names = [boot, str(Path("/proc/self/ns/pid").readlink()), str(os.geteuid()), hostname]
    except OSError:  # not Linux, or a system that hides these files
        return None
    return hashlib.sha256(" ".join(names).encode()).digest()[:16]


def create_memory_file(token: int, nbytes: int, *, reserves: bool = True) -> int:
    """A descriptor of a new file. By default its memory is reserved, so that writing to it cannot fail.

    Args:
        token: a random number, by which other processes recognize the file.
        reserves: otherwise the file takes memory only where it is written.

    Raises:
        OSError: this system has no such files, or too little memory.
    """
    if not hasattr(_native, "create_memory"):
        raise OSError("this system has no unnamed files in memory")
    descriptor: int = _native.create_memory(f"reshard-{token}")
    try:
        if reserves:
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.ftruncate(descriptor, nbytes)
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
