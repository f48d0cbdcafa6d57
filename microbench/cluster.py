"""Several hosts on one Linux machine: namespaces joined by shaped links, several forked processes on each.

::

    this process                    Cluster
    └─ cluster process              its own net and mount namespaces: bridges, uplinks, the store, byte counters
       └─ one agent per host        new net, pid, ipc, uts and mount namespaces
          └─ the host's first process    names, addresses, shaping; forks the ranks and tells how they ended
             └─ ranks

Nothing has a name outside: when the processes end, for whatever reason, the kernel takes everything down. Ranks are
forked from what this process has imported, so torch is loaded once. Between two runs only the first processes live.
"""

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
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from microbench.namespaces import (
    die_with_parent,
    enter_cluster,
    enter_host,
    enter_nic,
    join_nic,
    name_hosts,
    set_up_host,
    why_unsupported,
)
from microbench.wiring import CLUSTER_ADDRESS, cluster_wires, etc_hosts, host_wires, interface, nic_wires, port_name
from reshard.launch import GRACE_SECONDS, LaunchError, RankFailure
from reshard.topology import Topology

SET_UP_SECONDS = 20.0


class ClusterError(RuntimeError):
    """The emulated cluster cannot be made, or is gone; says why and what to do."""


class Cluster:
    """Emulated hosts as a topology describes them; use it as a context manager.

    Args:
        topology: ranks, hosts, NICs and pods; rates are those of the links, of which 95.6 % carries payload.

    Raises:
        ClusterError: this machine cannot make it.
    """

    def __init__(self, topology: Topology) -> None:
        reason = why_unsupported()
        if reason is not None:
            raise ClusterError(reason)
        self.topology = topology
        self._runs = 0
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(topology.num_hosts + 1)]
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            for ours, _ in pairs:
                ours.close()
            _run_and_exit(lambda: _cluster_main(topology, [theirs for _, theirs in pairs]), pairs[0][1])
        for _, theirs in pairs:
            theirs.close()
        self._control = pairs[0][0]
        self._hosts = [ours for ours, _ in pairs[1:]]
        self._port = int(self._expect(self._control)["port"])
        for host in self._hosts:
            self._expect(host)

    def _expect(self, control: socket.socket) -> dict[str, Any]:
        control.settimeout(SET_UP_SECONDS)
        try:
            said: dict[str, Any] = json.loads(control.recv(2**16) or b"{}")
        except OSError as error:
            said = {"error": str(error)}
        if not said or "error" in said:
            self.close()
            raise ClusterError(f"cannot set up the emulated cluster: {said.get('error', 'its process ended')}")
        return said

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_seconds: float = 120.0,
        grace_seconds: float = GRACE_SECONDS,
        on_report: Callable[[int, Any], None] | None = None,
        environment: dict[str, str] | None = None,
    ) -> list[Any]:
        """Run ``function(rank, report, *args)`` on every rank, the world group (Gloo) up, and return the results.

        Args:
            function: what each rank does, importable by name; what it returns or passes to ``report`` must pickle.
            timeout_seconds: all ranks are ended after this long. grace_seconds: the others, once one has failed.
            on_report: called as ``on_report(rank, value)`` for each ``report(value)`` of a rank.
            environment: variables for the ranks.

        Raises:
            LaunchError: a rank raised, ended without a word, or did not end in time.
        """
        self._runs += 1
        num_ranks = len(self.topology.host_of_rank)
        pipes: dict[int, Connection] = {}
        ends = [socket.socketpair() for _ in range(num_ranks)]
        for number, host in enumerate(self._hosts):
            ranks = self.topology.ranks_of_host(number)
            request = {"run": self._runs, "ranks": ranks, "num_ranks": num_ranks, "port": self._port}
            socket.send_fds(host, [json.dumps(request).encode()], [ends[rank][1].fileno() for rank in ranks])
        work = pickle.dumps((function, args, environment or {}))
        for rank, (ours, theirs) in enumerate(ends):
            theirs.close()
            pipes[rank] = Connection(ours.detach())
            with contextlib.suppress(OSError):
                pipes[rank].send_bytes(work)
        try:
            return self._collect(pipes, timeout_seconds, grace_seconds, on_report)
        finally:
            for pipe in pipes.values():
                pipe.close()
            for host in self._hosts:
                with contextlib.suppress(OSError):
                    host.send(json.dumps({"end": self._runs}).encode())

    def _collect(
        self,
        pipes: dict[int, Connection],
        timeout_seconds: float,
        grace_seconds: float,
        on_report: Callable[[int, Any], None] | None,
    ) -> list[Any]:
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
                    kind, value, text = "error", None, f"ended with {self._how_it_ended(rank)}"
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
        return [results[rank] for rank in range(len(pipes))]

    def _how_it_ended(self, rank: int) -> str:
        """What the host's first process says of a rank that ended without a word."""
        host = self._hosts[self.topology.host_of_rank[rank]]
        deadline = time.monotonic() + 1.0
        while (left := deadline - time.monotonic()) > 0:
            host.settimeout(left)
            try:
                said = json.loads(host.recv(2**16) or b"{}")
            except (OSError, ValueError):
                break
            if said.get("rank") == rank and said.get("run") == self._runs:
                return f"exit code {said['exit_code']}"
            if not said:
                return "its host"
        return "an exit code that its host did not tell"

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank of the run under way."""
        host = self._hosts[self.topology.host_of_rank[rank]]
        host.send(json.dumps({"signal": number, "rank": rank}).encode())

    def crossed_bytes(self) -> list[list[tuple[int, int]]]:
        """For each host and NIC the bytes that ``(left, entered)`` it so far, headers included."""
        self._control.send(json.dumps({"count": True}).encode())
        counts = self._expect(self._control)["counts"]
        return [
            [tuple(counts[port_name(host, nic)]) for nic in range(len(self.topology.host(host).nics))]
            for host in range(self.topology.num_hosts)
        ]

    def close(self) -> None:
        """Take everything down."""
        for control in (self._control, *getattr(self, "_hosts", [])):
            control.close()
        if self._pid:
            deadline = time.monotonic() + 5.0
            while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
                    break
                time.sleep(0.005)
            self._pid = 0

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_and_exit(main: Callable[[], None], control: socket.socket) -> None:
    """The rest of a forked process: ``main``, then the end without the parent's clean-up."""
    try:
        main()
        os._exit(0)
    except BaseException as error:
        with contextlib.suppress(OSError):
            control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)


