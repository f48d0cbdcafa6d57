"""NCCL communicators that never block the host without a deadline.

Communicators are non-blocking (``ncclConfig_t.blocking = 0``). An NCCL thread creates the communicator, and connects
two ranks when they first exchange messages. :meth:`Communicator.wait` polls until it is done. Since NCCL 2.22 such a
thread also launches every group. Before 2.22 it launched only groups that connect ranks. Decision 18 explains why this
is not ``ProcessGroupNCCL``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reshard.forks import call_in_child
from reshard.runtime.cuda.nccl_library import (
    DATA_TYPES,
    IN_PROGRESS,
    REDUCTIONS,
    SUCCESS,
    CommHandle,
    Library,
    NcclError,
    StreamHandle,
    UniqueId,
    make_config,
)

#: Time that an abort waits for a call of another thread to return before it aborts anyway.
ABORT_WAIT_SECONDS = 0.5
#: Time that :meth:`Communicator.abort` and :meth:`Communicator.close` wait for NCCL. NCCL frees device memory, which
#: waits for all kernels of the device. NCCL also waits until all CUDA graphs that captured the communicator are
#: destroyed.
ABORT_SECONDS, CLOSE_SECONDS = 2.0, 5.0
#: Shortest wait of an abort or close, even after the shared deadline: earlier aborts may be waiting for this one.
MIN_ABORT_WAIT_SECONDS = 0.1
#: A wait polls without pauses for this long, since NCCL launches a group in tens of microseconds.
SPIN_SECONDS = 0.0005

#: ``(device address, bytes, rank at the other end)``.
NcclMessage = tuple[int, int, int]
#: A function that a wait calls from time to time. It raises an error if the wait cannot succeed.
Poll = Callable[[], None]


#: Begin of each abort in progress. Aborts wait for each other, so they share the deadline of the first.
_aborting: dict[Communicator, float] = {}
call_in_child(_aborting.clear)


class Communicator:
    """A non-blocking communicator on the current CUDA device.

    Groups of different threads run one after another. Any thread may call :meth:`abort` at any time.

    Args:
        library: NCCL.
        unique_id: result of :meth:`Library.make_unique_id`, the same on all ranks.
        rank, size: this rank within the communicator, and the number of its ranks.
        timeout_seconds: limit for creating the communicator, and for launching a group.
        poll: called every 0.2 s during a wait; raises an error to end the wait.
        in_thread: makes a context manager, entered in the thread that aborts or destroys the communicator.

    Raises:
        NcclError: NCCL could not create it. TimeoutError: not all ranks joined in time. Or what ``poll`` raises.
    """

    def __init__(
        self,
        library: Library,
        unique_id: bytes,
        rank: int,
        size: int,
        *,
        timeout_seconds: float,
        poll: Poll = lambda: None,
        in_thread: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.nccl, self.rank, self.size = library, rank, size
        self._timeout_seconds, self._poll, self._in_thread = timeout_seconds, poll, in_thread
        self._lock = threading.RLock()  # held during calls of NCCL
        self._posting = threading.RLock()  # held from the start of a group until it is launched
        self._ending = threading.Lock()  # held to decide whether the communicator is aborted or closed
        self._ended = threading.Event()
        self._comm = CommHandle()
        self._aborted = self._closed = self._finalized = False
        self._close_by: float | None = None  # ``time.monotonic()``
        config, shared = make_config(), UniqueId.from_buffer_copy(unique_id)
        library.check(
            "ncclCommInitRankConfig",
            ctypes.byref(self._comm), size, shared, rank, ctypes.byref(config),
            also=(IN_PROGRESS,),
        )  # fmt: skip
        try:
            self.wait("creating a communicator")
        except BaseException:
            self.abort()
            raise

    def wait(
        self, what: str = "launching a group", timeout_seconds: float | None = None, *, polls: bool = True
    ) -> None:
        """Wait until NCCL has no operation in progress on this communicator.

        Args:
            what: the operation, for errors.
            timeout_seconds: default: that of the communicator.
            polls: whether to call ``poll`` meanwhile.

        Raises:
            NcclError: the operation failed or was aborted. TimeoutError: it took too long. Or what ``poll`` raises.
        """
        limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        begun = polled_at = time.monotonic()
        while (result := self._async_result()) == IN_PROGRESS:
            now = time.monotonic()
            if now - begun > limit:
                raise TimeoutError(f"NCCL took longer than {limit:g} s {what}")
            if polls and now - polled_at > 0.2:
                polled_at = now
                self._poll()
            if now - begun < SPIN_SECONDS:
                os.sched_yield()  # time.sleep(0) takes some 50 us before Python 3.13
            else:
                time.sleep(min(0.01, 0.05 * (now - begun)))
        if result != SUCCESS:
            raise NcclError(f"NCCL failed {what}: {self.nccl.describe(result)}")

    def find_error(self) -> str | None:
        """The reason why this communicator failed, such as an exited peer.

        None if it works, is in use, was aborted or is closed. The call does not block, not even while another thread is
        inside NCCL.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            result = SUCCESS if self._aborted or self._closed else self._async_result()
        finally:
            self._lock.release()
        return None if result in (SUCCESS, IN_PROGRESS) else self.nccl.describe(result)

    def _async_result(self) -> int:
        with self._lock:
            self._check_open()
            result = ctypes.c_int()
            self.nccl.check("ncclCommGetAsyncError", self._comm, ctypes.byref(result))
            return result.value

    def _check_open(self) -> None:
        if self._aborted or self._closed:
            raise NcclError(f"the communicator {'was aborted' if self._aborted else 'is closed'}")

    def exchange(
        self,
        recvs: Sequence[NcclMessage],
        sends: Sequence[NcclMessage],
        stream: int,
        broadcasts: Sequence[NcclMessage] = (),
    ) -> None:
        """Enqueue receives, sends and broadcasts on a stream as one group. Messages between two ranks match by order.

        Args:
            broadcasts: each with its root; the same on all ranks of the communicator.
            stream: the handle of a CUDA stream (``torch.cuda.Stream.cuda_stream``).

        Raises:
            NcclError: NCCL rejected a message, or the communicator failed; it cannot be used again.
            TimeoutError: ranks did not connect in time.
        """
        with self._group():
            for name, messages in (("ncclRecv", recvs), ("ncclSend", sends)):
                for address, nbytes, rank in messages:
                    self._check(name, address, nbytes, DATA_TYPES["uint8"], rank, stream=stream)
            for address, nbytes, root in broadcasts:
                self._check("ncclBroadcast", address, address, nbytes, DATA_TYPES["uint8"], root, stream=stream)

    def all_reduce(self, address: int, count: int, dtype: str, reduction: str, stream: int) -> None:
        """Reduce an array over all ranks, in place.

        Args:
            address, count: device address and number of elements.
            dtype: a name in :data:`DATA_TYPES`.
            reduction: a name in :data:`REDUCTIONS`.
            stream: as for :meth:`exchange`.
        """
        with self._group():
            self._check(
                "ncclAllReduce", address, address, count, DATA_TYPES[dtype], REDUCTIONS[reduction], stream=stream
            )

    def broadcast(self, address: int, nbytes: int, root: int, stream: int) -> None:
        """Overwrite an array on all ranks with that of ``root``."""
        with self._group():
            self._check("ncclBroadcast", address, address, nbytes, DATA_TYPES["uint8"], root, stream=stream)

    def _check(self, name: str, *arguments: int, stream: int) -> None:
        self.nccl.check(name, *arguments, self._comm, StreamHandle(stream), also=(IN_PROGRESS,))

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        """A group of calls, which NCCL launches before the ``with`` block ends.

        The group ends even after an error: otherwise later calls of the thread would join it. NCCL rejects calls of
        another thread until it has launched the group.
        """
        with self._posting:
            with self._lock:
                self._check_open()
                self.nccl.check("ncclGroupStart")
                try:
                    yield
                except BaseException:
                    self.nccl.call("ncclGroupEnd")
                    raise
                result = self.nccl.check("ncclGroupEnd", also=(IN_PROGRESS,))
            if result == IN_PROGRESS:
                self.wait()

    def abort(self) -> None:
        """Cancel operations in progress: on this rank at once, on the others soon after. Later calls fail.

        Aborts in progress share one deadline, :data:`ABORT_SECONDS` after the first of them began. Each still waits at
        least :data:`MIN_ABORT_WAIT_SECONDS`. An abort that takes longer continues in its thread.
        """
        self.begin_abort()
        if self._aborted:
            now = time.monotonic()
            deadline = min(list(_aborting.values()), default=now) + ABORT_SECONDS
            self._ended.wait(max(deadline - now, MIN_ABORT_WAIT_SECONDS))

    def begin_abort(self) -> None:
        """Like :meth:`abort`, but do not wait.

        An abort ends when all kernels of the device have ended. So a program with several communicators must begin all
        aborts before it waits for the first.
        """
        with self._ending:
            if self._aborted or self._closed:
                return
            self._aborted = True
        _aborting[self] = time.monotonic()
        self._end_in_thread("ncclCommAbort")

    def _end_in_thread(self, call: str) -> None:
        """Destroy or abort the communicator in a separate thread, because both wait for the device."""
        thread = threading.Thread(target=self._end, args=(call,), name=f"reshard-{call}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down
            self._note_end()

    def _end(self, call: str) -> None:
        if self._lock.acquire(timeout=ABORT_WAIT_SECONDS):  # another thread may block inside NCCL
            self._lock.release()  # no call follows, because the communicator is marked as aborted or closed
        try:
            with self._in_thread():
                self.nccl.call(call, self._comm)
        finally:
            self._note_end()

    def _note_end(self) -> None:
        _aborting.pop(self, None)
        self._ended.set()

    def begin_close(self) -> None:
        """Let NCCL finish the operations under way, but do not wait for it; :meth:`close` does.

        A program with several communicators begins to close all before it waits for the first. All then share one
        deadline.
        """
        if self._close_by is None:
            self._close_by = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(NcclError, TimeoutError):  # close() tries again, and then aborts
            self._finalize(0.0)

    def _finalize(self, seconds: float) -> None:
        """Call ``ncclCommFinalize`` once.

        Raises:
            TimeoutError: another thread is inside NCCL for ``seconds``, or NCCL is still launching a group. It then
                refuses to finalize.
        """
        if not self._lock.acquire(timeout=seconds):
            raise TimeoutError("another thread is inside NCCL")
        try:
            if not (self._aborted or self._closed or self._finalized):
                if self._async_result() == IN_PROGRESS:
                    raise TimeoutError("NCCL is launching a group")
                self.nccl.check("ncclCommFinalize", self._comm, also=(IN_PROGRESS,))
                self._finalized = True
        finally:
            self._lock.release()

    def close(self) -> None:
        """Wait for operations under way, then destroy the communicator. Abort it after an error or a time-out.

        Errors of other ranks are ignored here. A rank that has finished may be gone, and an abort would tell the ranks
        that still work that this rank has died.

        Returns at the latest :data:`CLOSE_SECONDS` after :meth:`begin_close`, plus the time of an abort.
        A thread goes on with a destruction that takes longer: NCCL frees device memory, which waits for the kernels of
        other communicators.
        """
        self.begin_close()
        if self._aborted or self._closed:
            return
        assert self._close_by is not None
        try:
            if not self._finalized:
                self.wait(timeout_seconds=max(self._close_by - time.monotonic(), 0.0), polls=False)
                self._finalize(max(self._close_by - time.monotonic(), 0.0))
            self.wait("closing a communicator", max(self._close_by - time.monotonic(), 0.0), polls=False)
            with self._ending:
                self._check_open()
                self._closed = True
        except (NcclError, TimeoutError):
            self.abort()
            return
        self._end_in_thread("ncclCommDestroy")
        self._ended.wait(max(self._close_by - time.monotonic(), MIN_ABORT_WAIT_SECONDS))
