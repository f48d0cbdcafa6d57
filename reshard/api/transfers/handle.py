"""Handles of transfers in progress."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from reshard.coordination import NCCL_ROOT_CAUSE_GRACE_SECONDS, CallGroup, Monitor, keep_exceptions_local
from reshard.errors import ArgumentError, RankLostError, ReshardError, TransferTimeoutError
from reshard.forks import call_at_exit, call_in_child
from reshard.formatting import describe_ranks
from reshard.public_api import not_compiled
from reshard.runtime.cpu.transfer_progress import Tally
from reshard.runtime.cuda.nccl_library import NcclError
from reshard.runtime.cuda.stream import Mark, StreamRunner, is_capturing
from reshard.timeouts import check_wait_timeout

#: Time that the exit of the process waits for transfers in progress.
EXIT_SECONDS = 5.0
#: Polling interval of :meth:`StreamHandle.synchronize`.
SYNCHRONIZE_SECONDS = 0.0002


class TransferState:
    """State of a running transfer, shared by its worker and monitor threads.

    The state refers neither to the handle nor to its result. So a handle that the user drops is freed at once, although
    the transfer continues.

    Attributes:
        call_group: the ranks that take part.
        generation: number of the connections of the call group that the transfer uses.
        done: set when the transfer has ended.
        error: the error that ended it.
        begun_at, ended_at: ``time.monotonic()`` when this rank's part began and ended; None before that.
        tally: progress of this rank's part.
        describe: function that returns the progress as text, for a note on the error. It is set when the transfer
            begins.
    """

    def __init__(self, call_group: CallGroup, generation: int) -> None:
        self.call_group, self.generation = call_group, generation
        self.done = threading.Event()
        self.error: ReshardError | None = None
        self.begun_at: float | None = None
        self.ended_at: float | None = None
        self.tally = Tally()
        self.describe: Callable[[], str] | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self.call_group.members

    def reported_error(self) -> ReshardError | None:
        """The error of this transfer that another rank published, or None."""
        return self.call_group.reported_error(self.generation)

    def stop(self, error: ReshardError) -> None:
        """End the transfer with an error and wake all waiting threads."""
        if not self.done.is_set():
            self.error = self.call_group.record_error(self.generation, error)
            self.done.set()

    def check(self) -> None:
        """Raise the error that ended this transfer, if there is one."""
        if self.error is not None:
            error = copy.copy(self.error)  # transfers of the call group share the error, but each has its own note
            error.__notes__ = [] if self.describe is None else [self.describe()]
            raise error

    def poll(self) -> bool:
        """Poll for the end of the transfer. Always False for a CPU transfer, which its progress thread ends."""
        return False

    def begin(self) -> None:
        """Record that this rank's part begins."""
        self.begun_at = time.monotonic()

    def succeed(self) -> None:
        """Mark the transfer as done."""
        self.ended_at = time.monotonic()
        self.done.set()


def check_process(pid: int) -> None:
    """Raise ArgumentError in a forked child of process ``pid``, because it does not have the threads that transfer."""
    if pid != os.getpid():
        raise ArgumentError(f"this transfer belongs to process {pid}; its fork {os.getpid()} cannot wait for it")


