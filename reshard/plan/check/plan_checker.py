"""The plan checker. It replays all messages of a plan on arrays and does not depend on the planning strategy."""

from __future__ import annotations

import secrets

import numpy as np

from reshard.errors import PlanError
from reshard.formatting import brief
from reshard.plan.check.box_owners import Marks, add_by, describe_pieces
from reshard.plan.check.message_boxes import MessageBoxes, SideOwners, boxes_of
from reshard.plan.check.staging_check import check_staging
from reshard.plan.value.plan import Plan, is_sound, mark_sound
from reshard.plan.value.transfers import GATHERED
from reshard.ragged import hash_rows
from reshard.sharding import find_overlapping

#: Limit on the boxes of all messages of a plan. Arrays of larger plans would take gigabytes.
MAX_CHECKED = 2**24
#: Limit on staged boxes that overlap different boxes staged by the same rank. The checker replays them one by one.
MAX_REPLAYED = 2**13
#: Limit on the total bytes of all messages, which must fit int64.
_MAX_BYTES = 2**62


def ensure_checked(plan: Plan) -> None:
    """Check a plan on its first use, unless :func:`reshard.make_plan` made it in this process.

    Raises:
        PlanError: see :func:`check_plan`.
    """
    if not is_sound(plan):
        check_plan(plan)


def check_ranks(plan: Plan) -> None:
    """Raise unless each sender and receiver is in a layout and on a host, and each message has one itemsize."""
    plan.topology.check_covers(plan.ranks)
    transfers = plan.transfers
    ends = np.concatenate([transfers.sender, transfers.receiver])
    outside = ends[~np.isin(ends, plan.ranks)]
    if len(outside):
        raise PlanError(f"rank {outside.min()} takes part in a transfer, but is in neither layout")
    itemsize = np.array([spec.itemsize for spec in plan.tensors], dtype=np.int64)[transfers.box_tensor]
    if len(transfers):
        unlike = np.flatnonzero(
            np.maximum.reduceat(itemsize, transfers.box_offsets[:-1])
            != np.minimum.reduceat(itemsize, transfers.box_offsets[:-1])
        )
        if len(unlike):
            wrong = int(np.flatnonzero(np.isin(transfers.region, unlike))[0])
            raise PlanError(f"transfer {wrong} joins boxes of different itemsizes in one message")


