"""Run the transfers of a plan on the CPU, one after another, on a thread in the background."""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reshard.api.arrays.memory_in_use import reserve_until_over
from reshard.api.preparation.agreed_plan import AgreedPlan
from reshard.api.transfers.handle import EXIT_SECONDS, Handle, PostedTransfer, TransferState, check_process
from reshard.coordination import CallGroup, Monitor
from reshard.errors import ReshardError, ResourceError, VerificationError
from reshard.forks import call_at_exit
from reshard.plan import Plan
from reshard.runtime.cpu.encoded_shards import encoded_array
from reshard.runtime.cpu.posted_program import Posted, PostedProgram, make_posted_program
from reshard.runtime.cpu.program_executor import NOTIFY_TAG, VERIFY_TAG, RunOptions, WrongCopyError, run_program
from reshard.runtime.cpu.staging import Staging, view_as_bits
from reshard.runtime.cpu.transfer_progress import Tally, describe_progress
from reshard.runtime.cpu.verification import MessageDigests, TransferDigests, compare_digests, describe_copy
from reshard.runtime.program import RankProgram
from reshard.runtime.transport import BrokenConnectionError, Work, wait_for
from reshard.threads import start_thread

#: Posted sends that a Mover does not hand to its thread at once. Each has at most ``MAX_POSTED_BYTES``.
_MAX_UNQUEUED = 32


