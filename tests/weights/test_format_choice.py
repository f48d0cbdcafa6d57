"""Formats of regions of weights: exact codes whatever the strides, and the choice by predicted time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reshard.api.lossless.buckets import bytes_of
from reshard.codecs.formats import FORMATS, known_formats
from reshard.errors import ArgumentError
from reshard.weights.routes import encoded_regions
from reshard.weights.routes.format_choice import FormatChoice, RegionChoice, find_share, measure_setups, report_formats

SHAPES = [(), (1,), (7,), (0, 3), (5, 300), (3, 4, 50), (2, 3000)]


def _pair(shape, dtype):
    generator = torch.Generator().manual_seed(1)
    base = (50 * torch.randn(shape, generator=generator)).to(dtype)
    moved = base * 1.01 if base.is_floating_point() else base + 1
    new = torch.where(torch.rand(shape, generator=generator) < 0.3, moved, base)
    return new, base


def _strided(tensor):
    """The same values in memory with gaps, and with the dims in another order."""
    if tensor.ndim < 2:
        return tensor.repeat_interleave(2)[::2] if tensor.ndim else tensor
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", sorted(known_formats()))
def test_codes_of_regions_are_exact_whatever_the_strides(monkeypatch, shape, name):
    monkeypatch.setattr(encoded_regions, "PIECE_BYTES", 512)  # several pieces, also of one row
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int8):
        if FORMATS[name].dtype and dtype != torch.bfloat16:
            continue
        new, base = _pair(shape, dtype)
        for source, target in ((new, base), (_strided(new), base), (new, _strided(base)), (_strided(new), base)):
            out, found = np.zeros(encoded_regions.largest_size(new), dtype=np.uint8), target.clone()
            found = _strided(found) if target is not base else found
            size = encoded_regions.encode_region(source, target, name, out)
            assert encoded_regions.decode_region(out, found) == size
            assert bytes_of(found).tobytes() == bytes_of(new).tobytes()
    if new.numel():
        with pytest.raises(ArgumentError):
            encoded_regions.decode_region(out[: size - 1], base.clone())


def test_samples_are_those_of_the_region_whatever_the_strides():
    new, base = _pair((700, 333), torch.bfloat16)
    sample = encoded_regions.sample_region(new, base)
    assert (
        sample
        == encoded_regions.sample_region(_strided(new), base)
        == encoded_regions.sample_region(_strided(new), _strided(base))
    )
    assert sample.changed == pytest.approx(0.3, abs=0.02)


def test_ranks_with_other_histories_agree_on_the_rate_of_the_link():
    """A rank that missed a version knows another rate; holders of a region would then choose different formats."""
    choices = [FormatChoice(), FormatChoice()]
    choices[0].add_transfer(10**6, 10.0, 10**6, is_first=True)
    for known in ([1e5, None], [None, 1e5]):
        reports = {rank: {**report_formats(), "link_rate": rate} for rank, rate in enumerate(known)}
        for choice in choices:
            choice.agree(reports)
        assert [choice.link_rate for choice in choices] == [1e5, 1e5]


def _choice():
    choice = FormatChoice()
    reports = {
        0: {"known": known_formats(), "rates": {}},
        1: {"known": {"raw": "", "delta": "", "bitmap": ""}, "rates": {}},
    }
    for report in reports.values():
        report["rates"] = {name: [[5e9] * 4] * 2 for name in report["known"]}
        report["setups"] = {name: [3e-5, 2e-5] for name in report["known"]}
        report["cores"] = ["machine", 2]
    choice.agree(reports)
    return choice


def test_choice_follows_the_link_and_never_names_a_format_that_a_rank_lacks():
    new, base = _pair((700, 333), torch.bfloat16)
    choice = _choice()
    assert choice.choose(new, base) == RegionChoice("raw") and choice.may_pay()  # the link is not known yet
    choice.add_transfer(10**6, 1.0, 10**6, is_first=True)
    chosen = choice.choose(new, base)
    assert chosen.name == "bitmap" and chosen.saved > 0.2
    assert choice.choose(new, None).name == "raw"
    for _ in range(5):
        choice.add_transfer(10**6, 1e-6, 10**6, is_first=False)
    choice.add_transfer(10, 1.0, 10**6, is_first=False)  # too few bytes to tell
    assert choice.link_rate == 1e12 and not choice.may_pay()
    assert choice.choose(new, base).saved < 0


def test_a_format_stays_until_another_is_clearly_faster():
    new, base = _pair((700, 333), torch.bfloat16)
    choice = _choice()
    choice.add_transfer(10**6, 0.01, 10**6, is_first=True)  # 1e8 bytes a second
    sample = choice.choose(new, base).sample

    def choose_after(last, factor):
        choice.factors = {"bitmap": (factor, factor)}
        return choice.choose(base, base, last, sample).name  # a new sample would find no changes

    factors = np.geomspace(1, 256, 200)
    kept = [factor for factor in factors if choose_after("bitmap", factor) == "bitmap"]
    changed = [factor for factor in factors if choose_after("delta", factor) == "bitmap"]
    assert changed and max(changed) < max(kept) < 256
    assert choice.choose(base, base, "bitmap").sample.changed == 0.0


def test_small_regions_are_not_left_out_where_differences_pay():
    choice = _choice()
    choice.add_transfer(10**6, 0.5, 10**6, is_first=True)
    new, base = _pair((32,), torch.bfloat16)
    chosen = choice.choose(new, base)  # 32 us on the link
    assert chosen.name == "delta" and -1e-4 < chosen.saved < 0
    assert choice.choose(new, None).name == "raw"


def test_times_of_small_regions_are_measured_and_those_of_the_slowest_rank_count():
    setups = measure_setups()
    assert setups is measure_setups() and setups.keys() == known_formats().keys()
    assert all(1e-7 < seconds < 0.1 for sides in setups.values() for seconds in sides)
    new, base = _pair((100, 100), torch.bfloat16)
    saved = []
    for slowest in (1e-5, 1e-2):  # a rank whose small regions take longer than the link
        choice = FormatChoice()
        reports = {rank: {**report_formats(), "rates": {name: [[5e9] * 4] * 2 for name in setups}} for rank in range(2)}
        reports[1]["setups"] = {name: [slowest] * 2 for name in setups}
        choice.agree(reports)
        choice.add_transfer(10**6, 1.0, 10**6, is_first=True)
        saved.append(choice.choose(new, base).saved)
    assert saved[0] > 0 > saved[1]


def test_comparisons_that_end_in_raw_become_rare():
    choice = _choice()
    choice.note(pays=False)
    assert choice.may_pay()  # without the rate of a link, nothing was compared
    choice.add_transfer(10**6, 1.0, 10**6, is_first=False)
    gaps = []
    for _ in range(7):
        choice.note(pays=False)
        gaps.append(0)
        while not choice.may_pay():
            gaps[-1] += 1
    assert gaps == [1, 2, 4, 8, 16, 32, 32]
    choice.note(pays=True)
    assert choice.may_pay()


def test_ranks_that_share_cores_have_a_part_of_one():
    reports = {rank: {"cores": ["a", 2] if rank < 4 else ["b", 8]} for rank in range(6)}
    assert find_share(reports, range(4)) == find_share(reports, range(6)) == 0.5
    assert find_share(reports, (0, 1, 4, 5)) == find_share(reports, ()) == 1.0
