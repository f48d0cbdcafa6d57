"""Layers that take long are measured less often, and a profile says how far it is."""

from __future__ import annotations

import torch
from torch import nn

from reshard.scheduler.autoparallel import profile_layers, trace_module
from reshard.scheduler.autoparallel.inputs.layer_profile import LayerTimes
from reshard.scheduler.autoparallel.modules import profiling


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_layer_that_takes_long_is_measured_twice(monkeypatch):
    calls = []

    def run(module, inputs, _autocast):
        calls.append(1)
        return [module(inputs["x"])]

    monkeypatch.setattr(profiling, "run_layer", run)
    arguments = nn.Linear(2, 2), lambda: {"x": torch.ones(1, 2, requires_grad=True)}, 1, 5, "cpu"
    profiling.measure_layer(*arguments)
    assert len(calls) == 2 * (1 + 5)
    monkeypatch.setattr(profiling, "ENOUGH_SECONDS", 0.0)
    profiling.measure_layer(*arguments)
    assert len(calls) == 2 * (1 + 5) + 2 * (1 + profiling.MIN_REPEATS)


def test_no_more_samples_are_measured_once_they_take_long(monkeypatch):
    long = profiling.MAX_SECONDS
    monkeypatch.setattr(
        profiling, "measure_layer", lambda _module, _make, size, *_: LayerTimes(size, long, 0, size, size)
    )
    traced = trace_module(_Net(), torch.zeros(8, 4), "layers.[1-2]")
    for times in profile_layers(traced, sample_counts=(4, 1, 2)).classes.values():
        assert [one.num_samples for one in times[1].measured] == [1]
        assert times[1].failed == ()


def test_a_profile_reports_its_progress():
    reports = []
    traced = trace_module(_Net(), torch.zeros(8, 4), "layers.[1-2]")
    profile_layers(traced, sample_counts=(1, 3), repeats=1, progress=lambda *report: reports.append(report))
    done, names = zip(*reports, strict=True)
    assert list(done) == sorted(done) and done[0] == 0 and done[-1] == 1
    assert names == ("first", "first", "layers.1", "layers.1", "layers.2", "layers.2", "collectives of ZeRO 3")
    assert done[1] == 1 / 3 * 1 / 4
