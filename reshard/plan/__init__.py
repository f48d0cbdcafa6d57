"""Plans: which rank sends which region to whom, and in what order.

Other packages import the names below from here. ``value`` has the plan as a frozen value, and what follows from it: its
text, messages, their order, and loads of ports. ``check``, ``drawing`` and ``formats`` (text and JSON) are above it.

Imports the root, :mod:`reshard.sharding` and :mod:`reshard.topology.topology`. It neither solves nor simulates.
"""

from reshard.plan.check.plan_checker import check_plan, check_ranks, ensure_checked
from reshard.plan.drawing.drawn_hosts import MAX_BOXES, HostBox, HostBoxes, Traffic
from reshard.plan.drawing.plan_drawing import draw_boxes, draw_plan, draw_roles, name_tensors
from reshard.plan.formats.plan_json import layout_from_json, plan_from_json, plan_to_json
from reshard.plan.formats.text_parser import parse_layout, parse_plan
from reshard.plan.value.host_rates import HostRates, used_nics
from reshard.plan.value.messages import (
    Message,
    MessageTable,
    box_nbytes,
    cut_chunks,
    expand_messages,
    message_nbytes,
    name_box,
    tabulate_messages,
)
from reshard.plan.value.ordering import find_sender_changes, find_waits
from reshard.plan.value.plan import (
    DEFAULT_STAGING_BYTES,
    MAX_RECVS_AHEAD,
    Plan,
    is_sound,
    mark_sound,
    num_recv_slots,
    ranks_of,
    recvs_ahead,
)
from reshard.plan.value.port_loads import Load, describe_load, find_loads
from reshard.plan.value.rotation_loads import RotationLoads
from reshard.plan.value.rotation_plan import ROTATION, RotationPlan
from reshard.plan.value.transfers import GATHERED, PlanTransfers

__all__ = [
    "DEFAULT_STAGING_BYTES",
    "GATHERED",
    "MAX_BOXES",
    "MAX_RECVS_AHEAD",
    "ROTATION",
    "HostBox",
    "HostBoxes",
    "HostRates",
    "Load",
    "Message",
    "MessageTable",
    "Plan",
    "PlanTransfers",
    "RotationLoads",
    "RotationPlan",
    "Traffic",
    "box_nbytes",
    "check_plan",
    "check_ranks",
    "cut_chunks",
    "describe_load",
    "draw_boxes",
    "draw_plan",
    "draw_roles",
    "ensure_checked",
    "expand_messages",
    "find_loads",
    "find_sender_changes",
    "find_waits",
    "is_sound",
    "layout_from_json",
    "mark_sound",
    "message_nbytes",
    "name_box",
    "name_tensors",
    "num_recv_slots",
    "parse_layout",
    "parse_plan",
    "plan_from_json",
    "plan_to_json",
    "ranks_of",
    "recvs_ahead",
    "tabulate_messages",
    "used_nics",
]
