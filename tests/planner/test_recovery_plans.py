"""Recovery plans: they send exactly the missing regions from survivors that hold them, or name the lost regions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from reshard import Layout, Mesh, Topology, check_plan, make_plan
from reshard.errors import RankLostError
from reshard.plan import expand_messages
from reshard.planner.recovery_plans import (
    MissingBox,
    RankProgress,
    _cut,
    _format_loss,
    find_boxes,
    find_missing,
    plan_remainder,
    view_pieces,
    whole_tensors,
)
from reshard.planner.strategy_registry import STRATEGIES
from tests.support.memory_transport import run_in_threads
from tests.support.strategies_of_cases import cases
from tests.support.tensors import same_bytes, take_shard, whole_tensor


def _num_recvs(plan, rank):
    return sum(m.receiver == rank != m.sender for m in expand_messages(plan, rank))


def _land(plan, pieces, arrived, first, whole, outs):
    """Write the received elements into the destination shards, as the executor does."""
    for rank, progress in arrived.items():
        received = 0
        for message in expand_messages(plan, rank):
            if message.receiver != rank:
                continue
            is_copy = message.sender == rank
            has = progress.copied if is_copy else received < progress.received
            received += not is_copy
            for tensor, start, stop in message.boxes if has else ():
                origin = pieces[tensor]
                lo, hi = (tuple(a + b for a, b in zip(origin.start, x, strict=True)) for x in (start, stop))
                at = find_boxes(first.tensors[0].dst_tiles, rank, [(lo, hi)])[0]
                if at is not None:
                    outs[rank][at] = whole[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]


def _holdings(first, ranks, landed):
    """Elements of the global tensor that each rank holds: its source shard, and what it received."""
    spec, held = first.tensors[0], {}
    for rank in ranks:
        held[rank] = torch.zeros(spec.shape, dtype=torch.bool)
        for shards, keep in ((spec.src_tiles, None), (spec.dst_tiles, landed.get(rank))):
            for box, local in shards.boxes_of(rank) if rank in shards.layout.ranks else ():
                at = tuple(slice(lo, hi) for lo, hi in box)
                if keep is None:
                    held[rank][at] = shards is spec.src_tiles or held[rank][at]
                else:
                    mine = tuple(slice(o, o + hi - lo) for o, (lo, hi) in zip(local, box, strict=True))
                    held[rank][at] |= keep[mine]
    return held


def test_ranks_without_progress_have_received_nothing():
    plan = make_plan(Layout(Mesh.of(2), "S0"), Layout(Mesh([2])), (4,), "int8", strategy="send_recv")
    assert find_missing(plan, whole_tensors(plan), {}, [0, 1, 2]) == [
        MissingBox(0, (0,), (2,), frozenset({2})), MissingBox(0, (2,), (4,), frozenset({2})),
    ]  # fmt: skip


def test_lost_regions_of_a_encoded_tensor_are_in_blocks():
    plan = make_plan(Layout(Mesh.of(2), "S0"), Layout(Mesh([2])), (64, 256), "float32", compression="int8x128")
    pieces = find_missing(plan, whole_tensors(plan), {}, [1, 2])
    with pytest.raises(RankLostError, match=r"it \[0:32, 0:2\] in blocks of 128 values: rank 2 still needs") as caught:
        plan_remainder(pieces, plan, [1, 2], {0})
    assert caught.value.regions == ("[0:32, 0:2] in blocks of 128 values",)


@pytest.mark.nightly
@given(cases(), st.sampled_from(sorted(STRATEGIES)), st.data())
@settings(max_examples=150)
def test_survivors_receive_everything_that_a_survivor_holds(case, strategy, data):
    shape, src, dst, topology = case
    first = make_plan(src, dst, shape, "int64", strategy=strategy, topology=topology)
    whole = whole_tensor(shape, torch.int64)
    sources = {rank: take_shard(src, rank, whole) for rank in src.ranks}
    outs = {rank: torch.full_like(take_shard(dst, rank, whole), -1) for rank in dst.ranks}
    plan, pieces, survivors = first, whole_tensors(first), set(first.ranks)
    for _ in range(2):
        lost = data.draw(st.sets(st.sampled_from(sorted(survivors)), max_size=max(len(survivors) - 1, 0)))
        survivors -= lost
        arrived = {
            rank: RankProgress(data.draw(st.booleans()), data.draw(st.integers(0, _num_recvs(plan, rank))))
            for rank in sorted(survivors & set(plan.ranks))
        }
        _land(plan, pieces, arrived, first, whole, outs)
        pieces = find_missing(plan, pieces, arrived, survivors)
        landed = {rank: outs[rank] != -1 for rank in survivors & set(dst.ranks)}
        held = _holdings(first, survivors, landed)
        somewhere = torch.zeros(shape, dtype=torch.bool)
        for rank in survivors:
            somewhere |= held[rank]
        missing = {}
        for rank in survivors & set(dst.ranks):
            count = torch.zeros(shape, dtype=torch.int64)
            for piece in pieces:
                if rank in piece.missing:
                    count[tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))] += 1
            needed = torch.zeros(shape, dtype=torch.bool)
            for box, local in first.tensors[0].dst_tiles.boxes_of(rank):
                mine = tuple(slice(o, o + hi - lo) for o, (lo, hi) in zip(local, box, strict=True))
                needed[tuple(slice(lo, hi) for lo, hi in box)] = ~landed[rank][mine]
            assert torch.equal(count, needed.long())  # each missing element is in one piece
            missing[rank] = needed
        if not pieces:
            assert not any(needed.any() for needed in missing.values())
            break
        lost_elements = torch.zeros(shape, dtype=torch.bool)
        for needed in missing.values():
            lost_elements |= needed & ~somewhere
        lost_ranks = set(first.ranks) - survivors
        if lost_elements.any():
            with pytest.raises(RankLostError, match="still need") as caught:
                plan_remainder(pieces, first, survivors, lost_ranks)
            assert caught.value.regions and set(caught.value.ranks) == lost_ranks
            return
        plan, pieces = plan_remainder(pieces, first, survivors, lost_ranks)
        check_plan(plan)
        assert set(plan.ranks) <= survivors
    if pieces:
        views = {r: view_pieces(plan, pieces, first, r, [sources.get(r)], [outs.get(r)]) for r in plan.ranks}
        run_in_threads(plan, {r: views[r][0] for r in plan.ranks}, {r: views[r][1] for r in plan.ranks})
    for rank in survivors & set(dst.ranks):
        assert same_bytes(outs[rank], take_shard(dst, rank, whole))
    for rank in src.ranks:
        assert same_bytes(sources[rank], take_shard(src, rank, whole))


@pytest.mark.parametrize(
    ("num_regions", "lost", "text"),
    [
        (1, {4}, "rank 4 is lost, and with it 'w' [0:1]: rank 0 still needs it and no surviving rank holds it"),
        (3, {4}, "it 'w' [0:1], 'w' [2:3], 'w' [4:5]: ranks 0-2 still need it"),
        (4, {5, 4}, "ranks 4-5 are lost, and with them 'w' [0:1], 'w' [2:3], 'w' [4:5] and 1 more region: ranks 0-3"),
        (9, {4}, "'w' [4:5] and 6 more regions: ranks 0-8 still need it"),
    ],
)
def test_error_names_up_to_three_lost_regions(num_regions, lost, text):
    plan = make_plan(Layout(Mesh([4])), Layout(Mesh([0])), {"w": (18,)}, "int8")
    unheld = [MissingBox(0, (2 * i,), (2 * i + 1,), frozenset({i})) for i in range(num_regions)]
    assert text in _format_loss(unheld, plan, lost)


def test_missing_chunks_of_one_region_form_one_piece():
    """Ranks 2 and 3 need the whole tensor; rank 3 misses half of it, which ranks 1 and 2 hold."""
    rows, everything = Layout(Mesh([0, 1])), Layout(Mesh([2, 3]))
    options = {"strategy": "broadcast_naive", "topology": Topology((0, 1, 2, 3)), "staging_bytes": 2**16}
    plan = make_plan(rows, everything, (4096, 64), "float32", **options)
    half = _num_recvs(plan, 3) // 2
    assert half == 64
    arrived = {1: RankProgress(True, 0), 2: RankProgress(True, _num_recvs(plan, 2)), 3: RankProgress(True, half)}
    pieces = find_missing(plan, whole_tensors(plan), arrived, [1, 2, 3])
    assert [(piece.start, piece.stop, piece.missing) for piece in pieces] == [((2048, 0), (4096, 64), {3})]
    both = find_missing(plan, whole_tensors(plan), arrived | {2: RankProgress(True, 96)}, [1, 2, 3])
    assert [(piece.start[0], piece.stop[0], piece.missing) for piece in both] == [
        (2048, 3072, {3}),
        (3072, 4096, {2, 3}),  # missed by other ranks
    ]
    rest, _ = plan_remainder(pieces, plan, [1, 2, 3], [0])
    assert rest.tensors[0].src.ranks == (1, 2) and rest.tensors[0].dst.ranks == (3,)


def test_pieces_are_cut_at_bounds_of_overlapping_pieces():
    piece = MissingBox(0, (0, 0), (8, 4), frozenset({1}))

    def ends(*others):
        return [(part.start, part.stop) for part in _cut(piece, [replace(piece, **other) for other in others])]

    assert ends({"start": (3, 0), "stop": (9, 4)}) == [((0, 0), (3, 4)), ((3, 0), (8, 4))]
    assert ends({}, {"start": (0, 2), "stop": (8, 3)}) == [((0, 0), (8, 2)), ((0, 2), (8, 4))]
    assert ends({"start": (0, 0), "stop": (9, 4)}, {"tensor": 1, "stop": (3, 4)}) == [((0, 0), (8, 4))]
    assert ends({"start": (3, 4), "stop": (9, 6)}) == [((0, 0), (8, 4))]  # adjacent, not overlapping
