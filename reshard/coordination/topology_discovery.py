"""Which ranks share a host, as far as names tell."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from reshard.coordination.communicator import find_channel
from reshard.coordination.decide import Request, describe_error, resolve
from reshard.coordination.process_group import find_group
from reshard.errors import ArgumentError
from reshard.plan.model import Plan
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout
from reshard.topology.model import Topology


def topology_of_names(hostnames: Mapping[int, str], num_ranks: int) -> Topology:
    """Ranks with one name share a host; those that nobody named are on that of the first."""
    first = hostnames[min(hostnames)]
    return Topology.from_hostnames([hostnames.get(rank, first) for rank in range(num_ranks)])


def find_topology(group: Any = None, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Topology:
    """The topology that :func:`reshard.reshard` plans with where it is given none, for :func:`reshard.make_plan`.

    Every rank of the group calls it; hosts are told apart by their names, all links are alike.

    Args:
        group: a process group or what :func:`reshard.join` returned; the default group if None.
        timeout_seconds: how long to wait for the other ranks.

    Raises:
        ArgumentError, TransferTimeoutError, RemoteError: on every rank alike.
    """
    ours = find_group(group)
    everybody = tuple(range(ours.size))
    request = Request(ours.rank, arguments=[("what to do", "find_topology")], hostname=ours.hostname)
    try:
        seconds = check_timeout(timeout_seconds)
    except ArgumentError as error:
        request.error, seconds = describe_error(error), DEFAULT_TIMEOUT_SECONDS
    with ours.calling():
        channel = find_channel(ours, everybody)
        _, decision = channel.agree(request, lambda requests: resolve(requests, {}), seconds)
    return topology_of_names(decision.hostnames, ours.size)


def warn_of_hosts(plan: Plan, hostnames: Mapping[int, str]) -> None:
    """Warn where a plan was made without a topology, and its ranks turn out to be on several hosts."""
    hosts = len(set(hostnames.values()))
    if hosts > 1 and plan.topology == Topology((0,) * len(plan.topology.host_of_rank)):
        warnings.warn(
            f"this plan takes all ranks as being on one host, but they are on {hosts}, so that data may cross between "
            "those more than once: make it with topology=reshard.find_topology()",
            stacklevel=4,
        )