# The cluster process


def _cluster_main(topology: Topology, controls: list[socket.socket]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process, whose end ends the others
    control, hosts = controls[0], controls[1:]
    enter_cluster()
    die_with_parent()
    name_hosts(etc_hosts(topology))
    pids = []
    for number, host in enumerate(hosts):
        pid = os.fork()
        if pid == 0:
            for other in controls:
                if other is not host:
                    other.close()
            _run_and_exit(lambda number=number, host=host: _agent_main(topology, number, host), host)  # type: ignore[misc]
        pids.append(pid)
    for pid in pids:
        _await_namespace(pid)
    cluster_wires(topology, pids).make()
    store_port = _fork_store(controls)
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)  # the links are there
    for host in hosts:
        host.close()
    control.send(json.dumps({"port": store_port}).encode())
    while control.recv(2**16):
        control.send(json.dumps({"counts": _count_bytes()}).encode())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _await_namespace(pid: int) -> None:
    """Wait until an agent has a network namespace of its own."""
    ours = os.readlink("/proc/self/ns/net")
    deadline = time.monotonic() + SET_UP_SECONDS
    while os.readlink(f"/proc/{pid}/ns/net") == ours:
        if time.monotonic() > deadline:
            raise OSError("a host did not enter its namespaces in time")
        time.sleep(0.001)


