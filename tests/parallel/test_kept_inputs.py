"""Layers that keep what their forward gathers: the same gradients, with fewer bytes."""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from reshard.gradients.weight_grad_store import WeightGradStore
from reshard.parallel import Grid, parallelize
from reshard.parallel.grid.grid_axis import Axis
from reshard.testing import run_processes

from .models import make_batch, make_gpt


def count_moved(run):
    """Run a function; returns the elements that this rank passes to gathers and sums along columns."""
    counts = []

    def counting(start):
        def counted(self, array, sizes):
            counts.append(array.numel() if self.name == "col" else 0)
            return start(self, array, sizes)

        return counted

    with pytest.MonkeyPatch.context() as patched:
        for name in ("all_gather", "reduce_scatter"):
            patched.setattr(Axis, name, counting(getattr(Axis, name)))
        run()
    return sum(counts)


def check_kept_inputs(rank, grid_shape):
    """Gradients, and what moves: as usual, with kept inputs, with recomputation, and with deferred weight gradients."""
    torch.set_num_threads(1)
    batch, kept_inputs = make_batch(4), {}
    for keep_inputs, has_checkpoints, is_split in itertools.product((False, True), repeat=3):
        model = parallelize(make_gpt(), Grid.make(*grid_shape), keep_inputs=keep_inputs)
        if has_checkpoints:
            for block in model.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

        def step(model=model, is_split=is_split):
            store = WeightGradStore([])
            with store if is_split else contextlib.nullcontext():
                loss = model(*batch)
            loss.backward()
            store.finish()

        moved = count_moved(step)
        kept_inputs[keep_inputs, has_checkpoints, is_split] = (
            moved,
            [parameter.grad.to_local() for parameter in model.parameters()],
        )
    return kept_inputs


@pytest.mark.nightly
def test_kept_inputs_are_not_gathered_again():
    for found in run_processes(check_kept_inputs, 4, (1, 4, 1)):
        moved, expected = found[False, False, False]
        for _, gradients in found.values():
            assert all(map(torch.equal, gradients, expected))
        for has_checkpoints, is_split in itertools.product((False, True), repeat=2):
            kept, _ = found[True, has_checkpoints, is_split]
            assert kept < found[False, has_checkpoints, is_split][0]
        assert found[False, False, True][0] > moved  # apart, the products of a backward share nothing
