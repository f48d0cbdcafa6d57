"""The total order of messages on random inputs, against its rules written as pairs."""

from __future__ import annotations

import itertools
import random

import networkx as nx

from tests.reference.linearization import STAGED_AFTER, STAGED_BEFORE, linearize
from tests.reference.rank_assignment import Messages

RANKS = 6


def _draw(seed):
    """Random messages between ranks of three hosts; some receivers forward their pieces."""
    chance = random.Random(seed)
    messages = Messages()
    ranks = chance.randint(3, RANKS)
    for piece in range(chance.randint(1, 8)):
        first = chance.randrange(ranks)
        has = [(first, -1)]  # (rank, message that brought the piece)
        for _ in range(chance.choice((1, 1, 2, 3, 5))):
            sender, source = chance.choice(has)
            receiver = chance.choice([rank for rank in range(ranks) if rank != sender])
            start = chance.randint(0, 12)
            before = chance.sample(range(len(messages.piece)), min(len(messages.piece), chance.choice((0, 0, 0, 1))))
            number = messages.add(piece, sender, receiver, source, before, start, start + chance.randint(1, 4))
            if chance.random() < 0.7:
                messages.staged.add(number)
            has.append((receiver, number))
    crosses = [a // 2 != b // 2 for a, b in zip(messages.sender, messages.receiver, strict=True)]
    return messages, crosses


def _rules(messages, crosses):
    """Pairs ``(earlier, later)`` of messages: dependencies, order at senders and receivers, and staging limits."""
    every = range(len(messages.piece))
    yield from ((first, i) for i in every for first in messages.after[i])
    for rank in range(RANKS):
        sent = sorted((messages.start[i], i) for i in every if messages.sender[i] == rank and crosses[i])
        yield from itertools.pairwise(i for _, i in sent)
        for (_, earlier), (_, i) in zip(sent, sent[STAGED_BEFORE:], strict=False):
            source = messages.source[i]
            is_first_use = next(k for _, k in sent if messages.source[k] == source) == i
            if source in messages.staged and not crosses[source] and is_first_use:
                yield earlier, source
        got = [
            i for *_, i in sorted((messages.end[i], not crosses[i], i) for i in every if messages.receiver[i] == rank)
        ]
        yield from itertools.pairwise(got)
        for i, later in zip(got, got[STAGED_AFTER:], strict=False):
            if i in messages.staged and crosses[i]:
                yield from ((use, later) for use in every if messages.source[use] == i and not crosses[use])


def test_order_is_by_end_subject_to_all_rules():
    kept, staged = 0, 0
    for seed in range(800):
        messages, crosses = _draw(seed)
        count = len(crosses)
        rules = nx.DiGraph(list(_rules(messages, crosses)))
        rules.add_nodes_from(range(count))
        sequence = linearize(messages, crosses)
        assert sorted(sequence) == list(range(count))
        if nx.is_directed_acyclic_graph(rules):
            kept += 1
            staged += len(messages.staged)
            by_end = [(messages.end[i], not crosses[i], i) for i in range(count)]
            assert sequence == list(nx.lexicographical_topological_sort(rules, by_end.__getitem__)), seed
        else:
            place = {i: index for index, i in enumerate(sequence)}
            assert all(place[first] < place[i] for i in sequence for first in messages.after[i]), seed
    assert 400 < kept < 750 and staged > 1000  # both acyclic and cyclic rules occur