class Handle:
    """A transfer in progress, which runs in the background whether or not :meth:`wait` is called."""

    def __init__(self, state: TransferState, finish: Callable[[], Any]) -> None:
        self._state = state  # the state that the threads of the transfer share
        self._finish = finish  # returns the result
        self._pid = os.getpid()
        self._finishing, self._is_finishing = threading.RLock(), False
        self._interruption: str | None = None  # class of the exception that interrupted ``finish``
        self._result: Any = None

    def __repr__(self) -> str:
        error = self._state.error
        progress = "in progress" if not self.done() else "done" if error is None else type(error).__name__
        return f"Handle(transfer {self._state.generation} of {describe_ranks(self.members)}: {progress})"

    def __reduce__(self) -> Any:
        raise ArgumentError("the handle of a transfer cannot be copied or pickled")

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self._state.members

    def done(self) -> bool:
        """Whether the transfer has ended, so that :meth:`wait` does not block."""
        return self._state.done.is_set()

    @keep_exceptions_local
    @not_compiled
    def wait(self, timeout_seconds: float | None = None) -> Any:
        """Block until the transfer has ended and return its result.

        Args:
            timeout_seconds: limit of this wait; None waits without limit.

        Returns:
            This rank's destination shard (or ``{name: shard}``), None outside the destination.

        Raises:
            TransferTimeoutError: the transfer has not ended within ``timeout_seconds``. It continues, and ``wait``
                may be called again.
            ArgumentError: this process was forked from the one that started the transfer.
            ReshardError: the error that ended the transfer, the same on every rank.
        """
        self._check_process()
        if not self._state.done.wait(check_wait_timeout(timeout_seconds)):
            raise TransferTimeoutError(f"the transfer has not ended after {timeout_seconds:g} s; it continues")
        self._state.check()
        return self._take_result()

    def _check_process(self) -> None:
        check_process(self._pid)

    def _take_result(self) -> Any:
        """Return the result. The first call completes it, for example by casts in place, which must not run twice."""
        with self._finishing:
            if self._interruption is not None:
                raise ArgumentError(
                    f"an earlier wait() for this transfer ended with {self._interruption}, and left its result "
                    "incomplete"
                )
            if self._is_finishing:
                raise ArgumentError("this wait() begins inside another wait() of its transfer, as in a signal handler")
            if self._finish is not None:
                self._is_finishing = True
                try:
                    self._result, self._finish = self._finish(), None  # type: ignore[assignment]
                except BaseException as error:
                    self._interruption = type(error).__name__
                    raise
                finally:
                    self._is_finishing = False
        return self._result

    def _has_work(self) -> bool:
        """Whether :meth:`wait` still completes the result, for example by casts."""
        return self._finish is not None and self._interruption is None and self._state.error is None

    def release(self) -> None:
        """Drop the result after :meth:`wait`. Later calls of :meth:`wait` return None."""
        self._result = None

    @keep_exceptions_local
    @not_compiled
    def synchronize(self, timeout_seconds: float | None = None) -> Any:
        """Like :meth:`wait`, but also block the CPU until a transfer on a GPU has ended."""
        return self.wait(timeout_seconds)


class PostingQueue(Protocol):
    """The queue that posts the transfers of a Mover, and waits for them."""

    def wait_for(self, transfer: PostedTransfer) -> None:
        """Block until a transfer has ended. Raises its error."""

    def has_arrived(self, transfer: PostedTransfer) -> bool:
        """Whether :meth:`wait_for` returns at once; False if it is not known."""

    def wake_at_end(self, transfer: PostedTransfer, wake: Callable[[], None]) -> None:
        """Call ``wake`` from another thread once a transfer has ended."""


