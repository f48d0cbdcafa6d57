"""``reshard train --plan``: training plans of presets, found or read, train as one process."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from reshard.cli.main import main
from reshard.scheduler.autoparallel import Cluster, LayerGraph, LayerProfile, search
from reshard.scheduler.training import plan_search
from reshard.scheduler.training.loop import TrainingJob, train
from reshard.scheduler.training.plan_search import SearchOptions, find_training_plan, tune_training_plan
from reshard.testing import LaunchError, run_processes
from reshard.topology import Topology
from tests.scheduler.training.test_loop import GPT, U_TRANSFORMER, train_alone


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("preset", "devices", "fixed"),
    [
        (GPT, 3, (("tp", 1),)),
        pytest.param(U_TRANSFORMER, 2, (("num_microbatches", 4),), marks=pytest.mark.slow),
        pytest.param(GPT, 4, (("tp", 2), ("num_microbatches", 4)), marks=pytest.mark.slow),
        pytest.param(replace(GPT, autocast="bfloat16"), 2, (), marks=pytest.mark.slow),
    ],
    ids=["gpt", "u-transformer", "tensor parallel", "autocast"],
)
def test_a_training_plan_that_was_found_trains_as_one_process(preset, devices, fixed):
    job = TrainingJob("test", preset, 3, "", warmup=2)
    training_plan = find_training_plan(job, SearchOptions(devices, None, "100MB", fixed))
    assert training_plan.num_ranks == devices
    assert not training_plan.is_guess
    results = run_processes(train, devices, replace(job, training_plan=training_plan), False, timeout_seconds=300)
    losses, held_out = train_alone(replace(job, preset=replace(preset, autocast="")))
    close = {"rel": 5e-3} if preset.autocast else {"abs": 1e-5}
    for result in results:
        assert list(result.losses) == pytest.approx(losses, **close)
        assert result.held_out == pytest.approx(held_out, **close)


SMALL = ["train", "gpt3-125m", "--shrink", "24", "--batch", "4", "--steps", "1"]


@pytest.mark.slow
def test_the_command_searches_and_trains(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--devices", "2", "--memory", "1GB", "--plan", "auto", "--fixed", "num_microbatches=2"]) == 0
    shown = capfd.readouterr()
    assert "2 microbatches" in shown.err
    assert "gpt3-125m/24 on a training plan, steps 0 to 1: loss 5." in shown.out
    assert main([*SMALL, "--devices", "2", "--plan", "auto", "--memory", "1.1MB", "--shrink", "8"]) == 2
    shown = capfd.readouterr().err
    assert "nothing fits" in shown
    assert "Traceback" not in shown


@pytest.mark.integration
def test_the_command_refuses_what_does_not_fit(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graph = LayerGraph.transformer(layers=5, hidden=8, heads=2, sequence=8, vocabulary=32)
    profile = LayerProfile.estimate(graph, flops_per_second=1e9)
    search(graph, Cluster(Topology.uniform((0, 0)), 1e9), profile, num_samples=4).save("plan.json")
    for options, message in (
        (["--plan", "plan.json"], "has 7 layers (blocks.0, blocks.1, blocks.2, ...), but gpt3-125m/24 has "),
        (
            ["--plan", "plan.json", "--microbatches", "3"],
            "plan.json has 4 microbatches, not 3; omit --microbatches",
        ),
        (
            ["--plan", "plan.json", "--devices", "2"],
            "--devices is for a search; the training plan plan.json has been found already: omit one of the two",
        ),
        (
            ["--plan", "plan.json", "--save-plan", "copy.json"],
            "--save-plan is for a search; the training plan plan.json",
        ),
        (
            ["--plan", "none.json"],
            "there is no training plan 'none.json'; pass auto, tune, or the file of a training plan",
        ),
        (["--plan", "auto", "--meshes", "1x1"], "a training plan has its own stages; omit --meshes or --plan"),
        (["--plan", "auto", "--schedule", "1f1b"], "a training plan has its own schedule"),
        (
            ["--devices", "2", "--plan", "auto", "--compression", "optimizer=int8x128"],
            "a search prices dp, pp, tp, zero of a policy",
        ),
        (
            ["--devices", "2", "--plan", "auto", "--memory", "80 GHz"],
            "must be a number of bytes with a unit, such as 80GB",
        ),
        (["--devices", "2"], "--devices is for a search; pass --plan auto with it"),
    ):
        assert main([*SMALL, *options]) == 2
        assert message in capfd.readouterr().err


@pytest.mark.slow
def test_a_search_uses_codecs_where_links_are_slow(tmp_path):
    hosts = [{"devices": 1, "nics": ["1 Mbit/s"]}] * 2
    (tmp_path / "hosts.json").write_text(json.dumps({"hosts": hosts}))
    options = SearchOptions(None, str(tmp_path / "hosts.json"), "100MB", compression="dp=int8x128,pp=int8x128")
    job = TrainingJob("test", replace(GPT, config=replace(GPT.config, head_size=32)), 3, "", warmup=2)
    training_plan = find_training_plan(job, options)
    assert training_plan.compression is not None
    losses = run_processes(train, 2, replace(job, training_plan=training_plan), False, timeout_seconds=300)[0].losses
    assert list(losses) == pytest.approx(train_alone(job)[0], rel=0.02)
    assert list(losses) != pytest.approx(train_alone(job)[0], abs=1e-6)  # values are rounded


@pytest.mark.slow
def test_the_loop_of_search_and_measurement_trains_as_one_process():
    job = TrainingJob("test", GPT, 3, "", warmup=2)
    options = SearchOptions(2, None, "100MB", (("num_microbatches", 4),), measures=True)
    found = run_processes(tune_training_plan, 2, job, options, timeout_seconds=300)
    assert found[0].training_plan == found[1]
    tuned = found[0]
    assert 1 <= len(tuned.rounds) <= 2
    assert tuned.gain >= 1.0
    for item in tuned.rounds:
        assert {span.action.stage for span in item.measurement.timelines[0].spans} == set(
            range(len(item.training_plan.stages))
        )
    result = run_processes(train, 2, replace(job, training_plan=tuned.training_plan), False, timeout_seconds=300)[0]
    assert list(result.losses) == pytest.approx(train_alone(job)[0], abs=1e-5)


@pytest.mark.slow
def test_an_error_of_the_search_reaches_all_ranks():
    job = TrainingJob("test", GPT, 3, "")
    with pytest.raises(LaunchError) as raised:
        run_processes(
            tune_training_plan, 2, job, SearchOptions(2, None, "100MB", (("num_microbatches", 3),), measures=True)
        )
    assert [str(failure.error) for failure in raised.value.failures] == [
        "3 microbatches do not divide 8 samples evenly"
    ] * 2


def test_any_failure_of_the_search_on_rank_0_ends_all_ranks(monkeypatch):
    job = TrainingJob("test", GPT, 3, "")
    with pytest.raises(LaunchError) as raised:
        run_processes(
            tune_training_plan, 2, job, SearchOptions(2, "none.json", "100MB", measures=True), grace_seconds=20
        )
    assert [type(failure.error).__name__ for failure in raised.value.failures] == ["TopologyError"] * 2
    monkeypatch.setattr(plan_search, "make_job_problem", lambda *_: int("x"))
    with pytest.raises(LaunchError) as raised:
        run_processes(tune_training_plan, 2, job, SearchOptions(2, None, "100MB", measures=True), grace_seconds=20)
    assert str(raised.value.failures[1].error).startswith("rank 0 cannot search: ValueError: invalid literal")
