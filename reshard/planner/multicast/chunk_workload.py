"""Input of the chunk scheduler: the NICs, and the chunks to send through them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from reshard.planner.multicast.host_classes import RaggedRows

#: Size of a chunk between the fastest NICs, in the unit of :attr:`ChunkWorkload.host_class_size`.
CHUNK_UNITS = 1024


@dataclass(frozen=True)
class Nics:
    """The network: NICs, the ranks that use them, and the uplinks of pods. All rates are relative to the largest one.

    Attributes:
        host: host of each NIC.
        out, into: egress and ingress rate of each NIC.
        of_rank: NIC of each rank, -1 for ranks that do not participate.
        pod: pod of each host; empty without pods.
        up, down: egress and ingress rate of each pod's uplink.
    """

    host: tuple[int, ...]
    out: tuple[float, ...]
    into: tuple[float, ...]
    of_rank: tuple[int, ...]
    pod: tuple[int, ...] = ()
    up: tuple[float, ...] = ()
    down: tuple[float, ...] = ()

    @cached_property
    def ranks(self) -> list[list[int]]:
        """The ranks at each NIC."""
        ranks_of_nic: list[list[int]] = [[] for _ in self.host]
        for rank, nic in enumerate(self.of_rank):
            if nic >= 0:
                ranks_of_nic[nic].append(rank)
        return ranks_of_nic

    @cached_property
    def have_equal_rates(self) -> bool:
        """Whether all rates are equal."""
        return len({*self.out, *self.into, *self.up, *self.down}) == 1

    @cached_property
    def have_multi_nic_hosts(self) -> bool:
        """Whether the ranks of some host use several NICs."""
        hosts = [host for host, ranks in zip(self.host, self.ranks, strict=True) if ranks]
        return len(set(hosts)) < len(hosts)


@dataclass(frozen=True, eq=False)
class ChunkWorkload:
    """The chunks to schedule.

    A class is a set of regions with the same holder and receiver ranks. A host class is a set of classes with the same
    holder and destination hosts. Hosts exchange chunks of host classes. Ranks exchange pieces: the part of a chunk that
    belongs to one class. All :data:`RaggedRows` are ``(at, values)``: row k is ``values[at[k]:at[k + 1]]``.

    A clock step is the time that a NIC of rate 1 needs for a chunk of size :data:`CHUNK_UNITS`.

    Attributes:
        host_class_holders, host_class_receivers: holder and destination hosts of each host class.
        host_class_size: ``(host_classes,)`` chunk size; it is :data:`CHUNK_UNITS` between the fastest NICs.
        host_class_of: ``(chunks,)`` host class of each chunk.
        class_holders, class_receivers: holder and receiver ranks of each class.
        piece_offsets: chunk i has pieces ``piece_offsets[i]:piece_offsets[i + 1]``.
        piece_class, piece_bytes: ``(pieces,)`` class and bytes of each piece.
        max_lead: a rank serves its NIC until it is this many pieces ahead of the least loaded rank there.
        near_first: whether NICs prefer chunks that their own ranks hold or need over the rarest chunks.
        keeps_partners: whether each sender keeps its first receiver for as long as it can.
        is_broadcast: whether chunks pass in a fixed pattern of slots (``native/multicast/circulant_broadcast.h``). All
            chunks that move must have the same holder and destinations, and hosts one NIC each.
        inside_each, inside_per_byte: cost of a message inside a host, fixed and per byte, in clock steps.
    """

    host_class_holders: RaggedRows
    host_class_receivers: RaggedRows
    host_class_size: np.ndarray
    host_class_of: np.ndarray
    class_holders: RaggedRows
    class_receivers: RaggedRows
    piece_offsets: np.ndarray
    piece_class: np.ndarray
    piece_bytes: np.ndarray
    max_lead: int = 1
    near_first: bool = False
    keeps_partners: bool = False
    is_broadcast: bool = False
    inside_each: float = 0.0
    inside_per_byte: float = 0.0

    @property
    def key(self) -> tuple[object, ...]:
        """Values that are equal if two workloads are."""
        values = [getattr(self, item.name) for item in fields(self)]
        arrays = [array for value in values for array in (value if isinstance(value, tuple) else (value,))]
        return tuple(array.tobytes() if isinstance(array, np.ndarray) else array for array in arrays)

    @property
    def num_messages(self) -> int:
        """Messages of a schedule without relays: one for each receiver of each piece."""
        return int(np.diff(self.class_receivers[0])[self.piece_class].sum())

    @property
    def has_one_holder(self) -> bool:
        """Whether all chunks that move between hosts have the same host as their only holder, and equal destinations.

        Such chunks form one host class.
        """
        moves = np.flatnonzero(np.diff(self.host_class_receivers[0]))
        return len(moves) == 1 and int(np.diff(self.host_class_holders[0])[moves[0]]) == 1

    @property
    def num_steps(self) -> int:
        """Estimate of the scheduler's work: it visits all hosts, holders and destinations per chunk and destination."""
        holders, destinations = (
            np.diff(members[0])[self.host_class_of] for members in (self.host_class_holders, self.host_class_receivers)
        )
        hosts = len(np.union1d(self.host_class_holders[1], self.host_class_receivers[1]))
        return int((destinations * (hosts + holders + destinations)).sum())


def rows_of(members: RaggedRows) -> list[list[int]]:
    """Rows of :data:`RaggedRows` as lists."""
    row_begins, values = members[0].tolist(), members[1].tolist()
    return [values[a:b] for a, b in itertools.pairwise(row_begins)]
