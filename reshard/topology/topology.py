"""Topologies: the host and NIC of each rank, and the rates and latencies of links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from typing import Any

import numpy as np

from reshard.arguments import check_arguments
from reshard.codecs import BLOCK_CODECS, find_block_codec
from reshard.errors import ArgumentError, TopologyError
from reshard.formatting import brief, count_of, did_you_mean, format_ranks, format_rate
from reshard.sharding import MAX_RANK, check_integer

#: Bytes per second of a 10 Gbit/s NIC, in each direction.
TEN_GBIT = 1.25e9
#: Default latency between hosts, for TCP, CPU work at both ends included. Half a round trip of one byte took 60 to 80
#: us over Gloo between emulated hosts. A real network adds a switch.
MESSAGE_SECONDS = 1e-4
#: Default latency inside a host. Half a round trip of one byte took 44 to 74 us with Gloo over loopback.
INSIDE_MESSAGE_SECONDS = 5e-5
#: Limits on rates, in bytes per second. They keep quotients of sizes and rates finite.
MIN_RATE, MAX_RATE = 1e-6, 1e18
#: Limit on the NICs of one host.
MAX_NICS = 128
#: Limit on the hosts of a topology with unequal hosts, several NICs per host, or pods.
MAX_HOSTS = 2**16
#: Limit on the ranks of a topology, which covers ranks 0 to MAX_RANK at most.
MAX_RANKS = MAX_RANK + 1


def check_rate(value: Any, name: str) -> float:
    """``value`` as a float; raises TopologyError unless it is from ``MIN_RATE`` to ``MAX_RATE``."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last from a tensor without data
        raise TopologyError(f"{name} must be a number of bytes per second, not {brief(value)}") from None
    if not MIN_RATE <= number <= MAX_RATE:
        raise TopologyError(f"{name} is {number}; it must be positive and finite, from {MIN_RATE:g} to {MAX_RATE:g}")
    return number


@dataclass(frozen=True, slots=True)
class Link:
    """The NIC of a host or the uplink of a pod, which send and receive at the same time: two ports.

    Raises:
        TopologyError: a rate is not positive and finite.
    """

    egress_bytes_per_second: float
    ingress_bytes_per_second: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, check_rate(getattr(self, name), name))

    @classmethod
    def of(cls, bytes_per_second: float) -> Link:
        """A link with the same rate in both directions."""
        return cls(bytes_per_second, bytes_per_second)


@dataclass(frozen=True, slots=True)
class Host:
    """The NICs of one host, and the index of its pod (None in a topology without pods).

    Raises:
        TopologyError: there are no NICs or too many, or an argument has another type.
    """

    nics: tuple[Link, ...] = (Link(TEN_GBIT, TEN_GBIT),)
    pod: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.nics, (tuple, list)) or not all(isinstance(nic, Link) for nic in self.nics):
            raise TopologyError(f"nics must be a list of Link values, not {brief(self.nics)}")
        if not 1 <= len(self.nics) <= MAX_NICS:
            raise TopologyError(f"a host has 1 to {MAX_NICS} NICs, not {len(self.nics)}")
        object.__setattr__(self, "nics", tuple(self.nics))
        if self.pod is not None:
            object.__setattr__(self, "pod", check_integer(self.pod, "pod", 0, MAX_HOSTS, TopologyError))

    @property
    def egress_bytes_per_second(self) -> float:
        """The sum of the egress rates of all NICs."""
        return sum(nic.egress_bytes_per_second for nic in self.nics)

    @property
    def ingress_bytes_per_second(self) -> float:
        """The sum of the ingress rates of all NICs."""
        return sum(nic.ingress_bytes_per_second for nic in self.nics)


@dataclass(frozen=True, slots=True)
class CodecRate:
    """The rates at which one rank encodes and decodes with a codec, in bytes of uncompressed values per second.

    Raises:
        TopologyError: there is no such block codec, or a rate is not positive and finite.
    """

    codec: str
    encode_bytes_per_second: float
    decode_bytes_per_second: float

    def __post_init__(self) -> None:
        if not isinstance(self.codec, str) or find_block_codec(self.codec) is None:
            raise TopologyError(f"there is no block codec {brief(self.codec)}{did_you_mean(self.codec, BLOCK_CODECS)}")
        for name in ("encode_bytes_per_second", "decode_bytes_per_second"):
            object.__setattr__(self, name, check_rate(getattr(self, name), name))


