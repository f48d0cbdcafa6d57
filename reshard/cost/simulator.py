"""Simulates when each message of a plan starts and finishes on a network of shared ports."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.cost.fluid import UNLIMITED, Network, flow_until
from reshard.cost.serial_ports import UNLIMITED_RATE
from reshard.errors import PlanError, TopologyError
from reshard.plan import MessageTable, Plan, find_sender_changes, recvs_ahead, tabulate_messages
from reshard.ragged import number_values, ranges
from reshard.topology import MAX_NICS, Topology

#: :func:`recvs_ahead` is tabulated for all windows if no window is larger than this.
_MAX_TABLED = 64
#: Relative error of the difference of two times.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Timeline:
    """The start and finish of each message in seconds, one entry per row of ``messages``.

    A copy within a rank takes no time.
    """

    messages: MessageTable
    start: np.ndarray
    finish: np.ndarray

    def __repr__(self) -> str:
        return f"<Timeline of {len(self.messages)} messages, {self.makespan_seconds:.6g} s>"

    @cached_property
    def makespan_seconds(self) -> float:
        """The arrival of the last message, in seconds."""
        return float(self.finish.max(initial=0.0))


def simulate(plan: Plan, topology: Topology | None = None) -> Timeline:
    """The start and finish of each message of a plan.

    The model:

    * Queues: a rank has two queues of messages to send, one to other hosts and one inside its host. Each queue is in
      the plan's order.
    * Start of a message: a message starts when three conditions hold. All messages in its ``after`` have arrived. Fewer
      than ``window`` messages of its queue are unfinished. It is one of the next
      :func:`~reshard.plan.value.plan.recvs_ahead` messages of its receiver, counted from the first unfinished one.
    * Links: messages between the same two ranks flow one at a time. All others share four kinds of links by
      proportional fairness: NICs, pod uplinks, the link of each rank inside its host, and the total rate inside a host.
    * Buffers: a message leaves the window of its sender once all but ``send_buffer_bytes`` of it are sent.
    * Bursts: NICs and uplinks are token buckets of ``burst_bytes``, full at the start. An idle link saves capacity, and
      later passes it at once.
    * Latency: a message first occupies its sender's port for the latency. Then its bytes flow.
    * Change of sender: a message of one rank may have to wait at its receiver's host for the end of another rank's
      message. Its sender learns of that end ``sender_change_seconds`` later, and the port is busy until then.
    * Start of the call: nothing flows before ``start_seconds``.

    Args:
        plan: the plan to simulate.
        topology: hosts, rates and latencies; omitted, those of the plan.

    Returns:
        A timeline; its makespan is the time of the plan on this topology.

    Raises:
        TopologyError: ``topology`` is not a Topology, or does not cover the plan's ranks.
        PlanError: ``plan`` is not a Plan, or some of its messages can never start.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"simulate needs a Plan, not {type(plan).__name__}")
    if topology is not None and not isinstance(topology, Topology):
        raise TopologyError(f"simulate needs a Topology, not {type(topology).__name__}")
    topology = plan.topology if topology is None else topology
    topology.check_covers(plan.ranks)
    timeline = _simulate(plan, topology, math.inf)
    assert timeline is not None
    return timeline


def simulate_until(plan: Plan, cutoff: float, most_operations: int = UNLIMITED) -> Timeline | None:
    """The timeline that :func:`simulate` gives, or None if the plan ends after ``cutoff`` seconds.

    The simulation stops as soon as the makespan is sure to be above the cutoff.

    Raises:
        TooMuchWork: the simulation takes more operations, of a few nanoseconds each.
    """
    return _simulate(plan, plan.topology, cutoff, most_operations)


def _simulate(plan: Plan, topology: Topology, cutoff: float, most_operations: int = UNLIMITED) -> Timeline | None:
    """The timeline of a plan on a topology, or None if it ends after the cutoff."""
    messages = tabulate_messages(plan)
    moves = np.flatnonzero(messages.sender != messages.receiver)
    start, finish = np.zeros(len(messages)), np.zeros(len(messages))
    if len(moves):
        last = (cutoff - topology.start_seconds) * (1 + _ROUNDING)
        try:
            times = flow_until(network_of(plan, messages, moves, topology), last, most_operations)
        except ValueError as error:
            raise PlanError(f"the plan never ends: {error}") from None
        if times is None:
            return None
        start[moves], finish[moves] = times
        start[moves] += topology.start_seconds
        finish[moves] += topology.start_seconds
    return Timeline(messages, start, finish)


