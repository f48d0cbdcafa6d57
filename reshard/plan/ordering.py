"""The order that a plan asks for across ranks, beyond what each rank keeps by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.plan.model import Plan


@dataclass(frozen=True, eq=False)
class Waits:
    """Who waits for what: transfer ``later`` starts when ``earlier`` is over, and ``waiter`` sees to it.

    The waiter is an end of ``later``. ``actor`` is a rank of its host, or itself, that knows when ``earlier`` is over:
    its sender, who is done with it (``is_sent``), or its receiver, who has it. Transfers of the same two ranks are not
    here: they pass one connection, one after the other. Nor are copies inside a rank, which take no link, nor what
    neither end of a transfer can learn on its own host: such order is kept by the times that the plan expects, not by
    force.
    """

    later: np.ndarray
    earlier: np.ndarray
    waiter: np.ndarray
    actor: np.ndarray
    is_sent: np.ndarray


def find_turns(plan: Plan) -> np.ndarray:
    """``(transfers,)`` True where a transfer enters its host only when one from another rank has ended."""
    waits = find_waits(plan)
    receiver = plan.transfers.receiver[plan.transfers.edge_at[:-1]]
    found = np.zeros(len(plan.transfers), dtype=bool)
    found[waits.later[waits.waiter == receiver[waits.later]]] = True
    return found


def find_waits(plan: Plan) -> Waits:
    """All waits of a plan."""
    transfers = plan.transfers
    later = np.repeat(np.arange(len(transfers)), np.diff(transfers.after_at))
    earlier = transfers.after
    order = earlier != transfers.source[later]  # what brings the data is waited for anyway
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
