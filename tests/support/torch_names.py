"""Names in ``torch.distributed`` that depend on the version."""

from __future__ import annotations

import torch.distributed as dist

#: Up to torch 2.11, the second names.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
