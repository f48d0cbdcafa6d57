"""Does a plan deliver? Replays it message by message, knowing nothing of what made it."""

from __future__ import annotations

import numpy as np

from reshard.errors import PlanError
from reshard.layout import format_box
from reshard.plan import Message, Plan, expand_messages


class _Held:
    """The boxes of one tensor that one rank has, in a growing table."""

    def __init__(self, start: np.ndarray, stop: np.ndarray, ids: int) -> None:
        self.start = [row for row in start.tolist()]
        self.stop = [row for row in stop.tolist()]
        self.ids = [ids] * len(self.start)
        self._arrays: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def add(self, start: tuple[int, ...], stop: tuple[int, ...], message: int) -> None:
        self.start.append(list(start))
        self.stop.append(list(stop))
        self.ids.append(message)
        self._arrays = None

    def overlap(self, start: tuple[int, ...], stop: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Elements that each box shares with the given one, and the ids of those boxes; none that share none."""
        if self._arrays is None:
            shape = (len(self.start), len(start))
            self._arrays = (
                np.array(self.start, dtype=np.int64).reshape(shape),
                np.array(self.stop, dtype=np.int64).reshape(shape),
                np.array(self.ids, dtype=np.int64),
            )
        starts, stops, ids = self._arrays
        size = np.minimum(stops, np.array(stop, dtype=np.int64)) - np.maximum(starts, np.array(start, dtype=np.int64))
        shared = np.maximum(size, 0).prod(axis=1, dtype=np.int64)
        hit = shared > 0
        return shared[hit], ids[hit]


_SOURCE = -1


def check_plan(plan: Plan) -> None:
    """Raise PlanError unless the plan, replayed in its order, delivers.

    Checked: every destination element on every rank that needs it, exactly once; each message sent by a rank
    that has all of it by then, as a source or through messages named in its ``after``; regions inside their
    tensors; bytes that a rank neither holds nor needs never above ``staging_bytes``, counted from their arrival
    to the last message that passes them on.
    """
    holds: dict[tuple[int, int], _Held] = {}
    needs: dict[tuple[int, int], _Held] = {}
    came: dict[tuple[int, int], _Held] = {}
    empty = np.zeros((0, 0), dtype=np.int64)
    for tensor, spec in enumerate(plan.tensors):
        for rank in spec.src.ranks:
            start, stop, _ = spec.src_shards.pieces_of(rank)
            holds[rank, tensor] = _Held(start, stop, _SOURCE)
        for rank in spec.dst.ranks:
            start, stop, _ = spec.dst_shards.pieces_of(rank)
            needs[rank, tensor] = _Held(start, stop, _SOURCE)
    got: dict[tuple[int, int], int] = {}
    staged: dict[int, tuple[int, int]] = {}  # message id -> (receiver, bytes not needed there)
    last_use: dict[int, int] = {}
    messages = list(expand_messages(plan))
    for message in messages:
        for i, (tensor, start, stop) in enumerate(message.boxes):
            spec = plan.tensors[tensor]
            where = f"message {message.id + i}: {format_box(list(zip(start, stop, strict=True)))}"
            numel = 1
            for lo, hi, size in zip(start, stop, spec.shape, strict=True):
                if not 0 <= lo < hi <= size:
                    raise PlanError(f"{where} is empty or outside shape {list(spec.shape)}")
                numel *= hi - lo
            _check_sender(message, i, where, numel, holds, came, last_use)
            key = (message.receiver, tensor)
            wanted = 0
            if key in needs:
                wanted = int(needs[key].overlap(start, stop)[0].sum())
            earlier = came.setdefault(key, _Held(empty, empty, _SOURCE))
            again = int(earlier.overlap(start, stop)[0].sum())
            if again:
                raise PlanError(f"{where} brings rank {message.receiver} {again} elements a second time")
            if not wanted and message.sender == message.receiver:
                raise PlanError(f"{where} copies on rank {message.receiver} what it does not need")
            earlier.add(start, stop, message.id + i)
            got[key] = got.get(key, 0) + wanted
            if wanted < numel:
                staged[message.id + i] = (message.receiver, (numel - wanted) * spec.itemsize)
    for (rank, tensor), region in needs.items():
        spec = plan.tensors[tensor]
        need = sum(int(np.prod(np.subtract(b, a), dtype=np.int64)) for a, b in zip(region.start, region.stop, strict=True))
        if got.get((rank, tensor), 0) != need:
            name = f" of {spec.name}" if spec.name is not None else ""
            raise PlanError(f"rank {rank} needs {need} elements{name}, but is sent {got.get((rank, tensor), 0)}")
    _check_staging(plan, messages, staged, last_use)


def _check_sender(
    message: Message,
    i: int,
    where: str,
    numel: int,
    holds: dict[tuple[int, int], _Held],
    came: dict[tuple[int, int], _Held],
    last_use: dict[int, int],
) -> None:
    tensor, start, stop = message.boxes[i]
    key = (message.sender, tensor)
    if key in holds and int(holds[key].overlap(start, stop)[0].sum()) == numel:
        return
    shared, ids = came[key].overlap(start, stop) if key in came else (np.zeros(0), np.zeros(0, dtype=np.int64))
    if int(shared.sum()) != numel:
        raise PlanError(f"{where}: rank {message.sender} sends {numel} elements, but has {int(shared.sum())} by then")
    known = set() if message.after is None else {message.after + i}
    missing = sorted(set(ids.tolist()) - known)
    if missing:
        raise PlanError(f"{where}: rank {message.sender} gets it from message {missing[0]}, which is not in `after`")
    for source in ids.tolist():
        last_use[source] = message.id + i


def _check_staging(
    plan: Plan, messages: list[Message], staged: dict[int, tuple[int, int]], last_use: dict[int, int]
) -> None:
    holding: dict[int, int] = {}
    release: dict[int, list[tuple[int, int]]] = {}
    for message in messages:
        for i in range(len(message.boxes)):
            ident = message.id + i
            if ident in staged:
                rank, nbytes = staged[ident]
                if ident not in last_use:
                    raise PlanError(f"message {ident} brings rank {rank} {nbytes} bytes that it neither needs nor passes on")
                holding[rank] = holding.get(rank, 0) + nbytes
                release.setdefault(last_use[ident], []).append((rank, nbytes))
                if holding[rank] > plan.staging_bytes:
                    raise PlanError(
                        f"message {ident}: rank {rank} stages {holding[rank]} bytes; the window is {plan.staging_bytes}"
                    )
            for rank, nbytes in release.pop(ident, ()):
                holding[rank] -= nbytes
