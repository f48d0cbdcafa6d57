"""Batches of text and of pictures. Each batch depends only on a seed and on the step."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reshard.errors import ArgumentError

#: Share of the tokens that is held out for evaluation.
HELD_OUT_SHARE = 0.05


class BatchLoader:
    """Yields the batches of steps 0, 1, ... without end. The state dict holds the next step.

    Args:
        num_samples: number of samples of a batch.
        seed: seed of the random numbers.

    Attributes:
        recipe: further values of the run, by option, which the state dict also holds.
        changes: values of the recipe that differ from the loaded state: the option, the loaded value and the new one.

    Raises:
        ArgumentError: ``num_samples`` is less than 1.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ArgumentError(f"a batch of {num_samples} samples was asked for; it needs at least 1")
        self.num_samples, self.seed, self.step = num_samples, seed, 0
        self.recipe: dict[str, Any] = {}
        self.changes: list[tuple[str, Any, Any]] = []

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The batch of a step."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            batch = self.batch(self.step)
            self.step += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The next step, the seed, the number of samples and the recipe."""
        return {"step": self.step, "seed": self.seed, "num_samples": self.num_samples, "recipe": dict(self.recipe)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the step that :meth:`state_dict` saved.

        Raises:
            ArgumentError: the state was saved with another seed or number of samples.
        """
        for name in ("seed", "num_samples"):
            if state[name] != getattr(self, name):
                raise ArgumentError(
                    f"the data was read with {name} {state[name]}, but is now read with {name} {getattr(self, name)}; "
                    f"pass --{'batch' if name == 'num_samples' else name} {state[name]}"
                )
        self.step = int(state["step"])
        saved = state.get("recipe", {})  # earlier versions saved none
        self.changes = [
            (name, saved[name], value) for name, value in self.recipe.items() if name in saved and saved[name] != value
        ]


class TokenLoader(BatchLoader):
    """Batches ``{"tokens": ..., "targets": ...}``, int64 of shape ``(num_samples, sequence)``.

    A window of ``sequence + 1`` tokens starts every ``sequence`` tokens. Each epoch shifts the windows by a random
    offset, and reads each window once, in random order.

    Args:
        tokens: one-dimensional array of integers; may be memory-mapped.
        num_samples, sequence: shape of a batch.
        vocabulary: tokens are from 0 to ``vocabulary - 1``.
        seed: seed of the order.

    Raises:
        ArgumentError: there are too few tokens for one window; from ``batch``: a token is not in the vocabulary.
    """

    def __init__(self, tokens: np.ndarray, num_samples: int, sequence: int, vocabulary: int, seed: int = 0) -> None:
        super().__init__(num_samples, seed)
        if len(tokens) <= sequence:
            raise ArgumentError(
                f"the data has {len(tokens)} tokens, but a sequence of {sequence} needs {sequence + 1}; pass more data "
                "or a shorter --sequence"
            )
        self._tokens, self._sequence, self._vocabulary = tokens, sequence, vocabulary
        self._max_offset = (len(tokens) - 1) % sequence
        self._num_windows = (len(tokens) - 1) // sequence
        self._epoch = -1
        self._order, self._offset = np.empty(0, dtype=np.int64), 0

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The batch of a step."""
        num_samples = [self._window(number) for number in range(step * self.num_samples, (step + 1) * self.num_samples)]
        windows = torch.from_numpy(np.stack(num_samples).astype(np.int64))
        smallest, largest = int(windows.min()), int(windows.max())
        if smallest < 0 or largest >= self._vocabulary:
            raise ArgumentError(
                f"the data has the token {smallest if smallest < 0 else largest}, but the model has a vocabulary of "
                f"{self._vocabulary}"
            )
        return {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}

    def _window(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self._num_windows)
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._order, self._epoch = generator.permutation(self._num_windows), epoch
            self._offset = int(generator.integers(self._max_offset + 1))
        start = self._offset + int(self._order[place]) * self._sequence
        return self._tokens[start : start + self._sequence + 1]


class PictureLoader(BatchLoader):
    """Batches ``{"pictures": ..., "clean": ...}``, float32 of shape ``(num_samples, 3, side, side)``.

    ``clean`` shows discs on colour gradients. ``pictures`` is ``clean`` with noise.
    """

    def __init__(self, num_samples: int, side: int, seed: int = 0) -> None:
        super().__init__(num_samples, seed)
        self._side = side

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The batch of a step."""
        seed = int(np.random.SeedSequence([self.seed, step]).generate_state(1, np.uint64)[0]) >> 1
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> torch.Tensor:
            return torch.rand(self.num_samples, *shape, 1, 1, generator=generator)

        line = torch.linspace(0, 1, self._side)
        ys, xs = torch.meshgrid(line, line, indexing="ij")
        disc = ((xs - uniform(1)) ** 2 + (ys - uniform(1)) ** 2 < (0.1 + 0.3 * uniform(1)) ** 2).float()
        clean = disc * uniform(3) + (1 - disc) * (uniform(3) * xs + uniform(3) * ys) / 2
        return {"pictures": clean + 0.3 * torch.randn(clean.shape, generator=generator), "clean": clean}


def read_tokens(path: str | Path | None) -> np.ndarray:
    """Memory-map the tokens of a file. Default: the bytes of the language reference that Python ships.

    A ``.bin`` file has uint16 tokens, and a ``.npy`` file a one-dimensional array of integers. Any other file is read
    as bytes.

    Returns:
        A one-dimensional array of integers.

    Raises:
        ArgumentError: the file cannot be read, or a ``.npy`` file has an array of another kind.
    """
    if path is None:
        text = "\n".join(pydoc_data.topics.topics.values())
        return np.frombuffer(text.encode(), dtype=np.uint8)
    path = Path(path)
    try:
        if path.suffix == ".npy":
            tokens = np.lib.format.open_memmap(path, mode="r")  # np.load advises to unpickle what it cannot read
        else:
            tokens = np.memmap(path, dtype=np.uint16 if path.suffix == ".bin" else np.uint8, mode="r")
    except (OSError, ValueError) as error:
        what = "; a .npy file must be what numpy.save writes" if path.suffix == ".npy" and path.is_file() else ""
        raise ArgumentError(f"the data {path} cannot be read: {error}{what}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ArgumentError(
            f"the data {path} has shape {list(tokens.shape)} and dtype {tokens.dtype}; tokens must be a "
            "one-dimensional array of integers"
        )
    return tokens


def hold_out(tokens: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Split tokens into those for training and those for evaluation.

    Evaluation gets the last 5 % (``HELD_OUT_SHARE``), but at least ``sequence + 1`` tokens.

    Raises:
        ArgumentError: fewer than ``sequence + 1`` tokens remain for training.
    """
    kept = len(tokens) - max(sequence + 1, round(len(tokens) * HELD_OUT_SHARE))
    if kept <= sequence:
        raise ArgumentError(
            f"the data has {len(tokens)} tokens; a sequence of {sequence} needs {2 * sequence + 2}, half of "
            "them to be held out; pass more data or a shorter --sequence"
        )
    return tokens[:kept], tokens[kept:]
