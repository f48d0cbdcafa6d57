"""A plan in closed form: hosts exchange regions in rotation, and each rank expands its own messages."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import ArgumentError, PlanError
from reshard.plan.value.even_exchange import EvenExchange, KeyRange, OwnMessages
from reshard.plan.value.plan import DEFAULT_STAGING_BYTES, Plan, mark_sound, ranks_of
from reshard.plan.value.rotation_loads import RotationLoads
from reshard.plan.value.transfers import PlanTransfers
from reshard.sharding import TensorSpec, check_integer, check_tensors
from reshard.topology import MAX_NICS, Topology, topology_to_json
from reshard.topology.topology import check_topology

#: The strategy of these plans.
ROTATION = "rotation"
#: Limits on the unfinished messages of a sender: between hosts, the same if they receive from several at once, and
#: inside its host.
_WINDOW, _WINDOW_OF_LANES, ROTATION_INSIDE_WINDOW = 2, 4, 8
#: The messages of a larger plan are not listed.
MAX_LISTED = 2**20
#: Keys of messages are below this, and fit int64.
_MAX_KEY = 2**62
#: A port may send this many times the bytes that the busiest port must pass.
_MAX_UNEVEN = 1.005


class HostMessages(NamedTuple):
    """Messages between one host and others. All arrays have one entry per message.

    Attributes:
        key, sender, receiver: see :class:`OwnMessages`.
        line: number of the port of the host, or of its lane; ``is_sent``: whether the host sends them.
    """

    key: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    line: np.ndarray
    is_sent: bool


class RotationPlan(Plan):
    """A plan whose messages follow from its layouts and its topology.

    It holds no list of messages: a rank expands its own sends and receives. Their ids order them, but are not
    consecutive. :attr:`transfers` lists the messages of a small plan, for checks and simulations.
    """

    exchanges: tuple[EvenExchange, ...]

    def __init__(
        self, tensors: Sequence[TensorSpec], topology: Topology, staging_bytes: int = DEFAULT_STAGING_BYTES
    ) -> None:
        """The plan of tensors.

        Raises:
            ArgumentError, TopologyError, PlanError: some argument is invalid, the topology lacks a rank, or there is no
                closed form.
        """
        check_tensors(tensors)
        check_topology(topology)
        staging_bytes = check_integer(staging_bytes, "staging_bytes", 0, 2**62)
        topology.check_covers(ranks_of(tensors))
        exchanges = _find_exchanges(tensors, topology)
        fields = {"tensors": tuple(tensors), "topology": topology, "strategy": ROTATION, "staging_bytes": staging_bytes}
        for name, value in {**fields, "exchanges": exchanges or ()}.items():
            object.__setattr__(self, name, value)
        if exchanges is None or self._key_ranges is None:
            raise PlanError(
                "these tensors have no plan in closed form on this topology: some grid, host or NIC is unlike others, "
                "or a host both holds and needs data"
            )

    @classmethod
    def find(
        cls, tensors: Sequence[TensorSpec], topology: Topology, staging_bytes: int, largest: int
    ) -> RotationPlan | None:
        """The plan of tensors; None if some tensor is no even exchange, or direct sends would keep a port too busy.

        Args:
            tensors, topology, staging_bytes: see :class:`Plan`.
            largest: limit on the bytes of a message.
        """
        try:
            plan = cls(tensors, topology, staging_bytes)
        except PlanError:
            return None
        pairs = zip(plan.tensors, plan.exchanges, strict=True)
        return plan if all(_nbytes(spec) // exchange.num_regions <= largest for spec, exchange in pairs) else None

    @property
    def is_listed(self) -> bool:
        """False: each rank expands its own messages."""
        return False

    @cached_property
    def has_lanes(self) -> bool:
        """Whether hosts receive from several others at once, because there are more of those."""
        return any((exchange.order.lane > 0).any() for exchange in self.exchanges)

    @cached_property
    def window(self) -> int:
        """The limit on the unfinished messages of a sender to other hosts."""
        return _WINDOW_OF_LANES if self.has_lanes else _WINDOW

    @cached_property
    def _key_ranges(self) -> list[KeyRange] | None:
        """The keys of each tensor. Tensors with equal orders of ports take turns; other orders come after theirs.

        None if the keys do not fit int64.
        """
        chain = max(exchange.groups.shape[2] for exchange in self.exchanges)
        kinds: list[list[int]] = []
        for number, exchange in enumerate(self.exchanges):
            alike = [kind for kind in kinds if exchange.order.equals(self.exchanges[kind[0]].order)]
            if alike:
                alike[0].append(number)
            else:
                kinds.append([number])
        ranges: dict[int, KeyRange] = {}
        first = 0
        for kind in kinds:
            ranges |= {number: KeyRange(first + place, len(kind), chain) for place, number in enumerate(kind)}
            first += len(kind) * max(self.exchanges[number].num_keys(chain) for number in kind)
        return [ranges[number] for number in range(len(ranges))] if first < _MAX_KEY else None

    @cached_property
    def plan_hash(self) -> str:
        """SHA-256 of the content of the plan, 64 hex digits."""
        topology = {name: value for name, value in topology_to_json(self.topology).items() if value != 0}
        header = ["rotation 2", [str(spec) for spec in self.tensors], topology, self.staging_bytes]
        return hashlib.sha256(json.dumps(header).encode()).hexdigest()

    @cached_property
    def both_ways(self) -> bool:
        """False: no host both holds and needs data."""
        return False

    @cached_property
    def loads(self) -> RotationLoads:
        """The bytes that each host sends and receives."""
        return RotationLoads.of(self.tensors, self.topology, self.exchanges)

    @property
    def num_messages(self) -> int:
        """The number of messages of all ranks."""
        return sum(exchange.num_messages for exchange in self.exchanges)

    def count_messages(self, rank: int) -> int:
        """The number of messages that one rank sends or receives."""
        return sum(len(own.key) for own in self.own_messages(rank))

    def bytes_moved(self) -> tuple[int, int, int]:
        """Bytes between hosts, between ranks of one host, and copied within a rank."""
        pairs = [
            (_nbytes(spec), exchange.groups.shape) for spec, exchange in zip(self.tensors, self.exchanges, strict=True)
        ]
        return (
            sum(size * hosts for size, (_, hosts, _) in pairs),
            sum(size * hosts * (ranks - 1) for size, (_, hosts, ranks) in pairs),
            0,
        )

    def own_messages(self, rank: int) -> list[OwnMessages]:
        """The messages of each tensor that one rank sends or receives."""
        assert self._key_ranges is not None
        pairs = zip(self.exchanges, self._key_ranges, strict=True)
        return [exchange.own_messages(rank, keys) for exchange, keys in pairs]

    @cached_property
    def transfers(self) -> PlanTransfers:  # type: ignore[override]
        """All messages, as one transfer each.

        Raises:
            ArgumentError: there are more than 1,048,576.
        """
        if self.num_messages > MAX_LISTED:
            raise ArgumentError(
                f"a plan in closed form of {self.num_messages:,} messages does not list them; at most {MAX_LISTED:,} "
                "are listed: choose one rank, as with reshard plan --rank"
            )
        ndim = max(spec.ndim for spec in self.tensors)
        columns: list[list[np.ndarray]] = [[] for _ in range(8)]
        for rank in self.ranks:
            for tensor, own in enumerate(self.own_messages(rank)):
                sent = np.flatnonzero(own.sender == rank)
                pad = ((0, 0), (0, ndim - own.start.shape[1]))
                start, stop = np.pad(own.start[sent], pad), np.pad(own.stop[sent], pad, constant_values=1)
                values = own.key, own.source, np.full(len(own.key), tensor), own.sender, own.receiver, own.lane
                for column, value in zip(columns, (*(value[sent] for value in values), start, stop), strict=True):
                    column.append(value)
        key, source, tensor_of, sender, receiver, lane, start, stop = map(np.concatenate, columns)
        order = np.argsort(key)
        key, source, sender, receiver, lane = (values[order] for values in (key, source, sender, receiver, lane))
        brings = np.where(source >= 0, np.searchsorted(key, source), -1)
        later, earlier = self._find_orders(sender, receiver, lane)
        later, earlier = (
            np.concatenate([np.flatnonzero(brings >= 0), later]),
            np.concatenate([brings[brings >= 0], earlier]),
        )
        by_later = np.lexsort((earlier, later))
        return PlanTransfers(
            box_offsets=np.arange(len(key) + 1),
            box_tensor=tensor_of[order],
            box_start=start[order],
            box_stop=stop[order],
            edge_offsets=np.arange(len(key) + 1),
            sender=sender,
            receiver=receiver,
            splits=np.ones((len(key), ndim), dtype=np.int64),
            window=np.where(lane >= 0, self.window, ROTATION_INSIDE_WINDOW),
            after_offsets=np.concatenate([[0], np.cumsum(np.bincount(later, minlength=len(key)))]),
            after=earlier[by_later],
            source=brings,
        )

    def _find_orders(self, sender: np.ndarray, receiver: np.ndarray, lane: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of messages between hosts, given in order, of which the later one waits for the earlier one.

        A message waits for the previous message of its sender's port. It also waits for the previous message of its
        receiver's port in the same lane, if that comes from another host.

        Returns:
            ``(later, earlier)``: the positions of messages, without repetition.
        """
        nic, across = self.exchanges[0].nic_of, np.flatnonzero(lane >= 0)
        leaves, enters, lane = nic[sender[across]], nic[receiver[across]], lane[across]
        pairs = []
        for line in (leaves, enters * (lane.max(initial=0) + 1) + lane):
            order = np.argsort(line, kind="stable")
            follows = np.diff(line[order]) == 0
            if line is not leaves:
                follows &= np.diff(leaves[order] // MAX_NICS) != 0
            at = np.flatnonzero(follows)
            pairs.append(np.stack([order[at + 1], order[at]], axis=1))
        later, earlier = across[np.unique(np.concatenate(pairs), axis=0)].T
        return later, earlier

    def host_messages(self, rank: int) -> HostMessages:
        """The messages between the host of a rank and other hosts.

        Their order is that of each of its ports, or that of its lanes, one lane after the other.
        """
        exchange = self.exchanges[0]
        host, nic = exchange.host_of, exchange.nic_of
        own = [part for other in np.flatnonzero(host == host[rank]).tolist() for part in self.own_messages(other)]
        columns = [
            np.concatenate([getattr(part, name) for part in own]) for name in ("key", "sender", "receiver", "lane")
        ]
        key, sender, receiver, lane = (column[columns[3] >= 0] for column in columns)
        is_sent = exchange.src_number[host[rank]] >= 0
        line = nic[sender] if is_sent else nic[receiver] * (lane.max(initial=0) + 1) + lane
        order = np.lexsort((key, line))
        return HostMessages(key[order], sender[order], receiver[order], line[order], bool(is_sent))

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tensors", "topology", "staging_bytes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the plan again, so that none with other exchanges has the same hash."""
        RotationPlan.__init__(self, **state)
        mark_sound(self)


def _find_exchanges(tensors: Sequence[TensorSpec], topology: Topology) -> tuple[EvenExchange, ...] | None:
    """The exchange of each tensor; None if some is uneven, or uses other NICs than the first."""
    by_layout: dict[tuple[Any, ...], EvenExchange | None] = {}
    exchanges: list[EvenExchange] = []
    for spec in tensors:
        key = (spec.src, spec.dst, spec.shape)
        if key not in by_layout:
            by_layout[key] = EvenExchange.of(spec, topology)
        exchange = by_layout[key]
        if exchange is None or not _is_balanced(exchange, topology):
            return None
        exchanges.append(exchange)
        for side in (0, 1):
            if not np.array_equal(exchange.used_nics[side], exchanges[0].used_nics[side]):
                return None
    return tuple(exchanges)


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.itemsize


def _is_balanced(exchange: EvenExchange, topology: Topology) -> bool:
    """Whether no port of a sender is busier than the busiest port must be."""
    copies = exchange.groups.shape[1]
    senders, receivers = exchange.used_nics
    first, last = (
        topology.host(int(nics[0]) // MAX_NICS).nics[int(nics[0]) % MAX_NICS] for nics in (senders, receivers)
    )
    held = 1 / len(senders) / first.egress_bytes_per_second
    must = max(copies / len(receivers) / last.ingress_bytes_per_second, held)
    return copies * held <= _MAX_UNEVEN * must
