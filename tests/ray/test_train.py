"""``reshard train --launcher ray`` on a Ray cluster of emulated hosts."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from microbench.emulation import namespaces
from reshard.cli.main import main

pytest.importorskip("ray", reason="ray is not installed: pip install 'reshard[ray]'")

_reason = namespaces.why_unsupported()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(_reason is not None, reason=str(_reason)),
]

COMMAND = ["train", "gpt3-125m", "--shrink", "24", "--batch", "8", "--microbatches", "4", "--log-every", "2"]


def _run(folder, *options):
    """Run the command in a folder. Returns its exit status and its output."""
    os.chdir(folder)
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = main([*COMMAND, *options])
    return status, output.getvalue(), errors.getvalue()


@pytest.mark.nightly
def test_actors_train_as_local_processes_do_which_resume_their_run(drive, tmp_path, monkeypatch):
    """Actors run on other hosts and in other folders. They must resolve relative paths in the folder of the driver."""
    (tmp_path / "text").write_bytes(bytes(range(256)) * 20)
    options = ["--meshes", "1x1,2x1", "--data", "text", "--steps"]
    checkpoint = ["--checkpoint", "kept", "--resume"]
    status, on_ray, errors = drive(_run, tmp_path, *options, "2", *checkpoint, "--launcher", "ray")
    assert status == 0, errors
    assert (tmp_path / "kept" / "step-00000002").is_dir()
    monkeypatch.chdir(tmp_path)
    status, output, local_errors = _run(tmp_path, *options, "2")
    assert (status, output) == (0, on_ray)
    (*told, last), (*told_locally, last_locally) = errors.splitlines(), local_errors.splitlines()
    assert told_locally == told
    assert last == "--resume with a larger --steps continues from kept"
    assert last_locally == "nothing was saved; with --checkpoint FOLDER a run is saved, and --resume continues it"
    status, resumed, errors = _run(tmp_path, *options, "4", *checkpoint)
    assert status == 0, errors
    assert "gpt3-125m/24 on 1x1,2x1, steps 2 to 4: loss 5." in resumed


def _train_and_die(rank, job):
    """Train; the first rank of stage 1 kills itself after the first step."""
    from reshard.scheduler.training.loop import train

    def die():
        while not (Path(job.checkpoint) / "step-00000001").exists():
            time.sleep(0.05)
        (Path(job.checkpoint) / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        threading.Thread(target=die, daemon=True).start()
    return train(rank, job)


def _run_until_one_dies(folder, *options):
    from reshard.scheduler.training import launch

    launch.train = _train_and_die
    status, _, errors = _run(folder, *options)
    return status, errors, time.time() - (folder / "kept" / "killed").stat().st_mtime


@pytest.mark.nightly
@pytest.mark.slow
def test_dead_worker_is_named(drive, tmp_path):
    options = ["--meshes", "1x1,2x1", "--steps", "100000", "--checkpoint", "kept", "--save-every", "1"]
    status, errors, seconds = drive(_run_until_one_dies, tmp_path, *options, "--launcher", "ray")
    assert status == 2
    assert "reshard: RemoteError: rank 0 of 'stage 1', stage 1[0,0] at 10." in errors
    assert " died: " in errors
    assert seconds < 20


@pytest.mark.nightly
def test_wrong_use_is_an_error(drive, tmp_path, monkeypatch):
    status, _, errors = drive(_run, tmp_path, "--meshes", "1x1,2x1", "--device", "cuda", "--launcher", "ray")
    assert status == 2
    assert "--device cuda needs 3 GPUs in the Ray cluster, which has 0" in errors
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.chdir(tmp_path)
    status, _, errors = _run(tmp_path, "--meshes", "1x1,2x1", "--launcher", "ray")
    assert status == 2
    assert "--launcher ray starts the ranks itself; run it without torchrun" in errors
