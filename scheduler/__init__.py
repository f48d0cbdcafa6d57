"""Pipeline schedules that know what resharding costs; installed as ``reshard.scheduler``.

Nothing in ``reshard`` imports this package: schedules stand above the transfers that they interleave.
"""

from .builders import eager_1f1b, from_warmups, gpipe, interleaved_1f1b, one_f_one_b, zero_bubble
from .check import check_schedule
from .costs import edge_plans, plan_edge
from .fitted import fitted
from .notation import format_schedule, from_torch_csv, parse_schedule, to_torch_csv
from .passes import Report, apply_passes, block_transfers, issue_at_consumer, overlap_transfers
from .pipeline import Edge, Pipeline, Stage
from .schedule import Action, Channel, Kind, Schedule
from .simulation import PipelineTimeline, simulate
from .trace import to_chrome_trace, to_svg

__all__ = [
    "Action",
    "Channel",
    "Edge",
    "Kind",
    "Pipeline",
    "PipelineTimeline",
    "Report",
    "Schedule",
    "Stage",
    "apply_passes",
    "block_transfers",
    "check_schedule",
    "eager_1f1b",
    "edge_plans",
    "fitted",
    "format_schedule",
    "from_torch_csv",
    "from_warmups",
    "gpipe",
    "interleaved_1f1b",
    "issue_at_consumer",
    "one_f_one_b",
    "overlap_transfers",
    "parse_schedule",
    "plan_edge",
    "simulate",
    "to_chrome_trace",
    "to_svg",
    "to_torch_csv",
    "zero_bubble",
]
