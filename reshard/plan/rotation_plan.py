"""A plan in closed form: hosts exchange regions in rotation, and each rank expands its own messages."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from reshard.errors import ArgumentError
from reshard.plan.even_exchange import EvenExchange, OwnMessages
from reshard.plan.model import DEFAULT_STAGING_BYTES, Plan
from reshard.plan.rotation_loads import RotationLoads
from reshard.plan.transfers import Transfers
from reshard.sharding import TensorSpec
from reshard.topology import Topology, topology_to_json

#: The strategy of these plans.
ROTATION = "rotation"
#: Limit on the unfinished messages of a sender, between hosts and inside its host.
ROTATION_WINDOW = 2
#: The messages of a larger plan are not listed.
MAX_LISTED = 2**20
#: Keys of messages are below this, and fit int64.
_MAX_KEY = 2**62
#: A port may send this many times the bytes that the busiest port must pass.
_MAX_UNEVEN = 1.005


class RotationPlan(Plan):
    """A plan whose messages follow from its layouts and its topology.

    It holds no list of messages: a rank expands its own sends and receives. Their ids order them, but are not
    consecutive. :attr:`transfers` lists the messages of a small plan, for checks and simulations.
    """

    exchanges: tuple[EvenExchange, ...]

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        topology: Topology,
        exchanges: Sequence[EvenExchange],
        staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        fields = {"tensors": tuple(tensors), "topology": topology, "strategy": ROTATION, "staging_bytes": staging_bytes}
        for name, value in {**fields, "exchanges": tuple(exchanges)}.items():
            object.__setattr__(self, name, value)

    @classmethod
    def find(
        cls, tensors: Sequence[TensorSpec], topology: Topology, staging_bytes: int, largest: int
    ) -> RotationPlan | None:
        """The plan of tensors; None if some tensor is no even exchange, or direct sends would keep a port too busy.

        Args:
            tensors, topology, staging_bytes: see :class:`Plan`.
            largest: limit on the bytes of a message.
        """
        by_layout: dict[tuple[Any, ...], EvenExchange | None] = {}
        exchanges = []
        for spec in tensors:
            key = (spec.src, spec.dst, spec.shape)
            if key not in by_layout:
                by_layout[key] = EvenExchange.of(spec, topology)
            exchange = by_layout[key]
            if (
                exchange is None
                or _nbytes(spec) // exchange.num_regions > largest
                or not _is_balanced(exchange, topology)
            ):
                return None
            exchanges.append(exchange)
            for name in ("src_number", "dst_number"):
                if not np.array_equal(getattr(exchange, name), getattr(exchanges[0], name)):
                    return None
        plan = cls(tensors, topology, exchanges, staging_bytes)
        num_pairs = math.prod(exchanges[0].num_hosts) * exchanges[0].num_places ** 2
        return plan if num_pairs * plan._first_keys[-1] * plan._chain < _MAX_KEY else None

    @property
    def is_listed(self) -> bool:
        """False: each rank expands its own messages."""
        return False

    @property
    def has_lanes(self) -> bool:
        """Whether hosts receive from several others at once, because there are more of those."""
        num_src, num_dst = self.exchanges[0].num_hosts
        return num_src > num_dst

    @cached_property
    def _first_keys(self) -> list[int]:
        """The number of keys of all tensors before each tensor, and of all tensors."""
        return list(accumulate((exchange.num_keys for exchange in self.exchanges), initial=0))

    @cached_property
    def _chain(self) -> int:
        """The largest number of ranks of a host that need one region."""
        return max(exchange.groups.shape[2] for exchange in self.exchanges)

    @cached_property
    def plan_hash(self) -> str:
        """SHA-256 of the content of the plan, 64 hex digits."""
        topology = {name: value for name, value in topology_to_json(self.topology).items() if value != 0}
        header = ["rotation 1", [str(spec) for spec in self.tensors], topology, ROTATION_WINDOW, self.staging_bytes]
        return hashlib.sha256(json.dumps(header).encode()).hexdigest()

    @cached_property
    def is_two_way(self) -> bool:
        """False: no host both holds and needs data."""
        return False

    @cached_property
    def loads(self) -> RotationLoads:
        """What each host sends and receives."""
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
        total = self._first_keys[-1]
        return [
            exchange.own_messages(rank, first, total, self._chain)
            for exchange, first in zip(self.exchanges, self._first_keys, strict=False)
        ]

    @cached_property
    def transfers(self) -> Transfers:  # type: ignore[override]
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
        columns: list[list[np.ndarray]] = [[] for _ in range(7)]
        for rank in self.ranks:
            for tensor, own in enumerate(self.own_messages(rank)):
                sent = np.flatnonzero(own.sender == rank)
                pad = ((0, 0), (0, ndim - own.start.shape[1]))
                start, stop = np.pad(own.start[sent], pad), np.pad(own.stop[sent], pad, constant_values=1)
                values = own.key, own.source, np.full(len(own.key), tensor), own.sender, own.receiver
                for column, value in zip(columns, (*(value[sent] for value in values), start, stop), strict=True):
                    column.append(value)
        key, source, tensor_of, sender, receiver, start, stop = map(np.concatenate, columns)
        order = np.argsort(key)
        key, source, sender, receiver = key[order], source[order], sender[order], receiver[order]
        brings = np.where(source >= 0, np.searchsorted(key, source), -1)
        later, earlier = self._find_orders(sender, receiver)
        later, earlier = (
            np.concatenate([np.flatnonzero(brings >= 0), later]),
            np.concatenate([brings[brings >= 0], earlier]),
        )
        by_later = np.lexsort((earlier, later))
        return Transfers(
            box_at=np.arange(len(key) + 1),
            box_tensor=tensor_of[order],
            box_start=start[order],
            box_stop=stop[order],
            edge_at=np.arange(len(key) + 1),
            sender=sender,
            receiver=receiver,
            splits=np.ones((len(key), ndim), dtype=np.int64),
            window=np.full(len(key), ROTATION_WINDOW),
            after_at=np.concatenate([[0], np.cumsum(np.bincount(later, minlength=len(key)))]),
            after=earlier[by_later],
            source=brings,
        )

    def _find_orders(self, sender: np.ndarray, receiver: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of messages between hosts, given in order. Each starts after the last one that leaves its sender's
        host, and after the last one that enters its receiver's host in the same lane.

        Returns:
            ``(later, earlier)``: the positions of messages, without repetition.
        """
        host = self.topology.host_by_rank
        across = np.flatnonzero(host[sender] != host[receiver])
        lane = self.exchanges[0].lane_of[host[sender[across]]]
        pairs = []
        for line in (host[sender[across]], host[receiver[across]] * (lane.max(initial=0) + 1) + lane):
            order = np.argsort(line, kind="stable")
            follows = np.flatnonzero(np.diff(line[order]) == 0)
            pairs.append(np.stack([order[follows + 1], order[follows]], axis=1))
        later, earlier = across[np.unique(np.concatenate(pairs), axis=0)].T
        return later, earlier

    def host_messages(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(key, sender, receiver)`` of the messages between the host of a rank and other hosts.

        They are in order, or in the order of each lane, one lane after the other.
        """
        host = self.topology.host_by_rank
        own = [part for other in np.flatnonzero(host == host[rank]).tolist() for part in self.own_messages(other)]
        columns = [np.concatenate([getattr(part, name) for part in own]) for name in ("key", "sender", "receiver")]
        across = np.flatnonzero(host[columns[1]] != host[columns[2]])
        key, sender, receiver = (column[across] for column in columns)
        order = np.lexsort((key, self.exchanges[0].lane_of[host[sender]]))
        return key[order], sender[order], receiver[order]

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tensors", "topology", "strategy", "staging_bytes", "exchanges")}


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.itemsize


def _is_balanced(exchange: EvenExchange, topology: Topology) -> bool:
    """Whether no port of a sender is busier than the busiest port must be."""
    num_src, num_dst = exchange.num_hosts
    sender = topology.host(int(np.flatnonzero(exchange.src_number >= 0)[0]))
    receiver = topology.host(int(np.flatnonzero(exchange.dst_number >= 0)[0]))
    copies = exchange.groups.shape[1]
    out = copies / num_src / sender.egress_bytes_per_second
    must = max(copies / num_dst / receiver.ingress_bytes_per_second, 1 / num_src / sender.egress_bytes_per_second)
    return out <= _MAX_UNEVEN * must
