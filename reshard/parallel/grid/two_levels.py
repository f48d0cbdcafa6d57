"""Collectives in two levels: the ranks of an axis as hosts x local ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from .cuts import Span
from .pending import Parts, PendingResult

#: A collective in two levels moves at most ``MAX_PIECES`` pieces, each with at least ``PIECE_BYTES`` bytes per rank.
MAX_PIECES, PIECE_BYTES = 4, 2**18


class Summing(Protocol):
    """Sums arrays over ranks, as :meth:`Axis.reduce_scatter` does."""

    def reduce_scatter(self, array: torch.Tensor, sizes: Sequence[int]) -> PendingResult:
        """See :meth:`Axis.reduce_scatter`."""


class AxisLevel(Summing, Protocol):
    """The ranks of one level, with the collectives of an :class:`Axis`."""

    index: int

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> PendingResult:
        """See :meth:`Axis.all_gather`."""

    def all_gather_into(self, part: torch.Tensor, targets: Sequence[Parts], result: torch.Tensor) -> PendingResult:
        """See :meth:`Axis.all_gather_into`."""

    def reduce_scatter_parts(self, parts: Sequence[Parts]) -> PendingResult:
        """See :meth:`Axis.reduce_scatter_parts`."""


LevelT = TypeVar("LevelT", bound=AxisLevel)


class TwoLevelAxis(Generic[LevelT]):
    """The ranks of an axis as hosts x local ranks, and collectives that run on one level after the other.

    Args:
        table: positions on the axis, ``[host][local rank]``.
        inside: axis of the ranks of this host.
        between: axis of the rank of each host that has this rank's local number.
    """

    def __init__(self, table: tuple[tuple[int, ...], ...], inside: LevelT, between: LevelT) -> None:
        self.table, self.inside, self.between = table, inside, between

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int], result: torch.Tensor) -> PendingResult:
        """Gather between hosts, then inside each host. See :meth:`Axis.all_gather`."""
        pieces = self._cut(sizes, result)
        own = self.table[self.between.index][self.inside.index]
        between = [
            self.between.all_gather(
                part[piece[own][0] : piece[own][1]], [_length(piece[item]) for item in self._column]
            )
            for piece in pieces
        ]

        def finish() -> torch.Tensor:
            parts, inside = result.split(list(sizes)), []
            for piece, first in zip(pieces, between, strict=True):
                inside.append(self.inside.all_gather_into(first.wait(), self._per_local(piece, parts), result))
            for last in inside:
                last.wait()
            return result

        return PendingResult(None, finish)

    def reduce_scatter(
        self, array: torch.Tensor, sizes: Sequence[int], between: Summing | None = None
    ) -> PendingResult:
        """Sum inside each host, then between hosts. See :meth:`Axis.reduce_scatter`.

        Args:
            between: sums between hosts; default: the axis between hosts.
        """
        across: Summing = between or self.between
        parts, pieces = array.split(list(sizes)), self._cut(sizes, array)
        inside = []
        for piece in pieces:
            inside.append(self.inside.reduce_scatter_parts(self._per_local(piece, parts)))

        def finish() -> torch.Tensor:
            sums = []
            for piece, first in zip(pieces, inside, strict=True):
                own = [_length(piece[item]) for item in self._column]
                sums.append(across.reduce_scatter(first.wait(), own))
            return torch.cat([last.wait() for last in sums])

        return PendingResult(None, finish)

    @property
    def _column(self) -> list[int]:
        """The positions of this local rank on each host."""
        return [host_positions[self.inside.index] for host_positions in self.table]

    def _per_local(self, piece: Sequence[Span], parts: Parts) -> list[Parts]:
        """The rows of a piece by local rank, then by host; ``parts`` has all rows of each position."""
        positions = [[host_positions[local] for host_positions in self.table] for local in range(self.inside.size)]
        return [[parts[item][slice(*piece[item])] for item in column] for column in positions]

    def _cut(self, sizes: Sequence[int], whole: torch.Tensor) -> list[list[Span]]:
        """Cut rows into pieces, so that one level moves a piece while the other moves the next.

        Returns:
            ``[piece][position]`` intervals of the rows of each position.
        """
        count = max(1, min(MAX_PIECES, whole.nbytes // (self.inside.size * PIECE_BYTES)))
        return [[(size * n // count, size * (n + 1) // count) for size in sizes] for n in range(count)]


def _length(span: Span) -> int:
    return span[1] - span[0]
