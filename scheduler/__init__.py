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
    from reshard.runtime.weight_grad_store import later_tasks

    from .pipe.engine import PipelineEngine
    from .pipe.partition.blocks import Block
    from .pipe.pipe import Pipe
    from .pipe.placement import Placement, ddp, fsdp
    from .pipe.profile import Profile, StageTimes
    from .pipe.totals import StepResult
    from .runtime.engine import Engine
    from .runtime.stage import StageOutput
    from .runtime.tied_params import TiedParameter

#: Public names whose modules import torch. These modules are imported on first use.
_WITH_TORCH = {
    "Block": "reshard.scheduler.pipe.partition.blocks",
    "Engine": "reshard.scheduler.runtime.engine",
    "Pipe": "reshard.scheduler.pipe.pipe",
    "PipelineEngine": "reshard.scheduler.pipe.engine",
    "Placement": "reshard.scheduler.pipe.placement",
    "Profile": "reshard.scheduler.pipe.profile",
    "StageOutput": "reshard.scheduler.runtime.stage",
    "StageTimes": "reshard.scheduler.pipe.profile",
    "StepResult": "reshard.scheduler.pipe.totals",
    "TiedParameter": "reshard.scheduler.runtime.tied_params",
    "ddp": "reshard.scheduler.pipe.placement",
    "fsdp": "reshard.scheduler.pipe.placement",
    "later_tasks": "reshard.runtime.weight_grad_store",
}

__all__ = [
    "Action",
    "Block",
    "Channel",
    "CriticalPath",
    "Edge",
    "Engine",
    "Kind",
    "Pipe",
    "Pipeline",
    "PipelineEngine",
    "PipelineTimeline",
    "Placement",
    "Profile",
    "Report",
    "Schedule",
    "Stage",
    "StageOutput",
    "StageTimes",
    "StepResult",
    "TiedParameter",
    "apply_passes",
    "auto_schedule",
    "block_transfers",
    "check_schedule",
    "critical_path",
    "ddp",
    "defer_recvs",
    "eager_1f1b",
    "edge_plans",
    "format_schedule",
    "from_torch_csv",
    "from_warmups",
    "fsdp",
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
