"""Compile the stand-in for libnccl with the C++ compiler."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "standin.cpp"


def build_standin(folder, *flags):
    """Compile the library into ``folder`` with additional compiler flags; returns its path."""
    path = Path(folder) / "libnccl_standin.so"
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", *map(str, flags)]
    subprocess.run([*command, str(SOURCE), "-o", str(path)], check=True, capture_output=True, text=True)
    return str(path)
