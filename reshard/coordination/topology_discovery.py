"""Topologies from the host names of a group's ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from reshard.coordination.communicator import find_channel
from reshard.coordination.decide import resolve
from reshard.coordination.messages import Request, describe_error
from reshard.coordination.process_group import find_group
from reshard.errors import ArgumentError
from reshard.plan import Plan
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout
from reshard.topology import Topology


def topology_of_names(hostnames: Mapping[int, str], num_ranks: int) -> Topology:
    """Ranks with the same host name share a host. Ranks without a name are on the host of the lowest named rank."""
    first = hostnames[min(hostnames)]
    return Topology.from_hostnames([hostnames.get(rank, first) for rank in range(num_ranks)])


def find_topology(group: Any = None, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Topology:
    """The topology that :func:`reshard.reshard` uses by default; pass it to :func:`reshard.make_plan`.

    Every rank of the group must call it. Ranks with the same host name share a host, and all links are equal.

    Args:
        group: a process group or the result of :func:`reshard.join`; None for the default group.
        timeout_seconds: how long to wait for the other ranks.

    Raises:
        ArgumentError, TransferTimeoutError, RemoteError: the call failed; every rank raises the same error.
    """
    found = find_group(group)
    members = tuple(range(found.size))
    failure = None
    try:
        seconds = check_timeout(timeout_seconds)
    except ArgumentError as error:
        failure, seconds = describe_error(error), DEFAULT_TIMEOUT_SECONDS
    request = Request(found.rank, [("what to do", "find_topology")], hostname=found.hostname, error=failure)
    with found.calling():
        channel = find_channel(found, members)
        _, decision = channel.agree(request, lambda requests: resolve(requests, {}), seconds)
    return topology_of_names(decision.hostnames, found.size)


def warn_of_hosts(plan: Plan, hostnames: Mapping[int, str]) -> None:
    """Warn if a plan was made without a topology and its ranks are on several hosts."""
    hosts = len(set(hostnames.values()))
    if hosts > 1 and plan.topology == Topology((0,) * len(plan.topology.host_of_rank)):
        warnings.warn(
            f"this plan assumes that all ranks are on one host, but they are on {hosts} hosts, so the same data may "
            "cross between hosts more than once; pass topology=reshard.find_topology() to make_plan",
            stacklevel=4,
        )
