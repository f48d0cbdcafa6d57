"""ZFP at a fixed rate (the zfpy package) in the elements of a block codec, to compare with our codecs.

ZFP encodes 4 neighboring values at a time. At 8 bits a value, 128 values fill 128 of the 132 bytes of an ``int8x128``
element, so ZFP can travel in its place: blocks, plans and messages stay the same, and only the values differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from reshard.codecs import BlockCodec
from reshard.codecs.elements import ErrorSums

#: Bits of a value.
RATE = 8


def compress(values: np.ndarray) -> bytes:
    """The code of a flat fp32 array, whose size is a multiple of 8, without a header."""
    import zfpy

    return bytes(zfpy.compress_numpy(values, rate=RATE, write_header=False))


def decompress(data: bytes, num_values: int) -> np.ndarray:
    """The inverse of :func:`compress`."""
    import zfpy

    return np.asarray(zfpy._decompress(data, zfpy.type_float, (num_values,), rate=float(RATE)))


@contextlib.contextmanager
def zfp_as_int8() -> Iterator[None]:
    """Encode with ZFP wherever this process would encode with int8x128."""
    encode, decode, measured = BlockCodec.encode, BlockCodec.decode, BlockCodec.encode_measured
    code_bytes = 128 * RATE // 8

    def rows_of(codec: BlockCodec, shape: tuple[int, ...], num_row_dims: int | None) -> tuple[int, int]:
        elements = codec.num_elements(shape, num_row_dims)
        dims = len(shape) - 1 if num_row_dims is None else num_row_dims
        rows = int(np.prod(shape[:dims], dtype=np.int64))
        return rows, elements // rows * 128 if rows else 0

    def zfp_encode(codec: BlockCodec, source: Any, out: Any, num_row_dims: int | None = None) -> int:
        if codec.name != "int8x128":
            return encode(codec, source, out, num_row_dims)
        rows, padded = rows_of(codec, tuple(source.shape), num_row_dims)
        values = torch.as_tensor(source).float().numpy()
        blocks = np.zeros((rows, padded), dtype=np.float32)
        if blocks.size:
            blocks[:, : values.size // rows] = values.reshape(rows, -1)
            elements = torch.as_tensor(out).view(-1, codec.element[1]).numpy()
            elements[:, :code_bytes] = np.frombuffer(compress(blocks.reshape(-1)), np.uint8).reshape(-1, code_bytes)
            elements[:, code_bytes:] = 0
        return codec.nbytes(source.shape, num_row_dims)

    def zfp_decode(
        codec: BlockCodec, data: Any, target: Any, num_row_dims: int | None = None, *, accumulate: bool = False
    ) -> None:
        if codec.name != "int8x128":
            decode(codec, data, target, num_row_dims, accumulate=accumulate)
            return
        rows, padded = rows_of(codec, tuple(target.shape), num_row_dims)
        if not rows * padded:
            return
        elements = torch.as_tensor(data).reshape(-1, codec.element[1]).numpy()
        decoded = decompress(np.ascontiguousarray(elements[:, :code_bytes]).tobytes(), rows * padded)
        into = torch.as_tensor(target)
        values = torch.from_numpy(decoded.reshape(rows, padded)[:, : into.numel() // rows].copy()).view(into.shape)
        into.copy_(into + values if accumulate else values)

    def zfp_measured(codec: BlockCodec, source: Any, out: Any, num_row_dims: int | None = None) -> ErrorSums:
        if codec.name != "int8x128":
            return measured(codec, source, out, num_row_dims)
        zfp_encode(codec, source, out, num_row_dims)
        decoded = torch.empty_like(torch.as_tensor(source))
        zfp_decode(codec, out, decoded, num_row_dims)
        plain = torch.as_tensor(source).double()
        return ErrorSums(float((decoded.double() - plain).square().sum()), float(plain.square().sum()))

    BlockCodec.encode, BlockCodec.decode = zfp_encode, zfp_decode  # type: ignore[assignment, method-assign]
    BlockCodec.encode_measured = zfp_measured  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        BlockCodec.encode, BlockCodec.decode = encode, decode  # type: ignore[method-assign]
        BlockCodec.encode_measured = measured  # type: ignore[method-assign]
