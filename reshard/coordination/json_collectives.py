"""A collective of values that JSON can hold.

Torch's collectives of objects use pickle. With them, a message of another rank could run code.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from reshard.runtime.torch_compat import collective_device


def all_gather_json(value: Any, process_group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of a process group, in its order of ranks. All its ranks call this.

    Args:
        value: what JSON can hold. Tuples come back as lists.
        process_group: default: the world.
    """
    device, size = collective_device(process_group), dist.get_world_size(process_group)
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = torch.empty((size,), dtype=torch.int64, device=device)
    dist.all_gather(list(sizes.split(1)), torch.tensor([len(data)], device=device), group=process_group)
    longest = int(sizes.max())
    texts = torch.empty((size, longest), dtype=torch.uint8, device=device)
    padded = torch.zeros((longest,), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    dist.all_gather(list(texts), padded, group=process_group)
    return [json.loads(bytes(text[:end].tolist())) for text, end in zip(texts.cpu(), sizes.tolist(), strict=True)]
