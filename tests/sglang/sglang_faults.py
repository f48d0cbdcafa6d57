"""Loaders by which SGLang's workers plant faults on themselves, for tests. SGLang calls them as it calls any loader."""

from __future__ import annotations

from sglang.srt.distributed.parallel_state import get_world_group


def fail_to_load(model, named_tensors):
    """On the last worker, the model's loader fails halfway, once."""
    load, group = model.load_weights, get_world_group()

    def fail(pairs):
        del model.load_weights
        pairs = list(pairs)
        load(pairs[: len(pairs) // 2])
        raise ValueError("planted")

    if group.rank_in_group == group.world_size - 1:
        model.load_weights = fail


def flip_a_bit(model, named_tensors):
    """On the last worker, a bit of what arrives is changed, in each of the three tries of one version."""
    import torch

    from reshard.weights.model.verify import Checker

    digest, group = Checker.digest_target, get_world_group()
    tries = []

    def corrupt(self, arrays, rank):
        tries.append(rank)
        if len(tries) == 3:
            Checker.digest_target = digest
        if group.rank_in_group == group.world_size - 1:
            arrays["model.norm.weight"].view(torch.int32)[3] ^= 1
        return digest(self, arrays, rank)

    Checker.digest_target = corrupt
