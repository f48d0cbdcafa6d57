"""A port of each rank, which shows whether its process exists, even if the process is stopped."""

from __future__ import annotations

import contextlib
import json
import socket

from reshard.coordination.groups.addresses import family_of, is_loopback, own_address
from reshard.coordination.groups.agreement_messages import read_json
from reshard.coordination.groups.process_group import Group
from reshard.coordination.groups.store import STORE_TIMEOUT_SECONDS, Store
from reshard.forks import close_in_child
from reshard.runtime.transport.descriptors import has_descriptors

#: Time to wait for a connection to a port, for example of a host that is partitioned.
PROBE_TIMEOUT_SECONDS = 0.5


class Presence:
    """A listening socket. The system refuses connections to it once the process has ended, but not while it is stopped.

    It accepts connections and closes them at once.
    """

    def __init__(self, group: Group) -> None:
        self._listener: socket.socket | None = None
        self._entry = ""
        with contextlib.suppress(OSError):  # without a port, this rank counts as gone when its heartbeat stops
            if has_descriptors(1):
                address = own_address(group.store.raw)
                self._listener = close_in_child(
                    socket.create_server((address, 0), family=family_of(address), backlog=64)
                )
                self._listener.setblocking(False)
                self._entry = json.dumps([group.hostname, address, self._listener.getsockname()[1]])

    def publish(self, group: Group) -> None:
        """Write the port to the store, once."""
        if self._entry:
            group.store.set(_key(group.rank), self._entry)
            self._entry = ""

    def accept(self) -> None:
        """Close the connections of ranks that have asked."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                while True:
                    self._listener.accept()[0].close()

    def close(self) -> None:
        """Refuse connections from now on."""
        if self._listener is not None:
            self._listener.close()


def has_ended(store: Store, rank: int, seconds: float = STORE_TIMEOUT_SECONDS) -> bool:
    """Whether the process of a rank is known to have ended, or to have closed its group.

    Args:
        store: store of the group.
        rank: rank of this process in the group.
        seconds: how long to wait for the store.
    """
    if not store.check([_key(rank)], seconds):
        return False
    hostname, address, port = store.read(_key(rank), lambda text: read_json(text, (str, str, int)), seconds)
    if is_loopback(address) and hostname != socket.gethostname():
        return False
    try:
        socket.create_connection((address, port), timeout=PROBE_TIMEOUT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def copy_presence(source: Store, rank: int, target: Store, target_rank: int, seconds: float) -> None:
    """Copy the port of a rank from the store of one group to that of another, which the rank has yet to join.

    So the other group notices if the process ends before it joins.

    Args:
        source, rank: store of the group that the rank has joined, and the rank there.
        target, target_rank: store of the other group, and the rank there.
        seconds: how long to wait for the store.
    """
    if source.check([_key(rank)], seconds):
        target.compare_set(_key(target_rank), "", source.read(_key(rank), bytes.decode, seconds), seconds)


def _key(rank: int) -> str:
    return f"presence/{rank}"
