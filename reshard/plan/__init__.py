"""A plan as a value: transfers, messages and their order; loads of ports; checker; drawing; text and JSON.

Imports the root, :mod:`reshard.sharding` and :mod:`reshard.topology.topology`. It neither solves nor simulates.
"""

from reshard.plan.check import check_plan, check_ranks, ensure_checked
from reshard.plan.drawn_hosts import MAX_BOXES, HostBox, HostBoxes, Traffic
from reshard.plan.host_rates import HostRates, used_nics
from reshard.plan.json import plan_to_json
from reshard.plan.messages import (
    Message,
    MessageTable,
    box_nbytes,
    cut_chunks,
    expand_messages,
    message_nbytes,
    name_box,
    tabulate_messages,
)
from reshard.plan.ordering import find_sender_switches, find_waits
from reshard.plan.plan import (
    DEFAULT_STAGING_BYTES,
    MAX_RECVS_AHEAD,
    Plan,
    is_sound,
    mark_sound,
    num_recv_slots,
    ranks_of,
    recvs_ahead,
)
from reshard.plan.plan_drawing import draw_boxes, draw_plan, draw_roles, name_tensors
from reshard.plan.port_loads import Load, describe_load, find_loads
from reshard.plan.rotation_loads import RotationLoads
from reshard.plan.rotation_plan import ROTATION, RotationPlan
from reshard.plan.transfers import GATHERED, Transfers

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
    "RotationLoads",
    "RotationPlan",
    "Traffic",
    "Transfers",
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
    "find_sender_switches",
    "find_waits",
    "is_sound",
    "mark_sound",
    "message_nbytes",
    "name_box",
    "name_tensors",
    "num_recv_slots",
    "plan_to_json",
    "ranks_of",
    "recvs_ahead",
    "tabulate_messages",
    "used_nics",
]
