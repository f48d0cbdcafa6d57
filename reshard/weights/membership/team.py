"""A team: the ranks of one trainer or of one engine, their agreements, and the thread that acts on messages to them."""

from __future__ import annotations

import atexit
import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from reshard.api.lossless.lossless_transfer import exchange_reports
from reshard.coordination import (
    Group,
    Monitor,
    calling,
    describe_error,
    find_call_group,
    find_group,
    is_published,
    join,
    leave_interrupted,
    mark_published,
    publish_interruption,
    rebuild_error,
)
from reshard.coordination.groups.process_group import own_client
from reshard.coordination.groups.store import ForeignValueError, Store
from reshard.errors import ArgumentError, RemoteError, ReshardError, ResourceError
from reshard.formatting import brief
from reshard.threads import start_thread
from reshard.weights.membership.mailbox import Mailbox, MailboxMessage, Outbox
from reshard.weights.membership.roster import Roster, ranks_store

#: Time to wait for the other ranks of a team.
AGREE_SECONDS = 60.0
#: Time that closing waits for the thread.
CLOSE_SECONDS = 5.0


def exchange(group: Group, report: Mapping[str, Any], purpose: str, seconds: float, kept: str = "") -> dict[int, Any]:
    """The reports of all ranks of a group, as JSON. Every rank must call it.

    Args:
        report: report of this rank. Its entry ``"failed"``, if any, is the class and text of an error.
        purpose: purpose of the exchange, for errors.
        seconds: how long to wait for the other ranks.
        kept: what is unchanged in spite of an error, for its text.

    Raises:
        ReshardError: the first error that a rank reports, or a rank did not call; the same on all ranks.
    """
    with calling(group):
        call_group = find_call_group(group, tuple(range(group.size)))
        return exchange_reports(call_group, {"failed": None, **report}, purpose, seconds, kept)


def run_collectively(
    group: Group, function: Callable[[], Mapping[str, Any]], purpose: str, seconds: float, kept: str = ""
) -> dict[int, Any]:
    """Exchange the results of a function. If the function raises an error on one rank, all ranks raise that error."""
    try:
        report = dict(function())
    except Exception as error:
        report = {"failed": describe_error(error)}
    return exchange(group, report, purpose, seconds, kept)


def lost_store_error(error: BaseException) -> ReshardError:
    """The error of this package for an error that ended the thread of a team."""
    if isinstance(error, ReshardError):
        return error
    if isinstance(error, ForeignValueError):
        return RemoteError(str(error))
    if not isinstance(error, RuntimeError):  # a message without what it must have
        return RemoteError(f"another program has written to the store: {type(error).__name__}: {error}")
    return RemoteError(f"the store that trainer and engines share is lost: {str(error).splitlines()[0]}")


def _find_group(group: Any) -> Group:
    """The Group of a process group; without any group, a group of this process alone."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Group(dist.HashStore(), 0, 1)
    return find_group(group)


def leave_opening(error: BaseException, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Tell all ranks that an exception has ended a constructor on this one, before or after it had made its team.

    Args:
        args, named: arguments of the constructor of a Publisher or a Subscriber: itself, model, store, name, group.
    """
    team: Team | None = getattr(args[0], "_team", None)
    if team is not None:
        team.leave_unbegun(error)
        team.close()
        return
    group = _find_group(named.get("group", args[4] if len(args) > 4 else None))
    leave_interrupted(error, group, lambda: range(group.size))


