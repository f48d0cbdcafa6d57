"""Digests of what passes between ranks: whether each shard holds what its sources held, and if not, who is wrong.

The sender of a message takes a digest of the bytes that it sends, be they its own or passed on; the receiver takes one
of what lies in its shard afterwards, or in its buffer if it only passes it on. When a transfer is over the first rank
compares both ends of every hop, and what came in with what went on, and tells all ranks the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from reshard.errors import VerificationError
from reshard.plan.messages import Message, expand_messages, tabulate_messages
from reshard.plan.model import Plan
from reshard.ragged import NO_RANK
from reshard.runtime.cpu.staging import CastSource, flat_bytes
from reshard.sharding.layout import format_box

#: More than any fault takes to say.
MOST_TEXT_BYTES = 2**20


class Digests:
    """Those of one rank in one transfer, by message id."""

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        self.landed: dict[int, int] = {}
        self.replicas: list[int] = []  # of source tiles that other ranks hold too, see Replicas


def digest_of(parts: Sequence[torch.Tensor]) -> int:
    """The digest of views one after the other, each in row-major order; of packed bytes the same."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(flat_bytes(part.contiguous()).numpy())
    return digest.intdigest()


def is_copy_of(target: torch.Tensor, source: torch.Tensor | CastSource) -> bool:
    """Whether a target holds what was copied into it; NaN casts to any NaN, as torch's kernels differ there."""
    if not isinstance(source, CastSource):
        return digest_of([target]) == digest_of([source])
    found, wanted = target.view(source.dtype), source.array.to(source.dtype)
    if source.dtype.is_floating_point:
        found, wanted = found.float(), wanted.float()
        return bool(((found == wanted) | (found.isnan() & wanted.isnan())).all())
    return digest_of([found]) == digest_of([wanted])


#: Bytes of a device array that :func:`digest_array` looks at together.
_CHUNK_BYTES = 2**24
#: Odd numbers of 64 bits, as signed ones (from splitmix64).
_STEP, _FACTOR = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


def digest_array(array: torch.Tensor) -> int:
    """The digest of an array's elements in row-major order; of arrays on one type of device, equal for equal bytes."""
    if array.device.type == "cpu":
        return digest_of([array])
    return _digest_on_device(flat_bytes(array.contiguous()))


