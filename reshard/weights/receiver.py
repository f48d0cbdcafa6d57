"""The thread of each engine rank, which receives versions into the shadow."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from reshard.coordination import describe_error, rebuild_error
from reshard.coordination.groups.store import LOST_STORE_SECONDS
from reshard.errors import RemoteError, ReshardError, TransferTimeoutError
from reshard.weights.install import Installer, ReceiveInPlace, TensorsByName
from reshard.weights.membership.attempts import SWAP, key_of
from reshard.weights.membership.mailbox import MailboxMessage
from reshard.weights.membership.roster import Roster
from reshard.weights.membership.survivors import on_ranks
from reshard.weights.membership.team import AGREE_SECONDS, Team, exchange, lost_store_error, run_collectively
from reshard.weights.model.holdings import Value
from reshard.weights.model.manifest import Manifest
from reshard.weights.model.pieces import RegionPair, compose, match
from reshard.weights.model.verify import Checker, RegionDigests
from reshard.weights.routes.encoded_transfers import EncodedTransfers
from reshard.weights.routes.route import Route, RouteOptions

#: How long ``update`` waits for the digests of a version that has arrived in the model.
CONFIRM_SECONDS = 5.0

#: A function that one thread runs on behalf of another, and its result.
DeferredCall = tuple[Callable[[], None], Future[None]]


class Receiver:
    """Receives versions into a shadow of the model, lets other engines have them, and swaps them in.

    Args:
        team: the engine.
        manifest: its model.
        installer: puts versions into it.
        options: options of its routes.

    Attributes:
        installed_version: the version in the model.
        last_swap: number of the last attempt that has ended in a swap.
        swap_error: why the last swap failed.
        is_swapping: whether a swap is under way.
    """

    def __init__(
        self,
        team: Team,
        manifest: Manifest,
        installer: Installer,
        options: RouteOptions,
    ) -> None:
        self._team, self._manifest, self._installer = team, manifest, installer
        self._options = options
        self.installed_version: int | None = None
        self.swap_error: BaseException | None = None
        self._failure: ReshardError | None = None
        self._problem = ""  # why the last version did not arrive
        self._waiting: list[int] = []  # attempts for which threads of the user wait in ``update``
        self._is_receiving = False  # into the model
        self.is_swapping = False
        self._confirm_deadline: float | None = None  # of the digests of what has arrived there; None while it arrives
        self.last_swap = -1
        self._given_up: tuple[int, ReshardError] | None = None
        self._lock = threading.RLock()  # entered by itself: an interrupt may keep a Condition from releasing it
        self._changed = threading.Condition(self._lock)
        self._deferred: DeferredCall | None = None  # for the thread that waits in ``update``
        self._route: tuple[str, Route] | None = None
        self._encoded: EncodedTransfers | None = None  # over the route
        self._decoding: dict[str, float] = {}  # seconds by format, of the last version
        self._pieces: list[RegionPair] = []
        self._tied: Mapping[str, str] = {}
        self._checker: Checker | None = None
        self._shadow: TensorsByName = {}
        self._arrived: int | None = None  # the version in the shadow, if this rank has all of it
        self._complete: int | None = None  # the last version that all ranks have and that is verified
        self._complete_arrays: TensorsByName = {}
        self._landed: RegionDigests = ["", ""]  # of what has arrived in the shadow
        self._digests: RegionDigests = ["", ""]  # of the last version that is verified
        self._values: Mapping[str, Value] = {}
        self._kept: tuple[TensorsByName, Mapping[str, Value], RegionDigests] = {}, {}, ["", ""]  # what is installed
        self._spare: TensorsByName = {}  # memory of what was installed before
        self._leader = _Leader(self, team) if team.is_leader else None

    # For the threads of the user

    def check_usable(self) -> None:
        """Raise the error that ended the thread, or why the trainer has refused this engine."""
        if self._failure is not None:
            raise rebuild_error(*describe_error(self._failure))

    def wait_for_swap(self, attempt: int, seconds: float) -> bool:
        """Wait until an attempt has ended in a swap; returns whether it has. Meanwhile, run calls that the swap needs.

        A version that is arriving in the model is waited for.

        Raises:
            ReshardError: a rank has given the attempt up, or the thread has failed.
        """
        deadline = time.monotonic() + seconds
        interrupt: BaseException | None = None
        call: DeferredCall | None = None
        try:
            with self._lock:
                self._waiting.append(attempt)
                self._changed.notify_all()
            while True:
                with self._lock:
                    self._changed.wait_for(
                        lambda: self._has_ended(attempt) or self._deferred is not None,
                        max(0.0, deadline - time.monotonic()),
                    )
                    call, self._deferred = self._deferred, None
                if call is None:
                    break
                interrupt = _run(*call) or interrupt
            with self._lock:  # no version begins to arrive between the two
                self.wait_until_arrived()
                self._waiting.remove(attempt)
        except BaseException as error:
            if call is not None:
                self._put_back(call, error)
            raise
        finally:
            with self._lock:
                if attempt in self._waiting:
                    self._waiting.remove(attempt)
        if interrupt is not None:
            raise interrupt
        with self._lock:
            if self.last_swap < attempt:
                self.check_usable()
                if self._given_up is not None and self._given_up[0] >= attempt:
                    raise self._given_up[1]
            return self.last_swap >= attempt

    def wait_until_arrived(self) -> None:
        """Wait while a version arrives in the model, and then for its digests, which may never come."""
        with self._lock:
            while self._is_receiving and self._failure is None:
                left = None if self._confirm_deadline is None else self._confirm_deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)

    def _put_back(self, call: DeferredCall, error: BaseException) -> None:
        """Put back a call that an exception has kept this thread from making. A call that has begun has failed."""
        future = call[1]
        if future.running():
            future.set_exception(RemoteError(f"{type(error).__name__} while it installed a version"))
        elif not future.done():
            with self._lock:
                self._deferred = call

    def _has_ended(self, attempt: int) -> bool:
        is_given_up = self._given_up is not None and self._given_up[0] >= attempt
        return self.last_swap >= attempt or is_given_up or self._failure is not None

    def describe_failure(self) -> str:
        """The reason why the last version did not arrive, as the end of a sentence."""
        return f"; the last transfer failed: {self._problem}" if self._problem else ""

    # For the thread of the team

    def fail(self, error: BaseException) -> None:
        """Note the error that ended the thread."""
        with self._lock:
            self._failure = lost_store_error(error)
            self._changed.notify_all()

    def close(self) -> None:
        """Close the connections."""
        if self._route is not None:
            self._route[1].close()
            self._route = self._encoded = None

    def handle_message(self, message: MailboxMessage) -> None:
        """Do what a message asks for."""
        kind = message["kind"]
        if kind in _HANDLERS:
            if not message.get("relayed"):
                if kind == "receive" and self._leader is not None:
                    self._leader.begin_receiving()
                    message = {**message, "inner": self._leader.inner_number}
                self._team.order_all({**message, "relayed": True})
            else:
                _HANDLERS[kind](self, message)
        elif kind == "given_up":
            with self._lock:
                self._given_up = message["attempt"], rebuild_error(*message["failed"])
                self._changed.notify_all()
        elif self._leader is not None:
            self._leader.handle_message(message)

    def _answer_ping(self, message: MailboxMessage) -> None:
        self._team.answer_ping(message)

    def _note_refusal(self, message: MailboxMessage) -> None:
        """Fail with the reason why the trainer has refused this engine."""
        self.fail(rebuild_error(*message["failed"]))

    def _fetch_again(self, message: MailboxMessage) -> None:
        """Ask for the last version again: the trainer has dropped this engine, which was too slow or failed."""
        self._problem = message["why"]
        if self._leader is None:
            return
        rank = self._team.find_ended()
        if rank is not None:  # others would wait for it
            self.fail(RemoteError(f"rank {rank} of the engine has ended or has closed its Subscriber"))
            return
        self._team.roster.enlist(self._team.id)
        self._leader.fetch()

    def _receive_version(self, message: MailboxMessage) -> None:
        """Receive a version into the shadow."""
        self._arrived, self._decoding = None, {}
        try:
            self._team.renew_inner_group(message["inner"])
            route = self._find_route(message)
            if isinstance(self._installer, ReceiveInPlace):
                self._wait_for_update()
            held = self._complete
            if _shares(self._shadow, self._complete_arrays):
                self._complete = None
            if message.get("encoded"):
                self._receive_encoded(route, message["base"], held)
            else:
                route.receive(self._shadow)
            self._arrived = message["version"]
            assert self._checker is not None
            self._landed = self._checker.digest_target(self._shadow, self._team.rank)
            with self._lock:
                self._confirm_deadline = time.monotonic() + CONFIRM_SECONDS
                self._changed.notify_all()
        except Exception as error:
            self._arrived, self._problem = None, str(error)
            self.close()
            self._end_receiving()
            if self._leader is not None:
                self._leader.inner_number += 1  # the ranks may be out of sync
        if "holder" in message:  # no trainer will send digests
            self._verify_version(message)

    def _receive_encoded(self, route: Route, base: int | None, held: int | None) -> None:
        """Receive a version into the shadow, as differences to a base if there is one.

        Args:
            held: the version that this rank holds.
        """
        if self._encoded is None:
            self._encoded = EncodedTransfers(route, self._options, None)
        problem = ""
        if base is not None and (base != held or self._shadow.keys() != self._complete_arrays.keys()):
            problem = f"the engine does not hold version {base}, to which differences refer"
        self._encoded.receive(self._shadow, None if base is None else self._complete_arrays, problem)
        self._decoding = dict(self._encoded.coding_seconds)

    def _wait_for_update(self) -> None:
        """Wait until all ranks are in ``update``; their models hold no whole version from then on."""
        seconds = self._options.join_seconds
        deadline, last = time.monotonic() + seconds, self.installed_version

        def wait() -> dict[str, Any]:
            with self._lock:
                if not self._changed.wait_for(self._waits_for_version, max(0.0, deadline - time.monotonic())):
                    raise TransferTimeoutError(f"update was not called within {seconds:g} s, which a version needs")
            return {}

        def begin() -> dict[str, Any]:
            with self._lock:
                self._is_receiving, self._confirm_deadline = self._waits_for_version(), None
            self.installed_version = None  # also if this rank does not learn whether the others begin
            return {"waits": self._is_receiving}

        group, purpose = self._team.inner_group(), "receives a version in place"
        try:
            while True:
                run_collectively(group, wait, purpose, seconds + AGREE_SECONDS)
                begun = run_collectively(group, begin, purpose, AGREE_SECONDS)  # all ranks are here
                if all(report["waits"] for report in begun.values()):
                    break
                self.installed_version = last
                self._end_receiving()  # the limit of a rank was up, so that all leave this call of update
        except ReshardError:
            self._end_receiving()
            raise

    def _waits_for_version(self) -> bool:
        """Whether this rank is in ``update``. After a swap, the call returns, and its caller uses the model."""
        return any(not self._has_ended(attempt) for attempt in self._waiting)

    def _end_receiving(self) -> None:
        with self._lock:
            self._is_receiving = False
            self._changed.notify_all()

    def _find_route(self, message: MailboxMessage) -> Route:
        """The connections over which a version comes, and memory for it."""
        is_new = self._route is None or self._route[0] != message["route"]
        if is_new:
            self.close()
            roster = self._team.roster
            trainer = roster.member("trainer", message["trainer"]).manifest
            if "ranks" in message:
                trainer = on_ranks(trainer, message["ranks"], "the trainer")
            target = self._manifest.resolve(trainer)
            self._pieces = match(trainer, target, "the engine")
            self._checker, self._tied = Checker(trainer, target, self._pieces), target.tied
            targets = roster.targets(trainer, message["engines"])
            pieces = [match(trainer, manifest, key) for key, manifest in targets.items()]
            source = trainer
            if "holder" in message:
                source = roster.member("engine", message["holder"]).manifest.resolve(trainer)
                held = match(trainer, source, "the engine that holds the version")
                pieces = [compose(held, wanted) for wanted in pieces]
            place = 1 + message["engines"].index(self._team.id)
            store = dist.PrefixStore(prefix := f"routes/{message['route']}", self._team.raw)
            if self._team.is_leader:
                roster.share_presence(prefix, _ranks_of_route(message, source.size, roster))
            options = replace(self._options, is_shared=bool(message.get("compression")))
            route = Route(store, source, list(targets.values()), pieces, place, self._team.rank, options)
            self._route = message["route"], route
        is_installed = self._installer.keeps_last and _shares(self._shadow, self._kept[0])
        if is_installed:
            self._shadow, self._spare = self._spare, {}
        if is_new or is_installed:
            self._shadow = self._installer.allocate(self._pieces, self._shadow)
        assert self._route is not None
        return self._route[1]

    def _verify_version(self, message: MailboxMessage) -> None:
        """Compare the digests of the shadow with those of the trainer, on all ranks."""
        version = message["version"]

        def report_digests() -> dict[str, Any]:
            if self._arrived != version:
                raise RemoteError(self._problem or f"version {version} has not arrived")
            return {"digests": self._landed, "decoding": self._decoding}

        failed, decoding = None, dict[str, float]()
        try:
            seconds = self._options.timeout_seconds + AGREE_SECONDS  # other ranks may still receive
            reports = run_collectively(self._team.inner_group(), report_digests, "verifies a version", seconds)
            landed = {rank: report["digests"] for rank, report in reports.items()}
            for report in reports.values():
                decoding |= {name: max(time, decoding.get(name, 0.0)) for name, time in report["decoding"].items()}
            assert self._checker is not None
            if "holder" in message:
                latest = self._team.roster.latest()
                if latest is None or latest.version != version:
                    raise RemoteError(f"version {version} is no longer the last one")
                values = latest.values
                self._checker.compare_whole(latest.digests, landed)
            else:
                values = message["values"]
                self._checker.compare(message["digests"], landed)
            self._complete, self._complete_arrays = version, self._shadow
            self._digests, self._values, self._problem = self._landed, values, ""
        except ReshardError as error:
            self._problem, failed = str(error), describe_error(error)
        self._end_receiving()
        if self._leader is not None:
            self._leader.end_receiving(message, failed, self._complete, decoding)

    def _send_to_engine(self, message: MailboxMessage) -> None:
        """Send the last version to another engine."""
        if self._complete != message["version"]:
            return
        try:
            trainer = self._team.roster.member("trainer", message["trainer"]).manifest
            targets = self._team.roster.targets(trainer, message["engines"])
            source = self._manifest.resolve(trainer)
            held = match(trainer, source, "the engine")
            pieces = [compose(held, match(trainer, manifest, key)) for key, manifest in targets.items()]
            store = dist.PrefixStore(prefix := f"routes/{message['route']}", self._team.raw)
            if self._team.is_leader:
                self._team.roster.share_presence(prefix, _ranks_of_route(message, source.size, self._team.roster))
            route = Route(store, source, list(targets.values()), pieces, 0, self._team.rank, self._options)
            try:
                route.start_sending(self._complete_arrays).wait(self._options.timeout_seconds)
            finally:
                route.close()
        except Exception as error:
            self._problem = str(error)

    def _swap_in(self, message: MailboxMessage) -> None:
        """Install the last version on all ranks, or on none. The thread that waits in ``update`` does it."""
        error: ReshardError | None = None
        last, self.installed_version = self.installed_version, None
        version = self._complete_arrays, self._values, self._digests
        self.is_swapping = True
        try:
            self._team.renew_inner_group(message["inner"])
            try:  # all ranks know of the swap before one changes its model
                exchange(self._team.inner_group(), {}, "swaps a version in", AGREE_SECONDS)
            except ReshardError:
                self.installed_version = last
                raise
            self._install(*version)
            self.installed_version = message["version"]
            self._spare, self._kept = self._kept[0], version
        except ReshardError as caught:
            error = caught
            if self.installed_version is None and self._installer.keeps_last and last is not None:
                with contextlib.suppress(ReshardError):  # then the engine stays without a version
                    self._install(*self._kept)
                    self.installed_version = last
        with self._lock:
            self.swap_error, self.last_swap, self.is_swapping = error, message["attempt"], False
            self._changed.notify_all()
        if self._leader is not None and error is not None:
            self._leader.end_failed_swap(may_repeat=not self._installer.keeps_last)

    def _install(self, arrays: TensorsByName, values: Mapping[str, Value], digests: RegionDigests) -> None:
        """Install a version. If that fails on one rank, all ranks raise its error."""

        def install() -> dict[str, Any]:
            assert self._checker is not None
            rank, checker, given = self._team.rank, self._checker, arrays
            if self._installer.keeps_last:  # a loader takes tied tensors under each name
                given = arrays | {name: arrays[first] for name, first in self._tied.items() if first in arrays}
            self._run_in_update(
                lambda: self._installer.install(
                    given, values, lambda arrays: checker.digest_target(arrays, rank) == digests
                )
            )
            return {}

        run_collectively(self._team.inner_group(), install, "installs a version", self._options.timeout_seconds)

    def _run_in_update(self, function: Callable[[], None]) -> None:
        """Run a function in the user's thread that waits in ``update``: loaders may depend on the state of a thread."""
        future: Future[None] = Future()
        with self._lock:
            self._deferred = function, future
            self._changed.notify_all()
        try:
            future.result(AGREE_SECONDS)
        except TimeoutError:
            if future.cancel():
                raise RemoteError("no thread waits in update any more") from None
            future.result()


