"""Which host each rank is on, and how fast the links between hosts are."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from typing import Any

import numpy as np

from reshard.errors import TopologyError
from reshard.sharding.mesh import MAX_RANK

#: One 10 Gbit/s interface, in bytes per second each way.
TEN_GBIT = 1.25e9
#: What a message between hosts costs where a topology does not say: TCP, and the work at both ends. Measured over Gloo
#: between emulated hosts, half a round trip of one byte: 60 to 80 us, without a switch.
MESSAGE_SECONDS = 1e-4
#: The same inside a host. Measured over Gloo's loopback: 44 to 74 us.
INSIDE_MESSAGE_SECONDS = 5e-5
#: Bytes per second. Beyond, quotients of rates and sizes could be no numbers.
MIN_RATE, MAX_RATE = 1e-6, 1e18
MAX_NICS = 128
#: Of hosts that are not all alike with one NIC.
MAX_HOSTS = 2**16


def brief(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    try:
        return reprlib.repr(value)[:60]  # repr() itself would write out all of what aliases repeat
    except ValueError:  # an integer of thousands of digits
        return "a huge number"


def check_rate(value: Any, name: str) -> float:
    """A positive finite number, or TopologyError."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TopologyError(f"{name} must be a number of bytes per second, not {brief(value)}") from None
    if not MIN_RATE <= number <= MAX_RATE:
        raise TopologyError(f"{name} is {number}; it must be positive and finite, from {MIN_RATE:g} to {MAX_RATE:g}")
    return number


@dataclass(frozen=True, slots=True)
class Port:
    """A full-duplex place where bytes leave and enter: the interface of a host, or the uplink of a pod.

    Raises:
        TopologyError: a rate that is not positive and finite.
    """

    egress_bytes_per_second: float
    ingress_bytes_per_second: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, check_rate(getattr(self, name), name))

    @classmethod
    def of(cls, bytes_per_second: float) -> Port:
        """The same rate both ways."""
        return cls(bytes_per_second, bytes_per_second)


@dataclass(frozen=True, slots=True)
class Host:
    """The interfaces of one host, and which pod it is in (None where there are no pods)."""

    nics: tuple[Port, ...] = (Port(TEN_GBIT, TEN_GBIT),)
    pod: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.nics, (tuple, list)) or not all(isinstance(nic, Port) for nic in self.nics):
            raise TopologyError(f"nics must be a list of Port values, not {brief(self.nics)}")
        if not 1 <= len(self.nics) <= MAX_NICS:
            raise TopologyError(f"a host has 1 to {MAX_NICS} NICs, not {len(self.nics)}")
        object.__setattr__(self, "nics", tuple(self.nics))
        if self.pod is not None and (isinstance(self.pod, bool) or not isinstance(self.pod, int)):
            raise TopologyError(f"pod is {brief(self.pod)}; it must be an integer")

    @property
    def egress_bytes_per_second(self) -> float:
        """What all its NICs can send together."""
        return sum(nic.egress_bytes_per_second for nic in self.nics)

    @property
    def ingress_bytes_per_second(self) -> float:
        """What all its NICs can receive together."""
        return sum(nic.ingress_bytes_per_second for nic in self.nics)


