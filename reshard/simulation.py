"""When each message of a plan starts and ends on a network of shared ports."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.errors import PlanError, TopologyError
from reshard.fluid import Network, flow
from reshard.messages import MessageTable, tabulate_messages
from reshard.order import find_turns
from reshard.plan import Plan, recvs_ahead
from reshard.shards import ranges
from reshard.topology import Topology

#: Messages times ranks up to which a plan is simulated without being asked for: a few seconds.
MAX_SIMULATED = 2 * 10**7
#: The rate of a link that the topology does not limit.
_UNLIMITED = 1e18


@dataclass(frozen=True, eq=False)
class Timeline:
    """When messages flow. ``start`` and ``finish`` are in seconds, one entry per row of ``messages``.

    A copy within a rank takes no time.
    """

    messages: MessageTable
    start: np.ndarray
    finish: np.ndarray

    def __repr__(self) -> str:
        return f"<Timeline of {len(self.messages)} messages, {self.makespan_seconds:.6g} s>"

    @cached_property
    def makespan_seconds(self) -> float:
        """When the last message has arrived."""
        return float(self.finish.max(initial=0.0))


def simulate(plan: Plan, topology: Topology | None = None) -> Timeline:
    """The time each message of a plan starts and ends, on this model.

    * Order: each rank starts its messages across hosts, and those inside its host, in the plan's order; a message
      starts when what it comes ``after`` has arrived, fewer than ``window`` of its kind are unfinished at its sender,
      and it is close enough behind the first message that its receiver has not got yet (see
      :func:`~reshard.plan.recvs_ahead`).
    * Links: messages of the same two ranks flow one after the other; others share NICs, uplinks of pods and links
      inside hosts by proportional fairness (:mod:`reshard.sharing`).
    * Buffers: a message stops counting for its sender's window once all but ``send_buffer_bytes`` of it has left.
    * Bursts: NICs and uplinks are token buckets of ``burst_bytes``, full at the start: what they could have passed
      while idle they pass at once later.
    * Latency: a message first holds its sender's port for the latency, then its bytes flow. One that enters its host
      only when another rank's message has ended holds it ``turn_seconds`` longer, while the sender learns of that.
    * Start: nothing flows before ``start_seconds``.

    Args:
        plan: what to time. topology: rates and latencies, and who is where; omitted, those of the plan.

    Returns:
        A timeline; its makespan is what the plan takes on this topology.

    Raises:
        TopologyError: the topology does not cover the plan's ranks, or is none. PlanError: it is no plan.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"simulate needs a Plan, not {type(plan).__name__}")
    if topology is not None and not isinstance(topology, Topology):
        raise TopologyError(f"simulate needs a Topology, not {type(topology).__name__}")
    topology = plan.topology if topology is None else topology
    topology.check_covers(plan.ranks)
    messages = tabulate_messages(plan)
    moves = np.flatnonzero(messages.sender != messages.receiver)
    start, finish = np.zeros(len(messages)), np.zeros(len(messages))
    if len(moves):
        try:
            start[moves], finish[moves] = flow(network_of(plan, messages, moves, topology))
        except ValueError as error:
            raise PlanError(f"the plan never ends: {error}") from None
        start[moves] += topology.start_seconds
        finish[moves] += topology.start_seconds
    return Timeline(messages, start, finish)


