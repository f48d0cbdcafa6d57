"""Large groups of a transport such as NCCL: messages that need no buffer, and data for all other ranks.

A message of whole rows is contiguous in every array that holds it. If the arrays are contiguous and not cast, such a
message needs no buffer, and a round may be much larger than the buffer. If every tree of a plan reaches all other
ranks, broadcasts of the transport replace the trees: the transport knows the links inside hosts, and one call serves
all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from reshard.plan import MessageTable, Plan, cut_chunks
from reshard.ragged import NO_RANK
from reshard.runtime.rounds.steps import aligned
from reshard.sharding import Tiles

#: Bytes that a rank sends, and receives, in a round without a buffer.
UNBUFFERED_ROUND_BYTES = 128 * 2**20


@dataclass(frozen=True)
class LargeRounds:
    """The rounds of a plan on such a transport.

    Attributes:
        round_of: the round of each message, by message id.
        unbuffered: ids of the messages that need no buffer if the arrays are contiguous and not cast.
        joined: ``{message id: number}`` of unbuffered messages. Messages with one number are adjacent in the memory of
            both ranks. They are sent and received as one.
        broadcast_of: ``{message id: (number of the broadcast, number of its part)}`` if broadcasts replace the
            messages; else empty. The parts of a broadcast are adjacent in the memory of each rank.
        roots: rank that holds the data, by number of the broadcast.
    """

    round_of: Mapping[int, int]
    unbuffered: frozenset[int]
    joined: Mapping[int, int] = field(default_factory=dict)
    broadcast_of: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    roots: Mapping[int, int] = field(default_factory=dict)


def find_unbuffered(plan: Plan, messages: MessageTable) -> np.ndarray:
    """``(messages,)`` bool: whether a message consists of whole rows, and is neither forwarded nor forwards another."""
    transfers = plan.transfers
    box = transfers.first_box[messages.transfer]
    starts, stops = cut_chunks(transfers, messages.transfer, messages.chunk, box)
    tensor = transfers.box_tensor[box]
    unbuffered = (transfers.num_boxes[messages.transfer] == 1) & (messages.source == -1)
    unbuffered[messages.brings[1]] = False
    return unbuffered & _are_whole_rows(plan, tensor, starts, stops)


def join_messages(plan: Plan, messages: MessageTable, unbuffered: np.ndarray, at: np.ndarray) -> dict[int, int]:
    """Number unbuffered messages between two ranks. Adjacent messages of one round get one number.

    Args:
        unbuffered: ``(n,)`` rows of the table of messages.
        at: ``(n,)`` the round of each of them.
    """
    transfers = plan.transfers
    box = transfers.first_box[messages.transfer[unbuffered]]
    starts, stops = cut_chunks(transfers, messages.transfer[unbuffered], messages.chunk[unbuffered], box)
    tensor = transfers.box_tensor[box]
    if not len(unbuffered) or not starts.shape[1]:
        return {}
    keys = np.stack([at, messages.sender[unbuffered], messages.receiver[unbuffered], tensor])
    order = np.lexsort((starts[:, 0], *keys[::-1]))
    same = (keys[:, order[1:]] == keys[:, order[:-1]]).all(axis=0) & (stops[order[:-1], 0] == starts[order[1:], 0])
    joinable = _are_in_one_piece(plan)
    number = np.cumsum(np.concatenate([[True], ~(same & joinable[tensor[order[1:]]])]))
    return dict(zip(messages.id[unbuffered[order]].tolist(), number.tolist(), strict=True))


def _are_whole_rows(plan: Plan, tensor: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    whole = np.ones(len(tensor), dtype=bool)
    for number, spec in enumerate(plan.tensors):
        indices = np.flatnonzero(tensor == number)
        shape = np.array(spec.shape[1:], dtype=np.int64)
        inner = slice(1, 1 + len(shape))
        whole[indices] = ((starts[indices, inner] == 0) & (stops[indices, inner] == shape)).all(axis=1)
    return whole


@dataclass(frozen=True)
class _Regions:
    """The regions that a plan moves; arrays of length ``regions``, unless noted.

    Attributes:
        rows: ``(moved messages,)`` rows of the messages to other ranks.
        of_row: the region of each.
        tensor: number of the tensor.
        starts, stops: ``(regions, ndim)``, of the first box.
        nbytes: bytes of one message.
        root: the rank that all others receive it from.
        is_direct: whether it consists of whole rows.
    """

    rows: np.ndarray
    of_row: np.ndarray
    tensor: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    nbytes: np.ndarray
    root: np.ndarray
    is_direct: np.ndarray


def find_broadcasts(plan: Plan, messages: MessageTable, moves: np.ndarray, room: int) -> LargeRounds | None:
    """The rounds of broadcasts that replace all messages of a plan; None if some data is not for all other ranks.

    Args:
        moves: ``(messages,)`` whether a message goes to another rank.
        room: bytes of a round that are packed.
    """
    if len(plan.ranks) < 3 or plan.strategy == "send_recv" or not moves.any():
        return None
    regions = _find_regions(plan, messages, np.flatnonzero(moves))
    if regions is None:
        return None
    at, number, part = _assign_broadcasts(plan, regions, room)
    ids = messages.id[regions.rows].tolist()
    of_row = regions.of_row
    return LargeRounds(
        dict(zip(ids, at[of_row].tolist(), strict=True)),
        frozenset(messages.id[regions.rows[regions.is_direct[of_row]]].tolist()),
        {},
        dict(zip(ids, zip(number[of_row].tolist(), part[of_row].tolist(), strict=True), strict=True)),
        dict(zip(number.tolist(), regions.root.tolist(), strict=True)),
    )


def _assign_broadcasts(plan: Plan, regions: _Regions, room: int) -> np.ndarray:
    """``(3, regions)``: the round of each region, its broadcast, and its part of the broadcast."""
    joinable = _are_in_one_piece(plan)[regions.tensor] & regions.is_direct
    has_rows = regions.starts.shape[1] > 0
    begin, end = (
        side[:, 0] if has_rows else np.zeros(len(side), dtype=np.int64) for side in (regions.starts, regions.stops)
    )
    places = np.zeros((3, len(regions.root)), dtype=np.int64)
    filled, last, place = {False: 0, True: 0}, None, (0, -1, 0)
    for region in np.lexsort((begin, regions.root, regions.tensor)).tolist():
        kind, size = bool(regions.is_direct[region]), aligned(int(regions.nbytes[region]))
        if filled[kind] and filled[kind] + size > (UNBUFFERED_ROUND_BYTES if kind else room):
            place, filled, last = (place[0] + 1, *place[1:]), {False: 0, True: 0}, None
        filled[kind] += size
        joins = (
            last is not None
            and joinable[[last, region]].all()
            and regions.tensor[last] == regions.tensor[region]
            and regions.root[last] == regions.root[region]
            and end[last] == begin[region]
        )
        place = (place[0], place[1], place[2] + 1) if joins else (place[0], place[1] + 1, 0)
        places[:, region], last = place, region
    return places


def _find_regions(plan: Plan, messages: MessageTable, indices: np.ndarray) -> _Regions | None:
    """The regions of messages to other ranks; None if one is not for all ranks but its root."""
    transfers, transfer = plan.transfers, messages.transfer[indices]
    box = transfers.first_box[transfer]
    starts, stops = cut_chunks(transfers, transfer, messages.chunk[indices], box)
    tensor, others = transfers.box_tensor[box], _number_other_boxes(plan, transfer)
    keys = np.concatenate([tensor[:, None], starts, stops, others[:, None]], axis=1)
    _, first, of_row = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    of_row = of_row.reshape(-1)  # NumPy 2.0 gives it another shape
    everyone = np.sort(np.array(plan.ranks))
    if (np.bincount(of_row) != len(everyone) - 1).any():
        return None
    is_root = messages.source[indices] < 0
    root = np.zeros(len(first), dtype=np.int64)
    root[of_row[is_root]] = messages.sender[indices[is_root]]
    receivers = messages.receiver[indices[np.argsort(of_row, kind="stable")]].reshape(len(first), -1)
    ranks = np.sort(np.concatenate([receivers, root[:, None]], axis=1), axis=1)
    if (ranks != everyone).any() or (messages.sender[indices[is_root]] != root[of_row[is_root]]).any():
        return None
    whole = _are_whole_rows(plan, tensor[first], starts[first], stops[first]) & (others[first] == 0)
    return _Regions(
        indices, of_row, tensor[first], starts[first], stops[first], messages.nbytes[indices[first]], root, whole
    )


def _number_other_boxes(plan: Plan, transfer: np.ndarray) -> np.ndarray:
    """A number for the boxes of each transfer after its first one; 0 if it has one box."""
    transfers = plan.transfers
    numbers: dict[bytes, int] = {}
    number_of = np.zeros(len(transfer), dtype=np.int64)
    for index in np.flatnonzero(transfers.num_boxes[transfer] > 1).tolist():
        first = int(transfers.first_box[transfer[index]])
        boxes = slice(first + 1, first + int(transfers.num_boxes[transfer[index]]))
        parts = (transfers.box_tensor[boxes], transfers.box_start[boxes], transfers.box_stop[boxes])
        number_of[index] = numbers.setdefault(b"".join(part.tobytes() for part in parts), len(numbers) + 1)
    return number_of


def _are_in_one_piece(plan: Plan) -> np.ndarray:
    """``(tensors,)`` bool: whether each rank holds at most one piece of a tensor on each side."""
    return np.array([all(map(_has_one_piece_each, (spec.src_tiles, spec.dst_tiles))) for spec in plan.tensors])


def _has_one_piece_each(shards: Tiles) -> bool:
    _, counts = np.unique(shards.ranks[shards.ranks != NO_RANK], return_counts=True)
    return bool((counts < 2).all())
