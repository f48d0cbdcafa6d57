"""Transfers between processes over loopback, compared with hand-written point-to-point code and torch.

Every contender moves the same tensor between the same processes into preallocated outputs. Contenders run in turns of
a few calls each (A B C A B C). The first turn is a warm-up, and every element is checked after it and after the last
turn. A turn lasts from the common start of all ranks to the end of the last rank; its time is divided by its calls.

The baseline ``point-to-point`` is a good hand-written exchange over the same Gloo calls. The least loaded holder sends
each region once per receiver. Receives are posted first, and go directly into the output where the region is
contiguous. Large strided regions are packed in pieces, so that packing overlaps with sending. The baseline runs with
whole messages and with pieces, and the faster form counts.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import reshard
from microbench.harness.case_options import add_number, select
from microbench.harness.turns import medians_of, slowest, time_in_turns
from microbench.peers.torch_baselines import FullTensor
from reshard.cli.demo_transfers import count_unlike, shard_of_positions
from reshard.sharding import Layout, Mesh, TensorSpec
from reshard.testing.processes import run_processes

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class LoopbackCase:
    """A tensor shape and a pair of layouts on consecutive ranks."""

    name: str
    shape: tuple[int, ...]
    src: Layout
    dst: Layout


def cases(mib: int) -> list[LoopbackCase]:
    """The six cases; each tensor has ``mib`` MiB of float32."""
    rows = mib * 64
    four, grid = Mesh.of("4"), Mesh.of("2x2")
    to_four, to_grid = Mesh.of("4", first_rank=4), Mesh.of("2x2", first_rank=4)
    columns = 4096
    return [
        LoopbackCase("rows -> cols", (rows, columns), Layout(four, "S0 R"), Layout(to_four, "R S0")),
        LoopbackCase("S0 -> R", (rows, columns), Layout(four, "S0 R"), Layout(to_four, "R R")),
        LoopbackCase("[R,S0] -> [S0,S1]", (rows, columns), Layout(grid, "S1 R"), Layout(to_grid, "S0 S1")),
        LoopbackCase("S0 -> [R,S1]", (rows, columns), Layout(four, "S0 R"), Layout(to_grid, "R S1")),
        LoopbackCase("rows + 3 uneven", (rows + 3, columns), Layout(four, "S0 R"), Layout(to_four, "R S0")),
        LoopbackCase(
            "3 -> 4 uneven",
            (rows + 3, columns),
            Layout(Mesh.of("3"), "S0 R"),
            Layout(Mesh.of("4", first_rank=3), "S0 R"),
        ),
    ]


class PointToPoint:
    """The hand-written exchange. It sends regions in pieces of ``piece_bytes``, or whole if that is None."""

    def __init__(self, case: LoopbackCase, rank: int, source: Any, out: Any, piece_bytes: int | None) -> None:
        self.source, self.out = source, out
        self.copies: list[tuple[Slices, Slices]] = []
        self.sends: list[tuple[int, Slices, Any]] = []
        self.recvs: list[tuple[int, Slices, Any]] = []
        row_bytes = case.shape[1] * 4
        for sender, receiver, (row0, row1), (col0, col1) in _exchange(case):
            if rank not in (sender, receiver):
                continue
            step = row1 - row0
            if piece_bytes is not None:
                step = max(1, piece_bytes // max(1, row_bytes * (col1 - col0) // case.shape[1]))
            for row in range(row0, row1, step):
                rows = (row, min(row + step, row1))
                if rank == sender:
                    at = _local(case.src, rank, case.shape, rows, (col0, col1))
                    self.sends.append((receiver, at, _buffer(source[at])))
                else:
                    at = _local(case.dst, rank, case.shape, rows, (col0, col1))
                    self.recvs.append((sender, at, _buffer(out[at])))

    def __call__(self) -> None:
        recvs = []
        for sender, index, buffer in self.recvs:
            target = self.out[index] if buffer is None else buffer
            recvs.append((dist.irecv(target, sender), index, buffer))
        sends = []
        for receiver, index, buffer in self.sends:
            if buffer is None:
                sends.append(dist.isend(self.source[index], receiver))
            else:
                buffer.copy_(self.source[index])
                sends.append(dist.isend(buffer, receiver))
        for work, index, buffer in recvs:
            work.wait()
            if buffer is not None:
                self.out[index].copy_(buffer)
        for work in sends:
            work.wait()


def _buffer(view: torch.Tensor) -> torch.Tensor | None:
    return None if view.is_contiguous() else torch.empty(view.shape, dtype=view.dtype)


def _exchange(case: LoopbackCase) -> list[tuple[int, int, tuple[int, int], tuple[int, int]]]:
    """``(sender, receiver, rows, columns)`` of each region, rotated so that senders start with different receivers."""
    held = {rank: _bounds(case.src, rank, case.shape) for rank in case.src.ranks}
    holders: dict[Any, list[int]] = {}
    for rank, bounds in held.items():
        holders.setdefault(bounds, []).append(rank)
    load = dict.fromkeys(case.src.ranks, 0)
    result = []
    receivers = case.dst.ranks
    for turn in range(len(receivers)):
        for number, (bounds, ranks) in enumerate(holders.items()):
            receiver = receivers[(number + turn) % len(receivers)]
            need = _bounds(case.dst, receiver, case.shape)
            (a, b), (c, d) = ((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(bounds, need, strict=True))
            if a < b and c < d:
                sender = min(ranks, key=lambda rank: load[rank])
                load[sender] += (b - a) * (d - c)
                result.append((sender, receiver, (a, b), (c, d)))
    return result


def _bounds(layout: Layout, rank: int, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Rows and columns of a rank's shard: independent of the library, for layouts with one mesh axis per dim."""
    at = dict(zip(layout.mesh.axes, [int(i[0]) for i in (layout.mesh.array == rank).nonzero()], strict=True))
    bounds = []
    for dim, size in enumerate(shape):
        axes = layout.spec[dim] if dim < len(layout.spec) else ()
        if not axes:
            bounds.append((0, size))
            continue
        axis = str(axes[0])
        chunk = -(-size // layout.mesh.axis_size(axis))
        bounds.append((min(chunk * at[axis], size), min(chunk * (at[axis] + 1), size)))
    return tuple(bounds)


def _local(layout: Layout, rank: int, shape: Sequence[int], rows: tuple[int, int], columns: tuple[int, int]) -> Slices:
    (row, _), (column, _) = _bounds(layout, rank, shape)
    return (slice(rows[0] - row, rows[1] - row), slice(columns[0] - column, columns[1] - column))


class Checkpoint:
    """torch's distributed checkpoint, saved to shared memory and loaded from there."""

    def __init__(self, case: LoopbackCase, rank: int, source: Any, out: Any) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor

        self.rank, self.source, self.out = rank, source, out
        shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
        name = [tempfile.mkdtemp(dir=shared) if rank == 0 else None]
        dist.broadcast_object_list(name, 0)
        self.folder = str(name[0])
        src_mesh = DeviceMesh("cpu", case.src.mesh.array.tolist())
        dst_mesh = DeviceMesh("cpu", case.dst.mesh.array.tolist())
        self.groups = [dist.new_group(list(layout.ranks)) for layout in (case.src, case.dst)]
        shape, stride = torch.Size(case.shape), (case.shape[1], 1)
        if source is not None:
            self.src = DTensor.from_local(
                source, src_mesh, case.src.to_placements(), run_check=False, shape=shape, stride=stride
            )
        if out is not None:
            self.dst = DTensor.from_local(
                out, dst_mesh, case.dst.to_placements(), run_check=False, shape=shape, stride=stride
            )

    def __call__(self) -> None:
        import torch.distributed.checkpoint as dcp

        if self.source is not None:
            dcp.save({"w": self.src}, checkpoint_id=self.folder, process_group=self.groups[0])
        dist.barrier()
        if self.out is not None:
            dcp.load({"w": self.dst}, checkpoint_id=self.folder, process_group=self.groups[1])
        dist.barrier()  # the next save overwrites these files

    def close(self) -> None:
        """Delete the checkpoint."""
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder)


