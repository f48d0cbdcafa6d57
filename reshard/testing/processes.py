"""Run several ranks on this machine, as processes with a Gloo group."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from reshard.coordination import serve_store
from reshard.errors import ArgumentError, ReshardError
from reshard.formatting import describe_ranks
from reshard.sharding import MAX_RANK, check_integer
from reshard.testing.starting import find_start, start_forked
from reshard.timeouts import check_timeout

#: After the first failure, how long the other ranks may run before they are killed.
GRACE_SECONDS = 5.0


@dataclass
class RankFailure:
    """The failure of one rank: its error and traceback, or its exit code if it sent no result."""

    rank: int
    error: BaseException | None
    text: str


class LaunchError(ReshardError, RuntimeError):
    """Ranks failed. The text lists a traceback once, with all ranks that have it.

    Attributes:
        failures: one per failed rank, ascending.
        results: ``{rank: return value}`` of the other ranks.
    """

    def __init__(self, failures: list[RankFailure], results: dict[int, Any]) -> None:
        self.failures, self.results = failures, results
        ranks_of: dict[str, list[int]] = {}
        for failure in failures:
            ranks_of.setdefault(failure.text, []).append(failure.rank)
        super().__init__("\n".join(f"{describe_ranks(ranks)}: {text}" for text, ranks in ranks_of.items()))

    def __reduce__(self) -> Any:
        """Pickle both attributes."""
        return LaunchError, (self.failures, self.results)


def run_processes(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_seconds: float = 120.0,
    grace_seconds: float = GRACE_SECONDS,
    init_group: bool = True,
) -> list[Any]:
    """Run ``function(rank, *args)`` in ``num_ranks`` processes and return their results.

    The processes end when this process ends, even if it is killed. They are forked. Forked processes cannot use
    autograd or CUDA if this process has used a GPU; then they are forked from another process, if ``cloudpickle`` is
    installed and can pickle the function and its arguments.

    Args:
        function: runs on each rank; its result must pickle.
        num_ranks: number of processes.
        timeout_seconds: all processes are killed after this time.
        grace_seconds: after the first failure, the other processes are killed after this time.
        init_group: create the world group before the call (Gloo over loopback). If false, call
            ``function(rank, port, *args)`` with the port of the store.

    Returns:
        The results in rank order.

    Raises:
        LaunchError: a rank raised, exited without a result, or did not finish in time.
        ArgumentError: ``function`` is not callable, or ``num_ranks`` is not a positive integer.
    """
    if not callable(function):
        raise ArgumentError(f"run_processes needs a function, not {type(function).__name__}")
    num_ranks = check_integer(num_ranks, "num_ranks", 1, MAX_RANK)
    check_timeout(timeout_seconds)
    for module in ("reshard.api.call", "numpy.ma", "encodings.idna"):  # import once here, not in each child
        importlib.import_module(module)
    start = find_start(functools.partial(_run_rank, function, num_ranks, args, init_group))
    pipes: list[Connection] = []
    processes = []
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(num_ranks):
        ours, theirs = multiprocessing.Pipe()
        processes.append(start(rank, theirs))
        theirs.close()
        pipes.append(ours)
    server, server_pipe = _start_store(pipes)

    def describe_exit(rank: int) -> str:
        processes[rank].join(1.0)
        exit_code = processes[rank].exitcode
        killed_by = f" ({signal.strsignal(-exit_code)})" if exit_code is not None and exit_code < 0 else ""
        return f"exit code {exit_code}{killed_by}"

    join_seconds = 0.2
    try:
        results = collect_results(dict(enumerate(pipes)), timeout_seconds, grace_seconds, describe_exit)
        join_seconds = 1.0
        return results
    finally:
        for process in processes:
            _end(process, join_seconds)
        for pipe in (*pipes, server_pipe):
            pipe.close()
        _end(server, 2.0)


def _start_store(pipes: Sequence[Connection]) -> tuple[BaseProcess, Connection]:
    """Start the store's server and send its port over all pipes. The server ends when the returned pipe is closed.

    The server is a thread. The store runs in a separate process, because a lock that it holds during a fork would stay
    locked in the child. So this process can fork again.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    listener = socket.create_server(("127.0.0.1", 0), backlog=len(pipes) + 8)
    server = context.Process(target=_serve_store, args=(listener, theirs, ours), name="store")
    start_forked(server)
    theirs.close()
    for pipe in pipes:
        pipe.send(listener.getsockname()[1])
    listener.close()
    return server, ours


def _end(process: BaseProcess, seconds: float) -> None:
    """Wait for a process to exit; kill it after ``seconds``."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()


def collect_results(
    pipes: Mapping[int, Connection],
    timeout_seconds: float,
    grace_seconds: float,
    describe_exit: Callable[[int], str],
    on_report: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Receive the result or the error of each rank over its pipe.

    A message is ``(kind, value, text)``. A rank sends any number of kind ``"report"``, then one of kind ``"result"``
    or ``"error"``.

    Args:
        pipes: ``{rank: pipe}``.
        timeout_seconds: limit for all ranks.
        grace_seconds: limit for the other ranks after the first failure.
        describe_exit: describes how a rank exited that sent no result.
        on_report: called as ``on_report(rank, value)`` for each report.

    Returns:
        The results in rank order.

    Raises:
        LaunchError: a rank failed, exited without a result, or sent none in time.
    """
    results: dict[int, Any] = {}
    failures: dict[int, RankFailure] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(results) + len(failures) < len(pipes):
        waiting: dict[Any, int] = {pipes[r]: r for r in pipes if r not in results and r not in failures}
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            for rank in waiting.values():
                failures[rank] = RankFailure(rank, None, "did not finish in time")
            break
        for readable in ready:
            rank = waiting[readable]
            try:
                kind, value, text = pipes[rank].recv()
            except (EOFError, OSError):
                kind, value, text = "error", None, f"ended with {describe_exit(rank)}"
            except Exception as error:  # unpickling may raise anything
                kind, value, text = (
                    "error",
                    None,
                    f"sent a message that does not unpickle: {type(error).__name__}: {error}",
                )
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


def _serve_store(listener: socket.socket, pipe: Connection, launchers_end: Connection) -> None:
    """Serve the store until the launcher closes its end of the pipe, or exits. Ctrl-C is for the launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launchers_end.close()
    store = serve_store(listener)
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    del store
    os._exit(0)


def join_world(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta, backend: str = "gloo") -> None:
    """Create the default group and wait until every rank has it.

    Without the wait, a rank that exits early would close connections that other ranks are still opening, and they would
    fail.

    Raises:
        RuntimeError: from torch, if not all ranks joined in time.
    """
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    if store.add("joined", 1) == num_ranks:
        store.set("all joined", "")
    store.wait(["all joined"], timeout)


def _end_after_launcher() -> None:
    """End this process when the one that called :func:`run_processes` has ended, such as by SIGKILL."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)


def _run_rank(
    function: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...],
    init_group: bool,
    rank: int,
    pipe: Connection,
    dumps: Callable[[Any], bytes],
) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_after_launcher, name="launcher watch", daemon=True).start()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # torch's store looks up the name of each peer. By default the resolver repeats a lost query after 5 s.
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
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
        # Plain pickle: multiprocessing's pickler would pass tensors as shared memory, which ends with this process.
        pipe.send_bytes(dumps(message))
    except Exception as error:  # the result or the error does not pickle
        pipe.send(("error", None, f"{message[2]}{type(error).__name__}: {error}"))
    pipe.close()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # run finalizers: transfers finish, connections close
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if message[0] == "result" else 1)
