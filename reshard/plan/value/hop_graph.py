"""A plan as a graph: its nodes are hops (edges of trees), and its edges say which hop waits for which."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reshard.plan.value.transfers import GATHERED, PlanTransfers

if TYPE_CHECKING:
    import networkx as nx


def build_hop_graph(transfers: PlanTransfers, message_bytes: np.ndarray, host: np.ndarray) -> nx.DiGraph:
    """The hops of transfers and their dependencies; see :meth:`Plan.to_networkx`.

    Args:
        message_bytes: bytes of each transfer.
        host: host of each rank.
    """
    import networkx as nx

    graph = nx.DiGraph()
    last: list[tuple[int, int, int] | None] = []  # last hop of each transfer; None if it only copies
    for transfer in range(len(transfers)):
        brought: dict[int, tuple[int, int, int]] = {}
        source = int(transfers.source[transfer])
        if source >= 0 and (hop := last[source]) is not None:
            brought[hop[2]] = hop
        after = transfers.after[transfers.after_offsets[transfer] : transfers.after_offsets[transfer + 1]].tolist()
        final = None
        for sender, receiver in transfers.edges_of(transfer):
            if sender == receiver:
                continue
            final = transfer, sender, receiver
            graph.add_node(
                final,
                nbytes=int(message_bytes[transfer]),
                num_chunks=int(transfers.num_chunks[transfer]),
                crosses_hosts=bool(host[sender] != host[receiver]),
            )
            if sender in brought:
                graph.add_edge(brought[sender], final, reason="data")
            for earlier in after:
                if earlier != source and (hop := last[earlier]) is not None:
                    is_data = source == GATHERED and hop[2] == sender
                    graph.add_edge(hop, final, reason="data" if is_data else "order")
            brought[receiver] = final
        last.append(final)
    return graph
