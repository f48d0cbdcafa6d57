"""The whole choice of how tensors travel, as one frozen value that is the same on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.dim_cuts import check_shape
from reshard.dtypes import ITEMSIZE, dtype_name
from reshard.errors import ArgumentError, PlanError
from reshard.layout import AnyLayout, Layout, RegionLayout
from reshard.names import compare_names
from reshard.shards import Shards, cut_shards, mix_rows
from reshard.tasks import UnitTasks, count_unit_tasks, cut_unit_tasks
from reshard.topology import Topology
from reshard.transfers import Transfers

if TYPE_CHECKING:
    from reshard.bound import Bound

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


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to move: its global shape and dtype, and both layouts.

    ``name`` tells tensors of one plan apart in messages to people; it is None for a single tensor.

    Raises:
        LayoutError, ArgumentError: the shape, dtype or a layout does not fit.
    """

    shape: tuple[int, ...]
    dtype: str
    src: AnyLayout
    dst: AnyLayout
    name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_shape(self.shape))
        for side in (self.src, self.dst):
            if not isinstance(side, (Layout, RegionLayout)):
                raise ArgumentError(f"a layout must be a Layout or a RegionLayout, not {type(side).__name__}")
        if self.name is not None and not isinstance(self.name, str):
            raise ArgumentError(f"the name of a tensor must be a string, not {self.name!r}")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.shape)

    @cached_property
    def src_shards(self) -> Shards:
        """Who holds what."""
        return cut_shards(self.src, self.shape)

    @cached_property
    def dst_shards(self) -> Shards:
        """Who needs what."""
        return cut_shards(self.dst, self.shape)

    @cached_property
    def tasks(self) -> UnitTasks:
        """The unit tasks between the two."""
        return cut_unit_tasks(self.src_shards, self.dst_shards)

    @property
    def num_holdings(self) -> int:
        """How many entries the larger of the holders and the needers of its tasks has, padding included."""
        count = count_unit_tasks(self.src_shards, self.dst_shards)
        replicas = max(self.src_shards.ranks.shape[1], self.dst_shards.ranks.shape[1])
        return (len(self.tasks) if count is None else count) * replicas

    def __str__(self) -> str:
        name = f"{self.name} " if self.name is not None else ""
        return f"{name}{self.dtype} {list(self.shape)}: {self.src} => {self.dst}"


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
        topology = {name: value for name, value in self.topology.to_json().items() if value != 0}
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

    @cached_property
    def lower_bound_seconds(self) -> float:
        """No plan is faster on this topology; see :func:`reshard.lower_bound`."""
        return self.bound.seconds

    @cached_property
    def bound(self) -> Bound:
        """The lower bound, and in words which links make it."""
        from reshard.bound import find_bound

        return find_bound(self.tensors, self.topology)

    @cached_property
    def predicted_seconds(self) -> float | None:
        """What the plan takes on its topology by :func:`reshard.simulate`; None if it is too large to simulate."""
        from reshard.simulation import MAX_SIMULATED, simulate

        if self.num_messages * len(self.ranks) > MAX_SIMULATED:
            return None
        return simulate(self).makespan_seconds

    @cached_property
    def latency_part(self) -> float:
        """How much of :attr:`predicted_seconds` latencies and turns make, from 0 to 1: the bound counts none of them.

        0 where the plan is too large to simulate.
        """
        from reshard.simulation import simulate

        free = self.topology.without_latency()
        if not self.predicted_seconds or free == self.topology:
            return 0.0
        return max(1.0 - simulate(self, free).makespan_seconds / self.predicted_seconds, 0.0)

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
        from reshard.plan_text import format_plan

        return format_plan(self)

    def __repr__(self) -> str:
        return (
            f"<Plan {self.plan_hash[:12]} {self.strategy}: {len(self.tensors)} tensors, {self.num_messages} messages>"
        )

    def to_json(self, rank: int | None = None) -> dict[str, Any]:
        """The plan as the JSON contract of ``docs/plan-json.md``; with ``rank`` only its messages."""
        from reshard.plan_json import plan_to_json

        return plan_to_json(self, rank)


