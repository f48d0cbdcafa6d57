from .ir.schedule import Schedule as Schedule
from .ir.text import from_torch_csv as from_torch_csv, parse_schedule as parse_schedule, to_torch_csv as to_torch_csv
from .model_stages.partition.blocks import Block as Block
from .model_stages.pipe import Pipe as Pipe
from .model_stages.placement import Placement as Placement, ddp as ddp, fsdp as fsdp
from .model_stages.profile import StageProfile as StageProfile
from .model_stages.training_engine import PipelineEngine as PipelineEngine
from .passes.transfer_overlap import overlap_transfers as overlap_transfers
from .pipeline import Edge as Edge, Pipeline as Pipeline, Stage as Stage
from .runtime.stage import StageOutput as StageOutput
from .schedules.classic import (
    eager_1f1b as eager_1f1b,
    gpipe as gpipe,
    one_f_one_b as one_f_one_b,
    zb_h1 as zb_h1,
    zb_h2 as zb_h2,
)
from .schedules.looped import (
    interleaved_1f1b as interleaved_1f1b,
    interleaved_zero_bubble as interleaved_zero_bubble,
    looped_bfs as looped_bfs,
)
from .schedules.schedule_search import auto_schedule as auto_schedule
from .schedules.v_shaped import dualpipe_v as dualpipe_v, zb_v as zb_v
from .simulation.dependencies import critical_path as critical_path
from .simulation.replay import simulate_schedule as simulate_schedule
from .simulation.schedule_lower_bound import LowerBound as LowerBound, find_lower_bound as find_lower_bound
from .simulation.schedule_page import to_html as to_html
from .simulation.validate import check_schedule as check_schedule
from .simulation.visualize import to_chrome_trace as to_chrome_trace, to_svg as to_svg
from .transfer_costs import plan_edge as plan_edge
