"""The whole search against all plans on all parts of a cluster; devices of unequal speed; what a refusal lacks."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from reshard.compression import Policy
from reshard.errors import ArgumentError
from reshard.scheduler.autoparallel import Cluster, LayerChoice, LayerGraph, LayerProfile, device_subsets, search
from reshard.scheduler.autoparallel.costs.iteration import evaluate
from reshard.scheduler.autoparallel.costs.search_problem import Candidate, SearchProblem
from reshard.scheduler.autoparallel.device_subsets import _ClusterPart, _search_parts, choose_part
from reshard.scheduler.autoparallel.inputs.layer_profile import ClassTimes
from reshard.scheduler.autoparallel.inputs.stages import StagePlan
from reshard.scheduler.autoparallel.methods.auto_method import simplify
from reshard.topology import CodecRate, Host, Link, Topology
from tests.scheduler.autoparallel.random_searches import least_seconds, make_graph, make_problem

GRAPH = LayerGraph.transformer(layers=4, hidden=256, heads=4, sequence=64, vocabulary=512)
SLOW, FAST = (
    LayerProfile.estimate(GRAPH, flops_per_second=rate, device=name) for rate, name in ((1e11, "old"), (4e11, "new"))
)
HOSTS = Topology.uniform((0, 0, 1, 1), 1e9)
GBIT = 1e9 / 8


def check_parts(seed):
    """The choice is as fast as any plan on any part of the cluster, and the bound is not above it."""
    problem = make_problem(seed)
    try:
        found = choose_part(problem)
        seconds, bound = found.seconds, found.bound_seconds
    except ArgumentError:
        seconds, bound = math.inf, 0.0
    least = least_seconds(problem)
    assert seconds <= least * (1 + 1e-9)
    assert bound <= least
    return seconds, bound


def sub_clusters(cluster):
    """One device, each host, and the first hosts in the order of their rates."""
    yield (0,)
    hosts = sorted(cluster.hosts, key=lambda host: -cluster.nic_bytes_per_second(host[0]))
    for _, first, end in hosts:
        yield tuple(range(first, end))
    for count in range(2, len(hosts) + 1):
        yield tuple(rank for _, first, end in hosts[:count] for rank in range(first, end))


def check_cluster(seed):
    """The choice on a random cluster of 2 to 4 hosts is as fast as the same search on any of its parts.

    Returns the seconds of the choice, and those of the search on all devices in their order.
    """
    rng = random.Random(seed)
    graph = make_graph(rng, rng.randint(4, 7))
    sizes = [rng.choice([1, 2, 4, 8]) for _ in range(rng.randint(2, 4))]
    hosts = tuple(Host((Link.of(rng.choice([1, 5, 25, 100]) * GBIT),)) for _ in sizes)
    ranks = tuple(host for host, size in enumerate(sizes) for _ in range(size))
    whole = Cluster(Topology(ranks, hosts, inside_bytes_per_second=2e10), rng.choice([1e9, 3e8, 1e8]))
    profile = LayerProfile.estimate(graph, flops_per_second=rng.choice([1e11, 1e12, 1e13]))

    def seconds(cluster, fixed):
        try:
            return search(graph, cluster, profile, num_samples=16, fixed=fixed).seconds
        except ArgumentError:
            return math.inf

    found = seconds(whole, {})
    for part in sub_clusters(whole):
        alone = seconds(whole.select(part), {"idle": False})
        assert found <= alone * (1 + 1e-9), f"cluster {seed}: {found:.6g} s, but {alone:.6g} s on ranks {part}"
    return found, seconds(whole, {"idle": False})


@pytest.mark.integration
@pytest.mark.parametrize("seed", [950_024, pytest.param(960_046, marks=pytest.mark.nightly)])
def test_no_search_of_a_part_of_a_cluster_is_faster_than_the_choice(seed):
    check_cluster(seed)


@pytest.mark.integration
@pytest.mark.parametrize(
    "seed",
    [
        *range(5),
        88,
        730_018,
        730_149,
        910_041,
        1_010_015,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 20)),
    ],
)
def test_no_plan_on_a_part_of_the_cluster_is_faster_than_the_choice_or_below_the_bound(seed):
    seconds, bound = check_parts(seed)
    assert math.isinf(seconds) or bound > 0.2 * seconds


def test_the_part_with_the_fastest_quick_plan_is_searched_first_and_rules_out_others(monkeypatch):
    cluster = Cluster(Topology.uniform((0, 0, 1, 1, 2, 2), 1e6), 1e9)
    whole = _ClusterPart((), SearchProblem(GRAPH, cluster, FAST, 8, microbatch_counts=(1, 2)))
    assert min(whole.problem.cluster.parts(), key=len) == (0,)
    limits, search_part = [], device_subsets._search_part
    monkeypatch.setattr(
        device_subsets, "_search_part", lambda *args: limits.append((args[0], args[2])) or search_part(*args)
    )
    searched = _search_parts(whole, lambda done, text: None)
    (first, limit), *others = limits
    assert len(first.ranks) == 2 and first.is_refined and first.seconds <= limit
    assert all(limit <= first.seconds and not part.is_refined for part, limit in others)
    assert searched[0] is first


@pytest.mark.integration
def test_a_stage_waits_for_its_slowest_device():
    mixed = Cluster(HOSTS, 1e9, device_types=("new", "old", "new", "new"))
    fixed = {"idle": False, "tp": 1, "recompute": False, "grid": None}
    profiles = {"old": SLOW, "new": FAST}
    found = search(GRAPH, mixed, profiles, num_samples=8, fixed=fixed)
    assert found.seconds > search(GRAPH, Cluster(HOSTS, 1e9), FAST, num_samples=8, fixed=fixed).seconds
    assert found.seconds < search(GRAPH, Cluster(HOSTS, 1e9), SLOW, num_samples=8, fixed=fixed).seconds
    busy = {s.first_rank: r.busy_seconds / s.num_layers for s, r in zip(found.stages, found.reports, strict=True)}
    assert found == search(GRAPH, mixed, dict(reversed(profiles.items())), num_samples=8, fixed=fixed) and busy


@pytest.mark.nightly
def test_slow_devices_stay_idle_and_have_the_memory_of_their_type():
    cluster = Cluster(HOSTS, {"old": 2e9, "new": 1e9}, device_types=("old", "old", "new", "new"))
    assert cluster.memory_limit_bytes == (2e9, 2e9, 1e9, 1e9)
    crawling = LayerProfile.estimate(GRAPH, flops_per_second=1e8)
    found = search(GRAPH, cluster, {"old": crawling, "new": FAST}, num_samples=8)
    assert found.ranks == (2, 3) and found.idle_ranks == (0, 1)
    assert found.seconds == search(GRAPH, Cluster(Topology.uniform((0, 0), 1e9), 1e9), FAST, num_samples=8).seconds


def test_the_fast_devices_of_mixed_hosts_work_without_the_slow_ones():
    crawling = LayerProfile.estimate(GRAPH, flops_per_second=1e9)
    mixed = Cluster(Topology.uniform((0, 0), 1e9), 1e9, device_types=("old", "new"))
    found = search(GRAPH, mixed, {"old": crawling, "new": FAST}, num_samples=8)
    assert found.ranks == (1,)
    assert found.seconds == search(GRAPH, Cluster(Topology.uniform((0,), 1e9), 1e9), FAST, num_samples=8).seconds
    many = Cluster(Topology.uniform((0, 0, 1, 1, 2, 2, 3, 3), 1e9), 1e9, device_types=("old", "new") * 4)
    assert {(1,), (1, 0), (1, 3, 5, 7), (0, 2, 4, 6)} <= set(many.parts({"old": 1.0, "new": 400.0}))


def test_devices_of_one_type_work_without_others_of_their_host():
    """The fast device has too little memory for its part; the slow ones of both hosts have enough."""
    cluster = Cluster(Topology.uniform((0, 0, 1), 1e9), {"old": 2e8, "new": 1e8}, device_types=("old", "new", "old"))
    assert {(0, 2), (1, 2), (1, 0)} <= set(cluster.parts({"old": 1.0, "new": 50.0}))
    graph = make_graph(random.Random("types 15"), 2)
    old, new = (LayerProfile.estimate(graph, flops_per_second=rate) for rate in (1e11, 5e12))
    fixed = {"num_microbatches": 1}
    alone = search(graph, cluster.select((0, 2)), {"old": old}, num_samples=8, fixed={**fixed, "idle": False})
    assert search(graph, cluster, {"old": old, "new": new}, num_samples=8, fixed=fixed).seconds <= alone.seconds


def test_a_device_on_which_a_step_takes_no_time_is_searched_first():
    """With 0 s as the limit, all other parts are excluded."""
    graph = replace(GRAPH, layers=tuple(replace(layer, forward_flops=0.0) for layer in GRAPH.layers))
    found = search(graph, Cluster(HOSTS, 1e9), LayerProfile.estimate(graph, flops_per_second=1e9), num_samples=8)
    assert found.seconds == 0 and found.ranks == (0,)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Cluster(HOSTS, 1e9, device_types="new"), "device_types is 'new'; it must be a list"),
        (lambda: Cluster(HOSTS, 1e9, device_types=("new",)), "device_types has 1 entries, but there are 4 devices"),
        (lambda: Cluster(HOSTS, {"new": 1e9}, device_types=("old",) * 4), "of type 'new'; it lacks 'old'"),
        (lambda: Cluster(HOSTS, {"new": 1e9}), "device_types must then say the type of each device"),
        (
            lambda: find({"new": FAST}),
            "rank 2 of the cluster is a device of type 'old', which has no profile; .* 'new'",
        ),
        (lambda: find(FAST), "has devices of types 'new', 'old', but there is one profile"),
        (lambda: find({}), "profile is an empty dict"),
        (lambda: find({"new": FAST, "old": 1}), "profile of device type 'old' must be a LayerProfile, not 1"),
        (
            lambda: search(GRAPH, Cluster(HOSTS, 1e9), {"new": FAST}, num_samples=8),
            "does not say which device has which",
        ),
    ],
)
def test_types_without_a_profile_or_memory_are_refused(make, text):
    with pytest.raises(ArgumentError, match=text):
        make()


def find(profile):
    cluster = Cluster(HOSTS, 1e9, device_types=("new", "new", "old", "old"))
    return search(GRAPH, cluster, profile, num_samples=8)


def test_a_refusal_says_how_much_memory_is_short_and_that_much_suffices():
    """Three hosts do not divide 16 samples, but three stages do, with more memory."""
    graph = LayerGraph.transformer(layers=4, hidden=256, heads=4, sequence=64)
    profile, topology = LayerProfile.estimate(graph, flops_per_second=1e11), Topology.uniform((0, 1, 2), 1e9)
    fixed = {"tp": 1, "grid": None}
    with pytest.raises(ArgumentError, match=r"GB more memory on each device, this does: .*, layer") as refused:
        search(graph, Cluster(topology, 1.2e7), profile, num_samples=16, fixed=fixed)
    assert "nor does anything fit on a part of the cluster" in str(refused.value)
    lacks = float(str(refused.value).split("with ")[1].split(" GB")[0]) * 1e9
    assert search(graph, Cluster(topology, 1.2e7 + 1.01 * lacks), profile, num_samples=16, fixed=fixed).num_ranks == 3


def with_zero_3(profile, gather, spread):
    """The profile with these seconds of a gather and a scatter in each layer, and this spread of its times."""
    return replace(
        profile,
        classes={
            key: {
                1: ClassTimes(tuple(replace(each, spread=spread) for each in degrees[1].measured), (), gather, gather)
            }
            for key, degrees in profile.classes.items()
        },
    )


def test_zero_3_is_chosen_only_where_it_gains_more_than_the_profile_can_tell():
    cluster = Cluster(Topology.uniform((0, 1), 1e9), 1e9)
    fixed = {"num_microbatches": 1, "tp": 1, "recompute": False, "grid": None, "idle": False}

    def zero(gather, spread):
        found = search(GRAPH, cluster, with_zero_3(FAST, gather, spread), num_samples=8, fixed=fixed)
        assert len(found.stages) == 1
        return found.stages[0].choices[0].zero, found

    free, found = zero(0.0, 0.0)
    plain = search(GRAPH, cluster, FAST, num_samples=8, fixed={**fixed, "zero": 0})
    assert free == 3 and found.seconds < plain.seconds  # a scatter is half of an all-reduce, and gathers are hidden
    gain = plain.seconds / found.seconds - 1
    assert zero(0.0, 0.9 * gain / 0.4)[0] == 3
    assert zero(0.0, 1.1 * gain / 0.4)[0] == 0
    cost = (plain.seconds - found.seconds) / (3 * len(GRAPH.layers))  # two gathers and a scatter in each layer
    assert zero(0.9 * cost, 0.0)[0] == 3
    assert zero(1.1 * cost, 0.0)[0] == 0
    charged = zero(0.5 * cost, 0.0)[1]
    assert charged.seconds - found.seconds == pytest.approx(1.5 * cost * len(GRAPH.layers), rel=1e-6)


def test_codecs_are_compared_with_the_fastest_plan_without_them_not_with_a_simpler_one():
    links = Topology.uniform((0, 1), 1e9)
    fixed = {"num_microbatches": 1, "tp": 1, "recompute": False, "grid": None, "idle": False}
    fastest = search(GRAPH, Cluster(links, 1e9), FAST, num_samples=8, fixed=fixed)

    def find(rate):
        cluster = Cluster(replace(links, codec_rates=(CodecRate("int8x128", rate, rate),)), 1e9)
        noisy, policy = with_zero_3(FAST, 0.0, 0.7), Policy(dp="int8x128")
        return search(GRAPH, cluster, noisy, num_samples=8, fixed=fixed, compression=policy)

    simpler, encoded = find(1e10), find(1e12)
    assert fastest.stages[0].choices[0].zero == 3 and simpler.stages[0].choices[0].zero == 0
    assert simpler.compression is None  # codecs make it faster, but not than the fastest
    assert encoded.compression is not None and encoded.seconds < 0.99 * fastest.seconds


def test_parts_are_compared_before_a_simpler_plan_is_chosen(monkeypatch):
    for bound in ("work_bound", "step_bound_of_any"):
        monkeypatch.setattr(device_subsets, bound, lambda problem: 0.0)  # excludes no part
    cluster = Cluster(Topology.uniform((0, 1), 5.2e8), 1e9)
    fixed = {"num_microbatches": 1, "tp": 1, "recompute": False, "grid": None}
    fastest = search(GRAPH, cluster, FAST, num_samples=8, fixed=fixed)
    alone = search(GRAPH, cluster.select([0]), FAST, num_samples=8, fixed=fixed)
    found = search(GRAPH, cluster, with_zero_3(FAST, 0.0, 0.8), num_samples=8, fixed=fixed)
    assert found.stages[0].choices[0].zero == 0  # simpler than the fastest one
    assert fastest.seconds < alone.seconds < found.seconds
    assert found.num_ranks == 2


def test_optional_codecs_that_no_engine_runs_exclude_no_part():
    links = replace(Topology.uniform((0, 1, 2), 1e8), codec_rates=(CodecRate("int8x128", 1e10, 1e10),))
    raw = SearchProblem(GRAPH, Cluster(links, 1e9), FAST, 32, microbatch_counts=(1,))
    encoded = raw.changed(compression=Policy(dp="int8x128"))
    searched = [
        {part.ranks for part in _search_parts(_ClusterPart((), problem), lambda done, step: None)}
        for problem in (raw, encoded)
    ]
    assert (0, 1) in searched[0] & searched[1]


def simulate_plan(problem, num_microbatches, *ends, thorough=False):
    """The evaluation of stages that end at these layers and ranks, each of replicas."""
    pairs = itertools.pairwise([(0, 0), *ends])
    stages = [
        StagePlan(first, end, rank, stop, (LayerChoice(),) * (end - first)) for (first, rank), (end, stop) in pairs
    ]
    return evaluate(problem, Candidate("by hand", tuple(stages), num_microbatches), thorough=thorough)


def test_a_simpler_plan_is_found_that_ties_only_after_moves():
    graph = LayerGraph.transformer(layers=12, hidden=512, heads=16, sequence=256, vocabulary=32000)
    profile = with_zero_3(LayerProfile.estimate(graph, flops_per_second=3e14), 0.0, 0.1)
    links = Topology.uniform((0, 0, 1, 1, 2, 2, 3, 3), 12.5e9)
    problem = SearchProblem(graph, Cluster(links, 2e9), profile, 32)
    fast = simulate_plan(problem, 8, (1, 1), (3, 2), (8, 4), (13, 6), (14, 8), thorough=True)
    slow = simulate_plan(problem, 8, (4, 2), (8, 4), (11, 6), (14, 8))
    limit = fast.seconds * (1 + 0.4 * 0.1)
    assert limit < slow.seconds < 1.1 * limit
    simple = simplify(problem, [fast, slow])
    assert simple.candidate.complexity == (8, 0, 4) and simple.seconds <= limit


def test_several_stages_on_the_same_ranks_save_microbatches_in_a_tie():
    graph = LayerGraph.transformer(layers=24, hidden=1024, heads=16, sequence=256, vocabulary=32000)
    profile = with_zero_3(LayerProfile.estimate(graph, flops_per_second=6e13), 0.0, 0.2)
    problem = SearchProblem(graph, Cluster(Topology.uniform((0, 1, 2, 3), 12.5e9), 3.5e9), profile, 32)
    fast = simulate_plan(problem, 16, (8, 1), (15, 2), (21, 3), (26, 4), thorough=True)
    simple = simplify(problem, [fast])
    assert simple.candidate.complexity == (8, 0, 8) and simple.candidate.is_interleaved
    assert fast.seconds < simple.seconds <= fast.seconds * (1 + 0.4 * 0.2)
