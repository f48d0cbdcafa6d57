"""What the pages tell newcomers to do, done literally: commands and code come from the pages."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from reshard.cli.main import main
from tests.support.browser import WIDTHS, Browser, find_browser
from tests.support.pages import DOCS, PAGES, ROOT, code_blocks, commands, table

LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "dtype": "bfloat16",
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def _run(words):
    """Run a ``reshard`` command in this process."""
    assert words[0] == "reshard"
    return main(words[1:])


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


@pytest.mark.integration
def test_push_weights(tmp_path):
    """The two files of the guide, started by its two commands, on ports that are free."""
    page = DOCS / "weights.md"
    for name, script in zip(("trainer", "engine"), code_blocks(page, "py"), strict=True):
        (tmp_path / f"{name}.py").write_text(script)
    jobs, ports = [], {}
    for command in commands(page, "console", "trainer.py"):
        words = [
            ports.setdefault(word, _free_port()) if word.isdigit() and len(word) == 5 else word for word in command
        ]
        assert words[0] == "torchrun"
        launch = [sys.executable, "-m", "torch.distributed.run", *(word for word in words[1:] if word != "&")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        jobs.append(subprocess.Popen(launch, cwd=tmp_path, text=True, **pipes))
    try:
        (report, trainer_errors), (printed, engine_errors) = (job.communicate(timeout=240) for job in jobs)
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], trainer_errors + engine_errors
    assert re.fullmatch(r"version 3 predicts \d", printed.splitlines()[-1])
    assert re.fullmatch(r"version 3: (no engine is connected; .*|1 engine holds it: .*)\n", report)


@pytest.mark.nightly
def test_continue_on_another_number_of_ranks(tmp_path):
    """The script of the guide, ended twice as by Ctrl-C, has the losses of one process of plain torch."""
    (script,) = code_blocks(DOCS / "elastic.md", "py")
    assert 'LAST_STEP, SAVE_EVERY = "checkpoints", 600, 100' in script
    (tmp_path / "train.py").write_text(script.replace("600, 100", "60, 10"))
    printed = ""
    for command, stop in zip(commands(DOCS / "elastic.md", "sh", "train.py"), (10, 30, None), strict=True):
        assert command[0] == "torchrun"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command[1:]]
        job = subprocess.Popen(launch, cwd=tmp_path, text=True, stdout=subprocess.PIPE, start_new_session=True)
        try:
            while stop is not None and job.poll() is None:
                if (tmp_path / "checkpoints" / f"step-{stop:08d}").exists():
                    job.send_signal(signal.SIGINT)
                    break
                time.sleep(0.01)
            printed += job.communicate(timeout=240)[0]
        finally:
            job.kill()
        assert (stop is not None) == (job.returncode != 0)
    found = re.findall(r"step (\d+) on (\d) ranks: loss (\S+)", printed)
    assert {size for _, size, _ in found} == {"4", "3", "6"} and {int(step) for step, _, _ in found} == {*range(1, 61)}
    names = runpy.run_path(str(tmp_path / "train.py"))
    torch.manual_seed(0)
    model = names["Model"]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(60):
        loss = model(**names["load_batch"](step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for number, _, other in found:
            assert int(number) != step + 1 or abs(float(other) - loss.item()) < 1e-5 * loss.item()


@pytest.mark.nightly
def test_plan_a_transfer_of_a_model(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    (block,) = (block for block in code_blocks(DOCS / "plan-models.md", "text") if "--model config.json" in block)
    command, *expected = block.splitlines()
    assert _run(shlex.split(command.removeprefix("$ "))) == 0
    assert capsys.readouterr().out.splitlines()[: len(expected) - 1] == expected[:-1]


def test_plan_a_transfer_over_the_network_of_the_help(tmp_path, monkeypatch, capsys):
    """The topology that ``--help`` shows is one: no other file is needed to describe a cluster."""
    monkeypatch.setenv("COLUMNS", "100000")
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = re.search(r"or a JSON or YAML file: (\{.*\})\. Ranks", capsys.readouterr().out)[1]
    path = tmp_path / "cluster.json"
    path.write_text(text)
    arguments = [
        "plan",
        "--shape",
        "4096,4096",
        "--src-mesh",
        "8x8",
        "--src",
        "S0 R",
        "--dst-mesh",
        "8x8",
        "--dst",
        "R S0",
    ]
    assert main([*arguments, "--topology", str(path)]) == 0
    assert "lower bound" in capsys.readouterr().out


@pytest.mark.integration
def test_draw_a_plan(tmp_path, capsys):
    (words,) = commands(DOCS / "concepts.md", "sh", "--format html")
    assert words[-2:] == [">", "plan.html"]
    assert _run(words[:-2]) == 0
    path = tmp_path / "plan.html"
    path.write_text(capsys.readouterr().out)
    assert "plan is faster than" in path.read_text()
    if find_browser() is not None:
        with Browser(find_browser()) as browser:
            assert browser.open(path, WIDTHS[0]) == []


@pytest.mark.integration
def test_search_a_training_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = DOCS / "strategy-search.md"
    ((*words, option, name),) = ([*command, "--html", "plan.html"] for command in commands(page, "sh", "transformer:"))
    assert f"`{option} {name}`" in page.read_text()
    assert _run([*words, option, name]) == 0
    shown = capsys.readouterr().out
    for term in ("layers reach 0.5 of --flops 3.12e+14 (--efficiency)", "balance", "stage 0", "step", "memory"):
        assert term in shown, term
    assert "<div class='stage'>" in (tmp_path / name).read_text()


@pytest.mark.integration
def test_train_with_a_checkpoint_and_continue(tmp_path, monkeypatch, capfd):
    """The command of the page that saves a checkpoint, with a smaller model on two ranks, and again with ``--resume``."""
    monkeypatch.chdir(tmp_path)
    page = commands(DOCS / "training-presets.md", "sh", "--checkpoint gpt3.checkpoint")
    (words,) = (command for command in page if "--checkpoint" in command)
    words += ["--shrink", "24", "--meshes", "1x1,1x1", "--batch", "8", "--microbatches", "4", "--report", "none"]
    assert _run([*words, "--steps", "1"]) == 0
    assert "step 1: saved a checkpoint in gpt3.checkpoint" in capfd.readouterr().err
    assert _run([*words, "--steps", "2", "--resume"]) == 0
    shown = capfd.readouterr()
    assert "continuing at step 1" in shown.err and "step 2: saved a checkpoint in gpt3.checkpoint" in shown.err


def test_a_mistake_in_any_name_of_the_plan_of_the_readme_is_named(capsys):
    """Each name in a command of the README, with one letter too many, is an error that names the right one."""
    (words,) = ([*command, "--dtype", "float32"] for command in commands(ROOT / "README.md", "console", "reshard plan"))
    words += ["--strategy", "multicast", "--topology", "dgx_h100", "--compression", "int8x128"]
    names = {"plan", "float32", "multicast", "dgx_h100", "int8x128"}
    assert names < set(words)
    for name in sorted(names):
        wrong = [f"{word[:-1]}x{word[-1]}" if word == name else word for word in words]
        try:
            code = _run(wrong)
        except SystemExit as error:
            code = error.code
        assert code == 2
        assert f"did you mean '{name}'?" in capsys.readouterr().err, name


def test_every_statement_about_other_systems_has_a_source():
    page = DOCS / "weights-comparison.md"
    text, sources = page.read_text().split("## Sources")
    used = {int(number) for group in re.findall(r" \[([\d, ]+)\]", text) for number in group.split(",")}
    assert used == {int(number) for number in re.findall(r"^(\d+)\. ", sources, flags=re.M)}
    for system, *_ in table(page, "| system | what a trainer sends |"):
        assert re.search(r"\[\d+\]", system) or system == "`reshard.weights`", system


@pytest.mark.integration
def test_change_one_line():
    (first, *_) = commands(ROOT / "CONTRIBUTING.md", "sh", "the fast tests of a file")
    assert first[0] == ".venv/bin/python"
    run = subprocess.run([sys.executable, *first[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    for block in ("the fast tests of a file", "test_native_equals_reference"):
        for words in commands(ROOT / "CONTRIBUTING.md", "sh", block):
            assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), words


def test_every_command_of_the_pages_is_one(capsys):
    """Every ``reshard`` command in a block of a page names a command and options that exist."""
    checked = 0
    for page in PAGES:
        for language in ("sh", "bash", "console"):
            for block in code_blocks(page, language):
                for line in block.replace("\\\n", " ").splitlines():
                    words = shlex.split(line.removeprefix("$ "), comments=True) if "reshard " in line else []
                    if words[:1] == ["reshard"]:
                        with pytest.raises(SystemExit):
                            main([words[1], "--help"])
                        shown = capsys.readouterr().out
                        options = [word.split("=")[0] for word in words[2:] if word.startswith("--")]
                        assert [option for option in options if option not in shown] == [], (page, line)
                        checked += 1
    assert checked > 5
