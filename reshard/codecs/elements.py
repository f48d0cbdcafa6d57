"""Codecs of fixed size, which turn a number of consecutive values of a row into one element of bytes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from reshard.errors import ArgumentError


class ErrorSums(NamedTuple):
    """Sums over encoded values: of their squared errors, and of their squares.

    Blocks that have NaN or infinity before coding do not count. If a codec makes NaN of others, the error is infinite.
    """

    error: float = 0.0
    square: float = 0.0

    def plus(self, other: ErrorSums) -> ErrorSums:
        """The sums over both sets of values."""
        return ErrorSums(self.error + other.error, self.square + other.square)

    @property
    def relative_error(self) -> float:
        """The L2 norm of the error over the L2 norm of the values. If all values are 0: 0, or inf if any changed."""
        if not self.square:
            return math.inf if self.error else 0.0
        return math.sqrt(self.error / self.square)


class ElementCodec(ABC):
    """A codec whose elements hold equally many values in equally many bytes.

    Attributes:
        values: number of values of an element.
    """

    values: int

    @property
    @abstractmethod
    def name(self) -> str:
        """The dtype of its elements in a plan."""

    @property
    @abstractmethod
    def element(self) -> tuple[int, int]:
        """``(values, bytes)`` of an element."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """Numbers of values that an element may hold where layouts cut a tensor often, the preferred one first."""

    @abstractmethod
    def with_values(self, values: int) -> ElementCodec:
        """The same codes in elements of another size, one of :attr:`sizes`."""

    @abstractmethod
    def encode_measured(self, source: Any, out: Any, num_row_dims: int | None = None) -> ErrorSums:
        """Encode like :meth:`encode`, and return the sums from which the relative error follows."""

    @abstractmethod
    def encode(self, source: Any, out: Any, num_row_dims: int | None = None) -> int:
        """Encode an array into ``out``, a contiguous uint8 array of :meth:`nbytes` bytes.

        Args:
            source: a contiguous fp32, bf16 or fp16 array of NumPy or torch, on the CPU.
            num_row_dims: number of leading dims that count rows; all but the last by default.

        Returns:
            The number of bytes written.

        Raises:
            ArgumentError: a dtype that the codec does not encode, arrays with strides, or ``out`` has another size.
        """

    @abstractmethod
    def decode(self, data: Any, target: Any, num_row_dims: int | None = None, *, accumulate: bool = False) -> None:
        """Decode into ``target``, of the shape of the source and any of the three dtypes.

        Args:
            data: what :meth:`encode` wrote.
            accumulate: add to ``target`` instead.

        Raises:
            ArgumentError: as :meth:`encode`.
        """

    def num_elements(self, shape: Sequence[int], num_row_dims: int | None = None) -> int:
        """The number of elements of an array: its rows times the elements of a row, the last of which is padded."""
        dims = max(len(shape) - 1, 0) if num_row_dims is None else num_row_dims
        return math.prod(shape[:dims]) * -(-math.prod(shape[dims:]) // self.values)

    def nbytes(self, shape: Sequence[int], num_row_dims: int | None = None) -> int:
        """The bytes of an encoded array."""
        return self.num_elements(shape, num_row_dims) * self.element[1]

    def check_size(self, encoded: Any, plain: Any, num_row_dims: int | None) -> None:
        """Raise ArgumentError unless ``encoded`` has the size of the encoding of ``plain``."""
        given, needed = math.prod(encoded.shape), self.nbytes(plain.shape, num_row_dims)
        if given != needed or encoded.dtype.itemsize != 1:
            raise ArgumentError(
                f"codec {self.name} encodes shape {list(plain.shape)} in {needed} bytes, but the encoded array has "
                f"{given} elements of {encoded.dtype}"
            )
