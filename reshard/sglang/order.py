"""The order of a trainer to the workers of an engine, as an argument of SGLang's ``update_weights_from_tensor``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from reshard.errors import ArgumentError

#: The path by which SGLang imports the loader.
LOADER = "reshard.sglang.load_weights"
Pairs = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class InstallOrder:
    """The order to install ``version`` of a trainer. The first worker appends its failure, or none, to ``answer``.

    ``host`` and ``port`` are the address of the trainer's store. ``trainer`` is unique among all trainers.
    """

    host: str
    port: int
    name: str
    trainer: str
    memory_bytes: int
    timeout_seconds: float
    version: int = 0
    answer: str = ""

    def named_tensors(self) -> Pairs:
        """The order as the name of an empty tensor, for which no process needs memory of another one."""
        return [(json.dumps(asdict(self)), torch.empty(0))]


def read_order(named_tensors: Pairs) -> InstallOrder:
    """The order that a worker has got. Raises ArgumentError if these tensors come from elsewhere."""
    try:
        ((text, _),) = named_tensors
        return InstallOrder(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            f"{LOADER} takes the order of a reshard.sglang.Trainer, not {len(named_tensors)} tensors such as "
            f"{[name[:40] for name, _ in named_tensors[:2]]}; leave out load_format to load tensors"
        ) from error
