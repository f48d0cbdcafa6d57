"""A Ray cluster on emulated hosts: one node per host, and a driver on the first host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.emulation.link_commands import address
from microbench.emulation.namespaces import mount_private
from reshard.topology import topology_from_json

PORT = 6379
OBJECT_STORE_BYTES = 2**29
START_SECONDS = 180.0
#: Disable authentication: with a token of another cluster in the user's files, only some nodes would require it.
NO_TOKENS = {"RAY_AUTH_MODE": "disabled"}

#: ``drive(function, *args)`` runs ``function(*args)`` in a driver on the first host and returns its result.
Drive = Callable[..., Any]


@contextlib.contextmanager
def ray_cluster(num_hosts: int, rate: str = "1 Gbit/s", num_cpus: int = 1) -> Iterator[Drive]:
    """Run a Ray cluster of emulated hosts in a ``with`` block.

    Args:
        rate: rate of each host's NIC.
        num_cpus: CPUs that each node offers to actors.

    Raises:
        ClusterError: this machine cannot emulate hosts. LaunchError: a node did not start.
    """
    topology = topology_from_json({"hosts": [{"count": num_hosts, "devices": 1, "nics": [rate]}]})
    with EmulatedCluster(topology) as cluster:
        cluster.run(_start_node, num_cpus, timeout_seconds=START_SECONDS)

        def drive(function: Callable[..., Any], *args: Any, timeout_seconds: float = 600.0) -> Any:
            return cluster.run(_drive, function, args, timeout_seconds=timeout_seconds)[0]

        yield drive


def _start_node(rank: int, report: Callable[[Any], None], num_cpus: int) -> None:
    """Start this host's node; the first host is the head. Ray's daemons end with the host."""
    mount_private("/tmp/ray")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
    command += ["--node-ip-address", address(rank, 0), "--num-cpus", str(num_cpus)]
    command += ["--object-store-memory", str(OBJECT_STORE_BYTES)]
    head = ["--head", "--port", str(PORT), "--include-dashboard=false"]
    command += ["--address", f"{address(0, 0)}:{PORT}"] if rank else head
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"} | NO_TOKENS
    if rank:
        dist.barrier()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not rank:
        dist.barrier()
    if done.returncode:
        raise RuntimeError(f"ray start on host {rank}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def _drive(rank: int, report: Callable[[Any], None], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if rank:
        return None
    os.environ.update(NO_TOKENS)
    import ray

    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}  # actors import from the same path
    ray.init(address=f"{address(0, 0)}:{PORT}", log_to_driver=False, runtime_env=paths, _node_ip_address=address(0, 0))
    try:
        return function(*args)
    finally:
        ray.shutdown()
