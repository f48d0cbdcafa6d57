"""Call public functions of one process with nonsense: ``python -m tests.campaigns.nonsense_calls --runs 20000``.

A trial takes a valid call, and puts a value of a wrong type, size or text in place of one argument, or of one item
inside an argument. The call must return, or raise an error of this package whose text can be encoded.
"""

from __future__ import annotations

import argparse
import copy
import functools
import io
import json
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import fields
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import reshard
from reshard import Layout, Mesh, RegionLayout, TensorSpec, Topology, compression, parallel, planner, scheduler, weights
from reshard.codecs import find_codec
from reshard.formatting import brief
from reshard.scheduler import autoparallel
from reshard.scheduler.autoparallel.costs.problem import SearchProblem
from reshard.scheduler.autoparallel.modules import profiling
from reshard.scheduler.autoparallel.modules.gather_times import GatherTimes
from reshard.scheduler.autoparallel.tuning import Measurement
from reshard.weights.mapping.rules import Rule
from tests.campaigns.nonsense import ARGUMENTS

#: Time limit of one call.
LIMIT_SECONDS = 20.0

_ENDLESS = []
_ENDLESS.append(_ENDLESS)
VALUES = (
    *ARGUMENTS,
    *("\ud800", "x" * 100_000, "\x00", "S0", "R R R", "1x1", "0", "-1", "int8x128", "é", b"\xff", "x/../y"),
    *(float("inf"), float("-inf"), 1e308, 5e-324, -0.5, 2, 3, 7, 2**31, 2**63, -(2**63), 10**30, 1j, Decimal("NaN")),
    *((), (0,), (-1,), (None, None), ("", ""), ((),), (1, 2, 3), [[]], [2**63], ["a"], [1.5], ["\ud800"], set(), {1}),
    *({0: 0}, {"": None}, {None: 1}, {"w": (6, 4)}, {"w": None}, {"\ud800": 1}, _ENDLESS, range(0), range(3), slice(1)),
    *(
        np.float64("nan"),
        np.int64(-1),
        np.zeros((0, 3)),
        np.array(["a", None], dtype=object),
        np.array(1),
        np.arange(4),
    ),
    *(torch.ones(2, 2), torch.ones(2, dtype=torch.int64), torch.ones(3, requires_grad=True), torch.tensor(3)),
    *(Path("/dev/null/x"), nn.Linear(2, 2), Ellipsis, NotImplemented, io.StringIO("x"), iter([1, 2]), np.dtype("f4")),
    *(Mesh.of(2), Layout(Mesh.of(2), "S0"), Topology((0, 0)), Mesh.of(1), RegionLayout({0: [[(0, 2)]]})),
)


#: Arguments that are functions of the caller. An error that such a function raises is the caller's.
CALLBACKS = ("loss", "blocks", "convert", "wrap", "prepare", "choose", "measure", "plan", "schedule", "run", "strategy")
#: Values whose fields are checked when they are used.
AS_GIVEN = (planner.PlanProblem, planner.Routes, *get_args(Rule))


class Timeout(BaseException):
    """A call exceeded the time limit."""


class _Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean()


@functools.cache
def _plans():
    rows, columns = Layout(Mesh.of(2), "S0 R"), Layout(Mesh.of(2, first_rank=2), "R S0")
    plan = reshard.make_plan(rows, columns, (6, 4), "float32")
    return rows, columns, plan


@functools.cache
def _scheduled():
    pipeline = scheduler.Pipeline.of_costs([1.0] * 4, [2.0] * 4, [0.5] * 3)
    schedule = scheduler.one_f_one_b(pipeline, 3)
    return pipeline, schedule, scheduler.simulate_schedule(schedule, pipeline)


@functools.cache
def _searched():
    graph = autoparallel.LayerGraph.transformer(layers=4, hidden=64, heads=4, sequence=16, vocabulary=128)
    cluster = autoparallel.Cluster(Topology.uniform((0, 0, 1, 1), 1e9), 1e12)
    profile = autoparallel.LayerProfile.estimate(graph, flops_per_second=1e12)
    return graph, cluster, profile, autoparallel.search(graph, cluster, profile, num_samples=8, method="pure")


