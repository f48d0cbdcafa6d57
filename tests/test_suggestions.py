"""An error that refuses a name says which known name is close."""

from __future__ import annotations

import pytest

import reshard
from reshard import Mesh, Topology, topology_from_json
from reshard.errors import ReshardError
from reshard.planner.strategy_registry import find_strategy
from reshard.scheduler.autoparallel import Cluster, LayerGraph, LayerProfile, search
from reshard.scheduler.training.models.model_presets import find_preset


def _search():
    graph = LayerGraph.transformer(layers=2, hidden=64, heads=4, sequence=16, vocabulary=100)
    profile = LayerProfile.estimate(graph, flops_per_second=1e12)
    search(graph, Cluster(Topology.uniform([0, 0]), 1e9), profile, num_samples=8, fixed={"num_microbatch": 4})


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: find_strategy("multicst"), "multicast"),
        (lambda: find_strategy("brodcast"), "broadcast"),
        (
            lambda: reshard.make_plan(reshard.Layout(Mesh.of(1)), reshard.Layout(Mesh.of(1)), (4,), "fp8"),
            "float8_e4m3fn",
        ),
        (lambda: reshard.load_preset("dgx_h10", 8), "dgx_h100"),
        (lambda: reshard.make_plan(reshard.Layout(Mesh.of(1)), reshard.Layout(Mesh.of(1)), (4,), "flot32"), "float32"),
        (lambda: reshard.reshard_local({}, Mesh.of(1), Mesh.of(1), compresion="int8x128"), "compression"),
        (lambda: Mesh.of("data=2,tensor=2").axis_size("tensr"), "tensor"),
        (lambda: topology_from_json({"hosts": [{"device": 2}]}), "devices"),
        (lambda: topology_from_json({"hosts": [{"devices": 2}], "oversubscribtion": 2}), "oversubscription"),
        (lambda: reshard.CodecRate("int8x12", 1e9, 1e9), "int8x128"),
        (lambda: reshard.CodecRate("INT8X128", 1e9, 1e9), "int8x128"),
        (lambda: find_preset("gpt3-126m"), "gpt3-125m"),
        (_search, "num_microbatches"),
    ],
)
def test_a_wrong_name_is_answered_with_a_known_one(call, name):
    with pytest.raises((ReshardError, TypeError), match=rf"did you mean '{name}'\?(; supported dtypes are .*)?$"):
        call()
