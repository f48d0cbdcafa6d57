"""Digests that check that every destination shard equals its source, and otherwise name the ranks of the fault.

The sender of a message digests the bytes that it sends, its own or forwarded. The receiver digests the message's part
of its destination shard after unpacking; a relay has no such shard and digests its staging buffer. After the transfer,
the lowest rank of the plan compares the digests of both ends of every message, and of each forwarded message and the
message that brought its data. It sends the result to all ranks of the plan, so that all raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reshard.errors import VerificationError
from reshard.plan import Message, Plan, expand_messages, name_box, tabulate_messages
from reshard.ragged import NO_RANK
from reshard.runtime.array_bytes import digest_concatenated, flat_bytes
from reshard.runtime.cpu.staging import CastSource
from reshard.sharding import format_box

#: Longest result, in bytes, that a rank accepts from the lowest rank.
MAX_TEXT_BYTES = 2**20


class TransferDigests:
    """The digests of one rank in one transfer.

    Attributes:
        sent, received: digests by message id.
        replicas: digests of source tiles that other ranks also hold, from :class:`Replicas`.
    """

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.replicas: list[int] = []


def is_copy_of(target: torch.Tensor, source: torch.Tensor | CastSource) -> bool:
    """Whether a target equals its source. After a cast, any two NaNs count as equal: torch's kernels differ there."""
    if not isinstance(source, CastSource):
        return digest_concatenated([target]) == digest_concatenated([source])
    actual, expected = target.view(source.dtype), source.array.to(source.dtype)
    if source.dtype.is_floating_point:
        actual, expected = actual.float(), expected.float()
        return bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())
    return digest_concatenated([actual]) == digest_concatenated([expected])


def find_fault(plan: Plan, sent: Mapping[int, int], received: Mapping[int, int]) -> str | None:
    """Describe the first message of a plan whose bytes changed; None if there is none.

    Args:
        sent, received: digests at the sender and at the receiver of every message, by id.
    """
    roots: dict[int, int] = {}
    for message in expand_messages(plan):
        if message.sender == message.receiver:
            continue
        ident, source = message.id, message.source
        root = roots[ident] = message.sender if source is None else roots[source]
        if source is not None and received.get(source) != sent.get(ident):
            return (
                f"{_boxes_of(plan, message)} from rank {root}: rank {message.sender} passed on other bytes to rank "
                f"{message.receiver} than it had received (message {ident})"
            )
        if sent.get(ident) != received.get(ident):
            return (
                f"{_boxes_of(plan, message)} from rank {root}: rank {message.receiver} does not hold what rank "
                f"{message.sender} sent (message {ident})"
            )
    return None


def describe_copy(plan: Plan, rank: int, box_id: int) -> str:
    """Describe a local copy that differs from its source, or a gathered message that differs from what was received.

    Each box of a local message is one copy, with a box id.
    """
    message = next(m for m in expand_messages(plan, rank) if m.id <= box_id < m.id + len(m.boxes))
    if message.gathered:
        return (
            f"{_boxes_of(plan, message)}: rank {rank} gathered other bytes than it had received (message {message.id})"
        )
    box = _describe_box(plan, *message.boxes[box_id - message.id])
    name = name_box(message.id, box_id, len(message.boxes))
    return f"{box}: rank {rank} does not hold what it copied itself ({name})"


def _describe_box(plan: Plan, tensor: int, start: Sequence[int], stop: Sequence[int]) -> str:
    name = plan.tensors[tensor].name
    suffix = f" of {name!r}" if name is not None else ""
    return f"{format_box([*zip(start, stop, strict=True)])}{suffix}"


def _boxes_of(plan: Plan, message: Message) -> str:
    """The boxes of a message, at most three of them."""
    boxes = [_describe_box(plan, *box) for box in message.boxes[:3]]
    more = f" and {len(message.boxes) - 3} more" if len(message.boxes) > 3 else ""
    return ", ".join(boxes) + more


class Replicas:
    """Source tiles that several ranks hold, and that must be equal there. One entry per tile and holder.

    Attributes:
        tensor, tile, replica, rank: ``(entries,)``: index of the tensor, of its tile and of the holder, and the rank.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        entries = [np.zeros((0, 4), dtype=np.int64)]
        for tensor, spec in enumerate(plan.tensors):
            ranks = spec.src_tiles.ranks
            tiles = np.flatnonzero((ranks != NO_RANK).sum(axis=1) > 1)
            tile, replica = np.nonzero(ranks[tiles] != NO_RANK)
            tile = tiles[tile]
            entries.append(np.stack([np.full(len(tile), tensor), tile, replica, ranks[tile, replica]], axis=1))
        self.tensor, self.tile, self.replica, self.rank = np.concatenate(entries).T

    def entries_of(self, rank: int) -> np.ndarray:
        """Indices of a rank's entries."""
        return np.flatnonzero(self.rank == rank)

    def digest_replicas(self, rank: int, src: Sequence[torch.Tensor | CastSource | None]) -> list[int]:
        """The digest of each entry of a rank, taken from its source shards."""
        digests = []
        for entry in self.entries_of(rank).tolist():
            shards, tile = self.plan.tensors[self.tensor[entry]].src_tiles, self.tile[entry]
            first = shards.local[tile, self.replica[entry]]
            last = first + shards.stop[tile] - shards.start[tile]
            array = src[self.tensor[entry]]
            assert array is not None
            if isinstance(array, CastSource):
                array = array.array
            at = (*map(slice, first.tolist(), last.tolist()), ...)  # an encoded array has one more dim, of bytes
            digests.append(digest_concatenated([array[at]]))
        return digests

    def find_fault(self, digests: Mapping[int, Sequence[int]]) -> str | None:
        """Describe the first tile of which two ranks hold different elements; None if there is none.

        Args:
            digests: what :meth:`digest_replicas` returned on each rank.
        """
        value = np.zeros(len(self.rank), dtype=np.uint64)
        for rank, digest in digests.items():
            value[self.entries_of(rank)] = digest
        is_first = np.ones(len(value), dtype=bool)
        is_first[1:] = (self.tensor[1:] != self.tensor[:-1]) | (self.tile[1:] != self.tile[:-1])
        first = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
        wrong = np.flatnonzero(value != value[first])
        if not len(wrong):
            return None
        spec, tile = self.plan.tensors[self.tensor[wrong[0]]], self.tile[wrong[0]]
        box = format_box([*zip(spec.src_tiles.start[tile].tolist(), spec.src_tiles.stop[tile].tolist(), strict=True)])
        name = f" of {spec.name!r}" if spec.name is not None else ""
        return (
            f"the source {box}{name} differs between its replicas: rank {self.rank[wrong[0]]} holds other elements "
            f"than rank {self.rank[first[wrong[0]]]}"
        )


