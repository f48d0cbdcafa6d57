"""Times of the linear layers of a transformer layer on grids.

All grids run on the same emulated hosts, in turns. The bound is the longest time that a NIC, or a rank inside
its host, needs at its calibrated rate for what must pass it at least: each element enters a host once. Inside a host,
this is the rate at which a rank reads from shared memory while no other rank works. ``dtensor`` is
torch's own matrix product on the same placements. ``transfers`` leaves out the products; ``early sums`` does, too, and
sums gradients over depth during the backward. ``panels`` overlaps communication with the products by panels,
``one panel`` gathers first and then multiplies. ``CPU`` is the CPU time of all ranks in "transfers", divided by the
number of cores: all ranks share them, so "transfers" cannot take less in this implementation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.harness.case_options import BenchmarkOptionError, add_number
from microbench.parallel.grid_links import measure_grid_links
from microbench.parallel.layers import GridShape, LinearStack, layer_products, transformer_linears
from reshard.cli.progress_bars import print_line, track
from reshard.coordination.device_mesh import make_device_mesh
from reshard.parallel import Grid
from reshard.parallel.choice.axis_costs import find_axis_cost, find_product_seconds
from reshard.parallel.grid import AXES
from reshard.parallel.grid.cuts import chunk_spans, size_of
from reshard.parallel.products.dataflow import PANEL_WIDTH
from reshard.parallel.products.multiply import Product
from reshard.topology import Topology

#: Of a collective.
COLLECTIVE_TIMEOUT_SECONDS = 300
#: Rows, columns, depth, and axes from the slowest to the fastest over consecutive ranks.
GRIDS = "1,16,1:depth,row,col 4,4,1:depth,row,col 2,2,4:depth,row,col 2,2,4:col,depth,row"


@dataclass(frozen=True)
class GridSetting:
    """One grid, how its ranks are arranged, and what is timed on it."""

    shape: GridShape
    order: tuple[str, ...]

    def ranks(self) -> np.ndarray:
        """``[depth, row, col]`` the rank at each position."""
        sizes = dict(zip(AXES, (self.shape.depth, self.shape.rows, self.shape.cols), strict=True))
        array = np.arange(self.shape.size).reshape([sizes[axis] for axis in self.order])
        return array.transpose([self.order.index(axis) for axis in AXES])

    @classmethod
    def parse(cls, text: str) -> GridSetting:
        """A setting from ``rows,cols,depth:axes``."""
        shape, _, order = text.partition(":")
        return cls(GridShape.parse(shape), tuple(order.split(",")) if order else AXES)


def bound_seconds(setting: GridSetting, topology: Topology, tokens: int, hidden: int, keep_inputs: bool) -> float:
    """The minimum time in which the NICs, and the ranks inside hosts, pass what a step moves. Nothing overlaps sums."""
    shape = setting.shape
    axis_costs = {axis: find_axis_cost(topology, setting.ranks(), number) for number, axis in enumerate(AXES)}
    layer_rows = size_of(chunk_spans(tokens, shape.depth)[0])
    per_row = tuple(map(size_of, chunk_spans(layer_rows, shape.rows)))
    nic = inside = 0.0
    for size in transformer_linears(hidden):
        products = layer_products(shape, size, per_row, keep_inputs)
        for moved in find_product_seconds(products, products.dataflows, axis_costs, 4):
            nic, inside = nic + moved.nic, inside + moved.inside
        product = products.shape
        part = 4 * size_of(product.p_rows[0]) * product.q[0] / shape.depth
        nic += 2 * axis_costs["depth"].nic_seconds * part
        inside += 2 * axis_costs["depth"].inside_seconds * part
    return max(nic, inside)


class _NoArithmetic:
    """Replaces local products by empty arrays of the right shape, to time communication alone."""

    def __enter__(self) -> None:
        self._before = Product.multiply, Product.add_product
        Product.multiply = lambda self, a, b: a.new_empty((a.shape[0], b.shape[1]))  # type: ignore[method-assign]
        Product.add_product = (  # type: ignore[method-assign]
            lambda self, total, a, b: a.new_empty((a.shape[0], b.shape[1])) if total is None else total
        )

    def __exit__(self, *_: object) -> None:
        Product.multiply, Product.add_product = self._before  # type: ignore[method-assign]


class DTensorStack:
    """The same products by DTensor: activations ``[Shard(0), Shard(0), Shard(1)]``, weights replicated over depth."""

    def __init__(self, mesh: DeviceMesh, sizes: list[tuple[int, int]], tokens: int) -> None:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        self._placements = [Shard(0), Shard(0), Shard(1)]
        self.inputs = [distribute_tensor(torch.randn(tokens, k), mesh, self._placements) for k, _ in sizes]
        weight = [Replicate(), Shard(0), Shard(1)]
        self.weights = [distribute_tensor(torch.randn(size), mesh, weight) for size in sizes]
        for item in (*self.inputs, *self.weights):
            item.requires_grad_()
        self._weight = weight

    def run_step(self) -> None:
        """Forward and backward of each product, with results in the layouts of the grid."""
        for x, w in zip(self.inputs, self.weights, strict=True):
            y = (x @ w).redistribute(placements=self._placements)
            y.backward(torch.ones_like(y))
            for item, placements in ((x, self._placements), (w, self._weight)):
                item.grad.redistribute(placements=placements)  # type: ignore[union-attr]
                item.grad = None


def time_settings(
    rank: int,
    report: Callable[[Any], None],
    settings: list[GridSetting],
    tokens: int,
    hidden: int,
    repeats: int,
    with_dtensor: bool,
    keep_inputs: bool,
) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """Seconds of each step by setting and variant: the longest of all ranks, and the CPU time of all ranks.

    Variants run in turns.
    """
    torch.set_num_threads(1)
    sizes = transformer_linears(hidden)
    variants: dict[tuple[int, str], Callable[[], None]] = {}
    for number, setting in enumerate(settings):
        mesh = make_device_mesh(torch.tensor(setting.ranks()), AXES, "cpu", COLLECTIVE_TIMEOUT_SECONDS)
        grid = Grid(mesh)
        stack = LinearStack(grid, sizes, tokens, max(1, PANEL_WIDTH // 8), keep_inputs)
        whole = LinearStack(grid, sizes, tokens, 10**9, keep_inputs)
        variants[number, "transfers"] = _without_arithmetic(whole.run_step)
        if setting.shape.depth > 1:
            variants[number, "early sums"] = _without_arithmetic(partial(whole.run_step, sums_early=True))
        variants[number, "one panel"] = whole.run_step
        variants[number, "panels"] = stack.run_step
        if with_dtensor:
            variants[number, "dtensor"] = DTensorStack(mesh, sizes, tokens).run_step
    seconds: dict[tuple[int, str], list[tuple[float, float]]] = {key: [] for key in variants}
    for turn in range(repeats + 1):
        for key, run in variants.items():
            dist.barrier()
            begun, cpu_begun = time.perf_counter(), time.process_time()
            run()
            longest = torch.tensor(time.perf_counter() - begun)
            cpu_seconds = torch.tensor(time.process_time() - cpu_begun)
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            dist.all_reduce(cpu_seconds)
            if turn:  # the first turn connects
                seconds[key].append((float(longest), float(cpu_seconds)))
    return seconds


def _without_arithmetic(step: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with _NoArithmetic():
            step()

    return run


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grids", default=GRIDS, help="rows,cols,depth:axes of each grid, separated by spaces")
    parser.add_argument("--sizes", default="4096,256 1024,512", help="tokens,hidden of each shape")
    add_number(parser, "--hosts", 4, "emulated hosts", high=64)
    add_number(parser, "--rate", 400.0, "Mbit/s of each host's NIC", high=1e5)
    add_number(parser, "--repeats", 5, "steps of each variant, of which the median counts")
    parser.add_argument("--no-dtensor", action="store_true", help="skip torch's own product")
    parser.add_argument("--keep-inputs", action="store_true", help="keep what forwards gather for the backward")


def run(options: argparse.Namespace) -> None:
    """Print a table of medians, bounds and ratios."""
    settings = [GridSetting.parse(text) for text in options.grids.split()]
    sizes = {setting.shape.size for setting in settings}
    if len(sizes) > 1 or max(sizes) % options.hosts:
        raise BenchmarkOptionError(
            f"the grids have {sorted(sizes)} ranks; all must have the same, a multiple of the hosts"
        )
    num_ranks = max(sizes)
    per_host = num_ranks // options.hosts
    topology = Topology.uniform([rank // per_host for rank in range(num_ranks)], options.rate * 125e3)
    with EmulatedCluster(topology) as cluster:
        links = measure_grid_links(cluster, topology)
        inside = (links.inside_bytes_per_second or 0.0) / 1e6
        print_line(
            f"{options.hosts} hosts of {per_host} ranks, {options.rate:g} Mbit/s; inside {inside:.0f} MB/s a rank"
        )
        for text in track(options.sizes.split(), "sizes"):
            tokens, hidden = map(int, text.split(","))
            how = tokens, hidden, options.repeats, not options.no_dtensor, options.keep_inputs
            results = cluster.run(time_settings, settings, *how, timeout_seconds=900)
            bounds = [bound_seconds(item, links, tokens, hidden, options.keep_inputs) for item in settings]
            _print_table(settings, results[0], bounds, tokens, hidden)


def _print_table(
    settings: list[GridSetting],
    seconds: dict[tuple[int, str], list[tuple[float, float]]],
    bounds: list[float],
    tokens: int,
    hidden: int,
) -> None:
    measured = {name for _, name in seconds}
    names = [name for name in ("transfers", "early sums", "one panel", "panels", "dtensor") if name in measured]
    print_line(f"\n{tokens} tokens, hidden {hidden}: milliseconds, forward + backward + depth sums; medians")
    print_line(
        f"{'grid':>10} {'ranks vary along':>18} {'bound':>8} {'CPU':>9} "
        + " ".join(f"{name:>10}" for name in names)
        + "  ratio"
    )
    cores = len(os.sched_getaffinity(0))
    for number, (setting, bound) in enumerate(zip(settings, bounds, strict=True)):
        medians = {name: _median(longest for longest, _ in seconds.get((number, name), ())) for name in names}
        best = min(median for name in ("transfers", "early sums") if (median := medians.get(name)) is not None)
        cpu_seconds = statistics.median(second for _, second in seconds[number, "transfers"]) / cores
        cells = " ".join("-".rjust(10) if median is None else f"{1e3 * median:>10.0f}" for median in medians.values())
        order = ", ".join(reversed([axis for axis in setting.order if _size(setting, axis) > 1]))
        limits = f"{1e3 * bound:>8.0f} {1e3 * cpu_seconds:>9.0f}"
        print_line(f"{setting.shape!s:>10} {order:>18} {limits} {cells}  {best / bound:.2f}")


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def _size(setting: GridSetting, axis: str) -> int:
    return {"depth": setting.shape.depth, "row": setting.shape.rows, "col": setting.shape.cols}[axis]
