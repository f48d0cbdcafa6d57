"""What a chunk scheduler reads: ports, and what is to be sent over them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.planner.multicast.host_classes import Members

#: The unit of :attr:`Workload.host_class_size`.
UNITS = 1024


@dataclass(frozen=True)
class Ports:
    """Where chunks leave and enter: one port per NIC. Rates are relative.

    Attributes:
        host: the host of each port. out, into: its rates. of_rank: the port of each rank, -1 for those
            that take no part.
        pod: the pod of each host, empty where there are none. up, down: the rates of each pod's uplink.
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
        """The ranks at each port."""
        found: list[list[int]] = [[] for _ in self.host]
        for rank, port in enumerate(self.of_rank):
            if port >= 0:
                found[port].append(rank)
        return found

    @cached_property
    def are_alike(self) -> bool:
        """Whether all have the same rate."""
        return len({*self.out, *self.into, *self.up, *self.down}) == 1

    @cached_property
    def are_shared(self) -> bool:
        """Whether some host has several ports that ranks use."""
        hosts = [host for host, ranks in zip(self.host, self.ranks, strict=True) if ranks]
        return len(set(hosts)) < len(hosts)


@dataclass(frozen=True, eq=False)
class Workload:
    """What is to be scheduled. Members are ``(at, values)``: entry k has ``values[at[k]:at[k + 1]]``.

    Attributes:
        host_class_holders, host_class_receivers: hosts of each host class. host_class_size: of its chunks, in
        :data:`UNITS` of what a port of
            rate 1 passes in one step of the clock. host_class_of: the host class of each chunk.
        class_holders, class_receivers: ranks of each class. piece_at: chunk i has pieces
            ``piece_at[i]:piece_at[i + 1]``. piece_class, piece_bytes: of each piece.
        run: how many pieces a rank sends or receives more than others of its host before those have their turn.
        near_first: whether ports rather pass what ranks at them hold or need than what is rarest.
        keeps_partners: whether senders serve the receiver that they served first for as long as they can.
        inside_each, inside_per_byte: what a message inside a host takes, in steps of the clock.
    """

    host_class_holders: Members
    host_class_receivers: Members
    host_class_size: np.ndarray
    host_class_of: np.ndarray
    class_holders: Members
    class_receivers: Members
    piece_at: np.ndarray
    piece_class: np.ndarray
    piece_bytes: np.ndarray
    run: int = 1
    near_first: bool = False
    keeps_partners: bool = False
    inside_each: float = 0.0
    inside_per_byte: float = 0.0

    @property
    def num_steps(self) -> int:
        """How often scheduling it out looks at a host: for each chunk that is sent, at all that might take part."""
        holders, destinations = (
            np.diff(members[0])[self.host_class_of] for members in (self.host_class_holders, self.host_class_receivers)
        )
        hosts = len(np.union1d(self.host_class_holders[1], self.host_class_receivers[1]))
        return int((destinations * (hosts + holders + destinations)).sum())


def rows_of(members: Members) -> list[list[int]]:
    """Members as lists."""
    at, values = members[0].tolist(), members[1].tolist()
    return [values[a:b] for a, b in itertools.pairwise(at)]
