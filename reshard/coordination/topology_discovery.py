"""Topologies from the host names of a group's ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from reshard.codecs import measure_rates, parse_codec
from reshard.coordination.call_group import find_call_group
from reshard.coordination.decide import resolve
from reshard.coordination.groups.agreement_messages import Decision, RoundRequest, describe_error
from reshard.coordination.groups.process_group import find_group
from reshard.coordination.liveness.call_sequence import calling, publish_interruption
from reshard.errors import ArgumentError
from reshard.formatting import brief
from reshard.plan import Plan
from reshard.public_api import caller_level
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout
from reshard.topology import CodecRate, Topology


def topology_of_names(hostnames: Mapping[int, str], num_ranks: int) -> Topology:
    """The topology of ranks with these host names. A rank without a name is on the host of the lowest named rank."""
    first = hostnames[min(hostnames)]
    return Topology.from_hostnames([hostnames.get(rank, first) for rank in range(num_ranks)])


def find_topology(
    group: Any = None, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, codecs: Sequence[str] = ()
) -> Topology:
    """The topology that :func:`reshard.reshard` uses by default; pass it to :func:`reshard.make_plan`.

    Every rank of the group must call it. Ranks with the same host name share a host, and all links are equal.

    Args:
        group: a process group or the result of :func:`reshard.join`; None for the default group.
        timeout_seconds: how long to wait for the other ranks.
        codecs: names of codecs to time, on all ranks at once and about 0.1 s each. The topology gets the lowest
            rates of any rank, which ``compression="auto"`` uses.

    Raises:
        ArgumentError: the timeout or a codec is not valid. DisagreementError: ranks pass different codecs.
        TransferTimeoutError, RemoteError: a rank did not call in time, or failed. All ranks raise the same error.
    """
    resolved = find_group(group)
    members = tuple(range(resolved.size))
    failure, parsed = None, []
    try:
        seconds = check_timeout(timeout_seconds)
        if isinstance(codecs, str) or not isinstance(codecs, Sequence):
            raise ArgumentError(f"codecs is {brief(codecs)}; it must be a list of names of codecs")
        parsed = [parse_codec(name) for name in codecs]
    except ArgumentError as error:
        failure, seconds = describe_error(error), DEFAULT_TIMEOUT_SECONDS
    arguments = [("what to do", "find_topology"), ("codecs", ", ".join(codec.name for codec in parsed))]
    request = RoundRequest(resolved.rank, arguments, hostname=resolved.hostname, error=failure, payload=[])
    with publish_interruption(resolved, lambda: members), calling(resolved):
        call_group = find_call_group(resolved, members)
        _, decision = call_group.agree(request, _resolve, seconds)
        if parsed:  # after the first agreement, all ranks measure at the same time
            rates = [measure_rates(codec) for codec in parsed]
            _, decision = call_group.agree(replace(request, payload=rates), _resolve, seconds)
    topology = topology_of_names(decision.hostnames, resolved.size)
    slowest = np.array(list(decision.payloads.values())).reshape(resolved.size, -1, 2).min(axis=0).tolist()
    return replace(
        topology, codec_rates=tuple(CodecRate(name, *pair) for name, pair in zip(codecs, slowest, strict=True))
    )


def _resolve(requests: list[RoundRequest]) -> Decision:
    return replace(resolve(requests, {}), payloads={request.rank: request.payload for request in requests})


def warn_of_hosts(plan: Plan, hostnames: Mapping[int, str]) -> None:
    """Warn if a plan was made without a topology and its ranks are on several hosts."""
    hosts = len(set(hostnames.values()))
    if hosts > 1 and plan.topology == Topology((0,) * len(plan.topology.host_of_rank)):
        warnings.warn(
            f"this plan assumes that all ranks are on one host, but they are on {hosts} hosts, so the same data may "
            "cross between hosts more than once; pass topology=reshard.find_topology() to make_plan",
            stacklevel=caller_level(),
        )