def _fields(value):
    """The arguments that make a dataclass again."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}


def _of_sharding():
    rows, _, plan = _plans()
    regions = {0: [[(0, 3), (0, 4)]], 1: [[(3, 6), (0, 4)]]}
    spec = plan.tensors[0]
    devices = np.array([SimpleNamespace(id=0), SimpleNamespace(id=1)], dtype=object)
    return {
        "Mesh": (Mesh, {"ranks": [0, 1, 2, 3], "axis_sizes": {"a": 2, "b": 2}}),
        "Mesh.of": (Mesh.of, {"grid": (2, 2), "first_rank": 1, "axes": ["a", "b"]}),
        "Mesh.from_array": (Mesh.from_array, {"ranks": [[0, 1], [2, 3]], "axes": ["a", "b"]}),
        "Mesh.from_jax": (Mesh.from_jax, {"jax_mesh": SimpleNamespace(devices=devices, axis_names=("x",))}),
        "Mesh.axis_size": (Mesh.of("a=2,b=3").axis_size, {"axis": "a"}),
        "Mesh.with_ranks": (Mesh.of(2).with_ranks, {"rank_of": {0: 4, 1: 5}}),
        "Layout": (Layout, {"mesh": Mesh.of("2x2"), "spec": ("0", ("1",)), "ndim": 2}),
        "Layout.local_shape": (rows.local_shape, {"shape": (6, 4), "rank": 1}),
        "Layout.regions": (rows.regions, {"shape": (6, 4), "rank": 1}),
        "Layout.parts_of": (rows.parts_of, {"rank": 1, "ndim": 2}),
        "Layout.cut_dims": (rows.cut_dims, {"shape": (6, 4)}),
        "Layout.with_ranks": (rows.with_ranks, {"rank_of": {0: 4, 1: 5}}),
        "Layout.to_2023": (rows.to_2023, {"ndim": 2}),
        "RegionLayout": (RegionLayout, {"regions": regions, "join_dim": 0, "ndim": 2}),
        "RegionLayout.local_shape": (RegionLayout(regions).local_shape, {"shape": (6, 4), "rank": 1}),
        "RegionLayout.regions": (RegionLayout(regions).regions, {"shape": (6, 4), "rank": 1}),
        "RegionLayout.joined_shape": (RegionLayout(regions).joined_shape, {"rank": 1}),
        "RegionLayout.check_fits": (RegionLayout(regions).check_fits, {"shape": (6, 4)}),
        "TensorSpec": (TensorSpec, _fields(spec)),
    }


def _of_topologies():
    hosts = Topology((0, 0, 1, 1))
    data = {"hosts": [{"devices": 2, "nics": ["25 Gbit/s"], "pod": 0}, {"devices": 2, "pod": 1}], "pods": [1e9, 2e9]}
    rate = reshard.CodecRate("int8x128", 1e9, 2e9)
    path = Path(tempfile.mkdtemp()) / "topology.json"
    path.write_text(json.dumps(data))
    return {
        "Topology": (Topology, _fields(hosts) | {"codec_rates": (rate,)}),
        "Topology.uniform": (Topology.uniform, {"host_of_rank": [0, 0, 1], "nic_bytes_per_second": 1e9}),
        "Topology.from_hostnames": (Topology.from_hostnames, {"hostnames": ["a", "a", "b"]}),
        "Topology.host": (hosts.host, {"number": 1}),
        "Topology.nic": (hosts.nic, {"rank": 1}),
        "Topology.ranks_of_host": (hosts.ranks_of_host, {"number": 1}),
        "Topology.with_faster_links": (hosts.with_faster_links, {"factor": 2.0}),
        "Topology.first": (hosts.first, {"count": 2}),
        "Topology.only": (hosts.only, {"ranks": [0, 2]}),
        "Topology.select": (hosts.select, {"ranks": [2, 0]}),
        "Topology.check_covers": (hosts.check_covers, {"ranks": [2, 0]}),
        "CodecRate": (reshard.CodecRate, _fields(rate)),
        "load_preset": (reshard.load_preset, {"name": "tcp", "num_ranks": 4}),
        "read_topology": (reshard.read_topology, {"path": path}),
        "topology_from_json": (reshard.topology_from_json, {"data": data}),
    }


def _of_plans():
    rows, columns, plan = _plans()
    regions = RegionLayout({0: [[(0, 3), (0, 4)]], 1: [[(3, 6), (0, 4)]]})
    shards = {0: np.ones((3, 4), np.float32), 1: np.ones((3, 4), np.float32)}
    asked = {"src": rows, "dst": columns, "shape": (6, 4), "dtype": "float32", "strategy": "send_recv"}
    asked |= {"topology": Topology((0, 0, 1, 1)), "staging_bytes": 2**20, "compression": None, "max_error": None}
    named = {"src": {"w": rows}, "dst": {"w": columns}, "shape": {"w": (6, 4)}, "dtype": {"w": "float32"}}
    problem = planner.PlanProblem.of(plan.tensors, plan.topology)
    ones = np.array([0, 1])
    routes = planner.STRATEGIES["send_recv"](problem)
    local = {"shards": shards, "src": rows, "dst": columns, "shape": (6, 4), "strategy": "send_recv"}
    local |= {"compression": None}
    coded = local | {"out": {2: np.ones((6, 2), np.float32), 3: np.ones((6, 2), np.float32)}, "strategy": None}
    coded |= {"base": {rank: value.copy() for rank, value in shards.items()}, "compression": "delta"}
    return {
        "make_plan": (reshard.make_plan, asked),
        "make_plan of regions": (reshard.make_plan, asked | {"src": regions}),
        "make_plan of names": (reshard.make_plan, named | {"compression": "int8x128", "max_error": None}),
        "plan_tensors": (planner.plan_tensors, {"tensors": plan.tensors, "strategy": None, "topology": plan.topology}),
        "Plan": (reshard.Plan, _fields(plan)),
        "Plan.count_messages": (plan.count_messages, {"rank": 0}),
        "check_plan": (reshard.check_plan, {"plan": plan}),
        "find_bound": (reshard.find_bound, {"problem": plan.tensors, "topology": plan.topology}),
        "simulate": (reshard.simulate, {"plan": plan, "topology": plan.topology}),
        "CostReport": (reshard.CostReport, {"plan": plan}),
        "parse_plan": (reshard.parse_plan, {"text": str(plan)}),
        "plan_from_json": (reshard.plan_from_json, {"data": reshard.plan_to_json(plan)}),
        "plan_to_json": (reshard.plan_to_json, {"plan": plan, "rank": 1}),
        "reshard_local": (reshard.reshard_local, local),
        "reshard_local, delta": (reshard.reshard_local, coded),
        "PlanProblem": (planner.PlanProblem, _fields(problem)),
        "PlanProblem.of": (planner.PlanProblem.of, {"tensors": plan.tensors, "topology": plan.topology}),
        "Routes": (planner.Routes, _fields(routes)),
        "Routes.of": (planner.Routes.of, {"problem": problem, "rows": [(0, [(0, 2)]), (1, [(0, 3)])]}),
        "Routes.direct": (
            planner.Routes.direct,
            {"problem": problem, "task": ones, "sender": np.array([0, 0]), "receiver": np.array([2, 3])},
        ),
        "Routes.join": (planner.Routes.join, {"parts": [routes, routes]}),
        "Routes.take": (routes.take, {"order": ones}),
        "Floors": (planner.Floors, {"problem": problem}),
        "find_strategy": (planner.find_strategy, {"strategy": "multicast"}),
        "floor_of_transfers": (planner.floor_of_transfers, {"problem": problem, "transfers": plan.transfers}),
        "predict": (planner.predict, {"plan": plan, "rate": reshard.CodecRate("int8x128", 1e9, 2e9)}),
        "compress_tensors": (
            planner.compress_tensors,
            {"tensors": plan.tensors, "compression": "int8x128", "max_error": None, "topology": None}
            | {"plan": planner.plan_tensors, "wire_dtypes": None},
        ),
        "a strategy of routes": (
            lambda sender, edge_at, task: reshard.make_plan(
                rows,
                columns,
                (6, 4),
                "float32",
                strategy=lambda problem: planner.Routes(
                    task, routes.start, routes.stop, edge_at, sender, routes.receiver
                ),
            ),
            {"sender": routes.sender, "edge_at": routes.edge_at, "task": routes.task},
        ),
        "a strategy": (
            lambda routes: reshard.make_plan(rows, columns, (6, 4), "float32", strategy=lambda problem: routes),
            {"routes": routes},
        ),
    }


def _of_compression():
    policy = {"dp": "int8x128", "pp": ("int8x128", "int4x32"), "zero": "int8x128", "feedback": ("dp",), "raw_steps": 2}
    gradients = {"a": torch.ones(300), "b": torch.ones(3, 4)}
    linear = nn.Linear(3, 2)
    summed = compression.GradientSum("int8x128", average=True, feedback=True)
    scatter = compression.CompressedReduceScatter("int8x128", feedback=True)
    return {
        "Policy": (compression.Policy, policy),
        "Policy.pair": (compression.Policy(pp="int8x128").pair, {"dimension": "pp"}),
        "Policy.check_only": (compression.Policy(dp="int8x128").check_only, {"dimension": "dp", "who": "a test"}),
        "parse_policy": (compression.parse_policy, {"text": "dp=int8x128,pp=int8x128/int4x32"}),
        "CompressedAllGather": (compression.CompressedAllGather, {"codec": "int8x128"}),
        "CompressedReduceScatter": (compression.CompressedReduceScatter, {"codec": "int8x128", "feedback": True}),
        "CompressedReduceScatter.load_state_dict": (scatter.load_state_dict, {"state": scatter.state_dict()}),
        "CompressedAllGather call": (
            compression.CompressedAllGather("int8x128"),
            {"output_tensor": torch.zeros(300), "input_tensor": torch.ones(300), "group": dist.group.WORLD},
        ),
        "CompressedReduceScatter call": (
            scatter,
            {"output_tensor": torch.zeros(300), "input_tensor": torch.ones(300), "group": dist.group.WORLD}
            | {"op": dist.ReduceOp.SUM},
        ),
        "GradientSum": (
            compression.GradientSum,
            {"codec": "int8x128", "group": None, "host_of_rank": [0], "average": True, "feedback": True}
            | {"module": linear},
        ),
        "GradientSum call": (summed, {"gradients": gradients}),
        "GradientSum.load_state_dict": (summed.load_state_dict, {"state": summed.state_dict()}),
        "find_codec": (find_codec, {"codec": "int8x128"}),
    }


def _of_weights():
    fused = {"sources": ("{p}.q", "{p}.k"), "target": "{p}.qk", "dim": 0}
    src = {"a.q": torch.ones(2, 3), "a.k": torch.ones(2, 3), "b": torch.ones(2, 3), "c": torch.ones(3)}
    dst = {"a.qk": torch.zeros(4, 3), "d": torch.zeros(3, 2), "c": torch.zeros(3)}
    rules = [weights.Concatenate(**fused), weights.Rename("b", "d"), weights.Transpose("d")]
    single = {"source": "a.{e:d}.w", "target": "a.w", "dim": 0}
    return {
        "Concatenate": (weights.Concatenate, fused),
        "Split": (weights.Split, {"source": "{p}.qk", "targets": ("{p}.q", "{p}.k"), "dim": 0}),
        "Stack": (weights.Stack, single),
        "Unstack": (weights.Unstack, {"source": "a.w", "target": "a.{e:d}.w", "dim": 0}),
        "Rename": (weights.Rename, {"source": "{p}.a", "target": "{p}.b"}),
        "Drop": (weights.Drop, {"name": "a"}),
        "Pad": (weights.Pad, {"name": "a", "dim": 0}),
        "Trim": (weights.Trim, {"name": "a", "dim": 0}),
        "Transpose": (weights.Transpose, {"name": "a"}),
        "transfer_state_dict": (
            weights.transfer_state_dict,
            {"src": src, "dst": dst, "rules": rules, "memory_bytes": 2**20, "timeout_seconds": 10.0, "topology": None},
        ),
        "transfer_state_dict by rules of nonsense": (
            lambda source, target, dim: weights.transfer_state_dict(
                src, dst, rules=[weights.Concatenate(source, target, dim), *rules[1:]]
            ),
            {"source": fused["sources"], "target": fused["target"], "dim": 0},
        ),
        "Publisher": (
            weights.Publisher,
            {"model": {"w": torch.ones(2)}, "store": dist.HashStore(), "name": "x", "group": None, "shards": None}
            | {"memory_bytes": 2**20, "dtype": None, "join_seconds": 0.2, "timeout_seconds": 0.5, "topology": None},
        ),
        "Subscriber": (
            weights.Subscriber,
            {"model": {"w": torch.ones(2)}, "store": dist.HashStore(), "name": "x", "group": None, "mode": "shadow"}
            | {"memory_bytes": 2**20, "rules": None, "load_weights": None, "join_seconds": 0.2, "timeout_seconds": 0.5}
            | {"topology": None, "shards": None},
        ),
    }


def _of_parallel():
    grid = parallel.Grid.make(1, 1)
    linear = nn.Linear(4, 4)
    parallel_linear = parallel.Linear(linear, grid)
    embedding = parallel.Embedding(nn.Embedding(7, 4), grid)
    cross_entropy = parallel.CrossEntropy(grid, 4)
    heads = parallel.Heads(grid, 4, 2, 3)
    sizes = parallel.TransformerSizes(8, 2, 4, 2, 2, 16, 1, 32, 8)
    part = torch.ones(1, 4, 2, 3)
    model = parallel.parallelize(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), grid)
    return {
        "Grid": (parallel.Grid, {"device_mesh": grid.device_mesh, "timeout_seconds": 5.0}),
        "Mesh.from_device_mesh": (Mesh.from_device_mesh, {"device_mesh": grid.device_mesh}),
        "Grid.make": (
            parallel.Grid.make,
            {"rows": 1, "cols": 1, "depth": 1, "device_type": "cpu", "timeout_seconds": 5.0},
        ),
        "choose_grid": (
            parallel.choose_grid,
            {"model": sizes, "topology": Topology((0, 0, 1, 1)), "ranks": range(4), "memory_limit_bytes": 1e12}
            | {"rows": 4, "flops_per_second": 1e12, "itemsize": 4, "state_bytes": 16, "panel": 1024}
            | {"keep_inputs": False},
        ),
        "parallelize": (
            lambda model, **options: parallel.parallelize(copy.deepcopy(model), **options),
            {"model": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "grid": grid, "panel": 1024}
            | {"keep_inputs": False, "has_local_input": False, "compression": None},
        ),
        "a parallel model": (model, {"input": torch.ones(2, 4)}),
        "sync_gradients": (parallel.sync_gradients, {"model": model, "check_every": 100}),
        "sync_during_backward": (
            lambda **options: parallel.sync_during_backward(**options).__enter__(),
            {"model": model, "check_every": 100},
        ),
        "plain_state_dict": (parallel.plain_state_dict, {"model": model}),
        "relayout": (
            parallel.relayout,
            {"model": model, "grid": grid, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
            | {"compression": None},
        ),
        "register": (parallel.register, {"module_class": _Chain, "convert": lambda *_: None}),
        "TransformerSizes": (parallel.TransformerSizes, _fields(sizes)),
        "TransformerSizes.of": (
            parallel.TransformerSizes.of,
            {"model": SimpleNamespace(hidden=8, num_heads=2, num_layers=2, vocabulary=32), "sequence": 8},
        ),
        "Heads": (parallel.Heads, {"grid": grid, "num_heads": 4, "num_kv_heads": 2, "head_size": 3}),
        "Heads.query_heads": (heads.query_heads, {"col": 0}),
        "Heads.kv_heads": (heads.kv_heads, {"col": 0}),
        "Heads.split": (heads.split, {"x": torch.ones(1, 2, 12), "is_query": True}),
        "Heads.join": (heads.join, {"x": part}),
        "Heads.attend": (heads.attend, {"q": part, "k": part[:, :2], "v": part[:, :2], "mask": None, "dropout": 0.0}),
        "Dropout": (parallel.Dropout, {"p": 0.1, "grid": grid, "features": 4}),
        "Dropout call": (parallel.Dropout(0.1, grid, 4), {"x": torch.ones(2, 4)}),
        "Linear": (
            parallel.Linear,
            {"linear": linear, "grid": grid, "cut_rows": None, "panel": 1024, "keep_inputs": False},
        ),
        "Linear call": (parallel_linear, {"x": torch.ones(2, 4)}),
        "Embedding": (parallel.Embedding, {"embedding": nn.Embedding(7, 4), "grid": grid, "cut_rows": 0}),
        "Embedding call": (embedding, {"tokens": torch.tensor([[1, 2]])}),
        "PositionEmbedding": (parallel.PositionEmbedding, {"embedding": nn.Embedding(7, 4), "grid": grid}),
        "PositionEmbedding call": (
            parallel.PositionEmbedding(nn.Embedding(7, 4), grid),
            {"positions": torch.tensor([1, 2])},
        ),
        "LayerNorm": (parallel.LayerNorm, {"norm": nn.LayerNorm(4), "grid": grid}),
        "RMSNorm": (parallel.RMSNorm, {"norm": nn.RMSNorm(4), "grid": grid}),
        "LayerNorm call": (parallel.LayerNorm(nn.LayerNorm(4), grid), {"x": torch.ones(2, 4)}),
        "CrossEntropy": (parallel.CrossEntropy, {"grid": grid, "num_classes": 4, "ignore_index": -100}),
        "CrossEntropy call": (
            cross_entropy,
            {"logits": torch.ones(2, 4), "targets": torch.tensor([1, 2]), "count": None},
        ),
        "Grid.local_rows": (grid.local_rows, {"rows": 4}),
        "Grid.local_features": (grid.local_features, {"size": 4}),
        "Grid.along": (grid.along, {"axis": "row"}),
    }


def _of_schedules():
    pipeline, schedule, timeline = _scheduled()
    rows, columns, plan = _plans()
    profile = scheduler.StageProfile(
        4, tuple(scheduler.pipe.profile.StageTimes(1.0, 1.0, 1.0, 2.0, 8) for _ in range(4))
    )
    folder = tempfile.mkdtemp()
    built = {"pipeline": pipeline, "num_microbatches": 3}
    looped = built | {"num_microbatches": 4, "num_pp_ranks": 2}
    chain, example = _Chain(), {"x": torch.ones(4, 4)}
    pipe = scheduler.Pipe(chain, ["layers.2"], stages="1x1,1x1")
    alone = scheduler.Pipe(_Chain(), [], stages="1x1")
    tensors = [TensorSpec((6, 4), "float32", rows, columns, "w")]
    profile_of_two = scheduler.StageProfile(2, profile.stages[:2])
    engine = alone.compile(example, 2, schedule=scheduler.gpipe, profile=scheduler.StageProfile(2, profile.stages[:1]))
    saved = Path(folder) / "checkpoint"
    engine.save(saved)
    profile.save(f"{folder}/read.json")
    return {
        "Stage": (scheduler.Stage, _fields(pipeline.stages[0])),
        "Edge": (scheduler.Edge, _fields(pipeline.edges[0])),
        "Pipeline": (scheduler.Pipeline, _fields(pipeline)),
        "Pipeline.of_costs": (
            scheduler.Pipeline.of_costs,
            {"forward": [1.0, 1.0], "backward": [2.0, 2.0], "communication": [0.5], "weight_grad_part": 0.5},
        ),
        "Pipeline.ideal_seconds": (pipeline.ideal_seconds, {"num_microbatches": 3}),
        "plan_edge": (
            scheduler.plan_edge,
            {"src": 0, "dst": 1, "tensors": tensors, "topology": plan.topology, "strategy": None}
            | {"without_gradient": ["w"]},
        ),
        "Schedule": (scheduler.Schedule, _fields(schedule)),
        "Schedule.first": (schedule.first, {"num_microbatches": 2}),
        "Schedule.peak_bytes": (schedule.peak_bytes, {"pipeline": pipeline}),
        "Schedule.to_networkx": (schedule.to_networkx, {"pipeline": pipeline}),
        "parse_schedule": (scheduler.parse_schedule, {"text": str(schedule)}),
        "from_torch_csv": (
            scheduler.from_torch_csv,
            {"text": scheduler.to_torch_csv(schedule), "pipeline": pipeline, "name": "x"},
        ),
        "to_torch_csv": (scheduler.to_torch_csv, {"schedule": schedule, "transfers": False}),
        "overlap_transfers": (scheduler.overlap_transfers, {"schedule": schedule, "pipeline": pipeline}),
        "auto_schedule": (
            scheduler.auto_schedule,
            built | {"memory_limit_bytes": 100, "pp_rank_of_stage": [0, 1, 2, 3], "can_split": True},
        ),
        "eager_1f1b": (scheduler.eager_1f1b, built),
        "gpipe": (scheduler.gpipe, built),
        "one_f_one_b": (scheduler.one_f_one_b, built),
        "zb_h1": (scheduler.zb_h1, built),
        "zb_h2": (scheduler.zb_h2, built),
        "zb_v": (scheduler.zb_v, built),
        "dualpipe_v": (scheduler.dualpipe_v, built),
        "interleaved_1f1b": (scheduler.interleaved_1f1b, looped),
        "interleaved_zero_bubble": (scheduler.interleaved_zero_bubble, looped),
        "looped_bfs": (scheduler.looped_bfs, looped),
        "find_lower_bound": (
            scheduler.find_lower_bound,
            built | {"memory_limit_bytes": [100] * 4, "pp_rank_of_stage": [0, 1, 2, 3], "can_split": True},
        ),
        "critical_path": (scheduler.critical_path, {"schedule": schedule, "pipeline": pipeline}),
        "simulate_schedule": (scheduler.simulate_schedule, {"schedule": schedule, "pipeline": pipeline}),
        "check_schedule": (
            scheduler.check_schedule,
            {"schedule": schedule, "pipeline": pipeline, "memory_limit_bytes": 100},
        ),
        "to_chrome_trace": (scheduler.to_chrome_trace, {"timeline": timeline}),
        "to_html": (scheduler.to_html, {"schedule": schedule, "timeline": timeline}),
        "to_svg": (scheduler.to_svg, {"schedule": schedule, "timeline": timeline}),
        "StageProfile": (scheduler.StageProfile, _fields(profile)),
        "StageTimes": (scheduler.pipe.profile.StageTimes, _fields(profile.stages[0])),
        "StageProfile.apply": (profile.apply, {"pipeline": pipeline, "num_samples": 8}),
        "StageProfile.save": (profile.save, {"path": f"{folder}/profile.json"}),
        "StageProfile.load": (scheduler.StageProfile.load, {"path": f"{folder}/read.json"}),
        "Placement": (
            scheduler.Placement,
            {"dp": 1, "tp": 2, "grid": None, "tp_plan": {}, "wrap": None, "prepare": None, "ranks": (0, 1)}
            | {"keep_inputs": False},
        ),
        "Placement on a grid": (scheduler.Placement, {"grid": (1, 2, 1), "ranks": (0, 1), "keep_inputs": True}),
        "Block": (
            scheduler.Block,
            {"path": "layers.0", "run": nn.Identity(), "modules": ("layers.0",), "recomputed": ()},
        ),
        "Pipe": (
            scheduler.Pipe,
            {"model": chain, "cut_before": ["layers.2"], "stages": [scheduler.Placement(), scheduler.Placement()]}
            | {"training_plan": None, "init": None, "autocast": torch.bfloat16, "tp_plan": None, "loss": None},
        ),
        "Pipe.cut": (pipe.cut, {"inputs": ["x"]}),
        "Pipe.pipeline": (
            pipe.pipeline,
            {"example": example, "num_microbatches": 2, "profile": profile_of_two, "topology": Topology((0, 1))},
        ),
        "Pipe.compile": (
            lambda **options: alone.compile(**options).close(),
            {"example": example, "num_microbatches": 2, "schedule": scheduler.gpipe, "device": "cpu", "group": None}
            | {"profile": scheduler.StageProfile(2, profile.stages[:1]), "topology": Topology((0,))}
            | {"memory_limit_bytes": 10**9, "compression": None, "timeout_seconds": 10.0},
        ),
        "step": (
            engine.step,
            {"batch": example, "accumulate": 1, "local_batch": False, "timeline": False},
        ),
        "evaluate": (engine.evaluate, {"batch": example, "local_batch": False}),
        "local_samples": (engine.local_samples, {"num_samples": 4, "accumulate": 1}),
        "clip_grad_norm_": (engine.clip_grad_norm_, {"max_norm": 1.0, "norm_type": 2.0}),
        "measure": (engine.measure, {"batch": example}),
        "save": (
            engine.save,
            {"path": saved, "optimizer": None, "lr_scheduler": None, "loader": None, "step": 1, "keep": 2},
        ),
        "load": (
            engine.load,
            {"path": saved, "optimizer": None, "lr_scheduler": None, "loader": None, "step": None}
            | {"missing_ok": False, "trust_pickle": False},
        ),
    }


def _profile_layers(**arguments):
    """Without the process that measures gathers, which takes seconds to start."""
    with mock.patch.object(profiling, "measure_gathers", lambda layers, *_: [GatherTimes()] * len(layers)):
        return autoparallel.profile_layers(**arguments)


def _of_searches():
    graph, cluster, profile, training_plan = _searched()
    folder = tempfile.mkdtemp()
    profile.save(f"{folder}/read.json")
    training_plan.save(f"{folder}/plan_read.json")
    problem = SearchProblem(graph, cluster, profile, 8)
    choice, rules = autoparallel.Choice(tp=2), autoparallel.ChoiceRules()
    key = graph.layers[0].key
    stages = problem.pipeline(training_plan.stages, training_plan.num_microbatches)
    measured = Measurement((1.0,), (scheduler.simulate_schedule(training_plan.schedule, stages),))
    traced = autoparallel.trace_module(_Chain(), {"x": torch.ones(4, 4)}, ["layers.1", "layers.2"])
    return {
        "search": (
            autoparallel.search,
            {"graph": graph, "cluster": cluster, "profile": profile, "num_samples": 8, "method": "pure"}
            | {"keep": {"tp": 1, "zero": 0}, "states": autoparallel.StateBytes(), "rules": rules, "compression": None},
        ),
        "StateBytes": (autoparallel.StateBytes, {"weight": 4.0, "gradient": 4.0, "optimizer": 8.0}),
        "Choice": (autoparallel.Choice, {"tp": 2, "zero": 0, "recompute": False, "grid": ()}),
        "Choice.on_grid": (
            autoparallel.Choice.on_grid,
            {"rows": 2, "cols": 2, "depth": 1, "zero": 0, "recompute": False},
        ),
        "Choice.sample_shards": (choice.sample_shards, {"num_ranks": 4}),
        "Choice.fits": (choice.fits, {"num_ranks": 4}),
        "Choice.describe": (choice.describe, {"num_ranks": 4}),
        "ChoiceRules": (autoparallel.ChoiceRules, _fields(rules)),
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
        "Layer": (autoparallel.Layer, _fields(graph.layers[1])),
        "Tensor": (autoparallel.Tensor, _fields(graph.tensors[0])),
        "LayerGraph": (autoparallel.LayerGraph, _fields(graph)),
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
        "LayerProfile": (autoparallel.LayerProfile, _fields(profile)),
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
        "TrainingPlan": (autoparallel.TrainingPlan, _fields(training_plan)),
        "TrainingPlan.save": (training_plan.save, {"path": f"{folder}/plan.json"}),
        "TrainingPlan.read": (autoparallel.TrainingPlan.read, {"path": f"{folder}/plan_read.json"}),
        "trace_module": (
            autoparallel.trace_module,
            {"model": _Chain(), "example": {"x": torch.ones(4, 4)}, "cuts": ["layers.1"], "tp_plan": None}
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


def _of_groups():
    whole = Layout(Mesh.of(1), "R R")
    plan = reshard.make_plan(whole, whole, (4, 3), "float32")
    moved = {"tensor": torch.ones(4, 3), "src_mesh": whole.mesh, "dst_mesh": whole.mesh, "src_spec": "R R"}
    moved |= {"dst_spec": "R R", "shape": (4, 3), "dtype": "float32", "dst_dtype": "float32", "group": None}
    moved |= {"out": torch.zeros(4, 3), "base": None, "strategy": None, "topology": None, "compression": None}
    moved |= {"max_error": None, "staging_bytes": 2**20, "timeout_seconds": 10.0, "verify": True, "on_loss": "raise"}
    moved |= {"on_error": "raw"}
    opened = {"plan": plan, "group": None, "timeout_seconds": 10.0, "device": "cpu", "verify": False}
    opened |= {"both_ways": False, "fault_tolerant": False, "communicator": 0, "compression": None}
    mover = reshard.Mover(plan)
    return {
        "reshard": (reshard.reshard, moved),
        "reshard_async": (lambda **options: reshard.reshard_async(**options).wait(), moved),
        "Handle.wait": (
            lambda timeout_seconds: reshard.reshard_async(
                torch.ones(4, 3), whole, whole, shape=(4, 3), dtype="float32"
            ).wait(timeout_seconds),
            {"timeout_seconds": 10.0},
        ),
        "Mover": (lambda **options: reshard.Mover(**options).close(), opened),
        "Mover call": (
            mover,
            {"tensor": torch.ones(4, 3), "out": torch.zeros(4, 3), "base": None, "timeout_seconds": 10.0},
        ),
        "find_topology": (reshard.find_topology, {"group": None, "timeout_seconds": 10.0, "codecs": ["int8x128"]}),
        "close_group": (reshard.close_group, {"group": None}),
        "join": (
            lambda store, rank, world_size: reshard.join(store, rank, world_size).close(),
            {"store": dist.HashStore(), "rank": 0, "world_size": 1},
        ),
    }


#: Functions that return ``{name: (function, valid arguments)}``.
FAMILIES = (
    *(_of_sharding, _of_topologies, _of_plans, _of_compression, _of_weights, _of_parallel, _of_schedules),
    *(_of_searches, _of_groups),
)


def find_doors():
    """``{name: (function, valid arguments)}`` of all families. Needs a default process group."""
    return {name: door for family in FAMILIES for name, door in family().items()}


def spots(value, path=(), depth=3):
    """The paths of the items inside an argument, at most ``depth`` deep; the argument itself is ``()``."""
    yield path
    if depth and isinstance(value, (list, tuple)):
        for number, item in enumerate(value[:8]):
            yield from spots(item, (*path, number), depth - 1)
    elif depth and isinstance(value, Mapping):
        for key in list(value)[:8]:
            yield from spots(value[key], (*path, key), depth - 1)


def put(value, path, new):
    """A copy of the argument with another item at a path. Containers are copied, their other items are not."""
    if not path:
        return new
    if isinstance(value, Mapping):
        return {key: put(item, path[1:], new) if key == path[0] else item for key, item in value.items()}
    items = [put(item, path[1:], new) if number == path[0] else item for number, item in enumerate(value)]
    return tuple(items) if isinstance(value, tuple) else items


def try_call(doors, seed):
    """Make one call. Returns the call as text, and its end: ``"returned"``, or class and text of the error."""
    chance = random.Random(seed)
    name = chance.choice(sorted(doors))
    function, arguments = doors[name]
    key = chance.choice(sorted(arguments))
    path = chance.choice([*spots(arguments[key])]) if chance.random() < 0.5 else ()
    new = chance.choice([value for value in VALUES if key not in CALLBACKS or not callable(value)])
    where = f"{key}{''.join(f'[{part!r}]' for part in path)}"
    begun = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(**{**arguments, key: put(arguments[key], path, new)})
            if not isinstance(result, AS_GIVEN):
                str(result)
        end = "returned"
    except reshard.ReshardError as error:
        end = f"{type(error).__name__}: {error}"
    except Timeout:
        end = f"raw: did not end within {LIMIT_SECONDS:g} s"
    except Exception as error:
        end = f"raw {type(error).__name__}: {brief(error, 200)} in {_place_of(error)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return f"{name}: {where}={brief(new)}, seed {seed}, {time.monotonic() - begun:.1f} s", end


def run_campaign(num_runs, seed=0, doors=None):
    """Run trials. Returns how they ended, and ``[(call, raw error)]``."""
    signal.signal(signal.SIGALRM, _stop)
    doors = find_doors() if doors is None else doors
    ends, wrong = Counter(), []
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # a text may be taken for the name of a file to write
        for number in range(seed, seed + num_runs):
            call, end = try_call(doors, number)
            ends[end.partition(":")[0]] += 1
            if end.startswith("raw"):
                wrong.append((call, end))
    return ends, wrong


def _place_of(error):
    """File and line of this package that an error passed last."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/reshard/" in frame.filename or "/scheduler/" in frame.filename] or frames
    return f"{ours[-1].filename}:{ours[-1].lineno}"


def _stop(*_):
    raise Timeout


def main():
    """Print what is wrong. Returns 0 if nothing is."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.nonsense_calls", description=__doc__)
    parser.add_argument("--runs", type=int, default=20000, help="number of trials (20000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first trial (0)")
    parser.add_argument("--only", default="", help="calls whose name has this text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    doors = {name: door for name, door in find_doors().items() if options.only in name}
    ends, wrong = run_campaign(options.runs, options.seed, doors)
    print(f"{options.runs} calls, {len(wrong)} wrong; {dict(ends)}")
    for call, end in wrong:
        print(f"  {call}: {end[:300]}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
