"""Addresses at which ranks reach each other."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable

import torch.distributed as dist


def is_loopback(address: str) -> bool:
    """Whether only processes on the same host can reach an address."""
    return address.startswith("127.") or address in ("::1", "localhost")


def family_of(address: str) -> socket.AddressFamily:
    """The family of an address, IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def own_address(store: dist.Store) -> str:
    """The address at which other ranks reach this process.

    The first address that can be determined, in this order: the first interface in GLOO_SOCKET_IFNAME, the local end of
    the route to the store, the name of this host, 127.0.0.1.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    lookups: list[Callable[[], str]] = []
    if names:
        lookups.append(lambda: _address_of_interface(names.split(",")[0]))
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host = getattr(store, "host", None)
    if host:
        lookups.append(lambda: _address_towards(host))
    lookups.append(lambda: socket.gethostbyname(socket.gethostname()))
    for lookup in lookups:
        with contextlib.suppress(OSError):
            return lookup()
    return "127.0.0.1"


def _address_of_interface(name: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, packed)[20:24])  # SIOCGIFADDR


def _address_towards(host: str) -> str:
    """The local address of the route to a host. Connecting a datagram socket sends nothing, so any port will do."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
