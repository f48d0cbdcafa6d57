"""Pipeline schedules that know what resharding costs; installed as ``reshard.scheduler``.

Nothing in ``reshard`` imports this package: schedules stand above the transfers that they interleave.
"""

from .builders import eager_1f1b, from_warmups, gpipe, interleaved_1f1b, one_f_one_b, zero_bubble
from .check import check_schedule
from .fitted import fitted
from .notation import format_schedule, from_torch_csv, parse_schedule, to_torch_csv
from .pipeline import Edge, Pipeline, Stage
from .schedule import Action, Channel, Kind, Schedule
from .simulation import PipelineTimeline, simulate

__all__ = [
    "Action",
    "Channel",
    "Edge",
    "Kind",
    "Pipeline",
    "PipelineTimeline",
    "Schedule",
    "Stage",
    "check_schedule",
    "eager_1f1b",
    "fitted",
    "format_schedule",
    "from_torch_csv",
    "from_warmups",
    "gpipe",
    "interleaved_1f1b",
    "one_f_one_b",
    "parse_schedule",
    "simulate",
    "to_torch_csv",
    "zero_bubble",
]
