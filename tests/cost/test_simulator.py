"""The simulator against times worked out by hand, its reference implementation, and the lower bound."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reshard import Layout, Mesh, Topology, find_bound, load_preset, make_plan, simulate
from reshard.cost.fluid import flow, flow_until
from reshard.cost.inside_lower_bound import bound_inside
from reshard.cost.latency_bounds import find_latency_bounds
from reshard.cost.prediction import Makespan, predict_makespan
from reshard.cost.simulator import network_of
from reshard.plan import expand_messages, find_sender_changes, message_nbytes, parse_plan, tabulate_messages
from reshard.planner.strategy_registry import STRATEGIES
from reshard.sharding.tensor_spec import TensorSpec
from reshard.topology.topology import Host, Link
from tests.reference.fluid import flow_python
from tests.support.strategies_of_cases import cases


def _plan(transfers, hosts, ranks, nbytes=100, rate=10.0):
    """A plan of one int8 tensor from plan text; ``ranks`` are the source and destination layouts."""
    head = f"plan x staging_bytes=67108864\ntopology nic_bytes_per_second={rate!r} hosts {hosts}\n"
    src, dst = ranks
    tensor = f"tensor 0 int8 [{nbytes}] from {src} to {dst}\n"
    return parse_plan(head + tensor + "\n".join(transfers) + "\n")


ONE_TO_TWO = ("() on Mesh(0=1; ranks 0)", "() on Mesh(0=2; ranks 1-2)")


def _times(plan, **changes):
    timeline = simulate(plan, replace(plan.topology, **changes))
    return [(round(a, 6), round(b, 6)) for a, b in zip(timeline.start, timeline.finish, strict=True)]


def test_two_receivers_share_the_sender():
    plan = _plan(["0: t0 [0:100] 0 -> 1, 0 -> 2 splits 1 window 4"], "0*1,1*1,2*1", ONE_TO_TWO)
    assert _times(plan) == [(0, 20), (0, 20)]
    one_by_one = _plan(["0: t0 [0:100] 0 -> 1, 0 -> 2 splits 1 window 1"], "0*1,1*1,2*1", ONE_TO_TWO)
    assert _times(one_by_one) == [(0, 10), (10, 20)]


def test_chain_is_pipelined_by_chunk():
    plan = _plan(["0: t0 [0:100] 0 -> 1 -> 2 splits 4 window 2"], "0*1,1*1,2*1", ONE_TO_TWO)
    assert _times(plan) == [(0, 2.5), (2.5, 5), (2.5, 5), (5, 7.5), (5, 7.5), (7.5, 10), (7.5, 10), (10, 12.5)]


def test_messages_take_the_rates_of_their_ports_and_directions():
    plan = _plan(["0: t0 [0:100] 0 -> 1, 0 -> 2 splits 1 window 4"], "0*1,1*1,2*1", ONE_TO_TWO)
    hosts = (Host((Link(10.0, 1.0),)), Host((Link(1.0, 2.0),)), Host((Link(1.0, 50.0),)))
    assert _times(plan, hosts=hosts) == [(0, 50), (0, 12.5)]  # 2 to the first receiver, the other 8 to the second


def test_each_nic_is_a_port():
    src, dst = "(0) on Mesh(0=2; ranks 0-1)", "(0) on Mesh(0=2; ranks 2-3)"
    lines = ["0: t0 [0:50] 0 -> 2 splits 1 window 4", "1: t0 [50:100] 1 -> 3 splits 1 window 4"]
    plan = _plan(lines, "0*2,1*2", (src, dst))
    assert _times(plan) == [(0, 10), (0, 10)]
    two = (Host((Link.of(10.0), Link.of(10.0))),)
    assert _times(plan, hosts=two, nic_of_rank=(0, 0, 0, 0)) == [(0, 10), (0, 10)]
    assert [t for _, t in _times(plan, hosts=two, nic_of_rank=())] == [5, 5]


def test_traffic_between_pods_passes_their_uplinks():
    plan = _plan(["0: t0 [0:100] 0 -> 1, 0 -> 2 splits 1 window 4"], "0*1,1*1,2*1", ONE_TO_TWO)
    hosts = tuple(Host((Link.of(100.0),), pod) for pod in (0, 0, 1))
    pods = (Link(10.0, 1.0), Link(1.0, 5.0))
    assert _times(plan, hosts=hosts, pods=pods) == [(0, 1.052632), (0, 20)]


def test_latency_occupies_the_sender_port():
    plan = _plan(["0: t0 [0:100] 0 -> 1, 0 -> 2 splits 2 window 1"], "0*1,1*1,2*1", ONE_TO_TWO)
    assert [t for _, t in _times(plan, latency_seconds=1.0)] == [6, 12, 18, 24]
    together = _plan(["0: t0 [0:100] 0 -> 1, 0 -> 2 splits 1 window 4"], "0*1,1*1,2*1", ONE_TO_TWO)
    assert [t for _, t in _times(together, latency_seconds=1.0)] == [22, 22]


def test_messages_inside_a_host_take_its_rate_and_latency():
    plan = _plan(["0: t0 [0:100] 0 -> 1 -> 2 splits 1 window 4"], "0*3", ONE_TO_TWO)
    assert _times(plan) == [(0, 0), (0, 0)]
    assert _times(plan, inside_bytes_per_second=50.0, inside_latency_seconds=0.5) == [(0, 2.5), (2.5, 5)]


def test_ranks_of_a_host_share_what_it_can_move():
    """Two messages inside one host of together 200 bytes; a third one between hosts passes no such limit."""
    lines = ["0: t0 [0:100] 0 -> 1, 0 -> 2, 0 -> 3 splits 1 window 4"]
    plan = _plan(lines, "0*3,1*1", ("() on Mesh(0=1; ranks 0)", "() on Mesh(0=3; ranks 1-3)"))
    rates = {"inside_bytes_per_second": 100.0, "inside_total_bytes_per_second": 80.0}
    assert _times(plan, **rates) == [(0, 2.5), (0, 2.5), (0, 10)]
    topology = replace(plan.topology, **rates)
    inside = [(0, [1, 2], 2.5, "ranks of host 0 must move 200 bytes inside it and can move 80 bytes/s together")]
    inside += [(0, [1], 1.25, "host 0 must move 100 bytes"), (3, [2], 0.0, "")]
    for held, needed, seconds, reason in inside:
        spec = TensorSpec((100,), "uint8", Layout(Mesh([held]), "R"), Layout(Mesh(needed), "R"))
        found = bound_inside([spec], topology)
        assert found[0] == seconds
        assert reason in found[1]
        assert find_bound([spec], topology).seconds == (seconds or 10)
    slow = replace(topology, inside_bytes_per_second=50.0)
    spec = TensorSpec((100,), "uint8", Layout(Mesh([0]), "R"), Layout(Mesh([1]), "R"))
    assert bound_inside([spec], slow) == (
        2.0,
        "rank 1 must receive 100 bytes inside its host and can receive 50 bytes/s",
    )


def test_send_buffer_lets_the_next_message_start():
    """Two messages of 100 bytes with window 1: the second flows while the rest of the first is in the send buffer."""
    plan = _plan(["0: t0 [0:100] 0 -> 1, 0 -> 2 splits 1 window 1"], "0*1,1*1,2*1", ONE_TO_TWO)
    assert _times(plan, send_buffer_bytes=40) == [(0, 14), (6, 20)]
    assert _times(plan, send_buffer_bytes=100) == [(0, 20), (0, 20)]


def test_token_buckets_save_idle_capacity():
    """A relay that waits for its next chunk fills its bucket; both ports of a path spend their tokens."""
    chain = ["0: t0 [0:100] 0 -> 1 -> 2 splits 2 window 1"]
    plan = _plan(chain, "0*1,1*1,2*1", ONE_TO_TWO)
    assert [t for _, t in _times(plan)] == [5, 10, 10, 15]
    assert [t for _, t in _times(plan, burst_bytes=20)] == [3, 6, 8, 11]
    assert [t for _, t in _times(plan, burst_bytes=20, latency_seconds=1.0)] == [4, 8, 10, 14]
    one = _plan(["0: t0 [0:100] 0 -> 1, 0 -> 2 splits 1 window 4"], "0*1,1*1,2*1", ONE_TO_TWO)
    assert _times(one, burst_bytes=20) == [(0, 18), (0, 18)]


def test_receiver_admits_as_many_messages_as_their_window():
    src, dst = "(0) on Mesh(0=4; ranks 0-3)", "() on Mesh(0=1; ranks 4)"
    for window, first_times in ((2, [5, 5, 10, 10]), (4, [10, 10, 10, 10])):
        lines = [f"{i}: t0 [{25 * i}:{25 * i + 25}] {i} -> 4 splits 1 window {window}" for i in range(4)]
        assert [t for _, t in _times(_plan(lines, "0*1,1*1,2*1,3*1,4*1", (src, dst)))] == first_times


@given(cases(), st.sampled_from(sorted(STRATEGIES)))
def test_message_table_matches_expansion(problem, strategy):
    shape, src, dst, topology = problem
    plan = make_plan(src, dst, shape, "float32", strategy=strategy, topology=topology, staging_bytes=2**16)
    table = tabulate_messages(plan)
    messages = list(expand_messages(plan))
    assert len(table) == len(messages)
    num_boxes = [len(message.boxes) for message in messages]
    for row, message in enumerate(messages):
        assert table.id[row] == message.id
        assert (table.sender[row], table.receiver[row]) == (message.sender, message.receiver)
        assert (table.transfer[row], table.chunk[row]) == (message.transfer, message.chunk)
        assert table.window[row] == message.window
        assert table.nbytes[row] == message_nbytes(plan, message)
        assert (table.id[table.source[row]] if table.source[row] >= 0 else None) == message.source
        after = table.after[table.after_offsets[row] : table.after_offsets[row + 1]]
        assert {int(table.id[earlier]) for earlier in after if earlier != table.source[row]} == {
            int(table.id[index])
            for index in range(len(table))
            if table.id[index] + num_boxes[index] - 1 in message.after
        }


@given(
    cases(), st.sampled_from(sorted(STRATEGIES)), st.sampled_from([0.0, 1e-7, 1e-4]),
    st.sampled_from([None, 1e8]), st.sampled_from([None, 1.5e8]), st.sampled_from([0, 7, 100]),
    st.none() | st.lists(st.lists(st.sampled_from([1e9, 5e8, 2.5e8]), min_size=1, max_size=2), min_size=4, max_size=4),
    st.booleans(), st.sampled_from([0, 0, 50, 400]),
)  # fmt: skip
def test_native_matches_reference_and_no_plan_beats_the_bound(
    problem, strategy, latency, inside, total, buffer, rates, in_pods, burst
):
    shape, src, dst, topology = problem
    if rates:
        hosts = tuple(Host(tuple(map(Link.of, row)), i % 2 if in_pods else None) for i, row in enumerate(rates))
        topology = replace(
            topology, hosts=hosts, nic_of_rank=(), pods=(Link.of(1e8), Link(2e8, 3e8)) if in_pods else ()
        )
    topology = replace(
        topology, latency_seconds=latency, inside_latency_seconds=latency / 2, sender_change_seconds=latency / 3,
        inside_bytes_per_second=inside, inside_total_bytes_per_second=total, send_buffer_bytes=buffer, burst_bytes=burst,
    )  # fmt: skip
    plan = make_plan(src, dst, shape, "float32", strategy=strategy, topology=topology, staging_bytes=2**16)
    makespan = simulate(plan).makespan_seconds
    assert burst or makespan >= find_bound(plan.tensors, plan.topology).seconds * (1 - 1e-9)
    with_latency = find_latency_bounds(plan)
    assert with_latency is None or makespan >= with_latency.any_plan_seconds * (1 - 1e-9)
    messages = tabulate_messages(plan)
    moves = np.flatnonzero(messages.sender != messages.receiver)
    if len(moves):
        network = network_of(plan, messages, moves, plan.topology)
        start, finish = flow_python(network)
        assert finish.max() == pytest.approx(makespan, rel=1e-12)
        assert (start <= finish).all()
        again = flow(network)
        assert (start == again[0]).all()
        assert (finish == again[1]).all()
        for part in (0.1, 0.9, 0.999, 1.0, 1.001):
            times = flow_until(network, finish.max() * part)
            assert (times is None) == (part < 1)
            assert times is None or (times[1] == finish).all()


def test_native_matches_reference_where_hosts_exchange_all_data():
    """Many flows share few ports, so most rates come from a search for all prices at once."""
    topology = Topology.uniform([rank // 4 for rank in range(32)])
    src, dst = Layout(Mesh.of((4, 4)), "S0 R"), Layout(Mesh.of((4, 4), first_rank=16), "R S1")
    plan = make_plan(src, dst, (4096, 4096), "float32", strategy="send_recv", topology=topology)
    messages = tabulate_messages(plan)
    network = network_of(plan, messages, np.arange(len(messages)), topology)
    for times, again in zip(flow_python(network), flow(network), strict=True):
        assert (times == again).all()


def test_makespan_above_the_cutoff_is_infinite():
    topology = Topology((0, 0, 1, 1), start_seconds=1e-3)
    src, dst = Layout(Mesh.of(2), "S0"), Layout(Mesh.of(2, first_rank=2), "S0")
    plan = make_plan(src, dst, (2**20,), "float32", topology=topology)
    makespan = simulate(plan).makespan_seconds
    for cutoff, seconds in ((math.inf, makespan), (makespan, makespan), (makespan * 0.999, math.inf), (1e-4, math.inf)):
        assert predict_makespan(plan, cutoff) == Makespan(seconds)


def test_native_refuses_indices_out_of_range():
    src, dst = Layout(Mesh.of(2), "S0"), Layout(Mesh.of(2, first_rank=2))
    plan = make_plan(src, dst, (8,), "int8")
    messages = tabulate_messages(plan)
    network = network_of(plan, messages, np.arange(len(messages)), Topology((0, 1, 2, 3)))
    for name in ("queue", "stream", "receiver", "port", "overhead_port"):
        wrong = getattr(network, name).copy()
        wrong[0] = 10**6
        with pytest.raises(IndexError, match=name):
            flow(replace(network, **{name: wrong}))
    with pytest.raises(ValueError, match="after_offsets"):
        flow(replace(network, after_offsets=network.after_offsets[:-1]))


def test_makespan_with_thousands_of_receivers_is_the_time_of_all_bytes():
    """Each message that starts lets the next one start, because it fits in the send buffer."""
    topology = Topology(tuple(range(3001)), latency_seconds=0, send_buffer_bytes=10**6)
    src, dst = Layout(Mesh.of(1)), Layout(Mesh.of(3000, first_rank=1), "S0")
    plan = make_plan(src, dst, (12000,), "int8", topology=topology, strategy="send_recv")
    messages = tabulate_messages(plan)
    network = network_of(plan, messages, np.arange(len(messages)), topology)
    _, finish = flow_python(network)
    assert finish.max() == pytest.approx(12000 / 1.25e9)
    assert (finish == flow(network)[1]).all()


def test_sender_changes_delay_waiting_messages():
    """Two hosts send half each to a third; a chunk that follows one of the other host waits for its end."""
    topology = Topology((0, 1, 2))
    src, dst = Layout(Mesh.of(2), "S0"), Layout(Mesh.of(1, first_rank=2))
    plan = make_plan(src, dst, (2**22,), "float32", topology=topology, strategy="multicast")
    num_changes = int(find_sender_changes(plan).sum())
    assert num_changes >= 1
    makespans = [
        simulate(plan, replace(topology, sender_change_seconds=seconds)).makespan_seconds for seconds in (0.0, 1e-3)
    ]
    assert makespans[1] - makespans[0] == pytest.approx(num_changes * 1e-3, rel=1e-6)
    alone = make_plan(Layout(Mesh.of(1)), Layout(Mesh.of(1, first_rank=2)), (2**22,), "float32", topology=topology)
    assert not find_sender_changes(alone).any()


def test_simulation_ends_when_rounding_leaves_a_part_of_a_byte_in_a_send_window():
    """Without a send buffer, 6e-314 bytes of a message remained in its window; to send them took no time at all."""
    plan = make_plan(
        Layout(Mesh.of("2"), "S0"), Layout(Mesh.of("6", first_rank=2), "S0"), (2**31,), "int8",
        topology=load_preset("pcie", 8), strategy="send_recv",
    )  # fmt: skip
    messages = tabulate_messages(plan)
    network = network_of(plan, messages, np.arange(len(messages)), plan.topology)
    start, finish = flow_python(network)
    timeline = simulate(plan)
    assert np.array_equal(timeline.start, start) and np.array_equal(timeline.finish, finish)
    assert timeline.makespan_seconds == pytest.approx(2**30 / 25e9, rel=0.1)


def test_simulation_time_grows_no_faster_than_the_messages():
    """Senders blocked at one receiver were listed there once more at each of their events: 87,000 messages took 20 s."""
    src, dst = Layout(Mesh.of("5")), Layout(Mesh.of("1", first_rank=5))
    plan = make_plan(src, dst, (2**15, 95, 135, 255), "float32", strategy="multicast")
    assert plan.num_messages > 50_000
    before = time.process_time()
    simulate(plan)
    assert time.process_time() - before < 5
