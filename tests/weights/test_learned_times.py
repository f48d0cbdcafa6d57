"""What versions teach: a wrong prediction of one format is corrected, and versions travel raw where encoding is slower."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reshard.codecs.formats import FORMATS
from reshard.weights.routes.format_choice import FormatChoice
from reshard.weights.routes.learned_times import LearnedTimes, have_moved

WORDS = 2**18
NBYTES = 2 * WORDS
#: Bytes per second at which formats code on the simulated clock.
TRUE = {"raw": 2e10, "bf16-lossless": 4e8, "delta": 1.2e9, "bitmap": 1e9, "xor-zstd": 2e8}


def _versions():
    base = torch.randn(WORDS, generator=torch.Generator().manual_seed(0)).bfloat16()
    changed = torch.from_numpy(np.random.default_rng(0).random(WORDS) < 0.05)
    return torch.where(changed, base * 1.02, base).view(1, -1), base.view(1, -1)


def _make_choice(rates, link):
    choice = FormatChoice()
    known = dict.fromkeys(TRUE, "")
    report = {
        "known": known,
        "rates": {name: [[rates[name]] * 4] * 2 for name in known},
        "setups": {name: [1e-6, 1e-6] for name in known},
        "cores": ["machine", 8],
    }
    choice.agree({0: report})
    choice.add_transfer(NBYTES, NBYTES / link, NBYTES, is_first=False)
    return choice


@pytest.mark.parametrize(("name", "link"), [("bitmap", 5e7), ("bitmap", 3e8), ("bitmap", 1e9), ("delta", 1e9)])
def test_wrong_rate_of_a_format_is_corrected_after_two_versions(name, link):
    """The clock is simulated. Ranks choose alike, because all use what the first one has learned."""
    new, base = _versions()
    best = _make_choice(TRUE, link).choose(new, base)
    claimed = TRUE | {name: 3 * TRUE[name]}
    choices, learned = [_make_choice(claimed, link) for _ in range(3)], LearnedTimes()
    names = []
    for _ in range(12):
        chosen = []
        for choice in choices:
            choice.factors = learned.factors
            chosen.append(choice.choose(new, base))
        assert len({item.name for item in chosen}) == 1
        coding = chosen[0].coding
        names.append(coding.written)
        factors = learned.factors.get(coding.written, (1.0, 1.0))
        times = [
            {coding.written: (seconds / factor, 1e-6 + NBYTES / TRUE[coding.written])}
            for seconds, factor in zip((coding.encode, coding.decode), factors, strict=True)
        ]
        learned.add_coding(*times)
    assert names[0] == name and set(names[2:]) == {best.coding.written} != {name}
    assert learned.factors[name] == pytest.approx((3.0, 3.0), rel=0.3)


def test_factors_are_bounded_robust_and_forgotten():
    learned = LearnedTimes()
    for measured in (1e3, 1e-9, 1.0):  # a pause of the machine, a clock that stands still, and a good time
        learned.add_coding({"delta": (1.0, measured)}, {})
    assert learned.factors["delta"] == (1.0, 1.0)
    for _ in range(3):
        learned.add_coding({"delta": (1.0, 1e3)}, {"bitmap": (0.0, 1.0)})
    assert learned.factors == {"delta": (4.0, 1.0)}
    assert have_moved({}, learned.factors) and not have_moved({"delta": (3.9, 1.0)}, learned.factors)
    for _ in range(35):
        learned.add_coding({"bitmap": (1.0, 1.0)}, {})
    assert learned.factors["delta"][0] == pytest.approx(2.0, rel=0.05)


def _send(learned, num, encoded_seconds, raw_seconds, raw_bound=0.0):
    kinds = []
    for _ in range(num):
        kinds.append(learned.may_encode())
        learned.add_version(kinds[-1], encoded_seconds if kinds[-1] else raw_seconds, raw_bound)
    return kinds


def test_versions_travel_raw_where_encoded_ones_take_longer():
    kinds = _send(LearnedTimes(), 200, encoded_seconds=0.99, raw_seconds=1.0)  # less than 2 % are not worth it
    assert kinds[:4] == [True, True, False, True]
    assert kinds[100:].count(True) < 10


def test_raw_is_measured_only_where_its_bound_does_not_exclude_it():
    kinds = _send(LearnedTimes(), 200, encoded_seconds=0.5, raw_seconds=1.0)
    assert kinds.index(False) == 2 and kinds.count(False) == 1
    assert all(_send(LearnedTimes(), 200, encoded_seconds=0.5, raw_seconds=1.0, raw_bound=0.9))
    kinds = _send(LearnedTimes(), 200, encoded_seconds=0.7, raw_seconds=1.0)  # the time of raw may change
    assert 3 <= kinds.count(False) <= 4


def test_all_formats_have_a_true_rate_here():
    assert FORMATS.keys() == TRUE.keys()
