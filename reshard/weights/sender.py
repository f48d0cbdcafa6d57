"""What the thread of each rank of a trainer does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from reshard.errors import ReshardError
from reshard.weights.dispatcher import Dispatcher, Outcome
from reshard.weights.holdings import Value
from reshard.weights.mailbox import Message
from reshard.weights.manifest import Manifest
from reshard.weights.pieces import match
from reshard.weights.route import Route, RouteOptions
from reshard.weights.snapshot import Snapshot
from reshard.weights.team import AGREE_SECONDS, Team, run_collectively
from reshard.weights.verify import Checker, Digests, add_all


class Sender:
    """Sends snapshots to engines, as the dispatcher on the first rank says.

    Args:
        team: the trainer.
        manifest: its model.
        snapshot: what to send. It is there before the dispatcher hears of a version.
        end: is called with the outcome of each version.
        options: of its routes.
    """

    def __init__(
        self,
        team: Team,
        manifest: Manifest,
        snapshot: Snapshot,
        end: Callable[[Mapping[str, Any]], None],
        options: RouteOptions,
    ) -> None:
        self._team, self._manifest, self._snapshot, self._end = team, manifest, snapshot, end
        self._options = options
        self._route: tuple[str, Route] | None = None
        self._checkers: dict[str, Checker] = {}
        self._dispatcher = Dispatcher(team, manifest, options) if team.is_leader else None

    def act(self, message: Message) -> None:
        """Act on a message."""
        kind = message["kind"]
        if kind == "send":
            self._send(message)
        elif kind == "ping":
            self._team.pong(message)
        elif kind == "done":
            self._end(message)
        elif self._dispatcher is not None:
            self._dispatcher.act(message)

    def close(self) -> None:
        """Close the connections."""
        if self._route is not None:
            self._route[1].close()
            self._route = None

    def _send(self, message: Message) -> None:
        """Send the snapshot to the engines of a message; every rank of the trainer does so at the same time."""
        times: dict[str, float] = {}
        values: dict[str, Value] = {}
        seconds = self._options.timeout_seconds + AGREE_SECONDS  # others may still be sending

        def send() -> dict[str, Any]:
            engines = self._team.roster.targets(self._manifest, message["engines"])
            route = self._find_route(message["route"], engines)
            begun = time.monotonic()
            with self._snapshot.sending(message["version"]):
                values.update(self._snapshot.values)
                handle = route.start_sending(self._snapshot.arrays)
                digests = self._digest()
                handle.wait(self._options.timeout_seconds)
            times.update(seconds=time.monotonic() - begun, **route.predict())
            return {"digests": digests}

        try:
            reports = run_collectively(self._team.inner_group(), send, "sends a version", seconds)
        except ReshardError as error:
            self.close()
            outcome = Outcome(error=error)
        else:
            digests = {
                engine: add_all([report["digests"][engine] for report in reports.values()])
                for engine in message["engines"]
            }
            totals: dict[str, int] = {}  # an engine that trims a tensor has none of it
            for engine, checker in self._checkers.items():
                totals |= checker.add_tensors(digests[engine])
            outcome = Outcome(
                digests=digests,
                totals=totals,
                times=times,
                values=values,
            )
        if self._dispatcher is not None:
            self._dispatcher.end_sending(message, outcome)

    def _find_route(self, key: str, engines: Mapping[str, Manifest]) -> Route:
        if self._route is None or self._route[0] != key:
            self.close()
            pieces = {name: match(self._manifest, target, name) for name, target in engines.items()}
            store = dist.PrefixStore(f"routes/{key}", self._team.raw)
            targets = list(engines.values())
            self._checkers = {}
            for name, target in engines.items():  # engines with equal models share one
                twin = next((other for other in self._checkers if engines[other] == target), None)
                checker = Checker(self._manifest, target, pieces[name]) if twin is None else self._checkers[twin]
                self._checkers[name] = checker
            route = Route(store, self._manifest, targets, list(pieces.values()), 0, self._team.rank, self._options)
            self._route = key, route
        return self._route[1]

    def _digest(self) -> dict[str, Digests]:
        """The digests for each engine of what this rank sends."""
        found: dict[int, Digests] = {}
        for checker in self._checkers.values():
            if id(checker) not in found:
                found[id(checker)] = checker.digest_source(self._snapshot.arrays, self._team.rank)
        return {engine: found[id(checker)] for engine, checker in self._checkers.items()}
