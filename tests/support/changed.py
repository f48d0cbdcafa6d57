"""Plan texts for tests of the checkers: random mutations of a plan, and random plans with much relaying."""

from __future__ import annotations

import itertools
import random
import re

_EDGES, _BOXES, _SPLITS = r"\] ([0-9 ,>-]+) splits", r"t\d.*\] (?=\d)", r"splits [0-9x]+"


def change_plan(text: str, chance: random.Random) -> str:
    """Apply one random change: edit, swap, drop, repeat or move a transfer, or copy a part of another transfer."""
    lines = text.split("\n")
    rows = [i for i, line in enumerate(lines) if re.match(r"\d+: t", line)]
    if not rows:
        return text
    at, other = chance.choice(rows), chance.choice(rows)
    line = lines[at]
    how = chance.randrange(11)
    if how == 0:
        number = chance.choice(list(re.finditer(r"\d+", line)))
        changed = max(0, int(number[0]) + chance.choice((-1, 1, 2)))
        line = f"{line[: number.start()]}{changed}{line[number.end() :]}"
    elif how == 1:
        line, lines[other] = lines[other], line
    elif how == 2:
        line = re.sub(chance.choice((r" from \d+", r" after [\d,]+")), "", line)
    elif how == 3 and " from " not in line:
        line = re.sub(r"(window \d+)", rf"\1 from {lines[other].split(':')[0]}", line)
    elif how == 4:
        line = re.sub(_EDGES, re.search(_EDGES, lines[other])[0], line)
    elif how == 5:
        line = re.sub(_BOXES, re.search(_BOXES, lines[other])[0], line)
    elif how == 6:
        splits = "x".join(str(chance.randint(1, 3)) for _ in re.search(_SPLITS, line)[0].split("x"))
        line = re.sub(_SPLITS, f"splits {splits}", line)
    elif how == 7:
        return renumber([*lines[:at], *lines[at + 1 :]])
    elif how == 8:
        return renumber([*lines[: at + 1], line, *lines[at + 1 :]])
    elif how == 9:
        rest = [*lines[:at], *lines[at + 1 :]]
        return renumber([*rest[:other], line, *rest[other:]])
    elif how == 10:
        staging = int(re.search(r"staging_bytes=(\d+)", lines[0])[1])
        lines[0] = re.sub(r"=\d+", f"={chance.choice((0, 1, 7, staging // 2, staging // 8, 2 * staging))}", lines[0])
    lines[at] = line if at else lines[at]
    return renumber(lines)


def renumber(lines: list[str]) -> str:
    """Renumber the message ids of a plan's lines by position; lines that are not transfers stay unchanged."""
    names: dict[str, int] = {}
    found, ident = [], 0
    for line in lines:
        head = re.match(r"(\d+): t", line)
        edges, splits = re.search(_EDGES, line), re.search(_SPLITS, line)
        if head is None or edges is None or splits is None:
            found.append(line)
            continue
        tail = re.search(r"window \d+(.*)", line)[1]
        tail = re.sub(r"\d+", lambda m: str(names.get(m[0], m[0])), tail)
        line = re.sub(r"(window \d+).*", lambda m, tail=tail: m[1] + tail, line)
        names[head[1]] = ident
        found.append(f"{ident}{line[len(head[1]) :]}")
        num_edges = sum(path.count("->") for path in edges[1].split(","))
        num_chunks = 1
        for part in splits[0].split()[1].split("x"):
            num_chunks *= int(part)
        ident += num_edges * num_chunks * (1 + line.count(" + t"))
    return "\n".join(found)


def _cut(box: list[tuple[int, int]], chance: random.Random, depth: int) -> list[list[tuple[int, int]]]:
    """Split a box at random into disjoint boxes that cover it."""
    dims = [dim for dim, (lo, hi) in enumerate(box) if hi - lo > 1]
    if not depth or not dims:
        return [box]
    dim = chance.choice(dims)
    at = chance.randint(box[dim][0] + 1, box[dim][1] - 1)
    halves = ([*box[:dim], side, *box[dim + 1 :]] for side in ((box[dim][0], at), (at, box[dim][1])))
    return [part for half in halves for part in _cut(half, chance, depth - chance.randint(1, 2) if depth > 1 else 0)]


def relayed_plan(seed: int) -> str:
    """A random plan text: rank 0 holds a tensor that ranks 3 and 4 need, and ranks 1 and 2 relay parts of it.

    A relay may stage the same part several times. Some plans are invalid, because parts staged on a relay overlap.
    """
    chance = random.Random(seed)
    shape = [chance.choice((4, 6, 8)) for _ in range(chance.randint(1, 3))]
    cuts = _cut([(0, size) for size in shape], chance, 3)
    chains = []
    for destination in (3, 4):
        if destination == 4 and chance.random() < 0.4:
            cuts = _cut([(0, size) for size in shape], chance, chance.randint(0, 3))
        for box in cuts:
            path = [0, *chance.sample((1, 2), chance.randint(0, 2)), destination]
            chains.append((box, list(itertools.pairwise(path))))
    lines, ident = [], 0
    previous: list[int | None] = [None] * len(chains)  # id of the last message of each chain
    while any(edges for _, edges in chains):
        ready = [i for i, (_, edges) in enumerate(chains) if edges]
        i = chance.choice(ready) if chance.random() < 0.5 else ready[0]
        box, edges = chains[i]
        sender, receiver = edges.pop(0)
        where = ", ".join(f"{lo}:{hi}" for lo, hi in box)
        source = "" if previous[i] is None else f" from {previous[i]}"
        lines.append(f"{ident}: t0 [{where}] {sender} -> {receiver} splits {'x'.join('1' * len(box))} window 4{source}")
        previous[i], ident = ident, ident + 1
    sizes, whole = ", ".join(map(str, shape)), "[" + ", ".join(f"0:{size}" for size in shape) + "]"
    dst = f"Regions(ndim={len(shape)} join=0; 1: none; 2: none; 3: {whole}; 4: {whole})"
    return "\n".join(
        [
            f"plan by_hand staging_bytes={chance.choice((64, 256, 4096))}",
            "topology nic_bytes_per_second=1.0 hosts 0*5",
            f"tensor 0 int8 [{sizes}] from () on Mesh(ranks 0) to {dst}",
            *lines,
            "",
        ]
    )
