"""The fault campaign judges outcomes correctly; no process runs here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.campaigns.faults import check, named_ranks
from tests.campaigns.planted import make_run


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("rank 3 is lost", {3}),
        ("ranks 1, 4 are lost", {1, 4}),
        ("ranks 0-2,5 differ from rank 7", {0, 1, 2, 5, 7}),
        ("ranks 1 and 4 are out of sync, 3 messages", {1, 4}),
        ("ranks [0, 2] deadlock", {0, 2}),
        ("rank 12: 4 messages", {12}),
        ("4 ranks of 8", set()),
    ],
)
def test_ranks_are_found_in_texts(text, ranks):
    assert named_ranks(text) == ranks


@pytest.mark.parametrize("text", ["ranks {other}, {victim} did not call", "ranks {victim}, {other}", "rank {victim}"])
def test_errors_may_name_the_victim_anywhere(text):
    run = replace(make_run(0, ["never calls"]), victim=3)
    outcome = {"kind": "error", "name": "RemoteError", "source_changed": 0, "seconds": 0.1}
    named = text.format(victim=3, other=1)
    assert check(run, {0: outcome | {"text": named}, 1: outcome | {"text": named}}) == []
    other = text.format(victim=33, other=1)
    wrong = check(run, {0: outcome | {"text": other}})
    assert wrong == [f"the error does not name the victim: rank 0: RemoteError: {other}"]


def test_the_rank_that_raised_is_not_the_rank_that_its_error_names():
    run = replace(make_run(0, ["never calls"]), victim=0)
    outcome = {"kind": "error", "name": "RemoteError", "source_changed": 0, "seconds": 0.1, "text": "a rank is lost"}
    assert len(check(run, {0: outcome})) == 1
