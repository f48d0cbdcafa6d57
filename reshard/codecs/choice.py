"""Choose the lossless format of a tensor by predicted time: encoding, the coded bytes over the link, and decoding."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from reshard.codecs.delta import HEADER_BYTES
from reshard.codecs.exponents import encode_exponents
from reshard.codecs.formats import FORMATS

#: Shares of changed words at which rates are measured; between and beyond them, the time of a byte is linear.
SHARES = (0.02, 0.5)
#: ``{format: (rates of encoding, rates of decoding)}``, in plain bytes per second at each of :data:`SHARES`.
FormatRates = Mapping[str, tuple[tuple[float, ...], ...]]
#: Formats whose time depends on the number of words, not on that of bytes; rates are those of words of 2 bytes.
PER_WORD = frozenset(("delta", "bitmap"))
#: Formats whose size follows from the shares of a sample.
SIZED_BY_SHARES = frozenset(("raw", "delta", "bitmap"))
#: Tensors of fewer bytes travel as ``delta``: their time hardly counts.
SMALL_BYTES = 2**16
#: A format other than raw is chosen only if its predicted time is below this fraction of the raw time.
MIN_GAIN = 0.97
#: A sample has at most so many words, and at most this part of the tensor.
SAMPLE_WORDS, SAMPLE_PART = 4096, 1 / 16
#: Bits that zstd takes for a change beyond the entropy of the bytes if few words changed, fitted to updates of a GPT.
BITS_PER_RARE_CHANGE = 10


@dataclass(frozen=True)
class Sample:
    """What a sample of a tensor says about its changes.

    Attributes:
        changed: share of the words that changed. fits: share of those whose difference fits a signed byte.
        sizes: coded bytes per plain byte of the formats outside :data:`SIZED_BY_SHARES`, as far as they are known.
    """

    changed: float
    fits: float
    sizes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rates:
    """The rates of a transfer, in plain bytes of all tensors per second.

    Attributes:
        link: at which the tensors travel raw. formats: at which one rank encodes and decodes.
        encoders, decoders: by how many times faster than one rank all ranks together do.
    """

    link: float
    formats: FormatRates
    encoders: float = 1.0
    decoders: float = 1.0


def find_size(name: str, width: int, sample: Sample) -> float:
    """Predict the coded bytes of a format per plain byte, for words of ``width`` bytes."""
    changed, wide = sample.changed, sample.changed * (1 - sample.fits)
    if name == "delta":
        long_gap = (1 - changed) ** 255  # the chance that 255 words after a changed one did not change
        skips = changed * long_gap / (1 - long_gap) if changed else 0.0
        size = (2 * changed + skips) / width + wide
    elif name == "bitmap":
        size = (1 / 8 + changed) / width + wide
    else:
        size = 1.0 if name == "raw" else sample.sizes[name]
    return min(size, 1.0)


def predict_seconds(name: str, numel: int, width: int, sample: Sample, rates: Rates) -> float:
    """Predict the time that a tensor adds to a transfer in a format."""

    def code(measured: tuple[float, ...]) -> float:
        first, last = 1 / measured[0], 1 / measured[-1]
        slope = (last - first) / (SHARES[-1] - SHARES[0])
        per_byte = max(first + slope * (sample.changed - SHARES[0]), min(first, last) / 2)
        return per_byte * (2 / width if name in PER_WORD else 1)

    encode, decode = rates.formats[name]
    per_byte = (
        code(encode) / rates.encoders + find_size(name, width, sample) / rates.link + code(decode) / rates.decoders
    )
    return numel * width * per_byte


def choose_format(numel: int, width: int, sample: Sample, rates: Rates, formats: Collection[str]) -> str:
    """The format in which a tensor travels.

    Args:
        numel, width: number and bytes of the words of the tensor. formats: those that all ranks know and that code its
            dtype, ``"raw"`` among them.
    """
    if "delta" in formats and (numel * width < SMALL_BYTES or not sample.changed):
        return "delta"
    known = [name for name in FORMATS if name in formats and name in rates.formats]
    known = [name for name in known if name in SIZED_BY_SHARES or name in sample.sizes]
    seconds = {name: predict_seconds(name, numel, width, sample, rates) for name in known}
    best = min(seconds, key=seconds.__getitem__, default="raw")
    return best if seconds.get(best, 0.0) < MIN_GAIN * seconds.get("raw", 0.0) else "raw"


def take_sample(words: np.ndarray, base: np.ndarray | None, width: int, formats: Collection[str]) -> Sample:
    """Sample the changes of a tensor, at the same places on all ranks that hold it.

    Args:
        words, base: flat uint8 of equal size. Without a base, all words count as changed.
        width: bytes of a word. formats: those whose size is wanted.
    """
    numel = len(words) // width
    step = int(numel / max(min(SAMPLE_PART * numel, SAMPLE_WORDS), 1)) | 1  # odd, so that it meets all columns
    new = words.view(f"u{width}")[::step].copy()
    changed = fits = 1.0
    sizes = {}
    if base is not None and numel:
        old = base.view(f"u{width}")[::step]
        steps = (new - old)[new != old].view(f"i{width}")
        changed = len(steps) / len(new)
        fits = float(((steps >= -128) & (steps < 128)).mean()) if len(steps) else 1.0
        if "xor-zstd" in formats:
            bits = BITS_PER_RARE_CHANGE * changed * (1 - changed) ** 8
            sizes["xor-zstd"] = (bits + _entropy_bits(new ^ old)) / (8 * width)
    if "bf16-lossless" in formats and numel:
        out = np.empty(new.nbytes + HEADER_BYTES, dtype=np.uint8)
        sizes["bf16-lossless"] = encode_exponents(new.view(np.uint8), out) / new.nbytes
    return Sample(changed if numel else 0.0, fits, sizes)


def _entropy_bits(words: np.ndarray) -> float:
    """The entropy of the bytes of words, place by place, in bits per word."""
    bits = 0.0
    for place in range(words.itemsize):
        counts = np.bincount((words >> (8 * place)) & 255)
        shares = counts[counts > 0] / len(words)
        bits -= float((shares * np.log2(shares)).sum())
    return bits