#: Methods by the kind of their message. The first rank passes these messages on to all ranks, so that all act in one
#: order.
_HANDLERS: dict[str, Callable[[Receiver, MailboxMessage], None]] = {
    "receive": Receiver._receive_version,
    "verify": Receiver._verify_version,
    "serve": Receiver._send_to_engine,
    "ping": Receiver._answer_ping,
    "refused": Receiver._note_refusal,
    "dropped": Receiver._fetch_again,
    "swap": Receiver._swap_in,
}


def _run(function: Callable[[], None], future: Future[None]) -> BaseException | None:
    """Run a function for another thread. Returns what interrupted it."""
    if not future.set_running_or_notify_cancel():
        return None
    try:
        function()
        future.set_result(None)
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:  # the other ranks hear of it before this one leaves
        future.set_exception(RemoteError(f"{type(error).__name__} while it installed a version"))
        return error
    return None


def _ranks_of_route(message: MailboxMessage, source_size: int, roster: Roster) -> Iterator[tuple[str, str, int]]:
    """The kind and the id of the team, and the rank there, of each rank of the route that a message names."""
    kind, team_id = ("engine", message["holder"]) if "holder" in message else ("trainer", message["trainer"])
    yield from ((kind, team_id, rank) for rank in message.get("ranks", range(source_size)))
    for engine in message["engines"]:
        yield from (("engine", engine, rank) for rank in range(roster.member("engine", engine).manifest.size))


