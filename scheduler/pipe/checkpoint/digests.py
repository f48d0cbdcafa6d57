"""Digests of the files of a checkpoint, in a file that ``sha256sum --check`` reads."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from reshard.errors import ArgumentError

DIGESTS_FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\\\n]+)")


def digest_of(file: Path) -> str:
    """The SHA-256 digest of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Write ``{file name: digest}`` of a checkpoint into its folder."""
    with (folder / DIGESTS_FILE).open("w") as stream:
        stream.writelines(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
        stream.flush()
        os.fsync(stream.fileno())


def read_digests(folder: Path) -> dict[str, str]:
    """The ``{file name: digest}`` of a checkpoint; empty if another program, or an earlier version, wrote it.

    Raises:
        ArgumentError: the file of digests is damaged, or cannot be read.
    """
    try:
        text = (folder / DIGESTS_FILE).read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ArgumentError(f"cannot read {folder / DIGESTS_FILE}: {error}") from error
    lines = [_LINE.fullmatch(each) for each in text.decode(errors="replace").split("\n")[:-1]]
    digests = {line[2]: line[1] for line in lines if line}
    if not text.endswith(b"\n") or None in lines or ".metadata" not in digests:
        raise ArgumentError(f"{folder / DIGESTS_FILE}, which has the digests of the other files, is damaged")
    return digests


def check_files(folder: Path, part: int, num_parts: int) -> None:
    """Compare a part of the files of a checkpoint with their digests; together the parts are all files.

    Raises:
        ArgumentError: a file is missing, cannot be read, or has other bytes than at the save.
    """
    for name, digest in sorted(read_digests(folder).items())[part::num_parts]:
        try:
            found = digest_of(folder / name)
        except OSError as error:
            raise ArgumentError(f"cannot read {folder / name}, a file of the checkpoint: {error}") from error
        if found != digest:
            raise ArgumentError(
                f"{folder / name} is damaged: its SHA-256 digest is {found[:12]}... and was {digest[:12]}... when saved"
            )
