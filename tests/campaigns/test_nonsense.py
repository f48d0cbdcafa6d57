"""A sample of the campaign with nonsense in the store and in arguments, and its judgement of results."""

from __future__ import annotations

import pytest

from reshard.testing import run_processes
from tests.campaigns import nonsense, nonsense_calls


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


def call_with_nonsense(_, num_runs):
    doors = nonsense_calls.find_doors()
    for name, (function, arguments) in doors.items():
        try:
            function(**arguments)
        except Exception as error:
            raise AssertionError(f"the valid call of {name} fails") from error
    return nonsense_calls.run_campaign(num_runs, doors=doors)


@pytest.mark.integration
def test_nonsense_in_public_calls_is_an_error_of_this_package():
    ((ends, wrong),) = run_processes(call_with_nonsense, 1, 400)
    assert not wrong
    assert ends["ArgumentError"] > 200 and ends["returned"] < 80


def test_campaign_finds_raw_errors():
    doors = {
        "raw": (lambda value: value + 1, {"value": 1}),
        "deep": (lambda values: values[0] + values[1], {"values": [1, 2]}),
    }
    ends, wrong = nonsense_calls.run_campaign(200, doors=doors)
    assert len(wrong) > 100 and ends["raw TypeError"] > 50
    assert {call.partition("=")[0] for call, _ in wrong} >= {"raw: value", "deep: values", "deep: values[0]"}
