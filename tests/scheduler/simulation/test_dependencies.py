"""The dependency graph of a schedule: its attributes, its critical path, and the cycle that a deadlock error names."""

from __future__ import annotations

import networkx as nx
import pytest

from reshard.errors import ScheduleError
from reshard.scheduler import (
    Edge,
    Pipeline,
    Stage,
    critical_path,
    gpipe,
    one_f_one_b,
    parse_schedule,
    simulate_schedule,
    zb_h1,
)
from reshard.scheduler.passes.transfer_overlap import block_transfers
from reshard.scheduler.schedules.classic import eager_1f1b

PIPELINE = Pipeline(
    (Stage(1.0, 1.0, 0.5), Stage(2.0, 1.5, 1.0), Stage(1.0, 1.0, 1.0)), (Edge(0, 1, 0.25, 0.5), Edge(1, 2, 0.5, 0.25))
)


@pytest.mark.parametrize("build", [gpipe, one_f_one_b, eager_1f1b, zb_h1])
@pytest.mark.parametrize("num_microbatches", [1, 4, 7])
def test_critical_path_is_as_long_as_the_simulation_without_contention(build, num_microbatches):
    schedule = build(PIPELINE, num_microbatches)
    for variant in (schedule, block_transfers(schedule, PIPELINE)):
        path = critical_path(variant, PIPELINE)
        assert path.seconds == pytest.approx(simulate_schedule(variant, PIPELINE).makespan_seconds)
        assert path.nodes[0] == "0F0"


def test_graph_has_the_documented_attributes():
    graph = one_f_one_b(PIPELINE, 7).to_networkx(PIPELINE)
    assert nx.is_directed_acyclic_graph(graph)
    assert {graph.nodes[node]["kind"] for node in graph} == {"F", "B", "transfer"}
    assert all({"kind", "pp_rank", "microbatch", "seconds", "text"} <= set(graph.nodes[node]) for node in graph)
    assert {edge["reason"] for *_, edge in graph.edges(data=True)} == {"data", "order", "posted", "channel"}


def test_deadlock_error_names_the_transfers_of_the_cycle():
    text = (
        "crossed: 1 microbatches, stages on pp ranks 0 1\n"
        "0: 0F0 0RECV_B0<1! 0SEND_F0>1! 0B0\n"
        "1: 1RECV_F0<0! 1F0 1B0 1SEND_B0>0!\n"
    )
    pipeline = Pipeline((Stage(1.0, 1.0, 1.0),) * 2, (Edge(0, 1, 0.5, 0.5),))
    with pytest.raises(ScheduleError, match="deadlocks") as raised:
        simulate_schedule(parse_schedule(text), pipeline)
    message = str(raised.value)
    assert "activations of microbatch 0 from stage 0 to 1" in message and ", which waits for " in message
    assert "gradients of microbatch 0 from stage 1 to 0" in message
    with pytest.raises(ScheduleError, match=r"deadlocks: .* waits for .* which waits for"):
        critical_path(parse_schedule(text), pipeline)
