"""Messages of routes: small regions travel together."""

from __future__ import annotations

from reshard import Layout, Mesh, RegionLayout, make_plan
from reshard.plan import plan_to_json
from reshard.planner.strategies.chunk_limits import INSIDE_WINDOW


def test_small_regions_between_two_ranks_share_a_message():
    """Interleaved columns: the 32 boxes from rank 0 to rank 2 are one message."""
    stripes = {rank: [[(0, 4), (2 * i + rank, 2 * i + rank + 1)] for i in range(32)] for rank in (0, 1)}
    src = RegionLayout(stripes, join_dim=1)
    plan = make_plan(src, Layout(Mesh([2], {"x": 1})), (4, 64), "float32")
    assert len(plan.transfers) == 2
    assert plan.num_messages == 64
    assert {len(m["after"]) for m in plan_to_json(plan)["messages"]} == {0}
    assert plan_to_json(plan)["messages"][0]["window"] == 32 * INSIDE_WINDOW
