"""Choose the lossless format of a tensor by predicted time: encoding, the encoded bytes over the link, and decoding."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from reshard import _native
from reshard.codecs.formats import DENSE_SHARES, FORMATS

#: Shares of changed words at which rates are measured; between them, the time of a byte is linear.
SHARES = (0.02, 0.08, 0.5)
#: ``{format: (rates of encoding, rates of decoding)}``, in plain bytes per second at each of :data:`SHARES`.
FormatRates = Mapping[str, tuple[tuple[float, ...], ...]]
#: Formats whose time depends on the number of words, not on that of bytes; rates are those of words of 2 bytes.
PER_WORD = frozenset(("delta", "bitmap"))
#: Seconds in which zstd sets up its state, each for encoding and decoding: much for a tensor that is one small piece.
ZSTD_SECONDS = 2.5e-4
#: A format other than raw is chosen only if its predicted time is below this fraction of the raw time.
MIN_GAIN = 0.97
#: A sample has about this many blocks of this many bytes, at equal distances.
NUM_BLOCKS, BLOCK_BYTES = 1024, 64
#: Least distance of the sampled blocks, in blocks.
MIN_DISTANCE = 4
#: Seconds that encoding and decoding a region take in addition to the time of its bytes.
ENCODE_SECONDS, DECODE_SECONDS = 3e-5, 2e-5
#: Encoded bytes per plain byte beyond which a bitmap is given up.
MAX_BITMAP_SIZE = 0.75
#: Encoded bytes per plain byte of bf16 weights without a base.
BF16_SIZE = 0.71
#: Entropy of normally distributed integers less the log2 of their mean magnitude.
BITS_BEYOND_DISTANCE = 2.37
#: Bits that zstd takes for a change beyond the entropy if few words changed, fitted to updates of a GPT.
BITS_PER_RARE_CHANGE = 10


@dataclass(frozen=True)
class Sample:
    """What a sample of a tensor says about its changes.

    Attributes:
        changed: share of the words that changed.
        fits: share of those whose difference fits a signed byte.
        distance: mean magnitude of the lowest byte of the differences, as a signed integer.
    """

    changed: float
    fits: float
    distance: float = 64.0


@dataclass(frozen=True)
class Rates:
    """The rates of a transfer, in plain bytes of all tensors per second.

    Attributes:
        link: at which the tensors travel raw.
        formats: at which one rank encodes and decodes.
        encoders, decoders: by how many times faster than one rank all ranks together do.
    """

    link: float
    formats: FormatRates
    encoders: float = 1.0
    decoders: float = 1.0


def find_size(name: str, width: int, sample: Sample) -> float:
    """Predict the encoded bytes of a format per plain byte, for words of ``width`` bytes."""
    changed, wide = sample.changed, sample.changed * (1 - sample.fits)
    if name == "delta" and changed <= DENSE_SHARES[width]:
        long_gap = (1 - changed) ** 255  # the chance that 255 words after a changed one did not change
        skips = changed * long_gap / (1 - long_gap) if changed else 0.0
        size = (2 * changed + skips) / width + wide
    elif name in ("delta", "bitmap"):
        size = (1 / 8 + changed) / width + wide
        size = size if size <= MAX_BITMAP_SIZE else 1.0
    elif name == "xor-zstd":
        shares = [share for share in (changed, 1 - changed) if share]
        bits = -sum(share * math.log2(share) for share in shares)  # which words changed
        # by how much, if the differences are normally distributed
        bits += changed * min(math.log2(max(sample.distance, 1.0)) + BITS_BEYOND_DISTANCE, 8.0)
        size = (bits + BITS_PER_RARE_CHANGE * changed * (1 - changed) ** 8) / (8 * width) + wide * (width - 1) / width
    else:
        size = BF16_SIZE if name == "bf16-lossless" else 1.0
    return min(size, 1.0)


def predict_seconds(name: str, numel: int, width: int, sample: Sample, rates: Rates) -> float:
    """Predict the time that a tensor adds to a transfer in a format."""

    def code(measured: tuple[float, ...]) -> float:
        place = 0 if sample.changed < SHARES[1] else 1
        low, high = 1 / measured[place], 1 / measured[place + 1]
        part = (min(sample.changed, SHARES[2]) - SHARES[place]) / (SHARES[place + 1] - SHARES[place])
        per_byte = max(low + part * (high - low), min(low, high) / 2)
        return per_byte * (2 / width if name in PER_WORD else 1)

    if name == "delta" and sample.changed > DENSE_SHARES[width]:
        name = "bitmap" if "bitmap" in rates.formats else name
    encode, decode = rates.formats[name]
    per_byte = (
        code(encode) / rates.encoders + find_size(name, width, sample) / rates.link + code(decode) / rates.decoders
    )
    fixed = ENCODE_SECONDS / rates.encoders + DECODE_SECONDS / rates.decoders
    if name == "xor-zstd":
        fixed += ZSTD_SECONDS * (1 / rates.encoders + 1 / rates.decoders)
    return fixed + numel * width * per_byte


def choose_format(numel: int, width: int, sample: Sample, rates: Rates, formats: Collection[str]) -> str:
    """The format in which a tensor travels.

    Args:
        numel: number of words of the tensor.
        width: bytes of a word.
        sample: what a sample of the tensor's words shows.
        rates: rates of the formats and of the link.
        formats: names of the formats that all ranks know and that encode the dtype, with ``"raw"``.
    """
    known = [name for name in FORMATS if name in formats and name in rates.formats]
    if "bitmap" in known and sample.changed > DENSE_SHARES[width]:
        known = [name for name in known if name != "delta"]  # its pieces would be bitmaps, too
    seconds = {name: predict_seconds(name, numel, width, sample, rates) for name in known}
    return min(seconds, key=seconds.__getitem__, default="raw")


def take_sample(words: np.ndarray, base: np.ndarray | None, width: int, every: int | None = None) -> Sample:
    """Sample the changes of a tensor, at the same places on all ranks that hold it.

    Args:
        words, base: flat uint8 of equal size. Without a base, all words count as changed.
        width: bytes of a word.
        every: distance of the sampled blocks, in blocks of 64 bytes; default: :func:`distance_of`.
    """
    if base is None or not len(words):
        return Sample(float(base is None), 0.0)
    pad = -len(words) % BLOCK_BYTES if len(words) < BLOCK_BYTES else 0
    if pad:
        words, base = np.pad(words, (0, pad)), np.pad(base, (0, pad))
    every = every or distance_of(len(words))
    count, changed, narrow, distance = _native.sample_changes(width, words, base, every)
    if not changed:
        return Sample(0.0, 1.0)
    return Sample(changed / count, narrow / changed, distance / changed)


def distance_of(nbytes: int) -> int:
    """The distance of the sampled blocks of an array, in blocks of 64 bytes."""
    return max(MIN_DISTANCE, nbytes // (BLOCK_BYTES * NUM_BLOCKS))
