"""Compressed collectives of training: sums of gradients over replicas, and hooks for DDP and FSDP2.

May import every package below :mod:`reshard.api`, and it.
"""

from reshard.compression.ddp_communication import ddp_hook
from reshard.compression.fsdp_collectives import CodedAllGather, CodedReduceScatter
from reshard.compression.gradient_sum import GradientSum

__all__ = ["CodedAllGather", "CodedReduceScatter", "GradientSum", "ddp_hook"]
