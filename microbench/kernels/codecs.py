"""Rates of the codecs on one core, compared with their NumPy references, which the tests folder has.

Rates count bytes of plain values. A kernel runs on the calling thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from microbench.harness.table import Table
from reshard.api.lossless.encoding import PIECE_BYTES
from reshard.cli.progress_bars import print_line, track
from reshard.codecs import BLOCK_CODECS, LOSSLESS_CODECS, BlockCodec, parse_codec
from reshard.codecs.delta import HEADER_BYTES, encode_delta
from reshard.codecs.exponents import encode_exponents
from reshard.codecs.formats import FORMATS, decode_piece, known_formats
from tests.reference.codecs import block_codecs as reference

#: Values of the timed arrays: 8 MiB of fp32, so that the caches of one core do not hold them.
NUM_VALUES = 2**21
REPEATS = 15
#: Least GB/s that codecs must reach, encoding and decoding: of fp32 values, or of bf16 values without loss.
TARGETS = {"int8x128": (6.0, 8.0), "int4x128": (5.0, 8.0), "bf16-lossless": (4.0, 8.0), "delta": (5.0, 5.0)}
#: Share of the values that differ from the base of a delta.
CHANGED = 0.01
#: Shares of changed words at which formats of differences are timed.
SHARES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 1.0)


def _rate(function: Callable[[], object], nbytes: int) -> float:
    """GB/s of CPU time, of the fastest of some runs: other processes of the machine only slow a run down."""
    times = []
    for _ in range(REPEATS):
        begun = time.thread_time()
        function()
        times.append(time.thread_time() - begun)
    return nbytes / max(min(times), 1e-9) / 1e9


def time_codec(codec: BlockCodec, dtype: torch.dtype) -> tuple[float, float, float, float]:
    """GB/s of encoding, of encoding with measured errors, of decoding, and of adding decoded values (fp32 only)."""
    plain = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(0)).to(dtype)
    encoded = torch.empty(codec.nbytes(plain.shape), dtype=torch.uint8)
    nbytes = plain.numel() * plain.element_size()
    return (
        _rate(lambda: codec.encode(plain, encoded), nbytes),
        _rate(lambda: codec.encode_measured(plain, encoded), nbytes),
        _rate(lambda: codec.decode(encoded, plain), nbytes),
        _rate(lambda: codec.decode(encoded, plain, accumulate=True), nbytes),
    )


def time_reference(codec: BlockCodec) -> float:
    """GB/s at which the NumPy reference encodes fp32 values."""
    rows = np.random.default_rng(0).standard_normal((NUM_VALUES // 16 // 128, 128)).astype(np.float32)
    return _rate(lambda: reference.encode(codec.kind, 128, rows), rows.nbytes)


def time_lossless(name: str) -> tuple[float, float, float]:
    """GB/s of encoding and decoding normally distributed bf16 values, and the ratio; ``delta`` of CHANGED values."""
    values = torch.randn(2 * NUM_VALUES, generator=torch.Generator().manual_seed(0)).bfloat16()
    words = values.view(torch.uint8).numpy()
    out = np.empty(len(words) + HEADER_BYTES, dtype=np.uint8)
    if name == "bf16-lossless":
        data = out[: encode_exponents(words, out)].copy()
        return (
            _rate(lambda: encode_exponents(words, out), len(words)),
            _rate(lambda: decode_piece(data, words, 2), len(words)),
            len(words) / len(data),
        )
    base = words.copy()
    base.view(np.uint16)[np.random.default_rng(0).random(len(values)) < CHANGED] += 1
    data = out[: encode_delta(words, base, out, 2)].copy()
    # applied again and again, the differences go on in the same way
    return (
        _rate(lambda: encode_delta(words, base, out, 2), len(words)),
        _rate(lambda: decode_piece(data, base, 2), len(words)),
        len(words) / len(data),
    )


def time_differences(name: str, share: float, width: int) -> tuple[float, float, float]:
    """GB/s of encoding and decoding differences of words, and the ratio; ``share`` of them moved by less than 128."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 2 ** (8 * width), 4 * NUM_VALUES // width, dtype=f"u{width}")
    words = np.where(rng.random(len(base)) < share, base + rng.integers(1, 100, len(base), dtype=base.dtype), base)
    shape = -1, PIECE_BYTES
    new, old, target = (item.view(np.uint8).reshape(shape) for item in (words, base, base.copy()))
    out = np.empty((len(new), PIECE_BYTES + HEADER_BYTES), dtype=np.uint8)

    def encode() -> list[int]:
        return [FORMATS[name].encode(*item, width) for item in zip(new, old, out, strict=True)]

    def decode() -> None:
        for encoded, piece in zip(data, target, strict=True):
            decode_piece(encoded, piece, width)

    data = [piece[:size].copy() for piece, size in zip(out, encode(), strict=True)]
    return (
        _rate(encode, new.size),
        _rate(decode, new.size),
        new.size / sum(map(len, data)),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add none."""


def run(options: argparse.Namespace) -> int:
    """Print a table of rates; returns 1 if a codec misses its target."""
    missed = []
    columns = {"GB/s of plain values": "<24", "encode": ">.1f", "measured": ">.1f", "decode": ">.1f", "add": ">6.1f"}
    table = Table(columns | {"NumPy encode": ">.2f"})
    for name in track(BLOCK_CODECS, "codecs"):
        codec = parse_codec(name)
        for dtype in (torch.float32, torch.bfloat16):
            encode, measured, decode, add = time_codec(codec, dtype)
            numpy = time_reference(codec) if dtype is torch.float32 else None
            table.add(f"{name:14} {str(dtype).removeprefix('torch.')}", encode, measured, decode, add, numpy)
            min_rates = TARGETS.get(name, (0.0, 0.0)) if dtype is torch.float32 else (0.0, 0.0)
            if encode < min_rates[0] or decode < min_rates[1]:
                missed.append(f"{name} encodes {encode:.1f} and decodes {decode:.1f} GB/s; targets {min_rates}")
    table = Table({"GB/s of bf16 values": "<24", "encode": ">.1f", "decode": ">.1f", "times smaller": ">.2f"})
    for name in LOSSLESS_CODECS:
        encode, decode, ratio = time_lossless(name)
        table.add(name, encode, decode, ratio)
        if encode < TARGETS[name][0] or decode < TARGETS[name][1]:
            missed.append(f"{name} encodes {encode:.1f} and decodes {decode:.1f} GB/s; targets {TARGETS[name]}")
    plain = np.zeros(4 * NUM_VALUES, dtype=np.uint8)
    print_line(
        f"GB/s of differences (a copy takes {_rate(plain.copy, len(plain)):.1f}), encode and decode, by changed words"
    )
    print(f"{'':17} {'  '.join(f'{share:11.0%}' for share in SHARES)}")
    for name in ("delta", "bitmap", *(["xor-zstd"] if "xor-zstd" in known_formats() else [])):
        for width in (1, 2, 4):
            rates = [time_differences(name, share, width) for share in SHARES]
            cells = [f"{encode:5.1f} {decode:5.1f}" for encode, decode, _ in rates]
            print_line(f"{name:9} {8 * width:2} bits  {'  '.join(cells)}")
    for text in missed:
        print(text, file=sys.stderr)
    return 1 if missed else 0
