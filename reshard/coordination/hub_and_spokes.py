"""Small messages between the ranks of a call group, in a star: every rank sends to the first rank, which answers all.

The first rank, called the hub, listens on a socket and publishes its address and a nonce in the store. The other ranks,
called spokes, connect to the hub and prove that they are allowed to. The proof is the nonce, or its HMAC with the
secret of the job in the environment variable ``RESHARD_SECRET``. A frame is a length and JSON. Waiting is split into
short slices so that a rank can check for errors in between.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from reshard.coordination.groups.addresses import family_of, is_loopback, own_address
from reshard.coordination.groups.agreement_messages import read_json
from reshard.coordination.groups.store import Store
from reshard.coordination.liveness.lost_ranks import hub_left_error
from reshard.errors import ArgumentError, RemoteError
from reshard.forks import close_in_child
from reshard.formatting import format_ranks
from reshard.runtime.transport.descriptors import is_descriptor_shortage, out_of_descriptors

#: Connections without a hello that are kept open beyond one of each member. The oldest are closed.
MAX_STRANGERS = 64
_HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 2**28
MAX_HELLO_BYTES = 1024
SPOKE_CONNECT_TIMEOUT_SECONDS = 5.0
#: Timeout for sending a frame: the receiver may be stopped with full buffers.
SEND_SECONDS = 5.0


#: Environment variable with a secret that the launcher gives to all ranks of a job, and to nobody else.
SECRET_VARIABLE = "RESHARD_SECRET"


def _prove(nonce: str, purpose: str) -> str:
    """The HMAC of a nonce with the secret of the job; "" without a secret."""
    secret = os.environ.get(SECRET_VARIABLE, "")
    return hmac.new(secret.encode(), f"{purpose} {nonce}".encode(), "sha256").hexdigest() if secret else ""


def _parse_entry(text: bytes) -> list[Any]:
    """Address, port, nonce and proof of a hub. Raises ValueError if the text is something else."""
    entry: list[Any] = read_json(text, (str, int, str, str))
    if not 0 < entry[1] < 2**16 or not all(field.isascii() for field in entry if isinstance(field, str)):
        raise ValueError(f"{entry} is no entry of a hub")
    return entry


class DeadlineError(Exception):
    """The deadline of a round passed. Not a TimeoutError, which a caller's signal handler may raise."""


class _Peer:
    """One connection and the bytes read so far of its next frame."""

    def __init__(self, connection: socket.socket) -> None:
        close_in_child(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SEND_SECONDS)
        self.connection = connection
        self._buffer = bytearray()

    def send(self, value: Any, seconds: float = SEND_SECONDS) -> None:
        """Send a frame; after an OSError, such as TimeoutError, it may be partly sent; the connection is unusable."""
        body = json.dumps(value).encode()
        self.connection.settimeout(max(seconds, 0.001))
        try:
            self.connection.sendall(_HEADER.pack(len(body)) + body)
        finally:
            self.connection.settimeout(SEND_SECONDS)

    def read(self) -> None:
        """Read once; raises EOFError if the connection has ended."""
        try:
            data = self.connection.recv(2**18)
        except OSError as error:
            raise EOFError(str(error)) from None
        if not data:
            raise EOFError("the connection was closed")
        self._buffer += data

    def frame(self, limit: int = MAX_FRAME_BYTES) -> Any:
        """The next complete frame, or None; raises EOFError if the frame is too large or not JSON."""
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
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise EOFError(f"a frame is not JSON: {error}") from None
        if value is None:
            raise EOFError("a frame is null")
        return value

    def say_goodbye(self, reason: tuple[str, str] | None) -> None:
        """Send a last frame that distinguishes a regular end from a death.

        Args:
            reason: class and text of the error that ended the last call of this rank, if one did.
        """
        with contextlib.suppress(OSError):
            self.send({"bye": reason})

    def is_closed(self) -> bool:
        """Whether the other side has closed the connection and nothing is left to read, not even a goodbye.

        Also true after this side has closed it. It reads nothing and never blocks. Python's ``recv`` on a socket with a
        timeout would block, whatever its flags.
        """
        try:
            poller = select.poll()
            poller.register(self.connection, select.POLLIN)
            if not poller.poll(0):
                return False
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):  # reset, or closed on this side
            return True

    def is_lost(self) -> bool:
        """Whether the other side alone has closed the connection.

        A process that ends closes its own side, and its monitor may still look: this does not show that the other side
        is gone.
        """
        return self.is_closed() and self.connection.fileno() >= 0

    def close(self) -> None:
        self.connection.close()


