"""Triton kernels of the block codecs: the same bytes as ``native/codecs/blocks.h``, which explains the formats.

Values travel through the kernels as their bits, so that NaN and denormal values are the same on every device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from reshard.codecs import BlockCodec
from reshard.codecs.raw_bytes import DTYPE_NUMBERS, dtype_number, num_columns
from reshard.errors import ArgumentError
from reshard.runtime.array_bytes import flat_bytes

#: Blocks of 32 values that a program of a kernel encodes, and the number of its warps. Each thread encodes 32 values.
#: With fewer, a thread would spend more instructions on indices than on values.
BLOCKS_PER_PROGRAM, NUM_WARPS = 64, 2


class _Kind(NamedTuple):
    """Constants of a codec, as in ``native/codecs/blocks.h``.

    Attributes:
        scale_bytes, code_bytes: bytes of the scale and of the codes of a block.
        largest_exponent, carry: largest exponent and carry of the power-of-two scale.
    """

    scale_bytes: int
    code_bytes: int
    largest_exponent: int = 0
    carry: int = 0


_KINDS = {
    "int8": _Kind(1, 32, 6, 1 << 16),
    "int6": _Kind(1, 24, 4, 1 << 18),
    "int4": _Kind(1, 16, 2, 1 << 20),
    "fp8": _Kind(1, 32, 8, 0x180000),
    "int4-bf16": _Kind(2, 16),
}


# Triton compiles annotations and accepts only its own.
@triton.jit  # type: ignore[untyped-decorator]
def _widen(words, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of a format, as the bits of fp32."""
    if FORMAT == 0:
        bits = words
    elif FORMAT == 1:
        bits = words.to(tl.int32) << 16
    else:
        word = words.to(tl.int32)
        magnitude = (word & 0x7FFF) << 13
        shifted = (magnitude + (113 << 23)).to(tl.float32, bitcast=True) - 6.103515625e-05  # the smallest normal value
        finite = tl.where(magnitude < 0x00800000, shifted.to(tl.int32, bitcast=True), magnitude + (112 << 23))
        bits = tl.where(magnitude >= 0x0F800000, magnitude + (224 << 23), finite) | ((word & 0x8000) << 16)
    return bits