def _digest_on_device(data: torch.Tensor) -> int:
    """As :func:`digest_of`, of flat bytes, worked out where they are: a sum of words mixed with their positions."""
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for first in range(0, data.numel(), _CHUNK_BYTES):
        part = data[first : first + _CHUNK_BYTES]
        if part.numel() % 8 or part.storage_offset() % 8:
            part = torch.nn.functional.pad(part, (0, -part.numel() % 8))
        words = part.view(torch.int64)
        place = torch.arange(first // 8 + 1, first // 8 + 1 + words.numel(), device=data.device)
        mixed = (words ^ (place * _STEP)) * _FACTOR
        mixed ^= mixed >> 29
        total += (mixed * _STEP).sum()
    return (int(total) ^ data.numel()) % 2**64


def find_fault(plan: Plan, sent: Mapping[int, int], landed: Mapping[int, int]) -> str | None:
    """The first hop of a plan at which bytes changed, in words; None if there is none.

    Args:
        sent, landed: digests of all messages, of all ranks.
    """
    roots: dict[int, int] = {}
    for message in expand_messages(plan):
        if message.sender == message.receiver:
            continue
        ident, source = message.id, message.source
        root = roots[ident] = message.sender if source is None else roots[source]
        if source is not None and landed.get(source) != sent.get(ident):
            return (
                f"{_region(plan, message)} from rank {root}: rank {message.sender} passed on other bytes to rank "
                f"{message.receiver} than it had received (message {ident})"
            )
        if sent.get(ident) != landed.get(ident):
            return (
                f"{_region(plan, message)} from rank {root}: rank {message.receiver} does not hold what rank "
                f"{message.sender} sent (message {ident})"
            )
    return None


def describe_copy(plan: Plan, rank: int, message_id: int) -> str:
    """What a copy inside a rank that went wrong was of."""
    message = next(message for message in expand_messages(plan) if message.id == message_id)
    return f"{_region(plan, message)}: rank {rank} does not hold what it copied itself (message {message_id})"


def _region(plan: Plan, message: Message) -> str:
    boxes = []
    for tensor, start, stop in message.boxes[:3]:
        name = plan.tensors[tensor].name
        of = f" of {name!r}" if name is not None else ""
        boxes.append(f"{format_box([*zip(start, stop, strict=True)])}{of}")
    more = f" and {len(message.boxes) - 3} more" if len(message.boxes) > 3 else ""
    return ", ".join(boxes) + more


class Replicas:
    """Source tiles of a plan that several ranks hold, which must be equal."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        entries = [np.zeros((0, 4), dtype=np.int64)]
        for tensor, spec in enumerate(plan.tensors):
            ranks = spec.src_shards.ranks
            tiles = np.flatnonzero((ranks != NO_RANK).sum(axis=1) > 1)
            tile, replica = np.nonzero(ranks[tiles] != NO_RANK)
            tile = tiles[tile]
            entries.append(np.stack([np.full(len(tile), tensor), tile, replica, ranks[tile, replica]], axis=1))
        self.tensor, self.tile, self.replica, self.rank = np.concatenate(entries).T

    def of(self, rank: int) -> np.ndarray:
        """Entries of a rank."""
        return np.flatnonzero(self.rank == rank)

    def digest(self, rank: int, src: Sequence[torch.Tensor | CastSource | None]) -> list[int]:
        """The digest of each entry of a rank, from its source shards."""
        found = []
        for entry in self.of(rank).tolist():
            shards, tile = self.plan.tensors[self.tensor[entry]].src_shards, self.tile[entry]
            first = shards.local[tile, self.replica[entry]]
            last = first + shards.stop[tile] - shards.start[tile]
            array = src[self.tensor[entry]]
            assert array is not None
            if isinstance(array, CastSource):
                array = array.array
            found.append(digest_of([array[(..., *map(slice, first.tolist(), last.tolist()))]]))
        return found

    def find_fault(self, digests: Mapping[int, Sequence[int]]) -> str | None:
        """The first tile of which two ranks hold different elements, in words; None if there is none."""
        value = np.zeros(len(self.rank), dtype=np.uint64)
        for rank, found in digests.items():
            value[self.of(rank)] = found
        is_first = np.ones(len(value), dtype=bool)
        is_first[1:] = (self.tensor[1:] != self.tensor[:-1]) | (self.tile[1:] != self.tile[:-1])
        first = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
        wrong = np.flatnonzero(value != value[first])
        if not len(wrong):
            return None
        spec, tile = self.plan.tensors[self.tensor[wrong[0]]], self.tile[wrong[0]]
        box = format_box([*zip(spec.src_shards.start[tile].tolist(), spec.src_shards.stop[tile].tolist(), strict=True)])
        name = f" of {spec.name!r}" if spec.name is not None else ""
        return (
            f"the source {box}{name} differs between its replicas: rank {self.rank[wrong[0]]} holds other elements "
            f"than rank {self.rank[first[wrong[0]]]}"
        )


class Hops:
    """The messages between ranks of a plan, and which digests of them each rank has."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        messages = tabulate_messages(plan)
        moves = messages.sender != messages.receiver
        place = np.cumsum(moves) - 1
        self.ident, self.sender, self.receiver = messages.id[moves], messages.sender[moves], messages.receiver[moves]
        source = messages.source[moves]
        self.passed_on = np.flatnonzero((source >= 0) & moves[source])
        self.came_as = place[source[self.passed_on]]
        self.replicas = Replicas(plan)

    def of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of what a rank sends, and of what it receives."""
        return np.flatnonzero(self.sender == rank), np.flatnonzero(self.receiver == rank)

    def pack(self, rank: int, digests: Digests) -> torch.Tensor:
        """``(sent + received + replicas,)`` int64, the digests of a rank."""
        sent, landed = (self.ident[rows].tolist() for rows in self.of(rank))
        found = [digests.sent[i] for i in sent] + [digests.landed[i] for i in landed] + digests.replicas
        return torch.from_numpy(np.array(found, dtype=np.uint64).view(np.int64))

    def count(self, rank: int) -> int:
        """How many digests a rank packs."""
        return sum(map(len, self.of(rank))) + len(self.replicas.of(rank))

    def find_fault(self, digests: Mapping[int, torch.Tensor]) -> str | None:
        """The first replica that differs, or as :func:`find_fault`, from what all ranks packed."""
        sent, landed = (np.zeros(len(self.ident), dtype=np.uint64) for _ in range(2))
        replicas = {}
        for rank, packed in digests.items():
            sends, lands = self.of(rank)
            values = packed.numpy().view(np.uint64)
            sent[sends], landed[lands] = values[: len(sends)], values[len(sends) : len(sends) + len(lands)]
            replicas[rank] = values[len(sends) + len(lands) :]
        fault = self.replicas.find_fault(replicas)
        if fault is not None:
            return fault
        if (sent == landed).all() and (landed[self.came_as] == sent[self.passed_on]).all():
            return None
        by_id = (dict(zip(self.ident.tolist(), side.tolist(), strict=True)) for side in (sent, landed))
        return find_fault(self.plan, *by_id)


def compare_digests(
    hops: Hops, rank: int, digests: Digests, transport: Any, tag: int, wait: Callable[[Any, int], None]
) -> None:
    """Every rank of a plan calls when it has all that it needs.

    Args:
        transport: between the ranks; ``tag`` is of this comparison alone. wait: for a work with a rank.

    Raises:
        VerificationError: somewhere bytes changed; alike on all ranks.
    """
    first, *others = sorted(hops.plan.ranks)
    own = hops.pack(rank, digests)
    if rank != first:
        if len(own):
            wait(transport.send(flat_bytes(own), first, tag), first)
        text = _recv_text(transport, first, tag, wait)
    else:
        tables = {other: torch.zeros(hops.count(other), dtype=torch.int64) for other in others}
        works = [
            (transport.recv(flat_bytes(table), other, tag), other) for other, table in tables.items() if len(table)
        ]
        for work, other in works:
            wait(work, other)
        text = hops.find_fault({first: own, **tables}) or ""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        works = [(transport.send(flat_bytes(size), other, tag), other) for other in others]
        if len(data):
            works += [(transport.send(data, other, tag), other) for other in others]
        for work, other in works:
            wait(work, other)
    if text:
        raise VerificationError(text)


def _recv_text(transport: Any, rank: int, tag: int, wait: Callable[[Any, int], None]) -> str:
    count = torch.zeros(1, dtype=torch.int64)
    wait(transport.recv(flat_bytes(count), rank, tag), rank)
    if not 0 <= int(count) <= MOST_TEXT_BYTES:
        raise ConnectionError(
            f"rank {rank} says what it found in {int(count)} bytes: something changed them on the way"
        )
    data = torch.zeros(int(count), dtype=torch.uint8)
    if len(data):
        wait(transport.recv(data, rank, tag), rank)
    return bytes(data.tolist()).decode()