def _count_bytes() -> dict[str, tuple[int, int]]:
    """Of each far end of a NIC, the bytes that came from its host and went to it."""
    counts = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        counts[name.strip()] = (int(fields[0]), int(fields[8]))
    return counts


def _fork_store(controls: list[socket.socket]) -> int:
    """Serve the store in a process of its own: it has threads, and this process forks."""
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


def _agent_main(topology: Topology, number: int, control: socket.socket) -> None:
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    enter_host()
    signal.sigwait([signal.SIGUSR1])
    first = os.fork()
    if first == 0:
        _run_and_exit(lambda: _host_main(topology, number, control), control)
    control.close()
    os.waitpid(first, 0)


def _host_main(topology: Topology, number: int, control: socket.socket) -> None:
    die_with_parent()
    set_up_host(f"host{number}")
    _set_tcp()
    nic_pids = [_fork_nic(control) for _ in topology.host(number).nics[1:]]
    host_wires(topology, number, nic_pids).make()
    for nic, pid in enumerate(nic_pids, start=1):
        _make_nic_wires(topology, number, nic, pid)
    ranks: dict[int, tuple[int, int]] = {}  # pid -> run, rank
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    control.send(b'{"ready": true}')
    while True:
        readable, _, _ = select.select([control, reading], [], [])
        if reading in readable:
            os.read(reading, 4096)
            _tell_ends(ranks, control)
        if control in readable:
            data, descriptors, _, _ = socket.recv_fds(control, 2**16, 4096)
            if not data:
                return  # and with the first process of a pid namespace the kernel ends all others in it
            request = json.loads(data)
            if "signal" in request:
                for pid, (_, rank) in ranks.items():
                    if rank == request["rank"]:
                        os.kill(pid, request["signal"])
            elif "end" in request:
                for pid, (run, _) in ranks.items():
                    if run == request["end"]:
                        os.kill(pid, signal.SIGKILL)
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
    """A process that holds the network namespace of one more NIC of the host."""
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


def _make_nic_wires(topology: Topology, number: int, nic: int, pid: int) -> None:
    child = os.fork()
    if child == 0:
        try:
            join_nic(pid)
            _set_tcp()
            nic_wires(topology, number, nic).make()
            os._exit(0)
        except OSError as error:
            os.write(2, f"NIC {nic} of host {number}: {error}\n".encode())
            os._exit(1)
    if os.waitpid(child, 0)[1]:
        raise OSError(f"NIC {nic} of host {number} could not be set up")


def _set_tcp() -> None:
    for name, value in (("tcp_congestion_control", "reno"), ("tcp_no_metrics_save", "1")):
        Path(f"/proc/sys/net/ipv4/{name}").write_text(value)


def _tell_ends(ranks: dict[int, tuple[int, int]], control: socket.socket) -> None:
    """Say which ranks have ended, and how."""
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
                    control.send(json.dumps({"run": run, "rank": rank, "exit_code": code}).encode())


def _rank_main(interface_name: str, rank: int, request: dict[str, Any], pipe: Connection) -> None:
    import multiprocessing.util

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ["GLOO_SOCKET_IFNAME"] = interface_name
    message: tuple[str, Any, str]
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        function, args, environment = pickle.loads(pipe.recv_bytes())
        os.environ.update(environment)
        store = dist.PrefixStore(
            f"run{request['run']}", dist.TCPStore(CLUSTER_ADDRESS, request["port"], is_master=False)
        )
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=request["num_ranks"], timeout=timedelta(seconds=300)
        )
        value = function(rank, lambda value: pipe.send(("report", value, "")), *args)
        message = ("result", value, "")
    except BaseException as error:
        message = ("error", error, traceback.format_exc())
    try:
        pipe.send(message)
    except Exception as error:  # a result or an error that does not pickle
        with contextlib.suppress(OSError):
            pipe.send(("error", None, f"{message[2]}{type(error).__name__}: {error}"))
    pipe.close()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # transfers end, connections say goodbye
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if message[0] == "result" else 1)
