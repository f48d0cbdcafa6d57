"""What is left of a transfer when ranks are lost in it: who misses what, who holds it, and a plan that brings it.

Pure functions, no communication: every rank that is left works out the same from how far each of them came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from reshard.errors import RankLostError
from reshard.formatting import say_ranks
from reshard.plan.messages import expand_messages
from reshard.plan.model import Plan
from reshard.planner.planning import plan_tensors
from reshard.sharding.layout import Layout, format_box
from reshard.sharding.mesh import Mesh
from reshard.sharding.tensor_spec import TensorSpec
from reshard.sharding.tiles import Shards, find_overlaps

#: So many lost regions are named in an error.
_MOST_NAMED = 3


@dataclass(frozen=True)
class Arrived:
    """How far one rank came: whether it made its own copies, and how many of its receives, in order, have landed."""

    copied: bool = False
    received: int = 0


@dataclass(frozen=True)
class Piece:
    """A box of one tensor, in elements of the whole, and the ranks that need it and do not have it."""

    tensor: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    missing: frozenset[int] = frozenset()


def whole_tensors(plan: Plan) -> list[Piece]:
    """The tensors of a plan as pieces of themselves."""
    return [Piece(i, (0,) * spec.ndim, spec.shape) for i, spec in enumerate(plan.tensors)]


def find_missing(
    plan: Plan, pieces: Sequence[Piece], arrived: Mapping[int, Arrived], ranks: Iterable[int]
) -> list[Piece]:
    """What ``ranks`` still miss of a plan that was broken off.

    Args:
        plan: what was under way. pieces: which part of which tensor each tensor of the plan is.
        arrived: how far each rank came; those that are not named have nothing. ranks: those that are left.

    Returns:
        Pieces that some rank misses; chunks of one region that are missing alike are one piece.
    """
    missing: dict[tuple[int, tuple[int, ...], tuple[int, ...]], set[int]] = {}
    region_of: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[int, int, int]] = {}
    for rank in sorted(ranks):
        came, received = arrived.get(rank, Arrived()), 0
        boxes = []
        for message in expand_messages(plan, rank):
            if message.receiver != rank:
                continue
            is_copy = message.sender == rank
            has = came.copied if is_copy else received < came.received
            received += not is_copy
            if not has:
                boxes += [((message.transfer, i, message.chunk), box) for i, box in enumerate(message.boxes)]
        for (region, box), is_needed in zip(boxes, _needed(plan, rank, [box for _, box in boxes]), strict=True):
            if is_needed:
                missing.setdefault(box, set()).add(rank)
                region_of[box] = min(region, region_of.get(box, region))
    found: list[Piece] = []
    last: tuple[int, int] | None = None
    for box in sorted(missing, key=region_of.__getitem__):
        tensor, start, stop = box
        origin = pieces[tensor]
        piece = Piece(
            origin.tensor,
            tuple(a + b for a, b in zip(origin.start, start, strict=True)),
            tuple(a + b for a, b in zip(origin.start, stop, strict=True)),
            frozenset(missing[box]),
        )
        of = region_of[box][:2]
        joined = _join(found[-1], piece) if found and of == last else None
        if joined is None:
            found.append(piece)
        else:
            found[-1] = joined
        last = of
    return found


def plan_remainder(
    pieces: Sequence[Piece], plan: Plan, ranks: Iterable[int], lost: Iterable[int], strategy: str | None = None
) -> tuple[Plan, list[Piece]]:
    """A plan over the ranks that are left that brings each piece to those that miss it, one tensor per piece.

    Args:
        pieces: all that is missing, at least one. plan: the first one, whose layouts say which ranks hold what.
        ranks: those that are left; lost: those that are not. strategy: by name.

    Returns:
        The plan, and the piece that each of its tensors is; a piece of which different ranks hold different parts was
        cut.

    Raises:
        RankLostError: no rank that is left holds some of it; says which regions.
    """
    left, cut = sorted(ranks), list(pieces)
    while True:
        holders = _find_holders(cut, plan, left, pieces)
        finer = [
            part
            for piece, held_by in zip(cut, holders, strict=True)
            for part in ([piece] if held_by else _cut(piece, pieces))
        ]
        if len(finer) == len(cut):
            break
        cut = finer
    nowhere = [piece for piece, held_by in zip(cut, holders, strict=True) if not held_by]
    if nowhere:
        raise RankLostError(_lost_text(nowhere, plan, lost), tuple(sorted(lost)), tuple(map(_region, nowhere)))
    tensors = [
        TensorSpec(
            tuple(hi - lo for lo, hi in zip(piece.start, piece.stop, strict=True)),
            plan.tensors[piece.tensor].dtype,
            Layout(Mesh(held_by)),
            Layout(Mesh(sorted(piece.missing))),
            f"{number}: {_name(piece, plan)}",
        )
        for number, (piece, held_by) in enumerate(zip(cut, holders, strict=True))
    ]
    made = plan_tensors(tensors, strategy=strategy, topology=plan.topology, staging_bytes=plan.staging_bytes)
    return made, cut


def view_pieces(
    made: Plan,
    pieces: Sequence[Piece],
    plan: Plan,
    rank: int,
    src: Sequence[torch.Tensor | None],
    dst: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Where each piece lies at one rank: where it is sent from, and where it must come; None where neither.

    Args:
        made, pieces: what :func:`plan_remainder` gave. plan: the first one. src, dst: the rank's arrays of its tensors.
    """
    sources: list[torch.Tensor | None] = [None] * len(pieces)
    targets: list[torch.Tensor | None] = [None] * len(pieces)
    for tensor, numbers in _by_tensor(pieces).items():
        boxes = [(pieces[i].start, pieces[i].stop) for i in numbers]
        spec = plan.tensors[tensor]
        in_src, in_dst = (find_boxes(shards, rank, boxes) for shards in (spec.src_shards, spec.dst_shards))
        for i, *held in zip(numbers, in_src, in_dst, strict=True):
            views = [
                None if array is None or at is None else array[at]
                for array, at in zip((src[tensor], dst[tensor]), held, strict=True)
            ]
            if rank in made.tensors[i].src.ranks:
                sources[i] = views[0] if views[0] is not None else views[1]
            if rank in pieces[i].missing:
                assert views[1] is not None
                targets[i] = views[1]
    return sources, targets


