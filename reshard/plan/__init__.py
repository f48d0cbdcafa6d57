"""A plan as a value: its transfers, messages and their order; its checker; its text and JSON formats.

Imports the root, :mod:`reshard.sharding` and :mod:`reshard.topology.model`. It neither solves nor simulates.
"""

from reshard.plan.check import check_plan, check_ranks, ensure_checked
from reshard.plan.json import plan_to_json
from reshard.plan.messages import (
    Message,
    MessageTable,
    cut_chunks,
    expand_messages,
    message_nbytes,
    name_box,
    tabulate_messages,
)
from reshard.plan.model import (
    DEFAULT_STAGING_BYTES,
    RECVS_AHEAD,
    Plan,
    is_sound,
    mark_sound,
    num_recv_slots,
    ranks_of,
    recvs_ahead,
)
from reshard.plan.ordering import find_turns, find_waits
from reshard.plan.rotation_plan import ROTATION, RotationPlan
from reshard.plan.text_writer import format_plan
from reshard.plan.transfers import Transfers

__all__ = [
    "DEFAULT_STAGING_BYTES",
    "RECVS_AHEAD",
    "ROTATION",
    "Message",
    "MessageTable",
    "Plan",
    "RotationPlan",
    "Transfers",
    "check_plan",
    "check_ranks",
    "cut_chunks",
    "ensure_checked",
    "expand_messages",
    "find_turns",
    "find_waits",
    "format_plan",
    "is_sound",
    "mark_sound",
    "message_nbytes",
    "name_box",
    "num_recv_slots",
    "plan_to_json",
    "ranks_of",
    "recvs_ahead",
    "tabulate_messages",
]
