"""One actor to three hosts, on a Ray cluster of emulated hosts: ``python -m microbench.transfers.ray_actors``.

Ours beside the object store, Ray's collectives and Ray's direct transport, in turns; every element checked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import reshard
from microbench.emulation.cluster import ClusterError
from microbench.emulation.links import PAYLOAD_SHARE
from microbench.emulation.ray import ray_cluster
from microbench.harness.steal_time import Lap, Laps, Patience, idle_seconds, stolen_part, stolen_seconds
from microbench.harness.suite import describe_machine, stderr
from reshard.topology.files import parse_rate

PATIENCE_SECONDS = 60.0
COLLECTIVE = "receivers and sender"


def _parts_of(rows: int) -> Callable[[tuple[slice, ...]], torch.Tensor]:
    def part(index: tuple[slice, ...]) -> torch.Tensor:
        return torch.arange(rows * 1024, dtype=torch.float32).reshape(rows, 1024)[index]

    return part


class _Holder:
    """An actor of a plain Ray program: it holds the tensor, or takes it in one of Ray's ways."""

    def __init__(self, rows: int) -> None:
        self.tensor = _parts_of(rows)((slice(None), slice(None)))
        self.taken: Any = None

    def ready(self) -> None:
        """Started."""

    def put(self) -> list[Any]:
        """A reference to the tensor, new in the object store."""
        import ray

        return [ray.put(self.tensor.numpy())]

    def get(self, references: list[Any]) -> None:
        """Fetch from the object store."""
        import ray

        self.taken = torch.from_numpy(ray.get(references[0]).copy())

    def broadcast(self, root: int, rank: int) -> None:
        """Ray's collective."""
        from ray.util import collective

        if self.taken is None:
            self.taken = torch.empty_like(self.tensor)
        collective.broadcast(self.tensor if rank == root else self.taken, root, COLLECTIVE)

    def give(self) -> torch.Tensor:
        """For Ray's direct transport."""
        return self.tensor

    def take(self, tensor: torch.Tensor) -> None:
        """What another actor gave."""
        self.taken = tensor

    def count_wrong(self) -> int:
        """Elements that are not as they should be; forgets what was taken."""
        wrong = int((self.taken != self.tensor).sum())
        self.taken.zero_()
        return wrong


def measure(num_receivers: int, mib: int, repeats: int) -> dict[str, dict[str, Any]]:
    """In a driver: seconds of each way, in turns.

    Returns:
        ``{way: {"laps", "first_use_seconds", "wrong"}}``.
    """
    rows = mib * 2**20 // 4096
    ways = _theirs(num_receivers, rows)  # first: one of its actors on each host leaves room for one of ours
    ways["reshard.ray"] = _ours(num_receivers, rows)
    found: dict[str, dict[str, Any]] = {}
    patience = Patience(PATIENCE_SECONDS)
    for number in range(3 * repeats + 1):
        for name, (move, count_wrong) in ways.items():
            if number and not found[name]["laps"].needs_more():
                continue
            begun, idle, stolen = time.monotonic(), idle_seconds(), stolen_seconds()
            move()
            seconds = time.monotonic() - begun
            part = stolen_part(stolen_seconds() - stolen, seconds)
            busy = 1 - (idle_seconds() - idle) / (seconds * (os.cpu_count() or 1))
            if number:
                found[name]["laps"].done.append(Lap(seconds, busy, part))
            else:
                found[name] = {"laps": Laps(repeats), "first_use_seconds": seconds, "wrong": 0}
            found[name]["wrong"] += count_wrong()
            if part:
                patience.rest()
    return found


Way = tuple[Callable[[], None], Callable[[], int]]


def _ours(num_receivers: int, rows: int) -> Way:
    import reshard.ray

    src = reshard.ray.ActorMesh(1, name="sender")
    dst = reshard.ray.ActorMesh(num_receivers, num_hosts=num_receivers, name="receiver")
    held = src.make((rows, 1024), "float32", None, _parts_of(rows))
    wanted = _parts_of(rows)((slice(None), slice(None)))
    moved: list[Any] = []

    def move() -> None:
        moved[:] = [reshard.ray.reshard(held, src, dst)]

    def count_wrong() -> int:
        return sum(int((shard != wanted).sum()) for shard in moved[0].shards().values())

    return move, count_wrong


def _theirs(num_receivers: int, rows: int) -> dict[str, Way]:
    """One actor and receivers on hosts of their own, as the meshes' actors are."""
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

    ways = {
        "object store": (by_object_store, count_wrong),
        "ray.util.collective broadcast": (by_collective, count_wrong),
    }

    def by_direct_transport() -> None:
        given = sender.give.options(tensor_transport="gloo").remote()
        ray.get([actor.take.remote(given) for actor in receivers])

    ways["direct transport (gloo)"] = by_direct_transport, count_wrong
    return ways


def format_ways(found: dict[str, dict[str, Any]], bound: float) -> str:
    """A table: median, min and max seconds, and over the bound."""
    lines = [f"{'way':32}{'median s':>10}{'min':>8}{'max':>8}{'x bound':>9}{'first s':>9}  elements"]
    for name, one in found.items():
        seconds = [lap.seconds for lap in one["laps"].kept()]
        median = statistics.median(seconds)
        lines.append(
            f"{name:32}{median:10.4f}{min(seconds):8.3f}{max(seconds):8.3f}{median / bound:9.3f}"
            f"{one['first_use_seconds']:9.3f}  {str(one['wrong']) + ' WRONG' if one['wrong'] else 'all'}"
        )
    return "\n".join(lines)


def main() -> int:
    """Print the table; returns 1 if an element was wrong."""
    parser = argparse.ArgumentParser(prog="python -m microbench.transfers.ray_actors", description=__doc__)
    parser.add_argument("--receivers", type=int, default=3, help="hosts with one receiving actor each (3)")
    parser.add_argument("--mib", type=int, default=64, help="MiB to move (64)")
    parser.add_argument("--rate", default="1 Gbit/s", help="of each host's link (1 Gbit/s)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each (5)")
    parser.add_argument("--out", type=Path, help="write JSON lines here")
    options = parser.parse_args()
    if not 1 <= options.receivers <= 16 or not 1 <= options.mib <= 4096 or not 1 <= options.repeats <= 1000:
        parser.error("--receivers is 1 to 16, --mib 1 to 4096, --repeats 1 to 1000")
    try:
        with ray_cluster(options.receivers + 1, options.rate, num_cpus=2) as drive:
            found = drive(measure, options.receivers, options.mib, options.repeats)
    except (ClusterError, reshard.ReshardError) as error:
        stderr(f"ray_actors: {error}")
        return 2
    bound = options.mib * 2**20 / (parse_rate(options.rate) * PAYLOAD_SHARE)
    print(f"1 actor to {options.receivers} hosts, {options.mib} MiB, {options.rate}: bound {bound:.4f} s")
    print(format_ways(found, bound))
    if options.out:
        records = [describe_machine(sys.argv[1:])]
        records += [
            {
                "kind": "way",
                "way": name,
                "bound_seconds": bound,
                "seconds": [lap.seconds for lap in one["laps"].kept()],
                "wrong": one["wrong"],
            }
            for name, one in found.items()
        ]
        options.out.write_text("".join(json.dumps(record) + "\n" for record in records))
    return 1 if any(one["wrong"] for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
