"""Small messages between the ranks of a channel: everyone to the first rank, and its answer to everyone.

The first rank (the hub) listens on one address and publishes it, with a secret, in the store; the others connect.
Frames are a length and JSON. Waiting is done in slices, so that a rank can look around between them.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import struct
import time
from typing import Any

from reshard.coordination.addresses import is_loopback, own_address
from reshard.coordination.descriptors import is_shortage, out_of_descriptors
from reshard.coordination.store import Store
from reshard.errors import RemoteError
from reshard.forks import close_in_child
from reshard.formatting import format_ranks

_HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 2**28
MAX_HELLO_BYTES = 1024
CONNECT_SECONDS = 5.0
#: How long a frame may take to leave: the other side may be stopped, and its buffers full.
SEND_SECONDS = 5.0


class DeadlineError(Exception):
    """A deadline of a round passed. Not a TimeoutError, which a caller's signal handler may raise."""


class _Peer:
    """One connection, and what was read of its next frame."""

    def __init__(self, connection: socket.socket) -> None:
        close_in_child(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SEND_SECONDS)
        self.connection = connection
        self._buffer = bytearray()

    def send(self, value: Any, seconds: float = SEND_SECONDS) -> None:
        """Send a frame; raises OSError, TimeoutError among them, where not all of it could be, and nothing more can."""
        body = json.dumps(value).encode()
        self.connection.settimeout(max(seconds, 0.001))
        try:
            self.connection.sendall(_HEADER.pack(len(body)) + body)
        finally:
            self.connection.settimeout(SEND_SECONDS)

    def read(self) -> None:
        """Read once; raises EOFError when the other side is gone."""
        try:
            data = self.connection.recv(2**18)
        except OSError as error:
            raise EOFError(str(error)) from None
        if not data:
            raise EOFError("the connection was closed")
        self._buffer += data

    def frame(self, limit: int = MAX_FRAME_BYTES) -> Any:
        """The next complete frame, None if there is none yet; raises EOFError if it is too large or not JSON."""
        if len(self._buffer) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self._buffer)
        if size > limit:
            raise EOFError(f"a frame of {size} bytes is too large")
        if len(self._buffer) < _HEADER.size + size:
            return None
        body = bytes(self._buffer[_HEADER.size : _HEADER.size + size])
        del self._buffer[: _HEADER.size + size]
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise EOFError(f"a frame is not JSON: {error}") from None

    def say_goodbye(self) -> None:
        """Leave a last frame, by which the other side tells an orderly end from a death."""
        with contextlib.suppress(OSError):
            self.send({"bye": True})

    def is_closed(self) -> bool:
        """True if the other side has closed and nothing is left to read, not even a goodbye; reads nothing.

        Never waits: Python's ``recv`` on a socket with a time-out would, whatever its flags.
        """
        try:
            poller = select.poll()
            poller.register(self.connection, select.POLLIN)
            if not poller.poll(0):
                return False
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):  # reset, or closed on this side
            return True

    def close(self) -> None:
        self.connection.close()


