"""Random planning problems from seeds: uneven hosts, several NICs, pods, overlapping meshes, replicas."""

from __future__ import annotations

import random

from reshard import Layout, Mesh, Topology
from reshard.topology.topology import Host, Link

RATES = (1e9, 1e9, 5e8, 2.5e8, 4e7)
#: Layouts of a 2-d tensor on a 2-d mesh.
SPECS = ("R R", "S0 R", "R S0", "S01 R", "R S1", "S0 S1", "S1 S0", "R S10")


def random_problem(seed: int) -> tuple[Layout, Layout, tuple[int, int], Topology]:
    """Source layout, destination layout, shape and topology of a seed."""
    chance = random.Random(seed)
    num_hosts, num_pods = chance.randint(2, 7), chance.choice((0, 0, 2, 3))
    is_even, num_nics = chance.random() < 0.4, chance.choice((1, 1, 2, 3))

    def link() -> Link:
        if is_even:
            return Link.of(1e9)
        return (
            Link(chance.choice(RATES), chance.choice(RATES)) if chance.random() < 0.3 else Link.of(chance.choice(RATES))
        )

    hosts, host_of_rank = [], []
    for host in range(num_hosts):
        nics = tuple(link() for _ in range(num_nics if is_even else chance.randint(1, num_nics)))
        hosts.append(Host(nics, host % num_pods if num_pods else None))
        host_of_rank += [host] * chance.randint(1, 4)
    topology = Topology(
        tuple(host_of_rank),
        tuple(hosts),
        pods=tuple(Link.of(chance.choice((5e8, 1e9, 4e9))) for _ in range(num_pods)),
        inside_bytes_per_second=chance.choice((None, None, 4e9, 8e8)),
        inside_latency_seconds=chance.choice((0.0, 0.0, 2e-5)),
        latency_seconds=chance.choice((0.0, 0.0, 1e-4)),
    )
    ranks = list(range(len(host_of_rank)))
    if chance.random() < 0.5:  # source ranks first, then destination ranks
        cut = chance.randint(1, len(ranks) - 1)
        sides = [ranks[:cut], ranks[cut:]]
    else:
        sides = [chance.sample(ranks, chance.randint(1, len(ranks))) for _ in range(2)]
    layouts = []
    for side in sides:
        rows = chance.choice([n for n in (1, 2, 3, 4) if n <= len(side)])
        columns = len(side) // rows
        layouts.append(Layout(Mesh(side[: rows * columns], {"a": rows, "b": columns}), chance.choice(SPECS)))
    shape = chance.choice(((96, 512), (700, 130), (64, 2048), (1500, 40), (33, 77)))
    return layouts[0], layouts[1], shape, topology
