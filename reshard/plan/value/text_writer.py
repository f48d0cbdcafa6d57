"""The lines of the text of a plan, which :meth:`Plan.to_text` puts together and :func:`reshard.parse_plan` reads back.

::

    plan broadcast_greedy staging_bytes=67108864
    topology nic_bytes_per_second=1250000000.0 hosts 0*4,1*4
    tensor 0 float32 [8, 8] from (0, -) on Mesh(0=2; ranks 0-1) to (-, 0) on Mesh(0=2; ranks 2-3)
    0: t0 [0:4, 0:4] 0 -> 2 splits 1x1 window 4
    1: t0 [4:8, 0:4] + t0 [4:8, 4:8] 1 -> 2 -> 3 splits 1x1 window 2

A topology that this short form cannot express is written as JSON. A tensor may have a name: ``named "x"``. Elements of
a block codec name the tensor that they code: ``int8x128 [8, 2] of float32 [8, 256]``.

The line of a transfer holds the id of its first message, its boxes, its tree, and:

- ``splits``: the number of chunks along each dim
- ``window``: the number of unfinished messages that its sender may have
- ``from 12`` (optional): the message that brings the data to the first sender; or ``gathered from 12,14``: the messages
  that bring boxes of it there, while the sender holds the other boxes
- ``after 7,9`` (optional): other messages that must finish before the transfer starts

The tree lists its edges in order. Consecutive edges that form a path are written as a chain: ``0 -> 2 -> 3, 2 -> 4``.
A plan in closed form has the line ``closed form of 64 messages`` in their place: its tensors and its topology say all.
Lines that begin with # are comments.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

from reshard.plan.value.transfers import GATHERED, PlanTransfers
from reshard.sharding import TensorSpec, format_box
from reshard.topology import Topology, topology_to_json

#: Latencies of the topology. The text omits zeros.
LATENCIES = ("latency_seconds", "inside_latency_seconds")


def format_tensor(number: int, spec: TensorSpec) -> list[str]:
    """The line of a tensor, and comments on its encoding."""
    name = f" named {json.dumps(spec.name)}" if spec.name is not None else ""
    coding = f" of {spec.coding}" if spec.coding is not None else ""
    lines = [f"tensor {number} {spec.dtype} {list(spec.shape)}{coding}{name} from {spec.src} to {spec.dst}"]
    if spec.raw_because:
        lines.append(f"# tensor {number} is not encoded: {spec.raw_because}")
    if spec.encoded_because:
        lines.append(f"# tensor {number} is encoded: {spec.encoded_because}")
    if spec.coding is not None:
        encoded_bytes = _encoded_bytes(spec)
        lines.append(
            f"# tensor {number}: encoded shards take up to {encoded_bytes} bytes of a rank beyond staging_bytes"
        )
    return lines


def _encoded_bytes(spec: TensorSpec) -> int:
    """The most bytes that a rank allocates for the encoding of its source and destination shards."""
    sides = (spec.src_tiles, spec.dst_tiles)
    ranks = {rank for side in sides for rank in side.layout.ranks}
    held = ([math.prod(side.local_shape(rank)) for side in sides if rank in side.layout.ranks] for rank in ranks)
    return max(map(sum, held)) * spec.itemsize


def format_transfer(tensors: Sequence[TensorSpec], transfers: PlanTransfers, transfer: int) -> str:
    """The line of a transfer, such as ``0: t0 [0:4, 0:1] 0 -> 2 splits 1x1 window 4``."""
    boxes = []
    first = int(transfers.first_box[transfer])
    for box in range(first, first + int(transfers.num_boxes[transfer])):
        tensor = int(transfers.box_tensor[box])
        ndim = tensors[tensor].ndim
        bounds = zip(transfers.box_start[box, :ndim].tolist(), transfers.box_stop[box, :ndim].tolist(), strict=True)
        boxes.append(f"t{tensor} {format_box(list(bounds))}")
    splits = "x".join(map(str, transfers.splits[transfer].tolist())) or "1"
    return (
        f"{transfers.first_message[transfer]}: {' + '.join(boxes)} {format_edges(transfers.edges_of(transfer))} "
        f"splits {splits} window {transfers.window[transfer]}{_format_dependencies(transfers, transfer)}"
    )


def _format_dependencies(transfers: PlanTransfers, transfer: int) -> str:
    """The optional end of a line, such as `` from 12 after 7,9``."""
    after = transfers.after[transfers.after_offsets[transfer] : transfers.after_offsets[transfer + 1]]
    if not len(after):
        return ""
    source = int(transfers.source[transfer])
    brings = after == source
    if source == GATHERED:
        sender = transfers.sender[transfers.edge_offsets[transfer]]
        brings = transfers.receiver[transfers.edge_offsets[after]] == sender
    sources, others = (transfers.first_message[after[chosen]].tolist() for chosen in (brings, ~brings))
    text = f" from {','.join(map(str, sources))}" if sources else ""
    text = f" gathered{text}" if source == GATHERED else text
    return text + (f" after {','.join(map(str, others))}" if others else "")


def format_edges(edges: Sequence[tuple[int, int]]) -> str:
    """The edges of a tree, such as ``0 -> 2 -> 3, 2 -> 4``."""
    text, last = "", None
    for sender, receiver in edges:
        if sender == last:
            text += f" -> {receiver}"
        else:
            text += f"{', ' if text else ''}{sender} -> {receiver}"
        last = receiver
    return text


def format_topology(topology: Topology) -> str:
    """The line of a topology: a rate, latencies and the number of ranks of each host, or JSON."""
    runs: list[list[int]] = []
    for host in topology.host_of_rank:
        if runs and runs[-1][0] == host:
            runs[-1][1] += 1
        else:
            runs.append([host, 1])
    hosts = ",".join(f"{host}*{count}" for host, count in runs)
    rate = topology.hosts[0].nics[0].egress_bytes_per_second
    numbers = {name: getattr(topology, name) for name in LATENCIES}
    if topology != replace(Topology.uniform(topology.host_of_rank, rate), **numbers):
        return f"topology {json.dumps(topology_to_json(topology))}"
    latencies = "".join(f"{name}={number!r} " for name, number in numbers.items() if number)
    return f"topology nic_bytes_per_second={rate!r} {latencies}hosts {hosts}"