def _repeat(contender: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        contender()


def _run_rank(rank: int, case: LoopbackCase, repeats: int, calls: int, everything: bool) -> dict[str, Any]:
    import warnings

    warnings.filterwarnings("ignore")  # other contenders warn; the tests turn our own warnings into errors
    source = shard_of_positions(case.src, rank, case.shape, "float32")
    expected = shard_of_positions(case.dst, rank, case.shape, "float32")
    out = None if expected is None else torch.zeros_like(expected)
    members = case.src.ranks + case.dst.ranks
    contenders: dict[str, Callable[[], Any]] = {}
    plan = reshard.make_plan(case.src, case.dst, case.shape, "float32")
    mover = reshard.Mover(plan) if rank in members else None
    contenders["ours (Mover)"] = lambda: mover and mover(source, out=out)
    contenders["ours (reshard)"] = lambda: rank in members and reshard.reshard(source, case.src, case.dst, out=out)
    contenders["point-to-point, whole"] = PointToPoint(case, rank, source, out, None)
    contenders["point-to-point, pieces"] = PointToPoint(case, rank, source, out, 4 * 2**20)
    if everything:
        spec = TensorSpec(case.shape, "float32", case.src, case.dst)
        contenders["full_tensor + broadcast"] = FullTensor([spec], rank, [source], [out])
        contenders["checkpoint (DCP)"] = Checkpoint(case, rank, source, out)
    wrong: dict[str, int] = dict.fromkeys(contenders, 0)

    def clear(name: str) -> None:
        if out is not None:
            out.zero_()

    def check(name: str) -> None:
        if expected is not None:
            wrong[name] += count_unlike(out, expected)

    turns = {name: functools.partial(_repeat, contender, calls) for name, contender in contenders.items()}
    label = f"turns of {case.name}"
    seconds = time_in_turns(turns, repeats, prepare=clear, check=check, show=rank == 0, label=label)
    for contender in contenders.values():
        if isinstance(contender, Checkpoint):
            contender.close()
    if mover is not None:
        mover.close()
    return {"seconds": seconds, "wrong": wrong, "staging": mover.staging_allocated_bytes if mover else 0}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--repeats", 9, "timed turns of each contender")
    add_number(parser, "--calls", 4, "calls of a contender in one turn")
    add_number(parser, "--mib", 64, "MiB of the tensor", high=4096)
    parser.add_argument("--case", action="append", help="run only cases with this text in the name; may be repeated")
    parser.add_argument("--quick", action="store_true", help="skip the contenders of torch")


def run(options: argparse.Namespace) -> int:
    """Run the cases and print a table; returns 1 if an element was wrong."""
    print(f"ms per call, medians of {options.repeats} turns of {options.calls} calls (min..max)")
    failed, scale = 0, 1000 / options.calls
    known = {case.name: case for case in cases(options.mib)}
    for case in map(known.__getitem__, select(known, options.case)):
        results = run_processes(
            _run_rank, 8, case, options.repeats, options.calls, not options.quick, timeout_seconds=900.0
        )
        seconds = slowest([result["seconds"] for result in results])
        median = medians_of(seconds)
        best = min(median["point-to-point, whole"], median["point-to-point, pieces"])
        print(f"{case.name}:")
        for name, times in seconds.items():
            wrong = sum(result["wrong"][name] for result in results)
            failed += wrong > 0
            print(
                f"  {name:26} {scale * median[name]:8.1f} ({scale * min(times):.1f}..{scale * max(times):.1f})"
                f"  {median[name] / best:6.2f} x point-to-point  {'ok' if not wrong else f'{wrong} WRONG'}"
            )
        staging = max(result["staging"] for result in results) / 2**20
        print(f"  staging buffers: at most {staging:.1f} MiB per rank", flush=True)
    return 1 if failed else 0
