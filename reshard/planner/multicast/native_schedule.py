"""Schedules as arrays; native where that is built, with a twin in Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.planner.multicast.chunk_scheduler import Dealer
from reshard.planner.multicast.linearization import find_sequence
from reshard.planner.multicast.pod_chunk_scheduler import PodDealer
from reshard.planner.multicast.rank_assignment import Landing
from reshard.planner.multicast.workload import Freight, Ports
from reshard.ragged import ranges

_Makes = Callable[[Ports, Freight], "Schedule"]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Messages as arrays, int64: ``after[after_at[i]:after_at[i + 1]]`` come before message i."""

    piece: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    source: np.ndarray
    after_at: np.ndarray
    after: np.ndarray


def schedule_python(ports: Ports, freight: Freight) -> Schedule:
    """Who sends which piece to whom."""
    deals = (PodDealer if ports.pod else Dealer)(ports, freight).run()
    made = Landing(ports, freight, deals).run()
    after_at = np.cumsum([0] + [len(row) for row in made.after])
    after = np.array([i for row in made.after for i in row], dtype=np.int64)
    piece, sender, receiver, source = (
        np.array(column, dtype=np.int64) for column in (made.piece, made.sender, made.receiver, made.source)
    )
    host = np.array([ports.host[port] for port in ports.of_rank])
    crosses = host[sender] != host[receiver]
    if ports.are_alike:  # what starts first ends first, and what arrives comes before what is done with it
        order = np.lexsort((~crosses, np.array(made.end, dtype=np.float64)))
    else:
        order = np.array(find_sequence(made, crosses.tolist()), dtype=np.int64)
    return put_in_order(Schedule(piece, sender, receiver, source, after_at, after), order)


def put_in_order(schedule: Schedule, order: np.ndarray) -> Schedule:
    """The same messages with those first that ``order`` names first."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    counts = np.diff(schedule.after_at)[order]
    return Schedule(
        piece=schedule.piece[order],
        sender=schedule.sender[order],
        receiver=schedule.receiver[order],
        source=np.where(schedule.source < 0, -1, place[schedule.source])[order],
        after_at=np.concatenate([[0], np.cumsum(counts)]),
        after=place[schedule.after[ranges(schedule.after_at[order], counts)]],
    )


schedule_native: _Makes | None = None
with contextlib.suppress(ImportError, AttributeError):  # where it is not built the twin does the same, slower
    from reshard import _native

    _make: Callable[..., Any] = _native.make_schedule

    def _call_native(ports: Ports, freight: Freight) -> Schedule:
        def ints(values: Sequence[int]) -> np.ndarray:
            return np.array(values, dtype=np.int64)

        def floats(values: Sequence[float]) -> np.ndarray:
            return np.array(values, dtype=np.float64)

        *columns, order = _make(
            ints(ports.host), floats(ports.out), floats(ports.into), ints(ports.of_rank), ints(ports.pod),
            floats(ports.up), floats(ports.down), *freight.lane_holders, *freight.lane_needers, freight.lane_size,
            freight.lane_of, *freight.class_holders, *freight.class_receivers, freight.piece_at,
            freight.piece_class, freight.piece_bytes, freight.run, freight.near_first, freight.keeps_partners,
            freight.inside_each, freight.inside_per_byte,
        )  # fmt: skip
        return put_in_order(Schedule(*columns), order)

    schedule_native = _call_native

make_schedule: _Makes = schedule_native or schedule_python
