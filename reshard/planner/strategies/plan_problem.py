"""The unit tasks of a plan as one table: the input of strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.arguments import check_arguments, check_fields
from reshard.plan import DEFAULT_STAGING_BYTES
from reshard.ragged import NO_RANK
from reshard.sharding import TensorSpec, check_tensors
from reshard.topology import Topology


@dataclass(frozen=True, eq=False)
class PlanProblem:
    """The unit tasks of all tensors of one plan, as one table. Arrays are int64 unless noted.

    Attributes:
        tensors: the tensors to move.
        topology: the hosts, links and pods of the ranks.
        tensor: ``(tasks,)`` index of the tensor.
        nbytes: ``(tasks,)`` bytes of the region.
        is_strided: ``(tasks,)`` bool, whether the region must be packed or unpacked.
        start, stop: ``(tasks, ndim)`` box of the region; tensors with fewer dims are padded with ``0:1``.
        holders, destinations: ``(tasks, replicas)`` ranks, padded with -1.
        staging_bytes: staging memory of each rank in bytes.
    """

    tensors: tuple[TensorSpec, ...]
    topology: Topology
    tensor: np.ndarray
    nbytes: np.ndarray
    is_strided: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    holders: np.ndarray
    destinations: np.ndarray
    staging_bytes: int = DEFAULT_STAGING_BYTES

    def __post_init__(self) -> None:
        check_fields(self, staging_bytes=(0, 2**62))

    @classmethod
    @check_arguments(staging_bytes=(0, 2**62))
    def of(
        cls, tensors: Sequence[TensorSpec], topology: Topology, staging_bytes: int = DEFAULT_STAGING_BYTES
    ) -> PlanProblem:
        """Put the unit tasks of all tensors in one table.

        Raises:
            TopologyError: the topology lacks a rank. PlanError: there are no tensors, or two have the same name.
        """
        check_tensors(tensors)
        for spec in tensors:
            topology.check_covers(spec.src.ranks)
            topology.check_covers(spec.dst.ranks)
        ndim = max(spec.ndim for spec in tensors)
        tasks = [spec.tasks for spec in tensors]
        return cls(
            tensors=tuple(tensors),
            topology=topology,
            tensor=np.repeat(np.arange(len(tensors)), [len(t) for t in tasks]),
            nbytes=np.concatenate([t.numel * spec.itemsize for t, spec in zip(tasks, tensors, strict=True)]),
            is_strided=np.concatenate([t.is_strided for t in tasks]),
            start=np.concatenate([_widen(t.start, ndim, 0) for t in tasks]),
            stop=np.concatenate([_widen(t.stop, ndim, 1) for t in tasks]),
            holders=_stack([t.holders for t in tasks]),
            destinations=_stack([t.destinations for t in tasks]),
            staging_bytes=staging_bytes,
        )

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def keeps(self) -> np.ndarray:
        """``(tasks, replicas)`` bool, True where a destination already holds the region."""
        holds = np.zeros(self.destinations.shape, dtype=bool)
        for replica in range(self.holders.shape[1]):
            holds |= self.destinations == self.holders[:, replica : replica + 1]
        return holds & (self.destinations != NO_RANK)

    @cached_property
    def receivers(self) -> np.ndarray:
        """``(tasks, replicas)`` destinations that do not hold the region, padded with -1 anywhere in the row."""
        return np.where(self.keeps, NO_RANK, self.destinations) if self.keeps.any() else self.destinations

    @cached_property
    def num_receivers(self) -> np.ndarray:
        """``(tasks,)`` the number of receivers of each region."""
        return (self.receivers != NO_RANK).sum(axis=1)

    @cached_property
    def has_near_holder(self) -> np.ndarray:
        """``(tasks,)`` bool, whether a holder and a receiver are on the same host."""
        host = self.topology.host_array
        is_near = np.zeros(len(self), dtype=bool)
        receivers = np.where(self.receivers == NO_RANK, -1, host[self.receivers])
        for column in self.holders.T:
            is_near |= ((receivers == host[column][:, None]) & (column != NO_RANK)[:, None]).any(axis=1)
        return is_near


def _widen(array: np.ndarray, columns: int, fill: int) -> np.ndarray:
    if array.shape[1] == columns:
        return array
    return np.pad(array, ((0, 0), (0, columns - array.shape[1])), constant_values=fill)


def _stack(tables: Sequence[np.ndarray]) -> np.ndarray:
    width = max(table.shape[1] for table in tables)
    return np.concatenate([_widen(table, width, NO_RANK) for table in tables]) if len(tables) > 1 else tables[0]