class QueuedTransfers:
    """The transfers of one plan over the connections of a call group, in the order in which they were started.

    A transfer that :meth:`post` starts moves without a thread. The thread begins to wait for the transfer when the
    caller does. An earlier wait would wake the thread twice in each transfer while the caller computes.

    Args:
        agreed: the plan and this rank's part of it.
        both_ways: the connections carry both directions at the same time.
        timeout_seconds: limit of each transfer.
        verify: compare digests after each transfer.
        is_one_call: there is one transfer. Take the call group's idle buffers if they are of the same plan, and return
            them at the end.
    """

    def __init__(
        self, agreed: AgreedPlan, both_ways: bool, timeout_seconds: float, verify: bool, is_one_call: bool
    ) -> None:
        self._plan, self._program, self._call_group = agreed.plan, agreed.program, agreed.call_group
        self._group = agreed.call_group.group
        self._generation, self._tag = agreed.decision.generation, agreed.round_number % (NOTIFY_TAG - 1)
        self.timeout_seconds, self._verify, self._reuses_staging = timeout_seconds, verify, is_one_call
        self.transport = self._call_group.transport(self._generation, both_ways, timeout_seconds)
        self._staging = Staging(self._program, self._plan.staging_bytes)
        if is_one_call:
            idle, self._call_group.idle_staging = self._call_group.idle_staging, None
            if idle is not None and idle[0] == self._plan.plan_hash:
                self._staging = idle[1]
        self._posted_program: PostedProgram | None = None
        if self.transport is not None and not verify and not is_one_call:
            self._posted_program = make_posted_program(self._plan, self._program)
        self._queued: TransferState | None = None  # the last transfer that the thread posts
        self._unqueued: deque[PostedTransfer] = deque()  # posted, and not handed to the thread
        self._posted = _PostedTransferState(self._call_group, self._generation, self._plan, self._program)
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._group.resources.add_user(self)

    @property
    def order(self) -> object:
        """A token of this queue. Transfers with the same token run one after another."""
        return self._jobs

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated for staging buffers."""
        return self._staging.allocated_bytes

    def start(
        self,
        src: Sequence[torch.Tensor | None],
        dst: Sequence[torch.Tensor | None],
        finish: Callable[[], Any],
        *,
        is_noted: bool = True,
    ) -> Handle:
        """Start a transfer of checked arrays.

        Args:
            src, dst: local arrays, one per tensor; None where the rank has none.
            finish: returns the result of the handle.
            is_noted: whether later transfers of others are refused the memory of these arrays until the end.
        """
        self._start_thread()
        state = TransferState(self._call_group, self._generation)
        handle = Handle(state, finish)
        if self.transport is not None:
            Monitor.of(self._group).watch(state)
        if is_noted:
            reserve_until_over(self._jobs, state.done.is_set, src, dst)
        posted = self._post(src, dst)
        if posted is None:
            self._queued = state
        self._jobs.put(_RunJob(self, state, src, dst, posted))
        return handle

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        # Ends the thread if nobody calls close. It comes first, because an interrupt may end start() of the thread.
        weakref.finalize(self, self._jobs.put, None).atexit = False
        _running.add(self)
        call_at_exit(_finish_all, priority=20)
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="reshard-progress", daemon=True)
        try:
            start_thread(self._thread)
        except ResourceError as error:  # the other ranks have started this transfer
            self._thread = None
            raise self._call_group.fail(self._generation, error) from None

    def _post(
        self, src: Sequence[torch.Tensor | None], dst: Sequence[torch.Tensor | None], *, marks_ends: bool = False
    ) -> Posted | Exception | None:
        """Post all operations of a transfer that need no thread to start. For ``marks_ends``: see PostedProgram.

        Returns:
            The operations, or the error of posting them. None if the thread must post them, because it has yet to run
            an earlier transfer, or because the operations cannot all be posted at once.
        """
        is_behind = self._queued is not None and not self._queued.done.is_set()
        if self._posted_program is None or is_behind or not self._posted_program.fits(src, dst):
            return None
        self._queued = None
        try:
            self._call_group.check_usable(self._generation)
            return self._posted_program.post(
                self.transport,  # type: ignore[arg-type]
                src,  # type: ignore[arg-type]
                dst,  # type: ignore[arg-type]
                self._tag,
                marks_ends=marks_ends,
            )
        except Exception as error:
            return error

    def post(
        self,
        src: Sequence[torch.Tensor | None],
        dst: Sequence[torch.Tensor | None],
        result: dict[str, torch.Tensor | None],
    ) -> PostedTransfer | None:
        """Start a transfer of checked arrays whose caller waits for it; None if :meth:`start` must start it.

        The caller must wait for every transfer of this method, in any order.

        Args:
            src, dst: see :meth:`start`. No unfinished transfer of others uses their memory.
            result: what ``wait`` returns.
        """
        posted = self._post(src, dst, marks_ends=True)
        if posted is None:
            return None
        transfer = PostedTransfer(self, posted, (src, dst), result)
        self._unqueued.append(transfer)
        is_failed = isinstance(posted, Exception)
        if is_failed or (
            len(self._unqueued) >= _MAX_UNQUEUED
            and self._posted_program is not None
            and self._posted_program.only_sends
        ):
            self._hand_over()
        return transfer

    def _hand_over(self, last: PostedTransfer | None = None, wake: Callable[[], None] | None = None) -> None:
        """Let the thread wait for the transfers that were posted up to ``last``, or for all, and then call ``wake``."""
        batch = list(self._unqueued)
        if last is not None:
            batch = batch[: batch.index(last) + 1] if last in batch else []
        self._start_thread()
        self._jobs.put(_WaitJob(self, batch, wake))
        for _ in batch:  # last, because an interrupt may come at any line, and the thread may get a transfer twice
            self._unqueued.popleft()

    def wait_for(self, transfer: PostedTransfer) -> None:
        """Block until a transfer of :meth:`post` has ended, and raise its error. Signals can interrupt the wait."""
        if transfer.ended_at is not None:
            return
        check_process(self._group.pid)
        state = self._posted
        if state.error is None and not self._take_arrived(transfer):
            self._hand_over(transfer, self._wake_caller)
        while transfer.ended_at is None and state.error is None:
            state.ended.get()
        if transfer.ended_at is None:
            state.check()

    def _wake_caller(self) -> None:
        self._posted.ended.put(None)

    def has_arrived(self, transfer: PostedTransfer) -> bool:
        """Whether :meth:`wait_for` returns at once; False if it is not known."""
        posted = transfer.posted
        return self._posted.error is not None or (isinstance(posted, Posted) and posted.has_arrived())

    def wake_at_end(self, transfer: PostedTransfer, wake: Callable[[], None]) -> None:
        """Call ``wake`` from the thread once a transfer of :meth:`post` has ended."""
        self._hand_over(transfer, wake)

    def _take_arrived(self, transfer: PostedTransfer) -> bool:
        """End the next transfer on the caller's thread if its messages have arrived. Returns whether it did."""
        posted = transfer.posted
        if not (
            self._unqueued and self._unqueued[0] is transfer and isinstance(posted, Posted) and posted.has_arrived()
        ):
            return False
        try:
            self._wait_for_posted(posted, time.monotonic() + self.timeout_seconds, self._posted)
            transfer.end()
            self._unqueued.popleft()
        except Exception as error:
            self._stop(self._posted, error)
        return True

    def wait_for_batch(self, batch: Sequence[PostedTransfer], wake: Callable[[], None] | None) -> None:
        """Wait for transfers of :meth:`post`, on the thread, and then call ``wake``."""
        state, monitor = self._posted, Monitor.of(self._group)
        monitor.watch(state)
        try:
            self._call_group.check_usable(self._generation)
            for transfer in batch:
                if transfer.ended_at is None:
                    state.tally = Tally()
                    self._wait_for_posted(transfer.posted, time.monotonic() + self.timeout_seconds, state)
                    transfer.end()
        except BaseException as error:
            self._stop(state, error)
        finally:
            monitor.forget(state)
            if wake is not None:
                wake()

    def close(self) -> None:
        """End the thread after the transfers in progress. The group's connections stay open."""
        if self._closed:
            return
        self._closed = True
        if self._unqueued and self._group.pid == os.getpid():
            self._hand_over()
        if self._thread is None:
            self.transport = None
        elif self._group.pid == os.getpid():
            self._jobs.put(_CloseJob(self))

    def finish(self, timeout_seconds: float | None) -> None:
        """Close, wait for transfers in progress, and abort transfers that do not end within the timeout."""
        self.close()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive() and self.transport is not None:
                self.transport.abort()
                self._thread.join(1.0)

    def release(self) -> None:
        """Called when the group closes: close, and drop the connections once transfers in progress have ended."""
        self.close()

    def on_thread_end(self) -> None:
        """Drop the connections and return the buffers. The thread calls it last, after :meth:`close`."""
        self.transport = None
        if self._reuses_staging and self._call_group.broken is None and self._group.is_usable():
            self._call_group.idle_staging = self._plan.plan_hash, self._staging

    def run(
        self,
        state: TransferState,
        src: Sequence[torch.Tensor | None],
        dst: Sequence[torch.Tensor | None],
        posted: Posted | Exception | None,
    ) -> threading.Event:
        """Run a transfer on the thread of the caller.

        Args:
            posted: see :meth:`_post`.

        Returns:
            The event of the end of the transfer. After an error it is set already. The caller sets it when it no longer
            refers to the handle: if its user then drops the handle, nobody will wait for the result.
        """
        try:
            state.check()
            self._call_group.check_usable(self._generation)
            state.describe = functools.partial(describe_progress, self._plan, self._program, state.tally)
            state.begin()
            deadline = time.monotonic() + self.timeout_seconds
            if posted is None:
                self._run_program(state, src, dst, deadline)
            else:
                self._wait_for_posted(posted, deadline, state)
            state.ended_at = time.monotonic()
        except BaseException as error:
            self._stop(state, error)
        finally:
            if self.transport is not None:
                Monitor.of(self._group).forget(state)
        return state.done

    def _wait_for_posted(self, posted: Posted | Exception, deadline: float, state: TransferState) -> None:
        if isinstance(posted, Exception):
            state.check()
            raise posted
        assert self._posted_program is not None
        self._posted_program.wait(posted, deadline, state.check, state.tally)

    def _stop(self, state: TransferState, error: BaseException) -> None:
        """End a transfer with an error of this rank, on all ranks."""
        if isinstance(error, VerificationError):  # every rank raises the same one, so it needs no report
            state.stop(error)
            return
        # The transport may still write to the old buffers.
        self._staging = Staging(self._program, self._plan.staging_bytes)
        if isinstance(error, BrokenConnectionError):
            error = self._call_group.find_root_cause(self._generation, error, state.done.wait)
        if isinstance(error, WrongCopyError):
            error = VerificationError(describe_copy(self._plan, self._program.rank, error.id))
        if not state.done.is_set():  # no rank has published the error
            state.stop(self._call_group.fail(self._generation, error))

    def _run_program(
        self,
        state: TransferState,
        src: Sequence[torch.Tensor | None],
        dst: Sequence[torch.Tensor | None],
        deadline: float,
    ) -> None:
        digests = None
        if self._verify:
            digests, src = TransferDigests(), list(map(encoded_array, src))
            digests.replicas = self._message_digests.replicas.digest_replicas(self._program.rank, src)
        run_program(
            self._program,
            self.transport,  # type: ignore[arg-type]
            list(map(view_as_bits, src)),
            list(map(view_as_bits, dst)),
            self._staging,
            RunOptions(tag=self._tag, deadline=deadline, check=state.check, digests=digests, tally=state.tally),
        )
        if digests is not None and self.transport is not None:
            self._compare(digests, state, deadline)

    @functools.cached_property
    def _message_digests(self) -> MessageDigests:
        return MessageDigests(self._plan)

    def _compare(self, digests: TransferDigests, state: TransferState, deadline: float) -> None:
        rank = self._program.rank

        def wait(work: Work, other: int) -> None:
            wait_for(work, deadline, state.check, rank, other, f"comparing digests with rank {other}")

        compare_digests(self._message_digests, rank, digests, self.transport, self._tag + VERIFY_TAG, wait)


