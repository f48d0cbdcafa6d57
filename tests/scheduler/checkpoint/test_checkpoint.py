"""Checkpoints: the same run after a resume, on the same and on other meshes, and in one process without us."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import reshard.scheduler as rs
from reshard.errors import ArgumentError, DisagreementError, ReshardError
from reshard.scheduler.checkpoint import find_checkpoints, saving
from reshard.testing import run_processes
from tests.scheduler.model_stages.test_pipe import Chain, make_batch, make_chain

CUTS = {2: ["layers.2"], 3: ["layers.1", "layers.3"]}


class Loader:
    """Batches in the order of a counter, some of whose positions are dropped at random."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1 + int(torch.rand(()) < 0.3)
        return make_batch(self.position)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def parts_of(model_parameters):
    optimizer = torch.optim.AdamW(model_parameters, 1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), Loader()


def train(rank, stages, folder, until, wrap):
    """Resume, train until a step, and save. Returns the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    number = stages.count(",") + 1
    placements = [rs.Placement(dp=int(part[0]), wrap=wrap if int(part[0]) > 1 else None) for part in stages.split(",")]
    engine = rs.Pipe(make_chain(), CUTS[number], stages=placements).compile(
        make_batch(0), 4, schedule=rs.one_f_one_b if wrap is rs.fsdp else rs.auto_schedule
    )
    optimizer, lr_scheduler, loader = parts_of(engine.param_groups())
    start = engine.load(folder, optimizer, lr_scheduler, loader, missing_ok=True)
    losses = []
    for _ in range(start, until):
        optimizer.zero_grad()
        losses.append(engine.step(next(loader)).loss)
        optimizer.step()
        lr_scheduler.step()
    engine.save(folder, optimizer, lr_scheduler, loader, until)
    engine.close()
    return losses


def run(stages, folder, until, wrap=None):
    size = sum(int(part[0]) for part in stages.split(","))
    results = run_processes(train, size, stages, str(folder), until, wrap)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.integration
def test_resume_on_the_same_meshes_is_bitwise(tmp_path):
    whole = run("1x1,2x1", tmp_path / "a", 6)
    assert run("1x1,2x1", tmp_path / "b", 3) + run("1x1,2x1", tmp_path / "b", 6) == whole


def train_alone(source, start, until, target):
    """Load a checkpoint of either format with torch alone, train on numbered batches, and save with torch alone. Returns the losses."""
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    folder = source / f"step-{start:08d}"
    if (folder / "index.json").exists():
        reader = HuggingFaceStorageReader(str(folder))
        dcp.load({"model": state["model"]}, storage_reader=reader, no_dist=True)
        tensors = {key: value for key, value in state["optimizer"].items() if isinstance(value, torch.Tensor)}
        dcp.load({"optimizer": tensors}, storage_reader=reader, no_dist=True)
        for file in folder.glob("rank-*.json"):
            for key, value in json.loads(file.read_text()).items():
                name = key.removeprefix("optimizer.")
                if name in state["optimizer"] and key.endswith(".lr"):
                    state["optimizer"][name] = value
    else:
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    losses = []
    for number in range(start, until):
        optimizer.zero_grad()
        loss, _ = model(**make_batch(number))
        loss.backward()
        losses.append(loss.detach().item())
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(state, checkpoint_id=target / f"step-{until:08d}", no_dist=True)
    return losses


def follow(rank, stages, source, start, until, wrap):
    """Load a checkpoint and train on numbered batches. Returns the losses."""
    torch.set_num_threads(1)
    number = stages.count(",") + 1
    placements = [rs.Placement(dp=int(part[0]), wrap=wrap) for part in stages.split(",")]
    pipe = rs.Pipe(make_chain(), CUTS[number], stages=placements)
    with pipe.compile(make_batch(0), 4, schedule=rs.one_f_one_b) as engine:
        optimizer = torch.optim.AdamW(engine.parameters(), 1.0)
        engine.load(source, optimizer, trust_pickle=Path(source).name == "b")
        losses = []
        for item in range(start, until):
            optimizer.zero_grad()
            losses.append(engine.step(make_batch(item)).loss)
            optimizer.step()
    return losses


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("first", "second", "wrap"),
    [
        pytest.param("2x1,2x1", "1x1,2x1,1x1", rs.ddp, marks=pytest.mark.slow),
        ("2x1,1x1", "1x1,2x1", rs.fsdp),
    ],
)
def test_checkpoint_loads_in_one_process_and_on_other_meshes(tmp_path, first, second, wrap):
    run(first, tmp_path / "a", 2, wrap)
    train_alone(tmp_path / "a", 2, 5, tmp_path / "b")
    for source, start in (("a", 2), ("b", 5)):
        expected = train_alone(tmp_path / source, start, 7, tmp_path / f"after {source}")
        size = sum(int(part[0]) for part in second.split(","))
        for losses in run_processes(follow, size, second, str(tmp_path / source), start, 7, wrap):
            assert losses == pytest.approx(expected, rel=1e-5)


def ask_for_more(rank, folder):
    torch.set_num_threads(1)
    with rs.Pipe(make_chain(), CUTS[2], stages="1x1,1x1").compile(make_batch(0), 2) as engine:
        errors = []
        for path, loader in (("nowhere", None), (folder, Loader())):
            with pytest.raises(ArgumentError) as caught:
                engine.load(path, None, None, loader, trust_pickle=True)
            errors.append(str(caught.value))
        return [*errors, engine.load("nowhere", missing_ok=True), engine.step(make_batch(0)).finite]


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_missing_checkpoint_and_missing_entry_are_errors_on_all_ranks(tmp_path):
    torch.manual_seed(0)
    dcp.save({"model": Chain().state_dict()}, checkpoint_id=tmp_path / "step-00000001", no_dist=True)
    results = run_processes(ask_for_more, 2, str(tmp_path))
    for first, second, step, finite in results:
        assert first.startswith("there is no complete checkpoint at nowhere; pass missing_ok=True")
        assert "has no loader.0; it has" in second
        assert (step, finite) == (0, True)


def load_into_a_shallower_model(rank, folder):
    torch.set_num_threads(1)
    with rs.Pipe(make_chain(), CUTS[2], stages="1x1,1x1").compile(make_batch(0), 2) as engine:
        engine.save(folder, step=1)
    shallower = make_chain()
    del shallower.layers[3]
    with rs.Pipe(shallower, CUTS[2], stages="1x1,1x1").compile(make_batch(0), 2) as engine:
        before = engine.evaluate(make_batch(0)).loss
        with pytest.raises(ArgumentError) as caught:
            engine.load(folder)
        assert engine.evaluate(make_batch(0)).loss == before
    return str(caught.value)


@pytest.mark.integration
def test_a_checkpoint_with_layers_that_no_stage_has_is_an_error_on_all_ranks(tmp_path):
    expected = f"the checkpoint {tmp_path / 'step-00000001'} is of another model: no stage here has "
    expected += "'model.layers.3.bias', 'model.layers.3.weight'"
    assert run_processes(load_into_a_shallower_model, 2, str(tmp_path)) == [expected] * 2


class Unpicklable(Loader):
    """Its state cannot be saved."""

    def state_dict(self):
        return {"position": lambda: 0}


def save_again(rank, folder):
    torch.set_num_threads(1)
    with rs.Pipe(make_chain(), CUTS[2], stages="1x1,1x1").compile(make_batch(0), 2) as engine:
        optimizer = torch.optim.SGD(engine.parameters(), 0.1)
        engine.save(folder, optimizer, None, Loader(), 1)
        expected = engine.evaluate(make_batch(0)).loss
        engine.step(make_batch(0))
        optimizer.step()
        with pytest.raises(ReshardError, match=r"rank 1: loader\.1\['position'\] is a function"):
            engine.save(folder, optimizer, None, Unpicklable() if rank else Loader(), 1)
        assert engine.evaluate(make_batch(0)).loss != expected
        assert engine.load(folder, optimizer, None, Loader()) == 1
        assert engine.evaluate(make_batch(0)).loss == expected
        engine.save(folder, optimizer, None, Loader(), 1)
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.integration
def test_failed_save_is_an_error_on_all_ranks_and_keeps_the_earlier_checkpoint_of_the_step(tmp_path):
    assert run_processes(save_again, 2, str(tmp_path)) == [["step-00000001"]] * 2


def use_wrongly(rank, folder):
    """Wrong arguments of a save, a load and a clip: the same error on both ranks, and nothing is changed."""
    torch.set_num_threads(1)
    saving.FOLDER_TIMEOUT_SECONDS = 0.2
    with rs.Pipe(make_chain(), CUTS[2], stages="1x1,1x1").compile(make_batch(0), 2) as engine:
        sgd = torch.optim.SGD(engine.parameters(), 0.1, momentum=0.9)
        engine.step(make_batch(0))
        sgd.step()
        other = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
        elsewhere = f"{folder}/{rank}" if rank else folder
        engine.save(folder, sgd, step=1)
        for kind, message, call in (
            (DisagreementError, "0 and 1 save steps 3 and 4", lambda: engine.save(folder, sgd, step=3 + rank)),
            (DisagreementError, "rank 0 saves an optimizer and rank 1", lambda: engine.save(folder, [sgd, None][rank])),
            (ArgumentError, "rank 1: .*made, is not there", lambda: engine.save(elsewhere, sgd, step=5)),
            (ArgumentError, "step is -1", lambda: engine.save(folder, sgd, step=-1)),
            (ArgumentError, "rank 1: the path .* is 5", lambda: engine.save([folder, 5][rank], sgd)),
            (ArgumentError, "rank 1: the path .* is 5", lambda: engine.load([folder, 5][rank], sgd)),
            (
                ArgumentError,
                r"rank 1: loader is list, .* no state_dict\(\)",
                lambda: engine.save(folder, sgd, None, [None, []][rank]),
            ),
            (ArgumentError, "1 parameter that the engine does not have", lambda: engine.save(folder, other)),
            (DisagreementError, "max_norm 1 and 2", lambda: engine.clip_grad_norm_(1.0 + rank)),
            (ArgumentError, "norm_type is 0", lambda: engine.clip_grad_norm_(1.0, 0)),
        ):
            with pytest.raises(kind, match=message):
                call()
        adam = torch.optim.AdamW(engine.parameters())
        with pytest.raises(ArgumentError, match=r"has no optimizer\.param_groups"):
            engine.load(folder, adam)
        assert not any(adam.state.values())
        fresh = torch.optim.SGD(engine.parameters(), 0.1, momentum=0.9)
        engine.save(f"{folder}/fresh", fresh, step=0)
        engine.load(f"{folder}/fresh", sgd)
        assert not any(sgd.state.values())  # as after load_state_dict, nothing of the later steps is left
        engine.step(make_batch(0))
    return [path.name for _, path in find_checkpoints(folder)] == ["step-00000001"]


@pytest.mark.integration
def test_wrong_use_is_an_error_on_all_ranks_and_changes_nothing(tmp_path):
    assert run_processes(use_wrongly, 2, str(tmp_path)) == [True, True]


def test_complete_folders_are_found_under_either_name(tmp_path):
    files = {
        "step-00000001": ["index.json"],
        "step-00000001.unfinished": ["index.json", "rank-00000.json"],
        "step-00000002.unfinished": ["index.json", "SHA256SUMS"],  # written last
        "step-00000003.unfinished": [".metadata", "SHA256SUMS"],
        "step-00000004": ["rank-00000.json"],  # the others were deleted later
        "step-00000005": [],
        "step-00000006.unfinished": ["index.json", "rank-00000.json", "SHA256SUMS.unfinished"],
        "step-00000007.deleted": ["index.json", "SHA256SUMS"],
    }
    for folder, names in files.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    names = ["step-00000001", "step-00000002.unfinished", "step-00000003.unfinished", "step-00000004"]
    assert find_checkpoints(tmp_path) == [(step, tmp_path / name) for step, name in enumerate(names, 1)]


class Reused(nn.Module):
    """Uses one layer in all stages."""

    def __init__(self):
        super().__init__()
        self.layer, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.last(self.layer(self.middle(self.layer(x))))).square().mean()


def train_reused(rank, stages, folder):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    batch = {"x": torch.arange(32.0).reshape(8, 4) / 16}
    with rs.Pipe(Reused(), ["middle", "last"], stages=stages).compile(batch, 2) as engine:
        optimizer = torch.optim.Adam(engine.parameters(), 1e-2)
        start = engine.load(folder, optimizer, missing_ok=True)
        losses = []
        for step in range(start, start + 2):
            optimizer.zero_grad()
            losses.append(engine.step(batch).loss)
            optimizer.step()
            engine.save(folder, optimizer, step=step + 1)
        return [*losses, engine.evaluate(batch).loss]


@pytest.mark.slow
def test_layer_that_stages_share_under_one_name_is_saved_once(tmp_path):
    stages = [rs.Placement(), rs.Placement(dp=2, wrap=rs.fsdp), rs.Placement(dp=2)]
    first = run_processes(train_reused, 5, stages, str(tmp_path))
    second = run_processes(
        train_reused, 4, [*stages[1:], rs.Placement(ranks=(0, 1), dp=2, wrap=rs.fsdp)], str(tmp_path)
    )
    whole = run_processes(train_reused, 1, [rs.Placement(ranks=(0,))] * 3, str(tmp_path))
    for found in (first, second):
        assert all(item == found[0] for item in found)
    assert second[0][0] == pytest.approx(first[0][2], rel=1e-6)
    assert whole[0][0] == pytest.approx(second[0][2], rel=1e-6)


def resume_optimizer(rank, folder):
    """Losses of two steps after a resume, with a learning rate that is a tensor, and of the same steps without one."""
    torch.set_num_threads(1)
    found = []
    for resumes in (False, True):
        with rs.Pipe(make_chain(), CUTS[2], stages="1x1,1x1").compile(
            make_batch(0), 2, schedule=rs.one_f_one_b
        ) as engine:
            optimizer = torch.optim.AdamW(engine.parameters(), torch.tensor(0.5 if resumes else 0.02), amsgrad=True)
            lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            start = engine.load(folder, optimizer, lr_scheduler) if resumes else 0
            losses = []
            for step in range(start, 5):
                optimizer.zero_grad()
                losses.append(engine.step(make_batch(step)).loss)
                optimizer.step()
                lr_scheduler.step()
                if step == 2 and not resumes:
                    engine.save(folder, optimizer, lr_scheduler, step=3)
            found.append(losses[-2:])
    return found


@pytest.mark.integration
def test_settings_of_an_optimizer_that_are_tensors_are_loaded(tmp_path):
    for whole, resumed in run_processes(resume_optimizer, 2, str(tmp_path)):
        assert resumed == whole


def make_gpt2_parts(stages):
    models = pytest.importorskip("tests.scheduler.model_stages.test_transformers")
    number = stages.count(",") + 1
    cuts = models.gpt2_layers(2) if number == 2 else []
    return rs.Pipe(models.make_gpt2(), cuts, stages=stages), models.make_batch


def train_gpt2(rank, stages, source, start, until, target=None):
    """Load a checkpoint, train GPT-2 on numbered batches, and save. Returns the losses."""
    torch.set_num_threads(1)
    pipe, make = make_gpt2_parts(stages)
    with pipe.compile(make(0), 2, schedule=rs.one_f_one_b) as engine:
        optimizer = torch.optim.AdamW(engine.parameters(), 1e-2)
        assert engine.load(source, optimizer, missing_ok=True) == start
        losses = []
        for number in range(start, until):
            optimizer.zero_grad()
            losses.append(engine.step(make(number)).loss)
            optimizer.step()
        if target is not None:
            engine.save(target, optimizer, step=until)
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoints_of_fused_parameters_move_between_grids_and_plain_stages(tmp_path):
    whole = run_processes(train_gpt2, 1, "1x1", str(tmp_path / "none"), 0, 6)[0]
    losses, folder = [], str(tmp_path)
    for step, (size, stages) in enumerate([(7, "1x3x1,2x1x2"), (1, "1x1"), (5, "2x2x1,1x1")]):
        found = run_processes(train_gpt2, size, stages, folder, 2 * step, 2 * step + 2, folder)
        assert all(item == found[0] for item in found)
        losses += found[0]
    assert losses == pytest.approx(whole, rel=1e-5)
