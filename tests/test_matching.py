"""Which sender serves which receiver, and whether what ranks stage has room, against what is tried one by one."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

from reshard.matching import find_pairs
from reshard.plan import num_recv_slots
from reshard.relays import _fits


def _best(senders, receivers, partners, weight):
    """Of all ways to pair them: those with the first receivers, and of these the heaviest senders in all."""
    found = []
    for chosen in itertools.product(*([None, *partners[r]] for r in receivers)):
        taken = [s for s in chosen if s is not None]
        if len(set(taken)) == len(taken):
            found.append(([s is not None for s in chosen], sum(weight[s] for s in taken)))
    return max(found)


@pytest.mark.parametrize("seed", range(60))
def test_pairs_keep_the_first_receivers_busy_with_the_heaviest_senders(seed):
    chance = random.Random(seed)
    senders, receivers = list(range(chance.randint(1, 5))), list(range(10, 10 + chance.randint(1, 5)))
    weight = {s: chance.choice((1.0, 2.0, 3.0, 5.0)) for s in senders}
    senders.sort(key=lambda s: -weight[s])
    partners = {r: [s for s in senders if chance.random() < 0.5] for r in receivers}
    pairs = find_pairs(senders, receivers, partners, weight)
    assert len(set(pairs.values())) == len(pairs) and all(s in partners[r] for r, s in pairs.items())
    is_busy, total = _best(senders, receivers, partners, weight)
    assert ([r in pairs for r in receivers], sum(weight[s] for s in pairs.values())) == (is_busy, total)


@pytest.mark.parametrize(
    ("order", "most"),
    [("R0 R1 R2 S0 S1 S2", 2), ("R0 S0 R1 S1 R2 S2", 0), ("R0 R1 S1 R2 S0 S2", 1), ("R0 R1 S0 R2 S1 S2", 1)],
)
def test_what_is_staged_counts_until_it_has_gone_on(order, most):
    """Rank 5 receives pieces and sends each on to rank 6; ``most`` are staged when the next one comes."""
    words = order.split()
    of_piece = {int(word[1]): at for at, word in enumerate(words) if word[0] == "R"}
    is_use = np.array([word[0] == "S" for word in words])
    schedule = SimpleNamespace(
        piece=np.array([int(word[1]) for word in words]),
        receiver=np.where(is_use, 6, 5),
        source=np.array([of_piece[int(word[1])] if word[0] == "S" else -1 for word in words]),
    )
    freight = SimpleNamespace(piece_bytes=np.full(3, 2**16))
    for slots in (1, 2, 3, 4):
        staging_bytes = next(n for n in itertools.count(2**16, 2**16) if num_recv_slots(n, 2**16) >= slots)
        assert num_recv_slots(staging_bytes, 2**16) == slots
        assert _fits(schedule, freight, ~is_use, staging_bytes) == (most < slots)
