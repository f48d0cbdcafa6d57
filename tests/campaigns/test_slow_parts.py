"""A sample of the campaign that stops the store, links to it, and ranks; and its judgement of results."""

from __future__ import annotations

import pytest

from tests.campaigns.slow_parts import Trial, check, make_trial, play


@pytest.mark.integration
@pytest.mark.parametrize(
    "trial",
    [
        Trial("sending a request", "rank", 3, 2.0),
        pytest.param(Trial("answer", "rank", 0, 4.0, victim=1, timeout_seconds=1.5), marks=pytest.mark.nightly),
        Trial("report of outcomes", "store", 2, 4.0, victim=0),
        Trial("exclusion", "link", 0, 3.0, victim=3),
        pytest.param(Trial("planning", "store", 1, 5.0, victim=2, timeout_seconds=2.0), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_pauses_lose_nobody_and_survivors_agree(trial):
    wrong, was_reached = play(trial)
    assert not wrong and was_reached


def _result(texts, lost, seconds=0.1):
    outcomes = [(text, 10.0 * n, 10.0 * n + seconds) for n, text in enumerate(texts)]
    return {"outcomes": outcomes, "lost": lost, "closing": 0.0, "killed_at": None, "stopped_at": 1.0}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({2: _result(["right", "wrong: [0.0]", "right", "right"], [])}, "rank 2, call 1: wrong"),
        ({2: _result(["right"] * 4, [3])}, "disagree on who is lost"),
        ({rank: _result(["right"] * 4, [3]) for rank in range(4)}, "ranks [3] are lost and go on"),
        ({3: _result(["right", "RemoteError: no", "right", "right"], [])}, "rank 3, call 1: RemoteError: no"),
        ({1: _result(["right"] * 4, [], seconds=200.0)}, "rank 1, call 0 took 200.0 s"),
    ],
)
def test_campaign_finds_what_is_wrong(changes, text):
    results = {rank: _result(["right"] * 4, []) for rank in range(4)}
    assert check(Trial("transfer", "store", 0, 5.0), results) == []
    assert text in "\n".join(check(Trial("transfer", "store", 0, 5.0), results | changes))


def test_trials_are_reproducible():
    assert len({str(make_trial(seed)) for seed in range(50)}) == 50
    assert make_trial(7) == make_trial(7)
