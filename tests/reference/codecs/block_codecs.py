"""NumPy reference of native/codecs/blocks.h: the same bytes, written for reading. Works on rows of fp32 values.

bf16 and fp16 arrays are converted to fp32 before, and rounded after.
"""

from __future__ import annotations

import numpy as np

BITS = {"int8": 8, "int6": 6, "int4": 4}
NAN_SCALE = 255


def encode(kind: str, values_per_element: int, rows: np.ndarray) -> np.ndarray:
    """The elements of ``(rows, columns)`` fp32 values: ``(rows, elements, bytes)`` uint8."""
    columns = rows.shape[1]
    padded = np.pad(rows, ((0, 0), (0, -columns % values_per_element)))
    blocks = padded.reshape(len(rows), -1, values_per_element // 32, 32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    is_finite = np.isfinite(blocks).all(axis=-1, keepdims=True)
    safe = np.where(is_finite, amax, np.float32(0))
    if kind == "int4-bf16":
        unit = to_bf16(np.maximum(safe / np.float32(7), np.float32(2**-126)))
        words = np.where(is_finite, bf16_words(unit), 0x7FC0)
        scales = np.concatenate([words & 255, words >> 8], axis=-1)
        scaled = np.where(is_finite, blocks, 0) / unit
    else:
        limit = 464.0 if kind == "fp8" else 2.0 ** (BITS[kind] - 1) - 0.5
        exponent = np.frexp(safe.astype(np.float64) / limit)[1]  # the smallest with safe < limit * 2**exponent
        byte = np.where(safe == 0, 1, np.maximum(exponent + 127, 1))
        unit = np.ldexp(np.float64(1), byte - 127)
        scales = np.where(is_finite, byte, NAN_SCALE)
        scaled = (np.where(is_finite, blocks, 0) / unit).astype(np.float32)
    codes = _pack(kind, np.where(is_finite, scaled, 0))
    parts = [part.reshape(*blocks.shape[:2], -1) for part in (scales, codes)]
    return np.concatenate(parts, axis=-1).astype(np.uint8)


def decode(kind: str, values_per_element: int, data: np.ndarray, columns: int, largest: float) -> np.ndarray:
    """The inverse, ``(rows, columns)`` fp32.

    Values up to 2**-8 above ``largest`` become ``largest``. Values of fp16 above that are infinite.
    """
    blocks, rows, elements = values_per_element // 32, *data.shape[:2]
    size = 2 * blocks if kind == "int4-bf16" else blocks
    scales, codes = data[..., :size].astype(np.int64), data[..., size:].reshape(rows, elements, blocks, -1)
    if kind == "int4-bf16":
        words = scales[..., 0::2] | scales[..., 1::2] << 8
        unit = (words << 16).astype(np.uint32).view(np.float32)[..., None]
        is_nan = np.isnan(unit)
    else:
        unit, is_nan = np.ldexp(1.0, scales - 127)[..., None], (scales == NAN_SCALE)[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        values = _unpack(kind, codes.astype(np.int64)) * unit.astype(np.float64)
    limited = np.clip(values, -largest, largest)
    if largest == 65504:
        limited = np.where(np.abs(values) > largest * (1 + 2**-8), np.copysign(np.inf, values), limited)
    values = np.where(is_nan, np.nan, limited)
    return values.astype(np.float32).reshape(rows, -1)[:, :columns]


def _pack(kind: str, scaled: np.ndarray) -> np.ndarray:
    if kind == "fp8":
        magnitude = np.abs(scaled.astype(np.float64))
        exponent = np.where(magnitude == 0, -6, np.maximum(np.frexp(magnitude)[1] - 1, -6))
        steps = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int64)  # 8 to 16 in the binade, 0 to 8 below it
        code = steps + (exponent + 6) * 8
        return code | (np.signbit(scaled).astype(np.int64) << 7)
    q = np.rint(scaled).astype(np.int64)
    if kind == "int8":
        return q & 255
    low = _lanes(q & 15, 2)
    nibbles = low[..., 0] | low[..., 1] << 4
    if kind != "int6":
        return nibbles
    high = _lanes(q >> 4 & 3, 4)
    return np.concatenate([nibbles, sum(high[..., i] << 2 * i for i in range(4))], axis=-1)


def _lanes(q: np.ndarray, per_byte: int) -> np.ndarray:
    """32 codes as the bytes of four words, ``(..., 32 / per_byte, per_byte)``; word i holds codes i, i + 4, i + 8, ..."""
    by_word = q.reshape(*q.shape[:-1], 8, 4).swapaxes(-1, -2)
    return by_word.reshape(*q.shape[:-1], 32 // per_byte, per_byte)


def _from_lanes(parts: list[np.ndarray]) -> np.ndarray:
    """The inverse of :func:`_lanes`, from the codes at each position in a byte."""
    by_word = np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], 4, 8)
    return by_word.swapaxes(-1, -2).reshape(*parts[0].shape[:-1], 32)


def _unpack(kind: str, codes: np.ndarray) -> np.ndarray:
    if kind == "fp8":
        exponent, mantissa = codes >> 3 & 15, codes & 7
        value = np.where(exponent == 0, np.ldexp(1.0 * mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10))
        return np.where(codes & 128, -value, value)
    if kind == "int8":
        return (codes ^ 128) - 128
    q = _from_lanes([codes[..., :16] & 15, codes[..., :16] >> 4])
    if kind != "int6":
        return (q ^ 8) - 8
    high = _from_lanes([codes[..., 16:] >> 2 * i & 3 for i in range(4)])
    return ((q | high << 4) ^ 32) - 32


def bf16_words(values: np.ndarray) -> np.ndarray:
    """The bits of fp32 values rounded to bf16, to nearest even; NaN becomes 0x7fc0."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.int64)
    words = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return np.where(np.isnan(values), 0x7FC0, words)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 values rounded to bf16."""
    return (bf16_words(values) << 16).astype(np.uint32).view(np.float32)