@dataclass(frozen=True)
class Message:
    """What passes from one rank to another at once: one chunk, or several small boxes together.

    Attributes:
        id: the id of its first box; box ``i`` of it has id ``id + i``.
        boxes: ``(tensor, start, stop)`` of each box, in elements.
        source: the id of the message that brings the same boxes to the sender, None if it holds them.
        after: the ids of further messages, by their last box, that must have completed.
    """

    id: int
    transfer: int
    chunk: int
    sender: int
    receiver: int
    boxes: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    source: int | None
    after: tuple[int, ...]
    window: int


def expand_messages(plan: Plan, rank: int | None = None) -> Iterator[Message]:
    """The messages of a plan in its total order; with ``rank``, only those it sends or receives.

    Only the transfers that the rank takes part in are looked at.
    """
    transfers = plan.transfers
    if rank is None:
        chosen: Iterable[int] = range(len(transfers))
    else:
        mine = (transfers.sender == rank) | (transfers.receiver == rank)
        chosen = np.unique(transfers.transfer_of_edge[mine]).tolist()
    for transfer in chosen:
        edges = transfers.edges_of(transfer)
        brought_by: dict[int, int] = {}
        kept: list[tuple[int, int, int, int | None]] = []
        for edge, (sender, receiver) in enumerate(edges):
            if rank is None or rank in (sender, receiver):
                kept.append((edge, sender, receiver, brought_by.get(sender)))
            if sender != receiver:
                brought_by[receiver] = edge
        first_box, num_boxes = int(transfers.first_box[transfer]), int(transfers.num_boxes[transfer])
        base, window = int(transfers.first_message[transfer]), int(transfers.window[transfer])
        fed_by = int(transfers.source[transfer])
        source = int(transfers.first_message[fed_by]) if fed_by >= 0 else None
        order = transfers.after[transfers.after_at[transfer] : transfers.after_at[transfer + 1]]
        after = tuple((transfers.first_message[order[order != fed_by] + 1] - 1).tolist())
        for chunk in range(int(transfers.num_chunks[transfer])):
            if num_boxes == 1:
                bounds = [transfers.chunk_box(transfer, chunk)]
            else:
                bounds = [
                    (transfers.box_start[box].tolist(), transfers.box_stop[box].tolist())
                    for box in range(first_box, first_box + num_boxes)
                ]
            boxes = []
            for i, (start, stop) in enumerate(bounds):
                tensor = int(transfers.box_tensor[first_box + i])
                ndim = plan.tensors[tensor].ndim
                boxes.append((tensor, tuple(start[:ndim]), tuple(stop[:ndim])))
            at = base + chunk * len(edges) * num_boxes
            for edge, sender, receiver, parent in kept:
                yield Message(
                    id=at + edge * num_boxes,
                    transfer=transfer,
                    chunk=chunk,
                    sender=sender,
                    receiver=receiver,
                    boxes=tuple(boxes),
                    source=source if parent is None else at + parent * num_boxes,
                    after=after,
                    window=window,
                )


def message_nbytes(plan: Plan, message: Message) -> int:
    """Bytes of one message."""
    total = 0
    for tensor, start, stop in message.boxes:
        numel = plan.tensors[tensor].itemsize
        for lo, hi in zip(start, stop, strict=True):
            numel *= hi - lo
        total += numel
    return total


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


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """Raise PlanError unless names tell several tensors apart."""
    if not tensors:
        raise PlanError("a plan needs at least one tensor")
    names = [spec.name for spec in tensors]
    if len(tensors) > 1 and (None in names or len(set(names)) != len(names)):
        raise PlanError(f"{len(tensors)} tensors need {len(tensors)} different names, not {names}")