class _PostedTransferState(TransferState):
    """All transfers of :meth:`QueuedTransfers.post` of a Mover. It is done once one of them has failed.

    Attributes:
        ended: a queue that gets an item when a transfer has failed, or has ended while the caller waits for it.
    """

    def __init__(self, call_group: CallGroup, generation: int, plan: Plan, program: RankProgram) -> None:
        super().__init__(call_group, generation)
        self.ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.describe = lambda: describe_progress(plan, program, self.tally)

    def stop(self, error: ReshardError) -> None:
        """See :meth:`TransferState.stop`."""
        super().stop(error)
        self.ended.put(None)


@dataclass(frozen=True)
class _RunJob:
    """One transfer to run, of which ``posted`` has started already if it is not None."""

    transfers: QueuedTransfers
    state: TransferState
    src: Sequence[Any]
    dst: Sequence[Any]
    posted: Posted | Exception | None


@dataclass(frozen=True)
class _WaitJob:
    """Transfers of :meth:`QueuedTransfers.post` to wait for, and a function to call then."""

    transfers: QueuedTransfers
    batch: Sequence[PostedTransfer]
    wake: Callable[[], None] | None


@dataclass(frozen=True)
class _CloseJob:
    """The end of the thread."""

    transfers: QueuedTransfers


def _serve(jobs: queue.SimpleQueue[Any]) -> None:
    """Run transfers one after another.

    Between two transfers the thread holds no reference to either, so that both can be freed.
    """
    while (job := jobs.get()) is not None:
        if isinstance(job, _CloseJob):
            job.transfers.on_thread_end()
            return
        if isinstance(job, _WaitJob):
            job.transfers.wait_for_batch(job.batch, job.wake)
            del job
            continue
        done = job.transfers.run(job.state, job.src, job.dst, job.posted)
        del job
        done.set()


#: Transfers with a thread. A thread that is inside a C++ wait at interpreter shutdown would crash the process.
_running: weakref.WeakSet[QueuedTransfers] = weakref.WeakSet()


def _finish_all() -> None:
    for transfers in list(_running):
        transfers.finish(EXIT_SECONDS)
