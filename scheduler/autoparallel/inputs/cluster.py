"""The devices that a training plan may use: hosts, links and the memory of each device."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from reshard.arguments import check_arguments
from reshard.errors import ArgumentError, TopologyError
from reshard.formatting import brief, format_names
from reshard.sharding import check_integer
from reshard.topology import Topology, topology_to_json
from reshard.topology.topology import check_topology

#: A cluster with less memory per device is refused: its unit is probably wrong.
MIN_MEMORY_BYTES = 1 << 20
#: A choice is a number of devices of each type on each host and an order of the hosts. If a cluster has at most this
#: many choices, all are parts.
MAX_COMBINATIONS = 50
#: Rate inside hosts if the topology gives none.
UNLIMITED_BYTES_PER_SECOND = 1e15


@dataclass(frozen=True)
class Cluster:
    """Hosts and links of all ranks, and the memory of each device.

    Args:
        topology: hosts and links. Ranks of a host must be consecutive.
        memory_limit_bytes: memory of every device, a list with the memory of each device, or ``{type of device:
            memory}``.
        num_ranks: number of ranks to use, from rank 0; 0: all of the topology.
        device_types: the type of each device; empty: all devices are alike. With types, a search needs a profile for
            each type.

    Raises:
        ArgumentError: the memory of a device is less than 1 MiB or not a number, a list has another length, or a
            device has a type without memory.
        TopologyError: the topology has fewer ranks or none, or the ranks of a host are not consecutive.
    """

    topology: Topology
    memory_limit_bytes: float | tuple[float, ...] | Mapping[str, float]
    num_ranks: int = 0
    device_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_topology(self.topology, "the topology of a Cluster")
        count = len(self.topology.host_of_rank)
        if type(self.num_ranks) is not int or not 0 <= self.num_ranks <= count or not count:
            raise TopologyError(f"the topology has {count} ranks, but the cluster should have {self.num_ranks}")
        object.__setattr__(self, "num_ranks", self.num_ranks or count)
        self._check_device_types()
        if isinstance(self.memory_limit_bytes, str):
            raise ArgumentError(
                f"memory_limit_bytes is {brief(self.memory_limit_bytes)}; it must be a number: write 80e9 for 80 GB"
            )
        if not isinstance(self.memory_limit_bytes, (int, float)):
            if not isinstance(self.memory_limit_bytes, Sequence):
                raise ArgumentError(
                    f"memory_limit_bytes is {brief(self.memory_limit_bytes)}; it must be a number of bytes, or a list "
                    "with one for each device"
                )
            object.__setattr__(self, "memory_limit_bytes", tuple(self.memory_limit_bytes))
        values = self.memory_limit_bytes if isinstance(self.memory_limit_bytes, tuple) else (self.memory_limit_bytes,)
        if isinstance(self.memory_limit_bytes, tuple) and len(values) != self.num_ranks:
            raise ArgumentError(f"memory_limit_bytes has {len(values)} entries, but there are {self.num_ranks} devices")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= MIN_MEMORY_BYTES:
                raise ArgumentError(
                    f"memory_limit_bytes is {brief(value)}; it is bytes, at least {MIN_MEMORY_BYTES:,}: "
                    "write 80e9 for 80 GB"
                )
        hosts = [host for host, _ in itertools.groupby(self.topology.host_of_rank[: self.num_ranks])]
        if len(set(hosts)) < len(hosts):
            raise TopologyError(f"the ranks of a host must be consecutive, but hosts follow each other as {hosts}")

    def _check_device_types(self) -> None:
        """Check the types, and find the memory of each device if it is given for each type."""
        types = self.device_types
        if (
            isinstance(types, str)
            or not isinstance(types, Sequence)
            or not all(isinstance(device_type, str) for device_type in types)
        ):
            raise ArgumentError(f"device_types is {brief(types)}; it must be a list with the type of each device")
        if types and len(types) != self.num_ranks:
            raise ArgumentError(f"device_types has {len(types)} entries, but there are {self.num_ranks} devices")
        object.__setattr__(self, "device_types", tuple(types))
        limits = self.memory_limit_bytes
        if isinstance(limits, Mapping):
            missing = next((device_type for device_type in types if device_type not in limits), None)
            if missing is not None or not types:
                raise ArgumentError(
                    f"memory_limit_bytes is for devices of type {format_names(limits)}; "
                    + (f"it lacks {missing!r}" if types else "device_types must then say the type of each device")
                )
            object.__setattr__(self, "memory_limit_bytes", tuple(limits[device_type] for device_type in types))

    @cached_property
    def hosts(self) -> tuple[tuple[int, int, int], ...]:
        """``(host, first rank, end)`` of each host, in the order of the ranks."""
        hosts, at = [], 0
        for host, ranks in itertools.groupby(self.topology.host_of_rank[: self.num_ranks]):
            size = len(list(ranks))
            hosts.append((host, at, at + size))
            at += size
        return tuple(hosts)

    @check_arguments()
    def select(self, ranks: Sequence[int]) -> Cluster:
        """The cluster of some ranks, which become 0, 1, ... in the given order."""
        limit = self.memory_limit_bytes
        memory = tuple(limit[rank] for rank in ranks) if isinstance(limit, tuple) else limit
        types = tuple(self.device_types[rank] for rank in ranks) if self.device_types else ()
        return Cluster(self.topology.select(ranks), memory, device_types=types)

    @check_arguments()
    def types_of(self, first: int, end: int) -> tuple[str, ...]:
        """The types of devices among ranks ``first`` to ``end - 1``, sorted; empty if all devices are alike."""
        return tuple(sorted(set(self.device_types[first:end])))

    def with_faster_links(self, factor: float) -> Cluster:
        """The same cluster with links ``factor`` times as fast."""
        return replace(self, topology=self.topology.with_faster_links(factor))

    @check_arguments()
    def parts(self, speeds: Mapping[str, float] | None = None) -> list[tuple[int, ...]]:
        """The ranks of parts of the cluster that may be faster than the whole: their devices or links are faster.

        Usually the parts are: one device, some devices of a host, each host, the devices of each type on each host and
        on all hosts, and the first hosts by rate and by speed. A small cluster has at most :data:`MAX_COMBINATIONS`
        choices of a number of devices of each type on each host and an order of the hosts, or of a number of the
        fastest devices on each host. Its parts are these choices, and the devices of each type on each host. The
        fastest devices of a host come first. Of equal parts, only the first is listed.

        Args:
            speeds: the speed of each type of device.
        """
        speeds = speeds or {}
        hosts = [self._fastest_first(first, end, speeds) for _, first, end in self.hosts]
        parts = list(_combinations([self._subsets(ranks) for ranks in hosts]))
        parts = parts or list(_combinations([_prefixes(ranks) for ranks in hosts]))
        if not parts:
            for ranks in hosts:
                sizes = [1 << power for power in range(len(ranks).bit_length()) if 1 << power < len(ranks)]
                parts += [ranks[:size] for size in (*sizes, len(ranks))]
            for ordered in self._host_orders(hosts, speeds):
                for count in range(2, len(ordered) + 1):
                    if len(self.hosts) <= 8 or count & (count - 1) == 0 or count == len(ordered):
                        parts.append(tuple(itertools.chain.from_iterable(ordered[:count])))
        for device_type in sorted(set(self.device_types)):
            parts += self._of_type(device_type, hosts)
        every = tuple(range(self.num_ranks))
        kinds = {self.select(ranks).hash: ranks for ranks in reversed(parts) if ranks != every}
        return sorted(kinds.values(), key=lambda ranks: (len(ranks), ranks))

    def _fastest_first(self, first: int, end: int, speeds: Mapping[str, float]) -> tuple[int, ...]:
        """Ranks ``first`` to ``end - 1``: the fastest devices first, then those with the most memory."""

        def key(rank: int) -> tuple[float, float]:
            speed = speeds.get(self.device_types[rank], 0.0) if self.device_types else 0.0
            return -speed, -self.memory_of(rank, rank + 1)

        return tuple(sorted(range(first, end), key=key))

    def _subsets(self, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Ranks of a host: each number of devices of each type and memory, in the given order."""
        kinds: dict[tuple[str, float], list[int]] = {}
        for rank in ranks:
            device_type = self.device_types[rank] if self.device_types else ""
            kinds.setdefault((device_type, self.memory_of(rank, rank + 1)), []).append(rank)
        firsts = (_prefixes(tuple(alike)) for alike in kinds.values())
        return [tuple(itertools.chain.from_iterable(chosen)) for chosen in itertools.product(*firsts)]

    def _of_type(self, device_type: str, hosts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The ranks of a type of device on each host that has any."""
        by_host = (tuple(rank for rank in ranks if self.device_types[rank] == device_type) for ranks in hosts)
        return [ranks for ranks in by_host if ranks]

    def _host_orders(
        self, hosts: Sequence[tuple[int, ...]], speeds: Mapping[str, float]
    ) -> Iterator[list[tuple[int, ...]]]:
        """Hosts with the fastest links first, hosts with the fastest devices first, and the devices of each type."""

        def rate(ranks: tuple[int, ...]) -> float:
            return -self.nic_bytes_per_second(self.host_of(ranks[0]))

        by_rate = sorted(hosts, key=rate)
        yield by_rate
        if self.device_types:
            slowest = {ranks: min(speeds.get(self.device_types[rank], 0.0) for rank in ranks) for ranks in hosts}
            yield sorted(hosts, key=lambda ranks: (-slowest[ranks], rate(ranks)))
            for device_type in sorted(set(self.device_types)):
                yield self._of_type(device_type, by_rate)

    @cached_property
    def hash(self) -> str:
        """Hash of the links, the memory and the types of devices."""
        text = f"{topology_to_json(self.topology)} {self.memory_limit_bytes} {self.num_ranks}"
        text += f" {self.device_types}" if self.device_types else ""
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def host_of(self, rank: int) -> int:
        """The host of a rank."""
        check_integer(rank, "rank", 0, self.num_ranks - 1)
        return self.topology.host_of_rank[rank]

    @check_arguments()
    def hosts_of(self, first: int, end: int) -> tuple[tuple[int, int, int], ...]:
        """``(host, first rank, end)`` of each host of ranks ``first`` to ``end - 1``, without its other ranks."""
        at, stop = bisect.bisect_right(self._first_ranks, first) - 1, bisect.bisect_left(self._first_ranks, end)
        return tuple((h, max(a, first), min(b, end)) for h, a, b in self.hosts[max(at, 0) : stop] if b > first)

    @check_arguments()
    def is_mesh(self, first: int, end: int) -> bool:
        """Whether ranks ``first`` to ``end - 1`` are on one host, or are all ranks of their hosts."""
        at, last = (bisect.bisect_right(self._first_ranks, rank) - 1 for rank in (first, end - 1))
        return at == last or (self.hosts[at][1] == first and self.hosts[last][2] == end)

    @cached_property
    def host_starts(self) -> frozenset[int]:
        """First rank of each host."""
        return frozenset(first for _, first, _ in self.hosts)

    @cached_property
    def host_ends(self) -> frozenset[int]:
        """End of the ranks of each host."""
        return frozenset(end for _, _, end in self.hosts)

    @cached_property
    def _first_ranks(self) -> list[int]:
        """First rank of each host, ascending."""
        return [first for _, first, _ in self.hosts]

    @check_arguments()
    def memory_of(self, first: int, end: int) -> float:
        """The least memory in bytes of a device of ranks ``first`` to ``end - 1``."""
        limit = self.memory_limit_bytes
        assert not isinstance(limit, Mapping)  # it was replaced by a tuple
        return min(limit[first:end]) if isinstance(limit, tuple) else limit

    @check_arguments()
    def nic_bytes_per_second(self, host: int) -> float:
        """The rate of all NICs of a host together, in its slower direction. The uplinks of pods are ignored."""
        described = self.topology.host(host)
        return min(described.egress_bytes_per_second, described.ingress_bytes_per_second)

    @property
    def inside_bytes_per_second(self) -> float:
        """The rate of a device to others on its host."""
        return self.topology.inside_bytes_per_second or UNLIMITED_BYTES_PER_SECOND

    @cached_property
    def mesh_sizes(self) -> tuple[int, ...]:
        """Numbers of devices that a stage may have: a power of two on one host, or all devices of consecutive hosts.

        In a cluster of more than 8 hosts, the number of hosts is a power of two, or all.
        """
        largest = max(end - first for _, first, end in self.hosts)
        sizes = {1 << power for power in range(largest.bit_length()) if 1 << power <= largest}
        counts = range(1, len(self.hosts) + 1)
        for count in counts:
            if len(self.hosts) <= 8 or count & (count - 1) == 0 or count == len(self.hosts):
                for index in range(len(self.hosts) - count + 1):
                    sizes.add(self.hosts[index + count - 1][2] - self.hosts[index][1])
        return tuple(sorted(sizes))


def _prefixes(ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The first ranks of a host, for each number of ranks."""
    return [ranks[:count] for count in range(len(ranks), -1, -1)]


def _combinations(choices: Sequence[Sequence[tuple[int, ...]]]) -> Iterator[tuple[int, ...]]:
    """All choices of the ranks of each host and an order of the hosts; nothing if there are too many.

    Args:
        choices: for each host, the ranks that may be chosen.
    """
    if math.prod(map(len, choices)) * math.factorial(len(choices)) > MAX_COMBINATIONS:
        return
    for chosen in itertools.product(*choices):
        for order in itertools.permutations(filter(None, chosen)):
            if order:
                yield tuple(itertools.chain.from_iterable(order))


def hosts_are_alike(cluster: Cluster) -> bool:
    """Whether all hosts are alike. The cost of an edge then depends only on the relative positions of its ranks."""
    topology = cluster.topology
    sizes = {end - first for _, first, end in cluster.hosts}
    in_order = [host for host, _, _ in cluster.hosts] == list(range(len(cluster.hosts)))
    return len(topology.hosts) == 1 and not topology.pods and len(sizes) == 1 and in_order
