"""Collectives along one axis of a grid that move exactly the bytes of their formulas, also for uneven parts.

Reduce-scatters, and all-gathers of uneven parts, are all-to-all exchanges. Gloo's ``reduce_scatter`` is an all-reduce,
which moves twice as many bytes, and its ``all_gather`` needs equal parts. Where several ranks of an axis share a host,
a reduce-scatter first runs inside each host and then between hosts. An all-gather runs in the opposite order. A rank
receives as many bytes as with one level, but every element passes each NIC only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reshard.coordination.device_mesh import end_with, new_group
from reshard.errors import RemoteError, ReshardError
from reshard.formatting import describe_ranks
from reshard.runtime.torch_compat import all_gather_single, is_in_backward

from .failures import Failures
from .host_collectives import ALL_GATHER, EXCHANGE, HostCollectives, NotStartedError
from .pending import Explain, Parts, PendingResult, ordered_sum
from .two_levels import TwoLevelAxis


class Axis:
    """The ranks along one axis of a grid, in order.

    Args:
        name: name of the axis.
        group: their process group.
        ranks: global ranks.
        index: position of this rank.
        timeout: timeout of the process groups that the axis makes; default: the backend's.
        failures: errors of the collectives of this rank, shared by the axes of a grid.
        explain: makes the error to raise after a collective failed; default: one that names the ranks of the axis.
    """

    def __init__(
        self,
        name: str,
        group: Any,
        ranks: Sequence[int],
        index: int,
        timeout: timedelta | None = None,
        *,
        failures: Failures | None = None,
        explain: Explain | None = None,
    ) -> None:
        self.name, self.group, self.ranks, self.index = name, group, tuple(ranks), index
        self._timeout = timeout
        self.failures = Failures() if failures is None else failures
        self._explain: Explain = self._describe if explain is None else explain
        #: Two levels, if :meth:`split_by_host` found that they help.
        self.levels: TwoLevelAxis[Axis] | None = None
        #: Shared memory for collectives of CPU tensors, if all ranks are on one host.
        self._memory: HostCollectives | None = None
        self._for_sums: Axis | None = None
        self._for_backwards: Axis | None = None
        # torch sorts the ranks of a group: member g of the group is at position _order[g] of the axis.
        order = sorted(range(self.size), key=lambda position: self.ranks[position])
        self._order = None if order == list(range(self.size)) else order

    def __deepcopy__(self, memo: Any) -> Axis:
        """The axis itself: copies of a model use the same process groups."""
        return self

    def split_by_host(self, hosts: Sequence[int]) -> None:
        """Use two levels, inside hosts and between them. All ranks of the axis call this.

        The axis keeps one level if it has one host, one rank per host, or different numbers of ranks on its hosts.

        Args:
            hosts: number of the host of each rank, in the order of the axis.
        """
        members: dict[int, list[int]] = {}
        for position, host in enumerate(hosts):
            members.setdefault(host, []).append(position)
        table = list(members.values())
        if len(table) == 1:
            self.share_memory()
        if len(table) == 1 or len(table[0]) == 1 or len({len(positions) for positions in table}) > 1:
            return
        host = next(number for number, positions in enumerate(table) if self.index in positions)
        local = table[host].index(self.index)
        inside = self._make(f"{self.name} inside", table[host])
        inside.share_memory()
        between = self._make(f"{self.name} between", [positions[local] for positions in table])
        self.levels = TwoLevelAxis(tuple(map(tuple, table)), inside, between)

    def for_sums(self) -> Axis:
        """An axis of the same ranks with new process groups, for :func:`sync_during_backward`.

        All ranks of the axis call this.
        """
        if self._for_sums is None:
            self._for_sums = self.make_twin("entered sync_during_backward")
            if self.levels is not None:
                inside, between = self.levels.inside.for_sums(), self.levels.between.for_sums()
                self._for_sums.levels = TwoLevelAxis(self.levels.table, inside, between)
        return self._for_sums

    def separate_backwards(self) -> None:
        """Give the collectives of backwards their own process groups. All ranks of the axis call this.

        Without them, the next collective of a rank that skips its backward would meet the backwards of its peers. Gloo
        then ends the process if the two collectives differ in size, and mixes their data if they have the same size.
        """
        if self.size == 1 or self._for_backwards is not None or dist.get_backend(self.group) != "gloo":
            return
        self._for_backwards = self.make_twin("made a grid")
        if self.levels is not None:
            self.levels.inside.separate_backwards()
            self.levels.between.separate_backwards()

    def make_twin(self, called: str) -> Axis:
        """An axis of the same ranks, by a new process group and without levels. All ranks of the axis call this.

        Args:
            called: what the ranks do next, for the error.

        Raises:
            RemoteError: another rank did not call it within the time-out of the axis.
        """
        self.failures.check()
        try:
            private = self._make(self.name, range(self.size))
        except RuntimeError as error:
            if isinstance(error, ReshardError):
                raise
            late = RemoteError(f"not all of {describe_ranks(self.ranks)} {called} within the time-out: {error}")
            raise self.failures.add(late) from error
        if self._memory is not None:
            private.share_memory()
        return private

    def share_memory(self) -> None:
        """Move CPU tensors through shared memory from now on. All ranks of the axis, on one host, call this."""
        if self.size > 1 and dist.get_backend(self.group) == "gloo":
            self._memory = HostCollectives.attach(self)

    def _make(self, name: str, positions: Sequence[int]) -> Axis:
        """An axis of the ranks at ``positions``, with a new process group."""
        ranks = [self.ranks[position] for position in positions]
        group = new_group(ranks, self._timeout, dist.get_backend(self.group), shares_thread=True)
        index = positions.index(self.index)
        axis = Axis(name, group, ranks, index, self._timeout, failures=self.failures, explain=self._explain)
        end_with(axis, [group])
        return axis

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def shares_memory(self) -> bool:
        """Whether CPU tensors move through shared memory."""
        return self._memory is not None

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> PendingResult:
        """Concatenate the parts of all ranks along dim 0.

        Args:
            part: contiguous, with ``sizes[index]`` rows.
            sizes: number of rows of each rank's part.
        """
        if self.size == 1:
            return PendingResult(None, lambda: part)
        result = part.new_empty((sum(sizes), *part.shape[1:]))
        if not result.numel():
            return PendingResult(None, lambda: result)
        if self.levels is not None:
            return self.levels.all_gather(part, sizes, result)
        if self._memory_for(part) is not None:
            return self.all_gather_into(part, [[rows] for rows in result.split(list(sizes))], result)
        in_group = self._in_group(sizes)
        if len(set(sizes)) == 1:
            work = self._start(all_gather_single, result, part)
        else:
            repeated = torch.cat([part] * self.size)
            work = self._start(dist.all_to_all_single, result, repeated, in_group, [len(part)] * self.size)
        return PendingResult(work, lambda: self._from_group(result, in_group), self._explain_failure)

    def all_gather_into(self, part: torch.Tensor, targets: Sequence[Parts], result: torch.Tensor) -> PendingResult:
        """Like :meth:`all_gather`, but the rows of rank ``i`` go to the tensors ``targets[i]``, one after the other.

        Args:
            part: contiguous.
            targets: rows of ``result``.
        """
        memory = self._memory_for(part)
        if memory is not None:
            message = memory.move(ALL_GATHER, [[part]], targets, result)
            return PendingResult(message, message.finish, self._explain_failure)
        rows = [part_rows for targets_of_rank in targets for part_rows in targets_of_rank]
        pending = self.all_gather(part, [sum(map(len, targets_of_rank)) for targets_of_rank in targets])

        def finish() -> torch.Tensor:
            for target, values in zip(rows, pending.wait().split(list(map(len, rows))), strict=True):
                target.copy_(values)
            return result

        return PendingResult(None, finish)

    def reduce_scatter(self, array: torch.Tensor, sizes: Sequence[int]) -> PendingResult:
        """Sum the arrays of all ranks. Rank ``i`` keeps ``sizes[i]`` consecutive rows of the sum.

        The sum adds in the order of ranks, so its bits are the same in every run. It adds bf16 and fp16 in float32.

        Args:
            array: contiguous, with ``sum(sizes)`` rows.
            sizes: number of rows that each rank keeps.
        """
        if self.size == 1:
            return PendingResult(None, lambda: array)
        if self.levels is not None and array.numel():
            return self.levels.reduce_scatter(array, sizes)
        own = sizes[self.index]
        received = array.new_empty((self.size * own, *array.shape[1:]))

        def finish() -> torch.Tensor:
            return ordered_sum(received.view(self.size, own, *array.shape[1:]))

        if not array.numel():
            return PendingResult(None, finish)
        if self._memory_for(array) is not None:
            return self.reduce_scatter_parts([[rows] for rows in array.split(list(sizes))])
        array = self._to_group(array, sizes)
        work = self._start(dist.all_to_all_single, received, array, [own] * self.size, self._in_group(sizes))
        return PendingResult(work, finish, self._explain_failure)

    def reduce_scatter_parts(self, parts: Sequence[Parts]) -> PendingResult:
        """:meth:`reduce_scatter` of an array that consists of these parts. Rank ``i`` keeps ``parts[i]``."""
        memory = self._memory_for(parts[0][0])
        if memory is not None:
            message = memory.reduce_scatter(parts)
            return PendingResult(message, message.finish, self._explain_failure)
        rows = torch.cat([part for parts_of_rank in parts for part in parts_of_rank])
        return self.reduce_scatter(rows, [sum(map(len, parts_of_rank)) for parts_of_rank in parts])

    def exchange(self, sent: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> torch.Tensor:
        """All-to-all of flat arrays: rank ``i`` gets the ``i``-th part of each rank, in the order of ranks."""
        return self.start_exchange(sent, send_sizes, receive_sizes).wait()

    def start_exchange(
        self, sent: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> PendingResult:
        """Start :meth:`exchange` without waiting for it."""
        if self.size == 1:
            return PendingResult(None, lambda: sent)
        received = sent.new_empty(sum(receive_sizes))
        memory = self._memory_for(sent)
        if memory is not None:
            parts, targets = sent.split(list(send_sizes)), received.split(list(receive_sizes))
            message = memory.move(EXCHANGE, [[part] for part in parts], [[target] for target in targets], received)
            return PendingResult(message, message.finish, self._explain_failure)
        sent, in_group = self._to_group(sent, send_sizes), self._in_group(receive_sizes)
        work = self._start(dist.all_to_all_single, received, sent, in_group, self._in_group(send_sizes))
        return PendingResult(work, lambda: self._from_group(received, in_group), self._explain_failure)

    def sum(self, array: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, with the same bits on each. For small arrays: every rank receives every array."""
        if self.size == 1:
            return array
        return ordered_sum(self._gather_arrays(array))

    def max(self, array: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over all ranks. For small arrays, as :meth:`sum`."""
        return array if self.size == 1 else self._gather_arrays(array).amax(0)

    def all_reduce(self, array: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same bits on each: a reduce-scatter, then an all-gather."""
        if self.size == 1:
            return array
        flat = array.reshape(-1)
        ends = [flat.numel() * part // self.size for part in range(self.size + 1)]
        sizes = [ends[part + 1] - ends[part] for part in range(self.size)]
        return self.all_gather(self.reduce_scatter(flat, sizes).wait(), sizes).wait().view(array.shape)

    def _memory_for(self, array: torch.Tensor) -> HostCollectives | None:
        """The shared memory for a collective that starts now; None for Gloo."""
        memory = self._of_call()._memory
        if memory is None or array.device.type != "cpu":
            return None
        self.failures.check()
        return memory

    def _in_group(self, sizes: Sequence[int]) -> list[int]:
        """Sizes in the order of the process group."""
        return list(sizes) if self._order is None else [sizes[position] for position in self._order]

    def _to_group(self, array: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Parts of the given sizes in the order of the process group."""
        if self._order is None:
            return array
        parts = array.split(list(sizes))
        return torch.cat([parts[position] for position in self._order])

    def _from_group(self, array: torch.Tensor, in_group: Sequence[int]) -> torch.Tensor:
        """The inverse of :meth:`_to_group`; sizes are in the order of the process group."""
        if self._order is None:
            return array
        parts = array.split(list(in_group))
        return torch.cat([parts[self._order.index(position)] for position in range(self.size)])

    def _gather_arrays(self, array: torch.Tensor) -> torch.Tensor:
        gathered = self.all_gather(array.reshape(1, -1).contiguous(), [1] * self.size).wait()
        return gathered.view(self.size, *array.shape)

    def _start(self, collective: Any, *arguments: Any) -> Any:
        self.failures.check()
        try:
            return collective(*arguments, group=self._of_call().group, async_op=True)
        except RuntimeError as error:
            if isinstance(error, ReshardError):
                raise
            raise self._explain_failure(error) from error

    def _explain_failure(self, error: RuntimeError) -> ReshardError:
        is_backward = self._of_call() is not self
        awaited = [error.rank] if isinstance(error, NotStartedError) else [r for r in self.ranks if r != self._own_rank]
        return self.failures.add(self._explain(error, awaited, is_backward))

    def _of_call(self) -> Axis:
        return self if self._for_backwards is None or not is_in_backward() else self._for_backwards

    @property
    def _own_rank(self) -> int:
        return self.ranks[self.index]

    def _describe(self, error: RuntimeError, _awaited: Sequence[int], _is_backward: bool) -> ReshardError:
        return RemoteError(f"a collective of {describe_ranks(self.ranks)} of a grid failed: {error}")
