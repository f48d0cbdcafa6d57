"""Runs one rank's program on a transport: posts in the plan's order, waits in the plan's order.

A rank has three lanes: receives, sends across hosts, sends inside. Each is posted in the plan's order, and waited for
in that order by a thread of its own, so that no lane waits for another: a chunk is passed on while the one before is
still leaving, and both directions of a link are busy at once. Whoever has waited for an operation posts whatever that
made possible, in any lane.

Why it cannot deadlock. All ranks share one total order of messages. Each lane takes its buffers from a pool of its own
in that order; a buffer is given back by events that stand earlier in the order than whatever waits for it. So take the
earliest unfinished message of all: all that is before it is finished, and each lane has waited for it or does so now.
Hence its sender has its data, both ends have a buffer, and both have posted their operation.

Receives are posted before sends because Gloo otherwise may run the two directions one after the other.

A plan may ask for an order among messages of several ranks of one host. Whoever ends such a message tells the rank that
waits for it with a byte, which comes on a lane of its own in the plan's order.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.errors import PlanError
from reshard.plan.model import Plan
from reshard.runtime.cpu.staging import MANY_BOXES, Pool, Staging, copy_into, flat_bytes, pack, unpack, view_of
from reshard.runtime.cpu.verification import Digests, digest_of, is_copy_of
from reshard.runtime.program import Event, Program, Recv, Send
from reshard.runtime.transport import Transport, Work, wait_for

#: How often a lane with nothing to wait for looks whether the transfer was told to stop.
LOOK_SECONDS = 0.2
#: Bytes that tell of the end of a message have tags of their own, above those of transfers.
NOTIFY_TAG = 2**29
#: And so has what is said behind a transfer about its digests.
VERIFY_TAG = 2**30
_NOTIFY_AHEAD = 8


class WrongCopyError(Exception):
    """A copy inside a rank differs from what was copied; ``id`` is that of the message."""

    def __init__(self, message: int) -> None:
        super().__init__(f"message {message}")
        self.id = message


@dataclass
class Tally:
    """How far a rank came: whether its own copies are made, and how many receives, in order, have landed."""

    copied: bool = False
    received: int = 0
    received_bytes: int = 0


@dataclass(frozen=True)
class _Notification:
    """A byte from another rank that says that a message is over there."""

    id: int
    sender: int
    event: Event


class _Lane:
    """Operations of one kind, those before ``at`` posted, those in ``posted`` not waited for yet.

    ``changed`` wakes its thread, which sleeps while nothing is posted.
    """

    def __init__(self, lock: threading.Lock, ops: Sequence[Any], pool: Pool | None = None) -> None:
        self.ops, self.at = ops, 0
        self.pool: Any = pool
        self.posted: deque[tuple[Any, Work, torch.Tensor | None]] = deque()
        self.changed = threading.Condition(lock)
        self.sleeps = False

    @property
    def is_over(self) -> bool:
        return self.at == len(self.ops) and not self.posted


class _Run:
    def __init__(
        self,
        program: Program,
        transport: Transport,
        src: Sequence[torch.Tensor | None],
        dst: Sequence[torch.Tensor | None],
        staging: Staging,
        tag: int,
        deadline: float,
        check: Callable[[], None],
        digests: Digests | None = None,
        tally: Tally | None = None,
    ) -> None:
        self.program, self.transport, self.tag = program, transport, tag
        self.digests = digests
        self.src, self.dst, self.staging = src, dst, staging
        self.deadline, self.check = deadline, check
        # Flattened once, so that each message is one slice.
        self.flat_src, self.flat_dst = _flatten(src), _flatten(dst)
        self.lock = threading.Lock()  # guards all below
        self.recvs = _Lane(self.lock, program.recvs, staging.recv)
        self.sends = [
            _Lane(self.lock, program.sends_across, staging.across),
            _Lane(self.lock, program.sends_inside, staging.inside),
        ]
        self.told = _Lane(self.lock, [_Notification(event[0], rank, event) for event, rank in program.awaited])
        self.lanes = (self.recvs, *self.sends, self.told)
        self.over: set[Event] = set()
        self.to_tell: dict[int, deque[Event]] = {}  # waiting rank -> what it has not been told, in the order it expects
        for event, ranks in program.told.items():
            for rank in ranks:
                self.to_tell.setdefault(rank, deque()).append(event)
        self.telling: list[tuple[Work, torch.Tensor, int]] = []
        self.slot_of: dict[int, torch.Tensor] = {}  # receive -> its staging slot
        self.uses: dict[int, int] = {}  # receive -> forwards that still read its slot
        self.tally = Tally() if tally is None else tally
        self.num_lanes = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        with self.lock:
            self.post()
        for copy in self.program.copies:
            target = view_of(self.dst, copy.place.tensor, copy.place.dst)
            source = view_of(self.src, copy.place.tensor, copy.place.src)
            copy_into(target, source)
            if self.digests is not None and not is_copy_of(target, source):
                raise WrongCopyError(copy.id)
        self.tally.copied = True
        lanes = [lane for lane in self.lanes if lane.ops]
        self.num_lanes = len(lanes)
        others = [
            threading.Thread(target=self.follow, args=(lane,), name="reshard-lane", daemon=True) for lane in lanes[1:]
        ]
        for thread in others:
            thread.start()
        if lanes:
            self.follow(lanes[0])
        for thread in others:
            thread.join()
        for work, _, rank in self.telling if self.error is None else []:
            self.wait(work, rank)
        if self.error is not None:
            raise self.error

    def follow(self, lane: _Lane) -> None:
        """Wait for the operations of a lane, one after the other."""
        try:
            while True:
                with self.lock:
                    while not lane.posted and not lane.is_over and self.error is None:
                        if not any(other.posted for other in self.lanes):
                            raise PlanError(f"rank {self.program.rank}: message {lane.ops[lane.at].id} can never start")
                        lane.sleeps = True
                        lane.changed.wait(LOOK_SECONDS)
                        lane.sleeps = False
                        self.check()
                    if lane.is_over or self.error is not None:
                        return
                    op, work, slot = lane.posted[0]
                self.wait(work, op)
                if isinstance(op, Recv):
                    self.land(op, slot)
                with self.lock:
                    lane.posted.popleft()
                    if isinstance(op, Recv):
                        self.finish_recv(op, slot)
                        self.end((op.id, False))
                    elif isinstance(op, Send):
                        self.finish_send(lane, op, slot)
                        self.end((op.id, True))
                    else:
                        self.over.add(op.event)
                    self.post()
                    for other in self.lanes:
                        if other.sleeps and other.posted:
                            other.changed.notify()
        except BaseException as error:
            with self.lock:
                first = self.error is None
                self.error = self.error or error
                for other in self.lanes:
                    other.changed.notify()
            abort = getattr(self.transport, "abort", None)
            if first and abort is not None and self.num_lanes > 1:  # end the waits of the other lanes
                with contextlib.suppress(Exception):
                    abort()

    def end(self, event: Event) -> None:
        """Note that a message is over, and tell those who wait for it, once they know of all before it."""
        self.over.add(event)
        for rank in self.program.told.get(event, ()):
            left = self.to_tell[rank]
            while left and left[0] in self.over:
                left.popleft()
                byte = torch.zeros(1, dtype=torch.uint8)
                self.telling.append((self.transport.send(byte, rank, self.tag + NOTIFY_TAG), byte, rank))

    def post(self) -> None:
        """Post what can be posted, receives first."""
        if self.error is not None:
            return
        told = self.told
        while told.at < len(told.ops) and len(told.posted) < _NOTIFY_AHEAD:
            op, byte = told.ops[told.at], torch.empty(1, dtype=torch.uint8)
            told.posted.append((op, self.transport.recv(byte, op.sender, self.tag + NOTIFY_TAG), byte))
            told.at += 1
        while self.recvs.at < len(self.recvs.ops) and self.post_recv():
            pass
        for lane in self.sends:
            while lane.at < len(lane.ops) and self.post_send(lane):
                pass

    def find_bytes(self, op: Recv | Send, side: str) -> torch.Tensor | None:
        """The bytes of a message where they lie in an array of this rank; None if they must be packed."""
        if len(op.places) > 1:
            return None
        place = op.places[0]
        arrays, flats = (self.src, self.flat_src) if side == "src" else (self.dst, self.flat_dst)
        array, flat = arrays[place.tensor], flats[place.tensor]
        assert array is not None
        if flat is None:
            view = view_of(arrays, place.tensor, getattr(place, side))
            return flat_bytes(view) if view.is_contiguous() else None
        span = self.staging.span_of(op, array, side)
        return None if span is None else flat[span[0] : span[1]]

    def post_recv(self) -> bool:
        lane = self.recvs
        index, op = lane.at, self.program.recvs[lane.at]
        if len(lane.posted) >= op.ahead or (op.waits and not self.over.issuperset(op.waits)):
            return False
        slot = None
        buffer = None if op.is_relay else self.find_bytes(op, "dst")
        if buffer is None:
            slot = lane.pool.take()
            if slot is None:
                return False
            self.slot_of[index] = slot
            buffer = slot[: op.nbytes]
        lane.posted.append((op, self.transport.recv(buffer, op.sender, self.tag), slot))
        lane.at += 1
        return True

    def land(self, op: Recv, slot: torch.Tensor | None) -> None:
        """Put what was received into a slot where it belongs."""
        if slot is not None and not op.is_relay:
            self.unpack(op, slot)
        if self.digests is not None:
            views = [view_of(self.dst, place.tensor, place.dst) for place in op.places] if not op.is_relay else []
            self.digests.landed[op.id] = digest_of(views if slot is None or views else [slot[: op.nbytes]])

    def unpack(self, op: Recv, slot: torch.Tensor) -> None:
        """From a slot into the arrays."""
        runs = self.staging.runs_of(op, self.dst, "dst") if len(op.places) >= MANY_BOXES else None
        if runs is not None:
            runs.unpack(slot[: op.nbytes], self.dst)
        else:
            unpack(slot[: op.nbytes], [view_of(self.dst, place.tensor, place.dst) for place in op.places])

    def finish_recv(self, op: Recv, slot: torch.Tensor | None) -> None:
        index = self.tally.received
        if slot is not None:
            self.uses[index] = op.num_forwards
            self.release_if_unused(index)
        self.tally.received_bytes += op.nbytes
        self.tally.received = index + 1

    def release_if_unused(self, index: int) -> None:
        if not self.uses[index]:
            self.recvs.pool.give(self.slot_of.pop(index))

    def post_send(self, lane: _Lane) -> bool:
        op: Send = lane.ops[lane.at]  # type: ignore[assignment]
        if len(lane.posted) >= op.window or (op.forwards is not None and self.tally.received <= op.forwards):
            return False
        if op.waits and not self.over.issuperset(op.waits):
            return False
        slot = None
        if op.forwards is not None and op.forwards in self.slot_of:
            buffer = self.slot_of[op.forwards][: op.nbytes]
        else:
            arrays, side = (self.dst, "dst") if op.forwards is not None else (self.src, "src")
            found = self.find_bytes(op, side)
            if found is not None:
                buffer = found
            else:
                slot = lane.pool.take()
                if slot is None:
                    return False
                buffer = slot[: op.nbytes]
                runs = self.staging.runs_of(op, arrays, side) if len(op.places) >= MANY_BOXES else None
                if runs is not None:
                    runs.pack(arrays, buffer)
                else:
                    pack([view_of(arrays, place.tensor, getattr(place, side)) for place in op.places], buffer)
        lane.posted.append((op, self.transport.send(buffer, op.receiver, self.tag), slot))
        lane.at += 1
        if self.digests is not None:  # while it is on its way
            self.digests.sent[op.id] = digest_of([buffer])
        return True

    def finish_send(self, lane: _Lane, op: Send, slot: torch.Tensor | None) -> None:
        if slot is not None:
            lane.pool.give(slot)
        elif op.forwards is not None and op.forwards in self.slot_of:
            self.uses[op.forwards] -= 1
            self.release_if_unused(op.forwards)

    def wait(self, work: Work, op: Recv | Send | _Notification | int) -> None:
        if isinstance(op, int):
            peer, what = op, f"a word to rank {op}"
        elif isinstance(op, Send):
            peer, what = op.receiver, f"message {op.id} to rank {op.receiver}"
        else:
            peer, what = op.sender, f"message {op.id} from rank {op.sender}"
        wait_for(work, self.deadline, self.check, self.program.rank, peer, what)


def _flatten(arrays: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if array is None or not array.is_contiguous() else flat_bytes(array) for array in arrays]


def run_program(
    program: Program,
    transport: Transport,
    src: Sequence[torch.Tensor | None],
    dst: Sequence[torch.Tensor | None],
    staging: Staging,
    *,
    tag: int = 0,
    deadline: float,
    check: Callable[[], None] = lambda: None,
    digests: Digests | None = None,
    tally: Tally | None = None,
) -> None:
    """Do one rank's part; returns when all its operations are done.

    Args:
        program: the part. transport: how bytes travel.
        src, dst: per tensor the local arrays, as carriers (see :func:`carrier`); None where the rank has none.
        staging: buffers of this program. tag: tells programs under way on one transport apart.
        deadline: ``time.monotonic()`` after which waiting fails. check: raises when the run must stop.
        digests: where to note those of all messages. tally: where to note how far this rank came; a new one.

    Raises:
        TransferTimeoutError: the deadline passed. ConnectionError: the transport failed.
        PlanError: nothing is under way, and nothing can start. WrongCopyError: with ``digests``.
    """
    _Run(program, transport, src, dst, staging, tag, deadline, check, digests, tally).run()


def describe_progress(plan: Plan, program: Program, tally: Tally) -> str:
    """How far a rank came in a transfer."""
    total = sum(recv.nbytes for recv in program.recvs)
    return (
        f"rank {program.rank} had received {tally.received} of {len(program.recvs)} messages, {tally.received_bytes} "
        f"of {total} bytes, of the transfer of {', '.join(map(str, plan.tensors[:1]))}"
        f"{_and_more(len(plan.tensors) - 1)} (plan {plan.plan_hash[:12]})"
    )


def _and_more(count: int) -> str:
    return f" and {count} more tensor{'s' * (count > 1)}" if count else ""
