"""Detect measurements disturbed by other users of a shared machine.

The methods of a row take turns. A lap is one turn of one method. The kernel of a virtual machine counts steal time: how
long a CPU was ready to run while the hypervisor ran something else. Only steal time decides whether a turn is repeated.
The measured time never does, so repeating does not bias the results.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

#: A turn is disturbed if steal time, less one kernel tick, exceeds this fraction of its CPU time.
MAX_STEAL_SHARE = 0.01
#: A method runs at most this many times its wanted number of turns.
MAX_TRIES = 3
#: Duration of a run divided by the duration of its turns. A run also measures links and starts processes.
OVERHEAD_FACTOR = 1.06
#: A row may use this multiple of its proportional share of the spare time.
SHARE_FACTOR = 4.0
#: Duration of one check for steal time, and of the pause after a check that finds some.
PROBE_SECONDS = 0.1
PAUSE_SECONDS = 1.0


def _cpu_seconds(column: int) -> float:
    """Seconds in a column of the ``cpu`` line of ``/proc/stat``; 0 if the file or the column is missing."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(fields[column]) / os.sysconf("SC_CLK_TCK") if len(fields) > column else 0.0


def idle_seconds() -> float:
    """Idle time of all CPUs together since boot, including time that they waited for I/O."""
    return _cpu_seconds(4) + _cpu_seconds(5)


def steal_seconds() -> float:
    """Steal time of all CPUs together since boot."""
    return _cpu_seconds(8)


def steal_share(stolen: float, seconds: float) -> float:
    """Steal time as a fraction of the CPU time in ``seconds``. Ignores one tick, the resolution of the counter."""
    available = seconds * (os.cpu_count() or 1)
    return max(0.0, stolen - 1 / os.sysconf("SC_CLK_TCK")) / available


class RetryBudget:
    """Time budget for repeating disturbed turns and for waiting until steal time ends."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def spend(self, seconds: float) -> None:
        """Charge the duration of a repeated turn."""
        self._left -= seconds

    @property
    def is_spent(self) -> bool:
        """Whether the budget is used up."""
        return self._left <= 0

    def wait_until_quiet(self) -> None:
        """Wait until a busy CPU shows no steal time, or until the budget is used up. Charges the pauses."""
        while self._left > 0:
            begun, stolen = time.monotonic(), steal_seconds()
            while time.monotonic() < begun + PROBE_SECONDS:
                pass
            if steal_seconds() <= stolen:
                return
            time.sleep(PAUSE_SECONDS)
            self._left -= time.monotonic() - begun


class TimeBudget:
    """Divides the spare time of a run among its rows, which run one after the other.

    Args:
        limit_seconds: time limit of the run.
        expected_seconds: duration of all turns if none is repeated.
    """

    def __init__(self, limit_seconds: float, expected_seconds: float) -> None:
        self.expected_seconds = self._left = expected_seconds
        self._limit, self._begun = limit_seconds, time.monotonic()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._begun

    def spare_seconds(self, expected_seconds: float) -> float:
        """Spare time of the next row, for pauses and repeated turns.

        A row gets several times its proportional share, because most rows need no spare time.

        Args:
            expected_seconds: duration of the row's turns if none is repeated.
        """
        spare = max(0.0, self._limit - self.elapsed_seconds - OVERHEAD_FACTOR * self._left)
        share = min(1.0, SHARE_FACTOR * expected_seconds / self._left) if self._left else 0.0
        self._left = max(0.0, self._left - expected_seconds)
        return spare * share


class Lap(NamedTuple):
    """One turn of a method: its duration, and the fractions of CPU time that were busy and stolen."""

    seconds: float
    busy: float
    steal_share: float

    @property
    def is_disturbed(self) -> bool:
        """Whether steal time exceeded :data:`MAX_STEAL_SHARE`."""
        return self.steal_share > MAX_STEAL_SHARE


@dataclass
class Laps:
    """The laps of one method, which needs ``wanted`` undisturbed ones."""

    wanted: int
    max_tries: int = MAX_TRIES
    done: list[Lap] = field(default_factory=list)

    def needs_more(self) -> bool:
        """Whether there are too few undisturbed laps and another lap is allowed."""
        return len(self.done) < self.max_tries * self.wanted and self.wanted > sum(
            not lap.is_disturbed for lap in self.done
        )

    def kept(self) -> list[Lap]:
        """The first ``wanted`` undisturbed laps; if there are too few, also the least disturbed ones."""
        return sorted(self.done, key=lambda lap: max(lap.steal_share, MAX_STEAL_SHARE))[: self.wanted]


def merge_laps(laps_of_ranks: list[Laps]) -> Laps:
    """Merge the laps of all ranks: each value of a lap becomes its maximum over the ranks."""
    first = laps_of_ranks[0]
    lap_of_ranks = zip(*(laps.done for laps in laps_of_ranks), strict=True)
    return Laps(first.wanted, first.max_tries, [Lap(*map(max, zip(*laps, strict=True))) for laps in lap_of_ranks])
