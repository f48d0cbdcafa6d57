"""Error feedback: a rank adds the coding errors of one step to its gradients of the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError
from reshard.formatting import brief

Pieces = Sequence[tuple[str, torch.Tensor]]


class CodingErrors:
    """The errors of the last encoding of each gradient on a rank, by parameter name, so that new buckets keep them."""

    def __init__(self) -> None:
        self._errors: dict[str, torch.Tensor] = {}

    def size_of(self, name: str) -> int | None:
        """The number of values of the kept error of a gradient, or None if there is none."""
        return self._errors[name].numel() if name in self._errors else None

    def add_to(self, pieces: Pieces) -> None:
        """Add the kept errors to gradients, given as ``(name, flat gradient)``."""
        for name, piece in pieces:
            if name in self._errors:
                piece += self._errors[name]

    def keep(self, pieces: Pieces) -> None:
        """Keep errors. A NaN or infinite error becomes 0, because it would spoil all later gradients."""
        for name, piece in pieces:
            self._errors[name] = torch.nan_to_num(piece, nan=0.0, posinf=0.0, neginf=0.0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the errors, flat, by parameter name."""
        return {name: error.clone() for name, error in self._errors.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what :meth:`state_dict` returned on this rank.

        Raises:
            ArgumentError: anything else.
        """
        check_state(state)
        self._errors = {name: error.clone() for name, error in state.items()}


def check_state(state: Any) -> None:
    """Raise ArgumentError unless this is ``{name: coding errors}``, flat fp32 tensors of finite numbers."""
    if not isinstance(state, Mapping) or not all(isinstance(item, torch.Tensor) for item in state.values()):
        raise ArgumentError(f"a state of coding errors must be {{name: tensor}}, not {brief(state)}")
    for name, item in state.items():
        if item.dtype != torch.float32 or item.ndim != 1 or not item.isfinite().all():
            raise ArgumentError(
                f"the coding errors of {name!r} must be finite, in float32 and flat, but are "
                f"{dtype_name(item.dtype)} of shape {list(item.shape)}"
            )
