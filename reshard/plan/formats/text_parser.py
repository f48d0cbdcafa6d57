"""Parser of plan texts; :mod:`reshard.plan.value.text_writer` describes the format."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reshard.errors import PlanError, ReshardError
from reshard.plan.value.plan import Plan
from reshard.plan.value.rotation_plan import ROTATION, RotationPlan
from reshard.plan.value.text_writer import LATENCIES
from reshard.plan.value.transfers import GATHERED, PlanTransfers
from reshard.sharding import (
    AnyLayout,
    Box,
    Coding,
    Layout,
    Mesh,
    RegionLayout,
    TensorSpec,
    parse_axis_names,
    parse_ranks,
)
from reshard.topology import Topology, topology_from_json

MAX_TEXT_BYTES = 2**30

_INT = r"[0-9]{1,19}"
_PLAN = re.compile(rf"plan (\S+) staging_bytes=({_INT})")
_NUMBER = r"([0-9.e+-]{1,40})"
_TOPOLOGY = re.compile(
    rf"topology (?:nic_bytes_per_second={_NUMBER} {''.join(f'(?:{name}={_NUMBER} )?' for name in LATENCIES)}"
    r"hosts ([0-9*,]*)|(\{.*\}))"
)
_TENSOR = re.compile(
    rf"tensor ({_INT}) ([\w-]+) (\[[0-9, ]*\])(?: of (\w+) (\[[0-9, ]*\]))?(?: named (\"(?:[^\"\\]|\\.)*\"))? from (.*)"
)
_TRANSFER = re.compile(
    rf"({_INT}): (t.*?\]) ([0-9 ,>-]+) splits ([0-9x]+) window ({_INT})"
    r"(?: (gathered )?from ([0-9,]+))?(?: after ([0-9,]+))?"
)
_CLOSED = re.compile(rf"closed form of ({_INT}) messages")
_BOX = re.compile(rf"t({_INT}) \[([0-9:, ]*)\]")


def parse_plan(text: str) -> Plan:
    """Parse a text from ``str(plan)``. Returns a plan that is equal to the original.

    Raises:
        PlanError: the text is not a plan; the error names the line.
    """
    if not isinstance(text, str):
        raise PlanError(f"parse_plan needs a str, not {type(text).__name__}")
    if len(text) > MAX_TEXT_BYTES:
        raise PlanError(f"the text has {len(text)} characters; a plan has at most {MAX_TEXT_BYTES}")
    lines = [line.strip() for line in text.splitlines()]
    numbered = [(i + 1, line) for i, line in enumerate(lines) if line and not line.startswith("#")]
    at = 0
    try:
        head = _expect(_PLAN, numbered, at := 0)
        topology = _parse_topology(_expect(_TOPOLOGY, numbered, at := 1))
        at = 2
        tensors: list[TensorSpec] = []
        while at < len(numbered) and numbered[at][1].startswith("tensor "):
            match = _expect(_TENSOR, numbered, at)
            if int(match[1]) != len(tensors):
                raise PlanError(f"expected tensor {len(tensors)}, found tensor {match[1]}")
            src, middle, dst = match[7].partition(") to ")
            if not middle:
                raise PlanError("a tensor needs 'from LAYOUT to LAYOUT'")
            tensors.append(
                TensorSpec(
                    tuple(json.loads(match[3])),
                    match[2],
                    parse_layout(src + ")"),
                    parse_layout(dst),
                    None if match[6] is None else json.loads(match[6]),
                    None if match[4] is None else Coding(tuple(json.loads(match[5])), match[4]),
                )
            )
            at += 1
        if not tensors:
            raise PlanError("a plan needs at least one tensor")
        if at == len(numbered) - 1 and (closed := _CLOSED.fullmatch(numbered[at][1])):
            return _make_rotation(tensors, topology, head, int(closed[1]))
        rows = []
        for index in range(at, len(numbered)):
            at = index
            rows.append(_parse_transfer(_expect(_TRANSFER, numbered, at), tensors))
        transfers = build_transfers(rows, max(spec.ndim for spec in tensors))
        for index, row in enumerate(rows):
            if row.first_message != transfers.first_message[index]:
                at = at - len(rows) + 1 + index
                raise PlanError(f"the first message has id {row.first_message}, not {transfers.first_message[index]}")
        plan = Plan(tuple(tensors), topology, head[1], transfers, int(head[2]))
        topology.check_covers(plan.ranks)
        _check_moves(plan)
        return plan
    except (ReshardError, ValueError, OverflowError, RecursionError) as error:
        line = numbered[min(at, len(numbered) - 1)][0] if numbered else 0
        raise PlanError(f"line {line}: {error}") from None


def _make_rotation(
    tensors: list[TensorSpec], topology: Topology, head: re.Match[str], num_messages: int
) -> RotationPlan:
    """The plan in closed form of a text, checked against its strategy and its number of messages."""
    if head[1] != ROTATION:
        raise PlanError(f"a plan in closed form has the strategy {ROTATION}, not {head[1]}")
    plan = RotationPlan(tensors, topology, int(head[2]))
    if plan.num_messages != num_messages:
        raise PlanError(f"the closed form has {plan.num_messages} messages, not {num_messages}")
    return plan


def _check_moves(plan: Plan) -> None:
    """Raise PlanError if a plan has no transfers although a rank needs data."""
    if len(plan.transfers):
        return
    for spec in plan.tensors:
        if len(spec.dst_tiles.start):
            name = f" of {spec.name}" if spec.name is not None else ""
            raise PlanError(
                f"the plan has no transfers, but rank {spec.dst_tiles.ranks[0, 0]} needs "
                f"{spec.dst_tiles.numel[0]} elements{name}"
            )


def _expect(pattern: re.Pattern[str], lines: list[tuple[int, str]], at: int) -> re.Match[str]:
    match = pattern.fullmatch(lines[at][1]) if at < len(lines) else None
    if match is None:
        word = pattern.pattern.split()[0].lstrip("(")
        rest = repr(lines[at][1][:80]) if at < len(lines) else "the end of the text"
        raise PlanError(f"expected a line such as {word!r}, found {rest}")
    return match


def read_plan_topology(data: Any) -> Topology:
    """Like :func:`topology_from_json`, but an omitted latency is 0: earlier versions did not write latencies of 0."""
    return topology_from_json({**dict.fromkeys(LATENCIES, 0), **data} if isinstance(data, dict) else data)


def _parse_topology(match: re.Match[str]) -> Topology:
    if match[5]:
        return read_plan_topology(json.loads(match[5]))
    hosts: list[int] = []
    for run in match[4].split(",") if match[4] else []:
        host, _, count = run.partition("*")
        if int(count) > 2**24 or len(hosts) + int(count) > 2**24:
            raise PlanError("a topology has at most 2**24 ranks")
        hosts.extend([int(host)] * int(count))
    numbers: dict[str, Any] = {name: float(match[2 + i] or 0) for i, name in enumerate(LATENCIES)}
    return replace(Topology.uniform(hosts, float(match[1])), **numbers)


@dataclass(frozen=True)
class TransferRow:
    """One parsed transfer.

    Attributes:
        first_message: id of its first message.
        boxes: ``(tensor, box)`` of each box.
        edges: ``(sender, receiver)`` of each edge of its tree.
        splits: number of chunks along each dim.
        window: number of unfinished messages that the sender may have.
        sources: ids of the first messages of the transfers that bring the data: one, or several if it is gathered.
        is_gathered: whether each of them brings some of the data only.
        after: ids of the first messages of the transfers that must finish before.
    """

    first_message: int
    boxes: list[tuple[int, Box]]
    edges: list[tuple[int, int]]
    splits: list[int]
    window: int
    sources: list[int]
    is_gathered: bool
    after: list[int]


def _parse_transfer(match: re.Match[str], tensors: Sequence[TensorSpec]) -> TransferRow:
    boxes: list[tuple[int, Box]] = []
    for part in match[2].split(" + "):
        parsed = _BOX.fullmatch(part)
        if parsed is None:
            raise PlanError(f"{part[:80]!r} is not a box such as t0 [0:4, 0:1]")
        tensor = int(parsed[1])
        if tensor >= len(tensors):
            raise PlanError(f"box {part} names tensor {tensor}, but there are {len(tensors)}")
        bounds = []
        for pair in parsed[2].split(",") if parsed[2].strip() else []:
            lo, colon, hi = pair.strip().partition(":")
            if not colon:
                raise PlanError(f"{pair!r} is not start:stop")
            bounds.append((int(lo), int(hi)))
        if len(bounds) != tensors[tensor].ndim or any(
            not 0 <= lo < hi <= size for (lo, hi), size in zip(bounds, tensors[tensor].shape, strict=True)
        ):
            raise PlanError(f"box {part} is empty or outside shape {list(tensors[tensor].shape)}")
        boxes.append((tensor, tuple(bounds)))
    edges: list[tuple[int, int]] = []
    for path in match[3].split(","):
        ranks = [int(rank) for rank in path.split("->")]
        if len(ranks) < 2:
            raise PlanError(f"path {path.strip()!r} has no receiver")
        edges.extend(itertools.pairwise(ranks))
    splits = [int(split) for split in match[4].split("x")]
    sources, after = ([int(ident) for ident in ids.split(",")] if ids else [] for ids in (match[7], match[8]))
    is_gathered = bool(match[6])
    if len(sources) > 1 and not is_gathered:
        raise PlanError(f"from {match[7][:80]}: only a gathered message comes from several")
    return TransferRow(int(match[1]), boxes, edges, splits, int(match[5]), sources, is_gathered, after)


def build_transfers(rows: Sequence[TransferRow], ndim: int) -> PlanTransfers:
    """Convert parsed transfers to arrays. ``ndim`` is the largest number of dims of any tensor.

    Raises:
        PlanError: splits do not fit the boxes, a window is less than 1, or ``sources`` or ``after`` is not the first
            message of an earlier transfer.
    """
    boxes = [box for row in rows for box in row.boxes]
    start = np.zeros((len(boxes), ndim), dtype=np.int64)
    stop = np.ones((len(boxes), ndim), dtype=np.int64)
    for i, (_, bounds) in enumerate(boxes):
        for dim, (lo, hi) in enumerate(bounds):
            start[i, dim], stop[i, dim] = lo, hi
    splits = np.ones((len(rows), ndim), dtype=np.int64)
    for i, row in enumerate(rows):
        given = row.splits if ndim else [1] * 0
        sizes = [hi - lo for lo, hi in row.boxes[0][1]] + [1] * (ndim - len(row.boxes[0][1]))
        if len(given) != ndim or any(not 1 <= n <= size for n, size in zip(given, sizes, strict=True)):
            raise PlanError(f"splits {'x'.join(map(str, row.splits))} do not fit a box of {sizes}")
        if len(row.boxes) > 1 and any(n != 1 for n in given):
            raise PlanError("the splits of a transfer of several boxes must all be 1")
        if row.window < 1:
            raise PlanError(f"window {row.window} must be at least 1")
        splits[i] = given
    edges = np.array([edge for row in rows for edge in row.edges], dtype=np.int64).reshape(-1, 2)
    row_of_message: dict[int, int] = {}
    after = []
    for i, row in enumerate(rows):
        named = [*row.sources, *row.after]
        for ident in named:
            if ident not in row_of_message:
                raise PlanError(f"message {ident} is not the first of a transfer before message {row.first_message}")
        after.append([row_of_message[ident] for ident in named])
        row_of_message[row.first_message] = i
    return PlanTransfers(
        box_offsets=np.cumsum([0] + [len(row.boxes) for row in rows]),
        box_tensor=np.array([tensor for tensor, _ in boxes], dtype=np.int64),
        box_start=start,
        box_stop=stop,
        edge_offsets=np.cumsum([0] + [len(row.edges) for row in rows]),
        sender=edges[:, 0],
        receiver=edges[:, 1],
        splits=splits,
        window=np.array([row.window for row in rows], dtype=np.int64),
        after_offsets=np.cumsum([0] + [len(row) for row in after]),
        after=np.array([i for row in after for i in row], dtype=np.int64),
        source=np.array(
            [GATHERED if row.is_gathered else row_of_message[row.sources[0]] if row.sources else -1 for row in rows],
            dtype=np.int64,
        ),
    )


_MESH = re.compile(r"Mesh\((?:([^;()]*); )?ranks ([0-9,-]*)\)")
_LAYOUT = re.compile(r"(\([^()]*\)) on (Mesh\(.*\))")
_REGIONS = re.compile(rf"Regions\(ndim=({_INT}) join=({_INT}); (.*)\)")


def parse_mesh(text: str) -> Mesh:
    """The inverse of ``str(mesh)``.

    Raises:
        PlanError: the text is not a mesh. MeshError: ranks or sizes are not valid.
    """
    match = _MESH.fullmatch(text)
    if match is None:
        raise PlanError(f"{text[:80]!r} is not a mesh such as Mesh(dp=2, tp=4; ranks 0-7)")
    sizes: dict[str, int] = {}
    for pair in match[1].split(", ") if match[1] else []:
        axis, equals, size = pair.partition("=")
        if not equals or axis in sizes or not re.fullmatch("[0-9]{1,18}", size):
            raise PlanError(f"{pair[:80]!r} is not an axis such as dp=2, or is repeated")
        sizes[axis] = int(size)
    return Mesh(parse_ranks(match[2]), sizes)


def parse_layout(text: str) -> AnyLayout:
    """The inverse of ``str(layout)``.

    Raises:
        PlanError: the text is not a layout. MeshError, LayoutError: a mesh, a spec or a region is not valid.
    """
    match = _LAYOUT.fullmatch(text)
    if match is not None:
        return Layout(parse_mesh(match[2]), parse_axis_names(match[1]))
    match = _REGIONS.fullmatch(text)
    if match is None:
        raise PlanError(f"{text[:80]!r} is not a layout")
    regions: dict[int, list[Box]] = {}
    for row in match[3].split("; "):
        rank, colon, boxes = row.partition(": ")
        if not colon or not re.fullmatch("[0-9]+", rank) or int(rank) in regions:
            raise PlanError(f"{row[:80]!r} is not 'rank: [0:4, 0:8] ...', or its rank is repeated")
        regions[int(rank)] = list(_parse_boxes(boxes))
    return RegionLayout(regions, join_dim=int(match[2]), ndim=int(match[1]))


def _parse_boxes(text: str) -> Iterator[Box]:
    if text == "none":
        return
    if not re.fullmatch(r"(\[(\d+:\d+(, *\d+:\d+)*)?\] ?)+", text, re.ASCII):
        raise PlanError(f"{text[:80]!r} is not a list of boxes such as [0:4, 0:8] [4:8, 0:8]")
    for inner in re.findall(r"\[([0-9:, ]*)\]", text):
        pairs = [pair.strip().partition(":") for pair in inner.split(",")] if inner.strip() else []
        yield tuple((int(lo), int(hi)) for lo, _, hi in pairs)
