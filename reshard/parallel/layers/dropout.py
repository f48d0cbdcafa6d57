"""Dropout whose masks are the same on every grid."""

from __future__ import annotations

import torch
from torch import nn

from reshard.arguments import check_arguments
from reshard.errors import ArgumentError
from reshard.public_api import not_compiled

from ..grid import Grid
from ..grid.cuts import Span, chunk_spans, size_of

# Multipliers of a 64-bit integer hash (splitmix64; Steele et al., 2014) as signed integers.
_GAMMA = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


class Dropout(nn.Module):
    """``nn.Dropout`` of features that are cut over the columns of a grid.

    Each element of the mask is a hash of a key and of the element's index in the whole tensor. The key is one draw from
    torch's CPU generator. If all ranks have the same seed, the mask is therefore the same on every grid, and again the
    same when activations are recomputed.

    Args:
        p: probability that an element is dropped.
        grid: the grid.
        features: global size of the last dim.

    Raises:
        ArgumentError: ``p`` is not from 0 to 1, or an argument has a wrong type; in a forward: the last dim has another
            size than the features of this column.
    """

    @check_arguments(p=(0, 1), features=(1, 2**40))
    def __init__(self, p: float, grid: Grid, features: int) -> None:
        super().__init__()
        self.p, self.grid, self.features = p, grid, features

    @property
    def draws_masks(self) -> bool:
        """Whether all ranks of the grid must have the same state of torch's CPU generator in a forward."""
        return self.training and self.p > 0

    @not_compiled
    @check_arguments()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements of ``[batch, ..., features_j]``."""
        if not self.training or not self.p:
            return x
        span = chunk_spans(self.features, self.grid.cols)[self.grid.col]
        if not x.dim() or x.shape[-1] != size_of(span):
            raise ArgumentError(
                f"a Dropout of {self.features} features got shape {list(x.shape)} on column {self.grid.col} of "
                f"{self.grid}, not {size_of(span)} features"
            )
        return x * dropout_mask(self.grid, x, self.p, dim=x.dim() - 1, span=span, size=self.features)

    def extra_repr(self) -> str:
        """The probability."""
        return f"p={self.p}"


def dropout_mask(grid: Grid, x: torch.Tensor, p: float, *, dim: int, span: Span, size: int) -> torch.Tensor:
    """0 where an element is dropped, 1 / (1 - p) elsewhere, in the shape of ``x``.

    Args:
        x: ``[batch, ...]``; the batch is cut over (depth, row), and dim ``dim`` over columns.
        span: the interval of ``dim`` that this rank holds.
        size: the global size of ``dim``.
    """
    key = torch.randint(2**62, ()).to(x.device)
    index = torch.arange(x.shape[0], device=x.device) + grid.first_row(x.shape[0], x.device)
    index = index.view(-1, *[1] * (x.dim() - 1))
    for axis in range(1, x.dim()):
        first, whole = (span[0], size) if axis == dim else (0, x.shape[axis])
        position = torch.arange(x.shape[axis], device=x.device) + first
        index = index * whole + position.view(-1, *[1] * (x.dim() - 1 - axis))
    hashed = _hash(index * _GAMMA + key)
    return (hashed >= p).to(x.dtype) / (1 - p)


def _hash(index: torch.Tensor) -> torch.Tensor:
    """Uniform float64 numbers in [0, 1) from 64-bit integers."""
    value = (index ^ _shift(index, 30)) * _MIX_1
    value = (value ^ _shift(value, 27)) * _MIX_2
    return _shift(value ^ _shift(value, 31), 11).double() * 2.0**-53


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