class Hub:
    """The side of the first rank."""

    def __init__(self, store: Store, others: tuple[int, ...], seconds: float) -> None:
        self._others = others
        self._secret = secrets.token_hex(16)
        address = own_address(store.raw)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = close_in_child(socket.create_server((address, 0), family=family, backlog=len(others) + 8))
        self._listener.setblocking(False)
        self._peers: dict[int, _Peer] = {}
        self._strangers: list[_Peer] = []
        #: What each rank said last and was not answered yet, with its number.
        self.pending: dict[int, tuple[int, Any]] = {}
        self.gone: dict[int, str] = {}
        self.waits = False  # whether this rank is in a round
        self.hurried: set[int] = set()  # ranks that wait and whose time is up
        self._left: set[int] = set()  # ranks that said goodbye
        store.set("hub", json.dumps([address, self._listener.getsockname()[1], self._secret]), seconds)

    @classmethod
    def listen(cls, store: Store, rank: int, others: tuple[int, ...], seconds: float) -> Hub:
        """Listen for the other ranks.

        Raises:
            RemoteError: this host cannot listen where they reach it. ResourceError: no file descriptor is left.
        """
        try:
            return cls(store, others, seconds)
        except OSError as error:
            if is_shortage(error):
                raise out_of_descriptors(rank, f"meeting ranks {format_ranks(sorted((rank, *others)))}") from error
            raise RemoteError(
                f"rank {rank} cannot listen for the others: {error}; GLOO_SOCKET_IFNAME must name an interface of its "
                "host that they reach"
            ) from error

    def pump(self, seconds: float) -> bool:
        """Read some of what has come, waiting at most ``seconds`` for the first of it; returns whether there was.

        Raises:
            OSError: a rank cannot be let in, as this process may open no more file descriptors.
        """
        poller = select.poll()
        readers: dict[int, int | _Peer] = {}
        poller.register(self._listener, select.POLLIN)
        for rank, peer in self._peers.items():
            readers[peer.connection.fileno()] = rank
        for stranger in self._strangers:
            readers[stranger.connection.fileno()] = stranger
        for descriptor in readers:
            poller.register(descriptor, select.POLLIN)
        ready = poller.poll(max(0.0, 1000 * seconds))
        for descriptor, _ in ready:
            reader = readers.get(descriptor)
            if reader is None:
                self._accept()
            elif isinstance(reader, int):
                self._read(reader)
            else:
                self._greet(reader)
        return bool(ready)

    def drain(self) -> None:
        """Read all that has come."""
        while self.pump(0.0):
            pass

    def answer(self, decision: Any) -> None:
        """Answer every rank that waits; a rank that comes later takes part in the next round."""
        for rank, (number, _) in self.pending.items():
            if rank in self._peers:
                try:
                    self._peers[rank].send({"number": number, "decision": decision})
                except OSError as error:
                    self._lose(rank, str(error))
        self.pending.clear()
        self.hurried.clear()

    def has(self, rank: int) -> bool:
        """Whether a rank is connected."""
        return rank in self._peers

    def reaches(self, rank: int) -> bool:
        """Whether a rank is connected, and its end open."""
        return rank in self._peers and not self._peers[rank].is_closed()

    def lost(self) -> int | None:
        """A rank whose connection is closed although it did not say goodbye, if there is one."""
        for rank, peer in list(self._peers.items()):
            if rank not in self._left and peer.is_closed():
                return rank
        return next((rank for rank in list(self.gone) if rank not in self._left), None)

    def left(self) -> int | None:
        """A rank that said goodbye, if there is one."""
        return min(self._left, default=None)

    def close(self) -> None:
        """Say goodbye and close all connections."""
        for peer in self._peers.values():
            peer.say_goodbye()
        for peer in (*self._peers.values(), *self._strangers):
            peer.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
            self._strangers.append(_Peer(connection))
        except OSError as error:
            if is_shortage(error):
                raise

    def _greet(self, stranger: _Peer) -> None:
        """Take the first frame of a connection, which must know the secret and name a rank of ours."""
        try:
            stranger.read()
            hello = stranger.frame(MAX_HELLO_BYTES)
        except EOFError:
            hello = []
        if hello is None:
            return
        self._strangers.remove(stranger)
        known = isinstance(hello, list) and len(hello) == 2
        if not known or not hmac.compare_digest(str(hello[0]).encode(), self._secret.encode()):
            stranger.close()
        elif hello[1] in self._others and hello[1] not in self._peers:
            self._peers[hello[1]] = stranger
            self._take(hello[1])
        else:
            stranger.close()

    def _read(self, rank: int) -> None:
        try:
            self._peers[rank].read()
        except EOFError as error:
            self._lose(rank, str(error))
        else:
            self._take(rank)

    def _take(self, rank: int) -> None:
        try:
            while (frame := self._peers[rank].frame()) is not None:
                if "bye" in frame:
                    self._left.add(rank)
                    continue
                number = int(frame["number"])
                if "hurry" in frame:
                    if self.pending.get(rank, (None,))[0] == number:
                        self.hurried.add(rank)
                elif not frame["leaves"]:
                    self.pending[rank] = number, frame["request"]
                elif self.pending.get(rank, (None,))[0] == number:
                    if self.waits and frame["request"] is not None:
                        self.pending[rank] = number, frame["request"]  # with its error, for all who wait with it
                    else:
                        del self.pending[rank]  # nobody waits with it
                        self.hurried.discard(rank)
        except EOFError as error:
            self._lose(rank, str(error))

    def _lose(self, rank: int, why: str) -> None:
        self._peers.pop(rank).close()
        self.gone[rank] = why


