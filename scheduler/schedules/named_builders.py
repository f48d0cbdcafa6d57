"""Schedule builders by the names that ``reshard train --schedule`` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..ir.schedule import Schedule
from ..pipeline import Pipeline
from .known_schedules import KNOWN_SCHEDULES
from .schedule_search import auto_schedule

#: Functions from a pipeline with one stage on each pp rank and a number of microbatches to a schedule.
NAMED_BUILDERS: Mapping[str, Callable[[Pipeline, int], Schedule]] = {
    "auto": auto_schedule,
    **{known.name: known.build for known in KNOWN_SCHEDULES if known.build is not None},
}
