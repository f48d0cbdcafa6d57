"""Order constraints between transfers that ranks must enforce by waiting for each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.plan.value.plan import Plan
from reshard.plan.value.rotation_plan import RotationPlan
from reshard.plan.value.transfers import GATHERED


@dataclass(frozen=True, eq=False)
class Waits:
    """Order constraints between transfers that ranks enforce. All arrays have one entry per constraint.

    These constraints of a plan are left out:

    * ``earlier`` brings the data of ``later``: the sender waits for its data in any case.
    * Both transfers have the same sender and the same receiver: their connection keeps the order.
    * ``earlier`` is a copy inside a rank: it uses no link.
    * No rank on either host of ``later`` observes the end of ``earlier``: nothing enforces the order, and the plan
      relies on its expected times.

    Attributes:
        later, earlier: transfer ``later`` starts after transfer ``earlier`` has ended.
        waiter: the rank that waits: the sender or the receiver of ``later``.
        actor: the rank that observes the end of ``earlier``. It is on the waiter's host and may be the waiter itself.
        is_sent: bool. True: the actor is the sender of ``earlier``, whose end is its completed send. False: the actor
            is the receiver, and the end is its completed receive.
    """

    later: np.ndarray
    earlier: np.ndarray
    waiter: np.ndarray
    actor: np.ndarray
    is_sent: np.ndarray


def find_sender_changes(plan: Plan) -> np.ndarray:
    """``(transfers,)`` bool: whether a transfer waits at its receiver for that of another sender to end."""
    waits = find_waits(plan)
    receiver = plan.transfers.receiver[plan.transfers.edge_offsets[:-1]]
    is_switch = np.zeros(len(plan.transfers), dtype=bool)
    is_switch[waits.later[waits.waiter == receiver[waits.later]]] = True
    return is_switch


def find_waits(plan: Plan, rank: int | None = None) -> Waits:
    """The order constraints of a plan that ranks enforce.

    Args:
        rank: leave out constraints between transfers that this rank neither sends nor receives.
    """
    if rank is not None and isinstance(plan, RotationPlan):
        return _find_waits_of_host(plan, rank)
    transfers = plan.transfers
    later = np.repeat(np.arange(len(transfers)), np.diff(transfers.after_offsets))
    earlier = transfers.after
    if rank is not None:
        is_own = np.zeros(len(transfers), dtype=bool)
        is_own[transfers.transfer_of_edge[(transfers.sender == rank) | (transfers.receiver == rank)]] = True
        chosen = np.flatnonzero(is_own[later] | is_own[earlier])
        later, earlier = later[chosen], earlier[chosen]
    order = earlier != transfers.source[later]  # the sender waits for its data in any case
    order &= (transfers.source[later] != GATHERED) | (
        transfers.receiver[transfers.edge_offsets[earlier]] != transfers.sender[transfers.edge_offsets[later]]
    )
    later, earlier = later[order], earlier[order]
    first = transfers.edge_offsets[:-1]
    host = plan.topology.host_array
    a, b = transfers.sender[first[earlier]], transfers.receiver[first[earlier]]
    sender, receiver = transfers.sender[first[later]], transfers.receiver[first[later]]
    leaves = host[a] == host[sender]
    enters = ~leaves & (host[b] == host[receiver])
    passes = ~leaves & ~enters & (host[b] == host[sender])
    kept = (leaves | enters | passes) & ((a != sender) | (b != receiver)) & (a != b)
    return Waits(
        later=later[kept],
        earlier=earlier[kept],
        waiter=np.where(enters, receiver, sender)[kept],
        actor=np.where(leaves, a, b)[kept],
        is_sent=leaves[kept],
    )


def _find_waits_of_host(plan: RotationPlan, rank: int) -> Waits:
    """The order constraints of a plan in closed form at the host of a rank. Transfers are numbered by their keys.

    A host either sends to other hosts or receives from them. Messages from one host arrive in the order of their
    sender.
    """
    key, sender, receiver, line, is_sent = plan.host_messages(rank)
    follows = line[1:] == line[:-1]
    if is_sent:
        follows &= (sender[1:] != sender[:-1]) | (receiver[1:] != receiver[:-1])
    else:
        host = plan.topology.host_array
        follows &= host[sender[1:]] != host[sender[:-1]]
    kept, end = np.flatnonzero(follows), sender if is_sent else receiver
    return Waits(
        later=key[1:][kept],
        earlier=key[:-1][kept],
        waiter=end[1:][kept],
        actor=end[:-1][kept],
        is_sent=np.full(len(kept), is_sent),
    )
