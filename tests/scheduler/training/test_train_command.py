"""``reshard train``: local processes, torchrun, resuming, and errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from reshard.cli.main import main
from reshard.scheduler.training.training_report import read_losses

SMALL = ["--shrink", "24", "--batch", "8", "--microbatches", "4", "--log-every", "2"]


@pytest.mark.integration
def test_trains_in_local_processes_and_resumes(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(bytes(range(256)) * 20)
    command = ["train", "gpt3-125m", *SMALL, "--meshes", "1x1,2x1", "--data", "text", "--resume"]
    assert main([*command, "--steps", "2"]) == 0
    shown = capfd.readouterr()
    assert "to train further: the same command with --resume and --steps above 2 continues from " in shown.err
    assert shown.err.index("predicted step") < shown.err.index("its edges carry 576 times as many bytes per operation")
    assert "step 2: loss 5." in shown.err
    assert "there is no checkpoint in gpt3-125m.checkpoint: starting from the beginning" in shown.err
    assert "tokens/s" in shown.err
    assert "exposed communication" in shown.err
    assert "gpt3-125m/24 on 1x1,2x1, steps 0 to 2: loss 5." in shown.out
    assert "step 2: saved a checkpoint in gpt3-125m.checkpoint" in shown.err
    assert (tmp_path / "gpt3-125m.checkpoint" / "step-00000002").is_dir()
    assert main([*command, "--steps", "4", "--compression", "dp=int4x128-bf16,pp=int8x128"]) == 0
    shown = capfd.readouterr()
    assert "continuing at step 2" in shown.err
    assert (
        "the checkpoint was saved with --steps 2, not --steps 4: the learning rate follows the new number" in shown.err
    )
    assert "the checkpoint was saved with --compression none, not --compression " in shown.err
    assert "0 -> 1 activations: " in shown.err
    assert "gpt3-125m/24 on 1x1,2x1, steps 2 to 4: loss 5." in shown.out
    predicted, bound = map(float, re.search(r"predicted step (\S+) s, .* schedules, (\S+) s", shown.err).groups())
    assert 0 < bound <= predicted * 1.001
    assert main([*command, "--steps", "3"]) == 0
    shown = capfd.readouterr()
    assert "nothing is left to train: the checkpoint is of step 4, and --steps 3 is the last" in shown.err
    assert "the learning rate follows" not in shown.err
    assert [step for step, _ in read_losses("gpt3-125m.report").training] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "gpt3-125m.report" / "trace.json").read_text())["traceEvents"]
    assert main([*command, "--steps", "4", "--learning-rate", "0.5"]) == 2
    assert "--learning-rate 0.003, not 0.5; resumed runs keep theirs" in capfd.readouterr().err
    monkeypatch.setattr("reshard.scheduler.training.launch.run_processes", None)  # no process starts
    for options, message in (
        (
            ["--meshes", "1x1,1x1,1x1"],
            "step-00000004 is of a model of 2 layers, but gpt3-125m/24 on the stages 1x1,1x1,1x1 has 3 layers; pass the "
            "preset and the --shrink of the run that saved it, and, because a smaller model has at least one layer for "
            "each stage, --meshes of 2 stages",
        ),
        (
            ["--sequence", "32"],
            "has the sizes [85, 36] there, and has [32, 36] in gpt3-125m/24; pass the preset, the --s",
        ),
    ):
        assert main([*command, "--steps", "6", *options]) == 2
        assert message in capfd.readouterr().err


@pytest.mark.nightly
def test_a_resumed_run_in_ready_order_says_so_and_has_the_same_losses(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["train", "gpt3-125m", *SMALL, "--meshes", "1x1,1x1", "--report", "none", "--resume", "--checkpoint"]
    assert main([*command, "planned", "--steps", "2"]) == 0
    shutil.copytree("planned", "ready")
    capfd.readouterr()
    ends = []
    for order in ("planned", "ready"):
        assert main([*command, order, "--steps", "4", "--order", order]) == 0
        shown = capfd.readouterr()
        ends.append(re.findall(r"loss \S+ -> \S+ held-out \S+", shown.out))
        said = "--order planned, not --order ready: ranks compute in the other order from here on" in shown.err
        assert said == (order == "ready")
    assert ends[0] == ends[1] and len(ends[0]) == 1


@pytest.mark.slow
def test_train_runs_under_torchrun(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "reshard"]
    done = subprocess.run(
        [*launch, "train", "u-transformer-470m", "--shrink", "40", "--batch", "4", "--steps", "2"],
        capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("u-transformer-470m/40 on 1x1,1x1, steps 0 to 2: loss") == 1
    assert "images/s" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["gpt4"], "there is no preset 'gpt4'; presets are gpt3-125m"),
        (["gpt3-125m", "--meshes", "two"], "'two' must be dp x tp of a stage, such as \"2x1\""),
        (["gpt3-125m", "--shrink", "0"], "--shrink is 0; it must be positive"),
        (["gpt3-125m", "--timeout", "0"], "--timeout is 0; it must be above 0 and at most a million seconds"),
        (["gpt3-125m", "--warmup", "-1"], "--warmup is -1; it must not be negative"),
        (["gpt3-125m", "--seed", str(2**63)], f"--seed is {2**63}; it must be below 2**63"),
        (["gpt3-125m", "--learning-rate", "nan"], "--learning-rate is nan; it must be positive and finite"),
        (["gpt3-125m", "--learning-rate", "1e400"], "--learning-rate is inf; it must be positive and finite"),
        (["gpt3-125m", "--layers", "6,x"], "--layers is '6,x'; it must be the layers of each stage"),
        (["u-transformer-1b", "--sequence", "8"], "u-transformer-1b has no sequence; omit --sequence"),
        (["u-transformer-1b", "--data", "x"], "trains on pictures that it draws itself; omit --data"),
        (["gpt3-125m", "--compression", "ep=int8x128"], "the policy 'ep=int8x128' has 'ep=int8x128'"),
        (["gpt3-125m", "--data", "absent"], "the data absent cannot be read"),
        (
            ["gpt3-125m", "--layers", "6,5"],
            "--layers 6,5 has 2 stages and 11 layers, but gpt3-125m has 2 stages and 12 layers",
        ),
        (
            ["gpt3-125m", "--meshes", "1x1,2x1", "--order", "ready"],
            "--order ready needs each stage on one rank, but stage 1 is on 2, which could receive their messages in "
            "different orders; pass --order planned or meshes of 1x1",
        ),
        (["u-transformer-470m", "--meshes", "1x2,1x1"], "stage 0 has tp=2, but no plan"),
        (["gpt3-125m", "--device", "cuda"], "--device cuda needs 2 GPUs on this machine"),
        (["gpt3-125m", "--share-gpus"], "--share-gpus needs --device cuda"),
        (["gpt3-125m", "--trust-pickle"], "--trust-pickle is for --resume; omit it, or pass both"),
    ],
)
def test_errors_name_the_option_and_the_rule(options, message, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *options]) == 2
    shown = capfd.readouterr().err
    assert message in shown
    assert len([line for line in shown.splitlines() if not line.startswith("loading torch: ")]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train gpt3-125m --batch 0", "--batch is 0; it must be positive"),
        ("train gpt3-125m --data absent", "the data absent cannot be read: there is no such file"),
        ("train gpt3-125m --meshes 2", "'2' must be dp x tp of a stage"),
        (
            "train gpt3-125m --shrink 8 --layers 1,1,1",
            "--layers 1,1,1 has 3 stages and 3 layers, but gpt3-125m/8 has 2",
        ),
        ("train gpt3-125m --plan absent.json", "there is no training plan 'absent.json'"),
        ("train gpt3-125m --plan auto", "--plan auto needs --devices N"),
        ("train gpt3-125m --plan auto --devices 4 --memory 1MB", "--memory '1MB' is 1,000,000 bytes; a device needs"),
        ("profile gpt3-125m --shrink 0", "--shrink is 0; it must be positive"),
    ],
)
def test_a_wrong_option_is_refused_before_torch_is_loaded(words, message):
    code = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); from reshard.cli.main import main"
    )
    code = f"{code}; sys.exit(main({words.split()}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n") and message in done.stderr


def test_help_names_presets_and_examples(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "gpt3-175b" in shown
    assert "reshard train gpt3-125m --meshes 1x2,2x2,1x4 --data FILE --steps 1000 --resume" in shown


def test_other_commands_do_not_import_torch():
    code = "import sys; from reshard.cli.main import main; main(['plan', '--help'])"
    code = f"import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_report_that_cannot_be_written_ends_the_command_before_a_process_starts(capfd, tmp_path, monkeypatch):
    monkeypatch.setattr("reshard.scheduler.training.launch.run_processes", None)
    (tmp_path / "file").touch()
    assert main(["train", "gpt3-125m", *SMALL, "--meshes", "1x1", "--report", str(tmp_path / "file/report")]) == 2
    text = capfd.readouterr().err
    assert f"ArgumentError: cannot write the report '{tmp_path}/file/report': [Errno 20] Not a directory" in text
    assert text.strip().endswith("pass another folder, or --report none")


@pytest.mark.integration
def test_ctrl_c_ends_the_command_with_one_line_and_says_how_to_go_on(tmp_path):
    command = ["train", "gpt3-125m", "--shrink", "24", "--meshes", "1x1,1x1", "--steps", "100000", "--save-every", "1"]
    run = subprocess.Popen(
        [sys.executable, "-m", "reshard", *command],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("gpt3-125m.checkpoint/step-*")):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    then = r"(continues from step \d+|begins again, because none is complete)"
    last = rf"checkpoints are in gpt3-125m\.checkpoint: --resume {then}\nreshard: interrupted\n"
    assert re.search(f"{last}$", errors) and "Traceback" not in errors and "frame #" not in errors


@pytest.mark.nightly
def test_a_stage_that_computes_for_too_long_is_an_error_that_names_the_option(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--shrink", "4", "--meshes", "1x1,1x1", "--steps", "1", "--report", "none"]
    assert main(["train", "gpt3-125m", *options, "--timeout", "0.05"]) == 2
    assert "if a stage computes for longer than --timeout, 0.05 s, pass a longer one" in capfd.readouterr().err
