"""A sample of the campaign that interrupts calls at every line."""

from __future__ import annotations

import pytest

from tests.campaigns import interrupts


@pytest.mark.integration
@pytest.mark.parametrize(("kind", "every"), [("reshard", 120), ("mover", 50), ("weight_sync", 250), ("engine", 350)])
def test_interrupted_calls_never_mix_data_and_release_everything(kind, every):
    num, wrong = interrupts.run_campaign(kind, every, first=every // 2)
    assert num >= 7 and not wrong
