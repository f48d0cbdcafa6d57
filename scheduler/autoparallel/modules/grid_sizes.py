"""Sizes of a layer of a torch model that a grid of :mod:`reshard.parallel` would divide, found by running the layer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from reshard.parallel.choice.grid_layer_cost import LayerSizes
from reshard.parallel.conversion import find_refusal

from ...model_stages.partition.blocks import BlockStage
from ...model_stages.partition.stage_graph import Value


class SizeRecorder(TorchFunctionMode):
    """Records matrix products, norms, embeddings and attention of a forward of ``num_samples`` samples."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.num_samples = num_samples
        self.num_norms = self.num_entries = self.num_heads = self.head_size = 0
        self.sequence = 1
        self._products: dict[int, tuple[Any, int, int]] = {}  # by id of the input; products of one input are merged
        self._hooks: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; note the heads of attention."""
        if func is nn.functional.scaled_dot_product_attention:
            query = args[0] if args else (kwargs or {})["query"]
            _, self.num_heads, _, self.head_size = query.shape
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def on(self, module: nn.Module) -> Iterator[SizeRecorder]:
        """Within it, forwards of a module are recorded."""
        hooks = [submodule.register_forward_pre_hook(self._note) for submodule in module.modules()]
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, module: Any, args: Any) -> None:
        name = type(module).__name__
        if name.endswith("Norm"):
            self.num_norms += 1
        elif isinstance(module, nn.Embedding) and args[0].dim() > 1 and len(args[0]) == self.num_samples:
            # an embedding of tokens; positions have no dim of samples
            self.num_entries += module.num_embeddings
            self.sequence = math.prod(args[0].shape[1:])
        elif isinstance(module, nn.Linear) or name == "Conv1D":
            size = module.out_features if isinstance(module, nn.Linear) else module.nf
            x, in_features, others = self._products.get(id(args[0]), (args[0], args[0].shape[-1], 0))
            self._products[id(x)] = (x, in_features, others + size)
            self.sequence = x.numel() // in_features // self.num_samples

    def sizes(self, hidden: int) -> LayerSizes:
        """The recorded sizes of a layer whose output has ``hidden`` features."""
        products = tuple((k, n) for _, k, n in self._products.values())
        return LayerSizes(
            hidden, max(1, self.sequence), products, self.num_heads, self.head_size, self.num_norms, self.num_entries
        )


def find_grid_refusal(module: Any, values: Sequence[Value]) -> str | None:
    """The reason why a layer cannot be on a grid; None if it can.

    Args:
        module: module of the layer.
        values: the tensors that it reads from other layers and writes.
    """
    for value in values:
        if value.has_gradient and (value.sample_dim != 0 or len(value.shape) < 2):
            return f"{value.name!r} of shape {list(value.shape)} does not have the samples first and features last"
    return find_refusal(module.view if isinstance(module, BlockStage) else module)
