"""A tensor from one Ray actor to actors on three hosts.

It compares ``reshard.ray`` with Ray's object store, collectives and direct transport, on a Ray cluster of emulated
hosts. The methods run in turns, and every received element is checked.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from microbench.emulation.link_commands import PAYLOAD_SHARE
from microbench.emulation.ray import ray_cluster
from microbench.harness.case_options import add_number
from microbench.harness.table import Table
from reshard.cli.progress_bars import track
from reshard.topology import parse_rate

COLLECTIVE = "receivers and sender"


def _region_reader(rows: int) -> Callable[[tuple[slice, ...]], torch.Tensor]:
    def read(index: tuple[slice, ...]) -> torch.Tensor:
        return torch.arange(rows * 1024, dtype=torch.float32).reshape(rows, 1024)[index]

    return read


class _Holder:
    """An actor without reshard. It holds the tensor, and sends or receives it by a method of Ray."""

    def __init__(self, rows: int) -> None:
        self.tensor = _region_reader(rows)((slice(None), slice(None)))
        self.received: Any = None

    def ready(self) -> None:
        """Return when the actor has started."""

    def put(self) -> list[Any]:
        """Put the tensor into the object store and return the reference."""
        import ray

        return [ray.put(self.tensor.numpy())]

    def get(self, references: list[Any]) -> None:
        """Fetch the tensor from the object store."""
        import ray

        self.received = torch.from_numpy(ray.get(references[0]).copy())

    def broadcast(self, root: int, rank: int) -> None:
        """Take part in a broadcast of ``ray.util.collective``."""
        from ray.util import collective

        if self.received is None:
            self.received = torch.empty_like(self.tensor)
        collective.broadcast(self.tensor if rank == root else self.received, root, COLLECTIVE)

    def send(self) -> torch.Tensor:
        """Return the tensor by Ray's direct transport."""
        return self.tensor

    def receive(self, tensor: torch.Tensor) -> None:
        """Receive the tensor by Ray's direct transport."""
        self.received = tensor

    def count_wrong(self) -> int:
        """Number of wrong elements; clears the received tensor."""
        wrong = int((self.received != self.tensor).sum())
        self.received.zero_()
        return wrong


def measure(num_receivers: int, mib: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Run all methods in turns, from a Ray driver.

    Returns:
        ``{method: {"seconds": of each turn, first use first, "wrong": number of wrong elements}}``.
    """
    rows = mib * 2**20 // 4096
    # Ray's methods place one actor per host first; each host then has one CPU left for an actor of reshard
    methods = _ray_methods(num_receivers, rows)
    methods["reshard.ray"] = _reshard_method(num_receivers, rows)
    results: dict[str, dict[str, Any]] = {name: {"seconds": [], "wrong": 0} for name in methods}
    for _ in track(range(repeats + 1), "turns"):
        for name, (move, count_wrong) in methods.items():
            begun = time.monotonic()
            move()
            results[name]["seconds"].append(time.monotonic() - begun)
            results[name]["wrong"] += count_wrong()
    return results


#: ``(move, count_wrong)``: one transfer, and the number of wrong elements after it.
Method = tuple[Callable[[], None], Callable[[], int]]


def _reshard_method(num_receivers: int, rows: int) -> Method:
    import reshard.ray

    src = reshard.ray.ActorMesh(1, name="sender")
    dst = reshard.ray.ActorMesh(num_receivers, num_hosts=num_receivers, name="receiver")
    held = src.make((rows, 1024), "float32", None, _region_reader(rows))
    wanted = _region_reader(rows)((slice(None), slice(None)))
    moved: list[Any] = []

    def move() -> None:
        moved[:] = [reshard.ray.reshard(held, src, dst)]

    def count_wrong() -> int:
        return sum(int((shard != wanted).sum()) for shard in moved[0].shards().values())

    return move, count_wrong


def _ray_methods(num_receivers: int, rows: int) -> dict[str, Method]:
    """Ray's methods, with one sender and the receivers on different hosts, like the actors of the meshes."""
    import ray
    from ray.experimental.collective import create_collective_group
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1}] * (num_receivers + 1), strategy="STRICT_SPREAD")
    ray.get(group.ready())
    holder = ray.remote(enable_tensor_transport=True)(_Holder)
    actors = [
        holder.options(num_cpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, i)).remote(rows)
        for i in range(num_receivers + 1)
    ]
    ray.get([actor.ready.remote() for actor in actors])
    sender, receivers = actors[0], actors[1:]

    def count_wrong() -> int:
        return sum(ray.get([actor.count_wrong.remote() for actor in receivers]))

    def by_object_store() -> None:
        references = ray.get(sender.put.remote())
        ray.get([actor.get.remote(references) for actor in receivers])

    create_collective_group(actors, backend="gloo", name=COLLECTIVE)

    def by_collective() -> None:
        ray.get([actor.broadcast.remote(0, rank) for rank, actor in enumerate(actors)])

    methods = {
        "object store": (by_object_store, count_wrong),
        "ray.util.collective broadcast": (by_collective, count_wrong),
    }

    def by_direct_transport() -> None:
        sent = sender.send.options(tensor_transport="gloo").remote()
        ray.get([actor.receive.remote(sent) for actor in receivers])

    methods["direct transport (gloo)"] = by_direct_transport, count_wrong
    return methods


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--receivers", 3, "receiving hosts, each with one actor", high=16)
    add_number(parser, "--mib", 64, "MiB to move", high=4096)
    parser.add_argument("--rate", default="1 Gbit/s", help="rate of each host's link (1 Gbit/s)")
    add_number(parser, "--repeats", 5, "timed turns of each method")


def run(options: argparse.Namespace) -> int:
    """Print the table; returns 1 if an element was wrong."""
    with ray_cluster(options.receivers + 1, options.rate, num_cpus=2) as drive:
        results = drive(measure, options.receivers, options.mib, options.repeats)
    bound = options.mib * 2**20 / (parse_rate(options.rate) * PAYLOAD_SHARE)
    print(f"1 actor to {options.receivers} hosts, {options.mib} MiB, {options.rate}: bound {bound:.4f} s")
    table = Table(
        {
            "method": "<30",
            "median s": ">.4f",
            "min": ">7.3f",
            "max": ">7.3f",
            "x bound": ">.3f",
            "first s": ">.3f",
            "wrong": ">",
        }
    )
    for name, item in results.items():
        first, *seconds = item["seconds"]
        median = statistics.median(seconds)
        table.add(name, median, min(seconds), max(seconds), median / bound, first, item["wrong"])
    return 1 if any(item["wrong"] for item in results.values()) else 0
