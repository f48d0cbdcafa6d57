"""What is missing before ranks can reshard: ``torchrun ... -m reshard doctor``.

Every rank says what it has, and one rank of each host tries to reach every other host. Rank 0 prints what it found.
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

from reshard.coordination.addresses import own_address
from reshard.coordination.process_group import serve_store
from reshard.errors import ArgumentError, TransferTimeoutError
from reshard.formatting import format_ranks, say_ranks
from reshard.timeouts import check_timeout

CONNECT_SECONDS = 3.0
#: What a process opens for each rank that it is connected to, over all groups.
FILES_PER_RANK = 16

Facts = dict[str, Any]


def examine(timeout_seconds: float = 60.0) -> tuple[list[str], list[str]]:
    """Ask all ranks of a torchrun job; every rank calls.

    Returns:
        ``(lines, problems)`` for people: what there is, and what is wrong; alike on all ranks.

    Raises:
        ArgumentError: this process was not started by torchrun. TransferTimeoutError: ranks are missing.
    """
    timeout_seconds = check_timeout(timeout_seconds)
    store, rank, size = _meet(timeout_seconds)
    with _listen(store) as listener:
        facts = find_facts(store)
        facts["port"] = listener.getsockname()[1]
        everyone = _share(store, "facts", facts, rank, size, timeout_seconds)
        reached = _reach(everyone, rank)
        found = _share(store, "reached", reached, rank, size, timeout_seconds)
    if rank:
        store.set(f"read/{rank}", "true")
    else:  # whose process may keep the store
        _share(store, "read", True, rank, size, timeout_seconds)
    return describe(everyone), find_problems(everyone, [one for row in found for one in row])


def _meet(timeout_seconds: float) -> tuple[dist.Store, int, int]:
    """The store of a torchrun job, this rank and how many there are.

    Not by torch's rendezvous, which waits for all ranks and does not say for whom.
    """
    absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise ArgumentError(f"{', '.join(absent)} not set: start it as torchrun --nnodes ... -m reshard doctor")
    numbers = {}
    for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 1)):
        text = os.environ[name]
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise ArgumentError(f"{name} is {text!r}; it must be a whole number from {least} on")
        numbers[name] = int(text)
    rank, size, port = numbers["RANK"], numbers["WORLD_SIZE"], numbers["MASTER_PORT"]
    if rank >= size or port > 65535:
        raise ArgumentError(f"RANK is {rank} of a WORLD_SIZE of {size}, MASTER_PORT {port}; that cannot be")
    host = os.environ["MASTER_ADDR"]
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ArgumentError(f"MASTER_ADDR is {host!r}, which this host cannot look up: {error}") from None
    store: dist.Store
    try:
        if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            store = serve_store(socket.create_server(place[:2], family=family, backlog=size + 8))
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
    """What this rank has."""
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
        "slow_start": _setting("net/ipv4/tcp_slow_start_after_idle") == "1",
    }


def _setting(name: str) -> str | None:
    """A setting of the kernel; None where there is none."""
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None


def _listen(store: dist.Store) -> socket.socket:
    return socket.create_server((own_address(store), 0), backlog=256)


def _share(store: dist.Store, what: str, value: Any, rank: int, size: int, timeout_seconds: float) -> list[Any]:
    """What each rank says, in rank order."""
    store.set(f"{what}/{rank}", json.dumps(value))
    deadline = time.monotonic() + timeout_seconds
    missing = set(range(size))
    while missing:
        missing -= {one for one in missing if store.check([f"{what}/{one}"])}
        if missing and time.monotonic() >= deadline:
            raise TransferTimeoutError(f"{say_ranks(sorted(missing))} did not say anything in {timeout_seconds:g} s")
        time.sleep(0.05 if missing else 0.0)
    return [json.loads(store.get(f"{what}/{one}")) for one in range(size)]


def _first_ranks(everyone: Sequence[Facts]) -> dict[str, int]:
    """The first rank of each host."""
    found: dict[str, int] = {}
    for rank, facts in enumerate(everyone):
        found.setdefault(facts["host"], rank)
    return found


def _reach(everyone: Sequence[Facts], rank: int) -> list[tuple[int, int, str]]:
    """As the first rank of a host: ``(from, to, why not)`` of each other host's first rank that cannot be reached."""
    firsts = _first_ranks(everyone)
    if rank not in firsts.values():
        return []
    failed = []
    for other in firsts.values():
        if other == rank:
            continue
        try:
            place = everyone[other]["address"], everyone[other]["port"]
            socket.create_connection(place, timeout=CONNECT_SECONDS).close()
        except OSError as error:
            failed.append((rank, other, str(error)))
    return failed


