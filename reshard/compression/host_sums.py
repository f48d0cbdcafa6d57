"""The sum of an array over ranks of several hosts: raw inside a host, coded between hosts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from reshard.codecs import BlockCodec
from reshard.compression.collectives import decode_rows, encode_rows, exchange, gather


class Level(Protocol):
    """Ranks that exchange rows: those of one host, or those at the same place of their hosts."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def index(self) -> int:
        """Position of this rank."""

    def exchange(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Send row i to rank i; the result has a row from each rank. It is written to ``out`` if given."""

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks as one row each, in their order."""


class GroupLevel:
    """The ranks of a torch process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.size, self.index = group, dist.get_world_size(group), dist.get_rank(group)

    def exchange(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`Level`."""
        return exchange(rows, self._group, out)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """See :class:`Level`."""
        return gather(rows, self._group)


def split_by_host(hosts: Sequence[Hashable], position: int) -> tuple[list[int], list[int]] | None:
    """The positions of the ranks on the host of ``position``, and of those at its place on each host.

    Args:
        hosts: the host of each position.

    Returns:
        None if hosts have different numbers of ranks.
    """
    members: dict[Hashable, list[int]] = {}
    for other, host in enumerate(hosts):
        members.setdefault(host, []).append(other)
    if len({len(ranks) for ranks in members.values()}) != 1:
        return None
    inside = members[hosts[position]]
    return inside, sorted(ranks[inside.index(position)] for ranks in members.values())


def padded_size(numel: int, num_ranks: int, codec: BlockCodec | None) -> int:
    """The size of a buffer of which each rank sums a whole number of elements."""
    values = 1 if codec is None else codec.values
    return math.ceil(numel / (num_ranks * values)) * num_ranks * values


def sum_over_hosts(
    flat: torch.Tensor,
    inside: Level,
    across: Level,
    codec: BlockCodec | None,
    *,
    errors: torch.Tensor | None = None,
    received: torch.Tensor | None = None,
) -> None:
    """Replace ``flat`` by its sum over all ranks. All ranks get the same bits.

    Args:
        flat: flat fp32 of a size that :func:`padded_size` returns.
        inside: the ranks of this host. across: those at the same place of each host.
        errors: receives the errors of this rank's codings; like ``flat``.
        received: scratch memory like ``flat``.
    """
    slices = flat.view(inside.size, -1)
    own_slice = slices[0]
    if inside.size > 1:
        rows = inside.exchange(slices, None if received is None else received.view_as(slices))
        own_slice = rows[0]
        for row in rows[1:]:
            own_slice += row
    parts, host = own_slice.view(across.size, -1), across.index
    sent = encode_rows(parts, codec)
    total = torch.zeros_like(parts[0])
    for other, row in enumerate(across.exchange(sent)):
        if other == host:
            total += parts[host]
        else:
            decode_rows(row[None], total[None], codec, accumulate=True)
    coded = encode_rows(total[None], codec)
    if errors is not None:
        own = errors.view(len(slices), len(parts), -1)[inside.index]
        own.copy_(parts)
        decoded = torch.empty_like(parts)
        decode_rows(sent, decoded, codec)
        own -= decoded
        decode_rows(coded, decoded[host : host + 1], codec)
        own[host] = total - decoded[host]
    every = across.gather(coded)
    if inside.size > 1:
        every = inside.gather(every)  # (places, hosts * bytes of a part)
    decode_rows(every.view(-1, coded.shape[1]), flat.view(inside.size * across.size, -1), codec)
