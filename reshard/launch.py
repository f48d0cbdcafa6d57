"""Several ranks on this machine: forked processes with a Gloo group, for the demo, tests and benchmarks."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import ReshardError

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
    """
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
    server = context.Process(target=_serve_store, args=(theirs, server_pipe), name="store")
    server.start()
    theirs.close()
    port = server_pipe.recv()
    for pipe in pipes:
        pipe.send(port)
    results: dict[int, Any] = {}
    failures: dict[int, RankFailure] = {}
    deadline = time.monotonic() + timeout_seconds
    try:
        while len(results) + len(failures) < num_ranks:
            open_pipes: dict[Any, int] = {
                pipes[rank]: rank for rank in range(num_ranks) if rank not in results and rank not in failures
            }
            ready = wait(list(open_pipes), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                for rank in open_pipes.values():
                    failures[rank] = RankFailure(rank, None, "did not end in time")
                break
            for readable in ready:
                rank = open_pipes[readable]
                try:
                    ok, value, text = pipes[rank].recv()
                except EOFError:
                    processes[rank].join(1.0)
                    ok, value, text = False, None, f"ended with exit code {processes[rank].exitcode}"
                except Exception as error:  # what it raised or returned does not unpickle here
                    ok, value, text = False, None, f"said what cannot be read: {type(error).__name__}: {error}"
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = RankFailure(rank, value, text)
                    deadline = min(deadline, time.monotonic() + grace_seconds)
    finally:
        for process in processes:
            process.join(1.0 if not failures else 0.2)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in (*pipes, server_pipe):
            pipe.close()
        server.join(2.0)
        if server.is_alive():
            server.kill()
            server.join()
    if failures:
        raise LaunchError([failures[rank] for rank in sorted(failures)], results)
    return [results[rank] for rank in range(num_ranks)]


def _serve_store(pipe: Connection, launchers_end: Connection) -> None:
    """Serve the store until the launcher closes its end of the pipe, or ends."""
    launchers_end.close()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os._exit(0)


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
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
            value = function(rank, *args)
        else:
            value = function(rank, port, *args)
        message: tuple[bool, Any, str] = (True, value, "")
    except BaseException as error:
        message = (False, error, traceback.format_exc())
    try:
        pipe.send(message)
    except Exception as error:  # a result or an error that does not pickle
        pipe.send((False, None, f"{message[2]}{type(error).__name__}: {error}"))
    pipe.close()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # as any child of multiprocessing: transfers end, connections say goodbye
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if message[0] else 1)
