"""The benchmark rows: pairs of layouts, each on one of the clusters in ``microbench/emulation/topologies``.

The 2023 study moved 2 GiB over 10 Gbit/s. Most rows here move 64 MiB over emulated links of 1 Gbit/s, which takes a
third of the study's time. In these rows, each receiving device gets at least 8 MiB.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from reshard.cli.demo_cases import study_cases
from reshard.sharding import Layout, Mesh, TensorSpec
from reshard.topology import Topology, read_topology

CLUSTERS = Path(__file__).parents[1] / "emulation" / "topologies"
_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One benchmark case: tensors to reshard on one cluster. ``make bench`` runs the ``is_default`` rows."""

    suite: str
    name: str
    cluster: str
    tensors: tuple[TensorSpec, ...]
    is_default: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of all global tensors, each counted once."""
        return sum(int(np.prod(spec.shape)) * spec.itemsize for spec in self.tensors)

    @property
    def title(self) -> str:
        """The layouts as short text, see :func:`describe_tensors`."""
        return describe_tensors(self.tensors)


def describe_tensors(tensors: Sequence[TensorSpec]) -> str:
    """Both layouts of one tensor, ``S0 R on 2x4 -> R R on 2x4``, or the number and total size of several."""
    if len(tensors) > 1:
        nbytes = sum(int(np.prod(spec.shape)) * spec.itemsize for spec in tensors)
        return f"{len(tensors)} tensors, {nbytes / _MIB:.0f} MiB"
    spec = tensors[0]
    return f"{_format_layout(spec.src, spec.ndim)} -> {_format_layout(spec.dst, spec.ndim)}"


def _format_layout(layout: object, ndim: int) -> str:
    if not isinstance(layout, Layout):
        return "regions"
    spec = layout.to_2023().split()
    spec += ["R"] * (ndim - len(spec))
    return f"{' '.join(spec)} on {'x'.join(map(str, layout.mesh.sizes))}"


def read_cluster(name: str) -> Topology:
    """The topology of a cluster in :data:`CLUSTERS`, given its name, or the topology in a file, given its path."""
    path = CLUSTERS / f"{name}.json"
    return read_topology(path if path.exists() else name)


def _rows(
    suite: str, cluster: str, shape: tuple[int, ...], src: Mesh, dst: Mesh, *cases: tuple[str, str, str, bool]
) -> Iterable[Row]:
    """Rows of one tensor between two meshes: name, source spec, destination spec, and whether it is a default row."""
    for name, a, b, is_default in cases:
        yield Row(suite, name, cluster, (TensorSpec(shape, "float32", Layout(src, a), Layout(dst, b)),), is_default)


def study() -> Iterable[Row]:
    """The n-to-m cases of the 2023 study, named by their layouts."""
    for case in study_cases():
        shape = (768, 256, 85) if case.name == "study 6" else (256, 256, 256)
        yield Row("study", case.title, "five", (TensorSpec(shape, "float32", case.src, case.dst),))


def one_to_many() -> Iterable[Row]:
    """The study's 1-to-m cases: one device to 1 to 4 hosts. ``--full`` adds grids, and sizes of 1 to 64 MiB."""
    for grid in ("1x1", "1x2", "1x3", "1x4", "2x2", "3x2", "4x2"):
        hosts, devices = map(int, grid.split("x"))
        dst = Mesh.from_array([[4 * (1 + host) + device for device in range(devices)] for host in range(hosts)])
        is_common = grid in ("2x2", "4x2")
        for mib in (32, 1, 16, 64) if is_common else (32, 1):
            case = (f"1 to {grid}, {mib} MiB", "R R", "R R", is_common and mib == 32)
            yield from _rows("one to many", "five", (mib * _MIB // 4096, 1024), Mesh.of("1x1"), dst, case)


def peers() -> Iterable[Row]:
    """64 MiB between 4 hosts of 2 devices, with even and uneven shards: cases that other tools support too."""
    four, to_four, grid = Mesh.of("4"), Mesh.of("4", first_rank=4), Mesh.of("2x2", first_rank=4)
    for rows in (4096, 4099):
        is_even = rows == 4096
        for name, dst, spec in (
            ("rows -> columns", to_four, "R S0"), ("S0 -> R", to_four, "R R"), ("S0 -> (2,2) [R,S1]", grid, "R S1"),
        ):  # fmt: skip
            case = (name + ("" if is_even else ", uneven"), "S0 R", spec, is_even)
            yield from _rows("peers", "peers", (rows, 4096), four, dst, case)


def hosts() -> Iterable[Row]:
    """Different numbers of sending and receiving hosts; replicated and sharded sources."""
    for a, b in ((2, 3), (3, 4), (4, 5)):
        cases = [
            (f"{a} -> {b} hosts, {spec}", spec, "S0 R", (a, spec) in ((2, "R R"), (3, "S0 R")))
            for spec in ("R R", "S0 R")
        ]
        shape = (240 * 48, 1024)  # divisible by every number of hosts used here
        yield from _rows("hosts", "nine", shape, Mesh.of((a, 2)), Mesh.of((b, 2), first_rank=2 * a), *cases)


def shared() -> Iterable[Row]:
    """Source and destination meshes that share ranks or hosts."""
    mesh, later, three = Mesh.of("2x4"), Mesh.of("2x4", first_rank=4), Mesh.of("3x4")
    for shape, dst, case in (
        ((512, 256, 256), mesh, ("in place, rows -> columns", "S0 R R", "R S0 R", True)),
        ((256, 256, 256), mesh, ("in place, S0 -> S1", "S0 R R", "S1 R R", False)),
        ((256, 256, 256), later, ("overlapping, 2 -> 2 hosts, 1 shared", "S0 R R", "R S0 R", True)),
        ((384, 256, 192), three, ("growing, 2 -> 3 hosts", "S0 R R", "S0 R R", False)),
    ):
        yield from _rows("shared", "five", shape, mesh, dst, case)


def unequal() -> Iterable[Row]:
    """Hosts with NICs of 1, 1/2 and 1/4 Gbit/s."""
    yield from _rows(
        "unequal NICs", "unequal", (3072, 2048), Mesh.of("3x2"), Mesh.of("3x2", first_rank=6),
        ("replicated -> S0", "R R", "S0 R", True), ("S0 -> replicated", "S0 R", "R R", False),
        ("columns -> rows", "R S0", "S0 R", True), ("S1 -> S0", "S1 R", "S0 R", False),
    )  # fmt: skip


def two_nics() -> Iterable[Row]:
    """Hosts with two NICs and two devices per NIC."""
    yield from _rows(
        "two NICs", "two_nics", (4096, 4096), Mesh.of("2x4"), Mesh.of("2x4", first_rank=8),
        ("replicated -> S0", "R R", "S0 R", True), ("columns -> rows", "R S0", "S0 R", True),
        ("S01 -> S01 the other way", "R S01", "S01 R", False), ("S0 -> replicated", "S0 R", "R R", False),
    )  # fmt: skip


def pods() -> Iterable[Row]:
    """Two pods of four hosts. The uplink of a pod has the rate of one NIC."""
    first, second = Mesh.of("4x2"), Mesh.of("4x2", first_rank=8)
    both = Mesh.from_array([[0, 1], [8, 9], [2, 3], [10, 11]])
    others = Mesh.from_array([[4, 5], [12, 13], [6, 7], [14, 15]])
    for shape, src, dst, case in (
        ((2048, 2048), Mesh.of("1x2"), Mesh.of("7x2", first_rank=2), ("one host -> all others", "S1 R", "R R", False)),
        ((2048, 2048), first, second, ("S0 -> S0 in the other pod", "S0 R", "S0 R", False)),
        ((2048, 1024), first, second, ("replicated -> replicated in the other pod", "R R", "R R", True)),
        ((4096, 2048), both, others, ("columns -> rows, both pods", "R S0", "S0 R", True)),
    ):
        yield from _rows("pods", "pods", shape, src, dst, case)


def small() -> Iterable[Row]:
    """300 small tensors in one call, like the weights of a model."""
    src, dst = Mesh.of("2x2"), Mesh.of("2x2", first_rank=4)
    rng = random.Random(1)
    tensors = []
    for number in range(300):
        rows, columns = 4 * rng.randint(8, 128), 4 * rng.randint(8, 256)
        shape = (rows, columns) if number % 3 else (columns,)
        to = "S1 R" if number % 2 else "R S0"
        spec, to = ("S0 R", to) if len(shape) == 2 else ("S0", "S1")
        tensors.append(TensorSpec(shape, "float32", Layout(src, spec), Layout(dst, to), f"w{number}"))
    yield Row("small", "300 tensors", "peers", tuple(tensors))


def sweep() -> Iterable[Row]:
    """One tensor from one host to two, in sizes from 1 KiB to 256 MiB."""
    src, dst = Mesh.of("1x2"), Mesh.of("2x2", first_rank=4)
    for power in range(10, 29, 2):
        size = 2**power
        name = f"{size // 1024} KiB" if size < _MIB else f"{size // _MIB} MiB"
        yield from _rows(
            "sweep", "peers", (size // 256, 64), src, dst, (name, "S1 R", "R R", power in (10, 16, 20, 24))
        )


def gathered() -> Iterable[Row]:
    """Small matrices of which each rank sends a region to every rank of the other hosts, so that latencies decide."""
    src, dst = Mesh.of("2x4"), Mesh.of("2x4", first_rank=8)
    for side, (a, b) in itertools.product((128, 1024), (("S01 R", "R S1"), ("S01 R", "R S01"), ("S0 S1", "S1 S0"))):
        yield from _rows("gathered", "five", (side, side), src, dst, (f"{a} -> {b}, {side} x {side}", a, b, False))


def three_axes(suite: str = "three axes", cluster: str = "five") -> Iterable[Row]:
    """Ten random pairs of meshes of three axes on two and three hosts of 4 devices, with at least 32 MiB of float32."""
    rng = random.Random(2)
    for number in range(10):
        src_hosts, dst_hosts = rng.choice(((2, 3), (3, 2), (2, 2)))
        src, dst = Mesh.of((src_hosts, 2, 2)), Mesh.of((dst_hosts, 2, 2), first_rank=4 * src_hosts)
        rows = rng.randint(2400, 3600)
        specs = []
        for _ in range(2):
            axes_of: tuple[list[str], list[str]] = ([], [])
            for axis in rng.sample("012", 3):
                rng.choice([*axes_of, []]).append(axis)  # the axis shards a dim, or none
            specs.append(" ".join("S" + "".join(axes) if axes else "R" for axes in axes_of))
        name = f"{number}: {specs[0]} on {src_hosts}x2x2 -> {specs[1]} on {dst_hosts}x2x2"
        shape = (rows, 8 * _MIB // rows + 1)
        yield from _rows(suite, cluster, shape, src, dst, (name, specs[0], specs[1], False))


def slow() -> Iterable[Row]:
    """Pairs of three-axis and uneven meshes on hosts of 4 devices with 200 Mbit/s, at which two cores keep up."""
    for shape, src, src_spec, dst, dst_spec in (
        ((2900, 2896), "2x2x4", "S1 S20", "5x4", "R S0"),
        ((2100, 2300), "3x2x2", "R S1", "3x4", "S1 S0"),
        ((3001, 1999), "4x2x2", "S2 S0", "2x2x4", "S01 R"),
        ((1024, 1024), "1x4", "S0 R", "5x4", "R R"),
    ):
        first = Mesh.of(src)
        pair = first, Mesh.of(dst, first_rank=len(first.ranks))
        yield from _rows("slow", "nine_slow", shape, *pair, (f"{src_spec} -> {dst_spec}", src_spec, dst_spec, False))
    yield from three_axes("slow", "nine_slow")


def random_rows(seed: int, count: int) -> Iterable[Row]:
    """Random pairs of layouts on three to five hosts of 4 devices; shapes need not be divisible by the meshes."""
    rng = random.Random(seed)
    for number in range(count):
        src_hosts, dst_hosts = rng.choice(((1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (2, 3), (3, 2)))
        src, dst = Mesh.of((src_hosts, 4)), Mesh.of((dst_hosts, 4), first_rank=4 * src_hosts)
        shape = tuple(int(rng.uniform(0.8, 1.25) * side) for side in (256, 256, 256))
        specs = []
        for _ in range(2):
            axes = ["R"] * 3
            for axis in rng.choice(("", "0", "1", "01", "10", "0 1")).split():
                free = [dim for dim in range(3) if axes[dim] == "R"]
                axes[rng.choice(free)] = "S" + axis
            specs.append(" ".join(axes))
        name = f"seed {seed}.{number}: {specs[0]} on {src_hosts}x4 -> {specs[1]} on {dst_hosts}x4"
        yield from _rows("random", "five", shape, src, dst, (name, specs[0], specs[1], number < 1))


SUITES = {
    "study": study,
    "one to many": one_to_many,
    "peers": peers,
    "hosts": hosts,
    "shared": shared,
    "unequal NICs": unequal,
    "two NICs": two_nics,
    "pods": pods,
    "small": small,
    "sweep": sweep,
    "gathered": gathered,
    "three axes": three_axes,
    "slow": slow,
}


def all_rows(seed: int, num_random: int, scale: float = 1.0) -> list[Row]:
    """Every row, random ones last; ``scale`` multiplies the first dim of every tensor."""
    rows = [row for suite in SUITES.values() for row in suite()] + list(random_rows(seed, num_random))
    if scale == 1.0:
        return rows

    def scaled(spec: TensorSpec) -> TensorSpec:
        return replace(spec, shape=(max(1, round(spec.shape[0] * scale)), *spec.shape[1:]))

    return [replace(row, tensors=tuple(scaled(spec) for spec in row.tensors)) for row in rows]
