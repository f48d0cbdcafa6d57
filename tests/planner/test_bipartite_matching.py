"""The matching of senders and receivers equals brute force, and relays stage no more messages than fit."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from reshard.plan import num_recv_slots
from reshard.planner.multicast.native_schedule import ChunkSchedule
from reshard.planner.multicast.relay_limits import _fits, limit_relay_staging
from tests.reference.bipartite_matching import find_pairs


def _best(senders, receivers, partners, weight):
    """Brute force over all matchings: prefer earlier receivers, then the largest total weight of the senders."""
    found = []
    for chosen in itertools.product(*([None, *partners[r]] for r in receivers)):
        taken = [s for s in chosen if s is not None]
        if len(set(taken)) == len(taken):
            found.append(([s is not None for s in chosen], sum(weight[s] for s in taken)))
    return max(found)


@pytest.mark.parametrize("seed", range(60))
def test_matching_prefers_first_receivers_then_heaviest_senders(seed):
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
def test_staged_messages_count_until_they_are_forwarded(order, most):
    """Rank 5 receives pieces and forwards them to rank 6; when a message arrives, it stages at most ``most`` pieces."""
    words = order.split()
    of_piece = {int(word[1]): index for index, word in enumerate(words) if word[0] == "R"}
    is_forward = np.array([word[0] == "S" for word in words])
    schedule = SimpleNamespace(
        piece=np.array([int(word[1]) for word in words]),
        receiver=np.where(is_forward, 6, 5),
        source=np.array([of_piece[int(word[1])] if word[0] == "S" else -1 for word in words]),
        staged=~is_forward,
    )
    workload = SimpleNamespace(piece_bytes=np.full(3, 2**16))
    for slots in (1, 2, 3, 4):
        staging_bytes = next(n for n in itertools.count(2**16, 2**16) if num_recv_slots(n, 2**16) >= slots)
        assert num_recv_slots(staging_bytes, 2**16) == slots
        assert _fits(schedule, workload, staging_bytes) == (most < slots)


def test_staged_messages_that_do_not_fit_are_forwarded_at_once():
    """Rank 5 receives three pieces before it forwards them to rank 6, which needs them."""
    after = [[], [0], [1], [0, 2], [1, 3], [2, 4]]
    schedule = ChunkSchedule(
        piece=np.array([0, 1, 2, 0, 1, 2]),
        sender=np.array([0, 0, 0, 5, 5, 5]),
        receiver=np.array([5, 5, 5, 6, 6, 6]),
        source=np.array([-1, -1, -1, 0, 1, 2]),
        after_offsets=np.cumsum([0, *map(len, after)]),
        after=np.array(list(itertools.chain(*after))),
        staged=np.array([True] * 3 + [False] * 3),
    )
    workload = SimpleNamespace(piece_bytes=np.full(3, 2**16))
    assert num_recv_slots(2**19, 2**16) == 4 and limit_relay_staging(schedule, workload, 2**19) is schedule
    made = limit_relay_staging(schedule, workload, 2**17)
    assert made.piece.tolist() == [0, 0, 1, 1, 2, 2] and made.receiver.tolist() == [5, 6] * 3
    assert made.source.tolist() == [-1, 0, -1, 2, -1, 4]
    assert [made.after[a:b].tolist() for a, b in itertools.pairwise(made.after_offsets)] == [
        [],
        [0],
        [0],
        [2],
        [2],
        [4],
    ]
    needed = replace(schedule, staged=np.zeros(6, dtype=bool))
    assert limit_relay_staging(needed, workload, 2**17) is needed  # rank 5 needs the pieces, so it stages none
