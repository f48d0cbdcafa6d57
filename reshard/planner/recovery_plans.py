"""Recovery plans: find what the surviving ranks still miss after ranks are lost, and plan how to deliver it.

These functions do not communicate. Every survivor passes the progress of all survivors and gets the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from reshard.errors import RankLostError
from reshard.formatting import describe_ranks
from reshard.plan import Plan, expand_messages
from reshard.planner.planning import plan_tensors
from reshard.sharding import Layout, Mesh, TensorSpec, Tiles, find_overlaps, format_box

#: An error names at most this many lost regions.
_MAX_NAMED = 3


@dataclass(frozen=True)
class RankProgress:
    """Progress of one rank: whether its local copies are done, and how many receives it completed, in plan order."""

    copied: bool = False
    received: int = 0


@dataclass(frozen=True)
class MissingBox:
    """A box of one tensor, in global indices, and the ranks that need it but lack it."""

    tensor: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    missing: frozenset[int] = frozenset()


def whole_tensors(plan: Plan) -> list[MissingBox]:
    """One piece per tensor of a plan. Each piece covers its whole tensor."""
    return [MissingBox(i, (0,) * spec.ndim, spec.shape) for i, spec in enumerate(plan.tensors)]


def find_missing(
    plan: Plan, pieces: Sequence[MissingBox], arrived: Mapping[int, RankProgress], ranks: Iterable[int]
) -> list[MissingBox]:
    """Find the pieces that an interrupted plan has not delivered to ``ranks``.

    Args:
        plan: the interrupted plan.
        pieces: for each tensor of ``plan``, the piece of an original tensor that it moves. A recovery plan moves the
            pieces of :func:`plan_remainder`, and the original plan those of :func:`whole_tensors`.
        arrived: progress by rank; a rank without an entry has received nothing.
        ranks: the surviving ranks.

    Returns:
        The missing pieces. Neighboring chunks of a region form one piece if the same ranks miss them.
    """
    missing: dict[tuple[int, tuple[int, ...], tuple[int, ...]], set[int]] = {}
    order_of: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[int, int, int]] = {}
    for rank in sorted(ranks):
        progress, received = arrived.get(rank, RankProgress()), 0
        boxes = []
        for message in expand_messages(plan, rank):
            if message.receiver != rank:
                continue
            is_copy = message.sender == rank
            has = progress.copied if is_copy else received < progress.received
            received += not is_copy
            if not has:
                boxes += [((message.transfer, i, message.chunk), box) for i, box in enumerate(message.boxes)]
        for (order, box), is_needed in zip(boxes, _needed(plan, rank, [box for _, box in boxes]), strict=True):
            if is_needed:
                missing.setdefault(box, set()).add(rank)
                order_of[box] = min(order, order_of.get(box, order))
    pieces_left: list[MissingBox] = []
    last_region: tuple[int, int] | None = None
    for box in sorted(missing, key=order_of.__getitem__):
        tensor, start, stop = box
        origin = pieces[tensor]
        piece = MissingBox(
            origin.tensor,
            tuple(a + b for a, b in zip(origin.start, start, strict=True)),
            tuple(a + b for a, b in zip(origin.start, stop, strict=True)),
            frozenset(missing[box]),
        )
        region = order_of[box][:2]
        joined = _join(pieces_left[-1], piece) if pieces_left and region == last_region else None
        if joined is None:
            pieces_left.append(piece)
        else:
            pieces_left[-1] = joined
        last_region = region
    return pieces_left


def plan_remainder(
    pieces: Sequence[MissingBox], plan: Plan, ranks: Iterable[int], lost: Iterable[int], strategy: str | None = None
) -> tuple[Plan, list[MissingBox]]:
    """Plan how surviving ranks send each piece to the ranks that miss it. The plan has one tensor per piece.

    Args:
        pieces: all missing pieces, at least one.
        plan: the original plan, whose layouts define which ranks hold what.
        ranks: the surviving ranks.
        lost: the lost ranks.
        strategy: the name of a strategy; None means "auto".

    Returns:
        The plan, and the piece that each of its tensors moves. If no rank holds all of a piece, the piece is cut into
        smaller ones.

    Raises:
        RankLostError: for some piece, no surviving rank holds it. The error names the regions of all such pieces.
    """
    survivors, cut = sorted(ranks), list(pieces)
    while True:
        holders = _find_holders(cut, plan, survivors, pieces)
        smaller = [
            part
            for piece, held_by in zip(cut, holders, strict=True)
            for part in ([piece] if held_by else _cut(piece, pieces))
        ]
        if len(smaller) == len(cut):
            break
        cut = smaller
    unheld = [piece for piece, held_by in zip(cut, holders, strict=True) if not held_by]
    if unheld:
        raise RankLostError(
            _format_loss(unheld, plan, lost),
            tuple(sorted(lost)),
            tuple(_describe_piece(piece, plan) for piece in unheld),
        )
    tensors = [
        TensorSpec(
            tuple(hi - lo for lo, hi in zip(piece.start, piece.stop, strict=True)),
            plan.tensors[piece.tensor].dtype,
            Layout(Mesh(held_by)),
            Layout(Mesh(sorted(piece.missing))),
            f"{number}: {_describe_piece(piece, plan)}",
        )
        for number, (piece, held_by) in enumerate(zip(cut, holders, strict=True))
    ]
    recovery = plan_tensors(tensors, strategy=strategy, topology=plan.topology, staging_bytes=plan.staging_bytes)
    return recovery, cut


def view_pieces(
    remainder: Plan,
    pieces: Sequence[MissingBox],
    plan: Plan,
    rank: int,
    src: Sequence[torch.Tensor | None],
    dst: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """The source and the destination of each piece, as views of one rank's arrays; None if the rank has no part in it.

    Args:
        remainder, pieces: the result of :func:`plan_remainder`.
        plan: the original plan.
        src, dst: the rank's source and destination array of each tensor of ``plan``, or None.
    """
    sources: list[torch.Tensor | None] = [None] * len(pieces)
    targets: list[torch.Tensor | None] = [None] * len(pieces)
    for tensor, numbers in _by_tensor(pieces).items():
        boxes = [(pieces[i].start, pieces[i].stop) for i in numbers]
        spec = plan.tensors[tensor]
        in_src, in_dst = (find_boxes(shards, rank, boxes) for shards in (spec.src_tiles, spec.dst_tiles))
        for i, *held in zip(numbers, in_src, in_dst, strict=True):
            views = [
                None if array is None or index is None else array[index]
                for array, index in zip((src[tensor], dst[tensor]), held, strict=True)
            ]
            if rank in remainder.tensors[i].src.ranks:
                sources[i] = views[0] if views[0] is not None else views[1]
            if rank in pieces[i].missing:
                assert views[1] is not None
                targets[i] = views[1]
    return sources, targets


def find_boxes(
    shards: Tiles, rank: int, boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[tuple[slice, ...] | None]:
    """Slices of the rank's local array for each box ``(start, stop)``; None if the array lacks a part of the box."""
    ndim = len(shards.shape)
    if rank not in shards.layout.ranks:
        return [None] * len(boxes)
    start, stop = (np.array([box[i] for box in boxes], dtype=np.int64).reshape(len(boxes), ndim) for i in (0, 1))
    return shards.find(rank, start, stop)


