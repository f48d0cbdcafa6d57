"""The thread of each trainer rank, which sends versions to engines."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from reshard.errors import ReshardError, ResourceError
from reshard.threads import start_thread
from reshard.weights.dispatcher import DISPATCH_CHECK_INTERVAL_SECONDS, Dispatcher, Outcome
from reshard.weights.membership.mailbox import MailboxMessage
from reshard.weights.membership.survivors import on_ranks
from reshard.weights.membership.team import AGREE_SECONDS, Team, run_collectively
from reshard.weights.model.holdings import Value
from reshard.weights.model.manifest import Manifest
from reshard.weights.model.pieces import match
from reshard.weights.model.verify import Checker, RegionDigests, add_all
from reshard.weights.routes.encoded_transfers import EncodedTransfers, RawHandle, SendingHandle
from reshard.weights.routes.format_choice import FormatChoice, keeps_base
from reshard.weights.routes.learned_times import LearnedTimes
from reshard.weights.routes.route import Route, RouteOptions
from reshard.weights.snapshot import Snapshot

#: Longest time after which a rank looks again whether those before it are alive.
MAX_WATCH_SECONDS = 10.0


class Sender:
    """Sends snapshots to engines, as the dispatcher on the first rank says.

    Args:
        team: the trainer.
        manifest: its model.
        snapshot: what to send. It is there before the dispatcher hears of a version.
        end: function that is called with the outcome of each version.
        options: options of its routes.
        compression: ``"delta"``, ``"lossless"`` or None; see :class:`reshard.weights.Publisher`.
    """

    def __init__(
        self,
        team: Team,
        manifest: Manifest,
        snapshot: Snapshot,
        end: Callable[[Mapping[str, Any]], None],
        options: RouteOptions,
        compression: str | None = None,
    ) -> None:
        self._team, self._manifest, self._snapshot, self._end = team, manifest, snapshot, end
        self._options, self._compression = options, compression
        self._choice, self._is_encoded = FormatChoice(), False
        self._learned = LearnedTimes()  # messages have what its first rank has learned
        self._sent: _SentVersion | None = None  # of the last version, if its connections had been used before
        self._encoded: EncodedTransfers | None = None
        self._seen: set[tuple[str, bool]] = set()  # routes over which versions have travelled, encoded or not
        self._route: tuple[str, Route] | None = None
        self._checkers: dict[str, Checker] = {}
        self._rank = team.rank  # among the ranks that send
        self._dispatcher = self._make_dispatcher() if team.is_leader else None
        self._watch_lock = threading.Lock()  # for the next three
        self._is_watching = False
        self._is_done: Callable[[], bool] = lambda: True
        self._asked = 0  # the rank that was last asked to lead

    def handle_message(self, message: MailboxMessage) -> None:
        """Do what a message asks for."""
        kind = message["kind"]
        if kind == "send":
            self._send(message)
        elif kind == "ping":
            self._team.answer_ping(message)
        elif kind == "done":
            self._end(message)
        elif kind in ("lead", "fetch") and self._dispatcher is None:
            self._lead()
        elif self._dispatcher is not None:
            self._dispatcher.handle_message(message)

    def close(self) -> None:
        """Close the connections."""
        if self._route is not None:
            self._route[1].close()
            self._route = self._encoded = None

    def _make_dispatcher(self) -> Dispatcher:
        return Dispatcher(
            self._team, self._manifest, self._options, self._find_base, self._describe_coding, self._note_times
        )

    def _find_base(self, may_encode: bool) -> int | None:
        """The version to which differences may refer, if the version may be encoded."""
        may_pay = self._compression is not None and self._choice.may_pay() and self._learned.may_encode()
        self._is_encoded = may_encode and may_pay
        return self._snapshot.base_version if self._is_encoded and keeps_base(self._compression) else None

    def _describe_coding(self, base: int | None) -> dict[str, Any]:
        """The entries of a message about the coding of a version."""
        factors = self._learned.factors if self._is_encoded else {}
        return {"compression": self._compression, "encoded": self._is_encoded, "base": base, "factors": factors}

    def _note_times(self, seconds: float, decoding: Mapping[str, float]) -> None:
        """Learn from a version that all engines have confirmed."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        if sent.is_encoded:
            measured = {name: (sent.decoding[name], decoding.get(name, 0.0)) for name in sent.decoding}
            self._learned.add_coding(sent.encoding, measured)
        self._learned.add_version(sent.is_encoded, seconds, sent.raw_bound)

    def watch(self, is_done: Callable[[], bool]) -> None:
        """Let the first living rank lead the trainer, if the ranks before it end while a version is being sent.

        Args:
            is_done: whether this rank knows what became of the version.
        """
        with self._watch_lock:
            self._is_done, self._asked = is_done, 0
            if self._team.rank and not self._is_watching:
                self._look_later()
                self._is_watching = True

    def _look_later(self) -> None:
        timer = threading.Timer(min(DISPATCH_CHECK_INTERVAL_SECONDS * self._team.rank, MAX_WATCH_SECONDS), self._look)
        timer.daemon, timer.name = True, "reshard-timer"
        start_thread(timer)

    def _look(self) -> None:
        """Look whether the ranks before this one are alive. Many versions may pass between two looks."""
        team = self._team
        with self._watch_lock:
            is_done, asked = self._is_done, self._asked
            self._is_watching = not is_done() and not team.is_closed and asked < team.rank
            if not self._is_watching:
                return
        with contextlib.suppress(RuntimeError):  # the store is lost, and the thread of the team says so
            first = team.roster.first_living("trainer", team.id, range(asked, team.rank))
            first = team.rank if first is None else first
            if first != asked:
                with self._watch_lock:
                    if self._is_done is is_done:
                        self._asked = first
                team.outbox.post(team.address(first), {"kind": "lead"})
        try:
            self._look_later()
        except ResourceError:
            with self._watch_lock:
                self._is_watching = False  # the next version tries again
            raise

    def _lead(self) -> None:
        """Take over from the ranks before this one, which have ended."""
        if self._snapshot.version is not None:
            self._dispatcher = self._make_dispatcher()
            self._dispatcher.take_over(self._snapshot.version)

    def _send(self, message: MailboxMessage) -> None:
        """Send the snapshot to the engines of a message; every rank of the trainer does so at the same time."""
        figures: dict[str, Any] = {}
        values: dict[str, Value] = {}
        self._sent = None
        seconds = self._options.timeout_seconds + AGREE_SECONDS  # others may still be sending
        key, ranks = message["route"], message["ranks"]
        if self._team.rank not in ranks:  # the others take this rank for lost
            self.close()
            return

        def send() -> dict[str, Any]:
            engines = self._team.roster.targets(self._manifest, message["engines"])
            route = self._find_route(key, ranks, engines)
            begun = time.monotonic()
            with self._snapshot.sending(message["version"]):
                values.update(self._snapshot.values)
                handle = self._start(route, message)
                digests = self._digest_snapshot()
                sent = handle.wait(self._options.timeout_seconds)
            figures.update(seconds=time.monotonic() - begun, **route.predict())
            return {"digests": digests, **vars(sent)}

        try:
            group = self._team.group_of(ranks, key)
            reports = run_collectively(group, send, "sends a version", seconds)
        except ReshardError as error:
            self.close()
            outcome = Outcome(error=error)
        else:
            outcome = Outcome(figures=figures, values=values)
            if self._compression is not None:
                figures |= self._note_transfer(message, reports, figures["nbytes"], figures["bound_seconds"])
            if self._dispatcher is not None:
                digests = {
                    engine: add_all([report["digests"][engine] for report in reports.values()])
                    for engine in message["engines"]
                }
                totals: dict[str, int] = {}  # an engine that trims a tensor has none of it
                for engine, checker in self._checkers.items():
                    totals |= checker.add_tensors(digests[engine])
                outcome = Outcome(digests=digests, totals=totals, figures=figures, values=values)
        if self._dispatcher is not None:
            self._dispatcher.end_sending(message, outcome)

    def _start(self, route: Route, message: MailboxMessage) -> SendingHandle | RawHandle:
        """Start to send the snapshot over a route."""
        if not message["encoded"]:
            return RawHandle(route, self._snapshot.arrays)
        if self._encoded is None:
            self._encoded = EncodedTransfers(route, self._options, self._choice)
        base, snapshot = message["base"], self._snapshot
        self._choice.factors = {name: (float(sides[0]), float(sides[1])) for name, sides in message["factors"].items()}
        problem = ""
        if base is not None and base != snapshot.base_version:
            problem = (
                f"the trainer holds version {snapshot.base_version} in place of {base}, to which differences refer"
            )
        return self._encoded.start_sending(snapshot.arrays, None if base is None else snapshot.base, problem)

    def _note_transfer(
        self, message: MailboxMessage, reports: Mapping[int, Any], plain: int, raw_bound: float
    ) -> dict[str, Any]:
        """Learn the rate of the link from a transfer; returns the entries of the report of the version."""
        route_and_format = message["route"], message["encoded"]
        seconds, nbytes = (max(report[name] for report in reports.values()) for name in ("seconds", "nbytes"))
        if message["encoded"]:
            self._choice.note(any(name != "raw" for report in reports.values() for name in report["formats"]))
        is_first = route_and_format not in self._seen
        self._choice.add_transfer(nbytes, seconds, plain, is_first)
        is_raw = all(name == "raw" for report in reports.values() for name in report["formats"])
        if not is_first and is_raw == (not message["encoded"]):  # unless each region was to be encoded and chose raw
            predicted, measured = (
                _sum_by_format(
                    {name: both[side] for name, both in report["encoding"].items()} for report in reports.values()
                )
                for side in range(2)
            )
            decoding = _sum_by_format(report["decoding"] for report in reports.values())
            encoding = {name: (predicted[name], measured[name]) for name in predicted}
            self._sent = _SentVersion(not is_raw, encoding, decoding, raw_bound)
        self._seen = {seen for seen in self._seen if seen[0] == message["route"]} | {route_and_format}
        formats = _sum_by_format(report["formats"] for report in reports.values())
        return {"formats": formats, "encoded_bytes": nbytes, "base": message["base"]}

    def _find_route(self, key: str, ranks: Sequence[int], engines: Mapping[str, Manifest]) -> Route:
        if self._route is None or self._route[0] != key:
            self.close()
            manifest = on_ranks(self._manifest, ranks, "the trainer")
            self._rank = ranks.index(self._team.rank)
            pieces = {name: match(manifest, target, name) for name, target in engines.items()}
            store = dist.PrefixStore(prefix := f"routes/{key}", self._team.raw)
            if self._rank == 0:
                members = [("trainer", self._team.id, rank) for rank in ranks]
                members += [("engine", name, rank) for name, engine in engines.items() for rank in range(engine.size)]
                self._team.roster.share_presence(prefix, members)
            targets = list(engines.values())
            self._checkers = {}
            for name, target in engines.items():  # engines with equal models share one
                equal = next((other for other in self._checkers if engines[other] == target), None)
                checker = Checker(manifest, target, pieces[name]) if equal is None else self._checkers[equal]
                self._checkers[name] = checker
            options = replace(self._options, is_shared=self._compression is not None)
            route = Route(store, manifest, targets, list(pieces.values()), 0, self._rank, options)
            self._route = key, route
        return self._route[1]

    def _digest_snapshot(self) -> dict[str, RegionDigests]:
        """The digests for each engine of what this rank sends."""
        digests: dict[int, RegionDigests] = {}
        for checker in self._checkers.values():
            if id(checker) not in digests:
                digests[id(checker)] = checker.digest_source(self._snapshot.arrays, self._rank)
        return {engine: digests[id(checker)] for engine, checker in self._checkers.items()}


@dataclass(frozen=True)
class _SentVersion:
    """The coding of a version that has been sent.

    Attributes:
        is_encoded: whether a format other than raw was used.
        encoding: ``{format: [predicted, measured] seconds}``, of all ranks together.
        decoding: ``{format: predicted seconds}``, of the slowest rank.
        raw_bound: lower bound of the seconds of a raw version.
    """

    is_encoded: bool
    encoding: Mapping[str, Any]
    decoding: Mapping[str, Any]
    raw_bound: float


def _sum_by_format(dicts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for times in dicts:
        for name, seconds in times.items():
            sums[name] = seconds + sums.get(name, 0)
    return sums
