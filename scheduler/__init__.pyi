from reshard.gradients.weight_grad_store import later_tasks as later_tasks

from .costs import edge_plans as edge_plans, plan_edge as plan_edge
from .graph import Edge as Edge, Pipeline as Pipeline, Stage as Stage
from .ir.actions import Action as Action, Kind as Kind, StageChannel as StageChannel
from .ir.schedule import Schedule as Schedule
from .ir.text import (
    format_schedule as format_schedule,
    from_torch_csv as from_torch_csv,
    parse_schedule as parse_schedule,
    to_torch_csv as to_torch_csv,
)
from .passes.overlap import (
    Report as Report,
    apply_passes as apply_passes,
    block_transfers as block_transfers,
    defer_recvs as defer_recvs,
    overlap_transfers as overlap_transfers,
)
from .pipe.engine import PipelineEngine as PipelineEngine
from .pipe.partition.blocks import Block as Block
from .pipe.pipe import Pipe as Pipe
from .pipe.placement import Placement as Placement, ddp as ddp, fsdp as fsdp
from .pipe.profile import StageProfile as StageProfile, StageTimes as StageTimes
from .pipe.totals import StepResult as StepResult
from .runtime.engine import Engine as Engine
from .runtime.stage import StageOutput as StageOutput
from .runtime.tied_params import TiedParameter as TiedParameter
from .schedules.auto import auto_schedule as auto_schedule
from .schedules.classic import (
    eager_1f1b as eager_1f1b,
    from_warmups as from_warmups,
    gpipe as gpipe,
    interleaved_1f1b as interleaved_1f1b,
    one_f_one_b as one_f_one_b,
    zb_h1 as zb_h1,
)
from .simulation.dependencies import (
    CriticalPath as CriticalPath,
    critical_path as critical_path,
)
from .simulation.replay import PipelineTimeline as PipelineTimeline, simulate_schedule as simulate_schedule
from .simulation.validate import check_schedule as check_schedule
from .simulation.visualize import to_chrome_trace as to_chrome_trace, to_svg as to_svg
