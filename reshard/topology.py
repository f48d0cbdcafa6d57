"""Which host each rank is on, and how fast a host's network interface is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

import numpy as np

from reshard.errors import TopologyError
from reshard.mesh import MAX_RANK

#: One 10 Gbit/s interface per host, in bytes per second each way.
TEN_GBIT = 1.25e9


@dataclass(frozen=True)
class Topology:
    """Hosts and the rate of their one network interface.

    Args:
        host_of_rank: the host of rank 0, 1, ..., as integers from 0.
        nic_bytes_per_second: what a host can send, and at the same time receive.

    Raises:
        TopologyError: a negative host, or a rate that is not positive and finite.
    """

    host_of_rank: tuple[int, ...]
    nic_bytes_per_second: float = TEN_GBIT

    def __post_init__(self) -> None:
        try:
            hosts = tuple(index(host) for host in self.host_of_rank)
            rate = float(self.nic_bytes_per_second)
        except (TypeError, ValueError, OverflowError) as error:
            raise TopologyError(f"hosts must be integers and the rate a number: {error}") from None
        if len(hosts) > MAX_RANK + 1:
            raise TopologyError(f"a topology has at most {MAX_RANK + 1} ranks, not {len(hosts)}")
        if any(not 0 <= host <= MAX_RANK for host in hosts):
            raise TopologyError("hosts are counted from 0; a negative or huge one was given")
        if not (math.isfinite(rate) and rate > 0):
            raise TopologyError(f"nic_bytes_per_second is {rate}; it must be positive and finite")
        object.__setattr__(self, "host_of_rank", hosts)
        object.__setattr__(self, "nic_bytes_per_second", rate)

    @classmethod
    def from_hostnames(cls, hostnames: Sequence[str], nic_bytes_per_second: float = TEN_GBIT) -> Topology:
        """Number hosts in the order in which their names first appear."""
        number: dict[str, int] = {}
        return cls(tuple(number.setdefault(name, len(number)) for name in hostnames), nic_bytes_per_second)

    @classmethod
    def from_json(cls, data: Any) -> Topology:
        """From ``{"host_of_rank": [0, 0, 1, 1], "nic_bytes_per_second": 1.25e9}``; the rate may be left out."""
        if not isinstance(data, dict) or not isinstance(data.get("host_of_rank"), list):
            raise TopologyError('a topology is {"host_of_rank": [...], "nic_bytes_per_second": ...}')
        unknown = sorted(map(str, set(data) - {"host_of_rank", "nic_bytes_per_second"}))
        if unknown:
            raise TopologyError(f"unknown keys in topology: {', '.join(unknown)}")
        return cls(tuple(data["host_of_rank"]), data.get("nic_bytes_per_second", TEN_GBIT))

    def to_json(self) -> dict[str, Any]:
        """The inverse of :meth:`from_json`."""
        return {"host_of_rank": list(self.host_of_rank), "nic_bytes_per_second": self.nic_bytes_per_second}

    @cached_property
    def hosts(self) -> np.ndarray:
        """``host_of_rank`` as an int64 array."""
        return np.array(self.host_of_rank, dtype=np.int64)

    def first(self, count: int) -> Topology:
        """The topology of the first ``count`` ranks; what a plan does not touch does not enter its hash."""
        if len(self.host_of_rank) <= count:
            return self
        return Topology(self.host_of_rank[:count], self.nic_bytes_per_second)

    def check_covers(self, ranks: Sequence[int]) -> None:
        """Raise TopologyError unless every rank has a host."""
        if ranks and max(ranks) >= len(self.host_of_rank):
            raise TopologyError(
                f"rank {max(ranks)} has no host: the topology covers ranks 0..{len(self.host_of_rank) - 1}"
            )
