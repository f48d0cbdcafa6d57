"""Attempts of an engine to swap a version in. The store decides each of them once, for all ranks."""

from __future__ import annotations

import json

from reshard.coordination import describe_error, rebuild_error
from reshard.coordination.groups.store import LOST_STORE_SECONDS
from reshard.errors import RemoteError, ReshardError
from reshard.weights.membership.team import Team

#: The value that the first rank writes for an attempt that ends in a swap.
SWAP = "swap"


def key_of(team_id: str, attempt: int) -> str:
    """The key that decides an attempt of an engine. The first value wins: :data:`SWAP`, or an error for all ranks."""
    return f"engine/{team_id}/swap/{attempt}"


class AttemptLeftError(Exception):
    """An exception on another rank has ended an attempt before this rank took part in it."""

    def __init__(self, error: ReshardError) -> None:
        super().__init__(str(error))
        self.error = error


class Attempts:
    """The attempts of one rank. Ranks match them by number.

    Attributes:
        number: number of the attempt in which this rank takes part now or next.
    """

    def __init__(self, team: Team) -> None:
        self._team, self.number = team, 0

    def begin(self, seconds: float) -> None:
        """Take part in the next attempt.

        Raises:
            AttemptLeftError: an exception on another rank has ended it already. Attempts that time limits have ended
                are passed over.
        """
        store, team = self._team.store, self._team
        while store.check([key := key_of(team.id, self.number)], seconds):
            error, rank = _read(store.get(key, seconds))
            self.number += 1
            if isinstance(error, RemoteError) and rank != team.rank:
                raise AttemptLeftError(error)
        want = {"kind": "want", "attempt": self.number, "rank": team.rank}
        team.outbox.post(team.address(0), want, seconds)

    def give_up(self, error: ReshardError, call: str) -> ReshardError | None:
        """End the current attempt on all ranks with an error, unless it has ended.

        Args:
            error: the error.
            call: a text that no other call of ``update`` uses.

        Returns:
            The error with which it ends on all ranks; None if the ranks swap.
        """
        decided, _ = self._decide(error, call)
        if decided is not None:
            self.number += 1
        return decided

    def leave(self, error: ReshardError, swapped: int, call: str) -> bool:
        """End the attempt in which other ranks wait for this one, or will wait, unless the call has ended one already.

        Args:
            error, call: as for :meth:`give_up`.
            swapped: number of the last attempt whose swap this rank had made before the call.

        Returns:
            Whether the attempt has ended. Otherwise the ranks swap now.
        """
        store, last = self._team.store, key_of(self._team.id, self.number - 1)
        is_own = self.number > 0 and store.check([last]) and _call_of(store.get(last, LOST_STORE_SECONDS)) == call
        while not is_own:
            decided, is_own = self._decide(error, call)
            if decided is None and self.number > swapped:
                return False
            self.number += 1
        return True

    def _decide(self, error: ReshardError, call: str) -> tuple[ReshardError | None, bool]:
        """The decision on the current attempt: it ends with this error, unless the store has another decision.

        Returns:
            The error with which the attempt ends (None after a swap), and whether this call of ``update`` has decided.
        """
        name, text = describe_error(error)
        value = json.dumps([name, text, self._team.rank, call])
        stored = self._team.store.compare_set(key_of(self._team.id, self.number), "", value, LOST_STORE_SECONDS)
        is_own = _call_of(stored) == call
        if is_own:  # also if an interrupt came between the two: the message may not have left
            self._team.post_to_all({"kind": "given_up", "attempt": self.number, "failed": [name, text]})
        return _read(stored)[0], is_own


def _call_of(value: bytes) -> str:
    """The call that has ended an attempt with an error; empty after a swap."""
    try:
        return str(json.loads(value)[3])
    except (ValueError, TypeError, IndexError, KeyError, RecursionError):
        return ""


def _read(value: bytes) -> tuple[ReshardError | None, int]:
    """The error with which an attempt has ended (None after a swap), and the rank that wrote it."""
    if value.decode(errors="replace") == SWAP:
        return None, 0
    try:
        name, text, rank, _ = json.loads(value)
        return rebuild_error(str(name), str(text)), int(rank)
    except (ValueError, TypeError, RecursionError):
        return RemoteError("another program has written to the store"), -1
