"""The processes of an emulated cluster; :mod:`microbench.emulation.emulated_cluster` describes their tree."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from microbench.emulation.link_commands import (
    CLUSTER_ADDRESS,
    TCP_SETTINGS,
    cluster_link_commands,
    etc_hosts,
    host_link_commands,
    interface,
    nic_link_commands,
    send_buffer_bytes,
)
from microbench.emulation.namespaces import (
    die_with_parent,
    enter_cluster,
    enter_host,
    enter_nic,
    join_nic,
    replace_etc_hosts,
    set_up_host,
)
from reshard.topology import Topology

SET_UP_SECONDS = 20.0


def run_and_exit(main: Callable[[], None], control: socket.socket) -> None:
    """Run ``main`` in a forked process, then exit without the parent's clean-up handlers."""
    try:
        main()
        os._exit(0)
    except BaseException as error:
        with contextlib.suppress(OSError):
            control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)


# The cluster process


def run_cluster(topology: Topology, controls: list[socket.socket]) -> None:
    """Run the cluster process until its control connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launching process handles Ctrl-C; its end ends this process
    control, hosts = controls[0], controls[1:]
    enter_cluster()
    die_with_parent()
    replace_etc_hosts(etc_hosts(topology))
    pids = []
    for number, host in enumerate(hosts):
        pid = os.fork()
        if pid == 0:
            for other in controls:
                if other is not host:
                    other.close()
            run_and_exit(lambda number=number, host=host: _keeper_main(topology, number, host), host)  # type: ignore[misc]
        pids.append(pid)
    for pid in pids:
        _await_namespace(pid)
    cluster_link_commands(topology, pids).run()
    store_port = _fork_store(controls)
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)  # the links exist now
    for host in hosts:
        host.close()
    control.send(json.dumps({"port": store_port}).encode())
    while control.recv(2**16):
        control.send(json.dumps({"counts": _count_bytes()}).encode())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _await_namespace(pid: int) -> None:
    """Wait until a keeper has entered its network namespace."""
    ours = Path("/proc/self/ns/net").readlink()
    deadline = time.monotonic() + SET_UP_SECONDS
    while Path(f"/proc/{pid}/ns/net").readlink() == ours:
        if time.monotonic() > deadline:
            raise OSError(f"a host did not enter its namespaces within {SET_UP_SECONDS:g} s")
        time.sleep(0.001)


def _count_bytes() -> dict[str, tuple[int, int]]:
    """Bytes that each NIC sent and received, read at the bridge end of its link."""
    counts = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        counts[name.strip()] = (int(fields[0]), int(fields[8]))
    return counts


def _fork_store(controls: list[socket.socket]) -> int:
    """Serve the store in a separate process, because it starts threads and this process forks; returns its port."""
    import torch.distributed as dist

    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        for control in controls:
            control.close()
        store = dist.TCPStore(CLUSTER_ADDRESS, 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        os.close(writing)
        signal.pause()
    os.close(writing)
    with os.fdopen(reading) as pipe:
        port = pipe.read(16)
    if not port:
        raise OSError("the store did not start")
    return int(port)


# One host


def _keeper_main(topology: Topology, number: int, control: socket.socket) -> None:
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    enter_host()
    signal.sigwait([signal.SIGUSR1])
    first = os.fork()
    if first == 0:
        run_and_exit(lambda: _host_main(topology, number, control), control)
    control.close()
    os.waitpid(first, 0)


def _host_main(topology: Topology, number: int, control: socket.socket) -> None:
    die_with_parent()
    set_up_host(f"host{number}")
    _set_tcp(topology)
    nic_pids = [_fork_nic(control) for _ in topology.host(number).nics[1:]]
    host_link_commands(topology, number, nic_pids).run()
    for nic, pid in enumerate(nic_pids, start=1):
        _set_up_nic(topology, number, nic, pid)
    ranks: dict[int, tuple[int, int]] = {}  # pid -> run, rank
    kill_at: dict[int, float] = {}  # run -> time at which its remaining ranks are killed
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    control.send(b'{"ready": true}')
    while True:
        waited: list[Any] = [control, reading]
        due = min(kill_at.values(), default=None)
        readable = select.select(waited, [], [], None if due is None else max(0.0, due - time.monotonic()))[0]
        for run in [run for run, when in kill_at.items() if when <= time.monotonic()]:
            del kill_at[run]
            for pid, (of_run, _) in ranks.items():
                if of_run == run:
                    os.kill(pid, signal.SIGKILL)
        if reading in readable:
            os.read(reading, 4096)
            _report_exits(ranks, control)
        if control in readable:
            data, descriptors, _, _ = socket.recv_fds(control, 2**16, 4096)
            if not data:
                return  # when PID 1 of a pid namespace exits, the kernel kills all other processes in it
            request = json.loads(data)
            if "end" in request:
                kill_at[request["end"]] = time.monotonic() + request["grace_seconds"]
            else:
                for rank, descriptor in zip(request["ranks"], descriptors, strict=True):
                    pid = os.fork()
                    if pid == 0:
                        control.close()
                        for other in descriptors:
                            if other != descriptor:
                                os.close(other)
                        nic = topology.nic_of_rank[rank]
                        if nic:
                            join_nic(nic_pids[nic - 1])
                        _rank_main(interface(nic), rank, request, Connection(descriptor))
                    ranks[pid] = (request["run"], rank)
                for descriptor in descriptors:
                    os.close(descriptor)


def _fork_nic(control: socket.socket) -> int:
    """Fork a process that keeps the network namespace of an additional NIC alive; returns its pid."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        control.close()
        enter_nic()
        os.close(writing)
        signal.pause()
    os.close(writing)
    with os.fdopen(reading) as pipe:
        pipe.read()
    return pid


