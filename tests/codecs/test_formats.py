"""Lossless formats of pieces: bit for bit against their references, exact on all bits, never much larger, and safe."""

from __future__ import annotations

import numpy as np
import pytest

from reshard import _native
from reshard.codecs import xor_planes
from reshard.codecs.delta import HEADER_BYTES
from reshard.codecs.formats import FORMATS, decode_piece, known_formats
from reshard.errors import ArgumentError
from tests.reference.codecs import bitmap as reference

WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
needs_zstd = pytest.mark.skipif(xor_planes.zstd is None, reason="needs backports.zstd")
ALL = [pytest.param(name, marks=needs_zstd) if name == "xor-zstd" else name for name in FORMATS]


def _pair(width, share, size, wide=0.1):
    """A base of any bits, and a copy in which a share of the words moved, some of them far."""
    rng = np.random.default_rng([width, int(100 * share), size])
    most = np.iinfo(WIDTHS[width]).max
    base = rng.integers(0, most, size, dtype=WIDTHS[width], endpoint=True)
    words = base.copy()
    words += np.where(rng.random(size) < share, rng.integers(-130, 131, size), 0).astype(base.dtype)
    far = rng.random(size) < share * wide
    words[far] = rng.integers(0, most, size, dtype=base.dtype, endpoint=True)[far]
    return base, words


def _encode(name, words, base):
    out = np.full(words.nbytes + HEADER_BYTES, 0xEE, np.uint8)
    size = FORMATS[name].encode(words.view(np.uint8), base.view(np.uint8), out, words.itemsize)
    return out[:size]


def _decode(data, base):
    found = base.copy()
    decode_piece(data, found.view(np.uint8), base.itemsize)
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_bitmaps_equal_the_reference(width):
    for size in (0, 1, 63, 64, 65, 1000, 4096, 9000):
        for share in (0.0, 0.02, 0.3, 0.8):
            base, words = _pair(width, share, size)
            data = _encode("bitmap", words, base)
            encoded = reference.encode(words, base)
            if encoded is not None and len(encoded) <= words.nbytes:
                assert data[0] == 3 and data[1:].tobytes() == encoded
            else:
                assert data[0] == 0 and data[1:].tobytes() == words.tobytes()
            assert encoded is None or (reference.decode(encoded, base) == words).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_format_is_exact_and_never_larger_than_plain(name, width):
    if FORMATS[name].dtype and width != 2:
        return
    for size in (0, 1, 7, 64, 129, 3000, 8192):
        for share in (0.0, 0.05, 0.7, 1.0):
            for wide in (0.0, 1.0):
                base, words = _pair(width, share, size, wide)
                data = _encode(name, words, base)
                assert len(data) <= words.nbytes + HEADER_BYTES
                assert (_decode(data, base) == words).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("width", "special"), [
    (4, [0x7FC00001, 0xFFC0DEAD, 0x7F800000, 0xFF800000, 0x80000000, 0, 1, 0x7F800001]),
    (2, [0x7FC1, 0xFFDE, 0x7F80, 0xFF80, 0x8000, 0, 1, 0x7C01, 0xFC00]),
    (1, [0x7F, 0xFF, 0x80, 0, 1, 0x7C, 0xFE]),
])  # fmt: skip
def test_nan_payloads_signed_zeros_and_infinities_arrive_bit_for_bit(name, width, special):
    if FORMATS[name].dtype and width != 2:
        return
    values = np.array(special, WIDTHS[width])
    new, old = (grid.reshape(-1) for grid in np.meshgrid(values, values))
    base, words = np.zeros(1024, values.dtype), np.ones(1024, values.dtype)
    base[: len(old)], words[: len(new)] = old, new
    words[len(new) :] = base[len(new) :]
    assert (_decode(_encode(name, words, base), base) == words).all()


@pytest.mark.parametrize("name", ALL)
def test_damaged_pieces_are_refused_and_touch_nothing_outside(name):
    rng = np.random.default_rng(1)
    for width in (2,) if FORMATS[name].dtype else WIDTHS:
        base, words = _pair(width, 0.4, 300)
        if name == "bf16-lossless":  # noise has no code
            words = (rng.standard_normal(300).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        data = _encode(name, words, base)
        if name not in ("raw", "xor-zstd") and not (name == "delta" and width == 1):
            assert data[0] > 0
        guarded = np.empty(len(base) + 64, base.dtype)

        def refuses(broken, base=base, guarded=guarded):
            guarded[:] = 7
            guarded[: len(base)] = base
            owned = np.concatenate([broken])  # of its exact size, so that a sanitizer sees a read beyond it
            try:
                decode_piece(owned, guarded[: len(base)].view(np.uint8), base.itemsize)
                return False
            except ArgumentError:
                return True
            finally:
                assert (guarded[len(base) :] == 7).all()

        cut = [refuses(data[:length]) for length in range(len(data))]
        assert all(cut) if name != "delta" or data[0] == 0 else cut[0]  # a stream of entries may end anywhere
        assert refuses(np.concatenate([data, data[-1:]])) or name == "delta"
        for _ in range(300):
            broken = data.copy()
            broken[rng.integers(0, len(broken), 3)] = rng.integers(0, 256, 3)
            refuses(broken)
            noise = rng.integers(0, 256, rng.integers(0, 2 * len(data)), dtype=np.uint8)
            noise[:1] = data[:1]
            refuses(noise)


@needs_zstd
def test_a_small_frame_cannot_claim_much_memory():
    bomb = np.frombuffer(b"\x04" + xor_planes.zstd.compress(bytes(2**26)), np.uint8)
    with pytest.raises(ArgumentError, match="are no xor-zstd encoding of an array of 1000 bytes"):
        decode_piece(bomb, np.zeros(1000, np.uint8), 2)


def test_without_zstd_the_format_is_unknown_and_refused(monkeypatch):
    assert set(known_formats()) >= {"raw", "bf16-lossless", "delta", "bitmap"}
    monkeypatch.setattr(xor_planes, "zstd", None)
    assert "xor-zstd" not in known_formats()
    with pytest.raises(ArgumentError, match="xor-zstd"):
        decode_piece(np.full(9, 4, np.uint8), np.zeros(8, np.uint8), 2)


def test_many_changes_take_little_more_than_a_byte_each():
    rng = np.random.default_rng(0)
    base = (rng.standard_normal(2**18).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    ratio = {}
    for share in (0.19, 0.73):
        words = base.copy()
        changed = rng.random(len(words)) < share
        words[changed] += rng.integers(1, 100, changed.sum()).astype(np.uint16)
        ratio[share] = words.nbytes / len(_encode("bitmap", words, base))
    assert ratio[0.19] > 6.2 and ratio[0.73] > 2.2


@pytest.mark.parametrize("width", WIDTHS)
def test_dense_pieces_of_a_delta_are_bitmaps(width):
    found = {}
    for share in (0.01, 0.3):
        base, words = _pair(width, share, 2**16, wide=0.0)
        blocks = (words != base).reshape(-1, 64 // width)[::64]
        count, changed, narrow, _ = _native.sample_changes(width, words.view(np.uint8), base.view(np.uint8), 64)
        assert (count, changed, narrow <= changed) == (blocks.size, blocks.sum(), True)
        data = _encode("delta", words, base)
        found[share] = data[0]
        assert (_decode(data, base) == words).all()
    assert found == {0.01: 1, 0.3: 3}
