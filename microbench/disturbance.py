"""What a machine that is shared takes away from a measurement, as its kernel counts it.

A virtual machine's kernel knows for how long a processor was ready to run and was not allowed to ("steal"). Which
turns are repeated is decided by that alone, never by what was measured in them.
"""

from __future__ import annotations

import os
from pathlib import Path

#: A turn is disturbed if more than this part of the processors' time was taken away while it ran, and a tick more.
MOST_STOLEN = 0.01
#: A turn that was disturbed is repeated behind this pause, until a contender has had this many times its turns.
REST_SECONDS = 0.5
MOST_TRIES = 3


def _processor_seconds(column: int) -> float:
    """A column of the first line of ``/proc/stat``; 0 where there is none."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(fields[column]) / os.sysconf("SC_CLK_TCK") if len(fields) > column else 0.0


def idle_seconds() -> float:
    """What the processors of this machine have idled since it started, all together."""
    return _processor_seconds(4) + _processor_seconds(5)


def stolen_seconds() -> float:
    """What others were given while a processor of this machine was ready to run, since it started, all together."""
    return _processor_seconds(8)


def stolen_part(stolen: float, seconds: float) -> float:
    """How much of the processors' time was taken away, less a tick, the finest that the kernel counts."""
    available = seconds * (os.cpu_count() or 1)
    return max(0.0, stolen - 1 / os.sysconf("SC_CLK_TCK")) / available
