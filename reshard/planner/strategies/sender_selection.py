"""Choose senders by load, and order messages so that every port stays busy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard import _native
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.ragged import NO_RANK


class SendLoads:
    """Bytes assigned to each sending host and rank so far."""

    def __init__(self, problem: PlanProblem) -> None:
        self.host_of = problem.topology.host_of_rank
        self.host = dict.fromkeys(self.host_of, 0)
        self.rank: dict[int, int] = {}

    def pick(self, candidates: Sequence[int]) -> int:
        """The least loaded candidate on the host that sends least; ties go to the first candidate."""
        if len(candidates) == 1:
            return candidates[0]
        loads, host_of, rank_load = self.host, self.host_of, self.rank.get
        min_load = min([loads[host_of[rank]] for rank in candidates])
        return min(
            [rank for rank in candidates if loads[host_of[rank]] == min_load], key=lambda rank: rank_load(rank, 0)
        )

    def add(self, rank: int, nbytes: int, *, crosses: bool) -> None:
        """Add bytes to a rank, and to its host if they leave the host."""
        self.rank[rank] = self.rank.get(rank, 0) + nbytes
        if crosses:
            self.host[self.host_of[rank]] += nbytes


def real_ranks(padded: np.ndarray) -> list[int]:
    """The ranks in a padded row, without the padding."""
    return [rank for rank in padded.tolist() if rank != NO_RANK]


def pick_sender(loads: SendLoads, holders: list[int], receiver: int, nbytes: int) -> int:
    """Pick a holder on the receiver's host if there is one, else on the host that sends least, and add its load."""
    host = loads.host_of[receiver]
    near = [rank for rank in holders if loads.host_of[rank] == host]
    sender = loads.pick(near or holders)
    loads.add(sender, nbytes, crosses=not near)
    return sender


def pick_senders(problem: PlanProblem, task: np.ndarray, receiver: np.ndarray) -> np.ndarray:
    """The senders that :func:`pick_sender` picks for the messages in turn, as an array ``(messages,)``.

    Args:
        problem: tasks and their holders.
        task, receiver: ``(messages,)`` the task and the receiver of each message.
    """
    is_real = problem.holders != NO_RANK
    holder_offsets = np.concatenate([[0], np.cumsum(is_real.sum(axis=1))])
    sender = np.zeros(len(task), dtype=np.int64)
    host = problem.topology.host_array
    _native.pick_senders(holder_offsets, problem.holders[is_real], task, receiver, problem.nbytes, host, sender)
    return sender


def rotation(sender: np.ndarray, receiver: np.ndarray) -> np.ndarray:
    """Indices that sort messages into rotation order: sender i serves receiver i first, then i + 1, and so on.

    If the numbers of senders and receivers differ, the first receivers of the senders are evenly spread.
    """
    if not len(sender):
        return np.zeros(0, dtype=np.int64)
    (num_senders, i), (num_receivers, j) = _number(sender), _number(receiver)
    first = i * num_receivers // num_senders
    key = (j - first) % num_receivers * num_senders + i
    if num_senders * num_receivers <= 4 * len(key):
        index_of_key = np.full(num_senders * num_receivers, -1, dtype=np.int64)
        index_of_key[key] = np.arange(len(key))
        order = index_of_key[index_of_key >= 0]
        if len(order) == len(key):  # all keys differ
            return order
    return np.argsort(key, kind="stable")


def _number(ranks: np.ndarray) -> tuple[int, np.ndarray]:
    """The number of different ranks, and for each entry the index of its rank among them in ascending order."""
    present = np.zeros(int(ranks.max()) + 1, dtype=bool)
    present[ranks] = True
    number = np.cumsum(present) - 1
    return int(number[-1]) + 1, number[ranks]
