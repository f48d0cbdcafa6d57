"""The dispatcher of a trainer, on its first rank: it decides which engines take part, and repeats failed sends."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from reshard.coordination import describe_error
from reshard.errors import ArgumentError, PlanError, RemoteError, ReshardError
from reshard.formatting import describe_ranks
from reshard.threads import start_thread
from reshard.weights.membership.mailbox import MailboxMessage
from reshard.weights.membership.roster import Latest, Member
from reshard.weights.membership.survivors import on_ranks
from reshard.weights.membership.team import Team
from reshard.weights.model.holdings import Value
from reshard.weights.model.manifest import Manifest
from reshard.weights.model.pieces import match
from reshard.weights.model.verify import RegionDigests
from reshard.weights.routes.route import RouteOptions

#: A version is sent to an engine at most this many times.
MAX_SENDS = 3
#: Interval at which the dispatcher checks that the ranks for which it waits are alive.
DISPATCH_CHECK_INTERVAL_SECONDS = 0.5


@dataclass
class Outcome:
    """The result of a send on the trainer.

    Attributes:
        error: what failed; None: all data has left.
        digests: digests of the trainer's weights, by engine.
        totals: digests of whole tensors, by name.
        figures: of the send, by field of :class:`reshard.weights.publisher.PublishReport`.
        values: numbers and strings of the trainer's state.
    """

    error: ReshardError | None = None
    digests: Mapping[str, RegionDigests] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Value] = field(default_factory=dict)


@dataclass
class _Job:
    """A version that is being sent.

    Attributes:
        pending: by id, the engines that do not hold the version yet and were not dropped.
        results: by id, ``""`` if the engine holds the version, else the reason why it does not.
        num_sends: by id, the number of times that the version was sent to the engine.
        phase: ``"ping"``, ``"send"`` or ``"confirm"``.
        deadline: deadline of the phase.
        answered: ``(id of the team, rank)`` of the ranks that answered the last ping.
        engines: engines to which it is being sent.
        base: version that these engines hold, if the new version travels as differences.
        failed: by id, the engines to which the version must be sent again, with the reason.
        has_failed: whether a send has failed. Later ones are not encoded.
        begun: when the current send began.
        decoding: ``{format: seconds}`` of the slowest rank that has decoded in this send.
    """

    version: int
    pending: dict[str, Member]
    results: dict[str, str]
    is_published: bool
    num_sends: dict[str, int] = field(default_factory=dict)
    phase: str = "ping"
    nonce: str = ""
    deadline: float = 0.0
    answered: set[tuple[str, int]] = field(default_factory=set)
    has_failed: bool = False
    engines: list[str] = field(default_factory=list)
    base: int | None = None
    failed: dict[str, str] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)
    begun: float = 0.0
    decoding: dict[str, float] = field(default_factory=dict)

    @property
    def awaited(self) -> list[str]:
        """The engines to which the version is being sent, and which have not reported success or failure."""
        return [engine for engine in self.engines if engine in self.pending and engine not in self.failed]


class Dispatcher:
    """Leads a trainer. The dispatcher acts on messages. It waits only while its rank sends.

    Args:
        team: the trainer.
        manifest: its model.
        options: time limits of engines to answer, and to confirm a version.
        find_base: function that takes whether the version may be encoded, and returns the version to which differences
            may refer, if any.
        describe_coding: function that takes the base of a version, and returns what messages say about the coding.
        note_times: function that is called when all engines have confirmed a version at its first send. It takes the
            seconds since the order to send, and the seconds in which the slowest rank decoded each format.
    """

    def __init__(
        self,
        team: Team,
        manifest: Manifest,
        options: RouteOptions,
        find_base: Callable[[bool], int | None],
        describe_coding: Callable[[int | None], Mapping[str, Any]],
        note_times: Callable[[float, Mapping[str, float]], None],
    ) -> None:
        self._find_base, self._describe_coding, self._note_times = find_base, describe_coding, note_times
        self._held: dict[str, int | None] = {}  # version of each engine to which this rank has sent one
        self._team, self._manifest = team, manifest
        self._join_seconds, self._timeout_seconds = options.join_seconds, options.timeout_seconds
        self._job: _Job | None = None
        self._version: int | None = None
        self._address = team.address(team.rank)
        self._ranks = list(range(team.size))  # that send
        self._route: tuple[str, list[str], list[int]] | None = None  # key, engines and ranks of the open connections
        self._refused: dict[str, str] = {}
        self._asked: list[str] = []  # engines that want the last version
        self._is_ticking = False

    def handle_message(self, message: MailboxMessage) -> None:
        """Do what a message asks for."""
        kind, job = message["kind"], self._job
        if kind == "publish":
            self._version = message["version"]
            self._team.roster.set_latest(Latest(message["version"], self._team.id, {}, {}))
            self._begin(self._version, self._team.roster.engines(), is_published=True)
        elif kind == "fetch":
            self._asked.append(message["engine"])
            self._serve_asked()
        elif job is not None and kind == "pong" and message["nonce"] == job.nonce:
            job.answered.add((message["team"], message["rank"]))
            self._check_pings(job)
        elif kind == "tick":
            self._is_ticking = False
            if job is not None:
                self._check(job)
        elif job is not None and kind == "held" and message["version"] == job.version:
            self._note_held(job, message["engine"], message["failed"], message["decoding"])

    def take_over(self, version: int) -> None:
        """Lead in place of a rank that has ended while this version was on its way."""
        roster = self._team.roster
        latest = roster.latest()
        if latest is None or latest.version < version:
            roster.set_latest(Latest(version, self._team.id, {}, {}))
        self._version = version
        engines = roster.engines()
        held = [engine for engine in engines if roster.held(engine.id) == version]
        self._begin(version, [engine for engine in engines if engine not in held], is_published=True, held=held)

    def end_sending(self, message: MailboxMessage, outcome: Outcome) -> None:
        """Note that this rank has sent, or has failed to."""
        job = self._job
        assert job is not None
        if isinstance(outcome.error, (ArgumentError, PlanError)):  # another send would end in it too
            self._route = None
            self._fail(job, outcome.error)
            return
        if outcome.error is not None:
            self._route = None
            job.failed |= dict.fromkeys(job.engines, str(outcome.error))
            self._end_send(job)
            return
        job.figures = outcome.figures
        self._team.roster.set_latest(Latest(job.version, self._team.id, dict(outcome.totals), outcome.values))
        message = {"kind": "verify", "version": job.version, "reply": self._address, "values": outcome.values}
        for engine in job.engines:
            self._post(job.pending[engine], {**message, "digests": outcome.digests[engine]})
        self._enter(job, "confirm", self._timeout_seconds)

    def _begin(self, version: int, engines: Sequence[Member], is_published: bool, held: Sequence[Member] = ()) -> None:
        self._ranks = list(range(self._team.size))
        job = self._job = _Job(version, {}, {engine.id: "" for engine in held}, is_published)
        for engine in engines:
            if refusal := self._find_refusal(engine):
                job.results[engine.id] = refusal
            else:
                job.pending[engine.id] = engine
        self._begin_send(job)

    def _find_refusal(self, engine: Member) -> str:
        """The reason why an engine cannot take the weights; empty if it can."""
        if engine.id not in self._refused:
            self._refused[engine.id] = ""
            try:
                match(self._manifest, engine.manifest.resolve(self._manifest), f"{engine}")
            except ReshardError as error:
                self._refused[engine.id] = str(error)
                self._post(engine, {"kind": "refused", "failed": describe_error(error)})
        return self._refused[engine.id]

    def _begin_send(self, job: _Job) -> None:
        job.failed = {}
        self._choose_engines(job)
        if not job.pending:
            self._finish(job)
        elif self._route is not None and self._route[1:] == (job.engines, self._ranks):
            self._send(job)
        else:
            self._enter(job, "ping", self._join_seconds)
            job.answered = set()
            ping = {"kind": "ping", "nonce": job.nonce, "reply": self._address}
            self._team.order_all(ping)
            for engine in job.engines:
                self._post(job.pending[engine], ping)

    def _choose_engines(self, job: _Job) -> None:
        """Send to all engines at once, or first to the engines that hold the base, and to the others afterwards.

        The last send goes to each engine alone, so that no engine misses a version because of another.
        """
        last = [engine for engine in job.pending if job.num_sends.get(engine) == MAX_SENDS - 1]
        if last:
            job.engines, job.base = last[:1], None
            return
        base, roster = self._find_base(not job.has_failed), self._team.roster
        holders = [
            engine for engine in job.pending if base is not None and self._held.get(engine, roster.held(engine)) == base
        ]
        job.engines, job.base = (holders, base) if holders else (list(job.pending), None)

    def _check_pings(self, job: _Job) -> None:
        """Begin to send when all engines that can still answer the ping have answered."""
        if job.phase != "ping":
            return
        is_late = time.monotonic() > job.deadline
        own = [rank for rank in self._ranks if (self._team.id, rank) not in job.answered]
        gone = [rank for rank in own if is_late or self._team.roster.has_ended("trainer", self._team.id, rank)]
        gone = [rank for rank in gone if rank != self._team.rank]
        if gone:
            self._ranks = [rank for rank in self._ranks if rank not in gone]
            try:
                on_ranks(self._manifest, self._ranks, "the trainer")
            except RemoteError as error:
                self._fail(job, error)
                return
        is_complete = len(gone) == len(own)
        for engine in [job.pending[engine_id] for engine_id in job.engines if engine_id in job.pending]:
            silent = [rank for rank in range(engine.manifest.size) if (engine.id, rank) not in job.answered]
            ended = [rank for rank in silent if self._team.roster.has_ended("engine", engine.id, rank)]
            if ended or (silent and is_late):
                why = "has ended" if ended else f"did not answer within {self._join_seconds:g} s"
                self._drop(job, engine, f"{describe_ranks(ended or silent)} of the engine {why}")
            elif silent:
                is_complete = False
        job.engines = [engine_id for engine_id in job.engines if engine_id in job.pending]
        if not job.engines:
            self._begin_send(job)
        elif is_complete:
            self._send(job)

    def _send(self, job: _Job) -> None:
        if self._route is None or self._route[1:] != (job.engines, self._ranks):
            self._route = secrets.token_hex(8), job.engines, self._ranks
        for engine in job.engines:
            job.num_sends[engine] = job.num_sends.get(engine, 0) + 1
            self._held[engine] = None
        message = {"version": job.version, "route": self._route[0], "engines": job.engines, "ranks": self._ranks}
        message |= self._describe_coding(job.base)
        self._enter(job, "send", self._timeout_seconds)
        job.begun, job.decoding = time.monotonic(), {}
        for engine in job.engines:
            self._post(job.pending[engine], {"kind": "receive", "trainer": self._team.id, **message})
        self._team.order_all({"kind": "send", **message})

    def _note_held(self, job: _Job, engine: str, failed: Any, decoding: Mapping[str, float]) -> None:
        if engine not in job.engines or engine not in job.pending or job.phase != "confirm":
            return
        if failed is None:
            job.results[engine] = ""
            self._held[engine] = job.version
            del job.pending[engine]
            job.decoding |= {name: max(time, job.decoding.get(name, 0.0)) for name, time in decoding.items()}
        else:
            job.failed[engine] = failed[1]
        if not job.awaited:
            if not job.pending and set(job.num_sends.values()) == {1} and len(job.num_sends) == len(job.engines):
                self._note_times(time.monotonic() - job.begun, job.decoding)
            self._end_send(job)

    def _end_send(self, job: _Job) -> None:
        for engine in [engine_id for engine_id in job.engines if job.num_sends.get(engine_id, 0) >= MAX_SENDS]:
            if job.pending.pop(engine, None) is not None:  # it stays, and gets the next version
                job.results[engine] = f"failed {MAX_SENDS} times: {job.failed.get(engine, '')}"
        if job.failed:
            self._route = None
            job.has_failed = True
        self._begin_send(job)

    def _check(self, job: _Job) -> None:
        """Check that the ranks for which a phase waits are alive."""
        if job.phase == "ping":
            self._check_pings(job)
        elif job.phase == "confirm":
            for engine in [job.pending[engine_id] for engine_id in job.awaited]:
                ranks = range(engine.manifest.size)
                ended = [rank for rank in ranks if self._team.roster.has_ended("engine", engine.id, rank)]
                if ended or time.monotonic() > job.deadline:
                    late = f"did not confirm the version in {self._timeout_seconds:g} s"
                    why = f"{describe_ranks(ended)} of the engine has ended" if ended else f"it {late}"
                    self._drop(job, engine, why)
                    self._route = None
            if not job.awaited:
                self._end_send(job)
        if self._job is not None:
            self._tick()

    def _drop(self, job: _Job, engine: Member, why: str) -> None:
        """Go on without an engine. If it lives, it joins again, and fetches the version."""
        job.results[engine.id] = f"dropped: {why}"
        job.pending.pop(engine.id, None)
        self._team.roster.drop(engine.id)
        self._post(engine, {"kind": "dropped", "why": why})

    def _fail(self, job: _Job, error: ReshardError) -> None:
        for engine in job.pending:
            job.results[engine] = str(error)
        job.pending = {}
        self._finish(job, error)

    def _finish(self, job: _Job, error: ReshardError | None = None) -> None:
        self._job = None
        if job.is_published:
            report = {"version": job.version, "engines": job.results, **job.figures}
            failed = None if error is None else describe_error(error)
            self._team.order_all({"kind": "done", "version": job.version, "failed": failed, "report": report})
        self._serve_asked()

    def _serve_asked(self) -> None:
        """Send the last version to engines that came later, if no engine can."""
        if self._job is not None or self._version is None or not self._asked:
            return
        asked, self._asked = self._asked, []
        engines = [engine for engine in self._team.roster.engines() if engine.id in asked]
        self._begin(self._version, engines, is_published=False)

    def _enter(self, job: _Job, phase: str, seconds: float) -> None:
        job.phase, job.nonce = phase, secrets.token_hex(8)
        job.deadline = time.monotonic() + seconds
        self._tick()

    def _tick(self) -> None:
        """Look again after a while. Many phases may pass before that."""
        if not self._is_ticking:
            timer = threading.Timer(DISPATCH_CHECK_INTERVAL_SECONDS, self._post_tick)
            timer.daemon, timer.name = True, "reshard-timer"
            start_thread(timer)
            self._is_ticking = True

    def _post_tick(self) -> None:
        while not self._team.is_closed:
            try:
                self._team.outbox.post(self._address, {"kind": "tick"})
                return
            except dist.DistNetworkError:  # the store is lost, and the thread of the team says so
                return
            except RuntimeError:  # it is silent: without ticks, the version would wait for ever
                continue

    def _post(self, member: Member, message: MailboxMessage) -> None:
        self._team.outbox.post(member.address(), message)
