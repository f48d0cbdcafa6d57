"""Choose the lossless format of a tensor by predicted time: encoding, the encoded bytes over the link, and decoding."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from reshard import _native
from reshard.codecs.encoded_ratios import DENSE_SHARES, Sample
from reshard.codecs.formats import FORMATS

#: Rates are measured at these shares of changed words. Between them, the time of a byte is interpolated linearly.
SHARES = (0.02, 0.08, 0.5, 0.95)
#: ``{format: (rates of encoding, rates of decoding)}``, in plain bytes per second at each of :data:`SHARES`.
FormatRates = Mapping[str, tuple[tuple[float, ...], ...]]
#: ``{format: seconds that encoding, and decoding, a region take in addition to the time of its bytes}``.
SetupSeconds = Mapping[str, tuple[float, ...]]
#: ``{format: how many times longer than predicted encoding, and decoding, take}``.
CodingFactors = Mapping[str, tuple[float, float]]
#: A format other than raw is chosen only if its predicted time is below this fraction of the raw time.
MIN_GAIN = 0.97
#: The format of earlier versions stays unless another one is predicted to take less than this fraction of its time:
#: times are measured with errors, and a change of formats costs new buffers.
MIN_CHANGE = 0.93
#: A sample has about this many blocks of this many bytes, at equal distances.
NUM_BLOCKS, BLOCK_BYTES = 1024, 64
#: Smallest distance of the sampled blocks, in blocks.
MIN_DISTANCE = 4


@dataclass(frozen=True)
class TransferRates:
    """The rates of a transfer, in plain bytes of all tensors per second.

    Attributes:
        link: rate at which the tensors travel raw.
        formats: rates at which one rank encodes and decodes.
        encoders, decoders: how many times faster than one rank all ranks together encode and decode.
        setups: times of each region on one rank; 0 for a format that is not there.
        factors: how many times longer than that encoding, and decoding, take; 1 for a format that is not there.
    """

    link: float
    formats: FormatRates
    encoders: float = 1.0
    decoders: float = 1.0
    setups: SetupSeconds = field(default_factory=dict)
    factors: CodingFactors = field(default_factory=dict)


@dataclass(frozen=True)
class CodingSeconds:
    """The time in which one rank encodes, and decodes, a tensor, and the format that it writes."""

    written: str
    encode: float
    decode: float


def predict_ratio(name: str, width: int, sample: Sample) -> float:
    """Predict the encoded bytes of a format per plain byte, for words of ``width`` bytes."""
    return min(FORMATS[name].predict_ratio(width, sample), 1.0)


def predict_seconds(name: str, numel: int, width: int, sample: Sample, rates: TransferRates) -> float:
    """Predict the time that a tensor adds to a transfer in a format."""
    return add_link(predict_coding(name, numel, width, sample, rates), numel, width, sample, rates)


def add_link(coding: CodingSeconds, numel: int, width: int, sample: Sample, rates: TransferRates) -> float:
    """The time that a tensor adds to a transfer, from its predicted coding."""
    return (
        coding.encode / rates.encoders
        + coding.decode / rates.decoders
        + numel * width * predict_ratio(coding.written, width, sample) / rates.link
    )


def predict_coding(name: str, numel: int, width: int, sample: Sample, rates: TransferRates) -> CodingSeconds:
    """Predict how long one rank takes to encode, and to decode, a tensor in a format."""
    if FORMATS[name].dense_format in rates.formats and sample.changed > DENSE_SHARES[width]:
        name = FORMATS[name].dense_format
    known = FORMATS[name]

    def seconds_per_byte(measured: tuple[float, ...]) -> float:
        index = sum(sample.changed >= share for share in SHARES[1:-1])
        low, high = 1 / measured[index], 1 / measured[index + 1]
        part = (min(sample.changed, SHARES[-1]) - SHARES[index]) / (SHARES[index + 1] - SHARES[index])
        per_byte = max(low + part * (high - low), min(low, high) / 2)
        return per_byte * (2 / width if known.is_timed_by_words else 1)

    setups, factors = rates.setups.get(name, (0.0, 0.0)), rates.factors.get(name, (1.0, 1.0))
    encode, decode = (
        factors[side] * (setups[side] + numel * width * seconds_per_byte(rates.formats[name][side]))
        for side in range(2)
    )
    return CodingSeconds(name, encode, decode)


def choose_format(
    numel: int, width: int, sample: Sample, rates: TransferRates, formats: Collection[str], last: str | None = None
) -> str:
    """The format in which a tensor travels.

    Args:
        numel: number of words of the tensor.
        width: bytes of a word.
        sample: what a sample of the tensor's words shows.
        rates: rates of the formats and of the link.
        formats: names of the formats that all ranks know and that encode the dtype, with ``"raw"``.
        last: format of earlier versions, if any.
    """
    known = [name for name in FORMATS if name in formats and name in rates.formats]
    if sample.changed > DENSE_SHARES[width]:  # pieces would be of the dense format, too
        known = [name for name in known if FORMATS[name].dense_format not in known]
    seconds = {name: predict_seconds(name, numel, width, sample, rates) for name in known}
    best = min(seconds, key=seconds.__getitem__, default="raw")
    return last if last in seconds and seconds[best] > MIN_CHANGE * seconds[last] else best


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
