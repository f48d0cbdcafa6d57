"""Run stages before their first transfers on a GPU.

The first use of a kernel, of cuBLAS or of more memory can block the host until all enqueued transfers are complete.
Schedules allow for that, but it would cost overlap in the first step of each shape.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import torch_compat
from ..gradients.data_parallel import is_fsdp, no_grad_sync
from ..pipeline import Pipeline
from .stage import StageRun, Tensors

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def keep_buffers(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restore the buffers of modules when the context ends."""
    buffers = [
        (held, name, buffer, buffer.detach().clone())
        for module in modules
        for submodule in module.modules()
        for held in torch_compat.held_tensors(submodule)[1:]
        for name, buffer in held.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for held, name, buffer, value in buffers:
                buffer.copy_(value)
                held[name] = buffer  # a forward may have assigned another tensor


def warm_up(run: StageRun, pipeline: Pipeline, fed: Mapping[str, Any], rank: int, train: bool) -> None:
    """Run a stage of this rank once, on zeros in place of the tensors that it receives from other stages.

    Gradients, buffers and the state of random number generators do not change. Hooks that run after a gradient is
    accumulated, such as those of DDP, do not run. Hooks of modules and of ``Tensor.register_hook`` do. An ``Exception``
    is only logged: if it matters, the step raises it again.

    Args:
        run: the stage.
        pipeline: gives the shapes of the tensors that it receives.
        fed: its other inputs.
        rank: this rank.
        train: whether to run a backward, too. FSDP would reduce gradients in a backward, so it runs none.
    """
    device = next((parameter.device for parameter in run.module.parameters()), torch.device("cpu"))
    inputs: Tensors = {}
    for edge in pipeline.edges:
        if edge.dst == run.stage:
            with_gradient = {spec.name for spec in edge.gradients} if train else set()
            for spec in edge.tensors:
                shape, dtype = spec.dst_tiles.local_shape(rank), getattr(torch, spec.dtype)
                inputs[str(spec.name)] = torch.zeros(
                    shape, dtype=dtype, device=device, requires_grad=spec.name in with_gradient
                )
    try:
        with (
            torch_compat.keep_rng(device.type), keep_buffers([run.module]), no_grad_sync(run.module),
            torch.set_grad_enabled(train),
        ):  # fmt: skip
            with run.autocast():
                output = run.module(**inputs, **fed)
            if train and not is_fsdp(run.module):
                _run_backward(output, [*inputs.values(), *run.module.parameters()])
    except Exception:
        logger.debug("rank %d could not warm up stage %d", rank, run.stage, exc_info=True)


def _run_backward(output: Any, leaves: Sequence[torch.Tensor]) -> None:
    tensors = [tree_leaf for tree_leaf in torch_compat.tree_leaves(output) if isinstance(tree_leaf, torch.Tensor)]
    roots = [item for item in tensors if item.requires_grad]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    if roots and leaves:
        torch.autograd.grad(roots, leaves, [torch.zeros_like(root) for root in roots], allow_unused=True)