class MessageDigests:
    """The messages of a plan between different ranks, as columns, and the order of each rank's packed digests.

    Attributes:
        ident, sender, receiver: ``(messages,)``.
        forwards: row of each message that forwards data.
        brought_by: row of the message that brought that data.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        messages = tabulate_messages(plan)
        moves = messages.sender != messages.receiver
        row = np.cumsum(moves) - 1
        self.ident, self.sender, self.receiver = messages.id[moves], messages.sender[moves], messages.receiver[moves]
        source = messages.source[moves]  # the rank that gathers a message compares it with what it received
        self.forwards = np.flatnonzero((source >= 0) & moves[source])
        self.brought_by = row[source[self.forwards]]
        self.replicas = Replicas(plan)

    def rows_of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the messages that a rank sends, and of messages that it receives."""
        return np.flatnonzero(self.sender == rank), np.flatnonzero(self.receiver == rank)

    def pack(self, rank: int, digests: TransferDigests) -> torch.Tensor:
        """The digests of a rank as one array, int64 of shape ``(sent + received + replicas,)``."""
        sent, received = (self.ident[rows].tolist() for rows in self.rows_of(rank))
        values = [digests.sent[i] for i in sent] + [digests.received[i] for i in received] + digests.replicas
        return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64))

    def count(self, rank: int) -> int:
        """Number of digests that a rank packs."""
        return sum(map(len, self.rows_of(rank))) + len(self.replicas.entries_of(rank))

    def find_fault(self, digests: Mapping[int, torch.Tensor]) -> str | None:
        """Describe the first replica that differs, or else the first message that changed; None if there is neither.

        Args:
            digests: what :meth:`pack` returned on each rank.
        """
        sent, received = (np.zeros(len(self.ident), dtype=np.uint64) for _ in range(2))
        replicas = {}
        for rank, packed in digests.items():
            sends, recvs = self.rows_of(rank)
            values = packed.numpy().view(np.uint64)
            sent[sends], received[recvs] = values[: len(sends)], values[len(sends) : len(sends) + len(recvs)]
            replicas[rank] = values[len(sends) + len(recvs) :]
        fault = self.replicas.find_fault(replicas)
        if fault is not None:
            return fault
        if (sent == received).all() and (received[self.brought_by] == sent[self.forwards]).all():
            return None
        by_id = (dict(zip(self.ident.tolist(), side.tolist(), strict=True)) for side in (sent, received))
        return find_fault(self.plan, *by_id)


def compare_digests(
    messages: MessageDigests,
    rank: int,
    digests: TransferDigests,
    transport: Any,
    tag: int,
    wait: Callable[[Any, int], None],
) -> None:
    """Compare the digests of all ranks after a transfer. Every rank of the plan must call this.

    Args:
        messages: the messages of the plan.
        rank: this rank.
        digests: digests of this rank.
        transport: sends and receives.
        tag: no other messages use it.
        wait: ``wait(work, rank)`` waits for a send to a rank, or for a receive from it.

    Raises:
        VerificationError: bytes changed, or replicas differ; the same error on all ranks.
        ConnectionError: the size of the result was corrupted.
    """
    first, *others = sorted(messages.plan.ranks)
    own = messages.pack(rank, digests)
    if rank != first:
        if len(own):
            wait(transport.send(flat_bytes(own), first, tag), first)
        text = _recv_text(transport, first, tag, wait)
    else:
        tables = {other: torch.zeros(messages.count(other), dtype=torch.int64, device="cpu") for other in others}
        works = [
            (transport.recv(flat_bytes(table), other, tag), other) for other, table in tables.items() if len(table)
        ]
        for work, other in works:
            wait(work, other)
        text = messages.find_fault({first: own, **tables}) or ""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
        size = torch.tensor([len(data)], device="cpu")
        works = [(transport.send(flat_bytes(size), other, tag), other) for other in others]
        if len(data):
            works += [(transport.send(data, other, tag), other) for other in others]
        for work, other in works:
            wait(work, other)
    if text:
        raise VerificationError(text)


def _recv_text(transport: Any, rank: int, tag: int, wait: Callable[[Any, int], None]) -> str:
    count = torch.zeros(1, dtype=torch.int64, device="cpu")
    wait(transport.recv(flat_bytes(count), rank, tag), rank)
    if not 0 <= int(count) <= MAX_TEXT_BYTES:
        raise ConnectionError(
            f"rank {rank} announced a verification result of {int(count)} bytes, outside 0 to {MAX_TEXT_BYTES}: the "
            "count was corrupted on the way"
        )
    data = torch.zeros(int(count), dtype=torch.uint8, device="cpu")
    if len(data):
        wait(transport.recv(data, rank, tag), rank)
    return bytes(data.tolist()).decode()
