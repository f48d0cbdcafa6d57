"""Several ranks on this machine: forked processes with a Gloo group, for the demo, tests and benchmarks."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from reshard.coordination.process_group import serve_store
from reshard.errors import ArgumentError, ReshardError
from reshard.timeouts import check_timeout

#: After one rank failed, how long the others may take to finish by themselves.
GRACE_SECONDS = 5.0


@dataclass
class RankFailure:
    """How one rank ended: its error and traceback, or its exit code if it said nothing."""

    rank: int
    error: BaseException | None
    text: str


class LaunchError(ReshardError, RuntimeError):
    """Some ranks failed; ``failures`` says how, ``results`` holds what the others returned."""

    def __init__(self, failures: list[RankFailure], results: dict[int, Any]) -> None:
        self.failures, self.results = failures, results
        super().__init__("\n".join(f"rank {failure.rank}: {failure.text}" for failure in failures))

    def __reduce__(self) -> Any:
        """Pickled with both."""
        return LaunchError, (self.failures, self.results)


def run_processes(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_seconds: float = 120.0,
    grace_seconds: float = GRACE_SECONDS,
    init_group: bool = True,
) -> list[Any]:
    """Run ``function(rank, *args)`` in ``num_ranks`` forked processes and return what each returned.

    Args:
        function: what each rank does; its result must pickle. With ``init_group`` the world group is up.
        num_ranks: how many processes.
        timeout_seconds: all processes are ended after this long.
        grace_seconds: once one has failed, the others are ended after this long.
        init_group: make the world group (Gloo over loopback, the store in this process). If false,
            ``function`` is called as ``function(rank, port, *args)`` with the port of the store.

    Returns:
        The results in rank order.

    Raises:
        LaunchError: a rank raised, ended without a word, or did not end in time.
        ArgumentError: the function cannot be called, or there is no rank to call it.
    """
    if not callable(function):
        raise ArgumentError(f"run_processes needs a function, not {type(function).__name__}")
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise ArgumentError(f"num_ranks is {num_ranks!r}; it must be an integer from 1 on")
    check_timeout(timeout_seconds)
    for module in ("reshard.api.call", "numpy.ma"):  # which each process would load for itself
        importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes = []
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_main, args=(function, rank, num_ranks, args, theirs, init_group), name=f"rank-{rank}"
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    # The store's server is a thread, and a lock that a thread holds while its process forks stays locked in the
    # child; so it lives in a process of its own, and this one can fork again later.
    server_pipe, theirs = context.Pipe()
    listener = socket.create_server(("127.0.0.1", 0), backlog=num_ranks + 8)
    server = context.Process(target=_serve_until, args=(listener, theirs, server_pipe), name="store")
    server.start()
    theirs.close()
    for pipe in pipes:
        pipe.send(listener.getsockname()[1])
    listener.close()

    def how_it_ended(rank: int) -> str:
        processes[rank].join(1.0)
        return f"exit code {processes[rank].exitcode}"

    patience = 0.2
    try:
        results = collect_results(dict(enumerate(pipes)), timeout_seconds, grace_seconds, how_it_ended)
        patience = 1.0
        return results
    finally:
        for process in processes:
            process.join(patience)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in (*pipes, server_pipe):
            pipe.close()
        server.join(2.0)
        if server.is_alive():
            server.kill()
            server.join()


def collect_results(
    pipes: Mapping[int, Connection],
    timeout_seconds: float,
    grace_seconds: float,
    how_it_ended: Callable[[int], str],
    on_report: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """What each rank says over its pipe, once: ``(kind, value, text)`` with a kind of "result" or "error".

    Args:
        pipes: of each rank. timeout_seconds: for all of them; grace_seconds: for the others once one has failed.
        how_it_ended: of a rank that ended without a word. on_report: takes what ranks say before, of kind "report".

    Returns:
        The results in rank order.

    Raises:
        LaunchError: a rank failed, ended without a word, or said nothing in time.
    """
    results: dict[int, Any] = {}
    failures: dict[int, RankFailure] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(results) + len(failures) < len(pipes):
        waiting: dict[Any, int] = {pipes[r]: r for r in pipes if r not in results and r not in failures}
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            for rank in waiting.values():
                failures[rank] = RankFailure(rank, None, "did not end in time")
            break
        for readable in ready:
            rank = waiting[readable]
            try:
                kind, value, text = pipes[rank].recv()
            except (EOFError, OSError):
                kind, value, text = "error", None, f"ended with {how_it_ended(rank)}"
            except Exception as error:  # what it raised or returned does not unpickle here
                kind, value, text = "error", None, f"said what cannot be read: {type(error).__name__}: {error}"
            if kind == "report":
                if on_report is not None:
                    on_report(rank, value)
            elif kind == "result":
                results[rank] = value
            else:
                failures[rank] = RankFailure(rank, value, text)
                deadline = min(deadline, time.monotonic() + grace_seconds)
    if failures:
        raise LaunchError([failures[rank] for rank in sorted(failures)], results)
    return [results[rank] for rank in sorted(results)]


def _serve_until(listener: socket.socket, pipe: Connection, launchers_end: Connection) -> None:
    """Serve until the launcher closes its end of the pipe, or ends."""
    launchers_end.close()
    store = serve_store(listener)
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    del store
    os._exit(0)


def join_world(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> None:
    """Make the default group over Gloo, and wait until every rank has it.

    A process that ends sooner closes connections that others are still making, and they fail for it.

    Raises:
        RuntimeError: of torch, not all ranks came in time.
    """
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    if store.add("joined", 1) == num_ranks:
        store.set("all joined", "")
    store.wait(["all joined"], timeout)


def _main(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
    pipe: Connection,
    init_group: bool,
) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        port = pipe.recv()
        if init_group:
            join_world(dist.TCPStore("127.0.0.1", port, is_master=False), rank, num_ranks, timedelta(seconds=60))
            value = function(rank, *args)
        else:
            value = function(rank, port, *args)
        message: tuple[str, Any, str] = ("result", value, "")
    except BaseException as error:
        message = ("error", error, traceback.format_exc())
    try:
        # plain pickle: multiprocessing's own would hand over tensors as shared memory, which ends with this process
        pipe.send_bytes(pickle.dumps(message))
    except Exception as error:  # a result or an error that does not pickle
        pipe.send(("error", None, f"{message[2]}{type(error).__name__}: {error}"))
    pipe.close()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # as any child of multiprocessing: transfers end, connections say goodbye
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if message[0] == "result" else 1)
