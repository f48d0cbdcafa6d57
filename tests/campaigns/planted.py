"""One run of the fault campaign: a random reshard, the injected fault, and the outcome of each rank."""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import reshard
import reshard.api.preparation.prepare
from reshard import Layout, Mesh, Topology
from reshard.cli.demo_transfers import count_unlike, shard_of_positions
from reshard.coordination.groups.process_group import serve_store
from reshard.coordination.groups.store import LOST_STORE_SECONDS
from reshard.planner import AUTO, STRATEGIES
from reshard.runtime.array_bytes import flat_bytes
from reshard.runtime.cpu.program_executor import NOTIFY_TAG
from reshard.runtime.transport import SHARED_MEMORY_VARIABLE, GlooTransport, SharedMemory
from reshard.topology.topology import Host, Link

TIMEOUT_SECONDS = 2.0
#: Time limits of the survivors: DEATH_SECONDS from the death of a rank to the error, SILENCE_SECONDS from the timeout
#: to the error.
DEATH_SECONDS, SILENCE_SECONDS = 5.0, 2.0
#: Default time added to each limit, for a loaded machine.
SLACK_SECONDS = 2.0
MAX_ELEMENTS = 2_000_000
CHOICES = (AUTO, *STRATEGIES)
DTYPES = ("float32", "bfloat16", "int64", "bool", "complex64")

#: Required outcome of the survivors, by fault:
#:
#: * "right": correct shards.
#: * "an error": any error of the package.
#: * "a timeout": a TransferTimeoutError.
#: * "the same error": an error with equal text on all survivors.
#: * "the same loss": a RankLostError with equal text on all survivors.
#: * "names the victim": an error whose text contains the rank of the victim.
EXPECTED = {
    "none": "right",
    "late": "right",
    "slow in flight": "right",
    "killed in agreement": "names the victim",
    "killed before": "names the victim",
    "killed in flight": "right or names the victim",
    "killed after": "right",
    "stopped in flight": "right or a timeout",
    "host partitioned": "right or an error",
    "store lost": "right or an error",
    "killed, recovered": "right or the same loss",
    "two killed, recovered": "right or the same loss",
    "stopped, recovered": "right or the same loss",
    "host partitioned, recovered": "right or an error",
    "never calls": "names the victim",
    "byte flipped": "the same error",
    "raises before the call": "names the victim",
    "other shape": "the same error",
    "other layout": "the same error",
    "other strategy": "the same error",
    "other dtype": "the same error",
    "wrong shard": "the same error",
    "no shard": "the same error",
}
#: Faults that need emulated hosts; all others run between processes over loopback.
EMULATED = ("host partitioned", "host partitioned, recovered")
LINK_BYTES_PER_SECOND = 125e6


@dataclass(frozen=True)
class Run:
    """One reshard and its fault.

    Attributes:
        victim: the rank that the fault affects.
        moment: the fault strikes at the victim's send or receive with this number, counted from 1.
        second_victim: another rank that the same fault affects, or None.
    """

    seed: int
    fault: str
    shape: tuple[int, ...]
    dtype: str
    src: Layout
    dst: Layout
    topology: Topology | None
    strategy: str
    victim: int
    moment: int
    verify: bool
    num_ranks: int
    second_victim: int | None = None
    timeout_seconds: float = TIMEOUT_SECONDS
    slack_seconds: float = SLACK_SECONDS

    @property
    def victims(self) -> set[int]:
        """All ranks that the fault affects."""
        return {self.victim} | ({self.second_victim} if self.second_victim is not None else set())

    @property
    def kills(self) -> bool:
        """Whether the victims never return from the call."""
        return "killed" in self.fault or "stopped" in self.fault

    @property
    def recovers(self) -> bool:
        """Whether the call uses ``on_loss="recover"``."""
        return "recovered" in self.fault

    @property
    def limit_seconds(self) -> float:
        """Time limit of a survivor on an idle machine."""
        if "killed" in self.fault:
            return DEATH_SECONDS
        waits_for_store = LOST_STORE_SECONDS if self.recovers and self.fault in EMULATED else 0.0
        return self.timeout_seconds * (3 if self.recovers else 1) + SILENCE_SECONDS + waits_for_store

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.fault}, {self.dtype} {list(self.shape)} from {self.src} to {self.dst}, "
            f"{self.strategy}{', verify' if self.verify else ''}, victims {sorted(self.victims)} at {self.moment}"
        )


