"""The messages of a plan: all as one table, or all or those of one rank as an iterator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.plan.value.plan import Plan
from reshard.plan.value.rotation_plan import ROTATION_INSIDE_WINDOW, RotationPlan
from reshard.plan.value.transfers import GATHERED, PlanTransfers
from reshard.ragged import ranges


@dataclass(frozen=True, eq=False)
class MessageTable:
    """One row per message, in the plan's total order; a message of several boxes has one row.

    All arrays are int64. Their shape is ``(messages,)`` unless noted.

    Attributes:
        id: id of the first box of the message.
        transfer, chunk: index of the transfer, and of the chunk of its region, that the message moves.
        sender, receiver: ranks, equal for a local copy.
        nbytes: size in bytes.
        source: row of the message that brings the data to the sender, -1 if the sender holds the data, ``GATHERED`` if
            several messages bring it; see ``gathered``.
        after_offsets, after: ``(messages + 1,)`` and rows: message ``i`` starts after the messages in rows
            ``after[after_offsets[i]:after_offsets[i + 1]]`` have finished.
        window: limit on unfinished messages of the sender, this one included.
        gathered: ``(pairs, 2)`` the row of each gathered message with that of each message that brings boxes of it.
    """

    id: np.ndarray
    transfer: np.ndarray
    chunk: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    nbytes: np.ndarray
    source: np.ndarray
    after_offsets: np.ndarray
    after: np.ndarray
    window: np.ndarray
    gathered: np.ndarray

    def __len__(self) -> int:
        return len(self.id)

    @cached_property
    def brings(self) -> tuple[np.ndarray, np.ndarray]:
        """``(later, earlier)``: the rows of each message and of each message that brings some of its data."""
        fed = np.flatnonzero(self.source >= 0)
        return np.concatenate([fed, self.gathered[:, 0]]), np.concatenate([self.source[fed], self.gathered[:, 1]])


def tabulate_messages(plan: Plan) -> MessageTable:
    """The table of all messages of a plan."""
    transfers = plan.transfers
    if (np.diff(transfers.edge_offsets) == 1).all() and (transfers.splits == 1).all():
        return _tabulate_single_messages(plan)
    num_edges = np.diff(transfers.edge_offsets)
    num_boxes = transfers.num_boxes
    counts = num_edges * transfers.num_chunks
    first_row = np.concatenate([[0], np.cumsum(counts)])
    transfer = np.repeat(np.arange(len(transfers)), counts)
    within = np.arange(len(transfer)) - first_row[transfer]
    chunk = within // num_edges[transfer]
    edge = within - chunk * num_edges[transfer]
    edge_row = transfers.edge_offsets[transfer] + edge
    parent_edge = _parent_edges(plan)[edge_row]
    source = np.where(parent_edge < 0, -1, first_row[transfer] + chunk * num_edges[transfer] + parent_edge)
    after_offsets, after = np.concatenate([[0], np.cumsum(source >= 0)]), source[source >= 0]
    if len(transfers.after):
        outer = transfers.source[transfer]
        source = np.where((source < 0) & (outer >= 0), first_row[outer], source)
        source[outer == GATHERED] = GATHERED
        num_after = np.diff(transfers.after_offsets)[transfer]
        within_tree = np.flatnonzero(parent_edge >= 0)
        later = np.concatenate([np.repeat(np.arange(len(transfer)), num_after), within_tree])
        earlier = np.concatenate(
            [first_row[transfers.after[ranges(transfers.after_offsets[transfer], num_after)]], source[within_tree]]
        )
        order = np.argsort(later, kind="stable")
        after_offsets = np.concatenate([[0], np.cumsum(np.bincount(later, minlength=len(transfer)))])
        after = earlier[order]
    return MessageTable(
        id=transfers.first_message[transfer] + within * num_boxes[transfer],
        transfer=transfer,
        chunk=chunk,
        sender=transfers.sender[edge_row],
        receiver=transfers.receiver[edge_row],
        nbytes=_chunk_bytes(plan, transfer, chunk),
        source=source,
        after_offsets=after_offsets,
        after=after,
        window=transfers.window[transfer],
        gathered=first_row[transfers.gathered],
    )


def _tabulate_single_messages(plan: Plan) -> MessageTable:
    """The table of a plan whose transfers are one message each."""
    transfers = plan.transfers
    count = len(transfers)
    return MessageTable(
        id=transfers.first_message[:-1],
        transfer=transfers.edge_offsets[:-1],
        chunk=np.zeros(count, dtype=np.int64),
        sender=transfers.sender,
        receiver=transfers.receiver,
        nbytes=plan.message_bytes,
        source=transfers.source,
        after_offsets=transfers.after_offsets,
        after=transfers.after,
        window=transfers.window,
        gathered=transfers.gathered,
    )


def _parent_edges(plan: Plan) -> np.ndarray:
    """``(edges,)`` position in its transfer of the last earlier edge into the edge's sender, -1 if there is none."""
    transfers = plan.transfers
    sender, receiver, edge_offsets = transfers.sender, transfers.receiver, transfers.edge_offsets
    edge = np.arange(len(sender))
    position = edge - edge_offsets[transfers.transfer_of_edge]
    brings = sender != receiver
    parents = np.full(len(sender), -1, dtype=np.int64)
    chained = np.zeros(len(sender), dtype=bool)
    chained[1:] = (position[1:] > 0) & brings[:-1] & (receiver[:-1] == sender[1:])
    parents[chained] = position[chained] - 1
    unresolved = edge[(position > 0) & ~chained]
    if not len(unresolved):
        return parents
    sources = edge[brings & (np.diff(edge_offsets)[transfers.transfer_of_edge] > 1)]
    width = 1 + max(int(sender.max()), int(receiver.max()))
    _, pair = np.unique(  # a number for each (transfer, rank)
        np.concatenate(
            [
                transfers.transfer_of_edge[part] * width + end[part]
                for part, end in ((sources, receiver), (unresolved, sender))
            ]
        ),
        return_inverse=True,
    )
    keys = np.sort(pair[: len(sources)] * len(sender) + sources)
    wanted = pair[len(sources) :]
    at = np.searchsorted(keys, wanted * len(sender) + unresolved) - 1
    key = keys[np.maximum(at, 0)] if len(keys) else np.full(len(at), -1)
    known = (at >= 0) & (key // len(sender) == wanted)
    parents[unresolved[known]] = position[key[known] % len(sender)]
    return parents


def find_gathered_boxes(transfers: PlanTransfers, chosen: np.ndarray) -> np.ndarray:
    """The id of the box that brings each box of gathered transfers to their sender; -1 if the sender holds the box.

    Args:
        chosen: ``(n,)`` gathered transfers.

    Returns:
        ``(boxes,)`` ids, for all boxes of the first transfer, then of the next one.
    """
    pairs = transfers.gathered
    pairs = pairs[np.isin(pairs[:, 0], chosen)]

    def boxes_of(owner: np.ndarray, transfer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows ``(owner, tensor, start, stop)`` of all boxes of the transfers, and the ids of the boxes."""
        count = transfers.num_boxes[transfer]
        box = ranges(transfers.first_box[transfer], count)
        columns = np.repeat(owner, count)[:, None], transfers.box_tensor[box, None]
        rows = np.concatenate([*columns, transfers.box_start[box], transfers.box_stop[box]], axis=1)
        return rows, ranges(transfers.first_message[transfer], count)

    wanted = boxes_of(chosen, chosen)[0]
    brought, ids = boxes_of(pairs[:, 0], pairs[:, 1])
    _, number = np.unique(np.concatenate([brought, wanted]), axis=0, return_inverse=True)
    number = number.reshape(-1)  # NumPy 2.0 gives it another shape
    brought_by = np.full(int(number.max(initial=-1)) + 1, -1, dtype=np.int64)
    brought_by[number[: len(ids)]] = ids
    return brought_by[number[len(ids) :]]


def cut_chunks(
    transfers: PlanTransfers, transfer: np.ndarray, chunk: np.ndarray, box: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``(start, stop)``, each ``(n, ndim)``: chunk ``chunk[i]`` of box ``box[i]``, which is in ``transfer[i]``.

    Cuts like :meth:`PlanTransfers.chunk_box`.
    """
    start, stop = transfers.box_start[box], transfers.box_stop[box]
    cut = np.flatnonzero(transfers.num_chunks[transfer] > 1)
    rest = chunk[cut]
    for dim in range(start.shape[1] - 1, -1, -1):
        parts = transfers.splits[transfer[cut], dim]
        rest, part = np.divmod(rest, parts)
        low = start[cut, dim]
        whole, over = np.divmod(stop[cut, dim] - low, parts)
        start[cut, dim] = low + whole * part + over * part // parts
        stop[cut, dim] = low + whole * (part + 1) + over * (part + 1) // parts
    return start, stop


def _chunk_bytes(plan: Plan, transfer: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    transfers = plan.transfers
    box = transfers.first_box[transfer]
    start, stop = cut_chunks(transfers, transfer, chunk, box)
    itemsize = np.array([spec.itemsize for spec in plan.tensors], dtype=np.int64)[transfers.box_tensor[box]]
    numel = (stop - start).prod(axis=1, dtype=np.int64)
    return np.where(transfers.num_boxes[transfer] > 1, plan.message_bytes[transfer], numel * itemsize)


@dataclass(frozen=True)
class Message:
    """One message between two ranks: one chunk of a box, or several small boxes.

    Attributes:
        id: id of the first box; box ``i`` has id ``id + i``.
        transfer, chunk: index of the transfer, and of the chunk of its region, that the message moves.
        sender, receiver: ranks, equal for a local copy.
        boxes: ``(tensor, start, stop)`` of each box: index of the tensor, and bounds in elements of that tensor.
        source: id of the message that brings the same boxes to the sender; None if the sender holds or gathers them.
        after: other messages that must have finished before this one starts, each given by the id of its last box.
        window: limit on unfinished messages of the sender, this one included.
        gathered: of a gathered message, the id of the box that brings each of its boxes to the sender, None for a box
            that the sender holds. Otherwise empty.
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
    gathered: tuple[int | None, ...] = ()


def expand_messages(plan: Plan, rank: int | None = None) -> Iterator[Message]:
    """Iterate over the messages of a plan in its total order.

    Args:
        plan: the plan.
        rank: yield only messages that this rank sends or receives. Transfers of other ranks are then not expanded.
    """
    if rank is not None and isinstance(plan, RotationPlan):
        yield from _expand_rotation(plan, rank)
        return
    transfers = plan.transfers
    if rank is None:
        chosen: Iterable[int] = range(len(transfers))
    else:
        mine = (transfers.sender == rank) | (transfers.receiver == rank)
        chosen = np.unique(transfers.transfer_of_edge[mine]).tolist()
    gathered = _list_gathered(transfers, rank)
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
        source_transfer = int(transfers.source[transfer])
        source = int(transfers.first_message[source_transfer]) if source_transfer >= 0 else None
        order = transfers.after[transfers.after_offsets[transfer] : transfers.after_offsets[transfer + 1]]
        after = tuple((transfers.first_message[order[order != source_transfer] + 1] - 1).tolist())
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
                    gathered=gathered.get(transfer, ()),
                )


def _list_gathered(transfers: PlanTransfers, rank: int | None) -> dict[int, tuple[int | None, ...]]:
    """:attr:`Message.gathered` of all gathered transfers, or of the gathered transfers of one rank."""
    chosen = np.flatnonzero(transfers.source == GATHERED)
    if rank is not None:
        chosen = chosen[transfers.sender[transfers.edge_offsets[chosen]] == rank]
    if not len(chosen):
        return {}
    ids = [None if ident < 0 else ident for ident in find_gathered_boxes(transfers, chosen).tolist()]
    ends = np.cumsum(transfers.num_boxes[chosen]).tolist()
    return {
        transfer: tuple(ids[begin:end]) for transfer, begin, end in zip(chosen.tolist(), [0, *ends], ends, strict=False)
    }


def _expand_rotation(plan: RotationPlan, rank: int) -> Iterator[Message]:
    """The messages of one rank of a plan in closed form."""
    own = plan.own_messages(rank)
    rows = []
    for tensor, part in enumerate(own):
        columns = part.key, part.source, part.sender, part.receiver, part.lane, part.start, part.stop
        rows += [(*row, tensor) for row in zip(*(column.tolist() for column in columns), strict=True)]
    for key, source, sender, receiver, lane, start, stop, tensor in sorted(rows):
        yield Message(
            id=key,
            transfer=key,
            chunk=0,
            sender=sender,
            receiver=receiver,
            boxes=((tensor, tuple(start), tuple(stop)),),
            source=None if source < 0 else source,
            after=(),
            window=plan.window if lane >= 0 else ROTATION_INSIDE_WINDOW,
        )


def name_box(message_id: int, box_id: int, num_boxes: int) -> str:
    """``message 3``, or ``message 3 (box id 5)`` if the message has several boxes."""
    return f"message {message_id}" + (f" (box id {box_id})" if num_boxes > 1 else "")


def message_nbytes(plan: Plan, message: Message) -> int:
    """Bytes of one message."""
    return sum(box_nbytes(plan, box) for box in message.boxes)


def box_nbytes(plan: Plan, box: tuple[int, Sequence[int], Sequence[int]]) -> int:
    """Bytes of a box ``(tensor, start, stop)`` of a plan."""
    tensor, start, stop = box
    return plan.tensors[tensor].itemsize * math.prod(hi - lo for lo, hi in zip(start, stop, strict=True))
