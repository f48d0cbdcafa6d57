"""``reshard profile``: files that ``reshard search`` reads, and training plans that ``reshard train`` then takes."""

from __future__ import annotations

import json

import pytest

from reshard.cli.main import main
from reshard.scheduler.autoparallel import LayerGraph, LayerProfile

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

def build():
    return Net(), torch.zeros(8, 4, 16)
"""
HOSTS = {"hosts": [{"devices": 1, "nics": ["10 Gbit/s"]}] * 2}


@pytest.mark.integration
def test_a_cluster_and_a_profile_from_commands_find_the_plan_that_trains(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "gpt3-125m", "--shrink", "24", "--sequence", "16", "--repeats", "1"]) == 0
    shown = capfd.readouterr().out
    assert "wrote graph.json and profile.json\nnext: reshard search graph.json --profile profile.json" in shown
    (tmp_path / "hosts.json").write_text(json.dumps(HOSTS))
    search = ["search", "graph.json", "--profile", "profile.json", "--topology", "hosts.json", "--memory", "1GB"]
    assert main([*search, "--samples", "4", "--fixed", "num_microbatches=2", "--output", "plan.json"]) == 0
    train = ["train", "gpt3-125m", "--shrink", "24", "--sequence", "16", "--batch", "4", "--steps", "1"]
    assert main([*train, "--plan", "plan.json", "--report", "none", "--device", "cpu"]) == 0
    assert "on a training plan, steps 0 to 1: loss 5." in capfd.readouterr().out


def test_a_model_of_a_file_is_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net_to_measure.py").write_text(MODEL)
    options = ["--repeats", "1", "--sample-counts", "2,1", "--graph", "g.json", "--profile", "p.json"]
    assert main(["profile", "net_to_measure.py:build", "--cuts", "blocks.[1-2]", *options]) == 0
    graph, profile = LayerGraph.from_json((tmp_path / "g.json").read_text()), LayerProfile.read("p.json")
    assert [layer.name for layer in graph.layers] == ["first", "blocks.1", "blocks.2"]
    profile.check(graph)
    for times in profile.classes.values():
        assert [one.num_samples for one in times[1].measured] == [1, 2]
    assert "Net: 3 layers of 3 classes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["gpt4"], "there is no preset 'gpt4'"),
        (["absent.py:build"], "there is no Python file 'absent.py'; pass FILE.py:FUNCTION, or a preset"),
        (["json:build"], "there is no Python file 'json'; pass FILE.py:FUNCTION, or a preset"),
        ([f"{__file__}:build"], "has no function 'build'; pass the function that returns (model, batch)"),
        (["net.py:build", "--shrink", "2"], "--shrink is for presets; omit it, and let build return the model"),
        (["gpt3-125m", "--cuts", "blocks.*"], "--cuts is for models of your own; omit it for a preset"),
        (["gpt3-125m", "--sample-counts", "0,1"], "--sample-counts is '0,1'; it must be numbers of samples"),
        (["u-transformer-470m", "--sequence", "8"], "u-transformer-470m has no sequence; omit --sequence"),
    ],
)
def test_errors_name_the_option_and_the_rule(options, message, capsys):
    assert main(["profile", *options]) == 2
    assert message in capsys.readouterr().err
