"""Collectives along one axis of a grid that move exactly the bytes of their formulas, also for uneven parts.

Sums, and gathers of uneven parts, are all-to-all exchanges: Gloo's ``reduce_scatter`` is an all-reduce, which moves
twice as much, and its ``all_gather`` needs equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import RemoteError, ReshardError
from reshard.formatting import describe_ranks


class Pending:
    """The result of a collective that is under way."""

    def __init__(self, work: Any, finish: Callable[[], torch.Tensor], ranks: Sequence[int]) -> None:
        self._work, self._finish, self._ranks = work, finish, ranks

    def wait(self) -> torch.Tensor:
        """The result.

        Raises:
            RemoteError: a rank failed, or did not call the collective within the time-out of the process group.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                if isinstance(error, ReshardError):
                    raise
                raise RemoteError(f"a collective of {describe_ranks(self._ranks)} of a grid failed: {error}") from error
        return self._finish()


class Axis:
    """The ranks along one axis of a grid, in order.

    Args:
        name: name of the axis.
        group: their process group.
        ranks: global ranks.
        index: position of this rank.
    """

    def __init__(self, name: str, group: Any, ranks: Sequence[int], index: int) -> None:
        self.name, self.group, self.ranks, self.index = name, group, tuple(ranks), index

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def gather(self, part: torch.Tensor, sizes: Sequence[int]) -> Pending:
        """Concatenate the parts of all ranks along dim 0.

        Args:
            part: contiguous, with ``sizes[index]`` rows.
            sizes: number of rows of each rank's part.
        """
        if self.size == 1:
            return Pending(None, lambda: part, self.ranks)
        result = part.new_empty((sum(sizes), *part.shape[1:]))
        if not result.numel():
            return Pending(None, lambda: result, self.ranks)
        if len(set(sizes)) == 1:
            work = self._start(dist.all_gather_single, result, part)
        else:
            work = self._start(
                dist.all_to_all_single,
                result,
                torch.cat([part] * self.size),
                list(sizes),
                [sizes[self.index]] * self.size,
            )
        return Pending(work, lambda: result, self.ranks)

    def reduce_scatter(self, array: torch.Tensor, sizes: Sequence[int]) -> Pending:
        """Sum the arrays of all ranks, of which rank ``i`` keeps ``sizes[i]`` consecutive rows.

        The sum runs in the order of ranks, in float32 if the dtype is shorter, so it is the same in every run.

        Args:
            array: contiguous, with ``sum(sizes)`` rows.
            sizes: number of rows that each rank keeps.
        """
        if self.size == 1:
            return Pending(None, lambda: array, self.ranks)
        own = sizes[self.index]
        received = array.new_empty((self.size * own, *array.shape[1:]))

        def finish() -> torch.Tensor:
            return ordered_sum(received.view(self.size, own, *array.shape[1:]))

        if not array.numel():
            return Pending(None, finish, self.ranks)
        work = self._start(dist.all_to_all_single, received, array, [own] * self.size, list(sizes))
        return Pending(work, finish, self.ranks)

    def exchange(self, sent: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> torch.Tensor:
        """All-to-all of flat arrays: rank ``i`` gets the ``i``-th part of each rank, in the order of ranks."""
        received = sent.new_empty(sum(receive_sizes))
        if self.size == 1:
            return sent
        work = self._start(dist.all_to_all_single, received, sent, list(receive_sizes), list(send_sizes))
        return Pending(work, lambda: received, self.ranks).wait()

    def sum(self, array: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same bits on each. For small arrays: every rank receives all of them."""
        if self.size == 1:
            return array
        return ordered_sum(self._gather_all(array))

    def max(self, array: torch.Tensor) -> torch.Tensor:
        """The largest of each element over all ranks. For small arrays, as :meth:`sum`."""
        return array if self.size == 1 else self._gather_all(array).amax(0)

    def all_reduce(self, array: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same bits on each: a reduce-scatter, then a gather."""
        if self.size == 1:
            return array
        flat = array.reshape(-1)
        ends = [flat.numel() * part // self.size for part in range(self.size + 1)]
        sizes = [ends[part + 1] - ends[part] for part in range(self.size)]
        return self.gather(self.reduce_scatter(flat, sizes).wait(), sizes).wait().view(array.shape)

    def _gather_all(self, array: torch.Tensor) -> torch.Tensor:
        gathered = self.gather(array.reshape(1, -1).contiguous(), [1] * self.size).wait()
        return gathered.view(self.size, *array.shape)

    def _start(self, collective: Any, *arguments: Any) -> Any:
        try:
            return collective(*arguments, group=self.group, async_op=True)
        except RuntimeError as error:
            if isinstance(error, ReshardError):
                raise
            raise RemoteError(f"a collective of {describe_ranks(self.ranks)} of a grid failed: {error}") from error


def ordered_sum(parts: torch.Tensor) -> torch.Tensor:
    """The sum over dim 0, one part after the other, in float32 if the dtype is shorter."""
    if parts.dtype not in (torch.bfloat16, torch.float16):
        result = parts[0].clone()
        for part in parts[1:]:
            result += part
        return result
    result = parts[0].float()
    for part in parts[1:]:
        result += part
    return result.to(parts.dtype)
