"""Measure the peak memory of the tensors that a rank keeps in training, and predict it from a training plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from reshard.runtime.torch_compat import is_in_backward

from .. import torch_compat
from ..autoparallel import TrainingPlan
from .loop import TrainingJob, make_loaders, make_optimizer, make_pipe


class StorageCounter(torch_compat.TorchDispatchMode):
    """Records the storage of each tensor that an operation returns while this mode is active.

    :meth:`sample` adds up the storages that are alive. Call this between operations. Then temporary tensors of
    operations do not count.

    Args:
        ignored: pytree of tensors that are not counted.

    Attributes:
        peak_bytes: the largest sum of all samples, in bytes.
    """

    def __init__(self, ignored: Any = ()) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._ignored = {
            torch_compat.storage_key(tree_leaf.untyped_storage()) for tree_leaf in torch_compat.tree_leaves(ignored)
        }
        self._storages: dict[int, torch_compat.StorageRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record the storages of its results."""
        results, is_gather = func(*args, **(kwargs or {})), "split_with_sizes_copy" in str(func)
        for tree_leaf in torch_compat.tree_leaves(results):
            if isinstance(tree_leaf, torch.Tensor) and tree_leaf.layout is torch.strided:
                plain = torch_compat.inner_tensor(tree_leaf)
                if torch_compat.is_fake(plain):
                    continue
                storage = plain.untyped_storage()
                key = torch_compat.storage_key(storage)
                if key not in self._storages and key not in self._ignored:
                    self._storages[key] = torch_compat.StorageRef(storage)
        if is_gather:
            self.sample()  # FSDP has just gathered the parameters of a layer
        return results

    def sample_in_backward(self, *_: Any) -> None:
        """Take a sample if a backward is running."""
        if is_in_backward():
            self.sample()

    def sample(self, *_: Any) -> None:
        """Add up the bytes of all live storages, and update ``peak_bytes``."""
        total = 0
        for key, storage in list(self._storages.items()):
            nbytes = storage.nbytes()
            if nbytes is None:
                del self._storages[key]
            else:
                total += nbytes
        self.peak_bytes = max(self.peak_bytes, total)


def count_peak_bytes(rank: int, job: TrainingJob, steps: int = 2) -> int:
    """Train a few steps, and return the peak bytes of the tensors that this rank keeps in the last step.

    The batch is not counted. Samples are taken after each forward of a stage, after each gather of parameters by FSDP,
    when a product on a grid has its first panels, and before each module that a backward recomputes.

    Args:
        rank: not used; ``run_processes`` passes it.
        job: a training run with a training plan.
        steps: number of steps.
    """
    assert isinstance(job.training_plan, TrainingPlan)
    batch = make_loaders(job)[0].batch(0)
    counter = StorageCounter(batch)
    with counter, _sampled_products(counter), make_pipe(job).compile(batch) as engine:
        optimizer = make_optimizer(engine.param_groups(), job.preset.learning_rate)
        for module in engine.modules.values():
            module.register_forward_hook(counter.sample)
            for inner in module.modules():
                inner.register_forward_pre_hook(counter.sample_in_backward)
        for step in range(steps):
            if step + 1 == steps:
                counter.peak_bytes = 0  # the optimizer allocates its state in its first step
            engine.step(batch)
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return counter.peak_bytes


@contextlib.contextmanager
def _sampled_products(counter: StorageCounter) -> Iterator[None]:
    """Sample the bytes of live tensors whenever a matrix product on a grid begins."""
    from reshard.parallel.products.multiply import Product

    plain = Product.multiply

    def multiply(product: Product, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        counter.sample()
        return plain(product, a, b)

    with mock.patch.object(Product, "multiply", multiply):
        yield


def predicted_bytes(training_plan: TrainingPlan) -> list[float]:
    """For each rank, the peak memory in bytes that the search predicts."""
    return [
        report.memory_bytes
        for number, (stage, report) in enumerate(zip(training_plan.stages, training_plan.reports, strict=True))
        if training_plan.pp_ranks[number] not in training_plan.pp_ranks[:number]
        for _ in range(stage.num_ranks)
    ]
