"""Unnamed files in memory, which processes of one host share. The kernel frees a file when no process has it open.

Another process of the user may open a file while a rank has its descriptor. If it cut the file, each process that maps
it would die of SIGBUS. So files are sealed: the kernel refuses to cut them.

Linux only. Elsewhere, :func:`create_memory_file` raises OSError.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
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


def create_memory_file(token: int, nbytes: int, *, reserves: bool = True, grows: bool = False) -> int:
    """A descriptor of a new file that no process can cut. By default its memory is reserved: no write to it can fail.

    Args:
        token: a random number, by which other processes recognize the file.
        reserves: otherwise the file takes memory only where it is written.
        grows: the file may become longer.

    Raises:
        OSError: this system has no such files, or too little memory.
    """
    return _create(token, nbytes, reserves=reserves, seals=lambda file: _native.seal_memory(file, grows, True))


def write_memory_file(token: int, parts: Sequence[Any]) -> int:
    """A descriptor of a new file with these buffers, which no process can change.

    Raises:
        OSError: see :func:`create_memory_file`.
    """

    def fill(descriptor: int) -> None:
        with open(descriptor, "wb", closefd=False) as file:
            for part in parts:
                file.write(part)
        _native.seal_memory(descriptor, False, False)

    return _create(token, sum(memoryview(part).nbytes for part in parts), reserves=True, seals=fill)


def _create(token: int, nbytes: int, *, reserves: bool, seals: Callable[[int], None]) -> int:
    """A new file. ``seals`` is called last, with its descriptor."""
    if not hasattr(_native, "create_memory"):
        raise OSError("this system has no unnamed files in memory")
    descriptor: int = _native.create_memory(f"reshard-{token}")
    try:
        if reserves:
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.ftruncate(descriptor, nbytes)
        seals(descriptor)
    except BaseException:
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
