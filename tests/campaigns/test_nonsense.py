"""A sample of the campaign with nonsense in the store and in arguments, and its judgement of results."""

from __future__ import annotations

import pytest

from tests.campaigns import nonsense


@pytest.mark.integration
@pytest.mark.parametrize(("kind", "num_runs"), [("store", 20), ("arguments", 12)])
def test_nonsense_is_an_error_on_every_rank(kind, num_runs):
    ends, wrong = nonsense.run_campaign(kind, num_runs)
    assert ends and not wrong


@pytest.mark.parametrize(
    ("outcomes", "text"),
    [
        (["right", "wrong"], "rank 1, call 0: wrong"),
        (["raw KeyError: 0", "right"], "rank 0, call 0: raw KeyError"),
        (["right", "ArgumentError: no"], "only one rank raises"),
        (["TransferTimeoutError: rank 1 did not call within 15 s", "ArgumentError: no"], "only one rank raises"),
    ],
)
def test_campaign_finds_what_is_wrong(outcomes, text):
    good = [[("ArgumentError: rank 0: no", 0.1)], [("ArgumentError: no", 0.1)]]
    assert nonsense.judge("arguments", good) == ""
    assert text in nonsense.judge("arguments", [[(outcome, 0.1)] for outcome in outcomes])
