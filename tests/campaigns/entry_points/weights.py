"""Calls with codecs, policies and whole models of weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from reshard import compression, weights
from reshard.codecs import find_codec


def of_compression():
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


def of_weights():
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