def _set_up_nic(topology: Topology, number: int, nic: int, pid: int) -> None:
    child = os.fork()
    if child == 0:
        try:
            join_nic(pid)
            _set_tcp(topology)
            nic_link_commands(topology, number, nic).run()
            os._exit(0)
        except OSError as error:
            os.write(2, f"NIC {nic} of host {number}: {error}\n".encode())
            os._exit(1)
    if os.waitpid(child, 0)[1]:
        raise OSError(f"cannot set up NIC {nic} of host {number}")


def _set_tcp(topology: Topology) -> None:
    for name, value in (*TCP_SETTINGS, ("tcp_wmem", f"4096 16384 {send_buffer_bytes(topology)}")):
        Path(f"/proc/sys/net/ipv4/{name}").write_text(value)


def _report_exits(ranks: dict[int, tuple[int, int]], control: socket.socket) -> None:
    """Report the exit code of each rank that has failed."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in ranks:
            run, rank = ranks.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code:
                with contextlib.suppress(OSError):
                    message = json.dumps({"run": run, "rank": rank, "exit_code": code})
                    control.send(message.encode(), socket.MSG_DONTWAIT)  # drop the report if the reader is gone


def _rank_main(interface_name: str, rank: int, request: dict[str, Any], pipe: Connection) -> None:
    import multiprocessing.util

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ["GLOO_SOCKET_IFNAME"] = interface_name
    message: tuple[str, Any, str]
    try:
        import torch
        import torch.distributed as dist

        from reshard.testing.processes import join_world

        torch.set_num_threads(1)
        function, args, environment = pickle.loads(pipe.recv_bytes())
        os.environ.update(environment)
        store = dist.PrefixStore(
            f"run{request['run']}", dist.TCPStore(CLUSTER_ADDRESS, request["port"], is_master=False)
        )
        join_world(store, rank, request["num_ranks"], timedelta(seconds=300))
        value = function(rank, lambda value: pipe.send(("report", value, "")), *args)
        message = ("result", value, "")
    except BaseException as error:
        message = ("error", error, traceback.format_exc())
    try:
        pipe.send(message)
    except Exception as error:  # the result or error does not pickle
        with contextlib.suppress(OSError):
            pipe.send(("error", None, f"{message[2]}{type(error).__name__}: {error}"))
    pipe.close()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # completes transfers and closes connections
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if message[0] == "result" else 1)
