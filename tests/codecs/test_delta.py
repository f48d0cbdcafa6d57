"""The delta codec: bit for bit against the reference, lossless, never much larger than the array, and safe."""

from __future__ import annotations

import numpy as np
import pytest

from reshard.codecs.delta import HEADER_BYTES, encode_delta
from reshard.codecs.formats import decode_piece
from reshard.errors import ArgumentError
from tests.reference.codecs import delta as reference


def _pair(dtype, share, size=4000, seed=0):
    """A base, and a copy of it in which a share of the words differ by a few units or have random values."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, np.iinfo(dtype).max, size, dtype=dtype, endpoint=True)
    base[::97] = 0
    words = base.copy()
    changed = rng.random(size) < share
    moves = rng.integers(-3, 4, size).astype(dtype)
    words[changed] += moves[changed]
    words[changed & (rng.random(size) < 0.1)] = rng.integers(0, np.iinfo(dtype).max, dtype=dtype)
    words[97] = 1 << (8 * words.itemsize - 1)  # from +0 to -0
    return base, words


def _encode(words, base):
    out = np.empty(words.nbytes + HEADER_BYTES, np.uint8)
    size = encode_delta(words.view(np.uint8), None if base is None else base.view(np.uint8), out, words.itemsize)
    return out[:size]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_streams_equal_the_reference_and_are_lossless(dtype):
    for share in (0.0, 0.01, 0.2):
        base, words = _pair(dtype, share)
        data = _encode(words, base)
        assert data[0] == 1 and data[1:].tobytes() == reference.encode(words, base)
        found = base.copy()
        decode_piece(data, found.view(np.uint8), words.itemsize)
        assert (found == words).all()


def test_arrays_that_changed_everywhere_and_first_versions_travel_as_they_are():
    base, words = _pair(np.uint16, 1.0)
    words ^= 0x5A5A
    for data in (_encode(words, base), _encode(words, None)):
        assert len(data) == words.nbytes + HEADER_BYTES and data[0] == 0
        found = base.copy()
        decode_piece(data, found.view(np.uint8), 2)
        assert (found == words).all()


def test_one_percent_of_bf16_changed_by_a_unit_takes_a_ninetieth():
    rng = np.random.default_rng(0)
    base = (rng.standard_normal(2**20).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    words = base.copy()
    words[rng.random(len(words)) < 0.01] += 1
    assert len(_encode(words, base)) < words.nbytes / 90


def test_damaged_streams_are_refused_and_write_nothing_outside():
    base, words = _pair(np.uint16, 0.2)
    data = _encode(words, base)
    rng = np.random.default_rng(1)
    guarded = np.zeros(len(base) + 64, np.uint16)
    refused = 0
    for _ in range(300):
        broken = data.copy()
        broken[rng.integers(0, len(broken), 3)] = rng.integers(0, 256, 3)
        broken = broken[: rng.integers(0, len(broken) + 1)]
        guarded[:] = 7
        try:
            decode_piece(broken, guarded[: len(base)].view(np.uint8), 2)
        except ArgumentError as error:
            assert "of an array of 8000 bytes" in str(error)
            refused += 1
        assert (guarded[len(base) :] == 7).all()
    assert refused > 50
