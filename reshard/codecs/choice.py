"""Choose the lossless format of a tensor by predicted time: encoding, the coded bytes over the link, and decoding."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from reshard.codecs.delta import HEADER_BYTES
from reshard.codecs.formats import FORMATS

#: Shares of changed words at which rates are measured; between and beyond them, the time of a byte is linear.
SHARES = (0.02, 0.5)
#: ``{format: (rates of encoding, rates of decoding)}``, in plain bytes per second at each of :data:`SHARES`.
FormatRates = Mapping[str, tuple[tuple[float, ...], ...]]
#: Formats whose time depends on the number of words, not on that of bytes; rates are those of words of 2 bytes.
PER_WORD = frozenset(("delta", "bitmap"))
#: Formats whose size follows from the shares of a sample; that of others is measured by encoding the sample.
SIZED_BY_SHARES = frozenset(("raw", "delta", "bitmap"))
#: Tensors of fewer bytes travel as ``delta``: their time hardly counts.
SMALL_BYTES = 2**16
#: A format other than raw is chosen only if its predicted time is below this fraction of the raw time.
MIN_GAIN = 0.97
#: A sample has this many runs of so many words, at equal distances.
RUNS, RUN_WORDS = 16, 2048


@dataclass(frozen=True)
class Sample:
    """What a sample of a tensor says about its changes.

    Attributes:
        changed: share of the words that changed. fits: share of those whose difference fits a signed byte.
        sizes: coded bytes per plain byte of the formats outside :data:`SIZED_BY_SHARES`.
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
    new = _take_runs(words.view(f"u{width}"))
    old = None if base is None else _take_runs(base.view(f"u{width}"))
    changed = fits = 1.0
    if old is not None:
        steps = (new - old)[new != old].view(f"i{width}")
        changed = len(steps) / max(len(new), 1)
        fits = float(((steps >= -128) & (steps < 128)).mean()) if len(steps) else 1.0
    sizes = {}
    out = np.empty(new.nbytes + HEADER_BYTES, dtype=np.uint8)
    for name in formats if len(new) and changed else ():
        if name not in SIZED_BY_SHARES and (old is not None or not FORMATS[name].has_base):
            plain, earlier = new.view(np.uint8), (new if old is None else old).view(np.uint8)
            sizes[name] = FORMATS[name].encode(plain, earlier, out, width) / new.nbytes
    return Sample(changed, fits, sizes)


def _take_runs(words: np.ndarray) -> np.ndarray:
    if len(words) <= RUNS * RUN_WORDS:
        return words
    starts = np.linspace(0, len(words) - RUN_WORDS, RUNS).astype(np.int64)
    return np.concatenate([words[start : start + RUN_WORDS] for start in starts])
