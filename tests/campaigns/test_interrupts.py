"""A sample of the campaign that interrupts calls at every line."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from reshard.testing import run_processes
from tests.campaigns import interrupts


@pytest.mark.integration
@pytest.mark.parametrize(("kind", "every"), [("reshard", 120), ("mover", 50), ("weight_sync", 250), ("engine", 350)])
def test_interrupted_calls_never_mix_data_and_release_everything(kind, every):
    num, wrong = interrupts.run_campaign(kind, every, first=every // 2)
    assert num >= 7 and not wrong


def pass_unknown_argument(rank):
    """Pass an argument that no call has, on both ranks, and call correctly before and after it."""
    torch.set_num_threads(1)
    source = torch.arange(24.0).view(4, 6).tensor_split(2)[rank]
    mover = interrupts.Movers(dist.group.WORLD)
    with pytest.raises(TypeError, match="typo"):
        mover.mover(source, typo=1)
    results = [mover.run(source), interrupts.Movers(dist.group.WORLD).run(source)]
    steps = interrupts.Steps(dist.group.WORLD)
    for _ in range(2):
        with pytest.raises(TypeError, match="typo"):
            steps.engine.step({}, typo=1)
        results.append(steps.run(source))
    return all(result.equal(torch.arange(24.0).view(4, 6)[:, 3 * rank : 3 * rank + 3]) for result in results)


def test_an_unknown_argument_ends_no_later_call():
    assert run_processes(pass_unknown_argument, 2) == [True, True]
