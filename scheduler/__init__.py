"""Pipeline schedules that account for the cost of resharding. Installed as ``reshard.scheduler``.

Nothing in ``reshard`` imports this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .costs import edge_plans, plan_edge
from .graph import Edge, Pipeline, Stage
from .ir.schedule import Action, Channel, Kind, Schedule
from .ir.text import format_schedule, from_torch_csv, parse_schedule, to_torch_csv
from .passes.overlap import Report, apply_passes, block_transfers, defer_recvs, overlap_transfers
from .schedules.auto import auto_schedule
from .schedules.classic import eager_1f1b, from_warmups, gpipe, interleaved_1f1b, one_f_one_b, zb_h1
from .simulation.dependencies import CriticalPath, critical_path, schedule_to_networkx
from .simulation.replay import PipelineTimeline, simulate
from .simulation.validate import check_schedule
from .simulation.visualize import to_chrome_trace, to_svg

if TYPE_CHECKING:
    from reshard.runtime.cpu.weight_grad_store import later_tasks

    from .runtime.engine import Engine
    from .runtime.stage import StageOutput
    from .runtime.tied_params import TiedParameter

#: Public names whose modules import torch. These modules are imported on first use.
_WITH_TORCH = {
    "Engine": "reshard.scheduler.runtime.engine",
    "StageOutput": "reshard.scheduler.runtime.stage",
    "TiedParameter": "reshard.scheduler.runtime.tied_params",
    "later_tasks": "reshard.runtime.cpu.weight_grad_store",
}

__all__ = [
    "Action",
    "Channel",
    "CriticalPath",
    "Edge",
    "Engine",
    "Kind",
    "Pipeline",
    "PipelineTimeline",
    "Report",
    "Schedule",
    "Stage",
    "StageOutput",
    "TiedParameter",
    "apply_passes",
    "auto_schedule",
    "block_transfers",
    "check_schedule",
    "critical_path",
    "defer_recvs",
    "eager_1f1b",
    "edge_plans",
    "format_schedule",
    "from_torch_csv",
    "from_warmups",
    "gpipe",
    "interleaved_1f1b",
    "later_tasks",
    "one_f_one_b",
    "overlap_transfers",
    "parse_schedule",
    "plan_edge",
    "schedule_to_networkx",
    "simulate",
    "to_chrome_trace",
    "to_svg",
    "to_torch_csv",
    "zb_h1",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'reshard.scheduler' has no attribute {name!r}")
    return getattr(importlib.import_module(_WITH_TORCH[name]), name)
