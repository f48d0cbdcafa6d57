"""A plan as a graph of hops: which edge of which tree waits for which."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx as nx

    from reshard.plan.model import Plan


def plan_to_networkx(plan: Plan) -> nx.DiGraph:
    """The hops of a plan and the order among them, as a ``networkx.DiGraph``.

    A node is one hop, ``(transfer, sender, receiver)``. Node attributes:

    * ``nbytes``: bytes of the hop, over all its chunks; ``num_chunks``: into how many chunks they are cut.
    * ``crosses_hosts``: whether sender and receiver are on different hosts.

    Edges point from a hop to a later one. Edge attribute ``reason``: "data" (the hop brings the data to the sender of
    the later one, chunk by chunk) or "order" (the later transfer starts when this one has finished).

    Copies within a rank are left out. The graph has no cycle, because a transfer can only come after an earlier one.
    """
    import networkx as nx

    transfers, host = plan.transfers, plan.topology.host_by_rank
    graph = nx.DiGraph()
    last: list[tuple[int, int, int] | None] = []  # of each transfer, its last hop
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
