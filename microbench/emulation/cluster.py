"""Several hosts on one Linux machine: namespaces joined by shaped links, several forked processes on each.

::

    this process                    Cluster
    └─ cluster process              its own net and mount namespaces: bridges, uplinks, the store, byte counters
       └─ one keeper per host        new net, pid, ipc, uts and mount namespaces
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
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from microbench.emulation.links import port_name
from microbench.emulation.namespaces import why_unsupported
from microbench.emulation.processes import SET_UP_SECONDS, run_and_exit, run_cluster
from reshard.testing.processes import GRACE_SECONDS, collect_results
from reshard.topology.model import Topology

#: How long ranks that have returned their result may take to end.
ORDERLY_SECONDS = 2.0


MAX_CLUSTER_HOSTS = 250
#: Bytes per second that a link can be shaped to.
MIN_RATE, MAX_RATE = 1e3, 1e11


class ClusterError(RuntimeError):
    """The emulated cluster cannot be made, or is gone; says why and what to do."""


#: Clusters of this process.
_open: weakref.WeakSet[Cluster] = weakref.WeakSet()


def _why_too_much(topology: Topology) -> str | None:
    if topology.num_hosts > MAX_CLUSTER_HOSTS:
        return f"an emulated cluster has at most {MAX_CLUSTER_HOSTS} hosts, not {topology.num_hosts}"
    ports = [*topology.pods, *(nic for host in topology.hosts for nic in host.nics)]
    rates = [rate for port in ports for rate in (port.egress_bytes_per_second, port.ingress_bytes_per_second)]
    if min(rates) < MIN_RATE or max(rates) > MAX_RATE:
        return f"rates of emulated links are {MIN_RATE:g} to {MAX_RATE:g} bytes per second"
    return None


class Cluster:
    """Emulated hosts as a topology describes them; use it as a context manager.

    Args:
        topology: ranks, hosts, NICs and pods; rates are those of the links, of which 95.6 % carries payload.

    The hosts end with the thread that made them, as they do with its process.

    Raises:
        ClusterError: this machine cannot make it.
    """

    _control: socket.socket
    _hosts: list[socket.socket]

    def __init__(self, topology: Topology) -> None:
        reason = why_unsupported() or _why_too_much(topology)
        if reason is not None:
            raise ClusterError(reason)
        self.topology = topology
        self._runs = 0
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(topology.num_hosts + 1)]
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            for other in _open:  # else an end of another cluster would stay open here, and it would not see its end
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
        try:
            work = pickle.dumps((function, args, environment or {}))
        except Exception as error:
            raise ClusterError(
                f"ranks get {function!r} and its arguments pickled, so it must be importable by name: {error}"
            ) from None
        if not self._pid:
            raise ClusterError("this cluster is closed")
        self._runs += 1
        for host in self._hosts:  # what was told of earlier runs
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
                raise ClusterError(f"host {number} of the emulated cluster is gone: {error}") from None
        for rank, (ours, theirs) in enumerate(ends):
            theirs.close()
            pipes[rank] = Connection(ours.detach())
            with contextlib.suppress(OSError):
                pipes[rank].send_bytes(work)
        patience = 0.0
        try:
            results = collect_results(pipes, timeout_seconds, grace_seconds, self._how_it_ended, on_report)
            patience = ORDERLY_SECONDS  # ranks say goodbye to each other on their way out
            return results
        finally:
            for pipe in pipes.values():
                pipe.close()
            for host in self._hosts:
                with contextlib.suppress(OSError):
                    host.send(json.dumps({"end": self._runs, "patience": patience}).encode())

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

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