def make_run(seed: int, faults: Iterable[str] = tuple(EXPECTED)) -> Run:
    """Derive a random run from a seed. Equal seeds give equal runs."""
    chance = random.Random(seed)
    fault = sorted(faults)[seed % len(tuple(faults))]
    num_ranks = chance.randint(2, 8)
    ranks = chance.sample(range(num_ranks), num_ranks)
    cut = chance.randint(1, num_ranks - 1)
    sides = (ranks[:cut], ranks[cut:]) if chance.random() < 0.7 else (ranks, ranks[::-1])
    ndim = chance.randint(1, 3)
    src, dst = (_layout(chance, side, ndim) for side in sides)
    shape = [chance.randint(1, 40) for _ in range(ndim - 1)]
    shape.append(max(1, chance.randint(1000, MAX_ELEMENTS) // math.prod(shape)))
    hosts = sorted(chance.randrange(3) for _ in range(num_ranks))
    if fault in EMULATED and hosts[0] == hosts[-1]:
        hosts[-1] += 1
    topology = Topology(tuple(hosts)) if chance.random() < 0.5 else None
    if fault in EMULATED:
        numbers = sorted(set(hosts))
        host = Host((Link.of(LINK_BYTES_PER_SECOND),))
        topology = Topology(tuple(map(numbers.index, hosts)), hosts=(host,) * len(numbers))
    candidates = (
        sorted(src.ranks) if fault in ("wrong shard", "no shard", "other dtype") else sorted({*src.ranks, *dst.ranks})
    )
    victim = chance.choice(candidates)
    others = sorted({*src.ranks, *dst.ranks} - {victim})
    return Run(
        seed=seed,
        fault=fault,
        shape=tuple(shape),
        dtype=chance.choice(DTYPES),
        src=src,
        dst=dst,
        topology=topology,
        strategy=chance.choice(CHOICES),
        victim=victim,
        moment=chance.randint(1, 6),
        verify=fault == "byte flipped" or chance.random() < 0.3,
        num_ranks=num_ranks,
        second_victim=chance.choice(others) if fault.startswith("two ") else None,
    )


def _layout(chance: random.Random, ranks: list[int], ndim: int) -> Layout:
    size = len(ranks)
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    a = chance.choice(divisors)
    mesh = Mesh(ranks, {"x": a, "y": size // a})
    spec: list[list[str]] = [[] for _ in range(ndim)]
    for axis in ("x", "y"):
        dim = chance.randint(-1, ndim - 1)
        if dim >= 0:
            spec[dim].append(axis)
    return Layout(mesh, tuple(tuple(steps) for steps in spec))


def _arguments(run: Run, rank: int, source: Any) -> dict[str, Any]:
    """The arguments that a rank passes. If the fault is a mismatch, the victim passes different ones."""
    given: dict[str, Any] = {
        "tensor": source,
        "src_mesh": run.src,
        "dst_mesh": run.dst,
        "shape": run.shape,
        "dtype": run.dtype,
        "strategy": run.strategy,
        "topology": run.topology,
        "verify": run.verify,
        "timeout_seconds": run.timeout_seconds,
        "on_loss": "recover" if run.recovers else "raise",
    }
    if run.fault == "killed in agreement":
        given["staging_bytes"] = 2**25  # differs from the first call, so the plan is not cached
    if rank != run.victim:
        return given
    if run.fault == "other shape":
        given["shape"] = (*run.shape[:-1], run.shape[-1] + 1)
    elif run.fault == "other layout":
        turned = Mesh(run.dst.ranks, {"x": run.dst.mesh.size})
        same = str(Layout(turned, (("x",),))) == str(run.dst)
        given["dst_mesh"] = Layout(turned) if same else Layout(turned, (("x",),))
    elif run.fault == "other strategy":
        given["strategy"] = CHOICES[(CHOICES.index(run.strategy) + 1) % len(CHOICES)]
    elif run.fault == "other dtype":
        given["dtype"] = "float64"
    elif run.fault == "wrong shard":
        given["tensor"] = source.new_zeros((len(source) + 1, *source.shape[1:]))  # also wrong if the shard is empty
    elif run.fault == "no shard":
        given["tensor"] = None
    return given


def _strike(run: Run) -> None:
    """Patch the transport of the victim so that the fault strikes at operation ``run.moment``."""

    def act() -> None:
        if "killed" in run.fault:
            os.kill(os.getpid(), signal.SIGKILL)
        elif "stopped" in run.fault:
            stopped = os.getpid()
            # The launcher waits for the victim, so a child kills it once the survivors' time limit is over.
            if os.fork() == 0:
                time.sleep(run.limit_seconds + run.slack_seconds)
                os.kill(stopped, signal.SIGKILL)
                os._exit(0)
            os.kill(stopped, signal.SIGSTOP)
        elif run.fault == "slow in flight":
            time.sleep(run.timeout_seconds / 4)
        elif run.fault in EMULATED:
            subprocess.run(["ip", "link", "set", "nic0", "down"], check=True)

    count, sends = [0], [0]

    def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def post(*arguments: Any) -> Any:
            count[0] += 1
            if count[0] == run.moment:
                act()
            return plain(*arguments)

        return post

    plain_send = GlooTransport.send

    def send(self: GlooTransport, buffer: torch.Tensor, rank: int, tag: int) -> Any:
        sends[0] += tag < NOTIFY_TAG  # a message with tensor data
        if run.fault == "byte flipped" and sends[0] == 1 and tag < NOTIFY_TAG:
            buffer = buffer.clone()
            buffer[buffer.numel() // 2] ^= 1
        return plain_send(self, buffer, rank, tag)

    GlooTransport.send = send  # type: ignore[method-assign]
    for owner in (GlooTransport, SharedMemory):
        for name in ("send", "recv"):
            setattr(owner, name, counted(getattr(owner, name)))


def _bytes(array: torch.Tensor) -> torch.Tensor:
    return flat_bytes(array.contiguous())


def _inject(run: Run) -> None:
    """Prepare the fault on a victim."""
    if run.fault == "killed in agreement":

        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(reshard.api.preparation.prepare, "plan_tensors", die)  # noqa: B010
    _strike(run)


class _SecondStore:
    """A store in a child process of the victim, and a group that uses this store instead of the default one."""

    def __init__(self, run: Run, rank: int) -> None:
        world = dist.distributed_c10d._get_default_store()
        self.child: int | None = None
        if rank == run.victim:
            listener = socket.create_server(("127.0.0.1", 0))
            self.child = os.fork()
            if self.child == 0:
                store = serve_store(listener)
                time.sleep(60)
                del store
                os._exit(0)
            world.set("second", str(listener.getsockname()[1]))
            listener.close()
        port = int(world.get("second"))
        self.group = reshard.join(dist.TCPStore("127.0.0.1", port, is_master=False), rank, run.num_ranks)

    def end(self) -> None:
        """On the victim, kill the process that serves the store. On other ranks, do nothing."""
        if self.child is not None:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)


def take_part_on_host(rank: int, report: Any, run: Run) -> dict[str, Any] | None:
    """:func:`take_part` with the signature that the emulated cluster calls."""
    return take_part(rank, run)


def take_part(rank: int, run: Run) -> dict[str, Any] | None:
    """Execute the run on one rank and return its outcome; None if the rank is in no layout."""
    if rank not in (*run.src.ranks, *run.dst.ranks):
        return None
    if run.fault == "byte flipped" and rank == run.victim:
        os.environ[SHARED_MEMORY_VARIABLE] = "0"  # its messages pass the patched transport
    store = _SecondStore(run, rank) if run.fault == "store lost" else None
    group = None if store is None else store.group
    source, wanted = (shard_of_positions(layout, rank, run.shape, run.dtype) for layout in (run.src, run.dst))
    kept = None if source is None else _bytes(source).clone()  # as bytes, because cloning bools turns them into 0 and 1
    first = reshard.reshard(
        source, run.src, run.dst, shape=run.shape, dtype=run.dtype, group=group
    )  # connects all ranks
    assert wanted is None or not count_unlike(first, wanted)
    is_victim = rank in run.victims
    if is_victim:
        if run.fault == "killed before":
            os.kill(os.getpid(), signal.SIGKILL)
        if run.fault in ("never calls", "raises before the call"):
            if run.fault == "never calls":
                time.sleep(run.timeout_seconds + SILENCE_SECONDS)
                return {"kind": "did not call"}
            raise RuntimeError("injected fault")
        if run.fault == "late":
            time.sleep(run.timeout_seconds / 4)
        if store is not None:
            store.end()
        if run.fault != "killed after":
            _inject(run)
    begun = time.monotonic()
    try:
        out = reshard.reshard(**_arguments(run, rank, source), group=group)
        outcome = {"kind": "right", "unlike": 0 if wanted is None else count_unlike(out, wanted)}
    except reshard.ReshardError as error:
        outcome = {"kind": "error", "name": type(error).__name__, "text": str(error)}
    outcome["seconds"] = time.monotonic() - begun
    outcome["source_changed"] = 0 if source is None or kept is None else count_unlike(_bytes(source), kept)
    if is_victim and run.fault == "killed after":
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome


def sends_data(run: Run) -> bool:
    """Whether the victim sends tensor data to another rank."""
    plan = reshard.make_plan(
        run.src,
        run.dst,
        run.shape,
        run.dtype,
        strategy=run.strategy,
        topology=run.topology or Topology.from_hostnames(["here"] * run.num_ranks),
    )
    transfers = plan.transfers
    return bool(((transfers.sender == run.victim) & (transfers.receiver != run.victim)).any())
