"""Damaged checkpoints: errors on all ranks that name the file and the tensor, and nothing changes."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reshard.scheduler as rs
from reshard.errors import ArgumentError, DisagreementError
from reshard.scheduler.checkpoint import find_checkpoints, writing
from reshard.scheduler.checkpoint.training_state import rng_state
from reshard.testing import LaunchError, run_processes
from tests.scheduler.model_stages.test_pipe import Chain, make_batch, make_chain

from .test_checkpoint import CUTS, Loader


def flip(file: Path, fraction: float) -> int:
    """Change one bit at this fraction of the file. Returns the index of the byte."""
    content = bytearray(file.read_bytes())
    at = int(fraction * (len(content) - 1))
    content[at] ^= 16
    file.write_bytes(content)
    return at


def cut(file: Path, fraction: float) -> None:
    file.write_bytes(file.read_bytes()[: int(fraction * file.stat().st_size)])


DAMAGES = {
    **{f"flip {part}": lambda file, part=part: flip(file, part / 10) for part in range(0, 11, 2)},
    "empty": lambda file: cut(file, 0.0),
    "half": lambda file: cut(file, 0.5),
    "missing": Path.unlink,
}


def tensors_in(folder, file):
    """``(key, start, stop)`` of the tensors in a file of a checkpoint."""
    tensors = json.loads((folder / "index.json").read_text())["tensors"]
    return [(key, *each["bytes"]) for key, entry in tensors.items() for each in entry["shards"] if each["file"] == file]


def save_and_damage(rank, folder):
    """Names of the files damaged in turn, and (damage, file, error) where the error does not name file and tensor."""
    torch.set_num_threads(1)
    unnamed = []
    with rs.Pipe(make_chain(), CUTS[2], stages="1x1,1x1").compile(make_batch(0), 2) as engine:
        optimizer = torch.optim.SGD(engine.parameters(), 0.1)
        for step in (1, 2):
            engine.save(folder, optimizer, step=step)
            engine.step(make_batch(0))
            optimizer.step()
        expected = engine.evaluate(make_batch(0)).loss
        newest = find_checkpoints(folder)[-1][1]
        tensors = {path.name: tensors_in(newest, path.name) for path in newest.iterdir()}
        names = sorted(tensors)
        engine.evaluate(make_batch(0))  # all ranks have read the names
        if rank == 0:
            subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=newest, check=True)
        for name in names:
            for kind, damage in DAMAGES.items():
                at = None
                if rank == 0:
                    shutil.copy(newest / name, f"{folder}/kept")
                    at = damage(newest / name)
                with pytest.raises(ArgumentError, match="pass step=1") as caught:
                    engine.load(folder, optimizer)
                error = str(caught.value)
                changed = [key for key, start, stop in tensors[name] if at is not None and start <= at < stop]
                # One flipped bit of the digests may look like damage of the file whose digest it is.
                is_named = f"{newest.name}/{name}" in error or "SHA256SUMS" in error
                if not is_named or not all(key in error for key in changed):
                    unnamed.append((kind, name, error))
                assert engine.evaluate(make_batch(0)).loss == expected
                if rank == 0:
                    shutil.copy(f"{folder}/kept", newest / name)
        assert engine.load(folder, optimizer, step=1) == 1
        assert engine.load(folder, optimizer) == 2
        with pytest.raises(ArgumentError, match=r"no complete checkpoint of step 3; it has steps \[1, 2\]"):
            engine.load(folder, optimizer, step=3)
    return names, unnamed


@pytest.mark.nightly
def test_any_damage_is_an_error_that_names_file_and_tensor_and_offers_the_checkpoint_before(tmp_path):
    for names, unnamed in run_processes(save_and_damage, 2, str(tmp_path)):
        tensors = [f"rank-0000{rank}-000.safetensors" for rank in (0, 1)]
        assert names == sorted(["SHA256SUMS", "index.json", *tensors, "rank-00000.json", "rank-00001.json"])
        assert not unnamed


NESTED = json.loads("[" * 90 + "]" * 90)
#: Changes of index.json or of a file of values, whose digests then are made again, and what the error says.
EDITS = {
    "version": (lambda index, _: index.update(version=2), "index.json: its version is 2"),
    "another format": (lambda index, _: index.update(format=NESTED), "index.json: its format is"),
    "unknown key": (lambda index, _: index.update(more=1), r"index.json: it has unexpected 'more'"),
    "no values": (lambda index, _: index.pop("values"), r"index.json: it lacks 'values'"),
    "values": (lambda index, _: index.update(values=[1]), r"index.json: values is \[1\], not an object"),
    "path": (lambda index, _: shard(index).update(file="../../x"), r"a shard of tensor 'model.embed.weight' is '\.\./"),
    "absolute path": (lambda index, _: index["values"].update(engine="/etc/passwd"), r"'engine' is '/etc/passwd'"),
    "other file": (lambda index, _: index["values"].update(engine="rank-00007.json"), r"SHA256SUMS.*lacks 'rank-00007"),
    "dtype": (lambda index, _: entry(index).update(dtype="F99"), "the dtype 'F99'"),
    "half dtype": (lambda index, _: entry(index).update(dtype="F16"), "the bytes of a shard of tensor 'model.embed"),
    "same size": (
        lambda index, _: entry(index).update(dtype="I32"),
        r"(has model.embed.weight as F32|of torch.float32)",
    ),
    "shape": (
        lambda index, _: entry(index).update(shape=[1, -1]),
        r"shape of tensor 'model.embed.weight' is \[1, -1\]",
    ),
    "huge": (lambda index, _: entry(index).update(shape=[2**61, 2**61]), "which no tensor has"),
    "float": (
        lambda index, _: entry(index).update(shape=[8.0, 8]),
        r"is \[8.0, 8\], not a list of at most 64 integers",
    ),
    "dims": (lambda index, _: entry(index)["shape"].append(1), "has 3 dims, but a shard of it has 2"),
    "no shards": (lambda index, _: entry(index).update(shards=[]), "elements, but its shards have 0"),
    "twice": (lambda index, _: entry(index)["shards"].append(shard(index)), "elements, but its shards have"),
    "nested": (lambda index, _: entry(index).update(shards=NESTED), "a shard of tensor 'model.embed.weight' is"),
    "offsets": (lambda index, _: shard(index).update(offsets=[1, 0]), "a shard of it reaches past that"),
    "bytes": (
        lambda index, _: shard(index).update(bytes=[0, 5]),
        "the bytes of a shard of tensor 'model.embed.weight'",
    ),
    "moved bytes": (lambda index, _: move(index), "(model.embed.weight|share bytes of rank-00000-000.safetensors)"),
    "digest": (lambda index, _: shard(index).update(xxh3_128="0" * 32), "when saved: 'model.embed.weight'"),
    "digest type": (lambda index, _: shard(index).update(xxh3_128=0), "the digest of a shard of tensor 'model.embed"),
    "renamed": (lambda index, _: rename(index), "(no model.embed.weight|does not contain tensor|when saved)"),
    "step": (lambda _, values: values["engine"].update(step=-1), "engine.*its step is -1, not an integer from 0"),
    "step type": (lambda _, values: values["engine"].update(step="2"), "engine.*its step is '2'"),
    "step bool": (lambda _, values: values["engine"].update(step=True), "engine.*its step is True"),
    "world": (lambda _, values: values["engine"].pop("world_size"), "engine.*lacks 'world_size'"),
    "scale": (lambda _, values: values["engine"].update(loss_scale={"value": "x"}), "engine.*its loss_scale is"),
    "engine": (lambda _, values: values.update(engine=NESTED), r"engine.*it is \[.*, not a dict"),
    "no engine": (lambda _, values: values.pop("engine"), r"rank-00000.json: it lacks 'engine'"),
    "more values": (lambda _, values: values.update(more=1), r"rank-00000.json: it has unexpected 'more'"),
    "random": (lambda _, values: values["rng.0"].pop("numpy"), r"rng.0.*(KeyError|numpy)"),
    "random type": (lambda _, values: values["rng.0"].update(python=NESTED), "rng.0"),
    "no tensor": (
        lambda _, values: values["rng.0"].update(torch={"$tensor": "a"}),
        "no tensor a, to which a value refers",
    ),
    "tag": (
        lambda _, values: values["rng.0"].update(torch={"$x": 1}),
        r"rank-00000.json: rng.0\['torch'\] is {'\$x': 1}",
    ),
    "rate": (lambda _, values: values.update({"optimizer.param_groups.position.lr": "x"}), r"position.lr.*it is 'x'"),
    "missing rate": (lambda _, values: values.pop("optimizer.param_groups.position.lr"), "lacks 'optimizer.param"),
    "loader": (lambda _, values: values.update({"loader.0": 5}), "loader.0.*cannot be loaded: TypeError"),
}


def entry(index):
    return index["tensors"]["model.embed.weight"]


def shard(index):
    return entry(index)["shards"][0]


def move(index):
    shard(index)["bytes"] = [item + 4 for item in shard(index)["bytes"]]


def rename(index):
    index["tensors"]["model.other"] = index["tensors"].pop("model.embed.weight")


def sign(folder):
    """Write the digests of the files that are there."""
    files = [path for path in sorted(folder.iterdir()) if path.name != "SHA256SUMS"]
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / "SHA256SUMS").write_text("".join(lines))


def edit_and_load(rank, folder):
    """Errors of loads after each edit, by its name."""
    torch.set_num_threads(1)
    errors = {}
    with rs.Pipe(make_chain(), stages="1x1").compile(make_batch(0), 2, schedule=rs.one_f_one_b) as engine:
        optimizer = torch.optim.SGD(engine.parameters(), 0.1)
        engine.save(folder, optimizer, loader=Loader(), step=1)
        newest = find_checkpoints(folder)[-1][1]
        files = [newest / name for name in ("index.json", "rank-00000.json")]
        texts = [file.read_text() for file in files]
        for name, (edit, _) in EDITS.items():
            parsed = [json.loads(text) for text in texts]
            edit(*parsed)
            for file, item in zip(files, parsed, strict=True):
                file.write_text(json.dumps(item))
            sign(newest)
            with pytest.raises(ArgumentError) as caught:
                engine.load(folder, optimizer, loader=Loader())
            errors[name] = str(caught.value)
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        sign(newest)
        assert engine.load(folder, optimizer, loader=Loader()) == 1
        tensors = newest / "rank-00000-000.safetensors"
        tensors.rename(newest.parent / "elsewhere")
        os.mkfifo(tensors)
        with pytest.raises(ArgumentError, match=r"000\.safetensors, .* it is not a regular file"):
            engine.load(folder, optimizer, loader=Loader())
        tensors.unlink()
        tensors.symlink_to(newest.parent / "elsewhere")
        assert engine.load(folder, optimizer, loader=Loader()) == 1
    return errors


@pytest.mark.integration
def test_nonsense_under_right_digests_is_an_error_that_names_file_and_key(tmp_path):
    (errors,) = run_processes(edit_and_load, 1, str(tmp_path))
    for name, (_, message) in EDITS.items():
        assert re.search(message, errors[name], re.DOTALL), (name, errors[name])


def save_pickled(folder):
    """Save a model in the format of earlier versions."""
    torch.manual_seed(0)
    counters = {"step": 4, "loss_scale": None, "world_size": 2, "encoded_steps": 0}
    state = {"model": Chain().state_dict(), "engine": pickle.dumps(counters), "rng.0": pickle.dumps(rng_state())}
    state["loader.0"] = pickle.dumps({"position": 7})
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    sign(folder)


def load_pickled(rank, folder):
    torch.set_num_threads(1)
    newest, errors = Path(folder) / "step-00000004", []
    with rs.Pipe(make_chain(), CUTS[2], stages="1x1,1x1").compile(make_batch(0), 2) as engine:
        with pytest.raises(ArgumentError, match=r"can run any code.*pass trust_pickle=True .*--trust-pickle\)$"):
            engine.load(folder)
        with pytest.raises(DisagreementError, match="ranks 0 and 1 pass trust_pickle="):
            engine.load(folder, trust_pickle=bool(rank))
        with pytest.raises(ArgumentError, match="trust_pickle is 1; it must be True or False"):
            engine.load(folder, trust_pickle=1)
        loader = Loader()
        assert engine.load(folder, loader=loader, trust_pickle=True) == 4
        assert loader.position == 7
        loss = engine.evaluate(make_batch(0)).loss
        for name in ("__0_0.distcp", ".metadata"):
            for has_digests in (True, False):
                engine.evaluate(make_batch(0))  # no rank still reads
                if rank == 0:
                    shutil.copytree(newest, f"{folder}/kept")
                    cut(newest / name, 0.4)
                    if not has_digests:
                        (newest / "SHA256SUMS").unlink()
                with pytest.raises(ArgumentError) as caught:
                    engine.load(folder, trust_pickle=True)
                errors.append(str(caught.value))
                if rank == 0:
                    shutil.rmtree(newest)
                    Path(f"{folder}/kept").rename(newest)
    return loss, errors


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_pickled_checkpoints_load_only_if_they_are_trusted(tmp_path):
    save_pickled(tmp_path / "step-00000004")
    torch.manual_seed(0)
    expected = Chain()(**make_batch(0))[0].item()
    for loss, errors in run_processes(load_pickled, 2, str(tmp_path)):
        assert loss == pytest.approx(expected, rel=1e-6)
        for error, words in zip(
            errors, ("__0_0.distcp is", "in the checkpoint", ".metadata is", ".metadata"), strict=True
        ):
            assert words in error


#: What a save calls to change files.
CALLS = ((os, "mkdir"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "fsync"), (writing, "save_file"))


def save_and_die(rank, folder, number):
    """Save step 2 again after a change, and die before a call that changes a file: that of this number."""
    torch.set_num_threads(1)
    left = [number]

    def dying(call):
        def run(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os._exit(7)
            return call(*args, **kwargs)

        return run

    with rs.Pipe(make_chain(), stages="1x1").compile(make_batch(0), 2, schedule=rs.one_f_one_b) as engine:
        engine.load(folder)
        next(iter(engine.parameters())).data.add_(1.0)
        for module, name in CALLS:
            setattr(module, name, dying(getattr(module, name)))
        engine.save(folder, step=2)
    return left[0]


def load_position(rank, folder):
    """The steps of the checkpoints, and the first parameter of the newest."""
    torch.set_num_threads(1)
    with rs.Pipe(make_chain(), stages="1x1").compile(make_batch(0), 2, schedule=rs.one_f_one_b) as engine:
        engine.load(folder)
        return [step for step, _ in find_checkpoints(folder)], next(iter(engine.parameters())).flatten()[0].item()


@pytest.mark.nightly
def test_a_save_that_dies_at_any_time_leaves_the_old_or_the_new_checkpoint(tmp_path):
    (tmp_path / "new").mkdir()
    run_processes(save_twice, 1, str(tmp_path / "new"))
    _, old = run_processes(load_position, 1, str(tmp_path / "new"))[0]
    found = []
    for number in itertools.count():
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "new", folder)
        try:
            run_processes(save_and_die, 1, str(folder), number)
        except LaunchError as error:
            assert error.failures[0].text == "ended with exit code 7"
        else:
            break
        steps, value = run_processes(load_position, 1, str(folder))[0]
        assert steps == [1, 2]
        found.append(value - old)
        if number % 4 == 0:  # the next save cleans up
            run_processes(save_and_die, 1, str(folder), 1000)
            assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]
    assert number > 10
    changes = [round(item, 5) for item in found]
    assert changes == sorted(changes)
    assert set(changes) == {0.0, 1.0}


def save_twice(rank, folder):
    torch.set_num_threads(1)
    with rs.Pipe(make_chain(), stages="1x1").compile(make_batch(0), 2, schedule=rs.one_f_one_b) as engine:
        for step in (1, 2):
            engine.save(folder, step=step)
