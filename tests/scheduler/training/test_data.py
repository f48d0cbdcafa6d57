"""Batches: their order follows from seed and step, and every token is read once in an epoch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reshard.errors import ArgumentError
from reshard.scheduler.training.data import PictureLoader, TokenLoader, hold_out, read_tokens


def test_an_epoch_reads_every_window_once():
    tokens = np.arange(10 * 7 + 1)
    loader = TokenLoader(tokens, 5, 7, 100)
    for epoch in range(2):
        batches = [loader.batch(2 * epoch + step) for step in range(2)]
        seen = torch.cat([batch["tokens"].flatten() for batch in batches])
        assert sorted(seen.tolist()) == list(range(70))
        for batch in batches:
            assert torch.equal(batch["targets"], batch["tokens"] + 1)
    assert not torch.equal(loader.batch(0)["tokens"], loader.batch(2)["tokens"])


@pytest.mark.parametrize("kind", ["tokens", "pictures"])
def test_order_is_a_function_of_seed_and_step(kind):
    def make(seed):
        return TokenLoader(read_tokens(None), 3, 16, 256, seed) if kind == "tokens" else PictureLoader(3, 8, seed)

    def same(one, other):
        return all(torch.equal(one[name], other[name]) for name in one)

    loader = make(1)
    batches = [batch for _, batch in zip(range(4), loader, strict=False)]
    assert loader.state_dict() == {"step": 4, "seed": 1, "num_samples": 3, "recipe": {}}
    assert same(make(1).batch(3), batches[3])
    assert not same(make(2).batch(3), batches[3])
    resumed = make(1)
    resumed.load_state_dict({"step": 2, "seed": 1, "num_samples": 3})
    assert same(next(iter(resumed)), batches[2])
    with pytest.raises(ArgumentError, match="read with seed 1, but is now read with seed 2; pass --seed 1"):
        make(2).load_state_dict(loader.state_dict())


def test_files_of_text_and_of_tokens_are_read_and_other_shapes_refused(tmp_path):
    (tmp_path / "text.txt").write_text("hé")
    np.array([1, 65535], dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "tokens.npy", np.array([3, 70000], dtype=np.int32))
    assert read_tokens(tmp_path / "text.txt").tolist() == [104, 195, 169]
    assert read_tokens(tmp_path / "tokens.bin").tolist() == [1, 65535]
    assert read_tokens(tmp_path / "tokens.npy").tolist() == [3, 70000]
    np.save(tmp_path / "square.npy", np.zeros((2, 2)))
    with pytest.raises(ArgumentError, match=r"square.npy has shape \[2, 2\] and dtype float64"):
        read_tokens(tmp_path / "square.npy")
    (tmp_path / "broken.npy").write_text("1 2 3\n")
    with pytest.raises(ArgumentError, match=r"a \.npy file must be what numpy\.save writes") as caught:
        read_tokens(tmp_path / "broken.npy")
    assert "pickle" not in str(caught.value)
    with pytest.raises(ArgumentError, match=r"absent\.txt cannot be read"):
        read_tokens(tmp_path / "absent.txt")


def test_the_end_is_held_out():
    seen, unseen = hold_out(np.arange(1000), 10)
    assert (len(seen), unseen[0], unseen[-1]) == (950, 950, 999)
    seen, unseen = hold_out(np.arange(100), 20)
    assert len(unseen) == 21
    with pytest.raises(ArgumentError, match="has 41 tokens; a sequence of 20 needs 42"):
        hold_out(np.arange(41), 20)


def test_a_token_beyond_the_vocabulary_is_an_error():
    loader = TokenLoader(np.arange(21), 2, 10, 16)
    with pytest.raises(ArgumentError, match="has the token 20, but the model has a vocabulary of 16"):
        loader.batch(0)
