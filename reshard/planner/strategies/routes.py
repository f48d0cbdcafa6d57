"""Routes: the trees along which a strategy sends regions, not yet cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.arguments import check_arguments, check_fields
from reshard.errors import ArgumentError, PlanError
from reshard.formatting import brief
from reshard.plan import PlanTransfers

from .plan_problem import PlanProblem


@dataclass(frozen=True, eq=False)
class Routes:
    """Regions and the trees along which they are sent, in order, not yet cut into chunks. All int64.

    Attributes:
        task: ``(routes,)`` index of the task.
        start, stop: ``(routes, ndim)`` the part of the task's region to send.
        edge_offsets: route i has edges ``edge_offsets[i]:edge_offsets[i + 1]``.
        sender, receiver: ``(edges,)`` ranks. Each sender is a holder or the receiver of an earlier edge of its route.
    """

    task: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    edge_offsets: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, problem: PlanProblem, rows: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> Routes:
        """Routes for whole tasks, from rows ``(task, edges)`` with an edge ``(sender, receiver)`` each.

        Raises:
            PlanError: the problem lacks a task, or a row has another form.
        """
        _check_problem(problem)
        try:
            task = _indices([route[0] for route in rows], len(problem), "tasks")
            edges = np.array([edge for route in rows for edge in route[1]], dtype=np.int64).reshape(-1, 2)
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"rows must be [(task, [(sender, receiver), ...]), ...], not {brief(rows)}") from None
        return cls(
            task=task,
            start=problem.start[task],
            stop=problem.stop[task],
            edge_offsets=np.concatenate([[0], np.cumsum([len(route[1]) for route in rows], dtype=np.int64)]),
            sender=edges[:, 0],
            receiver=edges[:, 1],
        )

    @classmethod
    @check_arguments()
    def direct(cls, problem: PlanProblem, task: np.ndarray, sender: np.ndarray, receiver: np.ndarray) -> Routes:
        """Routes for whole tasks with one edge each; all arguments ``(routes,)``.

        Raises:
            PlanError: the problem lacks a task, or an argument is no array of integers.
        """
        _check_problem(problem)
        task = _indices(task, len(problem), "tasks")
        return cls(task, problem.start[task], problem.stop[task], np.arange(len(task) + 1), sender, receiver)

    @classmethod
    @check_arguments()
    def join(cls, parts: Sequence[Routes]) -> Routes:
        """Concatenate routes. Raises PlanError if there are none."""
        if not len(parts):
            raise PlanError("there are no routes to join")
        edges = np.cumsum([0] + [len(part.sender) for part in parts])
        return cls(
            task=np.concatenate([part.task for part in parts]),
            start=np.concatenate([part.start for part in parts]),
            stop=np.concatenate([part.stop for part in parts]),
            edge_offsets=np.concatenate(
                [[0]] + [part.edge_offsets[1:] + index for part, index in zip(parts, edges[:-1], strict=True)]
            ).astype(np.int64),
            sender=np.concatenate([part.sender for part in parts]),
            receiver=np.concatenate([part.receiver for part in parts]),
        )

    def take(self, order: np.ndarray) -> Routes:
        """The routes of these indices, in this order. Raises PlanError if there is no such route."""
        order = _indices(order, len(self), "routes")
        counts = np.diff(self.edge_offsets)[order]
        edge_offsets = np.concatenate([[0], np.cumsum(counts)])
        edges = np.repeat(self.edge_offsets[order] - edge_offsets[:-1], counts) + np.arange(edge_offsets[-1])
        return Routes(
            task=self.task[order],
            start=self.start[order],
            stop=self.stop[order],
            edge_offsets=edge_offsets,
            sender=self.sender[edges],
            receiver=self.receiver[edges],
        )

    def __len__(self) -> int:
        return len(self.task)


def _check_problem(problem: object) -> None:
    if not isinstance(problem, PlanProblem):
        raise ArgumentError(f"problem must be a PlanProblem, not {brief(problem)}")


def _indices(values: Any, count: int, what: str) -> np.ndarray:
    """``(entries,)`` int64 indices of tasks or routes.

    Raises:
        PlanError: one is not from 0 to ``count - 1``.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # the last from a tensor without data
        array = np.zeros(())
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PlanError(f"indices of {what} must be one list of integers, not {brief(values)}")
    if array.size and not 0 <= array.min() <= array.max() < count:
        wrong = array[(array < 0) | (array >= count)][0]
        raise PlanError(f"index {wrong} of {what} in the routes: the {what} are 0 to {count - 1}")
    return array.astype(np.int64)


def copy_routes(problem: PlanProblem) -> Routes:
    """Local copies: one for each task and each destination that already holds the region."""
    task, replica = np.nonzero(problem.keeps)
    rank = problem.destinations[task, replica]
    return Routes.direct(problem, task, rank, rank)


#: A strategy chooses senders, trees and their order so that every receiver of every task gets its region. It returns
#: transfers if it also cuts the regions into chunks.
Strategy = Callable[[PlanProblem], Routes | PlanTransfers]
