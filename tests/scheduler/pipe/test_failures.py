"""After a rank is killed, even the one that serves the store of ``env://``, every survivor's error names it."""

from __future__ import annotations

import pytest

from tests.campaigns.kills import Kill, play


@pytest.mark.parametrize(
    ("wrap", "victim"),
    [
        ("ddp", 0),
        ("fsdp", 3),
        *(pytest.param("ddp", each, marks=pytest.mark.slow) for each in (1, 2, 3)),
        *(pytest.param("grid", each, marks=pytest.mark.slow) for each in range(4)),
    ],
)
def test_killed_rank_is_named_by_every_survivor(wrap, victim):
    wrong, _ = play(Kill(wrap, victim, 0.0))
    assert not wrong
