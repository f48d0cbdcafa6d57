"""Calls of the strategy search, with its inputs and results."""

from __future__ import annotations

import functools
import tempfile
from unittest import mock

import torch

from reshard import Topology, scheduler
from reshard.scheduler import autoparallel
from reshard.scheduler.autoparallel.costs.search_problem import SearchProblem
from reshard.scheduler.autoparallel.modules import profiling
from reshard.scheduler.autoparallel.modules.zero_times import ZeroTimes
from reshard.scheduler.autoparallel.tuning import Measurement
from tests.campaigns.entry_points.samples import Chain, fields_of


@functools.cache
def _searched():
    graph = autoparallel.LayerGraph.transformer(layers=4, hidden=64, heads=4, sequence=16, vocabulary=128)
    cluster = autoparallel.Cluster(Topology.uniform((0, 0, 1, 1), 1e9), 1e12)
    profile = autoparallel.LayerProfile.estimate(graph, flops_per_second=1e12)
    return graph, cluster, profile, autoparallel.search(graph, cluster, profile, num_samples=8, method="pure")


def _profile_layers(**arguments):
    """Without the process that measures gathers, which takes seconds to start."""
    with mock.patch.object(profiling, "measure_zero_times", lambda layers, *_: [ZeroTimes()] * len(layers)):
        return autoparallel.profile_layers(**arguments)


def of_searches():
    graph, cluster, profile, training_plan = _searched()
    folder = tempfile.mkdtemp()
    profile.save(f"{folder}/read.json")
    training_plan.save(f"{folder}/plan_read.json")
    problem = SearchProblem(graph, cluster, profile, 8)
    choice, rules = autoparallel.LayerChoice(tp=2), autoparallel.ChoiceRules()
    key = graph.layers[0].key
    stages = problem.pipeline(training_plan.stages, training_plan.num_microbatches)
    measured = Measurement((1.0,), (scheduler.simulate_schedule(training_plan.schedule, stages),))
    traced = autoparallel.trace_module(Chain(), {"x": torch.ones(4, 4)}, ["layers.1", "layers.2"])
    return {
        "search": (
            autoparallel.search,
            {"graph": graph, "cluster": cluster, "profile": profile, "num_samples": 8, "method": "pure"}
            | {"fixed": {"tp": 1, "zero": 0}, "states": autoparallel.StateBytes(), "rules": rules, "compression": None},
        ),
        "StateBytes": (autoparallel.StateBytes, {"weight": 4.0, "gradient": 4.0, "optimizer": 8.0}),
        "LayerChoice": (autoparallel.LayerChoice, {"tp": 2, "zero": 0, "recompute": False, "grid": ()}),
        "LayerChoice.on_grid": (
            autoparallel.LayerChoice.on_grid,
            {"rows": 2, "cols": 2, "depth": 1, "zero": 0, "recompute": False},
        ),
        "LayerChoice.sample_shards": (choice.sample_shards, {"num_ranks": 4}),
        "LayerChoice.fits": (choice.fits, {"num_ranks": 4}),
        "LayerChoice.describe": (choice.describe, {"num_ranks": 4}),
        "ChoiceRules": (autoparallel.ChoiceRules, fields_of(rules)),
        "ChoiceRules.choices": (rules.choices, {"num_devices": 4, "host_devices": 2}),
        "ChoiceRules.grid_shapes": (rules.grid_shapes, {"num_devices": 4, "host_devices": 2}),
        "ChoiceRules.uniform": (rules.uniform, {"choices": [choice]}),
        "Cluster": (
            autoparallel.Cluster,
            {"topology": Topology((0, 0)), "memory_limit_bytes": (1e9, 2e9), "num_ranks": 2},
        ),
        "Cluster.select": (cluster.select, {"ranks": (2, 3)}),
        "Cluster.with_faster_links": (cluster.with_faster_links, {"factor": 2.0}),
        "Cluster.host_of": (cluster.host_of, {"rank": 2}),
        "Cluster.hosts_of": (cluster.hosts_of, {"first": 1, "end": 3}),
        "Cluster.is_mesh": (cluster.is_mesh, {"first": 1, "end": 3}),
        "Cluster.memory_of": (cluster.memory_of, {"first": 1, "end": 3}),
        "Cluster.nic_bytes_per_second": (cluster.nic_bytes_per_second, {"host": 1}),
        "Layer": (autoparallel.Layer, fields_of(graph.layers[1])),
        "Tensor": (autoparallel.Tensor, fields_of(graph.tensors[0])),
        "LayerGraph": (autoparallel.LayerGraph, fields_of(graph)),
        "LayerGraph.chain": (
            autoparallel.LayerGraph.chain,
            {"layers": graph.layers[:3], "shapes": [(1, 4), (1, 4)], "dtype": "float32", "name": "x"},
        ),
        "LayerGraph.transformer": (
            autoparallel.LayerGraph.transformer,
            {"layers": 2, "hidden": 64, "heads": 4, "sequence": 16, "vocabulary": 128, "tied": True}
            | {"dtype": "bfloat16", "name": "x"},
        ),
        "LayerGraph.between": (graph.between, {"first": 0, "cut": 2, "end": 4}),
        "LayerGraph.from_json": (autoparallel.LayerGraph.from_json, {"text": graph.to_json()}),
        "LayerProfile": (autoparallel.LayerProfile, fields_of(profile)),
        "LayerProfile.estimate": (
            autoparallel.LayerProfile.estimate,
            {"graph": graph, "flops_per_second": 1e12, "efficiency": 0.5, "device": "x", "message_seconds": 0.0}
            | {"slowdown": 1.0},
        ),
        "LayerProfile.check": (profile.check, {"graph": graph, "device": "guess"}),
        "LayerProfile.times": (profile.times, {"key": key, "degree": 1}),
        "LayerProfile.spread": (profile.spread, {"graph": graph}),
        "LayerProfile.from_json": (autoparallel.LayerProfile.from_json, {"text": profile.to_json()}),
        "LayerProfile.save": (profile.save, {"path": f"{folder}/profile.json"}),
        "LayerProfile.read": (autoparallel.LayerProfile.read, {"path": f"{folder}/read.json"}),
        "TrainingPlan": (autoparallel.TrainingPlan, fields_of(training_plan)),
        "TrainingPlan.save": (training_plan.save, {"path": f"{folder}/plan.json"}),
        "TrainingPlan.read": (autoparallel.TrainingPlan.read, {"path": f"{folder}/plan_read.json"}),
        "trace_module": (
            autoparallel.trace_module,
            {"model": Chain(), "example": {"x": torch.ones(4, 4)}, "cuts": ["layers.1"], "tp_plan": None}
            | {"max_tp": 1, "name": "x", "autocast": torch.bfloat16, "loss": None, "blocks": None},
        ),
        "profile_layers": (
            _profile_layers,
            {"traced": traced, "device": "cpu", "sample_counts": (1, 2), "repeats": 1, "message_seconds": 0.0}
            | {"slowdown": 1.0},
        ),
        "tune": (
            autoparallel.tune,
            {"problem": problem, "choose": lambda problem: training_plan, "measure": lambda training_plan: measured},
        ),
    }
