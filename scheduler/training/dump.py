"""Save tensors of some training steps, for ``reshard profile-compression``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from reshard.compression.policy import DIMENSIONS
from reshard.runtime.torch_compat import local_of

from ..gradients.compression_policy import describe_modules
from ..model_stages.training_engine import PipelineEngine
from ..runtime.stage import StageOutput

#: Shares of all steps after which a step is saved: early gradients differ from late ones.
SHARES = (0.1, 0.5, 1.0)


class TensorDump:
    """Saves gradients, activations between stages and their gradients, weights, and the state of the optimizer.

    Args:
        folder: each rank writes ``step-XXXXXXXX/rank-N.pt`` in it.
        rank: this rank.
        engine: the engine that trains.
        optimizer: its optimizer.
    """

    def __init__(self, folder: str, rank: int, engine: PipelineEngine, optimizer: torch.optim.Optimizer) -> None:
        self._folder, self._rank, self._engine, self._optimizer = Path(folder), rank, engine, optimizer
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}

    @contextmanager
    def catch_activations(self) -> Iterator[None]:
        """Keep what the stages of this rank return inside, and the gradients of it."""
        self._tensors = {}
        handles = [
            module.register_forward_hook(lambda _, args, output, stage=stage: self._keep(stage, output))
            for stage, module in self._engine.modules.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, stage: int, output: Any) -> None:
        tensors = output.tensors if isinstance(output, StageOutput) else output
        for name, tensor in tensors.items() if isinstance(tensors, dict) else ():
            key = f"{stage}.{name}.{len(self._tensors.get('activations', {}))}"
            self._add("activations", key, tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient, key=key: self._add("activation_gradients", key, gradient))

    def _add(self, kind: str, name: str, tensor: Any) -> None:
        self._tensors.setdefault(kind, {})[name] = local_of(tensor.detach()).clone()

    def keep_gradients(self) -> None:
        """Keep gradients and weights, before the optimizer's step."""
        for name, parameter in self._engine.named_parameters():
            self._add("weights_before", name, parameter)
            if parameter.grad is not None:
                self._add("gradients", name, parameter.grad)

    def save(self, step: int) -> None:
        """Keep weights and optimizer state, and write all to a file."""
        for name, parameter in self._engine.named_parameters():
            self._add("weights", name, parameter)
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    self._add("optimizer", f"{name}.{key}", value)
        folder = self._folder / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"dimensions": self._dimensions(), **self._tensors}, folder / f"rank-{self._rank}.pt")
        self._tensors = {}

    def _dimensions(self) -> list[str]:
        """The dimensions of a policy that the stages of this rank have."""
        described = describe_modules(self._engine.modules, self._engine.schedule, self._engine.tied_stages)
        return [name for name in DIMENSIONS if described.get(name)]


def dumped_steps(steps: int) -> set[int]:
    """The steps that are saved, of a run of this many, counted from 0."""
    return {max(1, round(share * steps)) - 1 for share in SHARES}
