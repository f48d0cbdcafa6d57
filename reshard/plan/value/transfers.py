"""Transfers: regions and the trees that they travel along, which strategies choose."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from reshard.errors import PlanError
from reshard.ragged import ranges

#: In place of a source: the data of a transfer comes from all transfers in its ``after`` that end at its sender.
GATHERED = -2


@dataclass(frozen=True, eq=False)
class PlanTransfers:
    """Regions and the trees that they travel along, in order. All arrays are int64.

    Transfer ``i`` moves region ``r = region[i]``, which is boxes ``box_offsets[r]:box_offsets[r + 1]``, along edges
    ``edge_offsets[i]:edge_offsets[i + 1]``. Several transfers may move one region. Each edge follows the edge that
    brings the data to its sender, unless the sender holds it; an edge from a rank to itself is a copy. A transfer of
    one box is sent in ``prod(splits[i])`` chunks; all boxes of a transfer of several small boxes are one message. A
    transfer may wait for other transfers of one message each. They bring the data to its sender, or the plan
    wants them to end first.

    Attributes:
        box_offsets: ``(regions + 1,)``.
        box_tensor: ``(boxes,)`` the tensor of each box.
        box_start, box_stop: ``(boxes, ndim)`` bounds; ``0:1`` in dims past those of the tensor.
        edge_offsets: ``(transfers + 1,)``.
        sender, receiver: ``(edges,)`` ranks.
        splits: ``(transfers, ndim)`` the number of parts that each dim is cut into.
        window: ``(transfers,)`` a sender starts a message of the transfer only if at most ``window`` of its messages,
            this one included, are then unfinished.
        after_offsets, after: transfer i starts after transfers ``after[after_offsets[i]:after_offsets[i + 1]]`` have
        finished.
        source: ``(transfers,)`` the transfer in ``after`` that brings the data to the first sender, -1 if the sender
            holds it. ``GATHERED`` for a single message whose sender gathers it: all transfers in ``after`` that end at
            the sender bring boxes of it, and the sender holds the others.
        region: ``(transfers,)``; omitted, each transfer has its own region.

    Raises:
        PlanError: a transfer starts after one that is not earlier or has several messages, its source is not in its
            ``after``, or it is gathered and has several messages.
    """

    box_offsets: np.ndarray
    box_tensor: np.ndarray
    box_start: np.ndarray
    box_stop: np.ndarray
    edge_offsets: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    splits: np.ndarray
    window: np.ndarray
    after_offsets: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    after: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    source: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    region: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if not len(self.after_offsets):
            object.__setattr__(self, "after_offsets", np.zeros(len(self) + 1, dtype=np.int64))
            object.__setattr__(self, "source", np.full(len(self), -1, dtype=np.int64))
        if not len(self.region):
            object.__setattr__(self, "region", np.arange(len(self)))
        for name in self.__dataclass_fields__:
            array = np.array(getattr(self, name), dtype=np.int64, order="C")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if len(self.after) or (self.source != -1).any():
            self._check_after()

    @classmethod
    def unchecked(cls, **arrays: np.ndarray) -> PlanTransfers:
        """The transfers of these arrays, all of them int64, contiguous and owned by the caller, without any check.

        For strategies whose output needs no check. The arrays become read-only. ``region``, and ``after_offsets``,
        ``after`` and ``source`` together, may be omitted.
        """
        self = cls.__new__(cls)
        count = len(arrays["window"])
        if "after_offsets" not in arrays:
            arrays["after_offsets"] = np.zeros(count + 1, dtype=np.int64)
            arrays["after"], arrays["source"] = np.zeros(0, dtype=np.int64), np.full(count, -1)
        arrays.setdefault("region", np.arange(count))
        for name in cls.__dataclass_fields__:
            array = arrays[name]
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        return self

    def _check_after(self) -> None:
        later = np.repeat(np.arange(len(self)), np.diff(self.after_offsets))
        single = (np.diff(self.edge_offsets) == 1) & (self.num_chunks == 1)
        wrong = np.flatnonzero((self.after < 0) | (self.after >= later) | ~single[np.minimum(self.after, later)])
        if len(wrong):
            raise PlanError(
                f"transfer {later[wrong[0]]} comes after transfer {self.after[wrong[0]]}, which is not an earlier "
                "transfer of a single message"
            )
        fed = np.flatnonzero(self.source >= 0)
        named = np.zeros(len(self), dtype=bool)
        named[later[self.after == self.source[later]]] = True
        if not named[fed].all():
            lost = fed[~named[fed]][0]
            raise PlanError(f"transfer {lost} gets data from transfer {self.source[lost]}, but does not come after it")
        gathered = self.source == GATHERED
        if (gathered & ~single).any():
            raise PlanError(f"transfer {(gathered & ~single).argmax()} is gathered, so it must be a single message")
        gathered[self.gathered[:, 0]] = False
        if gathered.any():
            raise PlanError(f"transfer {gathered.argmax()} is gathered, but comes after no transfer to its sender")

    def __reduce__(self) -> tuple[Any, ...]:
        # through the constructor, which checks unpickled arrays and makes them read-only
        return type(self), tuple(getattr(self, name) for name in self.__dataclass_fields__)

    def __len__(self) -> int:
        return len(self.window)

    @cached_property
    def first_box(self) -> np.ndarray:
        """``(transfers,)`` index of the first box of each transfer."""
        return self.box_offsets[self.region]

    @cached_property
    def num_boxes(self) -> np.ndarray:
        """``(transfers,)`` number of boxes of each transfer."""
        return self.box_offsets[self.region + 1] - self.first_box

    @cached_property
    def num_chunks(self) -> np.ndarray:
        """``(transfers,)`` number of chunks of each transfer."""
        return self.splits.prod(axis=1, dtype=np.int64)

    @cached_property
    def gathered(self) -> np.ndarray:
        """``(pairs, 2)`` each gathered transfer with each transfer that brings boxes of it, in order."""
        chosen = np.flatnonzero(self.source == GATHERED)
        count = np.diff(self.after_offsets)[chosen]
        later, earlier = np.repeat(chosen, count), self.after[ranges(self.after_offsets[chosen], count)]
        ends = self.receiver[self.edge_offsets[earlier]] == self.sender[self.edge_offsets[later]]
        return np.stack([later[ends], earlier[ends]], axis=1)

    @cached_property
    def first_message(self) -> np.ndarray:
        """``(transfers + 1,)`` id of each transfer's first message; the last entry is the number of messages."""
        if (
            len(self.sender) == len(self)
            and len(self.box_tensor) == len(self.box_offsets) - 1
            and (self.splits == 1).all()
        ):
            return self.edge_offsets  # a message each
        counts = self.num_boxes * self.num_chunks * np.diff(self.edge_offsets)
        return np.concatenate([[0], np.cumsum(counts)])

    @cached_property
    def transfer_of_edge(self) -> np.ndarray:
        """``(edges,)`` transfer of each edge."""
        return np.repeat(np.arange(len(self)), np.diff(self.edge_offsets))

    def chunk_box(self, transfer: int, chunk: int) -> tuple[list[int], list[int]]:
        """``(start, stop)`` of one chunk of a single-box transfer."""
        box = int(self.first_box[transfer])
        start, stop = self.box_start[box].tolist(), self.box_stop[box].tolist()
        lo, hi = list(start), list(stop)
        splits = self.splits[transfer].tolist()
        for dim in range(len(splits) - 1, -1, -1):
            chunk, index = divmod(chunk, splits[dim])
            size = stop[dim] - start[dim]
            lo[dim] = start[dim] + size * index // splits[dim]
            hi[dim] = start[dim] + size * (index + 1) // splits[dim]
        return lo, hi

    def edges_of(self, transfer: int) -> list[tuple[int, int]]:
        """``(sender, receiver)`` of each edge of one transfer."""
        at = slice(int(self.edge_offsets[transfer]), int(self.edge_offsets[transfer + 1]))
        return list(zip(self.sender[at].tolist(), self.receiver[at].tolist(), strict=True))