def describe(everyone: Sequence[Facts]) -> list[str]:
    """A line for each host, and advice."""
    lines = []
    for host, first in _first_ranks(everyone).items():
        ranks = [rank for rank, facts in enumerate(everyone) if facts["host"] == host]
        facts = everyone[first]
        lines.append(
            f"{host}: ranks {format_ranks(ranks)} at {facts['address']}"
            f"{' on ' + facts['interface'] if facts['interface'] else ''}, {facts['gpus']} GPUs, "
            + ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        )
    slow = [host for host, first in _first_ranks(everyone).items() if everyone[first]["slow_start"]]
    if len(_first_ranks(everyone)) > 1 and slow:
        lines.append(
            f"advice for {', '.join(slow)}: net.ipv4.tcp_slow_start_after_idle is 1, so connections start slowly again "
            "behind every pause, as between training steps; with 0 they do not"
        )
    return lines


def find_problems(everyone: Sequence[Facts], unreached: Sequence[tuple[int, int, str]]) -> list[str]:
    """What would keep these ranks from resharding, each with what to do."""
    problems = []
    hosts = _first_ranks(everyone)
    for rank, facts in enumerate(everyone):
        for name in filter(None, facts["interface"].split(",")):
            if name not in facts["interfaces"]:
                problems.append(
                    f"rank {rank}: GLOO_SOCKET_IFNAME names {name!r}, but {facts['host']} has "
                    f"{', '.join(facts['interfaces'])}"
                )
        if len(hosts) > 1 and facts["address"].startswith("127."):
            problems.append(
                f"rank {rank}: {facts['host']} would be reached at {facts['address']}, which is itself; set "
                "GLOO_SOCKET_IFNAME to an interface that all hosts reach"
            )
        if facts["files"] < FILES_PER_RANK * len(everyone):
            problems.append(
                f"rank {rank}: may open {facts['files']} files, {len(everyone)} ranks need about "
                f"{FILES_PER_RANK * len(everyone)}; raise it with ulimit -n"
            )
    for source, target, why in unreached:
        there = everyone[target]
        problems.append(
            f"rank {source} ({everyone[source]['host']}) cannot reach {there['host']} at {there['address']}: {why}; "
            "hosts must let each other's processes connect on any port"
        )
    problems += _differences([facts["versions"] for facts in everyone])
    if len({facts["gpus"] > 0 for facts in everyone}) > 1:
        without = [rank for rank, facts in enumerate(everyone) if not facts["gpus"]]
        problems.append(f"ranks {format_ranks(without)} see no GPU, the others do")
    return problems


def _differences(versions: Sequence[Mapping[str, str]]) -> list[str]:
    found = []
    for name in sorted({name for one in versions for name in one}):
        by_version: dict[str, list[int]] = {}
        for rank, one in enumerate(versions):
            if name in one:
                by_version.setdefault(one[name], []).append(rank)
        if len(by_version) > 1:
            said = "; ".join(f"ranks {format_ranks(ranks)} {version}" for version, ranks in by_version.items())
            found.append(f"{name} is not of one version: {said}")
    return found


def run_doctor(timeout_seconds: float = 60.0) -> int:
    """Print what was found, on rank 0; 1 if something is wrong."""
    lines, problems = examine(timeout_seconds)
    if os.environ["RANK"] == "0":
        for line in lines:
            print(line)
        for problem in problems:
            print(f"PROBLEM {problem}")
        if not problems:
            print("nothing is missing")
    return 1 if problems else 0
