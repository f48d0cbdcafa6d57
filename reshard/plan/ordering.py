"""The order between messages of different ranks that a plan requires; each rank orders its own messages itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.plan.model import Plan


@dataclass(frozen=True, eq=False)
class Waits:
    """Order constraints between transfers that ranks enforce. All arrays have one entry per constraint.

    Some constraints are left out. Transfers between the same two ranks share a connection, which keeps their order.
    Copies inside a rank use no link. If no rank on either host of ``later`` observes the end of ``earlier``, nothing
    enforces the constraint; the plan relies on its expected times.

    Attributes:
        later, earlier: transfer ``later`` starts after transfer ``earlier`` has ended.
        waiter: the end of ``later`` that waits, its sender or its receiver.
        actor: the rank that observes the end of ``earlier``; it is on the waiter's host and may be the waiter itself.
        is_sent: bool, True if the actor is the sender of ``earlier``, which has finished its send; False if it is the
            receiver, which has the data.
    """

    later: np.ndarray
    earlier: np.ndarray
    waiter: np.ndarray
    actor: np.ndarray
    is_sent: np.ndarray


def find_turns(plan: Plan) -> np.ndarray:
    """``(transfers,)`` bool: whether the receiver of a transfer waits until a transfer of another rank has ended."""
    waits = find_waits(plan)
    receiver = plan.transfers.receiver[plan.transfers.edge_at[:-1]]
    found = np.zeros(len(plan.transfers), dtype=bool)
    found[waits.later[waits.waiter == receiver[waits.later]]] = True
    return found


def find_waits(plan: Plan) -> Waits:
    """The order constraints of a plan that ranks enforce."""
    transfers = plan.transfers
    later = np.repeat(np.arange(len(transfers)), np.diff(transfers.after_at))
    earlier = transfers.after
    order = earlier != transfers.source[later]  # a receive of the data is waited for anyway
    later, earlier = later[order], earlier[order]
    first = transfers.edge_at[:-1]
    host = plan.topology.host_by_rank
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
