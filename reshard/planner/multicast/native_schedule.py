"""Compute message schedules, as arrays, with ``native/multicast/schedule.cpp``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from reshard import _native
from reshard.planner.multicast.chunk_workload import ChunkWorkload, Nics
from reshard.ragged import ranges


@dataclass(frozen=True, eq=False)
class ChunkSchedule:
    """Messages in order, as int64 arrays.

    Attributes:
        piece, sender, receiver: ``(messages,)``.
        source: ``(messages,)`` the message that brought the piece to the sender, or -1 if the sender is a holder.
        after_offsets, after: message i starts after messages ``after[after_offsets[i]:after_offsets[i + 1]]``.
        staged: ``(messages,)`` bool: whether the receiver only forwards the piece, to ranks of its host that need it.
    """

    piece: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    source: np.ndarray
    after_offsets: np.ndarray
    after: np.ndarray
    staged: np.ndarray


def put_in_order(schedule: ChunkSchedule, order: np.ndarray) -> ChunkSchedule:
    """The messages of a schedule in the given order, renumbered."""
    new_index = np.empty_like(order)
    new_index[order] = np.arange(len(order))
    counts = np.diff(schedule.after_offsets)[order]
    return ChunkSchedule(
        piece=schedule.piece[order],
        sender=schedule.sender[order],
        receiver=schedule.receiver[order],
        source=np.where(schedule.source < 0, -1, new_index[schedule.source])[order],
        after_offsets=np.concatenate([[0], np.cumsum(counts)]),
        after=new_index[schedule.after[ranges(schedule.after_offsets[order], counts)]],
        staged=schedule.staged[order],
    )


def interleave(schedules: Sequence[ChunkSchedule], num_pieces: Sequence[int]) -> ChunkSchedule:
    """One schedule of several that share no port. Each keeps its order; all begin and end together.

    Args:
        schedules: the schedules.
        num_pieces: number of pieces of each; those of the next one are numbered on.
    """
    pieces_before = np.cumsum([0, *num_pieces])
    before = np.cumsum([0] + [len(schedule.piece) for schedule in schedules])
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("piece", "source", "after", "num_after", "share")}
    for number, schedule in enumerate(schedules):
        columns["piece"].append(schedule.piece + pieces_before[number])
        columns["source"].append(np.where(schedule.source < 0, -1, schedule.source + before[number]))
        columns["after"].append(schedule.after + before[number])
        columns["num_after"].append(np.diff(schedule.after_offsets))
        columns["share"].append(np.arange(len(schedule.piece)) / max(len(schedule.piece), 1))
    joined = {name: np.concatenate(column) for name, column in columns.items()}
    schedule = ChunkSchedule(
        piece=joined["piece"],
        sender=np.concatenate([schedule.sender for schedule in schedules]),
        receiver=np.concatenate([schedule.receiver for schedule in schedules]),
        source=joined["source"],
        after_offsets=np.concatenate([[0], np.cumsum(joined["num_after"])]),
        after=joined["after"],
        staged=np.concatenate([schedule.staged for schedule in schedules]),
    )
    return put_in_order(schedule, np.argsort(joined["share"], kind="stable"))


def make_schedule(nics: Nics, workload: ChunkWorkload) -> ChunkSchedule:
    """Schedule all pieces of a workload: senders, receivers, and an order without deadlocks.

    Raises:
        ValueError: a chunk cannot reach a host that needs it.
    """

    def ints(values: Sequence[int]) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    def floats(values: Sequence[float]) -> np.ndarray:
        return np.array(values, dtype=np.float64)

    arrays = SimpleNamespace(
        host=ints(nics.host), out=floats(nics.out), into=floats(nics.into), of_rank=ints(nics.of_rank),
        pod=ints(nics.pod), up=floats(nics.up), down=floats(nics.down),
    )  # fmt: skip
    schedule = ChunkSchedule(*_native.make_schedule(arrays, workload))
    return replace(schedule, staged=schedule.staged.view(bool))
