"""Batches of text and of pictures. Their order is a function of a seed and of the step."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reshard.errors import ArgumentError

#: Share of the tokens that training does not see, for evaluation.
HELD_OUT_SHARE = 0.05


class Loader:
    """Yields the batches of steps 0, 1, ... without end. Its state is the number of the next step."""

    def __init__(self, rows: int, seed: int) -> None:
        if rows < 1:
            raise ArgumentError(f"a batch of {rows} rows was asked for; it needs at least 1")
        self.rows, self.seed, self.step = rows, seed, 0

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The batch of a step."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            batch = self.batch(self.step)
            self.step += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        return {"step": self.step, "seed": self.seed, "rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position.

        Raises:
            ArgumentError: it is a position in other batches.
        """
        for name in ("seed", "rows"):
            if state[name] != getattr(self, name):
                raise ArgumentError(
                    f"the data was read with {name} {state[name]}, but is now read with {name} {getattr(self, name)}; "
                    f"pass --{'batch' if name == 'rows' else name} {state[name]}"
                )
        self.step = int(state["step"])


class TokenLoader(Loader):
    """Batches ``{"tokens": ..., "targets": ...}`` of shape ``(rows, sequence)``.

    The tokens are cut into windows. Each epoch reads every window once, in an order of its own and from an offset of
    its own.

    Args:
        tokens: one-dimensional array; it may be memory-mapped.
        rows, sequence: of a batch. vocabulary: tokens are less than this. seed: of the order.

    Raises:
        ArgumentError: there are too few tokens for one window.
    """

    def __init__(self, tokens: np.ndarray, rows: int, sequence: int, vocabulary: int, seed: int = 0) -> None:
        super().__init__(rows, seed)
        if len(tokens) <= sequence:
            raise ArgumentError(
                f"the data has {len(tokens)} tokens, but a sequence of {sequence} needs {sequence + 1}; pass more data "
                "or a shorter --sequence"
            )
        self._tokens, self._sequence, self._vocabulary = tokens, sequence, vocabulary
        self._slack = (len(tokens) - 1) % sequence
        self._num_windows = (len(tokens) - 1) // sequence
        self._epoch = -1
        self._order, self._offset = np.empty(0, dtype=np.int64), 0

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The batch of a step."""
        rows = [self._window(number) for number in range(step * self.rows, (step + 1) * self.rows)]
        windows = torch.from_numpy(np.stack(rows).astype(np.int64))
        if int(windows.max()) >= self._vocabulary or int(windows.min()) < 0:
            raise ArgumentError(
                f"the data has the token {int(windows.max())}, but the model has a vocabulary of {self._vocabulary}"
            )
        return {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}

    def _window(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self._num_windows)
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._order, self._epoch = generator.permutation(self._num_windows), epoch
            self._offset = int(generator.integers(self._slack + 1))
        start = self._offset + int(self._order[place]) * self._sequence
        return self._tokens[start : start + self._sequence + 1]


class PictureLoader(Loader):
    """Batches ``{"pictures": ..., "clean": ...}`` of shape ``(rows, 3, side, side)``.

    The pictures are discs on colour gradients, with and without noise.
    """

    def __init__(self, rows: int, side: int, seed: int = 0) -> None:
        super().__init__(rows, seed)
        self._side = side

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The batch of a step."""
        seed = int(np.random.SeedSequence([self.seed, step]).generate_state(1, np.uint64)[0] >> 1)
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> torch.Tensor:
            return torch.rand(self.rows, *shape, 1, 1, generator=generator)

        line = torch.linspace(0, 1, self._side)
        ys, xs = torch.meshgrid(line, line, indexing="ij")
        disc = ((xs - uniform(1)) ** 2 + (ys - uniform(1)) ** 2 < (0.1 + 0.3 * uniform(1)) ** 2).float()
        clean = disc * uniform(3) + (1 - disc) * (uniform(3) * xs + uniform(3) * ys) / 2
        return {"pictures": clean + 0.3 * torch.randn(clean.shape, generator=generator), "clean": clean}


def read_tokens(path: str | Path | None) -> np.ndarray:
    """The tokens of a file, which stays on disk. Default: the language reference that Python ships, as bytes.

    A ``.bin`` file has uint16 tokens, and a ``.npy`` file a one-dimensional integer array. Any other file is read as
    bytes.

    Raises:
        ArgumentError: the file cannot be read, or an ``.npy`` file has another kind of array.
    """
    if path is None:
        text = "\n".join(pydoc_data.topics.topics.values())
        return np.frombuffer(text.encode(), dtype=np.uint8)
    path = Path(path)
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r")
        else:
            tokens = np.memmap(path, dtype=np.uint16 if path.suffix == ".bin" else np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"the data {path} cannot be read: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ArgumentError(
            f"the data {path} has shape {list(tokens.shape)} and dtype {tokens.dtype}; tokens must be a "
            "one-dimensional array of integers"
        )
    return tokens


def hold_out(tokens: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens for training and those for evaluation: the last 5 %, but at least one sequence."""
    kept = len(tokens) - max(sequence + 1, round(len(tokens) * HELD_OUT_SHARE))
    if kept <= sequence:
        raise ArgumentError(
            f"the data has {len(tokens)} tokens; a sequence of {sequence} needs {2 * sequence + 2}, half of "
            "them to be held out; pass more data or a shorter --sequence"
        )
    return tokens[:kept], tokens[kept:]
