"""What a training run prints while it trains."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

from reshard.scheduler.training.models.model_presets import find_preset
from reshard.scheduler.training.training_progress import Progress


def test_a_line_estimates_the_time_that_is_left(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress("run", 10, 30, find_preset("gpt3-125m"), 10, shows=True)
    result = SimpleNamespace(timeline=None, loss=1.0, finite=True)
    for step in range(10, 30):
        now[0] += 3.0
        progress.advance(step, result, 0.5)
    lines = capsys.readouterr().err.splitlines()
    left = [re.search(r"^(step \d+): loss 1.0000.*?(?:, about (.*) left)?$", line).groups() for line in lines[1:]]
    assert left == [("step 11", "57 s"), ("step 20", "30 s"), ("step 30", None)]
