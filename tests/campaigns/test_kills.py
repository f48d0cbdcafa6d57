"""After a rank is killed, even the one that serves the store of ``env://``, every survivor's error names it."""

from __future__ import annotations

import pytest

from tests.campaigns.kills import Kill, play


@pytest.mark.integration
@pytest.mark.parametrize(
    ("wrap", "victim", "doing"),
    [
        ("ddp", 0, "train"),
        ("fsdp", 3, "train"),
        pytest.param("fsdp", 3, "save", marks=pytest.mark.nightly),
        pytest.param("tp", 0, "train", marks=pytest.mark.nightly),
        *(pytest.param("tp", item, "train", marks=pytest.mark.slow) for item in (1, 2, 3)),
        *(pytest.param("ddp", item, "train", marks=pytest.mark.slow) for item in (1, 2, 3)),
        *(pytest.param("grid", number, "train", marks=pytest.mark.slow) for number in range(4)),
        *(pytest.param("ddp", 0, doing, marks=pytest.mark.slow) for doing in ("save", "load", "evaluate")),
        *(pytest.param("fsdp", 2, doing, marks=pytest.mark.slow) for doing in ("load", "evaluate")),
    ],
)
def test_killed_rank_is_named_by_every_survivor(wrap, victim, doing):
    wrong, _ = play(Kill(wrap, victim, 0.05 if doing != "train" else 0.0, doing))
    assert not wrong