def find_boxes(
    shards: Shards, rank: int, boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[tuple[slice, ...] | None]:
    """Of each ``(start, stop)`` the slices of the rank's local array; None where it does not hold all of it."""
    ndim = len(shards.shape)
    if rank not in shards.layout.ranks:
        return [None] * len(boxes)
    start, stop = (np.array([box[i] for box in boxes], dtype=np.int64).reshape(len(boxes), ndim) for i in (0, 1))
    return shards.find(rank, start, stop)


def _needed(plan: Plan, rank: int, boxes: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> list[bool]:
    """Which boxes belong to the destination shard of a rank; the others it only passes on."""
    needed = [False] * len(boxes)
    for tensor in {box[0] for box in boxes}:
        own = [i for i, box in enumerate(boxes) if box[0] == tensor]
        found = find_boxes(plan.tensors[tensor].dst_shards, rank, [boxes[i][1:] for i in own])
        for i, at in zip(own, found, strict=True):
            needed[i] = at is not None
    return needed


def _join(first: Piece, second: Piece) -> Piece | None:
    """Both as one, if the same ranks miss them and they are one box."""
    if (first.tensor, first.missing) != (second.tensor, second.missing):
        return None
    unlike = [
        d for d in range(len(first.start)) if (first.start[d], first.stop[d]) != (second.start[d], second.stop[d])
    ]
    if len(unlike) != 1 or first.stop[unlike[0]] != second.start[unlike[0]]:
        return None
    return replace(first, stop=second.stop)


def _by_tensor(pieces: Sequence[Piece]) -> dict[int, list[int]]:
    """The numbers of the pieces of each tensor."""
    found: dict[int, list[int]] = {}
    for number, piece in enumerate(pieces):
        found.setdefault(piece.tensor, []).append(number)
    return found


def _ends(pieces: Sequence[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """``(pieces, ndim)`` starts and stops of pieces of one tensor, at least one."""
    shape = len(pieces), len(pieces[0].start)
    start, stop = ([getattr(piece, name) for piece in pieces] for name in ("start", "stop"))
    return np.array(start, dtype=np.int64).reshape(shape), np.array(stop, dtype=np.int64).reshape(shape)


def _find_holders(cut: Sequence[Piece], plan: Plan, left: Sequence[int], missing: Sequence[Piece]) -> list[list[int]]:
    """Of each piece the ranks that hold all of it: in their source shard, or in their destination shard if they miss
    nothing of it.
    """
    holders: list[list[int]] = [[] for _ in cut]
    missing_of = _by_tensor(missing)
    for tensor, numbers in _by_tensor(cut).items():
        lacking = [missing[i] for i in missing_of[tensor]]
        own = [cut[i] for i in numbers]
        lack: list[set[int]] = [set() for _ in own]
        for i, j in zip(*(side.tolist() for side in find_overlaps(*_ends(own), *_ends(lacking))), strict=True):
            lack[i] |= lacking[j].missing
        spec, boxes = plan.tensors[tensor], [(piece.start, piece.stop) for piece in own]
        for rank in left:
            in_src, in_dst = (find_boxes(shards, rank, boxes) for shards in (spec.src_shards, spec.dst_shards))
            for number, a, b, without in zip(numbers, in_src, in_dst, lack, strict=True):
                if a is not None or (b is not None and rank not in without):
                    holders[number].append(rank)
    return holders


def _meet(a: Piece, b: Piece) -> bool:
    """Whether two pieces share an element."""
    return a.tensor == b.tensor and all(
        max(a.start[d], b.start[d]) < min(a.stop[d], b.stop[d]) for d in range(len(a.start))
    )


def _cut(piece: Piece, missing: Sequence[Piece]) -> list[Piece]:
    """A piece in two, where another one that is missing begins or ends inside it; else as it is."""
    for other in missing:
        if _meet(piece, other):
            for d, (start, stop) in enumerate(zip(piece.start, piece.stop, strict=True)):
                for at in (other.start[d], other.stop[d]):
                    if start < at < stop:
                        ends = (*piece.stop[:d], at, *piece.stop[d + 1 :])
                        begins = (*piece.start[:d], at, *piece.start[d + 1 :])
                        return [replace(piece, stop=ends), replace(piece, start=begins)]
    return [piece]


def _region(piece: Piece) -> str:
    return format_box([*zip(piece.start, piece.stop, strict=True)])


def _name(piece: Piece, plan: Plan) -> str:
    name = plan.tensors[piece.tensor].name
    return f"{f'{name!r} ' if name else ''}{_region(piece)}"


def _lost_text(nowhere: Sequence[Piece], plan: Plan, lost: Iterable[int]) -> str:
    ranks = sorted(lost)
    named = ", ".join(_name(piece, plan) for piece in nowhere[:_MOST_NAMED])
    num_more = len(nowhere) - _MOST_NAMED
    more = f" and {num_more} more region{'s' * (num_more > 1)}" if num_more > 0 else ""
    needed = sorted({rank for piece in nowhere for rank in piece.missing})
    return (
        f"{say_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'} lost, and with "
        f"{'them' if len(ranks) > 1 else 'it'} {named}{more}: "
        f"{say_ranks(needed)} still need{'s' * (len(needed) == 1)} it and no rank "
        "that is left holds it"
    )
