"""Arguments, files and candidates that a search refuses, and what it says."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace

import pytest

from reshard.errors import ArgumentError
from reshard.parallel.choice.grid_layer_cost import LayerSizes
from reshard.scheduler.autoparallel import (
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
from reshard.scheduler.autoparallel.costs.search_problem import Candidate
from reshard.scheduler.autoparallel.inputs.layer_profile import ClassTimes, LayerTimes
from reshard.scheduler.autoparallel.inputs.stages import StagePlan
from reshard.scheduler.autoparallel.inputs.text_files import read_value
from tests.scheduler.autoparallel.test_search import CLUSTER, GRAPH, HOSTS, PROFILE, make_graph


@pytest.fixture(scope="module")
def training_plan():
    return search(GRAPH, CLUSTER, PROFILE, num_samples=8)


@pytest.mark.parametrize(
    ("fixed", "text"),
    [
        ({"grid": (2, 2)}, r"grid \(2, 2\) must be \(rows, cols, depth\)"),
        ({"grid": "2x2x1"}, "fixed= sets grid to '2x2x1'"),
        ({"grid": (2, 2, 4)}, "grid=2x2x4, which has 16 ranks; a stage on a grid has one of 2, 4 ranks"),
        ({"grid": (2, 2, 1), "tp": 2}, "tp to 2, and grid=2x2x1, .* rows . cols = 4 ranks; keep only one of them"),
        ({"grid": (4, 4, 1), "tp": 2}, "tp to 2, and grid=4x4x1, .* rows . cols = 16 ranks; keep only one of them"),
        ({"grid": (2, 2, 1), "zero": 3}, "zero to 3, and grid=2x2x1, whose depth of 1 has no replicas"),
        ({"recompute": "no"}, "fixed= sets recompute to 'no'; it must be True or False"),
        (["tp"], "fixed must be a Mapping"),
    ],
    ids=str,
)
def test_parts_that_cannot_be_kept_are_refused(fixed, text):
    with pytest.raises(ArgumentError, match=text):
        search(GRAPH, CLUSTER, PROFILE, num_samples=8, fixed=fixed)


def vary(spreads):
    """The profile with these spreads of layer classes."""
    classes = {
        key: {1: ClassTimes(tuple(replace(item, spread=spreads.get(key, 0.0)) for item in degrees[1].measured))}
        for key, degrees in PROFILE.classes.items()
    }
    return replace(PROFILE, classes=classes)


def test_a_search_warns_of_a_noisy_profile_once():
    seconds = {layer.key: PROFILE.times(layer.key, 1)[0].at(1).forward_seconds for layer in GRAPH.layers}
    long, short = max(seconds, key=seconds.get), min(seconds, key=seconds.get)
    noisy = vary({long: 0.9, short: 0.1})
    with pytest.warns(UserWarning, match="is noisy: .* over 90%; above 25%, the choice may be wrong") as caught:
        search(GRAPH, CLUSTER, noisy, num_samples=8, method="pure")
    assert len(caught) == 1 and repr(long) in str(caught[0].message) and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(GRAPH, CLUSTER, vary(dict.fromkeys(seconds, 0.25)), num_samples=8, method="pure")
        search(GRAPH, CLUSTER, vary({short: 5.0}), num_samples=8, method="pure")  # a layer of no importance


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: search(GRAPH, CLUSTER, PROFILE, num_samples=8, states=4), "states must be a StateBytes, not 4"),
        (
            lambda: search(GRAPH, CLUSTER, PROFILE, num_samples=8, method=lambda _: ["x"]),
            "must return Candidates, not 'x'",
        ),
        (lambda: ChoiceRules(recompute=()), r"recompute of ChoiceRules is \(\)"),
        (lambda: ChoiceRules(min_tp=4, max_tp=2), "min_tp is 4 and max_tp 2; .* 1 <= least <= max"),
        (lambda: LayerChoice(0), "tp is 0 and zero 0"),
        (lambda: Cluster(HOSTS, None), "memory_limit_bytes is None"),
        (lambda: replace(GRAPH, ties=((0, 5),)), r"a tie is \(0, 5\); it must be \(layers, number of parameters\)"),
        (lambda: Tensor("x", 5, "float32", 0, (1,)), "shape of tensor 'x' is 5"),
        (lambda: LayerProfile.estimate(GRAPH, flops_per_second="1e12"), "flops_per_second is '1e12'"),
        (lambda: replace(PROFILE, message_seconds=math.nan), "message_seconds of a profile is nan"),
        (lambda: LayerTimes(1.5, 1, 0, 0, 0), "a measurement has 1.5 samples"),
        (
            lambda: ClassTimes((LayerTimes(2, 1, 1, 1, 2), LayerTimes(2, 1, 1, 1, 2))),
            r"measurements of a layer class have \[2, 2\]",
        ),
        (lambda: Tensor("x", (1, 2**62), "float32", 0, (1,)), "tensor 'x' has 18446744073709551616 bytes a sample"),
        (lambda: Tensor("x", (1,), "float32", 0, (1,), {"a": 1}), "has_gradient of tensor 'x' is "),
        (lambda: replace(GRAPH.layers[0], grid_sizes=2), "grid_sizes of layer .* is 2; it must be LayerSizes"),
        (lambda: replace(GRAPH.layers[0], grid_refusal=["a"]), "the grid_refusal of a layer must be a string"),
        (lambda: LayerChoice(recompute=[1]), r"recompute of a choice is \[1\]; it must be a bool"),
        (lambda: StagePlan(0, 1, 0, 1.0, (LayerChoice(),)), r"layers and ranks of a stage are \(0, 1, 0, 1.0\)"),
        (lambda: make_graph(heads=5), "5 heads do not divide hidden"),
        (lambda: LayerProfile.read("/no/such/file"), "cannot read /no/such/file: No such file or directory$"),
        (lambda: TrainingPlan.read("/"), "cannot read /"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused(make, text):
    with pytest.raises(ArgumentError, match=text):
        make()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_microbatches": "4"}, "num_microbatches is '4'; it must be an integer"),
        ({"num_microbatches": 3}, "3 microbatches of the training plan do not divide 8 samples"),
        ({"stages": []}, "a training plan needs at least one stage"),
        ({"layer_names": [["a"]] * 9}, "layer_names of the training plan has 9 entries"),
        ({"seconds": "a"}, "seconds is 'a'; it must be a number"),
        ({"bound_seconds": -1.0}, "bound_seconds of the training plan is -1.0; it must not be negative"),
        ({"is_guess": 1}, "is_guess is 1; it must be True or False"),
        ({"reports": {"busy_seconds": "1"}}, r"busy_seconds of reports\[0\] is '1'; it must be a finite number"),
        ({"reports": {"limit_bytes": math.inf}}, r"limit_bytes of reports\[0\] is inf; it must be a finite number"),
        ({"alternatives": {"text": 3}}, r"text of alternatives\[0\] is 3; it must be a string"),
        ({"edges": {"dst": 9}}, r"an edge of the training plan is between stages \[0, 9\]"),
        ({"hosts": [[0, 1]]}, r"hosts\[0\] is \(0, 1\); it must have 3 items"),
        ({"grid_refusals": [["a"]]}, r"grid_refusals\[0\] is \('a',\); it must have 2 items"),
    ],
    ids=str,
)
def test_a_training_plan_whose_parts_do_not_fit_is_not_read(training_plan, change, text):
    data = json.loads(training_plan.to_json())
    for name, value in change.items():
        if isinstance(value, dict):  # of the first entry
            data[name][0].update(value)
        else:
            data[name] = value
    with pytest.raises(ArgumentError, match=text):
        TrainingPlan.from_json(json.dumps(data))


@pytest.mark.parametrize("kind", [LayerGraph, LayerProfile, TrainingPlan])
def test_a_file_of_another_kind_is_named_with_what_is_wrong(tmp_path, kind):
    path = tmp_path / "file.json"
    missing = "layers" if kind is LayerGraph else "version"
    for text, why in (
        ("hello", "it is not JSON: Expecting value"),
        ("[" * 100_000, "it is not JSON"),
        ("[1]", "of 'list'"),
        ("{}", f"no '{missing}'"),
    ):
        path.write_text(text)
        with pytest.raises(ArgumentError, match=f"^{path}: this is not a .*{why}"):
            read_value(path, kind.from_json)
    if kind is not LayerGraph:
        with pytest.raises(ArgumentError, match=f"^{path}: this is not a "):
            kind.read(path)


def test_sizes_and_samples_that_no_float_holds_are_refused():
    with pytest.raises(ArgumentError, match="sizes of a layer on a grid must be positive integers of at most"):
        LayerSizes(hidden=10**400, sequence=1)
    with pytest.raises(ArgumentError, match=r"samples is 1000.*; it must be a positive integer of at most"):
        search(GRAPH, CLUSTER, PROFILE, num_samples=10**20)


def test_candidates_of_a_method_must_fit_the_problem():
    whole = (StagePlan(0, len(GRAPH.layers), 0, 4, (LayerChoice(),) * len(GRAPH.layers)),)
    for stages, count, text in (
        ((StagePlan(0, 2, 0, 4, (LayerChoice(),) * 2),), 4, "have 2 layers on 4 ranks; the model has "),
        (whole, 3, "the search allows 1, 2, 4, 8"),
        (whole, 8, "1 samples of a microbatch do not divide over the 4 replicas"),
    ):
        made = [Candidate("by hand", stages, count)]
        with pytest.raises(ArgumentError, match=text):
            search(GRAPH, CLUSTER, PROFILE, num_samples=8, method=lambda _, made=made: made)


def test_a_model_without_work_or_parameters_has_a_training_plan():
    graph = LayerGraph.chain([Layer(str(number), "empty", 0.0, 0, 0.0) for number in range(4)], [(1, 4)] * 3)
    match = search(graph, Cluster(HOSTS, 1e9), LayerProfile.estimate(graph, flops_per_second=1e9), num_samples=8)
    assert match.seconds == 0
    assert "takes less than 0 s" in match.explain()


def test_a_tp_degree_that_no_layer_allows_is_named():
    graph = LayerGraph.transformer(layers=2, hidden=8, heads=2, sequence=8, vocabulary=32)
    graph = replace(graph, layers=tuple(replace(layer, tp_limit=1, grid_sizes=None) for layer in graph.layers))
    profile = LayerProfile.estimate(graph, flops_per_second=1e9)
    message = r"no stage can have tp=2: the layers of .* allow tp=1 at most; use a smaller tp, or pass a tp_plan"
    with pytest.raises(ArgumentError, match=message):
        search(graph, CLUSTER, profile, num_samples=4, fixed={"tp": 2})
