"""Values of the search, its errors, and that its answer is the same everywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from reshard.compression import Policy
from reshard.errors import ArgumentError, TopologyError
from reshard.formatting import format_bytes
from reshard.parallel.choice.axis_costs import find_axis_cost
from reshard.parallel.grid.cuts import AXES
from reshard.scheduler import check_schedule
from reshard.scheduler.autoparallel import (
    MIXED_PRECISION,
    ChoiceRules,
    Cluster,
    Layer,
    LayerChoice,
    LayerGraph,
    LayerProfile,
    Tensor,
    TrainingPlan,
    search,
)
from reshard.scheduler.autoparallel.costs.collective_costs import StagePlace
from reshard.scheduler.autoparallel.costs.grid_costs import _axis_costs
from reshard.scheduler.autoparallel.costs.search_problem import Candidate
from reshard.scheduler.autoparallel.inputs.layer_profile import ClassTimes, LayerTimes
from reshard.scheduler.autoparallel.inputs.stages import StagePlan
from reshard.topology import CodecRate, Host, Link, Topology

HOSTS = Topology.uniform((0, 0, 1, 1), 1e9)


def make_graph(**changes):
    sizes = {"layers": 2, "hidden": 256, "heads": 4, "sequence": 64, "vocabulary": 512}
    return LayerGraph.transformer(**{**sizes, **changes})


GRAPH = make_graph()
PROFILE = LayerProfile.estimate(GRAPH, flops_per_second=1e12)
CLUSTER = Cluster(HOSTS, 1e9)


@pytest.fixture(scope="module")
def training_plan():
    return search(GRAPH, CLUSTER, PROFILE, num_samples=8, states=MIXED_PRECISION)


@pytest.mark.integration
def test_a_training_plan_fits_its_model_devices_and_memory(training_plan):
    assert [stage.first_layer for stage in training_plan.stages[1:]] == [
        stage.end_layer for stage in training_plan.stages[:-1]
    ]
    assert training_plan.stages[0].first_layer == 0
    assert training_plan.stages[-1].end_layer == len(GRAPH.layers)
    assert training_plan.num_ranks == 4
    assert all(report.memory_bytes <= report.limit_bytes for report in training_plan.reports)
    assert training_plan.bound_seconds <= training_plan.seconds
    assert all(other.short_bytes or other.seconds >= training_plan.seconds for other in training_plan.alternatives)
    assert training_plan.schedule.in_flight == tuple(report.in_flight for report in training_plan.reports)


def test_formats_are_read_back(training_plan, tmp_path):
    training_plan.save(tmp_path / "plan.json")
    assert TrainingPlan.read(tmp_path / "plan.json") == training_plan
    assert LayerGraph.from_json(GRAPH.to_json()) == GRAPH
    assert LayerProfile.from_json(PROFILE.to_json()) == PROFILE
    for read in (TrainingPlan.from_json, LayerGraph.from_json, LayerProfile.from_json):
        for text in ("", "[]", "{}", '{"version": 1}'):
            with pytest.raises(ArgumentError, match="not a"):
                read(text)
        with pytest.raises(ArgumentError):
            read(json.dumps({"version": 99}))


def test_explain_marks_a_guess_and_names_what_others_lack(training_plan):
    text = training_plan.explain()
    assert "GUESS" in text
    assert f"layers 0 to {len(GRAPH.layers) - 1} are {GRAPH.layers[0].name}, " in text
    bound = f"takes less than {training_plan.bound_seconds:.4g} s"
    assert f"no plan of this model on all ranks or any part that the search considers {bound}" in text
    on_all = search(GRAPH, CLUSTER, PROFILE, num_samples=8, states=MIXED_PRECISION, method="pure")
    assert "no plan of this model that uses all ranks takes less than" in on_all.explain()
    own = Candidate("", training_plan.stages, training_plan.num_microbatches).text
    assert all((other.text, other.seconds) != (own, training_plan.seconds) for other in training_plan.alternatives)
    for other in training_plan.alternatives:
        assert other.text in text


def test_explain_shows_the_ranks_of_a_stage_and_no_rounding_error_as_idle_time(training_plan):
    first, report = training_plan.stages[0], training_plan.reports[0]
    ranks = f"ranks 0-{first.end_rank - 1}" if first.end_rank > 1 else "rank 0"
    assert f"stage 0, {ranks}: {first}" in training_plan.explain()
    busy = training_plan.seconds * (1 - 1e-15) - report.exposed_seconds - report.gradient_sync_seconds
    rounded = replace(training_plan, reports=(replace(report, busy_seconds=busy), *training_plan.reports[1:]))
    assert " 0 s otherwise idle" in rounded.explain().partition("stage 1")[0]


def test_explain_prints_both_balance_degrees(training_plan):
    times, memories = (
        [getattr(report, name) for report in training_plan.reports] for name in ("busy_seconds", "memory_bytes")
    )
    assert training_plan.balance == (1 - max(times) / sum(times), 1 - max(memories) / sum(memories))
    assert (
        f"balance of time {training_plan.balance[0]:.3f} and of memory {training_plan.balance[1]:.3f}"
        in training_plan.explain()
    )


def test_progress_names_each_step_and_rises():
    steps = []
    kept = {"num_microbatches": 4, "recompute": 0}
    search(GRAPH, CLUSTER, PROFILE, num_samples=8, fixed=kept, progress=lambda done, text: steps.append((done, text)))
    assert steps[0] == (0.0, "bounds") and steps[1] == (0.0, "joint on 4 ranks")
    parts = [done for done, _ in steps]
    assert parts == sorted(parts) and 0.1 < parts[-1] <= 1
    with pytest.raises(ArgumentError, match="progress must be a function of a number and a text, not int"):
        search(GRAPH, CLUSTER, PROFILE, num_samples=8, progress=5)


def test_the_drawing_shows_stages_on_hosts_and_the_seconds_of_edges():
    kept = {"num_microbatches": 4}
    skip = Tensor("skip", (1, 1000), "float32", 0, (3,))
    graph = replace(GRAPH, tensors=(*GRAPH.tensors, skip))
    match = search(graph, Cluster(HOSTS, 1e9), PROFILE, num_samples=8, fixed=kept, method=split_in_four)
    root = ElementTree.fromstring(match.to_svg())
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for number, stage in enumerate(match.stages):
        assert f"stage {number}: {stage}" in texts
    assert [text for text in texts if text.startswith("host ")] == ["host 0", "host 0", "host 1", "host 1"]
    shown = [text.partition(":")[0] for text in texts if " forward, " in text]
    assert shown == ["0 to 1", "0 to 3", "1 to 2", "2 to 3"]
    for edge in match.edges:
        assert any(f"{edge.forward_seconds:.3g} s forward" in text and edge.busiest_port in text for text in texts)


def split_in_four(problem):
    stages = tuple(StagePlan(index, index + 1, index, index + 1, (LayerChoice(),)) for index in range(4))
    return (Candidate("four", stages, problem.microbatch_counts[0]),)


@pytest.mark.slow
def test_the_answer_does_not_depend_on_the_hash_seed(training_plan):
    code = (
        "from reshard.scheduler.autoparallel import *; from tests.scheduler.autoparallel.test_search import *; "
        "print(search(GRAPH, CLUSTER, PROFILE, num_samples=8, states=MIXED_PRECISION).hash)"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert run.stdout.strip() == training_plan.hash


def test_search_keeps_the_choices_that_keep_names():
    kept = search(GRAPH, CLUSTER, PROFILE, num_samples=8, fixed={"num_microbatches": 4, "tp": 2, "recompute": True})
    assert kept.num_microbatches == 4
    assert {choice.tp for stage in kept.stages for choice in stage.choices} == {2}
    assert all(choice.recompute for stage in kept.stages for choice in stage.choices)
    with pytest.raises(ArgumentError, match=r"fixed= names 'pp'.*stages are what the search finds"):
        search(GRAPH, CLUSTER, PROFILE, num_samples=8, fixed={"pp": 2})


def test_zero_3_over_the_depth_of_a_grid_is_chosen_where_memory_is_short():
    graph = LayerGraph.transformer(layers=6, hidden=256, heads=4, sequence=16, dtype="float32")
    profile = LayerProfile.estimate(graph, flops_per_second=1e12)

    def one_stage(problem):
        found = problem.choices(4, 2)
        assert {choice.zero for choice in found} == {0, 3}
        return [Candidate("one stage", (StagePlan(0, 6, 0, 4, (choice,) * 6),), 2) for choice in found]

    def find(megabytes):
        cluster = Cluster(Topology.uniform((0, 0, 1, 1), 1e8), megabytes * 1e6)
        fixed = {"num_microbatches": 2, "grid": (1, 2, 2), "recompute": False}
        return search(graph, cluster, profile, num_samples=4, fixed=fixed, method=one_stage)

    plain = find(100)
    assert str(plain.stages[0].choices[0]) == "grid=1x2x2"
    sharded = find(0.9 * plain.memory_bytes / 1e6)
    assert str(sharded.stages[0].choices[0]) == "grid=1x2x2 zero=3"
    assert sharded.reports[0].state_bytes < 0.8 * plain.reports[0].state_bytes
    assert sharded.seconds > plain.seconds
    with pytest.raises(ArgumentError, match="ZeRO only over a depth of at least 2, not tp=2 and zero=3"):
        LayerChoice.on_grid(1, 2, 1, zero=3)


@pytest.mark.nightly
def test_codecs_are_chosen_where_they_make_a_step_shorter():
    graph = make_graph(dtype="float32")
    profile = LayerProfile.estimate(graph, flops_per_second=1e12)
    policy = Policy(dp="int8x128", pp="int8x128")
    slow = Topology.uniform((0, 1, 2), 1e7)
    kept = {"num_microbatches": 4, "tp": 1, "idle": False}

    def find(rate):
        cluster = Cluster(replace(slow, codec_rates=(CodecRate("int8x128", rate, rate),)), 1e9)
        return search(graph, cluster, profile, num_samples=12, fixed=kept, compression=policy)

    plain = search(graph, Cluster(slow, 1e9), profile, num_samples=12, fixed=kept)
    assert plain.compression is None
    encoded = find(1e10)
    assert encoded.seconds < 0.5 * plain.seconds
    assert encoded.compression is not None
    assert set(encoded.compression.dimensions) <= {"dp", "pp"}
    assert TrainingPlan.from_json(encoded.to_json()) == encoded
    assert f"codecs: {encoded.compression}" in encoded.explain()
    overloaded = find(1e3)  # coding takes too long, but a bound does not count it
    assert overloaded.bound_seconds <= plain.bound_seconds
    same = {"cluster_hash": "", "bound_seconds": 0.0}
    assert replace(overloaded, **same) == replace(plain, **same)
    with pytest.raises(ArgumentError, match="has the codec int8x128, whose rates the topology of the cluster lacks"):
        search(graph, Cluster(slow, 1e9), profile, num_samples=12, compression=policy)
    with pytest.raises(ArgumentError, match=r"a search prices dp, pp, tp, zero of a policy; .* has optimizer= too"):
        search(graph, Cluster(slow, 1e9), profile, num_samples=12, compression=Policy(optimizer="int8x128"))


@pytest.mark.parametrize(("dimension", "fixed"), [("zero", {"zero": 3, "tp": 1}), ("tp", {"grid": (2, 2, 1)})])
def test_codecs_of_zero_and_grids_are_chosen_where_they_make_a_step_shorter(dimension, fixed):
    graph = LayerGraph.transformer(layers=2, hidden=64, heads=4, sequence=32, vocabulary=64, dtype="float32")
    profile = LayerProfile.estimate(graph, flops_per_second=1e12)
    slow = Topology.uniform((0, 1, 2, 3), 1e7)
    fixed = {"num_microbatches": 1, **fixed}
    feedback = ("dp", "zero") if dimension == "zero" else ("dp",)
    policy = Policy(dp="int8x128", **{dimension: "int8x128"}, feedback=feedback, raw_steps=2)

    def find(rate, policy):
        rules = ChoiceRules(recompute=(False,))
        cluster = Cluster(replace(slow, codec_rates=(CodecRate("int8x128", rate, rate),)), 1e9)
        return search(
            graph, cluster, profile, num_samples=8, fixed=fixed, rules=rules, compression=policy, method=one_stage
        )

    def one_stage(problem):
        choice = LayerChoice(zero=3) if dimension == "zero" else LayerChoice.on_grid(2, 2)
        return [Candidate("one stage", (StagePlan(0, 4, 0, 4, (choice,) * 4),), 1)]

    plain, encoded, overloaded = find(1e10, None), find(1e10, policy), find(1e4, policy)
    assert encoded.compression.dimensions == (dimension,)
    assert encoded.compression.feedback == feedback[1:]  # gradients of replicas are not encoded
    assert encoded.seconds < 0.6 * plain.seconds
    assert overloaded.compression is None
    assert overloaded.seconds == plain.seconds


def test_a_codec_that_is_slow_one_way_codes_the_other():
    graph = LayerGraph.transformer(layers=2, hidden=64, heads=4, sequence=32, dtype="float32")
    profile = LayerProfile.estimate(graph, flops_per_second=1e12)
    rates = (CodecRate("int8x128", 1e10, 1e10), CodecRate("int4x128", 1e3, 1e3))
    cluster = Cluster(replace(Topology.uniform((0, 1), 1e7), codec_rates=rates), 1e9)

    def sharded(problem):
        return [
            Candidate("sharded", (StagePlan(0, 2, 0, 2, (LayerChoice(zero=3),) * 2),), problem.microbatch_counts[0])
        ]

    policy = Policy(zero=("int4x128", "int8x128"))
    match = search(
        graph, cluster, profile, num_samples=2, fixed={"num_microbatches": 1}, method=sharded, compression=policy
    )
    assert match.compression == Policy(zero=(None, "int8x128"))
    assert "with whole gradients" not in match.explain()
    whole = search(graph, cluster, profile, num_samples=4, fixed={"num_microbatches": 2}, method=sharded)
    assert f": states {format_bytes(round(whole.reports[0].state_bytes))} with whole gradients, " in whole.explain()
    assert whole.reports[0].state_bytes > match.reports[0].state_bytes


def test_methods_are_functions_that_may_be_passed_in():
    by_name = search(GRAPH, CLUSTER, PROFILE, num_samples=8, method="alpa")
    from reshard.scheduler.autoparallel.methods.alpa import alpa

    assert search(GRAPH, CLUSTER, PROFILE, num_samples=8, method=alpa) == by_name
    with pytest.raises(ArgumentError, match="no search method 'best'"):
        search(GRAPH, CLUSTER, PROFILE, num_samples=8, method="best")


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_1_and_2_are_priced_but_not_run(zero):
    fixed = {"zero": zero, "num_microbatches": 1}
    with pytest.raises(ArgumentError, match=f"only ZeRO {zero}, which Pipe does not run; it runs ZeRO 0 and 3"):
        search(GRAPH, CLUSTER, PROFILE, num_samples=8, fixed=fixed)
    rules, profile = (
        ChoiceRules(recompute=(False,), max_tp=1, executable=False),
        LayerProfile.estimate(GRAPH, flops_per_second=1e9),
    )
    for grid in (None, (1, 2, 2)):
        match = search(GRAPH, CLUSTER, profile, num_samples=8, rules=rules, fixed={**fixed, "grid": grid})
        shared = [stage for stage in match.stages if stage.num_ranks > 1]
        assert {(choice.zero, choice.grid) for stage in shared for choice in stage.choices} == {(zero, grid or ())}
        with pytest.raises(ArgumentError, match="which Pipe does not run"):
            match.placements()
    one_rank = search(GRAPH, Cluster(HOSTS, 1e9, 1), PROFILE, num_samples=8, rules=rules, fixed=fixed)
    assert {choice.zero for choice in one_rank.stages[0].choices} == {0}  # it has no replicas


def test_errors_name_the_thing_the_rule_and_the_numbers():
    with pytest.raises(ArgumentError, match="write 80e9 for 80 GB"):
        Cluster(HOSTS, 80)
    with pytest.raises(TopologyError, match="the topology has 4 ranks, but the cluster should have 8"):
        Cluster(HOSTS, 1e9, 8)
    with pytest.raises(TopologyError, match="consecutive"):
        Cluster(Topology.uniform((0, 1, 0), 1e9), 1e9)
    with pytest.raises(ArgumentError, match="measured for another model"):
        search(make_graph(hidden=512), CLUSTER, PROFILE, num_samples=8)
    with pytest.raises(ArgumentError, match="shapes, operations or dtype differ"):
        search(make_graph(dtype="float32"), CLUSTER, PROFILE, num_samples=8)
    with pytest.raises(ArgumentError, match="3 microbatches do not divide 8 samples"):
        search(GRAPH, CLUSTER, PROFILE, num_samples=8, fixed={"num_microbatches": 3})
    with pytest.raises(ArgumentError, match=r"nothing fits: .* GB of .*; use more devices or memory"):
        search(GRAPH, Cluster(HOSTS, 2e6), PROFILE, num_samples=8)
    with pytest.raises(ArgumentError, match="measured on 'guess', not on 'cuda'"):
        PROFILE.check(GRAPH, "cuda")
    with pytest.raises(ArgumentError, match=r"\[8\] samples did not fit the device"):
        LayerProfile(GRAPH.key, "cpu", "float32", {"block": {1: ClassTimes((), (8,))}})
    with pytest.raises(ArgumentError, match="layers read only what earlier layers have written"):
        Tensor("x", (1, 4), "float32", 1, (1,))
    with pytest.raises(ArgumentError, match="saved_bytes of layer 'a' is -1"):
        Layer("a", "a", 1.0, 1, -1.0)


def test_times_are_linear_between_samples():
    times = ClassTimes((LayerTimes(4, 4.0, 4.0, 4.0, 8.0), LayerTimes(1, 1.5, 1.5, 1.5, 3.0)))
    assert times.at(2).forward_seconds == pytest.approx(1.5 + 2.5 / 3)
    assert times.at(8).forward_seconds == pytest.approx(4.0 + 4 * 2.5 / 3)
    assert times.at(0.5).forward_seconds == pytest.approx(0.75)


def test_a_faster_larger_sample_never_makes_more_rows_free():
    times = ClassTimes((LayerTimes(1, 3.0, 3.0, 3.0, 6.0), LayerTimes(2, 2.0, 3.5, 2.0, 4.0)))
    assert times.at(8) == LayerTimes(8, 2.0, 6.5, 2.0, 4.0)


def test_a_memory_in_words_is_refused():
    with pytest.raises(ArgumentError, match="memory_limit_bytes is '1GB'; it must be a number: write 80e9 for 80 GB"):
        Cluster(HOSTS, "1GB")


def test_the_uplinks_of_pods_are_priced():
    def place(pods, uplink=1e8):
        topology = Topology(range(4), [Host((Link.of(1e9),), pod) for pod in pods], pods=[Link.of(uplink)] * 2)
        return topology, StagePlace.of(Cluster(topology, 1e9), 0, 4)

    assert place((0, 0, 0, 0))[1].ring_bytes_per_second == 1e9
    topology, two = place((0, 0, 1, 1))
    assert two.replica_seconds(1e9, 1, 2.0) == pytest.approx(2 * 3 / 4 * 10, rel=1e-3)  # the ring passes each uplink
    assert place((0, 1, 0, 1))[1].ring_bytes_per_second == 0.5e8  # twice
    assert two.exchange_seconds(1e6) == pytest.approx(2 * 2 * 1e6 / 1e8)
    for grid in ((1, 2, 2), (2, 1, 2), (2, 2, 1)):
        rows, cols, depth = grid
        ranks = np.arange(4).reshape(depth, rows, cols)
        assert dict(_axis_costs(two, grid)) == {
            axis: find_axis_cost(topology, ranks, index) for index, axis in enumerate(AXES)
        }


@pytest.mark.nightly
def test_less_memory_never_gives_a_faster_training_plan():
    seconds = [search(GRAPH, Cluster(HOSTS, size), PROFILE, num_samples=8).seconds for size in (1e9, 2.5e7, 1.5e7)]
    assert seconds == sorted(seconds)


def test_schedules_of_the_training_plan_are_valid(training_plan):
    from reshard.scheduler.autoparallel.costs.search_problem import SearchProblem

    problem = SearchProblem(GRAPH, CLUSTER, PROFILE, 8, MIXED_PRECISION)
    check_schedule(training_plan.schedule, problem.pipeline(training_plan.stages, training_plan.num_microbatches))


def test_the_command_prints_and_writes_a_training_plan(tmp_path, capsys):
    from reshard.cli.main import main

    (tmp_path / "graph.json").write_text(GRAPH.to_json())
    rest = ["--topology", "tcp", "--devices", "4", "--memory", "1GB", "--samples", "8"]
    written = tmp_path / "plan.json"
    status = main(["search", str(tmp_path / "graph.json"), *rest, "--flops", "1e12", "--output", str(written)])
    assert status == 0
    first, second, *lines, last = capsys.readouterr().out.strip().splitlines()
    assert first == "estimated times: layers reach 0.5 of --flops 1e+12 (--efficiency)"
    assert second.startswith("topology: hosts: 1 x (4 ranks, NICs 1 x 3.125 GB/s); ")
    assert lines == TrainingPlan.read(written).explain().splitlines() and last == f"wrote {written}"
    assert main(["search", str(tmp_path / "graph.json"), *rest, "--flops", "1e12", "--method", "pure"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("next: --output plan.json keeps this training plan;")
    for arguments, text in (
        ([str(tmp_path / "graph.json"), *rest], "pass either --profile (measured times) or --flops"),
        (
            [str(tmp_path / "graph.json"), *rest, "--profile", "p.json", "--efficiency", "0.9"],
            "--efficiency is for times that --flops estimates",
        ),
        (["transformer:layers=2", *rest, "--flops", "1e12"], "lacks heads, hidden, sequence"),
        (["transformer:layers=2,hidden=8,heads=2,sequence=4,tied=1", *rest, "--flops", "1e12"], "needs a vocabulary"),
        (["transformer:layers=2,layers=3", *rest, "--flops", "1e12"], "names layers twice"),
        ([str(tmp_path / "none.json"), *rest, "--flops", "1e12"], "there is no file"),
        (
            ["none.json", *rest, "--flops", "1e12", "--svg", "/none/plan.svg"],
            "--svg is /none/plan.svg; there is no such",
        ),
        (["none.json", *rest, "--flops", "1e12", "--output", "/"], "--output is /, which is a folder"),
        ([str(tmp_path / "graph.json"), *rest, "--flops", "1e12", "--fixed", "tp"], "must be NAME=NUMBER"),
    ):
        assert main(["search", *arguments]) == 2
        assert text in capsys.readouterr().err


def test_stages_sum_the_gradients_of_a_tied_head_and_one_stage_keeps_one_table(capsys):
    from reshard.cli.main import main

    sizes = "transformer:layers=2,hidden=64,heads=2,sequence=16,vocabulary=5000"
    rest = ["--topology", "tcp", "--memory", "1GB", "--samples", "8", "--flops", "1e12", "--fixed", "tp=1"]
    rest += ["--fixed", "num_microbatches=4"]  # with one, not all gradients exist at the peak
    states = []
    for tied in (0, 1):
        assert main(["search", f"{sizes},tied={tied}", *rest, "--devices", "1"]) == 0
        states.append(float(re.search(r"states ([\d.]+) MiB", capsys.readouterr().out)[1]))
        assert main(["search", f"{sizes},tied={tied}", *rest, "--devices", "2", "--method", "pure"]) == 0
        assert ("s over stages" in capsys.readouterr().out) == bool(tied)
    assert states[0] - states[1] == pytest.approx(5000 * 64 * 16 / 2**20, rel=0.01)


def _hosts(*rates, devices=2):
    host_of_rank = tuple(host for host in range(len(rates)) for _ in range(devices))
    return Topology(host_of_rank, tuple(Host((Link.of(rate),)) for rate in rates), inside_bytes_per_second=3e11)


def test_devices_behind_slow_links_stay_idle_and_are_named():
    slow = Cluster(_hosts(1e6, 1e10), 1e9)
    found = search(GRAPH, slow, PROFILE, num_samples=8)
    alone = search(GRAPH, Cluster(_hosts(1e10), 1e9), PROFILE, num_samples=8)
    assert found.seconds == alone.seconds < found.on_all_seconds
    assert found.ranks == (0, 1) and found.idle_ranks == (2, 3)  # links inside both hosts are alike
    assert "ranks 2-3 of the cluster stay idle: ranks work as 2 of host 0; on all 4 ranks" in found.explain()
    assert TrainingPlan.from_json(found.to_json()) == found
    with pytest.raises(ArgumentError, match="must name 2 different ranks of the cluster"):
        TrainingPlan.from_json(found.to_json().replace('"num_cluster_ranks": 4', '"num_cluster_ranks": 1'))


@pytest.mark.nightly
def test_hosts_work_in_the_order_of_their_rates():
    deep = make_graph(layers=6, hidden=512, sequence=256)
    profile = LayerProfile.estimate(deep, flops_per_second=1e11)
    cluster = Cluster(_hosts(2e9, 1e4, 1e10), 1e9)
    found = search(deep, cluster, profile, num_samples=8)
    assert found.ranks == (4, 5, 0, 1)
    assert [host for host, _, _ in found.hosts] == [2, 0]
    in_order = search(deep, cluster, profile, num_samples=8, fixed={"idle": False})
    assert in_order.ranks == () and in_order.num_ranks == 6
    assert found.is_on_all_bound and found.seconds < found.on_all_seconds <= in_order.seconds
    fast = search(deep, Cluster(_hosts(1e10, 2e9), 1e9), profile, num_samples=8)
    assert found.seconds == fast.seconds


def test_a_part_of_a_cluster_has_the_links_and_memory_of_its_ranks():
    topology = Topology(
        (0, 0, 1, 1, 2, 2),
        (Host((Link.of(1e9), Link.of(2e9)), 0), Host((Link.of(3e9),), 1), Host((Link.of(4e9),), 1)),
        pods=(Link.of(5e9), Link.of(6e9)),
    )
    part = Cluster(topology, (1e9, 2e9, 3e9, 4e9, 5e9, 6e9)).select((4, 5, 1))
    assert part.topology.host_of_rank == (0, 0, 1) and part.topology.nic_of_rank == (0, 0, 1)
    assert [host.pod for host in part.topology.hosts] == [0, 1]
    assert [port.egress_bytes_per_second for port in part.topology.pods] == [6e9, 5e9]
    assert part.memory_limit_bytes == (5e9, 6e9, 2e9)


def test_faster_links_shorten_sums_of_gradients_too():
    def one_stage(problem):
        return [
            Candidate("one stage", (StagePlan(0, len(GRAPH.layers), 0, 4, (LayerChoice(),) * len(GRAPH.layers)),), 1)
        ]

    found = search(GRAPH, Cluster(_hosts(1e7, 1e7), 1e9), PROFILE, num_samples=4, method=one_stage)
    sums = found.reports[0].gradient_sync_seconds
    assert sums > 0.9 * found.seconds
    assert found.seconds - found.wider_links_seconds == pytest.approx(sums * (1 - 1 / 1.1), rel=0.02)


def test_the_same_zero_in_all_stages_is_tried_under_auto_schedule():
    """Under the known schedules, ZeRO 0 is faster here, because backwards can be split; under auto_schedule, ZeRO 3."""
    graph = LayerGraph.transformer(layers=4, hidden=256, heads=8, sequence=256, vocabulary=1000)
    hosts = tuple(Host((Link.of(rate),)) for rate in (6.25e8, 3.125e9, 3.125e9, 6.25e8))
    cluster = Cluster(Topology((0, 1, 1, 2, 2, 3, 3), hosts, inside_bytes_per_second=2e10), 3e8)
    profile = LayerProfile.estimate(graph, flops_per_second=1e12)
    fixed = {"idle": False, "tp": 1, "grid": None, "num_microbatches": 8}
    found = search(graph, cluster, profile, num_samples=32, fixed=fixed)
    for zero in (0, 3):
        assert found.seconds <= search(graph, cluster, profile, num_samples=32, fixed={**fixed, "zero": zero}).seconds
    assert found.stages[1].choices[0].zero == 3


@pytest.mark.integration
def test_auto_schedule_is_tried_for_the_best_plan_of_each_number_of_microbatches():
    """16 microbatches are 3 % behind the best plan under the known schedules, and 6 % ahead under ``auto_schedule``."""
    graph = LayerGraph.transformer(layers=4, hidden=256, heads=8, sequence=256, vocabulary=1000)
    hosts = tuple(Host((Link.of(rate),)) for rate in (6.25e8, 3.125e9, 3.125e9))
    cluster = Cluster(Topology((0, 1, 1, 2, 2, 2, 2), hosts, inside_bytes_per_second=2e10), 3e8)
    profile = LayerProfile.estimate(graph, flops_per_second=1e13)
    fixed = {"idle": False}
    kept = search(graph, cluster, profile, num_samples=32, fixed={**fixed, "num_microbatches": 16})
    assert search(graph, cluster, profile, num_samples=32, fixed=fixed).seconds <= kept.seconds * (1 + 1e-9)
