"""A plan as a graph: its nodes are hops (edges of trees), and its edges say which hop waits for which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import PlanError
from reshard.plan.model import Plan

if TYPE_CHECKING:
    import networkx as nx


def plan_to_networkx(plan: Plan) -> nx.DiGraph:
    """Convert a plan to a ``networkx.DiGraph`` of its hops and the dependencies between them.

    A node is one hop, ``(transfer, sender, receiver)``. Node attributes:

    * ``nbytes``: bytes of the hop, summed over its chunks.
    * ``num_chunks``: number of chunks.
    * ``crosses_hosts``: whether sender and receiver are on different hosts.

    An edge points from a hop to a later hop that depends on it. Edge attribute ``reason``:

    * "data": the earlier hop brings the data to the sender of the later hop, chunk by chunk.
    * "order": the later transfer starts when the earlier transfer has finished.

    The graph omits copies within a rank. It has no cycles, because a transfer waits only for earlier transfers.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"plan_to_networkx needs a Plan, not {type(plan).__name__}")
    import networkx as nx

    transfers, host = plan.transfers, plan.topology.host_by_rank
    graph = nx.DiGraph()
    last: list[tuple[int, int, int] | None] = []  # last hop of each transfer; None if it only copies
    for transfer in range(len(transfers)):
        brought: dict[int, tuple[int, int, int]] = {}
        source = int(transfers.source[transfer])
        if source >= 0 and (hop := last[source]) is not None:
            brought[hop[2]] = hop
        after = transfers.after[transfers.after_at[transfer] : transfers.after_at[transfer + 1]].tolist()
        final = None
        for sender, receiver in transfers.edges_of(transfer):
            if sender == receiver:
                continue
            final = transfer, sender, receiver
            graph.add_node(
                final,
                nbytes=int(plan.message_bytes[transfer]),
                num_chunks=int(transfers.num_chunks[transfer]),
                crosses_hosts=bool(host[sender] != host[receiver]),
            )
            if sender in brought:
                graph.add_edge(brought[sender], final, reason="data")
            for earlier in after:
                if earlier != source and (hop := last[earlier]) is not None:
                    graph.add_edge(hop, final, reason="order")
            brought[receiver] = final
        last.append(final)
    return graph
