"""A plan: all messages that move tensors, as one frozen value that is the same on every rank."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.arguments import check_arguments, check_fields
from reshard.drawing import Drawn
from reshard.errors import ArgumentError, PlanError
from reshard.formatting import compare_names, count_of
from reshard.plan.value.hop_graph import build_hop_graph
from reshard.plan.value.text_writer import format_tensor, format_topology, format_transfer
from reshard.plan.value.transfers import PlanTransfers
from reshard.ragged import hash_rows
from reshard.sharding import MAX_RANK, TensorSpec
from reshard.topology import Topology, topology_to_json

if TYPE_CHECKING:
    import networkx as nx

#: Default limit on the bytes that a rank holds beyond its source and destination shards.
DEFAULT_STAGING_BYTES = 64 * 2**20
#: Limit on the receives that a rank posts at once, from its first unfinished one on.
MAX_RECVS_AHEAD = 8


def recvs_ahead(window: int) -> int:
    """The number of receives that a rank may have posted at once, when it posts one for a message with this window.

    A sender starts when its receiver has posted the receive, so this limit keeps the senders to one receiver in the
    plan's order. Messages between hosts have window 2, so a rank posts two at a time. With eight, later chains would
    take bandwidth from earlier chains: on emulated hosts, a broadcast from four senders of one host took 1.15 times the
    lower bound instead of 1.07.
    """
    return min(MAX_RECVS_AHEAD, window if window <= 2 else 2 * window)


def num_recv_slots(staging_bytes: int, largest_nbytes: int) -> int:
    """The number of messages that a rank can stage: half its staging buffer over its largest message, 1 to 8."""
    return max(1, min(MAX_RECVS_AHEAD, staging_bytes // 2 // max(largest_nbytes, 1)))


@dataclass(frozen=True, eq=False)
class Plan(Drawn):
    """The messages that move tensors from their source to their destination layouts, in one total order.

    Messages are ordered and numbered by transfer, then chunk, then edge: chunk 0 passes along the whole tree of its
    transfer, then chunk 1. Plans are equal if their :attr:`plan_hash` is.

    Attributes:
        tensors: the tensors to move.
        topology: the hosts of the ranks, and links.
        strategy: name of the strategy that chose the transfers.
        transfers: regions and the trees that they travel along.
        staging_bytes: limit on the bytes that a rank holds beyond its shards.
    """

    tensors: tuple[TensorSpec, ...]
    topology: Topology
    strategy: str
    transfers: PlanTransfers
    staging_bytes: int = DEFAULT_STAGING_BYTES

    def __post_init__(self) -> None:
        check_fields(self, staging_bytes=(0, 2**62))
        if not self.tensors:
            raise PlanError("a plan has at least one tensor")

    @property
    def is_listed(self) -> bool:
        """Whether the plan holds its transfers; a plan in closed form does not."""
        return True

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The union of source and destination ranks, ascending."""
        return ranks_of(self.tensors)

    @cached_property
    def both_ways(self) -> bool:
        """Whether some two ranks of different hosts send to each other."""
        host = self.topology.host_array
        edges = np.unique(np.stack([self.transfers.sender, self.transfers.receiver], axis=1), axis=0)
        across = set(map(tuple, edges[host[edges[:, 0]] != host[edges[:, 1]]].tolist()))
        return any((receiver, sender) in across for sender, receiver in across)

    @cached_property
    def plan_hash(self) -> str:
        """SHA-256 of the content of the plan, 64 hex digits."""
        digest = hashlib.sha256()
        topology = {name: value for name, value in topology_to_json(self.topology).items() if value != 0}
        header = [[str(spec) for spec in self.tensors], topology, self.strategy, self.staging_bytes]
        digest.update(json.dumps(header).encode())
        for name in PlanTransfers.__dataclass_fields__:
            array = getattr(self.transfers, name)
            if name in ("after_offsets", "after", "source") and not len(self.transfers.after):
                continue
            if name not in ("box_offsets", "box_tensor", "box_start", "box_stop", "region"):
                label = name.replace("_offsets", "_at")  # the name that the hash has always used
                digest.update(repr((label, array.shape)).encode() + array.astype("<i8").tobytes())
        digest.update(self._hash_regions()[self.transfers.region].astype("<u8").tobytes())
        return digest.hexdigest()

    def _hash_regions(self) -> np.ndarray:
        """``(regions, 2)`` 128-bit hash of the boxes of each region, independent of the region's index."""
        transfers = self.transfers
        if not len(transfers.box_tensor):
            return np.zeros((0, 2), dtype=np.uint64)
        columns = transfers.box_tensor[:, None], transfers.box_start, transfers.box_stop
        counts = np.diff(transfers.box_offsets)
        position = np.arange(len(transfers.box_tensor)) - np.repeat(transfers.box_offsets[:-1], counts)
        rows = np.concatenate([*columns, position[:, None], np.repeat(counts, counts)[:, None]], axis=1)
        return np.stack([np.add.reduceat(hash_rows(rows, seed), transfers.box_offsets[:-1]) for seed in (1, 2)], axis=1)

    def by_tensor(self, value: Any) -> list[Any]:
        """A caller's values as a list in tensor order: from ``{name: value}``, None, or the value of one tensor.

        Raises:
            ArgumentError: the names differ from those of the plan, or are missing.
        """
        if isinstance(value, Mapping):
            if self.tensors[0].name is None:
                raise ArgumentError("the plan has one tensor without a name: give the tensor itself, not a dict")
            differences = compare_names(value, [spec.name for spec in self.tensors])
            if differences:
                raise ArgumentError(f"the dict of tensors {differences}; the plan has {len(self.tensors)} tensors")
            return [value[spec.name] for spec in self.tensors]
        if len(self.tensors) > 1 and value is not None:
            raise ArgumentError(f"the plan has {len(self.tensors)} tensors: give {{name: tensor}}")
        return [value] * len(self.tensors)

    @property
    def num_messages(self) -> int:
        """The number of messages, including copies within a rank; a message counts once for each of its boxes."""
        return int(self.transfers.first_message[-1])

    @check_arguments(rank=(0, MAX_RANK))
    def count_messages(self, rank: int) -> int:
        """The number of messages that one rank sends or receives; a message counts once for each of its boxes."""
        transfers = self.transfers
        mine = (transfers.sender == rank) | (transfers.receiver == rank)
        per_edge = transfers.num_boxes * transfers.num_chunks
        return int(per_edge[transfers.transfer_of_edge[mine]].sum())

    @cached_property
    def message_bytes(self) -> np.ndarray:
        """``(transfers,)`` bytes that each transfer sends over each of its edges."""
        numel = (self.transfers.box_stop - self.transfers.box_start).prod(axis=1, dtype=np.int64)
        itemsize = np.array([spec.itemsize for spec in self.tensors], dtype=np.int64)
        total = np.concatenate([[0], np.cumsum(numel * itemsize[self.transfers.box_tensor])])
        return np.diff(total[self.transfers.box_offsets])[self.transfers.region]

    def bytes_moved(self) -> tuple[int, int, int]:
        """Bytes ``(between hosts, between ranks of one host, copied within a rank)``."""
        edge_bytes = self.message_bytes[self.transfers.transfer_of_edge]
        hosts = self.topology.host_array
        sender, receiver = self.transfers.sender, self.transfers.receiver
        copies = sender == receiver
        crosses = hosts[sender] != hosts[receiver]
        return (
            int(edge_bytes[crosses].sum()),
            int(edge_bytes[~crosses & ~copies].sum()),
            int(edge_bytes[copies].sum()),
        )

    def to_networkx(self) -> nx.DiGraph:
        """The hops of the plan and their dependencies as a ``networkx.DiGraph``.

        A node is one hop, ``(transfer, sender, receiver)``. Node attributes:

        * ``nbytes``: bytes of the hop, summed over its chunks.
        * ``num_chunks``: number of chunks.
        * ``crosses_hosts``: whether sender and receiver are on different hosts.

        An edge points from a hop to a later hop that depends on it. Edge attribute ``reason``:

        * "data": the earlier hop brings the data to the sender of the later hop, chunk by chunk.
        * "order": the later transfer starts when the earlier transfer has finished.

        The graph omits copies within a rank. It has no cycles, because a transfer waits only for earlier transfers.
        """
        return build_hop_graph(self.transfers, self.message_bytes, self.topology.host_array)

    def to_text(self, max_transfers: int | None = None) -> str:
        """The plan as text: a header, the topology, the tensors, then a line for each transfer.

        Args:
            max_transfers: leave out the transfers after this number of them.
        """
        lines = [f"plan {self.strategy} staging_bytes={self.staging_bytes}", format_topology(self.topology)]
        for number, spec in enumerate(self.tensors):
            lines.extend(format_tensor(number, spec))
        if self.is_listed:
            chosen = range(len(self.transfers))[:max_transfers]
            lines.extend(format_transfer(self.tensors, self.transfers, number) for number in chosen)
        else:
            lines.append(f"closed form of {self.num_messages} messages")
        return "\n".join(lines) + "\n"

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}  # without cached properties

    def __eq__(self, other: object) -> bool:
        return self.plan_hash == other.plan_hash if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.plan_hash)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        tensors, messages = count_of(len(self.tensors), "tensor"), count_of(self.num_messages, "message")
        return f"<Plan {self.plan_hash[:12]} {self.strategy}: {tensors}, {messages}>"


def ranks_of(tensors: Sequence[TensorSpec]) -> tuple[int, ...]:
    """The ranks of all layouts of the tensors, ascending."""
    layouts = {id(side): side for spec in tensors for side in (spec.src, spec.dst)}
    return tuple(sorted({rank for side in layouts.values() for rank in side.ranks}))


#: Plans that are sound, by ``id``.
_SOUND: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()


def mark_sound(plan: Plan) -> Plan:
    """Mark a plan as sound: the planner made it in this process, or the checker accepted it.

    The mark belongs to this object, not to its value. Plans that are copied, replaced, unpickled or parsed lack it.
    """
    _SOUND[id(plan)] = plan
    return plan


def is_sound(plan: Plan) -> bool:
    """Whether :func:`mark_sound` was called for this plan object."""
    return _SOUND.get(id(plan)) is plan