def network_of(plan: Plan, messages: MessageTable, moves: np.ndarray, topology: Topology) -> Network:
    """The fluid model of the messages ``moves`` of a plan (rows of ``messages``, none a copy) on a topology."""
    sender, receiver = messages.sender[moves], messages.receiver[moves]
    host = topology.host_array
    inside = (host[sender] == host[receiver]).astype(np.int64)
    queue = number_values(sender * 2 + inside)[1]
    pairs, stream = number_values(sender * len(host) + receiver)
    to = number_values(receiver)[1]
    row_of = np.full(len(messages), -1, dtype=np.int64)
    row_of[moves] = np.arange(len(moves))
    num_after = np.diff(messages.after_offsets)[moves]
    after = row_of[messages.after[ranges(messages.after_offsets[moves], num_after)]]
    later = np.repeat(np.arange(len(moves)), num_after)[after >= 0]  # copies take no time
    ports = _Ports.of(topology, pairs // len(host), pairs % len(host))
    overhead_seconds = np.where(inside, topology.inside_latency_seconds, topology.latency_seconds)
    if topology.sender_change_seconds:
        changes_sender = find_sender_changes(plan)[messages.transfer[moves]] & (messages.chunk[moves] == 0)
        overhead_seconds = overhead_seconds + np.where(changes_sender, topology.sender_change_seconds, 0.0)
    overhead_port = ports.port[ports.port_offsets[:-1]]
    return Network(
        queue=queue,
        stream=stream,
        receiver=to,
        window=np.ascontiguousarray(messages.window[moves]),
        nbytes=messages.nbytes[moves].astype(np.float64),
        after_offsets=np.concatenate([[0], np.cumsum(np.bincount(later, minlength=len(moves)))]).astype(np.int64),
        after=after[after >= 0],
        ahead=_find_ahead(messages.window[moves]),
        port_offsets=ports.port_offsets,
        port=ports.port,
        overhead_port=overhead_port,
        overhead_bytes=overhead_seconds * ports.rate[overhead_port[stream]],
        buffer=np.full(len(pairs), float(topology.send_buffer_bytes)),
        rate=ports.rate,
        burst=np.where(ports.are_inside, 0.0, float(topology.burst_bytes)),
    )


def _find_ahead(window: np.ndarray) -> np.ndarray:
    """:func:`recvs_ahead` of each window."""
    max_window = int(window.max(initial=0))
    if max_window > _MAX_TABLED:
        distinct, inverse = np.unique(window, return_inverse=True)
        return np.array([recvs_ahead(int(w)) for w in distinct], dtype=np.int64)[inverse.ravel()]
    return np.array([recvs_ahead(w) for w in range(max_window + 1)], dtype=np.int64)[window]


#: Kinds of ports. ``_HOST_INSIDE`` is the total rate inside a host, which its ranks share.
_RANK_OUT, _RANK_IN, _NIC_OUT, _POD_UP, _POD_DOWN, _NIC_IN, _HOST_INSIDE = _KINDS = range(7)


@dataclass(frozen=True, eq=False)
class _Ports:
    """The ports that streams pass: both directions of NICs, uplinks and ranks inside hosts, and total rates of hosts.

    Stream s passes ``port[port_offsets[s]:port_offsets[s + 1]]``, its sender's port first. Ports are numbered in the
    order in which streams first pass them; ``rate`` and ``are_inside`` have one entry per port.
    """

    port_offsets: np.ndarray
    port: np.ndarray
    rate: np.ndarray
    are_inside: np.ndarray

    @classmethod
    def of(cls, topology: Topology, sender: np.ndarray, receiver: np.ndarray) -> _Ports:
        """The ports of streams from ``sender[s]`` to ``receiver[s]``."""
        host, nic = topology.host_array, topology.nic_array
        a, b = host[sender], host[receiver]
        inside = a == b
        apart = np.zeros(len(a), dtype=bool)
        pod = np.zeros(topology.num_hosts, dtype=np.int64)
        if topology.pods:
            pod = np.array([topology.host(h).pod for h in range(topology.num_hosts)], dtype=np.int64)
            apart = pod[a] != pod[b]

        def key(kind: int, index: np.ndarray, number: np.ndarray | int = 0) -> np.ndarray:
            return (index * MAX_NICS + number) * len(_KINDS) + kind

        keys = np.stack(
            [
                np.where(inside, key(_RANK_OUT, sender), key(_NIC_OUT, a, nic[sender])),
                np.where(inside, key(_HOST_INSIDE, a), key(_POD_UP, pod[a])),
                key(_POD_DOWN, pod[b]),
                np.where(inside, key(_RANK_IN, receiver), key(_NIC_IN, b, nic[receiver])),
            ],
            axis=1,
        )
        passed = np.ones(keys.shape, dtype=bool)
        passed[:, 1:3] = apart[:, None]
        passed[:, 1] |= inside & (topology.inside_total_bytes_per_second is not None)
        distinct, first, which = np.unique(keys[passed], return_index=True, return_inverse=True)
        order = np.argsort(first)
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        rest, kind = np.divmod(distinct[order], len(_KINDS))
        index, nic_number = np.divmod(rest, MAX_NICS)
        return cls(
            port_offsets=np.concatenate([[0], np.cumsum(passed.sum(axis=1))]),
            port=number[which.ravel()],
            rate=_rates_of(topology, kind, index, nic_number),
            are_inside=np.isin(kind, (_RANK_OUT, _RANK_IN, _HOST_INSIDE)),
        )


def _rates_of(topology: Topology, kind: np.ndarray, index: np.ndarray, nic: np.ndarray) -> np.ndarray:
    """``(ports,)`` bytes per second of ports, given their kinds, their hosts or pods, and their NICs."""
    rate = np.full(len(kind), topology.inside_bytes_per_second or UNLIMITED_RATE)
    rate[kind == _HOST_INSIDE] = topology.inside_total_bytes_per_second or UNLIMITED_RATE
    for of_nics, rates in zip((_NIC_OUT, _NIC_IN), topology.nic_rates, strict=True):
        which = kind == of_nics
        rate[which] = rates[index[which] if len(rates) > 1 else 0, nic[which]]
    for direction, of_pods in (("egress", _POD_UP), ("ingress", _POD_DOWN)):
        which = kind == of_pods
        pods = [getattr(pod, f"{direction}_bytes_per_second") for pod in topology.pods]
        rate[which] = np.array(pods, dtype=np.float64)[index[which]]
    return rate
