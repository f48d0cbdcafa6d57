"""``torchrun ... -m reshard doctor``: find problems that would prevent the ranks of a job from resharding.

Every rank publishes its versions, interfaces and limits. The first rank of each host tries to connect to every other
host. Rank 0 prints the problems.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reshard.cli.machine_checks import MIN_OPEN_FILES, examine_installation
from reshard.cli.progress_bars import show_progress
from reshard.coordination import family_of, is_loopback, own_address, serve_store
from reshard.errors import ArgumentError, TransferTimeoutError
from reshard.formatting import describe_ranks, format_ranks
from reshard.timeouts import check_timeout

#: Time limit of each test connection.
DOCTOR_CONNECT_TIMEOUT_SECONDS = 3.0
#: Estimate of the open files that all groups of a process together need for each rank of the job.
FILES_PER_RANK = 16

#: The result of :func:`find_facts`, and the port on which the rank listens.
Facts = dict[str, Any]


def examine(timeout_seconds: float = 60.0) -> tuple[list[str], list[str]]:
    """Examine all ranks of a torchrun job. Every rank calls this.

    Returns:
        ``(lines, problems)``: a description of the hosts, and the problems. All ranks return the same.

    Raises:
        ArgumentError: torchrun did not start this process, or its environment variables are invalid.
        TransferTimeoutError: ranks or the store did not respond.
    """
    timeout_seconds = check_timeout(timeout_seconds)
    store, rank, size = _connect(timeout_seconds)
    with _listen(store) as listener:
        facts = find_facts(store)
        facts["port"] = listener.getsockname()[1]
        facts_by_rank = _all_gather(store, "facts", facts, rank, size, timeout_seconds)
        unreached = _find_unreachable(facts_by_rank, rank)
        unreached_by_rank = _all_gather(store, "unreached", unreached, rank, size, timeout_seconds)
    if rank:
        store.set(f"read/{rank}", "true")
    else:  # rank 0 may serve the store, so it leaves last
        _all_gather(store, "read", True, rank, size, timeout_seconds)
    return describe(facts_by_rank), find_problems(facts_by_rank, [one for row in unreached_by_rank for one in row])


def _connect(timeout_seconds: float) -> tuple[dist.Store, int, int]:
    """``(store, rank, number of ranks)`` of a torchrun job.

    This avoids the rendezvous of torch, which waits for all ranks and does not name missing ones.
    """
    absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise ArgumentError(
            f"{', '.join(absent)} not set: start the doctor with torchrun --nnodes ... -m reshard doctor"
        )
    numbers = {}
    for name, low in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 1)):
        text = os.environ[name]
        if not (text.isascii() and text.isdigit()) or int(text) < low:
            raise ArgumentError(f"{name} is {text!r}; it must be an integer of at least {low}")
        numbers[name] = int(text)
    rank, size, port = numbers["RANK"], numbers["WORLD_SIZE"], numbers["MASTER_PORT"]
    if rank >= size:
        raise ArgumentError(f"RANK is {rank}; it must be less than WORLD_SIZE, which is {size}")
    if port > 65535:
        raise ArgumentError(f"MASTER_PORT is {port}; it must be at most 65535")
    host = os.environ["MASTER_ADDR"]
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ArgumentError(f"MASTER_ADDR is {host!r}, which this host cannot resolve: {error}") from None
    store: dist.Store
    try:
        if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            store = serve_store(socket.create_server(address[:2], family=family, backlog=size + 8))
        else:
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))
    except OSError as error:
        raise ArgumentError(f"rank 0 cannot serve a store at {host} port {port}: {error}") from None
    except RuntimeError as error:
        raise TransferTimeoutError(
            f"rank {rank} found no store at {host} port {port} within {timeout_seconds:g} s: "
            f"{str(error).splitlines()[0]}"
        ) from None
    return dist.PrefixStore("reshard/doctor", store), rank, size


def find_facts(store: dist.Store) -> Facts:
    """The versions, number of GPUs, interfaces and limits of this rank."""
    versions = {"python": platform.python_version()}
    for package in ("reshard", "torch", "numpy"):
        versions[package] = importlib.metadata.version(package)
    if torch.cuda.is_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "host": socket.gethostname(),
        "versions": versions,
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        "address": own_address(store),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "installation": examine_installation()[1],
        "slow_start": _setting("net/ipv4/tcp_slow_start_after_idle") == "1",
    }


def _setting(name: str) -> str | None:
    """The value of a kernel setting, or None if the setting does not exist."""
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None


def _listen(store: dist.Store) -> socket.socket:
    address = own_address(store)
    return socket.create_server((address, 0), family=family_of(address), backlog=256)


def _all_gather(store: dist.Store, what: str, value: Any, rank: int, size: int, timeout_seconds: float) -> list[Any]:
    """Publish ``value`` under the key ``what``; return the values of all ranks, in rank order."""
    store.set(f"{what}/{rank}", json.dumps(value))
    deadline = time.monotonic() + timeout_seconds
    missing = set(range(size))
    with show_progress(size, "ranks", show=rank == 0) as advance:
        while missing:
            arrived = {item for item in missing if store.check([f"{what}/{item}"])}
            missing -= arrived
            advance(len(arrived))
            if missing and time.monotonic() >= deadline:
                raise TransferTimeoutError(
                    f"{describe_ranks(sorted(missing))} did not respond within {timeout_seconds:g} s"
                )
            time.sleep(0.05 if missing else 0.0)
    return [json.loads(store.get(f"{what}/{number}")) for number in range(size)]


def _first_ranks(facts_by_rank: Sequence[Facts]) -> dict[str, int]:
    """The first rank of each host."""
    first_rank: dict[str, int] = {}
    for rank, facts in enumerate(facts_by_rank):
        first_rank.setdefault(facts["host"], rank)
    return first_rank


def _find_unreachable(facts_by_rank: Sequence[Facts], rank: int) -> list[tuple[int, int, str]]:
    """``(rank, other rank, reason)`` for each host whose first rank this rank cannot connect to.

    Empty unless this is the first rank of its host.
    """
    firsts = _first_ranks(facts_by_rank)
    if rank not in firsts.values():
        return []
    failed = []
    for other in firsts.values():
        if other == rank:
            continue
        try:
            address = facts_by_rank[other]["address"], facts_by_rank[other]["port"]
            socket.create_connection(address, timeout=DOCTOR_CONNECT_TIMEOUT_SECONDS).close()
        except OSError as error:
            failed.append((rank, other, str(error)))
    return failed


def describe(facts_by_rank: Sequence[Facts]) -> list[str]:
    """One line for each host, then advice on kernel settings."""
    lines = []
    for host, first in _first_ranks(facts_by_rank).items():
        ranks = [rank for rank, facts in enumerate(facts_by_rank) if facts["host"] == host]
        facts = facts_by_rank[first]
        lines.append(
            f"{host}: ranks {format_ranks(ranks)} at {facts['address']}"
            f"{' on ' + facts['interface'] if facts['interface'] else ''}, {facts['gpus']} GPUs, "
            + ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        )
    slow = [host for host, first in _first_ranks(facts_by_rank).items() if facts_by_rank[first]["slow_start"]]
    if len(_first_ranks(facts_by_rank)) > 1 and slow:
        lines.append(
            f"advice for {', '.join(slow)}: net.ipv4.tcp_slow_start_after_idle is 1, so connections slow down after "
            "every pause, such as between training steps; set it to 0"
        )
    return lines


def find_problems(facts_by_rank: Sequence[Facts], unreached: Sequence[tuple[int, int, str]]) -> list[str]:
    """Problems that would prevent these ranks from resharding, each with a remedy.

    Args:
        facts_by_rank: the result of :func:`find_facts` on each rank.
        unreached: ``(rank, other rank, reason)`` for each failed connection.
    """
    ranks_by_problem: dict[str, list[int]] = {}
    hosts = _first_ranks(facts_by_rank)
    needed_files = max(MIN_OPEN_FILES, FILES_PER_RANK * len(facts_by_rank))
    for rank, facts in enumerate(facts_by_rank):
        problems_of_rank: list[str] = [*facts["installation"]]
        for name in filter(None, facts["interface"].split(",")):
            if name not in facts["interfaces"]:
                problems_of_rank.append(
                    f"GLOO_SOCKET_IFNAME names {name!r}, but the host has {', '.join(facts['interfaces'])}"
                )
        if len(hosts) > 1 and is_loopback(facts["address"]):
            problems_of_rank.append(
                f"the address of the host is {facts['address']}, which other hosts cannot reach; set "
                "GLOO_SOCKET_IFNAME to an interface that all hosts can reach"
            )
        if facts["files"] < needed_files:
            problems_of_rank.append(
                f"the limit of open files is {facts['files']}, and a job of this size needs about {needed_files}; "
                "raise it with ulimit -n"
            )
        for problem in problems_of_rank:
            ranks_by_problem.setdefault(problem, []).append(rank)
    problems = []
    for problem, ranks in ranks_by_problem.items():
        names = dict.fromkeys(facts_by_rank[rank]["host"] for rank in ranks)
        problems.append(f"{describe_ranks(ranks)} ({', '.join(names)}): {problem}")
    for source, target, why in unreached:
        there = facts_by_rank[target]
        problems.append(
            f"rank {source} ({facts_by_rank[source]['host']}) cannot reach {there['host']} at {there['address']}: "
            f"{why}; allow connections between the hosts on any port"
        )
    problems += _differences([facts["versions"] for facts in facts_by_rank])
    if len({facts["gpus"] > 0 for facts in facts_by_rank}) > 1:
        without = [rank for rank, facts in enumerate(facts_by_rank) if not facts["gpus"]]
        problems.append(
            f"ranks {format_ranks(without)} have no GPU, but the others have: run `reshard doctor` without torchrun on "
            f"{', '.join(sorted({facts_by_rank[rank]['host'] for rank in without}))}"
        )
    return problems


def _differences(versions: Sequence[Mapping[str, str]]) -> list[str]:
    """A problem for each package whose version differs between ranks. ``versions``: of each rank, by package."""
    lines = []
    for name in sorted({name for item in versions for name in item}):
        by_version: dict[str, list[int]] = {}
        for rank, item in enumerate(versions):
            if name in item:
                by_version.setdefault(item[name], []).append(rank)
        if len(by_version) > 1:
            listed = "; ".join(f"ranks {format_ranks(ranks)} {version}" for version, ranks in by_version.items())
            lines.append(f"{name} has different versions: {listed}; install the same one everywhere")
    return lines