@dataclass(frozen=True)
class Topology:
    """Hosts, their NICs, and pods of hosts that share an uplink.

    Bytes between two hosts pass the sender's NIC, the uplinks of both pods if the hosts are in different pods, and the
    receiver's NIC. Bytes inside a host pass none of these.

    Args:
        host_of_rank: the host index of each rank, counted from 0.
        hosts: one entry per host, or a single entry for all hosts.
        nic_of_rank: the NIC index of each rank on its host. Omitted: the ranks of a host are divided among its NICs in
            contiguous blocks, in rank order.
        pods: the uplink of each pod.
        inside_bytes_per_second: rate at which a rank can send, and at the same time receive, inside its host; None: no
            limit.
        inside_total_bytes_per_second: total rate inside a host of all its ranks together, which share memory and cores;
            None: no limit.
        latency_seconds, inside_latency_seconds: time from sending the first byte of a message to the arrival of that
            byte, between hosts and inside a host. The message occupies its sender's port during this time. Omitted:
            100 us and 50 us, as over TCP.
        sender_change_seconds: extra delay when a receiving port switches to another sender. It lasts from the end of a
            message of one rank to the first byte of a message of another rank, if the second message waited for that
            end.
        start_seconds: time from a call to the first byte of its transfer.
        send_buffer_bytes: send buffer of each connection. A sender does not wait for bytes that fit in the buffer.
        codec_rates: rates of codecs that ``compression="auto"`` may choose, one entry per codec.
        burst_bytes: token bucket size of each NIC and uplink: an idle port saves up to this many bytes and later passes
            them at once.

    Raises:
        TopologyError: a host, NIC or pod index is negative or out of range, or a rate or latency is out of range.
    """

    host_of_rank: tuple[int, ...]
    hosts: tuple[Host, ...] = (Host(),)
    nic_of_rank: tuple[int, ...] = ()
    pods: tuple[Link, ...] = ()
    inside_bytes_per_second: float | None = None
    inside_total_bytes_per_second: float | None = field(default=None, kw_only=True)
    latency_seconds: float = field(default=MESSAGE_SECONDS, kw_only=True)
    inside_latency_seconds: float = field(default=INSIDE_MESSAGE_SECONDS, kw_only=True)
    sender_change_seconds: float = field(default=0.0, kw_only=True)
    start_seconds: float = field(default=0.0, kw_only=True)
    send_buffer_bytes: int = field(default=0, kw_only=True)
    burst_bytes: int = field(default=0, kw_only=True)
    codec_rates: tuple[CodecRate, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "host_of_rank", check_indices(self.host_of_rank, "hosts"))
        for name, kind in (("hosts", Host), ("pods", Link)):
            values = getattr(self, name)
            if not isinstance(values, (tuple, list)) or not all(isinstance(value, kind) for value in values):
                raise TopologyError(f"{name} must be a list of {kind.__name__} values")
            set_(self, name, tuple(values))
        if not 1 <= len(self.hosts) <= MAX_HOSTS:
            raise TopologyError(
                f"a topology describes at least one host and at most {MAX_HOSTS}, not {len(self.hosts)}"
            )
        if len(set(self.hosts)) == 1:
            set_(self, "hosts", self.hosts[:1])  # so that equal topologies compare equal
        max_host = max(self.host_of_rank, default=0)
        if (len(self.hosts) > 1 or len(self.hosts[0].nics) > 1 or self.pods) and max_host >= MAX_HOSTS:
            raise TopologyError(
                f"a topology with unequal hosts, several NICs per host or pods has at most {MAX_HOSTS} hosts, "
                f"not {max_host + 1}"
            )
        if len(self.hosts) > 1 and max_host >= len(self.hosts):
            raise TopologyError(f"a rank is on host {max_host}, but only {len(self.hosts)} hosts are described")
        for number, host in enumerate(self.hosts):
            if (host.pod is not None) != bool(self.pods) or not 0 <= (host.pod or 0) < max(len(self.pods), 1):
                where = "in no pod" if host.pod is None else f"in pod {host.pod}"
                raise TopologyError(f"host {number} is {where}, but {len(self.pods)} pods are described")
        if not isinstance(self.nic_of_rank, tuple) or self.nic_of_rank:
            set_(self, "nic_of_rank", check_indices(self.nic_of_rank, "NICs"))
            if len(self.nic_of_rank) != len(self.host_of_rank):
                raise TopologyError(
                    f"host_of_rank has {len(self.host_of_rank)} ranks, but nic_of_rank has {len(self.nic_of_rank)}"
                )
            num_nics = np.array([len(host.nics) for host in self.hosts])
            available = num_nics if len(num_nics) == 1 else num_nics[np.array(self.host_of_rank, dtype=np.int64)]
            for rank in np.flatnonzero(np.array(self.nic_of_rank, dtype=np.int64) >= available)[:1]:
                raise TopologyError(
                    f"rank {rank} uses NIC {self.nic_of_rank[rank]}, which host {self.host_of_rank[rank]} lacks"
                )
        else:
            set_(self, "nic_of_rank", self._assign_nics())
        for name in ("inside_bytes_per_second", "inside_total_bytes_per_second"):
            if getattr(self, name) is not None:
                set_(self, name, check_rate(getattr(self, name), name))
        for name in ("latency_seconds", "inside_latency_seconds", "sender_change_seconds", "start_seconds"):
            set_(self, name, _check_latency(getattr(self, name), name))
        for name in ("send_buffer_bytes", "burst_bytes"):
            set_(self, name, check_integer(getattr(self, name), name, 0, 2**63 - 1, TopologyError))
        rates = self.codec_rates
        if not isinstance(rates, (tuple, list)) or not all(isinstance(rate, CodecRate) for rate in rates):
            raise TopologyError("codec_rates must be a list of CodecRate values")
        set_(self, "codec_rates", tuple(rates))
        if len({rate.codec for rate in self.codec_rates}) != len(self.codec_rates):
            raise TopologyError("codec_rates has several entries for one codec")

    def __str__(self) -> str:
        """The hosts of each kind, pods, rates, latencies and codecs, one per line. Equal pods share a line."""
        counts = Counter(self.host_of_rank)
        kinds_of_pod: dict[int | None, Counter[tuple[int, tuple[Link, ...]]]] = {}
        for number in sorted(counts):
            host = self.host(number)
            kinds_of_pod.setdefault(host.pod, Counter())[counts[number], host.nics] += 1
        equal: dict[tuple[Any, ...], list[int]] = {}
        lines = []
        for pod, kinds in kinds_of_pod.items():
            if pod is None:
                lines += [f"hosts: {_describe_hosts(*kind)}" for kind in kinds.items()]
            else:
                equal.setdefault((tuple(kinds.items()), self.pods[pod]), []).append(pod)
        for (hosts, uplink), pods in equal.items():
            where = f"pod {pods[0]}" if len(pods) == 1 else f"each of pods {format_ranks(pods)}"
            lines += [f"hosts in {where}: {_describe_hosts(*kind)}" for kind in hosts]
            lines.append(f"uplink of {where}: {_describe_link(uplink)}")
        rate = "no limit" if self.inside_bytes_per_second is None else format_rate(self.inside_bytes_per_second)
        total = self.inside_total_bytes_per_second
        together = "" if total is None else f", {format_rate(total)} together"
        lines.append(f"inside a host: {rate} for each rank{together}")
        between, inside = (f"{1e6 * item:.3g} us" for item in (self.latency_seconds, self.inside_latency_seconds))
        lines.append(f"latency: {between} between hosts, {inside} inside")
        lines += [
            f"codec {codec_rate.codec}: encodes {format_rate(codec_rate.encode_bytes_per_second)}, decodes "
            f"{format_rate(codec_rate.decode_bytes_per_second)}"
            for codec_rate in self.codec_rates
        ]
        return "\n".join(lines)

    def describe(self) -> str:
        """The same in one line, as commands show it."""
        return "; ".join(str(self).splitlines())

    def _assign_nics(self) -> tuple[int, ...]:
        if all(len(host.nics) == 1 for host in self.hosts):
            return (0,) * len(self.host_of_rank)
        num_ranks: dict[int, int] = {}
        for host in self.host_of_rank:
            num_ranks[host] = num_ranks.get(host, 0) + 1
        last_position: dict[int, int] = {}
        nics = []
        for host in self.host_of_rank:
            position = last_position[host] = last_position.get(host, -1) + 1
            nics.append(position * len(self.host(host).nics) // num_ranks[host])
        return tuple(nics)

    @classmethod
    def uniform(cls, host_of_rank: Sequence[int], nic_bytes_per_second: float = TEN_GBIT) -> Topology:
        """Hosts with one NIC each, all of the same rate in both directions.

        Raises:
            TopologyError: see :class:`Topology`.
        """
        return cls(check_indices(host_of_rank, "hosts"), (Host((Link.of(nic_bytes_per_second),)),))

    @classmethod
    def from_hostnames(cls, hostnames: Sequence[str]) -> Topology:
        """Hosts with one 10 Gbit/s NIC each, numbered by the first appearance of their names.

        Latencies are the defaults: 100 us between hosts and 50 us inside a host. ``sender_change_seconds`` is 200 us.
        """
        if not isinstance(hostnames, Sequence) or not all(isinstance(name, str) for name in hostnames):
            raise TopologyError("hostnames must be a list with the host name of each rank")
        number: dict[str, int] = {}
        host_of_rank = tuple(number.setdefault(name, len(number)) for name in hostnames)
        return cls(host_of_rank, sender_change_seconds=2 * MESSAGE_SECONDS)

    @cached_property
    def num_hosts(self) -> int:
        """One more than the highest host index of any rank. Lower indices without ranks count too."""
        return 1 + max(self.host_of_rank, default=-1)

    def host(self, number: int) -> Host:
        """The description of host ``number``."""
        is_uniform = len(self.hosts) == 1
        number = check_integer(number, "the number of a host", 0, MAX_RANK if is_uniform else len(self.hosts) - 1)
        return self.hosts[0 if is_uniform else number]

    def nic(self, rank: int) -> Link:
        """The NIC that a rank uses."""
        rank = check_integer(rank, "rank", 0, MAX_RANK)
        self.check_covers((rank,))
        return self.host(self.host_of_rank[rank]).nics[self.nic_of_rank[rank]]

    def ranks_of_host(self, number: int) -> list[int]:
        """The ranks of host ``number``, ascending."""
        number = check_integer(number, "the number of a host", 0, MAX_RANK)
        return np.flatnonzero(self.host_array == number).tolist()

    @cached_property
    def host_array(self) -> np.ndarray:
        """``host_of_rank`` as an int64 array."""
        return np.array(self.host_of_rank, dtype=np.int64)

    @cached_property
    def nic_array(self) -> np.ndarray:
        """``nic_of_rank`` as an int64 array."""
        return np.array(self.nic_of_rank, dtype=np.int64)

    @cached_property
    def nic_rates(self) -> tuple[np.ndarray, np.ndarray]:
        """Egress and ingress bytes per second, each ``(len(hosts), MAX_NICS)``; infinite where a host has no NIC."""
        egress, ingress = np.full((2, len(self.hosts), MAX_NICS), np.inf)
        for host, described in enumerate(self.hosts):
            for nic, link in enumerate(described.nics):
                egress[host, nic], ingress[host, nic] = link.egress_bytes_per_second, link.ingress_bytes_per_second
        return egress, ingress

    def without_latency(self) -> Topology:
        """The same topology with all latencies 0."""
        return replace(
            self, latency_seconds=0.0, inside_latency_seconds=0.0, sender_change_seconds=0.0, start_seconds=0.0
        )

    @check_arguments()
    def with_faster_links(self, factor: float) -> Topology:
        """The same topology with all rates ``factor`` times as high, inside hosts too."""

        def faster(link: Link) -> Link:
            return Link(link.egress_bytes_per_second * factor, link.ingress_bytes_per_second * factor)

        inside, total = self.inside_bytes_per_second, self.inside_total_bytes_per_second
        return replace(
            self,
            hosts=tuple(replace(host, nics=tuple(map(faster, host.nics))) for host in self.hosts),
            pods=tuple(map(faster, self.pods)),
            inside_bytes_per_second=None if inside is None else inside * factor,
            inside_total_bytes_per_second=None if total is None else total * factor,
        )

    def first(self, count: int) -> Topology:
        """The topology of the first ``count`` ranks, so that unused hosts do not change the hash of a plan."""
        count = check_integer(count, "count", 0, MAX_RANKS)
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
        """The topology with only the hosts of ``ranks``, renumbered from 0. Ranks on other hosts move to host 0.

        Raises:
            ArgumentError: a rank is not an integer. TopologyError: a rank has no host.
        """
        ranks = _check_ranks(ranks)
        self.check_covers(ranks)
        kept = sorted({self.host_of_rank[rank] for rank in ranks})
        if kept == list(range(self.num_hosts)):
            return self
        number = {host: new for new, host in enumerate(kept)}
        return replace(
            self,
            host_of_rank=tuple(number.get(host, 0) for host in self.host_of_rank),
            nic_of_rank=tuple(
                nic if host in number else 0 for nic, host in zip(self.nic_of_rank, self.host_of_rank, strict=True)
            ),
            hosts=self.hosts if len(self.hosts) == 1 else tuple(map(self.host, kept)),
        )

    def select(self, ranks: Sequence[int]) -> Topology:
        """The topology of some ranks, which become 0, 1, ... in the given order; hosts and pods get new numbers.

        Raises:
            ArgumentError: a rank is not an integer. TopologyError: a rank has no host.
        """
        ranks = _check_ranks(ranks)
        self.check_covers(ranks)
        hosts = list(dict.fromkeys(self.host_of_rank[rank] for rank in ranks))
        pods = list(dict.fromkeys(pod for host in hosts if (pod := self.host(host).pod) is not None))
        moved = (
            replace(host, pod=None if host.pod is None else pods.index(host.pod)) for host in map(self.host, hosts)
        )
        return replace(
            self,
            host_of_rank=tuple(hosts.index(self.host_of_rank[rank]) for rank in ranks),
            nic_of_rank=tuple(self.nic_of_rank[rank] for rank in ranks),
            hosts=tuple(moved),
            pods=tuple(self.pods[pod] for pod in pods),
        )

    def check_covers(self, ranks: Sequence[int]) -> None:
        """Raise TopologyError unless every rank has a host, and ArgumentError if a rank is not an integer."""
        ranks = _check_ranks(ranks)
        if ranks and max(ranks) >= len(self.host_of_rank):
            raise TopologyError(
                f"rank {brief(max(ranks))} has no host: the topology covers ranks 0..{len(self.host_of_rank) - 1}, "
                f"{brief(1 + max(ranks))} are needed"
            )


def check_topology(topology: Any, name: str = "topology") -> Topology:
    """Return a topology.

    Raises:
        ArgumentError: it is something else.
    """
    if not isinstance(topology, Topology):
        how = "; read_topology reads a file, and load_preset a preset" if isinstance(topology, str) else ""
        raise ArgumentError(f"{name} must be a Topology, not {type(topology).__name__}{how}")
    return topology


def _check_ranks(ranks: Iterable[Any]) -> tuple[int, ...]:
    try:
        numbers = tuple(map(index, ranks))
    except TypeError:
        raise ArgumentError(f"ranks must be a sequence of integers, not {brief(ranks)}") from None
    if numbers and min(numbers) < 0:
        raise ArgumentError(f"rank {brief(min(numbers))} is outside 0..{MAX_RANK}")
    return numbers


def _describe_hosts(kind: tuple[int, tuple[Link, ...]], number: int) -> str:
    ranks, nics = kind
    links = " and ".join(f"{count} x {_describe_link(link)}" for link, count in Counter(nics).items())
    return f"{number} x ({count_of(ranks, 'rank')}, NICs {links})"


def _describe_link(link: Link) -> str:
    out, into = format_rate(link.egress_bytes_per_second), format_rate(link.ingress_bytes_per_second)
    return out if out == into else f"{out} out, {into} in"


def _check_latency(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)) or not 0 <= value <= 1:
        raise TopologyError(f"{name} is {brief(value)}; it must be a number of seconds from 0 to 1")
    return float(value)


def check_indices(values: Iterable[Any], name: str) -> tuple[int, ...]:
    """``values`` as a tuple of integers; raises TopologyError unless all are from 0 to MAX_RANK."""
    try:
        numbers = tuple(map(index, values))
    except TypeError as error:
        raise TopologyError(f"{name} must be integers: {error}") from None
    if len(numbers) > MAX_RANKS:
        raise TopologyError(f"a topology has at most {MAX_RANKS} ranks, not {len(numbers)}")
    if numbers and not 0 <= min(numbers) <= max(numbers) <= MAX_RANK:
        raise TopologyError(f"{name} must be from 0 to {MAX_RANK}; got a negative or larger one")
    return numbers
