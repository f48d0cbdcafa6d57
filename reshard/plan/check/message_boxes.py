"""Arrays with one row for each box of each message of a plan, for the plan checker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.plan.check.box_owners import Owners
from reshard.plan.value.messages import MessageTable, cut_chunks, find_gathered_boxes, name_box, tabulate_messages
from reshard.plan.value.plan import Plan
from reshard.plan.value.transfers import GATHERED
from reshard.sharding import Tiles, format_box


@dataclass(frozen=True, eq=False)
class MessageBoxes:
    """One row per box of a message, in the plan's total order; the row number is the id of the box.

    A piece is a box of a region, or one chunk of such a box. Each edge of a tree sends a piece in a separate message;
    the rows of these messages have the same piece.

    Attributes:
        tensor, numel: ``(pieces,)`` tensor and number of elements of each piece.
        start, stop: ``(pieces, dims)`` bounds of each piece; 0 and 1 in dims that its tensor lacks.
        piece, message: for each row, its piece and its row in ``messages``.
        sender, receiver: the ranks of each row.
        source: for each row, the row that delivers the data to the sender; -1 if the sender holds the data as a source.
    """

    plan: Plan
    messages: MessageTable
    tensor: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    numel: np.ndarray
    piece: np.ndarray
    message: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    source: np.ndarray

    @classmethod
    def of(cls, plan: Plan) -> MessageBoxes:
        """Make the rows of a plan."""
        transfers, messages = plan.transfers, tabulate_messages(plan)
        counts = transfers.num_chunks * transfers.num_boxes
        transfer = np.repeat(np.arange(len(transfers)), counts)
        first_piece = np.cumsum(counts) - counts
        chunk, nth = np.divmod(np.arange(len(transfer)) - first_piece[transfer], transfers.num_boxes[transfer])
        box = transfers.first_box[transfer] + nth
        start, stop = cut_chunks(transfers, transfer, chunk, box)
        num_boxes = transfers.num_boxes[messages.transfer]
        message = np.repeat(np.arange(len(messages)), num_boxes)
        within = np.arange(len(message)) - messages.id[message]
        source = messages.source[message]
        fed = source >= 0
        # If the source has fewer boxes, take its last one here; the checker reports such a source later.
        last = num_boxes[source[fed]] - 1
        source[fed] = messages.id[source[fed]] + np.minimum(within[fed], last)
        gathered = messages.source[message] == GATHERED
        if gathered.any():
            chosen = messages.transfer[messages.source == GATHERED]
            source[gathered] = find_gathered_boxes(transfers, chosen)
        return cls(
            plan=plan,
            messages=messages,
            tensor=transfers.box_tensor[box],
            start=start,
            stop=stop,
            numel=(stop - start).prod(axis=1, dtype=np.int64),
            piece=(first_piece[messages.transfer] + messages.chunk * num_boxes)[message] + within,
            message=message,
            sender=messages.sender[message],
            receiver=messages.receiver[message],
            source=source,
        )

    def __len__(self) -> int:
        return len(self.piece)

    def box_of(self, row: int) -> tuple[int, list[int], list[int]]:
        """``(tensor, start, stop)`` of one row."""
        piece = int(self.piece[row])
        tensor = int(self.tensor[piece])
        ndim = self.plan.tensors[tensor].ndim
        return tensor, self.start[piece, :ndim].tolist(), self.stop[piece, :ndim].tolist()

    def name(self, row: int) -> str:
        """``message 3: [0:4, 0:8]``, or ``message 3 (box id 5): [0:4, 0:8]`` if the message has several boxes."""
        _, start, stop = self.box_of(row)
        num_boxes = int(self.plan.transfers.num_boxes[self.messages.transfer[self.message[row]]])
        return f"{name_box(self.id_of(row), row, num_boxes)}: {format_box([*zip(start, stop, strict=True)])}"

    def id_of(self, row: int) -> int:
        """The id of the message of one row."""
        return int(self.messages.id[self.message[row]])

    def count_messages(self, rows: np.ndarray) -> int:
        """The number of messages that ``rows`` belong to."""
        return len(np.unique(self.message[rows]))

    def rows_to(self, rank: int, tensor: int) -> np.ndarray:
        """Rows that deliver boxes of one tensor to a rank."""
        rows = np.flatnonzero(self.receiver == rank)
        return rows[self.tensor[self.piece[rows]] == tensor]

    def shared(self, rows: np.ndarray, row: int) -> np.ndarray:
        """``(rows,)`` number of elements that each of ``rows`` shares with ``row``. All rows must be of one tensor."""
        a, b = self.piece[rows], self.piece[row]
        size = np.minimum(self.stop[a], self.stop[b]) - np.maximum(self.start[a], self.start[b])
        return np.maximum(size, 0).prod(axis=1, dtype=np.int64)


class SideOwners:
    """The :class:`Owners` of all tensors on one side, ``"src"`` or ``"dst"``.

    Attributes:
        owners: one for all tensors of the same shape and layout.
        tensors: the tensors of each of ``owners``, ascending.
    """

    def __init__(self, plan: Plan, side: str) -> None:
        number: dict[object, int] = {}
        self.owners: list[Owners] = []
        self.tensors: list[list[int]] = []
        kinds = np.zeros(len(plan.tensors), dtype=np.int64)
        for tensor, spec in enumerate(plan.tensors):
            layout = getattr(spec, side)
            kind = number.setdefault((layout, spec.shape), len(self.owners))
            if kind == len(self.owners):
                shards: Tiles = spec.src_tiles if side == "src" else spec.dst_tiles
                self.owners.append(Owners(shards))
                self.tensors.append([])
            self.tensors[kind].append(tensor)
            kinds[tensor] = kind
        self._kinds = kinds

    def split(self, boxes: MessageBoxes, rows: np.ndarray) -> Iterator[tuple[Owners, Sequence[int], np.ndarray]]:
        """Yield each Owners, its tensors, and those of ``rows`` that move these tensors, in the given order."""
        kinds = self._kinds[boxes.tensor[boxes.piece[rows]]]
        order = np.argsort(kinds, kind="stable")
        ends = np.cumsum(np.bincount(kinds, minlength=len(self.owners)))
        for kind, (owners, tensors) in enumerate(zip(self.owners, self.tensors, strict=True)):
            first = int(ends[kind - 1]) if kind else 0
            yield owners, tensors, rows[order[first : int(ends[kind])]]


def boxes_of(boxes: MessageBoxes, rows: np.ndarray, ndim: int) -> tuple[np.ndarray, np.ndarray]:
    """``(start, stop)`` of the boxes of ``rows``, each ``(rows, ndim)``."""
    piece = boxes.piece[rows]
    return boxes.start[piece, :ndim], boxes.stop[piece, :ndim]
