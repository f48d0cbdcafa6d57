"""The trees of a plan: how regions pass from host to host."""

from __future__ import annotations

import numpy as np

from reshard.drawing import colour_of
from reshard.formatting import count_of, format_bytes
from reshard.plan import Plan

#: The ``(sending host, receiving host)`` pairs of one region, sorted.
Tree = tuple[tuple[int, int], ...]
#: Largest number of trees that a page draws; the trees with the most bytes come first.
MAX_TREES = 24
STYLE = """
.reshard .trees { display: flex; flex-wrap: wrap; gap: 1em; }
.reshard .trees figure { margin: 0; text-align: center; font-size: 13px; max-width: 100%; }
.reshard .trees svg { width: auto; max-width: 100%; } .reshard .trees text { fill: #000; }
"""


def draw_trees(plan: Plan) -> str:
    """Drawings of the trees of several hosts with the most bytes, and the bytes of all regions that take each."""
    trees = _find_trees(plan)
    direct = sum(nbytes for tree, nbytes in trees if len(tree) == 1)
    trees = [(tree, nbytes) for tree, nbytes in trees if len(tree) > 1]
    if not trees:
        return "<p>Every region passes from one host to one other, so the arrows above are all there is.</p>"
    also = f" {format_bytes(direct)} more pass from one host to one other." if direct else ""
    lines = [
        f"<p>How regions pass between hosts, and the bytes of all regions of each tree.{also}</p><div class='trees'>"
    ]
    for tree, nbytes in trees[:MAX_TREES]:
        lines.append(f"<figure>{draw_tree(tree)}<figcaption>{format_bytes(nbytes)}</figcaption></figure>")
    lines.append("</div>")
    if len(trees) > MAX_TREES:
        lines.append(f"<p>and {count_of(len(trees) - MAX_TREES, 'more tree')}</p>")
    return "\n".join(lines)


def _find_trees(plan: Plan) -> list[tuple[Tree, int]]:
    """Pairs ``(tree, bytes of the regions that take it)``, most bytes first.

    A tree is the set of ``(sending host, receiving host)`` pairs of one region.
    """
    transfers = plan.transfers
    hosts = plan.topology.host_array
    edges_across = np.flatnonzero(hosts[transfers.sender] != hosts[transfers.receiver])
    transfer_of = transfers.transfer_of_edge[edges_across]
    a, b = hosts[transfers.sender[edges_across]], hosts[transfers.receiver[edges_across]]
    nbytes = plan.message_bytes[transfer_of]
    first = transfers.first_box
    key = np.concatenate([transfers.box_tensor[first, None], transfers.box_start[first]], axis=1)
    edges: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    size: dict[tuple[int, ...], int] = {}
    for transfer, x, y, n in zip(transfer_of.tolist(), a.tolist(), b.tolist(), nbytes.tolist(), strict=True):
        region = tuple(key[transfer].tolist())
        edges.setdefault(region, []).append((x, y))
        size[region] = n
    total: dict[Tree, int] = {}
    for region, region_edges in edges.items():
        tree = tuple(sorted(set(region_edges)))
        total[tree] = total.get(tree, 0) + size[region]
    return sorted(total.items(), key=lambda entry: (-entry[1], entry[0]))


def draw_tree(tree: Tree) -> str:
    """An SVG of a tree. The column of a host is its number of hops from a source."""
    entered = {host for _, host in tree}
    depth = {host: 0 for host, _ in tree if host not in entered}
    while any(x not in depth or y not in depth for x, y in tree):
        more = {y: depth[x] + 1 for x, y in tree if x in depth and y not in depth}
        # Hosts that exchange replicas in both directions have no source among them: start with one of their senders.
        depth.update(more or {next(x for x, _ in tree if x not in depth): 0})
    columns: dict[int, list[int]] = {}
    for host, column in sorted(depth.items()):
        columns.setdefault(column, []).append(host)
    at = {host: (16 + 44 * column, 18 + 30 * i) for column, hosts in columns.items() for i, host in enumerate(hosts)}
    width, height = 32 + 44 * max(columns), 36 + 30 * (max(map(len, columns.values())) - 1)
    lines = [f"<svg width='{width}' viewBox='0 0 {width} {height}'>"]
    for x, y in tree:
        if x in at and y in at:
            (x0, y0), (x1, y1) = at[x], at[y]
            lines.append(f"<line x1='{x0}' y1='{y0}' x2='{x1}' y2='{y1}' stroke='var(--soft)'/>")
    for host, (x, y) in at.items():
        lines.append(f"<circle cx='{x}' cy='{y}' r='12' fill='{colour_of(host)}'/>")
        lines.append(f"<text x='{x}' y='{y + 4}' text-anchor='middle'>{host}</text>")
    lines.append("</svg>")
    return "".join(lines)
