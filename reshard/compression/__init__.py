"""Compressed communication of training: sums of gradients, hooks for DDP and FSDP2, and weights as differences.

May import :mod:`reshard.api` and every package below it.
"""

from reshard.compression.ddp_communication import ddp_hook
from reshard.compression.fsdp_collectives import CodedAllGather, CodedReduceScatter
from reshard.compression.gradient_sum import GradientSum
from reshard.compression.policy import Policy, parse_policy
from reshard.compression.weight_sync import SyncReport, WeightSync

__all__ = [
    "CodedAllGather",
    "CodedReduceScatter",
    "GradientSum",
    "Policy",
    "SyncReport",
    "WeightSync",
    "ddp_hook",
    "parse_policy",
]
