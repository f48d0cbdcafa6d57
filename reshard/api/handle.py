"""Transfers under way, as who started them sees them."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from reshard.coordination.communicator import Channel
from reshard.coordination.liveness.heartbeat import Monitor, call_at_exit
from reshard.errors import ArgumentError, ReshardError, TransferTimeoutError
from reshard.forks import call_in_child
from reshard.formatting import say_ranks
from reshard.runtime.cpu.executor import Tally
from reshard.runtime.cuda.stream import Mark, StreamTransfers
from reshard.timeouts import check_patience

#: How long the end of the process waits for a transfer under way.
EXIT_SECONDS = 5.0
#: How often a processor that waits for a device looks.
SYNCHRONIZE_SECONDS = 0.0002


class Handle:
    """A transfer under way. It progresses whether or not anybody waits."""

    def __init__(self, channel: Channel, generation: int, finish: Callable[[], Any]) -> None:
        self._channel, self._generation, self._finish = channel, generation, finish
        self._pid = os.getpid()
        self._done = threading.Event()
        self._error: ReshardError | None = None
        self._result: Any = None
        #: ``time.monotonic()`` at which this rank's part began and ended; None before.
        self.begun_at: float | None = None
        self.ended_at: float | None = None
        #: How far this rank came, and the same in words, for a note on the error; set by who runs the transfer.
        self.tally = Tally()
        self.describe: Callable[[], str] | None = None

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "done" if self._error is None else type(self._error).__name__
        return f"Handle(transfer {self._generation} of {say_ranks(self.members)}: {state})"

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self._channel.members

    def done(self) -> bool:
        """True once :meth:`wait` will not block."""
        return self._done.is_set()

    def wait(self, timeout_seconds: float | None = None) -> Any:
        """The result; blocks until the transfer is over.

        Returns:
            This rank's destination shard (or ``{name: shard}``), None outside the destination.

        Raises:
            TransferTimeoutError: not over within ``timeout_seconds``; the transfer goes on, and ``wait`` may be
                called again. ArgumentError: in a child that was forked meanwhile. Otherwise the error that ended the
                transfer, the same on every rank.
        """
        self.check_process()
        if not self._done.wait(check_patience(timeout_seconds)):
            raise TransferTimeoutError(f"the transfer is not over after {timeout_seconds:g} s; it goes on")
        self.check()
        return self._take()

    def check_process(self) -> None:
        """Raise ArgumentError in a forked child, which has no thread that would end the transfer."""
        if self._pid != os.getpid():
            raise ArgumentError(
                f"this transfer is one of process {self._pid}; process {os.getpid()} cannot wait for it"
            )

    def _take(self) -> Any:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None  # type: ignore[assignment]
        return self._result

    def reported_error(self) -> ReshardError | None:
        """An error that another rank told of."""
        return self._channel.reported_error(self._generation)

    def stop(self, error: ReshardError) -> None:
        """End with an error; whoever waits is released."""
        if not self._done.is_set():
            self._error = self._channel.take_error(self._generation, error)
            self._done.set()

    def check(self) -> None:
        """Raise the error that ended this transfer, if one did."""
        if self._error is not None:
            error = copy.copy(self._error)  # the error is that of all transfers under way, the note is of this one
            error.__notes__ = [] if self.describe is None else [self.describe()]
            raise error

    def synchronize(self, timeout_seconds: float | None = None) -> Any:
        """As :meth:`wait`, but on a GPU too block until the transfer is over."""
        return self.wait(timeout_seconds)

    def look(self) -> bool:
        """Whether it is over, where nobody else finds out; here a thread does."""
        return False

    def begin(self) -> None:
        """Note that the part of this rank begins."""
        self.begun_at = time.monotonic()

    def succeed(self) -> None:
        """The transfer is over."""
        self.ended_at = time.monotonic()
        self._done.set()


class StreamHandle(Handle):
    """A transfer on a GPU: :meth:`wait` makes the current stream wait, not the processor.

    It is made, and watched, before anything is put on a stream; :meth:`begin_at` follows.
    """

    def __init__(
        self,
        channel: Channel,
        generation: int,
        finish: Callable[[], Any],
        transfers: StreamTransfers,
        deadline: float,
    ) -> None:
        super().__init__(channel, generation, finish)
        self._group = channel.group
        self._transfers, self._deadline = transfers, deadline
        self._mark: Mark | None = None

    def begin_at(self, mark: Mark | None) -> None:
        """It is put on a stream, where ``mark`` is its end; None if a graph captures it, which has no end yet."""
        self.begin()
        self._mark = mark
        if mark is None:
            self.succeed()
            return
        _on_streams.add(self)
        self._group.held.add_user(self)
        call_at_exit(_finish_streams, priority=20)

    def succeed(self) -> None:
        """See :class:`Handle`."""
        super().succeed()
        Monitor.of(self._group).forget(self)

    def done(self) -> bool:
        """True once the device is done with it, or it has failed."""
        return self.look()

    def wait(self, timeout_seconds: float | None = None) -> Any:
        """The result; what the caller puts on its current stream from here on finds it there. Does not block.

        Raises:
            ReshardError: what ended the transfer, if that is known by now; see :meth:`synchronize`.
        """
        self.check_process()
        self.check()
        if self._mark is None:
            self._transfers.streams.join()
        else:
            self._mark.wait()
        return self._take()

    def synchronize(self, timeout_seconds: float | None = None) -> Any:
        """The result, once the device is done with it; raises the error that ended the transfer, alike on all ranks."""
        self.check_process()
        check_patience(timeout_seconds)
        limit = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self.look():
            if limit is not None and time.monotonic() >= limit:
                raise TransferTimeoutError(f"the transfer is not over after {timeout_seconds:g} s; it goes on")
            time.sleep(SYNCHRONIZE_SECONDS)
        self.check()
        return self.wait()

    def finish(self, timeout_seconds: float | None) -> None:
        """Wait until the device is done with it."""
        with contextlib.suppress(ReshardError):
            self.synchronize(timeout_seconds)

    def release(self) -> None:
        """What it uses goes with it."""

    def look(self) -> bool:
        """Whether it is over; ends it where its time is up, or the device or a connection failed."""
        try:
            if self._done.is_set():
                pass  # another rank told of an error
            elif (failed := self._channel.find_failure(self._generation)) is not None:
                self.stop(failed)  # the device may be done with what was aborted, which moved nothing
            elif self._mark is not None and self._mark.query():
                self.succeed()
            elif time.monotonic() >= self._deadline:
                error = TransferTimeoutError(f"rank {self._channel.group.rank}: the transfer did not finish in time")
                self.stop(self._channel.fail(self._generation, error))
            elif (broken := self._transfers.find_error()) is not None:
                self.stop(self._channel.fail(self._generation, ConnectionError(broken)))
        except RuntimeError as error:
            self.stop(self._channel.fail(self._generation, error))
        if self._done.is_set():
            _on_streams.discard(self)
        return self._done.is_set()


#: Transfers that a device is not done with, and what they use, whoever else has forgotten them.
_on_streams: set[StreamHandle] = set()
call_in_child(_on_streams.clear)


def _finish_streams() -> None:
    """At the end of the process: others would miss what this rank has yet to send."""
    for handle in list(_on_streams):
        handle.finish(EXIT_SECONDS)