class Hub:
    """The first rank's side of the star."""

    def __init__(self, store: Store, others: tuple[int, ...], seconds: float) -> None:
        self._others = others
        nonce = secrets.token_hex(16)
        self._proof = _prove(nonce, "connect") or nonce
        address = own_address(store.raw)
        self._listener = close_in_child(
            socket.create_server((address, 0), family=family_of(address), backlog=len(others) + 8)
        )
        self._listener.setblocking(False)
        self._peers: dict[int, _Peer] = {}
        self._unverified: list[_Peer] = []
        #: Rank -> (number, request) of each unanswered request.
        self.pending: dict[int, tuple[int, Any]] = {}
        self.gone: dict[int, str] = {}  # rank -> reason, for each connection that ended
        self.in_round = False  # whether this rank is in a round
        self.timed_out: set[int] = set()  # ranks with a pending request whose deadline has passed
        self._departed: set[int] = set()  # ranks that said goodbye
        self.reason: Sequence[str] | None = None  # error that the first of them gave
        entry = [address, self._listener.getsockname()[1], nonce, _prove(nonce, "listen")]
        store.set("hub", json.dumps(entry), seconds)

    @classmethod
    def listen(cls, store: Store, rank: int, others: tuple[int, ...], seconds: float) -> Hub:
        """Listen for connections of the other ranks.

        Raises:
            RemoteError: this host cannot listen at an address that they reach.
            ResourceError: no file descriptor is free.
        """
        try:
            return cls(store, others, seconds)
        except OSError as error:
            if is_descriptor_shortage(error):
                raise out_of_descriptors(
                    rank, f"the rendezvous of ranks {format_ranks(sorted((rank, *others)))}"
                ) from error
            raise RemoteError(
                f"rank {rank} cannot listen for the other ranks: {error}; set GLOO_SOCKET_IFNAME on its host to an "
                "interface that they can reach"
            ) from error

    def pump(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for input and read some of it; returns whether there was any.

        Raises:
            OSError: no file descriptor is free to accept a connection.
        """
        poller = select.poll()
        readers: dict[int, int | _Peer] = {}
        poller.register(self._listener, select.POLLIN)
        for rank, peer in self._peers.items():
            readers[peer.connection.fileno()] = rank
        for peer in self._unverified:
            readers[peer.connection.fileno()] = peer
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
                self._read_hello(reader)
        return bool(ready)

    def drain(self) -> None:
        """Read all available input."""
        while self.pump(0.0):
            pass

    def defer(self) -> None:
        """Tell the ranks with a pending request that the answer may take as long as the store."""
        for rank, (number, _) in self.pending.items():
            if rank in self._peers:
                try:
                    self._peers[rank].send({"number": number, "deferred": True})
                except OSError as error:
                    self._disconnect(rank, str(error))

    def answer(self, decision: Any) -> None:
        """Answer all pending requests; a request that arrives later belongs to the next round."""
        for rank, (number, _) in self.pending.items():
            if rank in self._peers:
                try:
                    self._peers[rank].send({"number": number, "decision": decision})
                except OSError as error:
                    self._disconnect(rank, str(error))
        self.pending.clear()
        self.timed_out.clear()

    def is_connected(self, rank: int) -> bool:
        """Whether a rank is connected."""
        return rank in self._peers

    def is_alive(self, rank: int) -> bool:
        """Whether a rank is connected and has not closed its end."""
        return rank in self._peers and not self._peers[rank].is_closed()

    def find_lost(self) -> int | None:
        """A rank whose connection closed without a goodbye, if any."""
        for rank, peer in list(self._peers.items()):
            if rank not in self._departed and peer.is_lost():
                return rank
        return next((rank for rank in list(self.gone) if rank not in self._departed), None)

    def find_left(self) -> int | None:
        """The lowest rank that said goodbye, if any."""
        return min(self._departed, default=None)

    def close(self, reason: tuple[str, str] | None = None) -> None:
        """Say goodbye and close all connections. For ``reason``, see :meth:`_Peer.say_goodbye`."""
        for peer in list(self._peers.values()):  # at the end of a process, another thread may still read
            peer.say_goodbye(reason)
        for peer in (*self._peers.values(), *self._unverified):
            peer.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
            self._unverified.append(_Peer(connection))
            if len(self._unverified) > len(self._others) + MAX_STRANGERS:
                self._unverified.pop(0).close()
        except OSError as error:
            if is_descriptor_shortage(error):
                raise

    def _read_hello(self, peer: _Peer) -> None:
        """Read the first frame of a connection, and close it unless the frame has the proof and names a new member."""
        try:
            peer.read()
            hello = peer.frame(MAX_HELLO_BYTES)
        except EOFError:
            hello = []
        if hello is None:
            return
        self._unverified.remove(peer)
        well_formed = isinstance(hello, list) and [type(item) for item in hello] == [str, int]
        given = hello[0].encode(errors="surrogatepass") if well_formed else b""  # a stranger may send any text
        if not hmac.compare_digest(given, self._proof.encode()):
            peer.close()
        elif hello[1] in self._others and hello[1] not in self._peers:
            self._peers[hello[1]] = peer
            self._handle_frames(hello[1])
        else:
            peer.close()

    def _read(self, rank: int) -> None:
        try:
            self._peers[rank].read()
        except EOFError as error:
            self._disconnect(rank, str(error))
        else:
            self._handle_frames(rank)

    def _handle_frames(self, rank: int) -> None:
        try:
            while (frame := self._peers[rank].frame()) is not None:
                if "bye" in frame:
                    self._departed.add(rank)
                    self.reason = self.reason or frame["bye"]
                    continue
                number = int(frame["number"])
                if "hurry" in frame:
                    if self.pending.get(rank, (None,))[0] == number:
                        self.timed_out.add(rank)
                elif not frame["leaves"]:
                    self.pending[rank] = number, frame["request"]
                elif self.pending.get(rank, (None,))[0] == number:
                    if self.in_round and frame["request"] is not None:
                        self.pending[rank] = number, frame["request"]  # carries its error to all members
                    else:
                        del self.pending[rank]  # no round is waiting for it
                        self.timed_out.discard(rank)
        except EOFError as error:
            self._disconnect(rank, str(error))

    def _disconnect(self, rank: int, reason: str) -> None:
        self._peers.pop(rank).close()
        self.gone[rank] = reason


class Spoke:
    """Any other rank's side of the star."""

    def __init__(self, peer: _Peer) -> None:
        self._peer = peer
        self.number = -1  # number of the last request
        self.answer: Any = None
        self.is_deferred = False  # whether the hub waits only for the store before it answers
        self.has_left = False  # whether the hub said goodbye
        self.reason: Sequence[str] | None = None  # error that it gave

    @classmethod
    def connect(cls, store: Store, rank: int, hub: int, seconds: float) -> Spoke:
        """Connect to the hub, whose address must appear in the store within ``seconds``.

        Raises:
            RemoteError: the hub has left or cannot be reached.
            ResourceError: no file descriptor is free.
            ArgumentError: this rank and the hub have different secrets of the job.
        """
        address, port, nonce, proof_of_hub = store.read("hub", _parse_entry, seconds)
        if not hmac.compare_digest(proof_of_hub.encode(), _prove(nonce, "listen").encode()):
            raise ArgumentError(
                f"{SECRET_VARIABLE} of rank {rank} differs from that of rank {hub}: set it to one value on all ranks, "
                "or on none"
            )
        begun = time.monotonic()
        while True:
            try:
                peer = _Peer(socket.create_connection((address, port), timeout=SPOKE_CONNECT_TIMEOUT_SECONDS))
                peer.send([_prove(nonce, "connect") or nonce, rank])
                return cls(peer)
            except ConnectionRefusedError:  # final, since the hub listened before it published the address
                advice = "; if it runs on another host, set GLOO_SOCKET_IFNAME there" if is_loopback(address) else ""
                raise hub_left_error(hub, address, port, advice) from None
            except OSError as error:
                if is_descriptor_shortage(error):
                    raise out_of_descriptors(rank, f"the rendezvous with rank {hub}") from None
                if time.monotonic() - begun > SPOKE_CONNECT_TIMEOUT_SECONDS:
                    raise RemoteError(
                        f"rank {rank} cannot reach rank {hub} at {address} port {port}: {error}; "
                        "set GLOO_SOCKET_IFNAME to an interface that all hosts can reach"
                    ) from None
                time.sleep(0.1)

    def send_request(self, request: Any, seconds: float) -> None:
        """Send this rank's request for a round.

        Raises:
            EOFError: the hub closed the connection.
            DeadlineError: the request was not sent completely within ``seconds``.
        """
        self.number, self.answer, self.is_deferred = self.number + 1, None, False
        self._send({"number": self.number, "request": request, "leaves": False}, seconds)

    def report_timeout(self) -> None:
        """Notify the hub that this rank's deadline has passed; raises EOFError if the hub closed the connection."""
        self._send({"number": self.number, "hurry": True})

    def withdraw(self, request: Any) -> None:
        """Withdraw the last request, or replace it by ``request``, which carries an error to the other ranks."""
        self._send({"number": self.number, "request": request, "leaves": True})

    def take_answer(self) -> Any:
        """Remove and return the answer to the last request."""
        answer, self.answer = self.answer, None
        return answer

    def _send(self, frame: dict[str, Any], seconds: float = SEND_SECONDS) -> None:
        try:
            self._peer.send(frame, seconds)
        except TimeoutError as error:
            self._peer.close()  # the frame is partly sent
            raise DeadlineError(str(error)) from None
        except OSError as error:
            raise EOFError(str(error)) from None

    def pump(self, seconds: float) -> None:
        """Wait at most ``seconds`` for input and read it; raises EOFError if the hub closed the connection."""
        poller = select.poll()
        try:
            poller.register(self._peer.connection, select.POLLIN)
        except ValueError:
            raise EOFError("this side has closed the connection") from None
        if poller.poll(max(0.0, 1000 * seconds)):
            self._peer.read()
            while (frame := self._peer.frame()) is not None:
                self.has_left |= "bye" in frame
                self.reason = frame.get("bye") or self.reason
                if frame.get("number") == self.number:
                    self.is_deferred = "deferred" in frame
                    self.answer = frame.get("decision")

    def is_lost(self) -> bool:
        """Whether the hub closed the connection without a goodbye."""
        return not self.has_left and self._peer.is_lost()

    def close(self, reason: tuple[str, str] | None = None) -> None:
        """Say goodbye and close the connection. For ``reason``, see :meth:`_Peer.say_goodbye`."""
        self._peer.say_goodbye(reason)
        self._peer.close()
