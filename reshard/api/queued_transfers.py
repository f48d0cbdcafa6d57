"""Run the transfers of a plan on the CPU, one after another, on a thread in the background."""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from reshard.api.agreed_plan import AgreedPlan
from reshard.api.arrays.memory_in_use import note_use
from reshard.api.handle import EXIT_SECONDS, Handle, Watch
from reshard.coordination import Monitor
from reshard.errors import VerificationError
from reshard.forks import call_at_exit
from reshard.runtime.cpu.coding import encoded_array
from reshard.runtime.cpu.direct import DirectProgram, Posted, find_direct
from reshard.runtime.cpu.executor import NOTIFY_TAG, VERIFY_TAG, RunOptions, WrongCopyError, run_program
from reshard.runtime.cpu.progress import describe_progress
from reshard.runtime.cpu.staging import Staging, carrier
from reshard.runtime.cpu.verification import Digests, Hops, compare_digests, describe_copy
from reshard.runtime.transport import BrokenConnectionError, Work, wait_for


class QueuedTransfers:
    """The transfers of one plan over the connections of a channel, in the order in which they were started.

    Args:
        agreed: the plan and this rank's part of it.
        is_two_way: the connections carry both directions at the same time.
        timeout_seconds: limit of each transfer. verify: compare digests after each transfer.
        is_one_call: there is one transfer. Take the channel's idle buffers if they are of the same plan, and return
            them at the end.
    """

    def __init__(
        self, agreed: AgreedPlan, is_two_way: bool, timeout_seconds: float, verify: bool, is_one_call: bool
    ) -> None:
        self._plan, self._program, self._channel = agreed.plan, agreed.program, agreed.channel
        self._group = agreed.channel.group
        self._generation, self._tag = agreed.decision.generation, agreed.call % (NOTIFY_TAG - 1)
        self.timeout_seconds, self._verify, self._reuses_staging = timeout_seconds, verify, is_one_call
        self.transport = self._channel.transport(self._generation, is_two_way, timeout_seconds)
        self._staging = Staging(self._program, self._plan.staging_bytes)
        if is_one_call:
            idle, self._channel.idle_staging = self._channel.idle_staging, None
            if idle is not None and idle[0] == self._plan.plan_hash:
                self._staging = idle[1]
        self._direct: DirectProgram | None = None
        if self.transport is not None and not verify and not is_one_call:
            self._direct = find_direct(self._plan, self._program)
        self._queued: Watch | None = None  # the last transfer that the thread posts
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
        watch = Watch(self._channel, self._generation)
        handle = Handle(watch, finish)
        if self.transport is not None:
            Monitor.of(self._group).watch(watch)
        if self._thread is None:
            # Ends the thread if nobody calls close. It comes first, because an interrupt may end start() of the thread.
            weakref.finalize(self, self._jobs.put, None).atexit = False
            _running.add(self)
            call_at_exit(_finish_all, priority=20)
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="reshard-progress", daemon=True)
            self._thread.start()
        if is_noted:
            note_use(self._jobs, watch.done.is_set, src, dst)
        self._jobs.put((self, watch, src, dst, self._post(watch, src, dst)))
        return handle

    def _post(
        self, watch: Watch, src: Sequence[torch.Tensor | None], dst: Sequence[torch.Tensor | None]
    ) -> Posted | Exception | None:
        """Post all operations of a transfer that need no thread to start. The thread waits for them.

        Returns:
            The operations, or the error of posting them. None if the thread posts them: it is to run a transfer that it
            posts itself, or they cannot all be posted at once.
        """
        if self._direct is None:
            return None
        is_behind = self._queued is not None and not self._queued.done.is_set()
        if is_behind or not self._direct.fits(src, dst):
            self._queued = watch
            return None
        self._queued = None
        try:
            self._channel.check_usable(self._generation)
            return self._direct.post(self.transport, src, dst, self._tag)  # type: ignore[arg-type]
        except Exception as error:
            return error

    def close(self) -> None:
        """End the thread after the transfers in progress. The group's connections stay open."""
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            self.transport = None
        elif self._group.pid == os.getpid():
            self._jobs.put((self, None, None, None, None))

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
        if self._reuses_staging and self._channel.broken is None and self._group.is_usable():
            self._channel.idle_staging = self._plan.plan_hash, self._staging

    def run(
        self,
        watch: Watch,
        src: Sequence[torch.Tensor | None],
        dst: Sequence[torch.Tensor | None],
        posted: Posted | Exception | None,
    ) -> threading.Event:
        """Run a transfer on the thread of the caller.

        Args:
            posted: see :meth:`_post`.

        Returns:
            The event that ends the watch. After an error it is set already. The caller sets it when it no longer
            refers to the handle: if its user then drops the handle, nobody will wait for the result.
        """
        try:
            watch.check()
            self._channel.check_usable(self._generation)
            watch.describe = functools.partial(describe_progress, self._plan, self._program, watch.tally)
            watch.begin()
            deadline = time.monotonic() + self.timeout_seconds
            if isinstance(posted, Exception):
                raise posted
            if posted is not None and self._direct is not None:
                self._direct.wait(posted, deadline, watch.check, watch.tally)
            else:
                self._run_program(watch, src, dst, deadline)
            watch.ended_at = time.monotonic()
        except VerificationError as error:  # every rank raises the same one, so it needs no report
            watch.stop(error)
        except BaseException as error:
            # The transport may still write to the old buffers.
            self._staging = Staging(self._program, self._plan.staging_bytes)
            if isinstance(error, BrokenConnectionError):
                error = self._channel.find_root_cause(self._generation, error, watch.done.wait)
            if isinstance(error, WrongCopyError):
                error = VerificationError(describe_copy(self._plan, self._program.rank, error.id))
            if not watch.done.is_set():  # no rank has published the error
                watch.stop(self._channel.fail(self._generation, error))
        finally:
            if self.transport is not None:
                Monitor.of(self._group).forget(watch)
        return watch.done

    def _run_program(
        self,
        watch: Watch,
        src: Sequence[torch.Tensor | None],
        dst: Sequence[torch.Tensor | None],
        deadline: float,
    ) -> None:
        digests = None
        if self._verify:
            digests, src = Digests(), list(map(encoded_array, src))
            digests.replicas = self._hops.replicas.digest(self._program.rank, src)
        run_program(
            self._program,
            self.transport,  # type: ignore[arg-type]
            list(map(carrier, src)),
            list(map(carrier, dst)),
            self._staging,
            RunOptions(tag=self._tag, deadline=deadline, check=watch.check, digests=digests, tally=watch.tally),
        )
        if digests is not None and self.transport is not None:
            self._compare(digests, watch, deadline)

    @functools.cached_property
    def _hops(self) -> Hops:
        return Hops(self._plan)

    def _compare(self, digests: Digests, watch: Watch, deadline: float) -> None:
        rank = self._program.rank

        def wait(work: Work, other: int) -> None:
            wait_for(work, deadline, watch.check, rank, other, f"comparing digests with rank {other}")

        compare_digests(self._hops, rank, digests, self.transport, self._tag + VERIFY_TAG, wait)


def _serve(jobs: queue.SimpleQueue[Any]) -> None:
    """Run transfers one after another. Between them the thread holds no reference to them, so they can be freed."""
    while (job := jobs.get()) is not None:
        transfers, watch, src, dst, posted = job
        if watch is None:
            transfers.on_thread_end()
            return
        done = transfers.run(watch, src, dst, posted)
        del job, transfers, watch, src, dst, posted
        done.set()


#: Transfers with a thread. A thread that is inside a C++ wait at interpreter shutdown would crash the process.
_running: weakref.WeakSet[QueuedTransfers] = weakref.WeakSet()


def _finish_all() -> None:
    for transfers in list(_running):
        transfers.finish(EXIT_SECONDS)
