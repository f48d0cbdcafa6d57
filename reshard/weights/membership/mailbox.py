"""Messages between processes that share nothing but a store.

Each rank of a trainer or of an engine has a mailbox: numbered keys in the store. A sender appends a message by writing
the first free number. So no message is lost, and no message waits for another. The owner reads messages in order, and
marks them as read, a few at a time. docs/decisions/0027-versions-by-messages-in-the-store.md lists all messages.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from reshard.coordination.groups.process_group import own_client
from reshard.coordination.groups.store import LOST_STORE_SECONDS, Store

#: A message that its owner has read. Its key stays, so that nobody writes the number again.
_READ = "-"
#: Time that the owner waits for a message at a time. A message from the same process ends the wait.
_WAIT = datetime.timedelta(days=1)
#: The owner marks this many messages as read at once, and writes the number of all of them. New senders begin there.
_TAIL_INTERVAL = 8

MailboxMessage = dict[str, Any]


class Outbox:
    """Appends messages to mailboxes, from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next: dict[str, int] = {}

    def post(self, address: str, message: Mapping[str, Any], seconds: float = LOST_STORE_SECONDS) -> None:
        """Append a message.

        Args:
            address: the mailbox.
            message: JSON.
            seconds: how long to wait for the store.

        Raises:
            RuntimeError: the store did not answer, or is lost.
        """
        self._append([address], _encode(message), seconds)

    def post_all(self, addresses: Iterable[str], message: Mapping[str, Any]) -> None:
        """Append a message to several mailboxes."""
        self._append(list(addresses), _encode(message), LOST_STORE_SECONDS)

    def _append(self, addresses: list[str], text: str, seconds: float) -> None:
        for address in addresses:
            if address not in self._next:
                tail = f"{address}/read"
                self._next[address] = self._store.read(tail, int, seconds) if self._store.check([tail], seconds) else 0
        numbers = {address: self._next[address] for address in addresses}

        def append(raw: dist.Store) -> None:  # one wait for all calls
            for address, number in numbers.items():
                while raw.compare_set(f"{address}/{number}", "", text) != text.encode():
                    number += 1
                numbers[address] = number + 1

        self._store.run(append, seconds)
        self._next |= numbers


def _encode(message: Mapping[str, Any]) -> str:
    """The text of a message. Two equal messages are two messages, so they differ."""
    return json.dumps({**message, "id": secrets.token_hex(8)})


class Mailbox:
    """The messages for this rank. One thread reads them."""

    def __init__(self, store: dist.Store, address: str) -> None:
        """Args:
        store: a ``torch.distributed`` store; the mailbox opens another connection to it.
        address: prefix of its keys.
        """
        self._store, self.address, self._number = own_client(store), address, 0

    def read(self) -> MailboxMessage:
        """The next message; waits until there is one. Skips what is no message.

        Raises:
            RuntimeError: the store is lost.
        """
        while True:
            key = f"{self.address}/{self._number}"
            self._store.wait([key], _WAIT)
            text = self._store.compare_set(key, "", _READ)  # changes nothing: the key exists; get would wait again
            self._number += 1
            if self._number % _TAIL_INTERVAL == 0:
                self._mark_read()
            with contextlib.suppress(ValueError, RecursionError):  # another program has written to the mailbox
                message = json.loads(text)
                if isinstance(message, dict) and isinstance(message.get("kind"), str):
                    return message

    def _mark_read(self) -> None:
        """Mark the last messages as read, and write where new senders begin."""
        numbers = range(self._number - _TAIL_INTERVAL, self._number)
        marks = {f"{self.address}/{number}": _READ for number in numbers}
        marks[f"{self.address}/read"] = str(self._number)
        if self._store.has_extended_api():
            self._store.multi_set(list(marks), list(marks.values()))
        else:
            for key, value in marks.items():
                self._store.set(key, value)