@triton.jit  # type: ignore[untyped-decorator]
def _narrow(bits, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of fp32 values rounded to a format, to nearest even."""
    if FORMAT == 0:
        words = bits
    elif FORMAT == 1:
        words = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        magnitude = bits & 0x7FFFFFFF
        normal = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
        denormal = (magnitude.to(tl.float32, bitcast=True) + 0.5).to(tl.int32, bitcast=True) - 0x3F000000
        finite = tl.where(magnitude < 0x38800000, denormal, normal)
        special = tl.where(magnitude == 0x7F800000, 0x7C00, 0x7E00)
        word = tl.where(magnitude >= 0x7F800000, special, finite)
        words = (word | ((bits >> 16) & 0x8000)).to(tl.int16)
    return words


@triton.jit  # type: ignore[untyped-decorator]
def _find_blocks(  # type: ignore[no-untyped-def]
    num_blocks, columns, per_row,
    BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """Offsets of the blocks of this program: which blocks exist, values, which values exist, scales, and codes."""
    block = tl.program_id(0) * COUNT + tl.arange(0, COUNT)  # in 32 bits: a division in 64 bits takes longer than a code
    row = block // per_row
    at = block - row * per_row
    column = at.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_block = block < num_blocks
    is_value = is_block[:, None] & (column < columns)
    element, inner = block // BLOCKS, block % BLOCKS  # a row has whole elements
    start = element.to(tl.int64) * (BLOCKS * (SCALE_BYTES + CODE_BYTES))
    codes = start + BLOCKS * SCALE_BYTES + inner * CODE_BYTES
    return is_block, row.to(tl.int64)[:, None] * columns + column, is_value, start + inner * SCALE_BYTES, codes


@triton.jit  # type: ignore[untyped-decorator]
def _encode_blocks(  # type: ignore[no-untyped-def]
    source, out, num_blocks, columns, per_row,
    FORMAT: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    LARGEST_EXPONENT: tl.constexpr,
    CARRY: tl.constexpr,
):  # fmt: skip
    """Each program encodes some blocks of 32 values."""
    is_block, values_at, is_value, scale_at, encodes_at = _find_blocks(
        num_blocks, columns, per_row, BLOCKS, COUNT, SCALE_BYTES, CODE_BYTES
    )
    bits = _widen(tl.load(source + values_at, mask=is_value, other=0), FORMAT)
    largest = tl.max(bits & 0x7FFFFFFF, axis=1)  # magnitudes compare as their bits do
    is_finite = largest < 0x7F800000
    values = tl.where(is_finite[:, None], bits, 0).to(tl.float32, bitcast=True)
    largest = tl.where(is_finite, largest, 0)
    if SCALE_BYTES == 1:
        byte = tl.maximum(((largest + CARRY) >> 23) - LARGEST_EXPONENT, 1)
        scaled = values * ((254 - byte) << 23).to(tl.float32, bitcast=True)[:, None]
        tl.store(out + scale_at, tl.where(is_finite, byte, 255).to(tl.uint8), mask=is_block)
    else:
        seventh = tl.full((COUNT,), 7.0, tl.float32)
        wanted = tl.maximum(
            tl.div_rn(largest.to(tl.float32, bitcast=True), seventh).to(tl.int32, bitcast=True), 1 << 23
        )
        word = (wanted + 0x7FFF + ((wanted >> 16) & 1)) >> 16  # rounded to bf16
        unit = tl.broadcast_to((word << 16).to(tl.float32, bitcast=True)[:, None], (COUNT, 32))
        scaled = tl.div_rn(values, unit)
        stored = tl.where(is_finite, word, 0x7FC0)
        tl.store(out + scale_at, (stored & 255).to(tl.uint8), mask=is_block)
        tl.store(out + scale_at + 1, (stored >> 8).to(tl.uint8), mask=is_block)
    if IS_FP8:
        raw = scaled.to(tl.int32, bitcast=True)
        magnitude = raw & 0x7FFFFFFF
        normal = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        steps = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        codes = tl.where(magnitude < 0x3C800000, steps, normal) | ((raw >> 24) & 128)
    else:  # 1.5 * 2**23 rounds to an integer, to nearest even
        codes = (scaled + 12582912.0).to(tl.int32, bitcast=True)
    codes = tl.where(is_finite[:, None], codes, 0)
    if CODE_BYTES == 32:
        at = encodes_at[:, None] + tl.arange(0, 32)[None, :]
        tl.store(out + at, (codes & 255).to(tl.uint8), mask=is_block[:, None])
    else:  # byte j of word i holds the low bits of values i + 8 j and i + 8 j + 4
        shifts = (tl.arange(0, 2) * 4)[None, None, :, None]
        pairs = tl.sum((tl.reshape(codes, (COUNT, 4, 2, 4)) & 15) << shifts, axis=2)
        bytes_of_words = tl.reshape(tl.permute(pairs.to(tl.uint8), (0, 2, 1)), (COUNT, 16))
        tl.store(out + encodes_at[:, None] + tl.arange(0, 16)[None, :], bytes_of_words, mask=is_block[:, None])
    if CODE_BYTES == 24:  # byte j of half word i holds the high bits of values i + 16 j, + 4, + 8 and + 12
        shifts = (tl.arange(0, 4) * 2)[None, None, :, None]
        fours = tl.sum(((tl.reshape(codes, (COUNT, 2, 4, 4)) >> 4) & 3) << shifts, axis=2)
        bytes_of_halves = tl.reshape(tl.permute(fours.to(tl.uint8), (0, 2, 1)), (COUNT, 8))
        tl.store(out + encodes_at[:, None] + (16 + tl.arange(0, 8))[None, :], bytes_of_halves, mask=is_block[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _decode_blocks(  # type: ignore[no-untyped-def]
    data, target, num_blocks, columns, per_row,
    FORMAT: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    MAX: tl.constexpr,
):  # fmt: skip
    """Each program decodes some blocks of 32 values."""
    is_block, values_at, is_value, scale_at, encodes_at = _find_blocks(
        num_blocks, columns, per_row, BLOCKS, COUNT, SCALE_BYTES, CODE_BYTES
    )
    scale = tl.load(data + scale_at, mask=is_block, other=0).to(tl.int32)
    if SCALE_BYTES == 1:
        unit = tl.where(scale == 255, 0x7FC00000, scale << 23)
    else:
        unit = (scale | (tl.load(data + scale_at + 1, mask=is_block, other=0).to(tl.int32) << 8)) << 16
    is_nan = (unit & 0x7FFFFFFF) > 0x7F800000
    number = tl.arange(0, 32)
    here = is_block[:, None] & (number < 32)[None, :]
    if CODE_BYTES == 32:
        code = tl.load(data + encodes_at[:, None] + number[None, :], mask=here, other=0).to(tl.int32)
    else:
        word, place = number % 4, number // 4
        low = tl.load(data + encodes_at[:, None] + (word * 4 + place // 2)[None, :], mask=here, other=0).to(tl.int32)
        code = (low >> (4 * (place % 2))[None, :]) & 15
        if CODE_BYTES == 24:
            at = encodes_at[:, None] + (16 + word * 2 + place // 4)[None, :]
            high = tl.load(data + at, mask=here, other=0).to(tl.int32)
            code = code | (((high >> (2 * (place % 4))[None, :]) & 3) << 4)
    if IS_FP8:
        magnitude = code & 127
        steps = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
        plain = tl.where(magnitude < 8, steps, (magnitude << 20) + (120 << 23)) | ((code & 128) << 24)
        values = plain.to(tl.float32, bitcast=True)
    else:
        half: tl.constexpr = 128 if CODE_BYTES == 32 else (32 if CODE_BYTES == 24 else 8)
        values = ((code ^ half) - half).to(tl.float32)
    product = values * tl.where(is_nan, 0, unit).to(tl.float32, bitcast=True)[:, None]
    value = tl.where(product > MAX, MAX, product)
    value = tl.where(value < -MAX, -MAX, value)
    if FORMAT == 2:  # larger values come from a wider format
        infinite = tl.full((COUNT, 32), float("inf"), tl.float32)
        value = tl.where(product > 65759.875, infinite, value)
        value = tl.where(product < -65759.875, -infinite, value)
    bits = tl.where(is_nan[:, None], 0x7FC00000, value.to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(target + values_at, _narrow(bits, FORMAT), mask=is_value)


def encode_on_device(
    codec: BlockCodec, source: torch.Tensor, out: torch.Tensor, num_row_dims: int | None = None
) -> int:
    """Like :meth:`~reshard.codecs.BlockCodec.encode`, by a kernel on the current stream of the tensors' device."""
    form, words, grid = _prepare(codec, source, out, num_row_dims)
    if grid[0]:
        kind = _KINDS[codec.kind]
        _encode_blocks[(-(-grid[0] // BLOCKS_PER_PROGRAM),)](
            words,
            flat_bytes(out),
            *grid,
            FORMAT=form,
            IS_FP8=codec.kind == "fp8",
            BLOCKS=codec.values // 32,
            COUNT=BLOCKS_PER_PROGRAM,
            SCALE_BYTES=kind.scale_bytes,
            CODE_BYTES=kind.code_bytes,
            LARGEST_EXPONENT=kind.largest_exponent,
            CARRY=kind.carry,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return codec.nbytes(source.shape, num_row_dims)


def decode_on_device(
    codec: BlockCodec, data: torch.Tensor, target: torch.Tensor, num_row_dims: int | None = None
) -> None:
    """Like :meth:`~reshard.codecs.BlockCodec.decode`, by a kernel on the current stream of the tensors' device."""
    form, words, grid = _prepare(codec, target, data, num_row_dims)
    if grid[0]:
        kind = _KINDS[codec.kind]
        _decode_blocks[(-(-grid[0] // BLOCKS_PER_PROGRAM),)](
            flat_bytes(data),
            words,
            *grid,
            FORMAT=form,
            IS_FP8=codec.kind == "fp8",
            BLOCKS=codec.values // 32,
            COUNT=BLOCKS_PER_PROGRAM,
            SCALE_BYTES=kind.scale_bytes,
            CODE_BYTES=kind.code_bytes,
            MAX=float(torch.finfo(target.dtype).max),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def _prepare(
    codec: BlockCodec, plain: torch.Tensor, encoded: torch.Tensor, num_row_dims: int | None
) -> tuple[int, Any, tuple[int, int, int]]:
    """The format of the plain values, the values as words, and the numbers of blocks, columns, and blocks a row."""
    form = dtype_number(plain, codec.name)
    codec.check_size(encoded, plain, num_row_dims)
    if plain.device != encoded.device:
        raise ArgumentError(f"codec {codec.name}: plain values on {plain.device}, encoded ones on {encoded.device}")
    if not plain.is_contiguous() or not encoded.is_contiguous():
        raise ArgumentError(f"codec {codec.name} needs contiguous tensors")
    columns = num_columns(plain, num_row_dims)
    per_row = -(-columns // codec.values) * (codec.values // 32)
    words = flat_bytes(plain).view(torch.int32 if form == DTYPE_NUMBERS["float32"] else torch.int16)
    num_blocks = math.prod(plain.shape) // columns * per_row
    if num_blocks > 2**31 - BLOCKS_PER_PROGRAM:  # the kernels count them in 32 bits
        raise ArgumentError(f"codec {codec.name} encodes at most 2**36 values at once on a GPU, not {plain.numel()}")
    return form, words, (num_blocks, columns, per_row)
