"""Emulate several hosts on one Linux machine: namespaces connected by rate-limited links, one process per rank.

::

    this process                    Cluster
    └─ cluster process              own net and mount namespaces: bridges, uplinks, the store, byte counters
       └─ one keeper per host       creates the host's net, pid, ipc, uts and mount namespaces
          └─ the host's init        PID 1 of the host: addresses, shaping; forks the ranks and reports their exit
             └─ ranks

Nothing is visible outside these processes. When they end, even by a kill, the kernel removes all namespaces and links.
Ranks are forked, so torch is imported only once. Between two runs no rank process exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from microbench.emulation.cluster_processes import SET_UP_SECONDS, run_and_exit, run_cluster
from microbench.emulation.link_commands import port_name
from microbench.emulation.namespaces import why_unsupported
from reshard.errors import ReshardError
from reshard.testing.processes import PROCESS_GRACE_SECONDS, collect_results
from reshard.topology import Topology

#: Time for ranks to exit after all of them returned a result.
EXIT_GRACE_SECONDS = 2.0


MAX_CLUSTER_HOSTS = 250
#: Bytes per second of an emulated link.
MIN_RATE, MAX_RATE = 1e3, 1e11


class ClusterError(ReshardError, RuntimeError):
    """The emulated cluster cannot be created, or is closed or gone."""


#: Open clusters of this process.
_open: weakref.WeakSet[EmulatedCluster] = weakref.WeakSet()


def _limit_violation(topology: Topology) -> str | None:
    if topology.num_hosts > MAX_CLUSTER_HOSTS:
        return f"the topology has {topology.num_hosts} hosts, an emulated cluster at most {MAX_CLUSTER_HOSTS} hosts"
    links = [*topology.pods, *(nic for host in topology.hosts for nic in host.nics)]
    rates = [rate for link in links for rate in (link.egress_bytes_per_second, link.ingress_bytes_per_second)]
    if min(rates) < MIN_RATE or max(rates) > MAX_RATE:
        return (
            f"rates of emulated links must be {MIN_RATE:g} to {MAX_RATE:g} bytes per second, "
            f"but the topology has {min(rates):g} to {max(rates):g}"
        )
    return None


class EmulatedCluster:
    """Emulated hosts as described by a topology; use it as a context manager.

    The hosts end with the thread or process that created them.

    Args:
        topology: ranks, hosts, NICs and pods. Rates include headers: 95.6 % of a rate is TCP payload.

    Raises:
        ClusterError: this machine cannot emulate the topology.
    """

    _control: socket.socket
    _hosts: list[socket.socket]

    def __init__(self, topology: Topology) -> None:
        reason = why_unsupported() or _limit_violation(topology)
        if reason is not None:
            raise ClusterError(reason)
        self.topology = topology
        self._runs = 0
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(topology.num_hosts + 1)]
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            for other in _open:  # an inherited copy would keep the other cluster's connection open after its close()
                for control in (other._control, *other._hosts):
                    control.close()
            for ours, _ in pairs:
                ours.close()
            run_and_exit(lambda: run_cluster(topology, [theirs for _, theirs in pairs]), pairs[0][1])
        for _, theirs in pairs:
            theirs.close()
        self._control = pairs[0][0]
        self._hosts = [ours for ours, _ in pairs[1:]]
        self._port = int(self._expect(self._control)["port"])
        for host in self._hosts:
            self._expect(host)
        _open.add(self)

    def _expect(self, control: socket.socket) -> dict[str, Any]:
        control.settimeout(SET_UP_SECONDS)
        try:
            message: dict[str, Any] = json.loads(control.recv(2**16) or b"{}")
        except OSError as error:
            message = {"error": str(error)}
        if not message or "error" in message:
            self.close()
            raise ClusterError(f"cannot set up the emulated cluster: {message.get('error', 'its process ended')}")
        return message

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_seconds: float = 120.0,
        grace_seconds: float = PROCESS_GRACE_SECONDS,
        on_report: Callable[[int, Any], None] | None = None,
        environment: dict[str, str] | None = None,
    ) -> list[Any]:
        """Run ``function(rank, report, *args)`` on every rank and return the results in rank order.

        The Gloo world group is initialized before the call.

        Args:
            function: importable by name. Its results and the arguments of ``report`` must pickle.
            timeout_seconds: all ranks are killed after this time.
            grace_seconds: time until the other ranks are killed after one rank failed.
            on_report: called as ``on_report(rank, value)`` for each ``report(value)`` of a rank.
            environment: variables for the ranks.

        Raises:
            ClusterError: ``function`` or an argument does not pickle, or the cluster is closed or gone.
            LaunchError: a rank raised, exited without a result, or did not end in time.
        """
        try:
            work = pickle.dumps((function, args, environment or {}))
        except Exception as error:
            raise ClusterError(
                f"cannot pickle {function!r} and its arguments; the function must be importable by name: {error}"
            ) from None
        if not self._pid:
            raise ClusterError("this cluster is closed; create a new one")
        self._runs += 1
        for host in self._hosts:  # drop exit reports of earlier runs
            host.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while host.recv(2**16):
                    pass
            host.setblocking(True)
        num_ranks = len(self.topology.host_of_rank)
        pipes: dict[int, Connection] = {}
        ends = [socket.socketpair() for _ in range(num_ranks)]
        for number, host in enumerate(self._hosts):
            ranks = self.topology.ranks_of_host(number)
            request = {"run": self._runs, "ranks": ranks, "num_ranks": num_ranks, "port": self._port}
            try:
                socket.send_fds(host, [json.dumps(request).encode()], [ends[rank][1].fileno() for rank in ranks])
            except OSError as error:
                raise ClusterError(
                    f"host {number} of the emulated cluster ended; create a new cluster: {error}"
                ) from None
        for rank, (ours, theirs) in enumerate(ends):
            theirs.close()
            pipes[rank] = Connection(ours.detach())
            with contextlib.suppress(OSError):
                pipes[rank].send_bytes(work)
        exit_grace = 0.0
        try:
            results = collect_results(pipes, timeout_seconds, grace_seconds, self._describe_exit, on_report)
            exit_grace = EXIT_GRACE_SECONDS  # ranks close their connections to each other before they exit
            return results
        finally:
            for pipe in pipes.values():
                pipe.close()
            for host in self._hosts:
                with contextlib.suppress(OSError):
                    host.send(json.dumps({"end": self._runs, "grace_seconds": exit_grace}).encode())

    def _describe_exit(self, rank: int) -> str:
        """The exit code of a rank that ended without a result, as reported by its host."""
        host = self._hosts[self.topology.host_of_rank[rank]]
        deadline = time.monotonic() + 1.0
        while (left := deadline - time.monotonic()) > 0:
            host.settimeout(left)
            try:
                message = json.loads(host.recv(2**16) or b"{}")
            except (OSError, ValueError):
                break
            if message.get("rank") == rank and message.get("run") == self._runs:
                return f"exit code {message['exit_code']}"
            if not message:
                return "its host"
        return "an unknown exit code"

    def crossed_bytes(self) -> list[list[tuple[int, int]]]:
        """Bytes ``(sent, received)`` so far by each NIC of each host, headers included."""
        self._control.send(json.dumps({"count": True}).encode())
        counts = self._expect(self._control)["counts"]
        return [
            [tuple(counts[port_name(host, nic)]) for nic in range(len(self.topology.host(host).nics))]
            for host in range(self.topology.num_hosts)
        ]

    def close(self) -> None:
        """End all processes of the cluster, and with them its namespaces and links."""
        _open.discard(self)
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

    def __enter__(self) -> EmulatedCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
