"""Plan equal tensors together: tensors of equal shape, itemsize and layouts form a stack, one tensor with a new dim.

A model has hundreds of tensors, but few shapes and layouts. A stack has as many unit tasks, classes and routes as one
tensor. Cuts along the new dim fall between tensors. Cuts along other dims fall inside tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from reshard.plan import PlanTransfers, cut_chunks
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.ragged import ranges
from reshard.sharding import AnyLayout, TensorSpec
from reshard.topology import Topology


@dataclass(frozen=True, eq=False)
class Stacks:
    """The members of each stack: stack k consists of tensors ``tensor[at[k]:at[k + 1]]``, ascending."""

    at: np.ndarray
    tensor: np.ndarray

    @classmethod
    def of(cls, tensors: Sequence[TensorSpec]) -> Stacks:
        """The stacks of tensors, ordered by their first member."""
        number_of_layout: dict[AnyLayout, int] = {}
        number_of_id: dict[int, int] = {}  # most tensors share layout objects, which are slow to hash

        def number(layout: AnyLayout) -> int:
            if id(layout) not in number_of_id:
                number_of_id[id(layout)] = number_of_layout.setdefault(layout, len(number_of_layout))
            return number_of_id[id(layout)]

        members: dict[tuple[tuple[int, ...], int, int, int], list[int]] = {}
        for index, spec in enumerate(tensors):
            members.setdefault((spec.shape, spec.itemsize, number(spec.src), number(spec.dst)), []).append(index)
        groups = list(members.values())
        return cls(
            at=np.cumsum([0, *map(len, groups)]),
            tensor=np.array([index for indices in groups for index in indices], dtype=np.int64),
        )

    @property
    def first(self) -> np.ndarray:
        """``(stacks,)`` the first member of each stack."""
        return self.tensor[self.at[:-1]]

    @property
    def heights(self) -> np.ndarray:
        """``(stacks,)`` the number of members of each stack."""
        return np.diff(self.at)

    @property
    def are_single(self) -> bool:
        """Whether no two tensors are equal."""
        return len(self.tensor) == len(self.at) - 1


def stack_problem(tensors: Sequence[TensorSpec], stacks: Stacks, topology: Topology, staging_bytes: int) -> PlanProblem:
    """The problem of stacks. Its ``tensors`` are the first members, but its boxes have the new dim in front."""
    problem = PlanProblem.of([tensors[index] for index in stacks.first.tolist()], topology, staging_bytes)
    if stacks.are_single:
        return problem
    height = stacks.heights[problem.tensor]
    return replace(
        problem,
        nbytes=problem.nbytes * height,
        is_strided=problem.is_strided | (height > 1),
        start=np.concatenate([np.zeros_like(height)[:, None], problem.start], axis=1),
        stop=np.concatenate([height[:, None], problem.stop], axis=1),
    )


def unstack(transfers: PlanTransfers, stacks: Stacks) -> PlanTransfers:
    """The transfers of the tensors themselves: a box of several members becomes a box of each."""
    if stacks.are_single:
        return transfers
    transfers = _split_chunks(transfers)
    height = transfers.box_stop[:, 0] - transfers.box_start[:, 0]
    box = np.repeat(np.arange(len(height)), height)
    member = ranges(stacks.at[transfers.box_tensor] + transfers.box_start[:, 0], height)
    arrays = {name: getattr(transfers, name) for name in PlanTransfers.__dataclass_fields__}
    return PlanTransfers.unchecked(
        **arrays
        | {
            "box_offsets": np.concatenate([[0], np.cumsum(height)])[transfers.box_offsets],
            "box_tensor": stacks.tensor[member],
            "box_start": np.ascontiguousarray(transfers.box_start[box, 1:]),
            "box_stop": np.ascontiguousarray(transfers.box_stop[box, 1:]),
            "splits": np.ascontiguousarray(transfers.splits[:, 1:]),
        }
    )


def _split_chunks(transfers: PlanTransfers) -> PlanTransfers:
    """Make a transfer of each chunk of a transfer that moves several members, because it will have several boxes."""
    first = transfers.first_box
    is_cut = (transfers.num_chunks > 1) & (transfers.box_stop[first, 0] - transfers.box_start[first, 0] > 1)
    if not is_cut.any():
        return transfers
    count = np.where(is_cut, transfers.num_chunks, 1)
    of = np.repeat(np.arange(len(transfers)), count)
    cut = np.flatnonzero(is_cut[of])
    chunk = ranges(np.zeros_like(count), count)
    start, stop = cut_chunks(transfers, of[cut], chunk[cut], first[of[cut]])
    region = transfers.region[of]
    region[cut] = len(transfers.box_offsets) - 1 + np.arange(len(cut))
    new_index = np.cumsum(count) - count  # of a transfer that is not cut
    num_edges, num_after = np.diff(transfers.edge_offsets)[of], np.diff(transfers.after_offsets)[of]
    edge = ranges(transfers.edge_offsets[of], num_edges)
    after = transfers.after[ranges(transfers.after_offsets[of], num_after)]
    source = transfers.source[of]
    return PlanTransfers.unchecked(
        box_offsets=np.concatenate([transfers.box_offsets, transfers.box_offsets[-1] + 1 + np.arange(len(cut))]),
        box_tensor=np.concatenate([transfers.box_tensor, transfers.box_tensor[first[of[cut]]]]),
        box_start=np.concatenate([transfers.box_start, start]),
        box_stop=np.concatenate([transfers.box_stop, stop]),
        region=region,
        edge_offsets=np.concatenate([[0], np.cumsum(num_edges)]),
        sender=transfers.sender[edge],
        receiver=transfers.receiver[edge],
        splits=np.where(is_cut[of][:, None], 1, transfers.splits[of]),
        window=transfers.window[of],
        after_offsets=np.concatenate([[0], np.cumsum(num_after)]),
        after=new_index[after],
        source=np.where(source < 0, source, new_index[source]),
    )
