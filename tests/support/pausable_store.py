"""A store whose server, or whose link to one rank, can be stopped for a while, and a process that stops others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import selectors
import signal
import socket
import time

from reshard.coordination.groups.process_group import serve_store

_FORK = multiprocessing.get_context("fork")


class PausableStore:
    """A store server and one proxy for each rank, each in its own process.

    Args:
        num_ranks: number of proxies.

    Attributes:
        ports: port of the proxy of each rank.
        pid: process of the server. links: processes of the proxies.
    """

    def __init__(self, num_ranks: int) -> None:
        listeners = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(num_ranks + 1)]
        port, *self.ports = (item.getsockname()[1] for item in listeners)
        server, *links = listeners
        self._processes = [_FORK.Process(target=_serve, args=(server,), daemon=True)]
        self._processes += [_FORK.Process(target=_forward, args=(link, port), daemon=True) for link in links]
        self._reader, self._writer = os.pipe()
        self._processes.append(_FORK.Process(target=_pause, args=(self._reader,), daemon=True))
        for process in self._processes:
            process.start()
        for listener in listeners:
            listener.close()
        self.pid, *self.links = (process.pid for process in self._processes[:-1])

    def __enter__(self) -> PausableStore:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        os.close(self._reader)
        os.close(self._writer)

    def pause(self, pid: int, seconds: float, after_seconds: float = 0.0) -> None:
        """Stop a process for some seconds. Returns at once; any process that was forked from this one may call it."""
        os.write(self._writer, f"{pid} {seconds} {after_seconds}\n".encode())


def _serve(listener: socket.socket) -> None:
    store = serve_store(listener)
    time.sleep(3600)
    del store


def _forward(listener: socket.socket, port: int) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    ends = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
                    for end, other in (ends, ends[::-1]):
                        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        selector.register(end, selectors.EVENT_READ, other)
                    continue
                data = b""
                with contextlib.suppress(OSError):
                    data = key.fileobj.recv(2**16)
                    key.data.sendall(data)
                if not data:
                    for end in (key.fileobj, key.data):
                        with contextlib.suppress(
                            KeyError, ValueError
                        ):  # closed for its other end, which was ready, too
                            selector.unregister(end)
                        end.close()


def _pause(reader: int) -> None:
    with os.fdopen(reader) as requests:
        for line in requests:
            pid, seconds, after_seconds = line.split()
            if os.fork() == 0:
                time.sleep(float(after_seconds))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGSTOP)
                    time.sleep(float(seconds))
                    os.kill(int(pid), signal.SIGCONT)
                os._exit(0)
