"""The choice of a lossless format: sizes that the encoders confirm, and the fastest by the given rates."""

from __future__ import annotations

import numpy as np
import pytest

from reshard.codecs.delta import HEADER_BYTES
from reshard.codecs.encoded_ratios import Sample
from reshard.codecs.formats import FORMATS, known_formats
from reshard.codecs.lossless_choice import (
    SHARES,
    TransferRates,
    choose_format,
    predict_ratio,
    predict_seconds,
    take_sample,
)
from reshard.codecs.rates import measure_format_rates, slowest_rates

NUM_WORDS = 2**20
#: About those of one core, in bytes per second.
MEASURED = {
    "raw": ((12e9,) * 4, (12e9,) * 4),
    "bf16-lossless": ((6e9,) * 4, (7e9,) * 4),
    "delta": ((6e9, 2.5e9, 4e9, 4e9), (12e9, 5e9, 4e9, 4e9)),
    "bitmap": ((4e9,) * 4, (4e9,) * 4),
    "xor-zstd": ((1e9, 0.7e9, 0.4e9, 0.4e9), (2e9, 1.5e9, 0.8e9, 0.8e9)),
}


def _versions(share, width=2):
    rng = np.random.default_rng(int(1000 * share))
    base = (rng.standard_normal(NUM_WORDS).astype(np.float32).view(np.uint32) >> (32 - 8 * width)).astype(f"u{width}")
    words = base.copy()
    changed = rng.random(NUM_WORDS) < share
    words[changed] += np.rint(rng.standard_normal(changed.sum()) * 60).astype(np.int16).astype(words.dtype)
    return words.view(np.uint8), base.view(np.uint8)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 0.9])
def test_predicted_sizes_are_those_of_the_encoders(width, share):
    words, base = _versions(share, width)
    formats = [name for name in known_formats() if FORMATS[name].dtype == "" or width == 2]
    sample = take_sample(words, base, width)
    for name in formats:
        size = FORMATS[name].encode(words, base, np.empty(len(words) + HEADER_BYTES, np.uint8), width) / len(words)
        assert predict_ratio(name, width, sample) == pytest.approx(
            size, rel=0.3 if name == "xor-zstd" else 0.2, abs=0.002
        ), name


def _choose(changed, gbit, formats=tuple(FORMATS), numel=2**24, **ranks):
    rates = TransferRates(gbit * 1e9 / 8, MEASURED, **ranks)
    return choose_format(numel, 2, Sample(changed, 0.95, 8.0), rates, formats)


def test_fewer_bytes_win_on_slow_links_and_less_work_on_fast_ones():
    without = [name for name in FORMATS if name != "xor-zstd"]
    assert [_choose(changed, 0.1, without) for changed in (0.01, 0.3, 0.75)] == ["delta", "bitmap", "bitmap"]
    assert _choose(0.75, 0.1) == "xor-zstd" and _choose(0.01, 0.1) == "delta"
    assert _choose(0.75, 1.0, without) == "bitmap"
    assert _choose(0.75, 1000.0) == "raw" and _choose(0.0, 10.0) == "delta"
    assert _choose(1.0, 0.1, ("raw", "delta")) == "delta"  # whose dense pieces are bitmaps
    assert _choose(1.0, 0.1, ("raw", "bf16-lossless")) == "bf16-lossless"
    # the same work takes less time if many ranks share it
    many = _choose(0.75, 20.0, without, encoders=64, decoders=64)
    assert (_choose(0.75, 20.0, without), many) == ("raw", "bitmap")


def test_the_choice_is_never_predicted_to_be_slower_than_raw_or_far_from_the_fastest():
    rng = np.random.default_rng(0)
    for _ in range(300):
        sample = Sample(rng.random(), rng.random(), 127 * rng.random())
        rates = TransferRates(10 ** rng.uniform(6, 11), MEASURED, rng.integers(1, 64), rng.integers(1, 64))
        seconds = {name: predict_seconds(name, 2**24, 2, sample, rates) for name in FORMATS}
        chosen = seconds[choose_format(2**24, 2, sample, rates, list(FORMATS))]
        assert chosen <= seconds["raw"] and chosen <= min(seconds.values()) / 0.97


def test_the_time_of_a_share_lies_between_those_of_the_measured_shares_beside_it():
    rates = {"bitmap": ((4e9, 2e9, 4e9, 1e9),) * 2}
    seconds = []
    for changed in (*SHARES, 0.725, 1.0):
        sample = Sample(changed, 1.0)
        seconds.append(predict_seconds("bitmap", 2**20, 2, sample, TransferRates(1e30, rates)) * 1e9 / 2**22)
    assert seconds == pytest.approx([1 / 4, 1 / 2, 1 / 4, 1.0, (1 / 4 + 1.0) / 2, 1.0])


def test_samples_cover_the_tensor_and_are_the_same_on_all_ranks():
    base = np.zeros(2**22, np.uint16)
    words = base.copy()
    words[-(2**21) :] += 1  # half of the rows changed
    words[:20] += 300
    first, again = (take_sample(words.view(np.uint8), base.view(np.uint8), 2) for _ in range(2))
    assert first == again and first.changed == pytest.approx(0.5, abs=0.02) and 0.97 < first.fits < 1
    empty = take_sample(np.empty(0, np.uint8), np.empty(0, np.uint8), 4)
    assert empty.changed == 0 and take_sample(words.view(np.uint8), None, 2).changed == 1


def test_rates_are_those_of_the_slowest_rank_for_formats_that_all_have():
    rates = measure_format_rates()
    assert rates is measure_format_rates() and set(rates) >= {"raw", "delta", "bitmap", "bf16-lossless"}
    assert all(rate > 1e6 for sides in rates.values() for side in sides for rate in side)
    slow = {"raw": ((1e9, 9e9, 3e9, 3e9), (2e9, 1e9, 1e9, 1e9)), "delta": ((1.0,) * 4,) * 2}
    fast = {"raw": ((2e9,) * 4, (2e9,) * 4), "bitmap": ((1.0,) * 4,) * 2}
    assert (
        slowest_rates([slow, fast]) == {"raw": ((1e9, 2e9, 2e9, 2e9), (2e9, 1e9, 1e9, 1e9))} and slowest_rates([]) == {}
    )
