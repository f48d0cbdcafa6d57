"""The whole choice of how tensors travel, as one frozen value that is the same on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from reshard.errors import ArgumentError
from reshard.formatting import compare_names
from reshard.plan.text_writer import format_plan
from reshard.plan.transfers import Transfers
from reshard.ragged import mix_rows
from reshard.sharding.tensor_spec import TensorSpec
from reshard.topology.files import topology_to_json
from reshard.topology.model import Topology

#: Bytes that a rank may hold beyond its source and destination shards.
DEFAULT_STAGING_BYTES = 64 * 2**20
#: How many receives a rank posts ahead of the first unfinished one, at most.
RECVS_AHEAD = 8


def recvs_ahead(window: int) -> int:
    """How close behind a rank's first unfinished receive a message of this window must be to be let in.

    A sender starts when its receiver has posted the receive, so this is what keeps the senders into one receiver in
    the plan's order. Messages that pass from host to host come with window 2 and are let in two at a time: with eight,
    a broadcast from four senders of one host took 1.15 times the bound in place of 1.07 on emulated hosts, as later
    chains take the link from earlier ones.
    """
    return min(RECVS_AHEAD, window if window <= 2 else 2 * window)


def num_recv_slots(staging_bytes: int, largest_nbytes: int) -> int:
    """How many messages a rank can stage on their way in: half of its staging, cut by its largest message."""
    return max(1, min(RECVS_AHEAD, staging_bytes // 2 // max(largest_nbytes, 1)))


@dataclass(frozen=True, eq=False)
class Plan:
    """Which messages move tensors from their source to their destination layouts, in one total order.

    The order is that of the transfers, then of chunks, then of edges: chunk 0 passes along the whole tree,
    then chunk 1. Message ids count in it. Plans are equal when their :attr:`plan_hash` is.

    Attributes:
        tensors: what moves. topology: who is where. strategy: what chose it.
        transfers: how it moves. staging_bytes: what a rank may hold beyond its shards.
    """

    tensors: tuple[TensorSpec, ...]
    topology: Topology
    strategy: str
    transfers: Transfers
    staging_bytes: int = DEFAULT_STAGING_BYTES

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The union of source and destination ranks, ascending."""
        return tuple(sorted({rank for spec in self.tensors for side in (spec.src, spec.dst) for rank in side.ranks}))

    @cached_property
    def is_two_way(self) -> bool:
        """Whether two ranks of different hosts both send to each other."""
        host = self.topology.host_by_rank
        edges = np.unique(np.stack([self.transfers.sender, self.transfers.receiver], axis=1), axis=0)
        across = set(map(tuple, edges[host[edges[:, 0]] != host[edges[:, 1]]].tolist()))
        return any((receiver, sender) in across for sender, receiver in across)

    @cached_property
    def plan_hash(self) -> str:
        """sha256 of everything the plan says, 64 hex digits."""
        digest = hashlib.sha256()
        topology = {name: value for name, value in topology_to_json(self.topology).items() if value != 0}
        header = [[str(spec) for spec in self.tensors], topology, self.strategy, self.staging_bytes]
        digest.update(json.dumps(header).encode())
        for name in Transfers.__dataclass_fields__:
            array = getattr(self.transfers, name)
            if name in ("after_at", "after", "source") and not len(self.transfers.after):
                continue
            if name not in ("box_at", "box_tensor", "box_start", "box_stop", "region"):
                digest.update(repr((name, array.shape)).encode() + array.astype("<i8").tobytes())
        digest.update(self._region_marks()[self.transfers.region].astype("<u8").tobytes())
        return digest.hexdigest()

    def _region_marks(self) -> np.ndarray:
        """``(regions, 2)`` numbers, 128 bits, that stand for the boxes of each region wherever it is stored."""
        transfers = self.transfers
        if not len(transfers.box_tensor):
            return np.zeros((0, 2), dtype=np.uint64)
        columns = transfers.box_tensor[:, None], transfers.box_start, transfers.box_stop
        counts = np.diff(transfers.box_at)
        place = np.arange(len(transfers.box_tensor)) - np.repeat(transfers.box_at[:-1], counts)
        rows = np.concatenate([*columns, place[:, None], np.repeat(counts, counts)[:, None]], axis=1)
        return np.stack([np.add.reduceat(mix_rows(rows, seed), transfers.box_at[:-1]) for seed in (1, 2)], axis=1)

    def by_tensor(self, value: Any) -> list[Any]:
        """What a caller gives for the tensors, one each: ``{name: value}``, or the value where there is one tensor.

        Raises:
            ArgumentError: the names are not those of the plan, or are missing.
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
        """How many messages the plan has, copies included."""
        return int(self.transfers.first_message[-1])

    def count_messages(self, rank: int) -> int:
        """How many messages one rank sends or receives, boxes that travel together counted one by one."""
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
        return np.diff(total[self.transfers.box_at])[self.transfers.region]

    def bytes_moved(self) -> tuple[int, int, int]:
        """Bytes ``(between hosts, between ranks of one host, copied within a rank)``."""
        edge_bytes = self.message_bytes[self.transfers.transfer_of_edge]
        hosts = self.topology.host_by_rank
        sender, receiver = self.transfers.sender, self.transfers.receiver
        copies = sender == receiver
        crosses = hosts[sender] != hosts[receiver]
        return (
            int(edge_bytes[crosses].sum()),
            int(edge_bytes[~crosses & ~copies].sum()),
            int(edge_bytes[copies].sum()),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}  # a copy is not known to be sound

    def __eq__(self, other: object) -> bool:
        return self.plan_hash == other.plan_hash if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.plan_hash)

    def __str__(self) -> str:
        return format_plan(self)

    def __repr__(self) -> str:
        return (
            f"<Plan {self.plan_hash[:12]} {self.strategy}: {len(self.tensors)} tensors, {self.num_messages} messages>"
        )


def vouch_for(plan: Plan) -> Plan:
    """Mark a plan as sound: the planner made it in this process, or the checker passed it.

    The mark is on this one object. It is no part of its value: plans that are replaced, copied, unpickled or parsed
    have none.
    """
    object.__setattr__(plan, "_is_sound", True)
    return plan


def is_sound(plan: Plan) -> bool:
    """Whether somebody vouched for this plan in this process."""
    return vars(plan).get("_is_sound", False) is True
