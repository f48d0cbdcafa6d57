"""A sample of the campaign that interrupts calls at every line."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from reshard.testing import run_processes
from tests.campaigns import interrupts


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "every"),
    [
        *(("reshard", 120), ("mover", 50), ("engine", 170), ("transfer", 1000)),
        *(
            pytest.param(kind, every, marks=pytest.mark.nightly)
            for kind, every in (("save", 900), ("load", 900), ("publish", 60), ("update", 35))
        ),
    ],
)
def test_interrupted_calls_never_mix_data_and_release_everything(kind, every):
    num, wrong = interrupts.run_campaign(kind, every, first=every // 2)
    assert num >= 7 and not wrong


@pytest.mark.integration
@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "every"), [("reshard", 300), ("open", 200)])
def test_interrupted_first_calls_of_a_group_release_everything(kind, every):
    num, wrong = interrupts.run_campaign(kind, every, first=every // 2, once=True, opening=True)
    assert num >= 6 and not wrong


@pytest.mark.integration
@pytest.mark.parametrize(
    "kind",
    [
        *("reshard", "mover", "engine"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("save", "load", "transfer", "publish", "update")),
    ],
)
def test_signals_never_mix_data_and_release_everything(kind):
    _, wrong = interrupts.run_signals(kind, 3, seed=1, victim=0)
    assert not wrong


def test_campaign_finds_what_is_wrong_after_an_interrupt():
    def judge(first, third="right", closed="", left="", seconds=0.1):
        own = "place", [("tests.Interrupt: place", 0.1), ("right", 0.1)], closed, left
        return interrupts.judge([own, ("", [(first, seconds), (third, 0.1)], "", "")], victim=0)

    assert judge("right") == judge("reshard.errors.RemoteError: rank 0 left a call") == ""
    assert judge("wrong") == "wrong data on rank 1 in call 2"
    assert judge("right", "wrong") == "wrong data on rank 1 in call 3"
    assert "raw error builtins.ValueError" in judge("builtins.ValueError: zip()")
    assert "does not name rank 0" in judge("reshard.errors.RemoteError: rank 2 left a call")
    assert judge("right", closed="close() raises") == "close() raises"
    assert judge("right", left="1 threads") == "1 threads"
    assert "9.0 s until right" in judge("right", seconds=9.0)


def pass_unknown_argument(rank):
    """Pass an argument that no call has, on both ranks, and call correctly before and after it."""
    torch.set_num_threads(1)
    source = torch.arange(24.0).view(4, 6).tensor_split(2)[rank]
    mover = interrupts.Movers(dist.group.WORLD, None)
    with pytest.raises(TypeError, match="typo"):
        mover.mover(source, typo=1)
    results = [mover.run(source), interrupts.Movers(dist.group.WORLD, None).run(source)]
    steps = interrupts.Steps(dist.group.WORLD, None)
    for _ in range(2):
        with pytest.raises(TypeError, match="typo"):
            steps.engine.step({}, typo=1)
        results.append(steps.run(source))
    return all(result.equal(torch.arange(24.0).view(4, 6)[:, 3 * rank : 3 * rank + 3]) for result in results)


def test_an_unknown_argument_ends_no_later_call():
    assert run_processes(pass_unknown_argument, 2) == [True, True]