class Team:
    """The ranks of one trainer or of one engine.

    Args:
        store: store that all trainers and engines share.
        name: name of the published model.
        kind: ``"trainer"`` or ``"engine"``.
        group: the process group of the ranks; None for the world, or for this process alone if there is none.
        seconds: how long to wait for the other ranks.

    Attributes:
        group: the group of the ranks for calls of the user's threads.
        id: id of the team. It is the same on all ranks, and no other team has it.
        raw: the store, under the prefix of ``name``.
        store: client of ``raw`` whose calls have timeouts.
        outbox: writes messages to other teams.
        roster: the members of the published name.
    """

    def __init__(self, store: Any, name: str, kind: str, group: Any, seconds: float) -> None:
        self.group = _find_group(group)
        self.name = name
        self.kind, self.rank, self.size = kind, self.group.rank, self.group.size

        def check() -> dict[str, str]:
            if not isinstance(store, dist.Store):
                raise ArgumentError(f"store must be a torch.distributed store, not {type(store).__name__}")
            if not isinstance(name, str) or not name or "/" in name:
                raise ArgumentError(f"name is {brief(name)}; it must be a string that is not empty and has no slash")
            return {"token": secrets.token_hex(8), "name": name}

        with publish_interruption(self.group, self._ranks):
            reports = run_collectively(self.group, check, f"opens the {kind}", seconds)
            names = sorted({report["name"] for report in reports.values()})
            if len(names) > 1:
                raise ArgumentError(f"ranks of the {kind} pass different names: {', '.join(map(brief, names))}")
            self.raw = dist.PrefixStore(f"reshard/weights/{name}", own_client(store))
        self.store = Store(self.raw)
        self.outbox, self.roster = Outbox(self.store), Roster(self.store)
        self.id: str = reports[0]["token"]
        self._inner: Group | None = None
        self._inner_number = 0  # of the groups that were made one after another
        self._first_inner: Group | None = None  # shows others that this process lives, also after it has failed
        self._survivors: tuple[tuple[int, ...], Group] | None = None
        self._thread: threading.Thread | None = None
        self._has_ended = threading.Event()  # the thread; is_alive() is wrong after an interrupt in join()
        self._ordered: deque[MailboxMessage] = deque()  # of order_all, on which this rank has not acted yet
        self.is_closed = self._is_released = False

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides for the team."""
        return self.rank == 0

    def address(self, rank: int) -> str:
        """The mailbox of a rank."""
        return f"{self.kind}/{self.id}/{rank}"

    def _ranks(self) -> range:
        return range(self.size)

    @contextlib.contextmanager
    def ending_calls(self) -> Iterator[None]:
        """Let an exception such as KeyboardInterrupt end the call on all ranks, and all later calls of the team."""
        try:
            with publish_interruption(self.group, self._ranks):
                yield
        except ReshardError:
            raise
        except BaseException as error:
            if not is_published(error):  # the exception came before publish_interruption could catch it
                leave_interrupted(error, self.group, self._ranks)
            self.leave(error)
            raise

    @contextlib.contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Like :meth:`ending_calls`, for a constructor. An exception also closes this side."""
        try:
            with self.ending_calls():
                yield
        except BaseException:
            self.close()
            raise

    def leave_unbegun(self, error: BaseException) -> None:
        """Like :meth:`leave`, for a call that has not reached :meth:`ending_calls`. Other ranks may wait for it."""
        leave_interrupted(error, self.group, self._ranks)
        self.leave(error)

    def leave(self, error: BaseException) -> None:
        """Tell all ranks that an exception has ended a call on this one."""
        mark_published(error)
        failed = describe_error(self.left_error(error))
        with contextlib.suppress(RuntimeError):  # the store is lost, and each rank knows
            self.post_to_all({"kind": "left", "failed": failed})

    def left_error(self, error: BaseException) -> RemoteError:
        """The error of other ranks after an exception has ended a call on this one."""
        return RemoteError(f"rank {self.rank} of the {self.kind} left a call: {type(error).__name__}")

    def post_to_all(self, message: Mapping[str, Any]) -> None:
        """Post a message to every rank of the team, from any thread."""
        self.outbox.post_all(map(self.address, range(self.size)), message)

    def order_all(self, message: MailboxMessage) -> None:
        """Let every rank of the team act on a message, in the order of these calls. Only the team's thread calls it.

        This rank acts on the message before it reads its mailbox again.
        """
        others = [self.address(rank) for rank in range(self.size) if rank != self.rank]
        if others:
            self.outbox.post_all(others, message)
        self._ordered.append(message)

    def answer_ping(self, ping: MailboxMessage) -> None:
        """Answer a ping."""
        answer = {"kind": "pong", "nonce": ping["nonce"], "team": self.id, "rank": self.rank}
        self.outbox.post(ping["reply"], answer)

    def inner_group(self) -> Group:
        """The group of the ranks for calls of the team's thread."""
        if self._inner is None:
            store: dist.Store = ranks_store(self.raw, self.kind, self.id)
            if self._inner_number:
                store = dist.PrefixStore(prefix := f"again{self._inner_number}", store)
                ranks = ((self.kind, self.id, rank) for rank in range(self.size))
                self.roster.share_presence(f"{self.kind}/{self.id}/ranks/{prefix}", ranks)
            self._inner = join(store, self.rank, self.size)
        return self._inner

    def find_ended(self) -> int | None:
        """The first other rank that has ended or has closed its side; None if there is none."""
        others = (rank for rank in range(self.size) if rank != self.rank)
        return next((rank for rank in others if self.roster.has_ended(self.kind, self.id, rank)), None)

    def renew_inner_group(self, number: int) -> None:
        """Replace the inner group, unless it has this number: an error may have put its ranks out of sync."""
        if number == self._inner_number:
            return
        if self._inner is not None and self._inner_number:
            with contextlib.suppress(Exception):  # the group has failed
                self._inner.close()
        elif self._inner is not None:
            self._first_inner = self._inner
        self._inner, self._inner_number = None, number

    def group_of(self, ranks: Sequence[int], key: str) -> Group:
        """A group of some of the ranks for calls of the team's thread.

        Args:
            ranks: ascending, with this one.
            key: name of the group, if it is made for them. No other group has this name.
        """
        if len(ranks) == self.size:
            return self.inner_group()
        if self._survivors is None or self._survivors[0] != tuple(ranks):
            self._close_survivors()
            store = dist.PrefixStore(key, ranks_store(self.raw, self.kind, self.id))
            self._survivors = tuple(ranks), join(store, ranks.index(self.rank), len(ranks))
        return self._survivors[1]

    def _close_survivors(self) -> None:
        if self._survivors is not None:
            with contextlib.suppress(Exception):  # the group may have failed
                self._survivors[1].close()
            self._survivors = None

    def start(
        self, act: Callable[[MailboxMessage], None], fail: Callable[[BaseException], None], end: Callable[[], None]
    ) -> None:
        """Start the thread.

        Args:
            act: function that the thread calls with each message.
            fail: function that the thread calls with the error that ends the thread, or that ends the calls of this
                team.
            end: function that it calls at the end, in any case.

        Raises:
            ResourceError: the system allows no further thread.
        """
        mailbox = Mailbox(self.raw, self.address(self.rank))
        Monitor.of(self.inner_group())  # shows others that this process lives

        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> None:
            try:
                if gpu is not None:  # each thread has its own current device
                    torch.cuda.set_device(gpu)
                while (message := self._ordered.popleft() if self._ordered else mailbox.read())["kind"] != "close":
                    if message["kind"] == "left":
                        fail(rebuild_error(*message["failed"]))
                    else:
                        act(message)
            except BaseException as error:
                fail(error)
            finally:
                end()
                self._close_survivors()
                for inner in (self._first_inner, self._inner):
                    if inner is not None:
                        with contextlib.suppress(Exception):
                            inner.close()
                self._has_ended.set()

        self._thread = threading.Thread(target=run, name=f"reshard-{self.kind}", daemon=True)
        try:
            start_thread(self._thread)
        except ResourceError:
            self._thread = None
            self.inner_group().close()
            raise
        atexit.register(self.close)

    def close(self) -> None:
        """End the thread. The mailboxes stay in the store."""
        if self._is_released:
            return
        self.is_closed = True
        atexit.unregister(self.close)
        if self._thread is not None:
            if not self._has_ended.is_set():
                with contextlib.suppress(RuntimeError):  # the store is lost, and the thread knows
                    self.outbox.post(self.address(self.rank), {"kind": "close"})
            if self._has_ended.wait(CLOSE_SECONDS):
                self._thread.join(CLOSE_SECONDS)
        self.store.close()
        self._is_released = True  # last, so that a call after an interrupt does the rest