def network_of(plan: Plan, messages: MessageTable, moves: np.ndarray, topology: Topology) -> Network:
    """The rows ``moves`` of a plan's messages, none of them a copy, as messages on the ports of a topology."""
    sender, receiver = messages.sender[moves], messages.receiver[moves]
    host = topology.host_by_rank
    inside = (host[sender] == host[receiver]).astype(np.int64)
    _, queue = np.unique(sender * 2 + inside, return_inverse=True)
    pairs, stream = np.unique(np.stack([sender, receiver], axis=1), axis=0, return_inverse=True)
    _, to = np.unique(receiver, return_inverse=True)
    row_of = np.full(len(messages), -1, dtype=np.int64)
    row_of[moves] = np.arange(len(moves))
    num_after = np.diff(messages.after_at)[moves]
    after = row_of[messages.after[ranges(messages.after_at[moves], num_after)]]
    later = np.repeat(np.arange(len(moves)), num_after)[after >= 0]  # what comes after a copy need not wait
    ports = _Ports(topology)
    paths = [ports.path(a, b) for a, b in pairs.tolist()]
    hold = np.where(inside, topology.inside_latency_seconds, topology.latency_seconds)
    if topology.turn_seconds:
        takes_turn = find_turns(plan)[messages.transfer[moves]] & (messages.chunk[moves] == 0)
        hold = hold + np.where(takes_turn, topology.turn_seconds, 0.0)
    rate = np.array(ports.rates, dtype=np.float64)
    hold_port = np.array([path[0] for path in paths], dtype=np.int64)
    return Network(
        queue=queue.ravel().astype(np.int64),
        stream=stream.ravel().astype(np.int64),
        receiver=to.ravel().astype(np.int64),
        window=np.ascontiguousarray(messages.window[moves]),
        nbytes=messages.nbytes[moves].astype(np.float64),
        after_at=np.concatenate([[0], np.cumsum(np.bincount(later, minlength=len(moves)))]).astype(np.int64),
        after=after[after >= 0],
        ahead=_ahead(messages.window[moves]),
        port_at=np.cumsum([0] + [len(path) for path in paths]).astype(np.int64),
        port=np.array([port for path in paths for port in path], dtype=np.int64),
        hold_port=hold_port,
        hold_work=hold * rate[hold_port[stream.ravel()]],
        buffer=np.full(len(paths), float(topology.send_buffer_bytes)),
        rate=rate,
        burst=np.where(ports.are_inside, 0.0, float(topology.burst_bytes)),
    )


def _ahead(window: np.ndarray) -> np.ndarray:
    found, inverse = np.unique(window, return_inverse=True)
    return np.array([recvs_ahead(int(w)) for w in found], dtype=np.int64)[inverse.ravel()]


class _Ports:
    """Numbers for the ports that streams pass: both directions of NICs, uplinks, and of ranks inside their host."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._number: dict[tuple[str, int, int], int] = {}
        self.rates: list[float] = []
        self.are_inside: list[bool] = []  # hosts

    def share_host(self, a: int, b: int) -> bool:
        return self._topology.host_of_rank[a] == self._topology.host_of_rank[b]

    def path(self, sender: int, receiver: int) -> list[int]:
        """The ports from one rank to another, the sender's own first."""
        topology = self._topology
        if self.share_host(sender, receiver):
            rate = topology.inside_bytes_per_second or _UNLIMITED
            return [self._find("out", sender, 0, rate), self._find("in", receiver, 0, rate)]
        (from_host, from_nic), (to_host, to_nic) = (
            (topology.host_of_rank[rank], topology.nic_of_rank[rank]) for rank in (sender, receiver)
        )
        path = [self._find("egress", from_host, from_nic, topology.nic(sender).egress_bytes_per_second)]
        from_pod, to_pod = topology.host(from_host).pod, topology.host(to_host).pod
        if from_pod is not None and to_pod is not None and from_pod != to_pod:
            up, down = topology.pods[from_pod], topology.pods[to_pod]
            path.append(self._find("up", from_pod, 0, up.egress_bytes_per_second))
            path.append(self._find("down", to_pod, 0, down.ingress_bytes_per_second))
        path.append(self._find("ingress", to_host, to_nic, topology.nic(receiver).ingress_bytes_per_second))
        return path

    def _find(self, kind: str, place: int, nic: int, rate: float) -> int:
        number = self._number.setdefault((kind, place, nic), len(self.rates))
        if number == len(self.rates):
            self.rates.append(rate)
            self.are_inside.append(kind in ("out", "in"))
        return number
