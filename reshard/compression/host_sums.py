"""The all-reduce of an array over ranks of several hosts: raw inside a host, encoded between hosts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from reshard.codecs import BlockCodec
from reshard.compression.encoded_collectives import Wait, all_gather, decode_rows, encode_rows, exchange

#: A piece of a sum is reduced inside the host, then between hosts, then gathered.
NUM_PHASES = 3


class ExchangeLevel(Protocol):
    """Ranks that exchange rows: all ranks of one host, or the ranks with one local rank on all hosts."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def index(self) -> int:
        """The number of this rank among them, from 0."""

    def exchange(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> Wait:
        """Start to send row i to rank i. The result has one row from each rank, in ``out`` if given."""

    def all_gather(self, rows: torch.Tensor) -> Wait:
        """Start to gather the rows of all ranks. The result has one row for each rank, in their order."""


class GroupLevel:
    """The ranks of a torch process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.size, self.index = group, dist.get_world_size(group), dist.get_rank(group)

    def exchange(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> Wait:
        """See :class:`ExchangeLevel`."""
        return exchange(rows, self._group, out)

    def all_gather(self, rows: torch.Tensor) -> Wait:
        """See :class:`ExchangeLevel`."""
        return all_gather(rows, self._group)


def split_by_host(hosts: Sequence[Hashable], rank: int) -> tuple[list[int], list[int]] | None:
    """The ranks on the host of ``rank``, and the ranks that have its local rank, one on each host.

    Args:
        hosts: the host of each rank.

    Returns:
        None if hosts have different numbers of ranks.
    """
    members: dict[Hashable, list[int]] = {}
    for other_rank, host in enumerate(hosts):
        members.setdefault(host, []).append(other_rank)
    if len({len(ranks) for ranks in members.values()}) != 1:
        return None
    inside = members[hosts[rank]]
    return inside, sorted(ranks[inside.index(rank)] for ranks in members.values())


def padded_size(numel: int, num_ranks: int, codec: BlockCodec | None) -> int:
    """The smallest size, ``numel`` or more, that gives each rank the same number of whole blocks of the codec."""
    values = 1 if codec is None else codec.values
    return math.ceil(numel / (num_ranks * values)) * num_ranks * values


def sum_over_hosts(
    flat: torch.Tensor,
    inside: ExchangeLevel,
    across: ExchangeLevel,
    codec: BlockCodec | None,
    *,
    errors: torch.Tensor | None = None,
    received: torch.Tensor | None = None,
    piece_values: int | None = None,
) -> None:
    """Replace ``flat`` by its sum over all ranks. All ranks get the same bits.

    Args:
        flat: flat fp32 of a size that :func:`padded_size` returns.
        inside: the ranks of this host.
        across: the ranks with the local rank of this one, one on each host.
        errors: receives the errors of what this rank encodes; like ``flat``.
        received: scratch memory like ``flat``.
        piece_values: cut ``flat`` into pieces of at least so many values; the same on all ranks. While one piece
            travels between hosts, the next one is summed and encoded. None: one piece.
    """
    unit = inside.size * across.size * (1 if codec is None else codec.values)
    num_units = flat.numel() // unit
    num_pieces = 1 if piece_values is None else max(1, min(num_units, flat.numel() // piece_values))
    received = torch.empty_like(flat) if received is None else received
    started: list[Iterator[None]] = []
    for index in range(num_pieces + NUM_PHASES - 1):
        if index < num_pieces:
            piece = slice(*(unit * (num_units * end // num_pieces) for end in (index, index + 1)))
            own_errors = None if errors is None else errors[piece]
            started.append(_sum_piece(flat[piece], inside, across, codec, own_errors, received[piece]))
        for phases in started[::-1]:
            next(phases, None)
        started = started[-(NUM_PHASES - 1) :]


def _sum_piece(
    flat: torch.Tensor,
    inside: ExchangeLevel,
    across: ExchangeLevel,
    codec: BlockCodec | None,
    errors: torch.Tensor | None,
    received: torch.Tensor,
) -> Iterator[None]:
    """Sum one piece. Yields after each start of a collective between hosts."""
    slices = flat.view(inside.size, -1)
    own_slice = slices[0]
    if inside.size > 1:
        copies = inside.exchange(slices, received.view_as(slices))()  # this rank's slice, from each rank of the host
        own_slice = copies[0]
        for copy in copies[1:]:
            own_slice += copy
    parts, host = own_slice.view(across.size, -1), across.index
    sent = encode_rows(parts, codec)
    wait = across.exchange(sent)
    yield
    total = torch.zeros_like(parts[0])
    for other_host, encoded_part in enumerate(wait()):
        if other_host == host:
            total += parts[host]
        else:
            decode_rows(encoded_part[None], total[None], codec, accumulate=True)
    encoded = encode_rows(total[None], codec)
    wait = across.all_gather(encoded)
    if errors is not None:
        own = errors.view(len(slices), len(parts), -1)[inside.index]
        own.copy_(parts)
        decoded = torch.empty_like(parts)
        decode_rows(sent, decoded, codec)
        own -= decoded
        decode_rows(encoded, decoded[host : host + 1], codec)
        own[host] = total - decoded[host]
    yield
    every = wait()
    if inside.size > 1:
        every = inside.all_gather(every)()  # (ranks of a host, hosts * bytes of a part)
    decode_rows(every.view(-1, encoded.shape[1]), flat.view(inside.size * across.size, -1), codec)
