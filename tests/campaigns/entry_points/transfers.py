"""Calls with meshes, layouts, topologies, plans and groups."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh, RegionLayout, TensorSpec, Topology, planner
from tests.campaigns.entry_points.samples import fields_of, plans


def of_sharding():
    rows, _, plan = plans()
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
        "TensorSpec": (TensorSpec, fields_of(spec)),
    }


def of_topologies():
    hosts = Topology((0, 0, 1, 1))
    data = {"hosts": [{"devices": 2, "nics": ["25 Gbit/s"], "pod": 0}, {"devices": 2, "pod": 1}], "pods": [1e9, 2e9]}
    rate = reshard.CodecRate("int8x128", 1e9, 2e9)
    path = Path(tempfile.mkdtemp()) / "topology.json"
    path.write_text(json.dumps(data))
    return {
        "Topology": (Topology, fields_of(hosts) | {"codec_rates": (rate,)}),
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
        "CodecRate": (reshard.CodecRate, fields_of(rate)),
        "load_preset": (reshard.load_preset, {"name": "tcp", "num_ranks": 4}),
        "read_topology": (reshard.read_topology, {"path": path}),
        "topology_from_json": (reshard.topology_from_json, {"data": data}),
    }


def of_plans():
    rows, columns, plan = plans()
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
        "Plan": (reshard.Plan, fields_of(plan)),
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
        "PlanProblem": (planner.PlanProblem, fields_of(problem)),
        "PlanProblem.of": (planner.PlanProblem.of, {"tensors": plan.tensors, "topology": plan.topology}),
        "Routes": (planner.Routes, fields_of(routes)),
        "Routes.of": (planner.Routes.of, {"problem": problem, "rows": [(0, [(0, 2)]), (1, [(0, 3)])]}),
        "Routes.direct": (
            planner.Routes.direct,
            {"problem": problem, "task": ones, "sender": np.array([0, 0]), "receiver": np.array([2, 3])},
        ),
        "Routes.join": (planner.Routes.join, {"parts": [routes, routes]}),
        "Routes.take": (routes.take, {"order": ones}),
        "StrategyBounds": (planner.StrategyBounds, {"problem": problem}),
        "find_strategy": (planner.find_strategy, {"strategy": "multicast"}),
        "bound_of_transfers": (planner.bound_of_transfers, {"problem": problem, "transfers": plan.transfers}),
        "predict": (planner.predict, {"plan": plan, "rate": reshard.CodecRate("int8x128", 1e9, 2e9)}),
        "compress_tensors": (
            planner.compress_tensors,
            {"tensors": plan.tensors, "compression": "int8x128", "max_error": None, "topology": None}
            | {"plan": planner.plan_tensors, "wire_dtypes": None},
        ),
        "a strategy of routes": (
            lambda sender, edge_offsets, task: reshard.make_plan(
                rows,
                columns,
                (6, 4),
                "float32",
                strategy=lambda problem: planner.Routes(
                    task, routes.start, routes.stop, edge_offsets, sender, routes.receiver
                ),
            ),
            {"sender": routes.sender, "edge_offsets": routes.edge_offsets, "task": routes.task},
        ),
        "a strategy": (
            lambda routes: reshard.make_plan(rows, columns, (6, 4), "float32", strategy=lambda problem: routes),
            {"routes": routes},
        ),
    }


def of_groups():
    whole = Layout(Mesh.of(1), "R R")
    plan = reshard.make_plan(whole, whole, (4, 3), "float32")
    moved = {"tensor": torch.ones(4, 3), "src_mesh": whole.mesh, "dst_mesh": whole.mesh, "src_spec": "R R"}
    moved |= {"dst_spec": "R R", "shape": (4, 3), "dtype": "float32", "dst_dtype": "float32", "group": None}
    moved |= {"out": torch.zeros(4, 3), "base": None, "strategy": None, "topology": None, "compression": None}
    moved |= {"max_error": None, "staging_bytes": 2**20, "timeout_seconds": 10.0, "verify": True, "on_loss": "raise"}
    moved |= {"on_error": "raw"}
    opened = {"plan": plan, "group": None, "timeout_seconds": 10.0, "device": "cpu", "verify": False}
    opened |= {"both_ways": False, "fault_tolerant": False, "communicator_index": 0, "compression": None}
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