def _needed(plan: Plan, rank: int, boxes: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> list[bool]:
    """Whether each box belongs to the destination shard of the rank. The rank only forwards the other boxes."""
    needed = [False] * len(boxes)
    for tensor in {box[0] for box in boxes}:
        own = [i for i, box in enumerate(boxes) if box[0] == tensor]
        boxes_found = find_boxes(plan.tensors[tensor].dst_tiles, rank, [boxes[i][1:] for i in own])
        for i, index in zip(own, boxes_found, strict=True):
            needed[i] = index is not None
    return needed


def _join(first: MissingBox, second: MissingBox) -> MissingBox | None:
    """The union of two pieces if it is one box and the same ranks miss both pieces; otherwise None."""
    if (first.tensor, first.missing) != (second.tensor, second.missing):
        return None
    different = [
        d for d in range(len(first.start)) if (first.start[d], first.stop[d]) != (second.start[d], second.stop[d])
    ]
    if len(different) != 1 or first.stop[different[0]] != second.start[different[0]]:
        return None
    return replace(first, stop=second.stop)


def _by_tensor(pieces: Sequence[MissingBox]) -> dict[int, list[int]]:
    """Indices of pieces, by tensor."""
    by_tensor: dict[int, list[int]] = {}
    for number, piece in enumerate(pieces):
        by_tensor.setdefault(piece.tensor, []).append(number)
    return by_tensor


def _bounds_of(pieces: Sequence[MissingBox]) -> tuple[np.ndarray, np.ndarray]:
    """Starts and stops of pieces, each ``(pieces, ndim)``. There is at least one piece, and all are of one tensor."""
    shape = len(pieces), len(pieces[0].start)
    start, stop = ([getattr(piece, name) for piece in pieces] for name in ("start", "stop"))
    return np.array(start, dtype=np.int64).reshape(shape), np.array(stop, dtype=np.int64).reshape(shape)


def _find_holders(
    cut: Sequence[MissingBox], plan: Plan, survivors: Sequence[int], missing: Sequence[MissingBox]
) -> list[list[int]]:
    """For each piece, the ranks that hold all of it: in the source shard, or in a destination shard that has it all."""
    holders: list[list[int]] = [[] for _ in cut]
    missing_of = _by_tensor(missing)
    for tensor, numbers in _by_tensor(cut).items():
        lacking = [missing[i] for i in missing_of[tensor]]
        own = [cut[i] for i in numbers]
        lack: list[set[int]] = [set() for _ in own]
        for i, j in zip(
            *(side.tolist() for side in find_overlaps(*_bounds_of(own), *_bounds_of(lacking))), strict=True
        ):
            lack[i] |= lacking[j].missing
        spec, boxes = plan.tensors[tensor], [(piece.start, piece.stop) for piece in own]
        for rank in survivors:
            in_src, in_dst = (find_boxes(shards, rank, boxes) for shards in (spec.src_tiles, spec.dst_tiles))
            for number, a, b, missing_ranks in zip(numbers, in_src, in_dst, lack, strict=True):
                if a is not None or (b is not None and rank not in missing_ranks):
                    holders[number].append(rank)
    return holders


def _overlap(a: MissingBox, b: MissingBox) -> bool:
    """Whether two pieces share an element."""
    return a.tensor == b.tensor and all(
        max(a.start[d], b.start[d]) < min(a.stop[d], b.stop[d]) for d in range(len(a.start))
    )


def _cut(piece: MissingBox, missing: Sequence[MissingBox]) -> list[MissingBox]:
    """Cut a piece in two where a missing piece starts or stops inside it. Without such a place, return it whole."""
    for other in missing:
        if _overlap(piece, other):
            for d, (start, stop) in enumerate(zip(piece.start, piece.stop, strict=True)):
                for index in (other.start[d], other.stop[d]):
                    if start < index < stop:
                        ends = (*piece.stop[:d], index, *piece.stop[d + 1 :])
                        begins = (*piece.start[:d], index, *piece.start[d + 1 :])
                        return [replace(piece, stop=ends), replace(piece, start=begins)]
    return [piece]


def _region(piece: MissingBox) -> str:
    return format_box([*zip(piece.start, piece.stop, strict=True)])


def _describe_piece(piece: MissingBox, plan: Plan) -> str:
    name, codec = plan.tensors[piece.tensor].name, plan.tensors[piece.tensor].codec
    blocks = "" if codec is None else f" in blocks of {codec.values} values"
    return f"{f'{name!r} ' if name else ''}{_region(piece)}{blocks}"


def _format_loss(unheld: Sequence[MissingBox], plan: Plan, lost: Iterable[int]) -> str:
    ranks = sorted(lost)
    regions = ", ".join(_describe_piece(piece, plan) for piece in unheld[:_MAX_NAMED])
    num_more = len(unheld) - _MAX_NAMED
    more = f" and {num_more} more region{'s' * (num_more > 1)}" if num_more > 0 else ""
    needed = sorted({rank for piece in unheld for rank in piece.missing})
    return (
        f"{describe_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'} lost, and with "
        f"{'them' if len(ranks) > 1 else 'it'} {regions}{more}: "
        f"{describe_ranks(needed)} still need{'s' * (len(needed) == 1)} it and no surviving rank holds it"
    )
