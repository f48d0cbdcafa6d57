"""Close the sockets on which Gloo listens, once a group is connected.

Gloo connects all ranks while a group is made, but listens as long as the group exists. It keeps a file descriptor for
each connection that a stranger opens there, and aborts the process when none is left.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

#: The variable that lets Gloo connect two ranks when they first send. Its groups must go on listening.
LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"


def close_listeners(published: Sequence[bytes]) -> int:
    """Close the sockets of this process that listen at an address in what Gloo has published for a group.

    The group must be connected and must not end meanwhile. Its event loop later removes the descriptor of the socket,
    so an eventfd without events takes its place in the process and in the loop. Does nothing without Linux's ``/proc``,
    or if ranks connect when they first send.

    Returns:
        The number of closed sockets.
    """
    if os.environ.get(LAZY_VARIABLE, "0").lower() not in ("", "0", "n", "no", "f", "false"):
        return 0
    closed = 0
    links = dict(_read_links())
    loops = [descriptor for descriptor, link in links.items() if link == "anon_inode:[eventpoll]"]
    for descriptor in (number for number, link in links.items() if link.startswith("socket:")):
        address = _listening_address(descriptor)
        if address is None or not any(address in value for value in published):
            continue
        for loop in loops:
            if _watches(loop, descriptor):
                _replace(descriptor, loop)
                closed += 1
    return closed


def _read_links() -> Iterator[tuple[int, str]]:
    """Descriptors of this process, and what they refer to."""
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                yield int(entry.name), str(entry.readlink())


def _listening_address(descriptor: int) -> bytes | None:
    """The address of a listening socket as in memory, which Gloo publishes; None for another descriptor."""
    try:
        with _socket_of(os.dup(descriptor)) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            host, port, *flow = one.getsockname()
    except (OSError, ValueError):  # closed meanwhile
        return None
    family = socket.AF_INET6 if flow else socket.AF_INET
    return struct.pack("=H", family) + struct.pack("!H", port) + bytes(4 * bool(flow)) + socket.inet_pton(family, host)


def _socket_of(descriptor: int) -> socket.socket:
    """The socket of a descriptor, which is closed if it is none: another thread may have used its number again."""
    try:
        return socket.socket(fileno=descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _watches(loop: int, descriptor: int) -> bool:
    """Whether an epoll instance waits for events of a descriptor."""
    try:
        lines = Path(f"/proc/self/fdinfo/{loop}").read_text().splitlines()
        inode = os.stat(descriptor).st_ino
    except OSError:
        return False
    # after a fork, an instance may list numbers of another process, where they stand for other files
    return any(line.split()[:2] == ["tfd:", str(descriptor)] and f"ino:{inode:x}" in line.split() for line in lines)


def _replace(descriptor: int, loop: int) -> None:
    """Let an eventfd take the place of a listening socket."""
    with (
        contextlib.closing(select.epoll.fromfd(os.dup(loop))) as poller,
        socket.socket(fileno=os.dup(descriptor)) as one,
    ):
        silent = os.eventfd(0)
        poller.unregister(descriptor)  # a child of a fork may still have the socket, which would then remain
        os.dup2(silent, descriptor, inheritable=False)
        poller.register(descriptor, 0)
        os.close(silent)
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # in such a child, too