def check_plan(plan: Plan) -> None:
    """Raise PlanError unless the plan, replayed in its order, delivers every element correctly.

    Checked:

    * Each rank receives every element that it needs exactly once.
    * When a message is sent, its sender has all of its data, as a source or from messages in its ``after``.
    * Regions lie inside their tensors.
    * The staged data of a rank, which it neither holds nor needs, never exceeds ``staging_bytes``. Data counts from its
      arrival until the last message that forwards it. A rank may receive such data again for later messages.

    The limit on staging does not include packed data. On a GPU, messages run in rounds, which also stage packed data;
    a Mover checks that on every rank before any data moves.

    The cost is that of sorting the messages. Exactly-once delivery is checked by sums of random numbers, which miss a
    fault with a probability below 2**-80. Equal staged boxes are found by two 64-bit hashes with random seeds. All
    other checks are exact.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"check_plan needs a Plan, not {type(plan).__name__}")
    _check_form(plan)
    check_ranks(plan)
    boxes = MessageBoxes.of(plan)
    _check_bounds(boxes)
    _PlanReplay(boxes).check()
    mark_sound(plan)


def _check_form(plan: Plan) -> None:
    """Raise PlanError unless the arrays of the transfers are consistent."""
    transfers = plan.transfers
    num, num_boxes, num_regions = len(transfers), len(transfers.box_tensor), len(transfers.box_offsets) - 1
    shape = transfers.box_start.shape
    min_ndim = max(spec.ndim for spec in plan.tensors) if num_boxes else 0
    if isinstance(plan.staging_bytes, bool) or not isinstance(plan.staging_bytes, int):
        raise PlanError(f"staging_bytes must be an integer, not {brief(plan.staging_bytes)}")
    if len(shape) != 2 or shape[0] != num_boxes or shape[1] < min_ndim or transfers.box_stop.shape != shape:
        raise PlanError(f"box_start and box_stop must both be {num_boxes} x {min_ndim}, one row per box")
    if transfers.splits.shape != (num, shape[1]) or (transfers.splits < 1).any():
        raise PlanError(f"splits must be {num} x {shape[1]} numbers of at least 1, one row per transfer")
    for name, count, total, fewest in (
        ("box_offsets", num_regions, num_boxes, 1),
        ("edge_offsets", num, len(transfers.sender), 0),
        ("after_offsets", num, len(transfers.after), 0),
    ):
        at = getattr(transfers, name)
        if at.shape != (count + 1,) or at[0] != 0 or at[-1] != total or (np.diff(at) < fewest).any():
            raise PlanError(f"{name} must rise from 0 to {total} in {count} steps of at least {fewest}")
    for name, count, first, end in (
        ("region", num, 0, num_regions),
        ("box_tensor", num_boxes, 0, len(plan.tensors)),
        ("source", num, GATHERED, num),
        ("window", num, 1, 2**62),
        ("receiver", len(transfers.sender), 0, 2**62),
    ):
        values = getattr(transfers, name)
        if values.shape != (count,) or (values < first).any() or (values >= end).any():
            raise PlanError(f"{name} must be {count} numbers from {first} to {end - 1}")
    several = (transfers.num_boxes > 1) & (transfers.splits != 1).any(axis=1)
    if several.any():
        raise PlanError(f"transfer {several.argmax()} has several boxes, so its splits must all be 1")
    ndim = np.array([spec.ndim for spec in plan.tensors], dtype=np.int64)[transfers.box_tensor]
    beyond = np.arange(shape[1]) >= ndim[:, None]
    if (beyond & ((transfers.box_start != 0) | (transfers.box_stop != 1))).any():
        raise PlanError("a box must be 0:1 in dims past those of its tensor")
    per_edge = transfers.num_boxes * transfers.splits.prod(axis=1, dtype=np.float64)
    rows = float((per_edge * np.maximum(np.diff(transfers.edge_offsets), 1)).sum())
    if rows > MAX_CHECKED:
        raise PlanError(f"the messages of the plan have {rows:.0f} boxes; at most {MAX_CHECKED} can be checked")


def _check_bounds(boxes: MessageBoxes) -> None:
    sizes = np.ones((len(boxes.plan.tensors), boxes.start.shape[1]), dtype=np.int64)
    for tensor, spec in enumerate(boxes.plan.tensors):
        sizes[tensor, : spec.ndim] = spec.shape
    start, stop = boxes.start, boxes.stop
    outside = ((start < 0) | (start >= stop) | (stop > sizes[boxes.tensor])).any(axis=1)[boxes.piece]
    if outside.any():
        row = int(outside.argmax())
        shape = list(boxes.plan.tensors[boxes.box_of(row)[0]].shape)
        raise PlanError(f"{boxes.name(row)} is empty or outside shape {shape}")
    itemsize = np.array([spec.itemsize for spec in boxes.plan.tensors], dtype=np.float64)
    total = float((boxes.numel.astype(np.float64) * itemsize[boxes.tensor])[boxes.piece].sum())
    if total >= _MAX_BYTES:
        raise PlanError(f"the messages have {total:.0f} bytes in total; at most {_MAX_BYTES} can be checked")


class _PlanReplay:
    """One replay of a plan. The checks of rows collect faults, and the fault in the lowest row is raised.

    ``_wanted`` marks the rows whose receiver needs their box. The receiver stages the boxes of all other rows.
    ``_replaced_at`` is the later row that delivers a staged box to its receiver again, or the number of rows.
    """

    def __init__(self, boxes: MessageBoxes) -> None:
        self._boxes, self._plan = boxes, boxes.plan
        self._src, self._dst = SideOwners(boxes.plan, "src"), SideOwners(boxes.plan, "dst")
        self._wanted = np.zeros(len(boxes), dtype=bool)
        self._owner = np.full(len(boxes), -1, dtype=np.int64)  # index of the receiver in Owners.ranks
        self._replaced_at = np.full(len(boxes), len(boxes), dtype=np.int64)
        self._faults: list[tuple[int, str]] = []

    def check(self) -> None:
        """Raise PlanError at the first fault."""
        self._find_wanted()
        staged = np.flatnonzero(~self._wanted)
        self._find_replaced(staged)
        self._check_senders()
        boxes = self._boxes
        for row in staged[boxes.sender[staged] == boxes.receiver[staged]][:1].tolist():
            self._fault(row, f"copies data on rank {boxes.receiver[row]} that the rank does not need")
        if self._faults:
            raise PlanError(min(self._faults)[1])
        self._check_cover()
        check_staging(boxes, ~self._wanted)

    def _fault(self, row: int, text: str) -> None:
        self._faults.append((row, f"{self._boxes.name(row)} {text}"))

    def _find_wanted(self) -> None:
        boxes = self._boxes
        for owners, tensors, rows in self._dst.split(boxes, np.arange(len(boxes))):
            if not len(rows):
                continue
            start, stop = boxes_of(boxes, rows, self._plan.tensors[tensors[0]].ndim)
            owner = owners.indices_of(boxes.receiver[rows])
            inside = owners.inside(owner, start, stop)
            self._owner[rows], self._wanted[rows] = owner, inside
            rest = np.flatnonzero(~inside & (owner >= 0))
            if len(rest) and owners.is_grid:
                hit = owners.meets(owner[rest], start[rest], stop[rest])
                for row in rows[rest[hit]][:1].tolist():
                    self._fault_outside(row)

    def _fault_outside(self, row: int) -> None:
        boxes, rank = self._boxes, int(self._boxes.receiver[row])
        tensor, start, stop = boxes.box_of(row)
        count, shared = describe_pieces(self._plan.tensors[tensor].dst_tiles, rank, start, stop)
        numel = boxes.numel[boxes.piece[row]]
        self._fault(
            row,
            f"is not inside one tile that rank {rank} needs: it overlaps {count} such tiles in {shared} of its "
            f"{numel} elements",
        )

    def _find_replaced(self, rows: np.ndarray) -> None:
        """Find boxes that a rank stages again. Report partial overlaps of boxes that it stages or needs."""
        if not len(rows):
            return
        boxes = self._boxes
        piece = boxes.piece[rows]
        where = boxes.receiver[rows] * len(self._plan.tensors) + boxes.tensor[piece]
        columns = np.concatenate([where[:, None], boxes.start[piece], boxes.stop[piece]], axis=1)
        first, second = (hash_rows(columns, secrets.randbits(63)) for _ in range(2))
        order = np.lexsort((second, first))  # groups the rows of a box at a rank, in plan order
        again = (first[order[1:]] == first[order[:-1]]) & (second[order[1:]] == second[order[:-1]])
        self._replaced_at[rows[order[:-1][again]]] = rows[order[1:][again]]
        begins = np.concatenate([[True], ~again])
        one = order[begins]
        names, groups = np.unique(where, return_inverse=True)
        group, start, stop = groups[one], boxes.start[piece[one]], boxes.stop[piece[one]]
        needed = self._needed_boxes(rows, names)
        try:
            is_overlapping = find_overlapping(*map(np.concatenate, zip((group, start, stop), needed, strict=True)))
        except PlanError as error:
            raise PlanError(f"staged boxes of {boxes.count_messages(rows)} messages: {error}") from None
        hit = np.flatnonzero(is_overlapping[len(one) :])
        if len(hit):
            group_of, need_start, need_stop = (column[hit[0]] for column in needed)
            overlaps = (groups == group_of) & (boxes.start[piece] < need_stop).all(axis=1)
            self._fault_outside(int(rows[overlaps & (need_start < boxes.stop[piece]).all(axis=1)][0]))
        elif is_overlapping.any():
            box_of_staged = np.empty(len(rows), dtype=np.int64)
            box_of_staged[order] = np.cumsum(begins) - 1
            self._replay_staged(rows[is_overlapping[box_of_staged]], where[is_overlapping[box_of_staged]])

    def _needed_boxes(self, rows: np.ndarray, names: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The boxes that the receivers of staged ``rows`` need of the same tensors.

        Grid layouts are omitted, because ``_find_wanted`` checks them. ``names`` holds an ascending number for each
        pair of a rank and a tensor. Returns the index in ``names``, the start and the stop of each box.
        """
        boxes, num_tensors, ndim = self._boxes, len(self._plan.tensors), self._boxes.start.shape[1]
        parts = [(np.zeros(0, dtype=np.int64), boxes.start[:0], boxes.stop[:0])]
        members = rows[self._owner[rows] >= 0]
        for owners, _, mine in self._dst.split(boxes, members):
            if owners.is_grid or not len(mine):
                continue
            for tensor in np.unique(boxes.tensor[boxes.piece[mine]]).tolist():
                shards = self._plan.tensors[tensor].dst_tiles
                own = mine[boxes.tensor[boxes.piece[mine]] == tensor]
                tile, owner = owners.tiles_of(np.unique(self._owner[own]))
                start, stop = (np.full((len(tile), ndim), index, dtype=np.int64) for index in (0, 1))
                start[:, : len(shards.shape)], stop[:, : len(shards.shape)] = shards.start[tile], shards.stop[tile]
                parts.append((np.searchsorted(names, owners.ranks[owner] * num_tensors + tensor), start, stop))
        group, start, stop = map(np.concatenate, zip(*parts, strict=True))
        return group, start, stop

    def _replay_staged(self, rows: np.ndarray, where: np.ndarray) -> None:
        """Replay staged rows that overlap. A new box that lies inside one staged box replaces it."""
        boxes = self._boxes
        if len(rows) > MAX_REPLAYED:
            raise PlanError(
                f"ranks stage {len(rows)} boxes that overlap other staged boxes; at most {MAX_REPLAYED} such boxes "
                "can be checked"
            )
        self._replaced_at[rows] = len(boxes)
        for name in np.unique(where).tolist():
            own = rows[where == name]
            is_there = np.zeros(len(own), dtype=bool)
            for i, row in enumerate(own.tolist()):
                shared = np.where(is_there, boxes.shared(own, row), 0)
                hit = np.flatnonzero(shared)
                if len(hit) > 1 or shared.sum() not in (0, boxes.numel[boxes.piece[row]]):
                    self._fault(row, f"delivers {shared.sum()} elements to rank {boxes.receiver[row]} a second time")
                    return
                is_there[hit] = False
                self._replaced_at[own[hit]] = row
                is_there[i] = True

    def _check_senders(self) -> None:
        boxes, messages = self._boxes, self._boxes.messages
        bad = np.zeros(len(boxes), dtype=bool)
        for owners, tensors, rows in self._src.split(boxes, np.flatnonzero(boxes.source < 0)):
            if len(rows):
                start, stop = boxes_of(boxes, rows, self._plan.tensors[tensors[0]].ndim)
                bad[rows] = ~owners.inside(owners.indices_of(boxes.sender[rows]), start, stop)
        fed = np.flatnonzero(boxes.source >= 0)
        source = boxes.source[fed]
        a, b = boxes.piece[fed], boxes.piece[source]
        unlike = (a != b) & (
            (boxes.tensor[a] != boxes.tensor[b])
            | (boxes.start[a] != boxes.start[b]).any(axis=1)
            | (boxes.stop[a] != boxes.stop[b]).any(axis=1)
        )
        num_boxes = self._plan.transfers.num_boxes[messages.transfer]
        bad[fed] = (
            unlike
            | (
                (num_boxes[boxes.message[fed]] != num_boxes[boxes.message[source]])
                & (messages.source[boxes.message[fed]] != GATHERED)
            )
            | (boxes.receiver[source] != boxes.sender[fed])
            | (boxes.sender[source] == boxes.receiver[source])
            | (self._replaced_at[source] < fed)
        )
        if bad.any():
            self._fault_sender(int(bad.argmax()))

    def _fault_sender(self, row: int) -> None:
        boxes, rank, source = self._boxes, int(self._boxes.sender[row]), int(self._boxes.source[row])
        tensor, start, stop = boxes.box_of(row)
        numel = int(boxes.numel[boxes.piece[row]])
        if source < 0 and describe_pieces(self._plan.tensors[tensor].src_tiles, rank, start, stop)[1] == numel:
            self._faults.append((row, f"{boxes.name(row)} is not inside one tile that rank {rank} holds"))
            return
        earlier = boxes.rows_to(rank, tensor)
        earlier = earlier[(earlier < row) & (self._replaced_at[earlier] >= row)]
        shared = boxes.shared(earlier, row)
        others = earlier[(shared > 0) & (earlier != source)]
        if shared.sum() != numel:
            text = f"rank {rank} sends {numel} elements, but has only {shared.sum()} at that point"
        elif len(others):
            text = f"rank {rank} receives it with message {boxes.id_of(others[0])}, which is not in `after`"
        elif boxes.sender[source] == boxes.receiver[source]:
            text = f"message {boxes.id_of(source)} is a copy on rank {rank}, and copies cannot be passed on"
        else:
            text = f"rank {rank} passes on other boxes than message {boxes.id_of(source)} brings"
        self._faults.append((row, f"{boxes.name(row)}: {text}"))

    def _check_cover(self) -> None:
        """Compare the sum of marks over the boxes that each rank receives with the sum over boxes that it needs."""
        boxes, marks = self._boxes, Marks()
        ndim = np.array([spec.ndim for spec in self._plan.tensors], dtype=np.int64)
        of_piece = marks.of_boxes(boxes.start, boxes.stop, ndim[boxes.tensor])
        nth = np.zeros(len(self._plan.tensors), dtype=np.int64)
        for owners, tensors, rows in self._dst.split(boxes, np.flatnonzero(self._wanted)):
            nth[tensors] = np.arange(len(tensors))
            piece = boxes.piece[rows]
            group = nth[boxes.tensor[piece]] * len(owners.ranks) + self._owner[rows]
            sent = add_by(group, of_piece[piece], len(tensors) * len(owners.ranks))
            needed = owners.sum_marks(marks)
            unlike = (sent.reshape(len(tensors), len(owners.ranks), 2) != needed).any(axis=2)
            if unlike.any():
                tensor, owner = np.argwhere(unlike)[0].tolist()
                self._fault_cover(int(owners.ranks[owner]), tensors[tensor])

    def _fault_cover(self, rank: int, tensor: int) -> None:
        boxes, spec = self._boxes, self._plan.tensors[tensor]
        rows = boxes.rows_to(rank, tensor)
        rows = rows[self._wanted[rows]]
        piece = boxes.piece[rows]
        try:
            is_overlapping = find_overlapping(
                np.zeros(len(rows), dtype=np.int64), boxes.start[piece], boxes.stop[piece]
            )
        except PlanError as error:
            raise PlanError(
                f"rank {rank} does not receive each element once; the boxes of its {boxes.count_messages(rows)} "
                f"messages: {error}"
            ) from None
        twice = rows[is_overlapping]
        if len(twice):
            overlapping = twice[boxes.shared(twice, int(twice[0])) > 0]
            row = int(overlapping[overlapping > twice[0]][0])
            again = boxes.shared(rows[rows < row], row).sum()
            raise PlanError(f"{boxes.name(row)} delivers {again} elements to rank {rank} a second time")
        start, stop, _ = spec.dst_tiles.pieces_of(rank)
        needed = (stop - start).prod(axis=1, dtype=np.int64).sum()
        name = f" of {spec.name}" if spec.name is not None else ""
        raise PlanError(f"rank {rank} needs {needed} elements{name}, but is sent {boxes.numel[piece].sum()}")
