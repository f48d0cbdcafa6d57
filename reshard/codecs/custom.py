"""Codecs that the caller implements, in the form in which plans use them."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reshard.codecs.elements import ElementCodec, ErrorSums
from reshard.codecs.raw_bytes import dtype_number, flat_bytes, num_columns, write_into
from reshard.errors import ArgumentError, CompressionError
from reshard.formatting import brief

#: Limit on the values and on the bytes of an element.
MAX_ELEMENT = 2**20
_LABEL = re.compile(r"[A-Za-z]\w*")
_NAME = re.compile(r"([A-Za-z]\w*)-([1-9]\d*)x([1-9]\d*)")
_METHODS = ("encode", "decode")


@dataclass(frozen=True)
class CustomCodec(ElementCodec):
    """A codec of the caller's: its name and sizes, which plans compare, and the object that encodes and decodes.

    Args:
        label: name of the codec.
        values, element_bytes: number of values of an element, and its encoded bytes.
        implementation: a :class:`~reshard.Codec`; None in a plan that was read from text.
    """

    label: str
    values: int
    element_bytes: int
    implementation: Any = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """``"label-64x132"``; also the dtype of its elements in a plan."""
        return f"{self.label}-{self.values}x{self.element_bytes}"

    @property
    def element(self) -> tuple[int, int]:
        """See :class:`ElementCodec`."""
        return self.values, self.element_bytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """See :class:`ElementCodec`."""
        return (self.values,)

    def with_values(self, values: int) -> CustomCodec:
        """See :class:`ElementCodec`."""
        if values != self.values:
            raise ArgumentError(f"codec {self.name} has elements of {self.values} values, not {values}")
        return self

    def encode(self, source: Any, out: Any, num_row_dims: int | None = None) -> int:
        """See :class:`ElementCodec`."""
        self._encode(self._blocks(source, num_row_dims), source, out, num_row_dims)
        return self.nbytes(source.shape, num_row_dims)

    def encode_measured(self, source: Any, out: Any, num_row_dims: int | None = None) -> ErrorSums:
        """See :class:`ElementCodec`."""
        blocks = self._blocks(source, num_row_dims)
        encoded = self._encode(blocks.copy(), source, out, num_row_dims)  # the codec may overwrite its values
        decoded = np.zeros_like(blocks)
        if len(blocks):
            with self._named("decode"):
                self.implementation.decode(_read_only(encoded), decoded)
        finite = np.isfinite(blocks).all(axis=1)
        values = blocks[finite].astype(np.float64)
        error = float(((decoded[finite] - values) ** 2).sum())
        return ErrorSums(math.inf if math.isnan(error) else error, float((values**2).sum()))

    def decode(self, data: Any, target: Any, num_row_dims: int | None = None, *, accumulate: bool = False) -> None:
        """See :class:`ElementCodec`."""
        self._check(target)
        self.check_size(data, target, num_row_dims)
        columns = num_columns(target, num_row_dims)
        blocks = np.zeros((self.num_elements(target.shape, num_row_dims), self.values), dtype=np.float32)
        if not len(blocks):
            return
        # Relays forward the data while it is decoded.
        with self._named("decode"):
            self.implementation.decode(_read_only(flat_bytes(data).reshape(len(blocks), -1)), blocks)
        per_row = -(-columns // self.values) * self.values
        decoded = np.ascontiguousarray(blocks.reshape(-1, per_row)[:, :columns]).reshape(target.shape)
        if isinstance(target, np.ndarray):
            target[...] = target + decoded if accumulate else decoded
            return
        import torch

        values = torch.from_numpy(decoded)
        write_into(target, target.float() + values if accumulate else values)

    def _encode(self, blocks: np.ndarray, source: Any, out: Any, num_row_dims: int | None) -> np.ndarray:
        self.check_size(out, source, num_row_dims)
        encoded = flat_bytes(out).reshape(len(blocks), self.element_bytes)
        if len(blocks):
            with self._named("encode"):
                self.implementation.encode(blocks, encoded)
        return encoded

    @contextlib.contextmanager
    def _named(self, method: str) -> Iterator[None]:
        """Name the codec in the errors of its methods."""
        try:
            yield
        except Exception as error:
            raise CompressionError(f"codec {self.label}: {method} raised {type(error).__name__}: {error}") from error

    def _blocks(self, source: Any, num_row_dims: int | None) -> np.ndarray:
        """The values as fp32, one element a row, padded by zeros."""
        self._check(source)
        flat_bytes(source)  # raises if the array has strides
        plain = source.astype(np.float32) if isinstance(source, np.ndarray) else source.detach().float().numpy()
        columns = num_columns(source, num_row_dims)
        rows = plain.reshape(-1, columns)
        padded = np.zeros((len(rows), -(-columns // self.values) * self.values), dtype=np.float32)
        padded[:, :columns] = rows
        return padded.reshape(-1, self.values)

    def _check(self, array: Any) -> None:
        dtype_number(array, self.name)
        self.check_implemented()

    def check_implemented(self) -> None:
        """Raise ArgumentError if only the sizes of the codec are known."""
        if self.implementation is None:
            raise ArgumentError(
                f"the plan was made with codec {self.label} of {self.values} values in {self.element_bytes} bytes, and "
                "its text has the sizes only; make the plan here with compression= and the codec"
            )


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def find_custom_codec(dtype: str) -> CustomCodec | None:
    """The sizes of a codec from the dtype of its elements; None if the dtype is not of this form."""
    match = _NAME.fullmatch(dtype)
    return None if match is None else CustomCodec(match[1], int(match[2]), int(match[3]))


def wrap_codec(codec: Any) -> CustomCodec:
    """A caller's codec as plans use it.

    Raises:
        ArgumentError: it does not implement :class:`~reshard.Codec`.
    """
    if isinstance(codec, type):
        raise ArgumentError(f"compression is the class {codec.__name__}; pass an object of it: {codec.__name__}(...)")
    kind = type(codec).__name__
    lacking = [name for name in _METHODS if not callable(getattr(codec, name, None))]
    if lacking or not hasattr(codec, "name") or not hasattr(codec, "element"):
        raise ArgumentError(
            f"compression is a {kind}; it must be the name of a codec, or have name, element, encode and decode as a "
            "reshard.Codec does"
        )
    label, element = codec.name, codec.element
    if not isinstance(label, str) or _LABEL.fullmatch(label) is None:
        raise ArgumentError(f"the name of codec {kind} is {brief(label)}; it must be letters, digits and _")
    is_pair = isinstance(element, tuple) and len(element) == 2
    if not is_pair or not all(type(item) is int and 0 < item <= MAX_ELEMENT for item in element):
        raise ArgumentError(
            f"the element of codec {label} is {brief(element)}; it must be (values, bytes), both from 1 to "
            f"{MAX_ELEMENT}"
        )
    values, element_bytes = element
    return CustomCodec(label, values, element_bytes, codec)