class Spoke:
    """The side of every other rank."""

    def __init__(self, peer: _Peer) -> None:
        self._peer = peer
        self.said = -1  # the number of the last request
        self.answer: Any = None
        self.has_left = False  # whether the hub said goodbye

    @classmethod
    def connect(cls, store: Store, rank: int, hub: int, seconds: float) -> Spoke:
        """Connect to the address that the hub published, which the store has ``seconds`` to tell.

        Raises:
            RemoteError: the hub has left, or cannot be reached. ResourceError: no file descriptor is left.
        """
        address, port, secret = json.loads(store.get("hub", seconds))
        begun = time.monotonic()
        while True:
            try:
                peer = _Peer(socket.create_connection((address, port), timeout=CONNECT_SECONDS))
                peer.send([secret, rank])
                return cls(peer)
            except ConnectionRefusedError:  # the hub listened there before it published the address
                advice = "; if it runs on another host, set GLOO_SOCKET_IFNAME there" if is_loopback(address) else ""
                raise RemoteError(
                    f"rank {hub} has left: nothing listens at its address {address} port {port} any more, so its "
                    f"process has ended or its group is closed{advice}"
                ) from None
            except OSError as error:
                if is_shortage(error):
                    raise out_of_descriptors(rank, f"meeting rank {hub}") from None
                if time.monotonic() - begun > CONNECT_SECONDS:
                    raise RemoteError(
                        f"rank {rank} cannot reach rank {hub} at {address} port {port}: {error}; "
                        "set GLOO_SOCKET_IFNAME to an interface that all hosts reach"
                    ) from None
                time.sleep(0.1)

    def say(self, request: Any, seconds: float) -> None:
        """Send this rank's request of a round.

        Raises:
            EOFError: the hub is gone. DeadlineError: it did not take all of it within ``seconds``.
        """
        self.said, self.answer = self.said + 1, None
        self._send({"number": self.said, "request": request, "leaves": False}, seconds)

    def hurry(self) -> None:
        """Say that this rank's time is up; raises EOFError when the hub is gone."""
        self._send({"number": self.said, "hurry": True})

    def leave(self, request: Any) -> None:
        """Withdraw the last request. ``request``, if given, tells the ranks that wait with this one why."""
        self._send({"number": self.said, "request": request, "leaves": True})

    def take_answer(self) -> Any:
        """The answer to the last request."""
        answer, self.answer = self.answer, None
        return answer

    def _send(self, frame: dict[str, Any], seconds: float = SEND_SECONDS) -> None:
        try:
            self._peer.send(frame, seconds)
        except TimeoutError as error:
            self._peer.close()  # part of it is sent
            raise DeadlineError(str(error)) from None
        except OSError as error:
            raise EOFError(str(error)) from None

    def pump(self, seconds: float) -> None:
        """Read what has come, waiting at most ``seconds``; raises EOFError when the hub is gone."""
        poller = select.poll()
        poller.register(self._peer.connection, select.POLLIN)
        if poller.poll(max(0.0, 1000 * seconds)):
            self._peer.read()
            while (frame := self._peer.frame()) is not None:
                self.has_left |= "bye" in frame
                if frame.get("number") == self.said:
                    self.answer = frame["decision"]

    def is_lost(self) -> bool:
        """True if the hub has closed the connection without a goodbye."""
        return not self.has_left and self._peer.is_closed()

    def close(self) -> None:
        """Say goodbye and close the connection."""
        self._peer.say_goodbye()
        self._peer.close()
