"""Block codecs: bit for bit against the reference, their error bounds, bias, special values, and wrong arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reshard.codecs import BLOCK_CODECS, BlockCodec, parse_codec
from reshard.errors import ArgumentError
from tests.reference.codecs import block_codecs as reference

KINDS = ("int8", "int6", "int4", "fp8", "int4-bf16")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _hard_rows(rows, columns, seed=0):
    """fp32 rows: normal values of many scales, with blocks of zeros, denormals, huge values, NaN and infinities."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    values *= np.exp2(rng.integers(-140, 120, (rows, 1))).astype(np.float32)
    kind = rng.integers(0, 12, rows)
    values[kind == 0] = 0
    values[kind == 1] = rng.integers(0, 2**23, (int((kind == 1).sum()), columns)).astype(np.uint32).view(np.float32)
    values[kind == 2] = np.float32(3.4028235e38) * rng.choice([-1, 1, 0.5], (int((kind == 2).sum()), columns))
    values[kind == 3, ::40] = np.nan
    values[kind == 4, ::50] = -np.inf
    values[kind == 5] = 127.5 * np.exp2(
        rng.integers(-9, 9, (int((kind == 5).sum()), columns))
    )  # at the rounding limits
    values[kind == 6] = rng.integers(-16, 16, (int((kind == 6).sum()), columns)) * 0.5  # ties
    return values


