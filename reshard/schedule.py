"""Schedules as arrays; native where that is built, with a twin in Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.dealer import Dealer, Ports
from reshard.pod_dealer import PodDealer
from reshard.shards import ranges

Members = tuple[np.ndarray, np.ndarray]
_Makes = Callable[[Ports, Members, Members, np.ndarray], "Messages"]


@dataclass(frozen=True, eq=False)
class Messages:
    """A schedule as arrays, int64: ``after[after_at[i]:after_at[i + 1]]`` come before message i."""

    chunk: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    source: np.ndarray
    after_at: np.ndarray
    after: np.ndarray


def _dealer(ports: Ports) -> type[Dealer]:
    return PodDealer if ports.pod else Dealer


def schedule_python(ports: Ports, holders: Members, receivers: Members, class_of: np.ndarray) -> Messages:
    """Who sends which chunk to whom.

    Args:
        ports: the network. holders, receivers: ``(at, ranks)``: class k has ``ranks[at[k]:at[k + 1]]``.
        class_of: the class of each chunk.
    """
    classes = [
        (holders[1][a:b].tolist(), receivers[1][c:d].tolist())
        for a, b, c, d in zip(holders[0][:-1], holders[0][1:], receivers[0][:-1], receivers[0][1:], strict=True)
    ]
    made = _dealer(ports)(ports, classes, class_of.tolist()).run()
    after_at = np.cumsum([0] + [len(row) for row in made.after])
    after = np.array([i for row in made.after for i in row], dtype=np.int64)
    chunk, sender, receiver, source = (
        np.array(column, dtype=np.int64) for column in (made.chunk, made.sender, made.receiver, made.source)
    )
    return in_order(Messages(chunk, sender, receiver, source, after_at, after), np.array(made.end, dtype=np.float64))


def in_order(messages: Messages, end: np.ndarray) -> Messages:
    """Messages in the order in which they end: receivers take them in that order."""
    order = np.argsort(end, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    counts = np.diff(messages.after_at)[order]
    return Messages(
        chunk=messages.chunk[order],
        sender=messages.sender[order],
        receiver=messages.receiver[order],
        source=np.where(messages.source < 0, -1, place[messages.source])[order],
        after_at=np.concatenate([[0], np.cumsum(counts)]),
        after=place[messages.after[ranges(messages.after_at[order], counts)]],
    )


schedule_native: _Makes | None = None
with contextlib.suppress(ImportError, AttributeError):  # where it is not built the twin does the same, slower
    from reshard import _native

    _make: Callable[..., Any] = _native.make_schedule

    def _call_native(ports: Ports, holders: Members, receivers: Members, class_of: np.ndarray) -> Messages:
        if ports.pod:  # has no native code yet
            return schedule_python(ports, holders, receivers, class_of)

        def ints(values: Sequence[int]) -> np.ndarray:
            return np.array(values, dtype=np.int64)

        def floats(values: Sequence[float]) -> np.ndarray:
            return np.array(values, dtype=np.float64)

        chunk, sender, receiver, source, after_at, after, end = _make(
            ints(ports.host), floats(ports.out), floats(ports.into), ints(ports.of_rank), ints(ports.pod),
            floats(ports.up), floats(ports.down), *holders, *receivers, class_of,
        )  # fmt: skip
        return in_order(Messages(chunk, sender, receiver, source, after_at, after), end)

    schedule_native = _call_native

make_schedule: _Makes = schedule_native or schedule_python
