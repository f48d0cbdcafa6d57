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
from reshard.layout import format_box
from reshard.plan import Message, Plan, expand_messages
from reshard.staging import flat_bytes

_MASK = 2**64 - 1


class Digests:
    """Those of one rank in one transfer, by message id."""

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        self.landed: dict[int, int] = {}

    def to_array(self) -> torch.Tensor:
        """``(n, 3)`` int64: message, 1 if it was sent, digest."""
        rows = [
            (ident, int(of is self.sent), digest) for of in (self.sent, self.landed) for ident, digest in of.items()
        ]
        return torch.from_numpy(np.array(rows, dtype=np.uint64).reshape(-1, 3).view(np.int64))


def digest_of(parts: Sequence[torch.Tensor]) -> int:
    """The digest of views one after the other, each in row-major order; of packed bytes the same."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(flat_bytes(part.contiguous()).numpy())
    return digest.intdigest()


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
        moved = source is not None and source in roots
        root = roots[ident] = roots[source] if moved else message.sender  # type: ignore[index]
        if moved and landed.get(source) != sent.get(ident):  # type: ignore[arg-type]
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


def _region(plan: Plan, message: Message) -> str:
    boxes = []
    for tensor, start, stop in message.boxes[:3]:
        name = plan.tensors[tensor].name
        of = f" of {name!r}" if name is not None else ""
        boxes.append(f"{format_box([*zip(start, stop, strict=True)])}{of}")
    more = f" and {len(message.boxes) - 3} more" if len(message.boxes) > 3 else ""
    return ", ".join(boxes) + more


def compare_digests(
    plan: Plan, rank: int, digests: Digests, transport: Any, tag: int, wait: Callable[[Any], None]
) -> None:
    """Every rank of a plan calls when it has all that it needs.

    Args:
        transport: between the ranks; ``tag`` is of this comparison alone. wait: for a work of the transport.

    Raises:
        VerificationError: somewhere bytes changed; alike on all ranks.
    """
    first, *others = sorted(plan.ranks)
    own = digests.to_array()
    if rank != first:
        for buffer in (torch.tensor([len(own)]), own):
            if buffer.numel():
                wait(transport.send(flat_bytes(buffer), first, tag))
        text = _recv_text(transport, first, tag, wait)
    else:
        tables = [own]
        for other in others:
            count = torch.zeros(1, dtype=torch.int64)
            wait(transport.recv(flat_bytes(count), other, tag))
            table = torch.zeros((int(count), 3), dtype=torch.int64)
            if len(table):
                wait(transport.recv(flat_bytes(table), other, tag))
            tables.append(table)
        rows = torch.cat(tables).tolist()
        sent, landed = ({i: digest & _MASK for i, is_sent, digest in rows if is_sent == side} for side in (1, 0))
        text = find_fault(plan, sent, landed) or ""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        for other in others:
            wait(transport.send(flat_bytes(torch.tensor([len(data)])), other, tag))
            if len(data):
                wait(transport.send(data, other, tag))
    if text:
        raise VerificationError(text)


def _recv_text(transport: Any, rank: int, tag: int, wait: Callable[[Any], None]) -> str:
    count = torch.zeros(1, dtype=torch.int64)
    wait(transport.recv(flat_bytes(count), rank, tag))
    data = torch.zeros(int(count), dtype=torch.uint8)
    if len(data):
        wait(transport.recv(data, rank, tag))
    return bytes(data.tolist()).decode()
