"""Reference implementation of native/codecs/exponents.h, with NumPy on whole blocks."""

from __future__ import annotations

import numpy as np

VALUES, ESCAPE = 128, 7


def encode(words: np.ndarray) -> bytes:
    """The code of bf16 values, given as uint16."""
    count = len(words) // VALUES * VALUES
    blocks = words[:count].reshape(-1, VALUES)
    exponents = ((blocks >> 7) & 255).astype(np.int64)
    largest = exponents.max(axis=1, initial=0)
    codes = np.minimum(largest[:, None] - exponents, ESCAPE)
    packed = np.zeros((len(blocks), 16), dtype=np.int64)
    for i, row in enumerate(codes.reshape(-1, 8, 16).swapaxes(0, 1)):
        packed |= row << (3 * i)
    planes = [(packed >> shift & 255).astype(np.uint8) for shift in (0, 8, 16)]
    signs = ((blocks & 127) | (blocks >> 8 & 128)).astype(np.uint8)
    out = bytearray()
    for index in range(len(blocks)):
        out += (
            bytes([int(largest[index])]) + b"".join(plane[index].tobytes() for plane in planes) + signs[index].tobytes()
        )
        out += exponents[index][codes[index] == ESCAPE].astype(np.uint8).tobytes()
    return bytes(out) + words[count:].tobytes()


def decode(data: bytes, count: int) -> np.ndarray:
    """The ``count`` values of a code, as uint16."""
    raw, at, blocks = np.frombuffer(data, dtype=np.uint8), 0, []
    for _ in range(count // VALUES):
        largest, planes, signs = int(raw[at]), raw[at + 1 : at + 49].reshape(3, 16), raw[at + 49 : at + 177]
        packed = sum(plane.astype(np.int64) << (8 * i) for i, plane in enumerate(planes))
        codes = np.stack([packed >> (3 * i) & 7 for i in range(8)]).reshape(-1)
        exponents, escaped = largest - codes, codes == ESCAPE
        at += 177
        exponents[escaped] = raw[at : at + escaped.sum()]
        at += int(escaped.sum())
        words = (signs.astype(np.int64) & 128) << 8 | exponents << 7 | (signs & 127)
        blocks.append(words.astype(np.uint16))
    return np.concatenate([*blocks, np.frombuffer(data[at:], dtype=np.uint16)])