class PostedTransfer:
    """A transfer whose operations have all been posted. Its caller must wait for it, on the thread that started it.

    Args:
        queue: posted it.
        posted: the operations with their works, or the error of posting them.
        arrays: what the operations read and write.
        result: what :meth:`wait` returns.

    Attributes:
        begun_at, ended_at: ``time.monotonic()`` when it was posted, and when the wait for it ended.
    """

    __slots__ = ("_arrays", "_queue", "_result", "begun_at", "ended_at", "posted")

    def __init__(self, queue: PostingQueue, posted: Any, arrays: Any, result: Any) -> None:
        self._queue, self.posted, self._arrays, self._result = queue, posted, arrays, result
        self.begun_at = time.monotonic()
        self.ended_at: float | None = None

    def end(self) -> None:
        """Mark the transfer as ended, and drop its arrays."""
        self.ended_at = time.monotonic()
        self.posted = self._arrays = None

    def done(self) -> bool:
        """Whether :meth:`wait` returns at once."""
        return self.ended_at is not None

    def has_arrived(self) -> bool:
        """Whether :meth:`wait` returns at once, because the data is there or the transfer has failed.

        False if it is not known: see :meth:`wake_at_end`.
        """
        return self.ended_at is not None or self._queue.has_arrived(self)

    def wake_at_end(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` once from another thread after the transfer has ended. :meth:`done` is True then."""
        self._queue.wake_at_end(self, wake)

    def wait(self) -> Any:
        """Block until the transfer has ended, and return its result. Raises the error that ended it."""
        if self.ended_at is None:
            self._queue.wait_for(self)
        return self._result

    synchronize = wait

    def release(self) -> None:
        """See :meth:`Handle.release`."""
        self._result = None


def result_of(handle: Handle | PostedTransfer) -> Any:
    """Like :meth:`Handle.wait`, for callers that no compiled code calls and that publish their exceptions."""
    if type(handle) is not Handle:
        return handle.wait()
    handle._check_process()
    handle._state.done.wait()
    handle._state.check()
    return handle._take_result()


def progress_of(handle: Handle) -> Tally:
    """The progress of this rank's part of a transfer."""
    return handle._state.tally


def times_of(handle: Handle | PostedTransfer) -> tuple[float | None, float | None]:
    """``time.monotonic()`` when this rank's part of a transfer began and ended; None before that.

    A :class:`PostedTransfer` ends when its caller has waited for it.
    """
    if isinstance(handle, PostedTransfer):
        return handle.begun_at, handle.ended_at
    return handle._state.begun_at, handle._state.ended_at


class ConfirmedHandle(Handle):
    """A transfer that the ranks confirm together. Every rank must call :meth:`wait`.

    Args:
        inner: handle of this rank's part.
        finish: returns the result, once the ranks have confirmed the transfer.
    """

    def __init__(self, inner: Handle, finish: Callable[[], Any]) -> None:
        super().__init__(TransferState(inner._state.call_group, inner._state.generation), finish)
        self._inner = inner
        self._final_error: ReshardError | None = None

    def done(self) -> bool:
        """Whether this rank's part has ended. Even then, :meth:`wait` may block."""
        return self._inner.done()

    def _has_work(self) -> bool:
        """See :meth:`Handle._has_work`."""
        return super()._has_work() and self._final_error is None

    def _wait_for_part(self, timeout_seconds: float | None) -> None:
        """Block until this rank's part has ended. Raises as :meth:`Handle.wait`, except for errors of the transfer."""
        self._check_process()
        if not self._inner._state.done.wait(check_wait_timeout(timeout_seconds)):
            raise TransferTimeoutError(f"the transfer has not ended after {timeout_seconds:g} s; it continues")

    def _confirm(self, confirm: Callable[[ReshardError | None], None]) -> ReshardError | None:
        """Call ``confirm`` with the error of this rank's part. Returns the error that it raises, with the progress."""
        error: ReshardError | None = None
        try:
            self._inner._state.check()
        except ReshardError as failed:
            error = failed
        try:
            confirm(error)
        except ReshardError as failed:
            describe = self._inner._state.describe
            if describe is not None and not isinstance(failed, RankLostError):
                failed.add_note(describe())
            return failed
        return None


class StreamTransferState(TransferState):
    """The state of a transfer on a GPU that the monitor polls until the device has finished the transfer.

    It holds no array. The allocator knows which streams still use the memory.
    """

    def __init__(self, call_group: CallGroup, generation: int, transfers: StreamRunner, deadline: float) -> None:
        super().__init__(call_group, generation)
        self._group = call_group.group  # the call group does not keep the group alive
        self._transfers, self._deadline = transfers, deadline
        self._pid = os.getpid()
        self.mark: Mark | None = None
        call_group.num_started += 1
        self._number = call_group.num_started
        self.is_ordered = False  # the caller's stream waits for the transfer
        self._broken_at: float | None = None  # when the connections were first found broken

    def begin_at(self, mark: Mark | None) -> None:
        """Record that the transfer is enqueued and ends at ``mark``, or that a CUDA graph captures it (None)."""
        self.begin()
        self.mark = mark
        if mark is None:
            self.succeed()
            return
        _unfinished.add(self)
        self._group.resources.add_user(self)
        call_at_exit(_finish_streams, priority=20)

    def leaves_memory(self) -> bool:
        """Whether later transfers may use the memory of this one: it has ended, or the caller's stream waits for it."""
        return self.is_ordered or is_capturing() or self.poll()

    def succeed(self) -> None:
        """See :meth:`TransferState.succeed`."""
        super().succeed()
        Monitor.of(self._group).forget(self)

    def poll(self) -> bool:
        """Poll the transfer; returns whether it has ended.

        Ends the transfer with an error at its deadline, or if the device or a connection failed.
        """
        try:
            if self.done.is_set():
                pass  # stopped by an error that another rank published
            elif (failed := self.call_group.find_failure(self.generation)) is not None:
                self.stop(failed)  # check before the mark: aborted work also completes on the device
            elif self.mark is not None and self.mark.query():
                self.succeed()
            elif (broken := self._transfers.find_error()) is not None:
                self._stop_unless_explained(ConnectionError(broken))
            elif time.monotonic() >= self._deadline:
                why = self.call_group.explain_timeout(self._number)
                error = TransferTimeoutError(f"rank {self._group.rank}: the transfer did not finish in time{why}")
                self.stop(self.call_group.fail(self.generation, error))
        except NcclError as error:
            self._stop_unless_explained(error)
        except RuntimeError as error:
            self.stop(self.call_group.fail(self.generation, error))
        if self.done.is_set():
            _unfinished.discard(self)
        return self.done.is_set()

    def _stop_unless_explained(self, error: Exception) -> None:
        """End the transfer with an error of NCCL, unless a cause is published soon.

        NCCL does not name the rank that is gone, and to the other ranks a rank that aborts looks like one that is gone.
        """
        now = time.monotonic()
        self._broken_at = now if self._broken_at is None else self._broken_at
        if now >= min(self._broken_at + NCCL_ROOT_CAUSE_GRACE_SECONDS, self._deadline):
            self.stop(self.call_group.fail(self.generation, error))

    def block(self, timeout_seconds: float | None) -> None:
        """Block until the transfer has ended; raises TransferTimeoutError if the timeout passes first."""
        limit = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self.poll():
            if limit is not None and time.monotonic() >= limit:
                raise TransferTimeoutError(f"the transfer has not ended after {timeout_seconds:g} s; it continues")
            time.sleep(SYNCHRONIZE_SECONDS)

    def finish(self, timeout_seconds: float | None) -> None:
        """Block until the device has finished the transfer, or the timeout has passed. Ignores errors."""
        if self._pid == os.getpid():
            with contextlib.suppress(ReshardError):
                self.block(timeout_seconds)

    def release(self) -> None:
        """Called when the group closes. Does nothing: the transfer needs its connections until it has ended."""


class StreamHandle(Handle):
    """A transfer on a GPU: :meth:`wait` makes the current stream wait, not the CPU.

    The state is made and the monitor polls it before any work is enqueued on a stream. After the work is enqueued,
    :meth:`StreamTransferState.begin_at` is called.
    """

    def __init__(self, state: StreamTransferState, finish: Callable[[], Any], transfers: StreamRunner) -> None:
        self._state: StreamTransferState
        super().__init__(state, finish)
        self._transfers = transfers

    def done(self) -> bool:
        """Whether the device has finished the transfer, or the transfer has failed."""
        return self._state.poll()

    @keep_exceptions_local
    @not_compiled
    def wait(self, timeout_seconds: float | None = None) -> Any:
        """Return the result without blocking the CPU. Later work on the current stream waits for the transfer.

        Args:
            timeout_seconds: ignored, because the CPU does not wait.

        Raises:
            ArgumentError: this process was forked from the one that started the transfer.
            ReshardError: the transfer has already failed. :meth:`synchronize` also raises later errors.
        """
        self._check_process()
        self._state.check()
        if self._state.mark is None:
            self._transfers.streams.join()
        else:
            self._state.mark.wait()
        self._state.is_ordered = True
        return self._take_result()

    @keep_exceptions_local
    @not_compiled
    def synchronize(self, timeout_seconds: float | None = None) -> Any:
        """Block until the device has finished the transfer, and return its result. Raises like :meth:`Handle.wait`."""
        self._check_process()
        self._state.block(check_wait_timeout(timeout_seconds))
        return self.wait()


#: Transfers that the device has not finished. The set keeps alive what they use.
_unfinished: set[StreamTransferState] = set()
call_in_child(_unfinished.clear)


def _finish_streams() -> None:
    """At process exit, wait for all unfinished transfers under one deadline: other ranks may need their data."""
    deadline = time.monotonic() + EXIT_SECONDS
    for state in list(_unfinished):
        state.finish(max(deadline - time.monotonic(), 0.0))
