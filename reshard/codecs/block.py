"""Lossy codecs of fixed size. An element holds 32, 64 or 128 values, and each 32 of them share a scale.

============== ==== ====================================== ==================================== ===============
codec          bits scale of 32 values                     bound on the error of a value        bytes per 128
============== ==== ====================================== ==================================== ===============
int8x128       8    power of two                           ``amax / 127.5``                     132
int6x128       6    power of two                           ``amax / 31.5``                      100
int4x128       4    power of two                           ``amax / 7.5``                       68
int4x128-bf16  4    bf16 nearest to ``amax / 7``           ``amax / 13.9``                      72
fp8x128        8    power of two, codes are e4m3           ``amax / 14.5``                      132
============== ==== ====================================== ==================================== ===============

``amax`` is the largest magnitude among the 32 values. No scale is below 2**-126, so the error of a value may always
reach 2**-127 (2**-123 with fp8). Decoding to bf16 or fp16 may add half a unit in the last place of that format. All
codecs round to nearest even. If values have both signs, their errors have no bias. If all have one sign, the errors are
biased: values far below ``amax`` become 0, so a sum gets smaller. Zeros stay zeros. If one of 32 values is NaN or
infinite, all 32 decode to NaN. If coding raises a value above the largest finite one of the target, it decodes to the
largest one.

With power-of-two scales (E8M0, as in the OCP Microscaling formats 1.0), decoded values do not change when they are
encoded and decoded again, also after a pass through the dtype that they came from.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from reshard import _native
from reshard.codecs.elements import ElementCodec, ErrorSums
from reshard.codecs.raw_bytes import DTYPE_NUMBERS, dtype_number, flat_bytes, num_columns

#: Values that share a scale.
SCALE_VALUES = 32
#: Numbers of values that an element may hold, the preferred one first.
ELEMENT_VALUES = (128, 64, 32)
#: By kind: the number of its native kernel, the bytes of 32 values with their scale, the bound on the error of a value
#: as a fraction of the largest magnitude among them, and the relative L2 error of normally distributed values.
_KINDS: dict[str, tuple[int, int, float, float]] = {
    "int8": (0, 33, 1 / 127.5, 0.0083),
    "int6": (1, 25, 1 / 31.5, 0.034),
    "int4": (2, 17, 1 / 7.5, 0.139),
    "fp8": (3, 33, 1 / 14.5, 0.027),
    "int4-bf16": (4, 18, (1 + 2**-8) / 14, 0.098),
}
_NAME = re.compile(r"(int8|int6|int4|fp8)x(128|64|32)(-bf16)?")


@dataclass(frozen=True)
class BlockCodec(ElementCodec):
    """A lossy codec that turns each ``values`` consecutive values of a row into one element of fixed size.

    Args:
        kind: ``"int8"``, ``"int6"``, ``"int4"``, ``"fp8"`` or ``"int4-bf16"``.
        values: 32, 64 or 128.
    """

    kind: str
    values: int = 128

    @property
    def name(self) -> str:
        """``"int8x128"``; also the dtype of its elements in a plan."""
        base, _, suffix = self.kind.partition("-")
        return f"{base}x{self.values}{f'-{suffix}' if suffix else ''}"

    @property
    def element(self) -> tuple[int, int]:
        """``(values, bytes)`` of an element."""
        return self.values, self.values // SCALE_VALUES * _KINDS[self.kind][1]

    @property
    def error_bound(self) -> float:
        """Bound on the error of a value, as a fraction of the largest magnitude among the 32 that share its scale."""
        return _KINDS[self.kind][2]

    @property
    def usual_error(self) -> float:
        """The L2 norm of the error over that of the values, for normally distributed values."""
        return _KINDS[self.kind][3]

    @property
    def sizes(self) -> tuple[int, ...]:
        """See :class:`~reshard.codecs.elements.ElementCodec`."""
        return tuple(values for values in ELEMENT_VALUES if values <= self.values)

    def with_values(self, values: int) -> BlockCodec:
        """The same codes in elements of another size."""
        return BlockCodec(self.kind, values)

    def encode(self, source: Any, out: Any, num_row_dims: int | None = None) -> int:
        """See :class:`~reshard.codecs.elements.ElementCodec`."""
        self._encode(source, out, num_row_dims, False)
        return self.nbytes(source.shape, num_row_dims)

    def encode_measured(self, source: Any, out: Any, num_row_dims: int | None = None) -> ErrorSums:
        """Encode like :meth:`encode`, and return the sums from which the relative error follows."""
        return ErrorSums(*self._encode(source, out, num_row_dims, True))

    def decode(self, data: Any, target: Any, num_row_dims: int | None = None, *, accumulate: bool = False) -> None:
        """See :class:`~reshard.codecs.elements.ElementCodec`."""
        number, columns = _KINDS[self.kind][0], num_columns(target, num_row_dims)
        self.check_size(data, target, num_row_dims)
        into = flat_bytes(target)
        if len(into):
            form = dtype_number(target, self.name)
            _native.decode_blocks(number, form, columns, self.values, flat_bytes(data), into, accumulate)

    def _encode(self, source: Any, out: Any, num_row_dims: int | None, measure: bool) -> tuple[float, float]:
        number, columns = _KINDS[self.kind][0], num_columns(source, num_row_dims)
        form = dtype_number(source, self.name)
        self.check_size(out, source, num_row_dims)
        values = flat_bytes(source)
        if not len(values):
            return 0.0, 0.0
        return _native.encode_blocks(number, form, columns, self.values, values, flat_bytes(out), measure)


#: Names of the block codecs with elements of 128 values.
BLOCK_CODECS = tuple(BlockCodec(kind).name for kind in _KINDS)
#: Dtypes that block codecs code.
CODED_DTYPES = tuple(DTYPE_NUMBERS)


@functools.cache
def find_block_codec(name: str) -> BlockCodec | None:
    """The block codec of a name or wire dtype such as ``"int8x128"``; None if there is none."""
    match = _NAME.fullmatch(name)
    if match is None or (match[3] and match[1] != "int4"):
        return None
    return BlockCodec(match[1] + (match[3] or ""), int(match[2]))


def is_block_dtype(dtype: str) -> bool:
    """Whether a plan's dtype is that of a block codec's elements."""
    return find_block_codec(dtype) is not None