@dataclass(frozen=True)
class Topology:
    """Hosts, their network interfaces, and pods of hosts behind an uplink.

    Bytes between two hosts pass the sender's NIC, where the hosts are in different pods both pods' uplinks, and
    the receiver's NIC. Bytes inside a host pass none of these.

    Args:
        host_of_rank: the host of rank 0, 1, ..., as integers from 0.
        hosts: one entry per host, or a single one for all of them.
        nic_of_rank: which NIC of its host each rank uses; omitted, the ranks of a host are dealt out to its NICs in
            blocks, in rank order.
        pods: the uplink of each pod.
        inside_bytes_per_second: what a rank can send, and at the same time receive, inside its host; None: no limit.
        latency_seconds, inside_latency_seconds: from sending the first byte of a message to its arrival, between
            hosts and inside them; it holds the sender's port. Omitted, they are those of TCP: 100 us and 50 us.
        turn_seconds: from the end of a message to the first byte of the next at the same receiving port, where that
            one comes from another rank and has to wait for it.
        start_seconds: from a call to the first byte of its transfer; it is added to what all messages take.
        send_buffer_bytes: of each two ranks' connection; a sender is done with what lies in it.
        burst_bytes: what each NIC and uplink saves while it is idle and passes at once later, where links are shaped
            by token buckets.

    Raises:
        TopologyError: a negative or missing host, NIC or pod, or a rate or latency that cannot be.
    """

    host_of_rank: tuple[int, ...]
    hosts: tuple[Host, ...] = (Host(),)
    nic_of_rank: tuple[int, ...] = ()
    pods: tuple[Port, ...] = ()
    inside_bytes_per_second: float | None = None
    latency_seconds: float = field(default=MESSAGE_SECONDS, kw_only=True)
    inside_latency_seconds: float = field(default=INSIDE_MESSAGE_SECONDS, kw_only=True)
    turn_seconds: float = field(default=0.0, kw_only=True)
    start_seconds: float = field(default=0.0, kw_only=True)
    send_buffer_bytes: int = field(default=0, kw_only=True)
    burst_bytes: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "host_of_rank", check_indices(self.host_of_rank, "hosts"))
        for name, kind in (("hosts", Host), ("pods", Port)):
            values = getattr(self, name)
            if not isinstance(values, (tuple, list)) or not all(isinstance(value, kind) for value in values):
                raise TopologyError(f"{name} must be a list of {kind.__name__} values")
            set_(self, name, tuple(values))
        if not 1 <= len(self.hosts) <= MAX_HOSTS:
            raise TopologyError(
                f"a topology describes at least one host and at most {MAX_HOSTS}, not {len(self.hosts)}"
            )
        if len(set(self.hosts)) == 1:
            set_(self, "hosts", self.hosts[:1])  # one form for what is the same
        most = max(self.host_of_rank, default=0)
        if (len(self.hosts) > 1 or len(self.hosts[0].nics) > 1 or self.pods) and most >= MAX_HOSTS:
            raise TopologyError(f"a topology of hosts that are not alike has at most {MAX_HOSTS}, not {most + 1}")
        if len(self.hosts) > 1 and most >= len(self.hosts):
            raise TopologyError(f"a rank is on host {most}, but only {len(self.hosts)} hosts are described")
        for number, host in enumerate(self.hosts):
            if (host.pod is not None) != bool(self.pods) or not 0 <= (host.pod or 0) < max(len(self.pods), 1):
                where = "in no pod" if host.pod is None else f"in pod {host.pod}"
                raise TopologyError(f"host {number} is {where}, but {len(self.pods)} pods are described")
        if self.nic_of_rank != ():
            set_(self, "nic_of_rank", check_indices(self.nic_of_rank, "NICs"))
            if len(self.nic_of_rank) != len(self.host_of_rank):
                raise TopologyError(f"{len(self.host_of_rank)} ranks have a host, {len(self.nic_of_rank)} a NIC")
            for rank, nic in enumerate(self.nic_of_rank):
                if nic >= len(self.host(self.host_of_rank[rank]).nics):
                    raise TopologyError(f"rank {rank} uses NIC {nic}, which host {self.host_of_rank[rank]} lacks")
        else:
            set_(self, "nic_of_rank", self._deal_nics())
        if self.inside_bytes_per_second is not None:
            set_(
                self,
                "inside_bytes_per_second",
                check_rate(self.inside_bytes_per_second, "inside_bytes_per_second"),
            )
        for name in ("latency_seconds", "inside_latency_seconds", "turn_seconds", "start_seconds"):
            set_(self, name, _latency(getattr(self, name), name))
        for name in ("send_buffer_bytes", "burst_bytes"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 2**63:
                raise TopologyError(f"{name} is {brief(size)}; it must be a number of bytes")

    def _deal_nics(self) -> tuple[int, ...]:
        if all(len(host.nics) == 1 for host in self.hosts):
            return (0,) * len(self.host_of_rank)
        num_ranks: dict[int, int] = {}
        for host in self.host_of_rank:
            num_ranks[host] = num_ranks.get(host, 0) + 1
        dealt: dict[int, int] = {}
        nics = []
        for host in self.host_of_rank:
            position = dealt[host] = dealt.get(host, -1) + 1
            nics.append(position * len(self.host(host).nics) // num_ranks[host])
        return tuple(nics)

    @classmethod
    def uniform(cls, host_of_rank: Sequence[int], nic_bytes_per_second: float = TEN_GBIT) -> Topology:
        """Hosts with one NIC each, all of the same rate."""
        return cls(tuple(host_of_rank), (Host((Port.of(nic_bytes_per_second),)),))

    @classmethod
    def from_hostnames(cls, hostnames: Sequence[str]) -> Topology:
        """Number hosts in the order in which their names first appear; one 10 Gbit/s NIC each.

        A message costs 100 us between hosts and 50 us inside them, and 200 us more where it waits for its turn.
        """
        number: dict[str, int] = {}
        host_of_rank = tuple(number.setdefault(name, len(number)) for name in hostnames)
        return cls(host_of_rank, turn_seconds=2 * MESSAGE_SECONDS)

    @property
    def num_hosts(self) -> int:
        """How many hosts there are, counted to the last one that a rank is on."""
        return 1 + max(self.host_of_rank, default=-1)

    def host(self, number: int) -> Host:
        """What host ``number`` has."""
        return self.hosts[0] if len(self.hosts) == 1 else self.hosts[number]

    def nic(self, rank: int) -> Port:
        """The NIC that a rank uses."""
        return self.host(self.host_of_rank[rank]).nics[self.nic_of_rank[rank]]

    def ranks_of_host(self, number: int) -> list[int]:
        """Its ranks, ascending."""
        return np.flatnonzero(self.host_by_rank == number).tolist()

    @cached_property
    def host_by_rank(self) -> np.ndarray:
        """``host_of_rank`` as an int64 array."""
        return np.array(self.host_of_rank, dtype=np.int64)

    def without_latency(self) -> Topology:
        """The same where messages cost nothing but the time of their bytes."""
        return replace(self, latency_seconds=0.0, inside_latency_seconds=0.0, turn_seconds=0.0, start_seconds=0.0)

    def first(self, count: int) -> Topology:
        """The topology of the first ``count`` ranks; what a plan does not touch does not enter its hash."""
        if len(self.host_of_rank) <= count:
            return self
        host_of_rank = self.host_of_rank[:count]
        return replace(
            self,
            host_of_rank=host_of_rank,
            nic_of_rank=self.nic_of_rank[:count],
            hosts=self.hosts[: 1 + max(host_of_rank, default=0)],
        )

    def only(self, ranks: Iterable[int]) -> Topology:
        """The same with the hosts of some ranks alone, numbered from 0; other ranks count for nothing."""
        kept = sorted({self.host_of_rank[rank] for rank in ranks})
        if kept == list(range(self.num_hosts)):
            return self
        number = {host: place for place, host in enumerate(kept)}
        return replace(
            self,
            host_of_rank=tuple(number.get(host, 0) for host in self.host_of_rank),
            nic_of_rank=tuple(
                nic if host in number else 0 for nic, host in zip(self.nic_of_rank, self.host_of_rank, strict=True)
            ),
            hosts=self.hosts if len(self.hosts) == 1 else tuple(map(self.host, kept)),
        )

    def check_covers(self, ranks: Sequence[int]) -> None:
        """Raise TopologyError unless every rank has a host."""
        if ranks and max(ranks) >= len(self.host_of_rank):
            raise TopologyError(
                f"rank {max(ranks)} has no host: the topology covers ranks 0..{len(self.host_of_rank) - 1}, "
                f"{1 + max(ranks)} are needed"
            )


def _latency(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise TopologyError(f"{name} is {brief(value)}; it must be from 0 to 1 s")
    return float(value)


def check_indices(values: Iterable[Any], what: str) -> tuple[int, ...]:
    """Integers from 0 on, or TopologyError."""
    try:
        numbers = tuple(index(value) for value in values)
    except TypeError as error:
        raise TopologyError(f"{what} must be integers: {error}") from None
    if len(numbers) > MAX_RANK + 1:
        raise TopologyError(f"a topology has at most {MAX_RANK + 1} ranks, not {len(numbers)}")
    if any(not 0 <= number <= MAX_RANK for number in numbers):
        raise TopologyError(f"{what} are counted from 0; a negative or huge one was given")
    return numbers
