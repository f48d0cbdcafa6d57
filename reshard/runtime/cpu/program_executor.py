"""Run one rank's program over a transport. Each kind of operation is posted and waited for in plan order.

A rank has four queues: receives, sends to other hosts, sends inside its host, and notifications from other ranks. Each
queue posts its operations in plan order, and its own thread waits for them in that order. No queue blocks another. So a
rank receives a chunk while it still forwards the previous chunk, and both directions of a link are busy at once. When a
wait returns, the thread posts every operation that can now start, in any queue.

Why it cannot deadlock: All ranks share one total order of messages. Each queue of messages has its own buffer pool and
takes buffers in that order. A message waits only for buffers that earlier messages release. Take the earliest
unfinished message. All messages before it are finished, so it is next in its queue at both ends. Its sender has the
data, both ends have a buffer, and both ends have posted their operation. So this message finishes too.

Receives are posted before sends: Gloo may otherwise run the two directions one after the other.

A message may have to wait for a message of another rank on the same host. The rank that finishes the earlier message
then sends a one-byte notification to each waiting rank. Notifications have their own tag and follow plan order too.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.errors import PlanError, ResourceError
from reshard.runtime.array_bytes import digest_concatenated, flat_bytes
from reshard.runtime.cpu.box_tables import tabulate_buffers
from reshard.runtime.cpu.encoded_shards import DecodedTarget, EncodedSource
from reshard.runtime.cpu.queues import Notification, OperationQueue
from reshard.runtime.cpu.staging import CastSource, Staging, copy_into, pack, view_of
from reshard.runtime.cpu.transfer_progress import Tally
from reshard.runtime.cpu.verification import TransferDigests, is_copy_of
from reshard.runtime.program import BoxRange, Event, LocalBox, RankProgram, Recv, Send
from reshard.runtime.transport import Transport, Work, join, wait_for
from reshard.threads import start_thread

#: Interval between calls of ``check`` while a queue has no posted operation to wait for.
QUEUE_POLL_INTERVAL_SECONDS = 0.2
#: Notifications use the tag of the program plus this offset. Program tags are smaller.
NOTIFY_TAG = 2**29
#: The exchange of digests uses the tag of the program plus this offset.
VERIFY_TAG = 2**30
#: Maximum number of posted receives of notifications.
_NOTIFY_AHEAD = 8


class WrongCopyError(Exception):
    """A copy inside a rank, or what it gathers, differs from its source. ``id`` is the id of the message."""

    def __init__(self, message: int) -> None:
        super().__init__(f"message {message}")
        self.id = message


@dataclass(frozen=True)
class RunOptions:
    """Settings with which a program runs.

    Attributes:
        deadline: value of ``time.monotonic()`` at which waits time out.
        tag: tells concurrent programs on a transport apart; the same on all ranks.
        check: called while waiting; an error that it raises stops the run.
        digests: receives the digest of every message.
        tally: updated with this rank's progress.
    """

    deadline: float
    tag: int = 0
    check: Callable[[], None] = lambda: None
    digests: TransferDigests | None = None
    tally: Tally = field(default_factory=Tally)


class _Execution:
    def __init__(
        self,
        program: RankProgram,
        transport: Transport,
        src: Sequence[torch.Tensor | None],
        dst: Sequence[torch.Tensor | None],
        staging: Staging,
        options: RunOptions,
    ) -> None:
        self.program, self.transport, self.tag = program, transport, options.tag
        self.digests = options.digests
        self.encoders = {index: array for index, array in enumerate(src) if isinstance(array, EncodedSource)}
        self.decoders = {index: array for index, array in enumerate(dst) if isinstance(array, DecodedTarget)}
        self.src = [item.encoded if isinstance(item, EncodedSource) else item for item in src]
        self.dst = [item.encoded if isinstance(item, DecodedTarget) else item for item in dst]
        self.encoded: set[int] = set()  # sends whose elements are encoded
        self.is_encoding = bool(self.encoders)
        self.staging = staging
        self.deadline, self.check = options.deadline, options.check
        # flattened once, so that a contiguous message is one slice
        self.flat_src, self.flat_dst = _flatten(self.src), _flatten(self.dst)
        self.shared_memory: Any = getattr(transport, "shared_memory", None)
        self.casts = {index for index, array in enumerate(self.src) if isinstance(array, CastSource)}
        self.lock = threading.Lock()  # guards the attributes below while threads run
        self.recvs = OperationQueue(self.lock, program.recvs, staging.recv)
        self.sends = [
            OperationQueue(self.lock, program.sends_across, staging.across),
            OperationQueue(self.lock, program.sends_inside, staging.inside),
        ]
        self.notifications = OperationQueue(
            self.lock, [Notification(event[0], rank, event) for event, rank in program.awaited]
        )
        self.queues = (self.recvs, *self.sends, self.notifications)
        self.done: set[Event] = set()
        self.to_notify: dict[int, deque[Event]] = {}  # rank -> events to notify it of, in the order that it expects
        for event, ranks in program.notify.items():
            for rank in ranks:
                self.to_notify.setdefault(rank, deque()).append(event)
        self.notifying: list[tuple[Work, torch.Tensor, int]] = []  # (work, its byte, receiver)
        self.slot_of: dict[int, torch.Tensor] = {}  # index of a receive -> its staging slot
        self.num_readers: dict[int, int] = {}  # index of a receive -> forwards that still read its slot
        self.tally = options.tally
        self.num_threads = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        threads = []
        if self.encoders:
            threads.append(threading.Thread(target=self.encode, name="reshard-encode", daemon=True))
            start_thread(threads[0])
        with self.lock:
            self.post()
        for copy in self.program.copies:
            self.encode_boxes([copy.box])
            target = view_of(self.dst, copy.box.tensor, copy.box.dst)
            source = view_of(self.src, copy.box.tensor, copy.box.src)
            copy_into(target, source)
            if self.digests is not None and not is_copy_of(target, source):
                raise WrongCopyError(copy.id)
            self.decode_boxes([copy.box])
        self.tally.copied = True
        queues = [queue for queue in self.queues if queue.ops]
        self.num_threads = len(queues)
        for queue in queues[1:]:
            thread = threading.Thread(target=self.drain, args=(queue,), name="reshard-queue", daemon=True)
            try:
                start_thread(thread)
            except ResourceError as error:
                self.stop(error)
                break
            threads.append(thread)
        if queues:
            self.drain(queues[0])
        for thread in threads:
            thread.join()
        for work, _, rank in self.notifying if self.error is None else []:
            self.wait(work, rank)
        if self.error is not None:
            raise self.error

    def drain(self, queue: OperationQueue) -> None:
        """Wait for the operations of a queue in order. After each one, post every operation that can now start."""
        try:
            while True:
                with self.lock:
                    while not queue.posted and not queue.is_finished and self.error is None:
                        if not self.is_encoding and not any(other.posted for other in self.queues):
                            raise PlanError(
                                f"rank {self.program.rank}: message {queue.ops[queue.next].id} can never start: "
                                "no posted operation can free a buffer or bring its data"
                            )
                        queue.sleeping = True
                        queue.changed.wait(QUEUE_POLL_INTERVAL_SECONDS)
                        queue.sleeping = False
                        self.check()
                    if queue.is_finished or self.error is not None:
                        return
                    op, work, slot = queue.posted[0]
                self.wait(work, op)
                if isinstance(op, Recv):
                    self.deliver(op, slot)
                with self.lock:
                    queue.posted.popleft()
                    if isinstance(op, Recv):
                        self.finish_recv(op, slot)
                        self.finish_event((op.id, False))
                    elif isinstance(op, Send):
                        self.finish_send(queue, op, slot)
                        self.finish_event((op.id, True))
                    else:
                        self.done.add(op.event)
                    self.post_and_wake()
                if isinstance(op, Recv) and not op.is_relay:  # after posting, so that it overlaps the transfer
                    self.decode_boxes(op.boxes)
        except BaseException as error:
            self.stop(error)

    def post_and_wake(self) -> None:
        """Post every operation that can start, and wake the queues that wait for one."""
        self.post()
        for other in self.queues:
            if other.sleeping and other.posted:
                other.changed.notify()

    def stop(self, error: BaseException) -> None:
        """End all threads with the first error."""
        with self.lock:
            first = self.error is None
            self.error = self.error or error
            for other in self.queues:
                other.changed.notify()
        abort = getattr(self.transport, "abort", None)
        if first and abort is not None and self.num_threads > 1:  # end the waits of the other threads
            with contextlib.suppress(Exception):
                abort()

    def encode(self) -> None:
        """Encode the elements of each send, in plan order, and post what can start."""
        try:
            sends = [op for queue in self.sends for op in queue.ops if op.forwards is None]
            for op in sorted(sends, key=lambda send: send.id):
                self.encode_boxes(op.boxes)
                with self.lock:
                    if self.error is not None:
                        return
                    self.encoded.add(op.id)
                    self.post_and_wake()
        except BaseException as error:
            self.stop(error)
        finally:
            with self.lock:
                self.is_encoding = False

    def encode_boxes(self, boxes: Sequence[LocalBox]) -> None:
        for box in boxes:
            if box.tensor in self.encoders and box.src is not None:
                self.encoders[box.tensor].encode(box.src)

    def decode_boxes(self, boxes: Sequence[LocalBox]) -> None:
        for box in boxes:
            if box.tensor in self.decoders and box.dst is not None:
                self.decoders[box.tensor].decode(box.dst)

    def finish_event(self, event: Event) -> None:
        """Mark an event as done. Send each waiting rank the notifications now due, in the order that it expects."""
        self.done.add(event)
        for rank in self.program.notify.get(event, ()):
            unsent = self.to_notify[rank]
            while unsent and unsent[0] in self.done:
                unsent.popleft()
                byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
                self.notifying.append((self.transport.send(byte, rank, self.tag + NOTIFY_TAG), byte, rank))

    def post(self) -> None:
        """Post every operation that can start, receives first."""
        if self.error is not None:
            return
        queue = self.notifications
        while queue.next < len(queue.ops) and len(queue.posted) < _NOTIFY_AHEAD:
            op, byte = queue.ops[queue.next], torch.empty(1, dtype=torch.uint8, device="cpu")
            queue.posted.append((op, self.transport.recv(byte, op.sender, self.tag + NOTIFY_TAG), byte))
            queue.next += 1
        while self.recvs.next < len(self.recvs.ops) and self.post_recv():
            pass
        num_free = self.recvs.pool.num_free
        for queue in self.sends:
            while queue.next < len(queue.ops) and self.post_send(queue):
                pass
        if self.recvs.pool.num_free > num_free:  # gathered messages have released slots
            self.post()

    def find_bytes(self, op: Recv | Send, part: BoxRange, side: str) -> torch.Tensor | None:
        """The bytes of a part inside an array of this rank; None if they are not contiguous there."""
        box = op.boxes[part.boxes.start]
        at = getattr(box, side)
        if at is None or part.boxes.stop - part.boxes.start > 1:
            return None
        arrays, flats = (self.src, self.flat_src) if side == "src" else (self.dst, self.flat_dst)
        array, flat = arrays[box.tensor], flats[box.tensor]
        assert array is not None
        if flat is None:
            view = view_of(arrays, box.tensor, at)
            return flat_bytes(view) if view.is_contiguous() else None
        span = self.staging.span_of(op, part, array, side)
        return None if span is None else flat[span[0] : span[1]]

    def post_recv(self) -> bool:
        """Post the next receive; False if it cannot start yet."""
        queue = self.recvs
        index, op = queue.next, self.program.recvs[queue.next]
        if len(queue.posted) >= op.ahead or (op.waits and not self.done.issuperset(op.waits)):
            return False
        slot = None
        if self.uses_shared_memory(op, op.sender) and not op.is_relay:
            boxes = self.staging.tabulate(op, self.dst, "dst")
            work = self.shared_memory.recv(boxes, self.dst, op.sender, self.tag)
        else:
            views = [self.find_bytes(op, part, "dst") for part in op.parts]
            if any(part is None for part in views):
                slot = queue.pool.take()
                if slot is None:
                    return False
                self.slot_of[index] = slot
            work = self.start_recv(op, _fill(views, op.parts, slot))
        queue.posted.append((op, work, slot))
        queue.next += 1
        return True

    def uses_shared_memory(self, op: Recv | Send, rank: int) -> bool:
        """Whether a message to or from a rank goes through shared memory."""
        return self.shared_memory is not None and self.shared_memory.carries(rank, op.nbytes)

    def start_recv(self, op: Recv, buffers: Sequence[torch.Tensor]) -> Work:
        if self.uses_shared_memory(op, op.sender):
            return self.shared_memory.recv(tabulate_buffers(buffers), buffers, op.sender, self.tag)
        return join([self.transport.recv(part, op.sender, self.tag) for part in buffers])

    def start_send(self, op: Send, buffers: Sequence[torch.Tensor]) -> Work:
        if self.uses_shared_memory(op, op.receiver):
            return self.shared_memory.send(tabulate_buffers(buffers), buffers, op.receiver, self.tag)
        return join([self.transport.send(part, op.receiver, self.tag) for part in buffers])

    def deliver(self, op: Recv, slot: torch.Tensor | None) -> None:
        """Unpack a received message into the destination arrays, and compute its digest."""
        if slot is not None and not op.is_relay:
            self.unpack(op, slot)
        if self.digests is not None:
            views = [view_of(self.dst, box.tensor, box.dst) for box in op.boxes] if not op.is_relay else []
            self.digests.received[op.id] = digest_concatenated(views if slot is None or views else [slot[: op.nbytes]])

    def unpack(self, op: Recv, slot: torch.Tensor) -> None:
        """Copy the parts that were not received into the arrays themselves."""
        for part in op.parts:
            if self.find_bytes(op, part, "dst") is None:
                self.staging.unpack(op, part, self.dst, "dst", slot[part.bytes])

    def finish_recv(self, op: Recv, slot: torch.Tensor | None) -> None:
        index = self.tally.received
        if slot is not None:
            self.num_readers[index] = op.num_forwards
            self.release_if_unused(index)
        self.tally.received_bytes += op.nbytes
        self.tally.received = index + 1

    def release_if_unused(self, index: int) -> None:
        if not self.num_readers[index]:
            self.recvs.pool.give(self.slot_of.pop(index))

    def post_send(self, queue: OperationQueue) -> bool:
        """Post the next send of a queue; False if it cannot start yet."""
        op: Send = queue.ops[queue.next]  # type: ignore[assignment]
        if len(queue.posted) >= op.window or self.tally.received <= op.last_source:
            return False
        if op.waits and not self.done.issuperset(op.waits):
            return False
        if op.forwards is None and self.encoders and op.id not in self.encoded:
            return False
        arrays, side = (self.dst, "dst") if op.forwards is not None else (self.src, "src")
        slot = None
        if self.uses_shared_memory(op, op.receiver) and self.can_share_boxes(op):
            work = self.shared_memory.send(self.staging.tabulate(op, arrays, side), arrays, op.receiver, self.tag)
            sent = [view_of(arrays, box.tensor, getattr(box, side)) for box in op.boxes] if self.digests else []
        else:
            filled = self.fill_buffers(queue, op, arrays, side)
            if filled is None:
                return False
            sent, slot = filled
            work = self.start_send(op, sent)
        queue.posted.append((op, work, slot))
        queue.next += 1
        if self.digests is not None:  # after posting, so that it overlaps the transfer
            self.digests.sent[op.id] = digest_concatenated(sent)
        return True

    def can_share_boxes(self, op: Send) -> bool:
        """Whether the bytes of a message lie in arrays, neither in the slot of a relay nor to be cast first."""
        if op.gathers:
            return False
        if op.forwards is not None:
            return not self.program.recvs[op.forwards].is_relay
        return not self.casts or self.casts.isdisjoint(box.tensor for box in op.boxes)

    def fill_buffers(
        self, queue: OperationQueue, op: Send, arrays: Sequence[torch.Tensor | None], side: str
    ) -> tuple[list[torch.Tensor], torch.Tensor | None] | None:
        """The buffers of a send, and the slot that it takes for them. None if no slot is free."""
        if op.gathers:
            slot = queue.pool.take()
            if slot is None:
                return None
            self.gather(op, slot)
            return _fill([None] * len(op.parts), op.parts, slot), slot
        views = [self.find_bytes(op, part, side) for part in op.parts]
        slot, held = None, None if op.forwards is None else self.slot_of.get(op.forwards)
        if held is None and any(part is None for part in views):
            slot = queue.pool.take()
            if slot is None:
                return None
            for part, direct in zip(op.parts, views, strict=True):
                if direct is None:
                    self.staging.pack(op, part, arrays, side, slot[part.bytes])
        return _fill(views, op.parts, slot if held is None else held), slot

    def gather(self, op: Send, slot: torch.Tensor) -> None:
        """Copy the boxes of a gathered message into its slot, and release the slots that only it still reads."""
        at = 0
        passed_on: dict[int, dict[int, torch.Tensor]] = {}  # receive -> first byte there -> bytes of the slot
        for box, source in zip(op.boxes, op.gathers, strict=True):
            if source is None:
                view = view_of(self.src, box.tensor, box.src)
            elif source.is_staged:
                view = self.slot_of[source.recv][source.bytes]
            else:
                view = view_of(self.dst, box.tensor, box.dst)
            part = slot[at : at + view.numel() * view.element_size()]
            pack([view], part)
            at += len(part)
            if source is not None:
                passed_on.setdefault(source.recv, {})[source.bytes.start] = part
        self.check_gathered(op, passed_on)
        for recv in {source.recv for source in op.gathers if source is not None and source.is_staged}:
            self.num_readers[recv] -= 1
            self.release_if_unused(recv)

    def check_gathered(self, op: Send, passed_on: dict[int, dict[int, torch.Tensor]]) -> None:
        """Compare what a gathered message passes on of whole messages with what these brought, if digests are known.

        Args:
            passed_on: ``{receive: {first byte there: bytes}}``.
        """
        if self.digests is None:
            return
        for recv, digests_of in passed_on.items():
            brought = self.program.recvs[recv]
            if sum(map(len, digests_of.values())) == brought.nbytes:
                digest = digest_concatenated([digests_of[first] for first in sorted(digests_of)])
                if digest != self.digests.received[brought.id]:
                    raise WrongCopyError(op.id)

    def finish_send(self, queue: OperationQueue, op: Send, slot: torch.Tensor | None) -> None:
        if slot is not None:
            queue.pool.give(slot)
        elif op.forwards is not None and op.forwards in self.slot_of:
            self.num_readers[op.forwards] -= 1
            self.release_if_unused(op.forwards)

    def wait(self, work: Work, op: Recv | Send | Notification | int) -> None:
        if isinstance(op, int):
            peer, what = op, f"a notification to rank {op}"
        elif isinstance(op, Send):
            peer, what = op.receiver, f"message {op.id} to rank {op.receiver}"
        else:
            notified = "the notification of " if isinstance(op, Notification) else ""
            peer, what = op.sender, f"{notified}message {op.id} from rank {op.sender}"
        wait_for(work, self.deadline, self.check, self.program.rank, peer, what)


def _fill(
    views: Sequence[torch.Tensor | None], parts: Sequence[BoxRange], slot: torch.Tensor | None
) -> list[torch.Tensor]:
    """The buffers of a message: bytes of arrays where they are contiguous, else the part of its staging slot."""
    return [slot[part.bytes] if view is None else view for view, part in zip(views, parts, strict=True)]  # type: ignore[index]


def _flatten(arrays: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if array is None or not array.is_contiguous() else flat_bytes(array) for array in arrays]


def run_program(
    program: RankProgram,
    transport: Transport,
    src: Sequence[torch.Tensor | None],
    dst: Sequence[torch.Tensor | None],
    staging: Staging,
    options: RunOptions,
) -> None:
    """Run one rank's program; returns when all its operations are finished.

    Args:
        src, dst: one local array per tensor, as :func:`~reshard.runtime.cpu.staging.view_as_bits` gives it; None if
            the rank has none.
        staging: buffers of this program.

    Raises:
        TransferTimeoutError: the deadline passed. ConnectionError: the transport failed.
        PlanError: an operation can never start. WrongCopyError: with ``digests``, a local copy differs from its source.
    """
    _Execution(program, transport, src, dst, staging, options).run()
