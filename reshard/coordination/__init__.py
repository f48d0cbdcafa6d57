"""Coordination of ranks: joining, agreement on each call, and failure detection.

Imports :mod:`reshard.runtime` and the packages below it.
"""

from reshard.coordination.call_group import MAX_CACHED, NCCL_ROOT_CAUSE_GRACE_SECONDS, CallGroup, find_call_group
from reshard.coordination.decide import gather_reports, plan_arguments, resolve, resolve_partial
from reshard.coordination.groups.addresses import family_of, is_loopback, own_address
from reshard.coordination.groups.agreement_messages import (
    Decision,
    RoundRequest,
    TensorRequest,
    describe_error,
    rebuild_error,
)
from reshard.coordination.groups.calling_threads import Owner
from reshard.coordination.groups.joining import join
from reshard.coordination.groups.process_group import Group, check_inside, find_group, known_groups, serve_store
from reshard.coordination.json_collectives import all_gather_json
from reshard.coordination.liveness.call_sequence import (
    calling,
    leave_call,
    leave_interrupted,
    publish_interruption,
    report_error,
)
from reshard.coordination.liveness.failure_detector import explain_lost_store
from reshard.coordination.liveness.heartbeat import Monitor, publishing_lost_ranks
from reshard.coordination.liveness.interruptions import (
    is_published,
    keep_exceptions_local,
    mark_published,
    publish_exceptions,
)
from reshard.coordination.liveness.membership import count_call, remaining_ranks
from reshard.coordination.liveness.presence import copy_presence, has_ended
from reshard.coordination.liveness.status import report_dead
from reshard.coordination.topology_discovery import topology_of_names, warn_of_hosts

__all__ = [
    "MAX_CACHED",
    "NCCL_ROOT_CAUSE_GRACE_SECONDS",
    "CallGroup",
    "Decision",
    "Group",
    "Monitor",
    "Owner",
    "RoundRequest",
    "TensorRequest",
    "all_gather_json",
    "calling",
    "check_inside",
    "copy_presence",
    "count_call",
    "describe_error",
    "explain_lost_store",
    "family_of",
    "find_call_group",
    "find_group",
    "gather_reports",
    "has_ended",
    "is_loopback",
    "is_published",
    "join",
    "keep_exceptions_local",
    "known_groups",
    "leave_call",
    "leave_interrupted",
    "mark_published",
    "own_address",
    "plan_arguments",
    "publish_exceptions",
    "publish_interruption",
    "publishing_lost_ranks",
    "rebuild_error",
    "remaining_ranks",
    "report_dead",
    "report_error",
    "resolve",
    "resolve_partial",
    "serve_store",
    "topology_of_names",
    "warn_of_hosts",
]
