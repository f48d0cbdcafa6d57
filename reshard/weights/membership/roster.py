"""The roster: the entries of a published name in the store, which are its trainer, its engines and its last version."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from reshard.coordination import copy_presence, has_ended
from reshard.coordination.groups.agreement_messages import read_json
from reshard.coordination.groups.store import Store
from reshard.errors import ArgumentError
from reshard.weights.model.holdings import Value
from reshard.weights.model.manifest import Manifest

#: Time to wait for the store.
ROSTER_TIMEOUT_SECONDS = 30.0
#: Key of the trainer that publishes the name.
_PUBLISHER = "publisher"
#: Key of the last version.
_LATEST = "latest"


@dataclass(frozen=True)
class Member:
    """A trainer or an engine.

    Attributes:
        kind: ``"trainer"`` or ``"engine"``.
        id: id of the team.
        manifest: its model.
    """

    kind: str
    id: str
    manifest: Manifest

    def address(self, rank: int = 0) -> str:
        """The mailbox of a rank; rank 0 decides for the member."""
        return f"{self.kind}/{self.id}/{rank}"

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


@dataclass(frozen=True)
class Latest:
    """The last version that a trainer has sent.

    Attributes:
        version: its number.
        trainer: id of the trainer.
        digests: digests of each tensor that travels whole, by the trainer's names.
        values: numbers and strings of its state.
    """

    version: int
    trainer: str
    digests: dict[str, int]
    values: Mapping[str, Value]


class Roster:
    """The members of a published name.

    Args:
        store: the store, under the prefix of the name.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._members: dict[str, Member] = {}
        self._engines: list[str] = []

    def write_manifest(self, kind: str, team_id: str, manifest: Manifest) -> None:
        """Store what a team holds."""
        self._store.set(f"{kind}/{team_id}/manifest", manifest.to_json(), ROSTER_TIMEOUT_SECONDS)

    def member(self, kind: str, team_id: str) -> Member:
        """A trainer or an engine by its id."""
        if team_id not in self._members:
            manifest = self._store.read(f"{kind}/{team_id}/manifest", Manifest.from_json, ROSTER_TIMEOUT_SECONDS)
            self._members[team_id] = Member(kind, team_id, manifest)
        return self._members[team_id]

    def targets(self, trainer: Manifest, engines: Iterable[str]) -> dict[str, Manifest]:
        """The models of engines, by id."""
        return {key: self.member("engine", key).manifest.resolve(trainer) for key in engines}

    def claim(self, team_id: str, hostname: str, pid: int) -> int | None:
        """Claim the name for a trainer.

        Returns:
            The last version that was published under the name, if any.

        Raises:
            ArgumentError: another trainer publishes it, and its process has not ended.
        """
        claim, known = json.dumps([team_id, hostname, pid]), ""
        while (holder := self._store.compare_set(_PUBLISHER, known, claim, ROSTER_TIMEOUT_SECONDS).decode()) != claim:
            other, other_host, other_pid = self._store.parse(_PUBLISHER, holder.encode(), _read_claim)
            if not self.has_ended("trainer", other, 0):
                raise ArgumentError(
                    f"process {other_pid} on host {other_host} already publishes this name; close its Publisher first, "
                    "or publish under another name"
                )
            known = holder
        latest = self.latest()
        return None if latest is None else latest.version

    def publisher(self) -> Member | None:
        """The trainer that claimed the name last."""
        if not self._store.check([_PUBLISHER], ROSTER_TIMEOUT_SECONDS):
            return None
        return self.member("trainer", self._store.read(_PUBLISHER, _read_claim, ROSTER_TIMEOUT_SECONDS)[0])

    def has_ended(self, kind: str, team_id: str, rank: int) -> bool:
        """Whether the process of a rank of a team has ended, or has closed its side."""
        return has_ended(self._store.under(_join_prefix(kind, team_id)), rank, ROSTER_TIMEOUT_SECONDS)

    def share_presence(self, prefix: str, ranks: Iterable[tuple[str, str, int]]) -> None:
        """Let a group notice ranks that end before they join it, by the ports that they have in their teams.

        Args:
            prefix: prefix of the store that the ranks join in.
            ranks: ``(kind, team id, rank in the team)`` of each rank of the group, in order.
        """
        target = self._store.under(f"{prefix}/reshard/join")
        for number, (kind, team_id, rank) in enumerate(ranks):
            source = self._store.under(_join_prefix(kind, team_id))
            copy_presence(source, rank, target, number, ROSTER_TIMEOUT_SECONDS)

    def first_living(self, kind: str, team_id: str, ranks: range) -> int | None:
        """The first of some ranks of a team whose process is not known to have ended."""
        return next((rank for rank in ranks if not self.has_ended(kind, team_id, rank)), None)

    def enlist(self, team_id: str) -> None:
        """Add an engine, or add it again after it was dropped."""
        number = 0
        while self._store.compare_set(f"engines/{number}", "", team_id, ROSTER_TIMEOUT_SECONDS) != team_id.encode():
            number += 1
        self._store.set(_state_key(team_id), "", ROSTER_TIMEOUT_SECONDS)

    def drop(self, team_id: str) -> None:
        """Remove an engine."""
        self._store.set(_state_key(team_id), "dropped", ROSTER_TIMEOUT_SECONDS)

    def engines(self) -> list[Member]:
        """The engines that are not dropped, in the order in which they came."""

        def find(raw: dist.Store) -> list[str]:
            while raw.check([key := f"engines/{len(self._engines)}"]):
                self._engines.append(raw.get(key).decode())
            states = {team_id: _state_key(team_id) for team_id in self._engines}
            return [team_id for team_id, key in states.items() if raw.check([key]) and not raw.get(key)]

        return [self.member("engine", team_id) for team_id in self._store.run(find, ROSTER_TIMEOUT_SECONDS)]

    def set_held(self, team_id: str, version: int | None) -> None:
        """Note the version that an engine holds, whole and verified."""
        self._store.set(f"held/{team_id}", json.dumps(version), ROSTER_TIMEOUT_SECONDS)

    def held(self, team_id: str) -> int | None:
        """The version that an engine holds."""
        key = f"held/{team_id}"
        if not self._store.check([key], ROSTER_TIMEOUT_SECONDS):
            return None
        return self._store.read(key, _read_version, ROSTER_TIMEOUT_SECONDS)

    def set_latest(self, latest: Latest) -> None:
        """Note the last version."""
        self._store.set(_LATEST, json.dumps(latest.__dict__), ROSTER_TIMEOUT_SECONDS)

    def latest(self) -> Latest | None:
        """The last version; None if none was sent."""
        if not self._store.check([_LATEST], ROSTER_TIMEOUT_SECONDS):
            return None
        return self._store.read(_LATEST, _read_latest, ROSTER_TIMEOUT_SECONDS)


def ranks_store(raw: dist.Store, kind: str, team_id: str) -> dist.PrefixStore:
    """The store in which the ranks of a team find each other."""
    return dist.PrefixStore(f"{kind}/{team_id}/ranks", raw)


def _join_prefix(kind: str, team_id: str) -> str:
    """The prefix of the group that the ranks of a team join in :func:`ranks_store`."""
    return f"{kind}/{team_id}/ranks/reshard/join"


def _read_claim(text: bytes) -> list[Any]:
    """The id of a trainer, and the host and the process of its first rank."""
    claim: list[Any] = read_json(text, (str, str, int))
    return claim


def _read_version(text: bytes) -> int | None:
    version: int | None = None if text == b"null" else read_json(text, int)
    return version


def _read_latest(text: bytes) -> Latest:
    pattern = {"version": int, "trainer": str, "digests": {str: int}, "values": dict}
    return Latest(**read_json(text, pattern))


def _state_key(team_id: str) -> Any:
    return f"engine/{team_id}/state"