def _same(a, b):
    return (a == b) | (np.isnan(a) & np.isnan(b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_native_codecs_equal_the_reference_bit_for_bit(kind, dtype):
    for values, columns in ((128, 256), (64, 96), (32, 45)):
        codec = BlockCodec(kind, values)
        source = torch.from_numpy(_hard_rows(600, columns)).to(DTYPES[dtype])
        encoded = torch.empty(codec.nbytes(source.shape), dtype=torch.uint8)
        assert codec.encode(source, encoded) == encoded.numel()
        wanted = reference.encode(kind, values, source.float().numpy())
        assert (encoded.numpy().reshape(wanted.shape) == wanted).all()
        target = torch.empty_like(source)
        codec.decode(encoded, target)
        plain = reference.decode(kind, values, wanted, columns, torch.finfo(DTYPES[dtype]).max)
        assert _same(target.float().numpy(), torch.from_numpy(plain).to(DTYPES[dtype]).float().numpy()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS[:4])
def test_every_scale_decodes_as_in_the_reference(kind, dtype):
    codec, rows = BlockCodec(kind, 32), 8 * 255
    data = np.random.default_rng(5).integers(0, 256, (rows, 1, codec.nbytes((1, 32))), dtype=np.uint8)
    data[:, 0, 0] = np.repeat(np.arange(1, 256), 8)
    found = torch.empty(rows, 32, dtype=DTYPES[dtype])
    codec.decode(torch.from_numpy(data.reshape(-1)), found)
    plain = reference.decode(kind, 32, data, 32, torch.finfo(DTYPES[dtype]).max)
    assert _same(found.float().numpy(), torch.from_numpy(plain).to(DTYPES[dtype]).float().numpy()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_errors_stay_within_the_documented_bound(kind):
    rows = _hard_rows(4000, 128, seed=1)
    codec = BlockCodec(kind)
    encoded, decoded = np.empty(codec.nbytes(rows.shape), np.uint8), np.empty_like(rows)
    codec.encode(rows, encoded)
    codec.decode(encoded, decoded)
    blocks, found = (array.reshape(-1, 32).astype(np.float64) for array in (rows, decoded))
    finite = np.isfinite(blocks).all(axis=1)
    assert np.isnan(found[~finite]).all()
    amax = np.abs(blocks[finite]).max(axis=1, keepdims=True)
    floor = 2.0**-123 if kind == "fp8" else 2.0**-127
    error = np.abs(found[finite] - blocks[finite])
    assert (error <= np.maximum(amax * codec.error_bound, floor)).all()
    assert (found[finite][amax[:, 0] == 0] == 0).all()
    assert error.max() > 0


@pytest.mark.parametrize(
    ("name", "limit"),
    [("int8x128", 0.009), ("int6x128", 0.036), ("int4x128", 0.14), ("int4x128-bf16", 0.10), ("fp8x128", 0.028)],
)
def test_errors_are_small_and_have_no_bias(name, limit):
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((2**13, 128)) * np.exp(rng.standard_normal((2**13, 1)))).ravel().astype(np.float32)
    codec = parse_codec(name)
    encoded, decoded = np.empty(codec.nbytes(x.shape), np.uint8), np.empty_like(x)
    sums = codec.encode_measured(x, encoded)
    codec.decode(encoded, decoded)
    error = decoded.astype(np.float64) - x
    relative = np.linalg.norm(error) / np.linalg.norm(x.astype(np.float64))
    assert relative < limit
    assert sums.relative_error == pytest.approx(relative, rel=1e-3)
    assert abs(error.mean()) < 3 * error.std() / np.sqrt(len(x))


@pytest.mark.parametrize(
    ("name", "lost"),
    [("int8x128", 0.0), ("fp8x128", 0.0007), ("int6x128", 0.002), ("int4x128-bf16", 0.037), ("int4x128", 0.07)],
)
def test_sums_of_positive_values_lose_what_the_docs_say(name, lost):
    x = np.random.default_rng(2).lognormal(size=(2**13, 128)).astype(np.float32)
    codec = parse_codec(name)
    encoded, decoded = np.empty(codec.nbytes(x.shape), np.uint8), np.empty_like(x)
    codec.encode(x, encoded)
    codec.decode(encoded, decoded)
    assert 1 - decoded.sum(dtype=np.float64) / x.sum(dtype=np.float64) == pytest.approx(lost, rel=0.1, abs=0.0001)


@pytest.mark.parametrize(("kind", "top"), [("int8", 127), ("int6", 31), ("int4", 7)])
def test_magnitudes_are_neither_cut_nor_raised(kind, top):
    """Values spread evenly over whole rounding intervals, so that truncation would show as a mean error."""
    rng = np.random.default_rng(4)
    x = (rng.choice([-1, 1], 2**20) * rng.uniform(0.5, top + 0.5, 2**20)).astype(np.float32)
    codec = BlockCodec(kind)
    encoded, decoded = np.empty(codec.nbytes(x.shape), np.uint8), np.empty_like(x)
    codec.encode(x, encoded)
    codec.decode(encoded, decoded)
    error = (np.abs(decoded) - np.abs(x)).reshape(-1, 32)[np.abs(x).reshape(-1, 32).max(axis=1) >= (top + 0.5) / 2]
    assert abs(error.mean()) < 3 * error.std() / np.sqrt(error.size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS[:4])
def test_decoded_values_do_not_change_when_encoded_again(kind, dtype):
    source = torch.from_numpy(_hard_rows(500, 128, seed=3)).to(DTYPES[dtype])
    codec, once, twice = BlockCodec(kind), torch.empty_like(source), torch.empty_like(source)
    encoded = torch.empty(codec.nbytes(source.shape), dtype=torch.uint8)
    codec.encode(source, encoded)
    codec.decode(encoded, once)
    codec.encode(once, encoded)
    codec.decode(encoded, twice)
    assert _same(once.float().numpy(), twice.float().numpy()).all()


def test_values_too_large_for_the_target_become_infinite_and_raised_ones_do_not():
    source = torch.full((4, 128), 65504.0)  # the largest of fp16, which coding raises
    source[1] *= 2
    source[2] *= -1e20
    source[3] = torch.finfo(torch.float32).max
    for kind in KINDS:
        codec, half, full = BlockCodec(kind), torch.empty(4, 128, dtype=torch.float16), torch.empty(4, 128)
        encoded = torch.empty(codec.nbytes(source.shape), dtype=torch.uint8)
        codec.encode(source, encoded)
        codec.decode(encoded, half)
        codec.decode(encoded, full)
        assert (half[0].float() - 65504).abs().max() <= 65504 * codec.error_bound, kind
        assert half[0].isfinite().all() and full.isfinite().all(), kind
        assert (half[1:].sign() * torch.inf == half[1:]).all() and half[2, 0] < 0 < half[1, 0], kind


def test_decoding_can_add_to_the_target():
    x = np.linspace(-3, 3, 300, dtype=np.float32).reshape(3, 100)
    codec = parse_codec("int8x64")
    encoded, plain = np.empty((3, 2, 66), np.uint8), np.empty_like(x)
    codec.encode(x, encoded)
    codec.decode(encoded, plain)
    target = x.copy()
    codec.decode(encoded, target, accumulate=True)
    assert (target == x + plain).all()


def test_names_parse_back_and_wrong_ones_are_refused():
    for name in (*BLOCK_CODECS, "int8x32", "int4x64-bf16"):
        assert parse_codec(name).name == name
    for name in ("int8", "int8x16", "fp8x128-bf16", "zfp", None):
        with pytest.raises(ArgumentError, match="there is no codec"):
            parse_codec(name)


def test_arrays_that_do_not_fit_are_refused():
    codec = parse_codec("int8x128")
    with pytest.raises(ArgumentError, match="encodes float32, bfloat16, float16, not int64"):
        codec.encode(np.zeros(128, np.int64), np.empty(132, np.uint8))
    with pytest.raises(ArgumentError, match=r"in 132 bytes, but the encoded array has 131"):
        codec.encode(np.zeros(128, np.float32), np.empty(131, np.uint8))
    with pytest.raises(ArgumentError, match="contiguous"):
        codec.encode(torch.zeros(128, 2).t(), torch.empty(264, dtype=torch.uint8))
