"""The lossless codec of bf16 values: bit for bit against the reference, small, never larger than plain, and safe."""

from __future__ import annotations

import numpy as np
import pytest

from reshard.codecs.delta import HEADER_BYTES
from reshard.codecs.exponents import encode_exponents
from reshard.codecs.formats import decode_piece
from reshard.errors import ArgumentError
from tests.reference.codecs import exponents as reference


def _normal(size, seed=0):
    values = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _encode(words):
    out = np.empty(words.nbytes + HEADER_BYTES, np.uint8)
    return out[: encode_exponents(words.view(np.uint8), out)]


def _decode(data, size):
    words = np.empty(size, np.uint16)
    decode_piece(data, words.view(np.uint8), 2)
    return words


def test_codes_equal_the_reference_and_are_lossless():
    rng = np.random.default_rng(1)
    words = _normal(128 * 2000 + 77)
    words[::211] = 0
    words[::503] = rng.integers(0, 2**16, len(words[::503]))  # NaN, infinities and denormals among them
    words[256:384] = 0x3F80  # one exponent
    for size in (len(words), 4096, 129, 128, 127, 1, 0):
        data = _encode(words[:size])
        assert data[0] == 2 or size < 4096
        if data[0] == 2:
            assert data[1:].tobytes() == reference.encode(words[:size])
            assert (reference.decode(data[1:].tobytes(), size) == words[:size]).all()
        assert (_decode(data, size) == words[:size]).all()


def test_normal_values_are_1_4_times_smaller_and_noise_is_not_larger():
    words = _normal(2**18)
    assert len(_encode(words)) < words.nbytes / 1.4
    noise = np.random.default_rng(0).integers(0, 2**16, 2**12).astype(np.uint16)
    data = _encode(noise)
    assert data[0] == 0 and len(data) == noise.nbytes + HEADER_BYTES and (_decode(data, len(noise)) == noise).all()


def test_damaged_codes_are_refused_and_write_nothing_outside():
    words = _normal(1000)
    data = _encode(words)
    rng = np.random.default_rng(1)
    guarded = np.zeros(len(words) + 64, np.uint16)
    refused = 0
    for _ in range(300):
        broken = data.copy()
        broken[rng.integers(0, len(broken), 3)] = rng.integers(0, 256, 3)
        broken = broken[: rng.integers(len(broken) - 9, len(broken) + 1)]
        guarded[:] = 7
        try:
            decode_piece(broken, guarded[: len(words)].view(np.uint8), 2)
        except ArgumentError as error:
            assert "of an array of 2000 bytes" in str(error)
            refused += 1
        assert (guarded[len(words) :] == 7).all()
    assert refused > 200
    with pytest.raises(ArgumentError):
        decode_piece(data, np.empty(1998, np.uint8), 2)
