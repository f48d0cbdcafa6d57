"""What a machine that is shared takes away from a measurement, as its kernel counts it.

A virtual machine's kernel knows for how long a processor was ready to run and was not allowed to ("steal"). Which
turns are repeated is decided by that alone, never by what was measured in them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

#: A turn is disturbed if more than this part of the processors' time was taken away while it ran, and a tick more.
MOST_STOLEN = 0.01
#: A turn that was disturbed is repeated until a contender has had this many times its turns.
MOST_TRIES = 3
#: What a run takes over its turns: links are measured, processes started.
OVERHEAD = 1.06
#: A row may use so many times its part of what a run has to spare.
GENEROSITY = 4.0
PROBE_SECONDS = 0.1
PAUSE_SECONDS = 1.0


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


class Patience:
    """Waits behind disturbed turns until the machine is there again, so many seconds in all."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def spend(self, seconds: float) -> None:
        """Count a turn that was run again."""
        self._left -= seconds

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self._left <= 0

    def rest(self) -> None:
        """Keep a processor busy for a moment; pause, and look again, while it is taken away."""
        while self._left > 0:
            begun, stolen = time.monotonic(), stolen_seconds()
            while time.monotonic() < begun + PROBE_SECONDS:
                pass
            if stolen_seconds() <= stolen:
                return
            time.sleep(PAUSE_SECONDS)
            self._left -= time.monotonic() - begun


class Pace:
    """Deals out what a run may take beyond what it takes undisturbed.

    Args:
        limit_seconds: of the whole run. expected_seconds: of all turns that are wanted, none of them repeated.
    """

    def __init__(self, limit_seconds: float, expected_seconds: float) -> None:
        self.expected_seconds = self._left = expected_seconds
        self._limit, self._begun = limit_seconds, time.monotonic()

    @property
    def passed_seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._begun

    def spare_seconds(self, expected_seconds: float) -> float:
        """What the next row may take for pauses and turns that are repeated.

        Args:
            expected_seconds: of its turns. A row gets several times its share, as others will need none.
        """
        spare = max(0.0, self._limit - self.passed_seconds - OVERHEAD * self._left)
        share = min(1.0, GENEROSITY * expected_seconds / self._left) if self._left else 0.0
        self._left = max(0.0, self._left - expected_seconds)
        return spare * share


class Lap(NamedTuple):
    """One turn of a contender: how long it took, and what parts of the processors' time were used and taken away."""

    seconds: float
    busy: float
    stolen: float

    @property
    def is_disturbed(self) -> bool:
        """Whether it is to be repeated."""
        return self.stolen > MOST_STOLEN


@dataclass
class Laps:
    """Those of one contender, of which ``wanted`` shall be undisturbed."""

    wanted: int
    most_tries: int = MOST_TRIES
    done: list[Lap] = field(default_factory=list)

    def needs_more(self) -> bool:
        """Whether too few were undisturbed, and there may be more."""
        return len(self.done) < self.most_tries * self.wanted and self.wanted > sum(
            not lap.is_disturbed for lap in self.done
        )

    def kept(self) -> list[Lap]:
        """The undisturbed ones in the order in which they ran, and where those are too few the least disturbed."""
        return sorted(self.done, key=lambda lap: max(lap.stolen, MOST_STOLEN))[: self.wanted]


def merge_laps(laps_of_ranks: list[Laps]) -> Laps:
    """The laps of all ranks as one: each took as long as its last rank."""
    first = laps_of_ranks[0]
    together = zip(*(laps.done for laps in laps_of_ranks), strict=True)
    return Laps(first.wanted, first.most_tries, [Lap(*map(max, zip(*ranks, strict=True))) for ranks in together])
