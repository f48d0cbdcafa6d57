from .ddp_communication import ddp_hook as ddp_hook
from .fsdp_collectives import (
    CompressedAllGather as CompressedAllGather,
    CompressedReduceScatter as CompressedReduceScatter,
)
from .gradient_sum import GradientSum as GradientSum
from .policy import Policy as Policy, parse_policy as parse_policy
