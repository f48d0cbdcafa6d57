"""Digests of the files of a checkpoint, in a file that ``sha256sum --check`` reads, and of parts of a file."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from reshard.errors import ArgumentError

DIGESTS_FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\\\n]+)")
_BLOCK_BYTES = 2**20
_MAX_BYTES = 2**26  # of the file of digests: about 600,000 lines


def write_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Write ``{file name: digest}`` of a checkpoint into its folder. The file appears when it is complete."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    write_synced(folder / f"{DIGESTS_FILE}.unfinished", lines)
    (folder / f"{DIGESTS_FILE}.unfinished").rename(folder / DIGESTS_FILE)


def write_synced(file: Path, text: str) -> None:
    """Write a file, and wait until the disk has it."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def read_digests(folder: Path) -> dict[str, str]:
    """The ``{file name: digest}`` of a checkpoint; empty if there is no such file.

    Raises:
        ArgumentError: the file of digests is damaged, or cannot be read.
    """
    file = folder / DIGESTS_FILE
    if not file.is_symlink() and not file.exists():
        return {}
    try:
        with open_file(file) as stream:
            text = stream.read(_MAX_BYTES)
    except OSError as error:
        raise ArgumentError(f"cannot read {file}: {error.strerror}") from error
    lines = [_LINE.fullmatch(part) for part in text.decode(errors="replace").split("\n")[:-1]]
    digests = {line[2]: line[1] for line in lines if line}
    if not text.endswith(b"\n") or len(digests) < len(lines):
        raise ArgumentError(f"{file}, which has the digests of the other files, is damaged")
    return digests


def check_file(file: Path, digest: str) -> None:
    """Compare a file with its digest.

    Raises:
        ArgumentError: the file is missing, cannot be read, or has other bytes than at the save.
    """
    actual, _ = digest_parts(file)
    if actual != digest:
        raise ArgumentError(explain_difference(file, actual, digest))


def explain_difference(file: Path, actual: str, digest: str) -> str:
    """The text of an error about a file that has another digest."""
    return (
        f"{file} is damaged, or its line in {DIGESTS_FILE}: its SHA-256 digest is {actual[:12]}... and was "
        f"{digest[:12]}... when saved"
    )


def digest_parts(file: Path, spans: Sequence[tuple[int, int]] = ()) -> tuple[str, list[str]]:
    """Read a file once for the SHA-256 digest of all of it, and the 128-bit XXH3 digests of parts, in hexadecimal.

    Args:
        spans: ``(start, stop)`` of each part, in bytes; ascending and disjoint.

    Raises:
        ArgumentError: the file cannot be read.
    """
    whole, parts, at = hashlib.sha256(), [], 0
    try:
        with open_file(file) as stream:

            def read(num_bytes: int | None, *hashes: Any) -> None:
                while num_bytes is None or num_bytes > 0:
                    block = stream.read(_BLOCK_BYTES if num_bytes is None else min(num_bytes, _BLOCK_BYTES))
                    if not block:
                        return
                    for item in (whole, *hashes):
                        item.update(block)
                    num_bytes = None if num_bytes is None else num_bytes - len(block)

            for start, stop in spans:
                read(start - at)
                parts.append(xxhash.xxh3_128())
                read(stop - start, parts[-1])
                at = stop
            read(None)
    except OSError as error:
        raise ArgumentError(f"cannot read {file}, a file of the checkpoint: {error.strerror}") from error
    return whole.hexdigest(), [part.hexdigest() for part in parts]


def open_file(file: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: it cannot be opened, or is a device, a pipe or the like, which may never end.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file.open("rb")