def _shares(first: TensorsByName, second: TensorsByName) -> bool:
    """Whether two versions are in the same memory."""
    return any(array is second.get(name) for name, array in first.items())


class _Leader:
    """Decisions of the first rank of an engine."""

    def __init__(self, receiver: Receiver, team: Team) -> None:
        self._receiver, self._team = receiver, team
        self._wants: dict[int, set[int]] = {}
        self._complete: int | None = None
        self._given: int | None = None  # the last version that was swapped in
        self._asked: list[str] = []  # engines that were asked for the last version
        self.inner_number = 0  # of the inner group for the next version or swap; a failure adds 1

    def handle_message(self, message: MailboxMessage) -> None:
        """Do what a message asks for."""
        kind = message["kind"]
        if kind == "want":
            self._wants.setdefault(message["attempt"], set()).add(message["rank"])
            newest = max(self._wants)  # the store has decided the earlier ones
            self._wants = {newest: self._wants[newest]}
            self._swap_if_wanted()
        elif kind == "fetch":
            self.fetch()

    def fetch(self) -> None:
        """Fetch the last version from another engine or from the trainer, if there is one."""
        self._asked = [self._team.id]
        self._fetch()

    def begin_receiving(self) -> None:
        """Stop swaps, because a new version arrives in the memory of the last one."""
        self._complete = None

    def end_receiving(
        self, message: MailboxMessage, failed: Any, complete: int | None, decoding: Mapping[str, float]
    ) -> None:
        """Note that all ranks hold a version, or why they do not; and the seconds of the slowest rank by format."""
        self._complete = complete
        if failed is not None:
            self.inner_number += 1  # the ranks may be out of sync: one of them may have stood still
        self._team.roster.set_held(self._team.id, complete)
        if "reply" in message:
            answer = {"kind": "held", "engine": self._team.id, "version": message["version"], "failed": failed}
            answer["decoding"] = decoding
            self._team.outbox.post(message["reply"], answer)
        if complete is None and "reply" not in message:
            self._fetch()
            return
        self._swap_if_wanted()

    def end_failed_swap(self, *, may_repeat: bool) -> None:
        """Let a swap that has failed be made again, if it may. A loader that has failed waits for another version."""
        if may_repeat:
            self._given = None
        self.inner_number += 1

    def _swap_if_wanted(self) -> None:
        if self._complete is None or (self._given is not None and self._complete <= self._given):
            return
        for attempt, ranks in sorted(self._wants.items()):
            if len(ranks) == self._team.size:
                del self._wants[attempt]
                key = key_of(self._team.id, attempt)
                if self._team.store.compare_set(key, "", SWAP, LOST_STORE_SECONDS) == SWAP.encode():
                    self._given = self._complete
                    swap = {"kind": "swap", "attempt": attempt, "version": self._complete, "inner": self.inner_number}
                    self._team.order_all({**swap, "relayed": True})
                    return

    def _fetch(self) -> None:
        """Ask an engine that holds the last version for it; if none does, the trainer."""
        roster, latest = self._team.roster, self._team.roster.latest()
        if latest is None or (self._complete is not None and self._complete >= latest.version):
            return
        for engine in roster.engines():
            if engine.id in self._asked or roster.held(engine.id) != latest.version:
                continue
            self._asked.append(engine.id)
            if any(roster.has_ended("engine", engine.id, rank) for rank in range(engine.manifest.size)):
                continue
            route = secrets.token_hex(8)
            message = {"version": latest.version, "trainer": latest.trainer, "holder": engine.id}
            message |= {"route": route, "engines": [self._team.id]}
            self._team.outbox.post(engine.address(), {"kind": "serve", **message})
            self.begin_receiving()
            self._team.order_all({"kind": "receive", "relayed": True, "inner": self.inner_number, **message})
            return
        trainer = roster.publisher()
        if trainer is not None:
            rank = roster.first_living("trainer", trainer.id, range(trainer.manifest.size))
            if rank is not None:
                self._team.outbox.post(trainer.address(rank), {"kind": "fetch", "engine": self._team.id})
