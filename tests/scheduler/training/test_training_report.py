"""The report of a training run: the same after a kill, and useful without matplotlib."""

from __future__ import annotations

import importlib.util
import resource
import shutil

import pytest

from reshard.errors import ArgumentError
from reshard.scheduler import Pipeline, one_f_one_b, simulate_schedule
from reshard.scheduler.training import training_report as report_module
from reshard.scheduler.training.training_report import RunFolder, check_report, read_losses

PIPELINE = Pipeline.of_costs([1.0, 2.0], [2.0, 3.0], [0.5])
SCHEDULE = one_f_one_b(PIPELINE, 4)


def write_steps(report, first, last):
    for step in range(first, last + 1):
        report.add(step, loss=5.0 / step + 1e-17)
        if step % 4 == 0:
            report.add(step, held_out=6.0 / step)


def finish(report, is_measured=True):
    timeline = simulate_schedule(SCHEDULE, PIPELINE)
    return report.finish("run", SCHEDULE, timeline if is_measured else None, timeline)


def kill_and_continue(folder):
    """Write 9 steps and half a line, with the last checkpoint after step 6; then continue to step 12."""
    with RunFolder(folder, 0) as report:
        write_steps(report, 1, 9)
    with (folder / "losses.csv").open("a") as file:
        file.write("1")
    report = RunFolder(folder, 6)
    write_steps(report, 7, 12)
    return report


def test_a_killed_run_leaves_the_losses_of_a_whole_one_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    whole, killed = RunFolder(tmp_path / "whole", 0), kill_and_continue(tmp_path / "killed")
    write_steps(whole, 1, 12)
    assert "losses.csv, trace.json; no pictures, which need matplotlib: pip install 'reshard[train]'" in finish(whole)
    assert finish(killed, is_measured=False).endswith("killed: losses.csv; no pictures, which need matplotlib: "
                                                      "pip install 'reshard[train]'")  # fmt: skip
    assert (tmp_path / "whole/losses.csv").read_bytes() == (tmp_path / "killed/losses.csv").read_bytes()
    losses = read_losses(tmp_path / "killed")
    assert losses.training == tuple((step, 5.0 / step + 1e-17) for step in range(1, 13))
    assert losses.held_out == ((4, 1.5), (8, 0.75), (12, 0.5))


def test_a_file_that_is_no_report_is_refused(tmp_path):
    (tmp_path / "losses.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ArgumentError, match=r"losses.csv has the columns a, b, not step, loss, held_out: move it away"):
        RunFolder(tmp_path, 3)
    with pytest.raises(ArgumentError, match="cannot write the report"):
        RunFolder(tmp_path / "losses.csv", 0)


def test_a_full_disk_ends_no_run_and_the_file_is_whole_when_there_is_room_again(tmp_path):
    warnings = []
    report = RunFolder(tmp_path, 0, warnings.append)
    write_steps(report, 1, 4)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, limits[1]))
    try:
        for step in range(5, 9):
            report.add(step, loss=5.0 / step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (text,) = warnings
    assert text.startswith(f"warning: cannot write {tmp_path}/losses.csv: [Errno 27] File too large; the run continues")
    report.add(9, loss=0.5)
    report.close()
    assert [step for step, _ in read_losses(tmp_path).training] == list(range(1, 10))


def test_the_end_of_a_run_outlives_a_folder_that_is_gone_and_a_picture_that_fails(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("Image size of 1200x90000 pixels is too large")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(report_module, "draw_losses", fail)
    monkeypatch.setattr(report_module, "draw_schedules", fail)
    with RunFolder(tmp_path / "gone", 0) as report:
        write_steps(report, 1, 3)
        shutil.rmtree(tmp_path / "gone")
        write_steps(report, 4, 4)
        text = finish(report)
    assert "gone: losses.csv, trace.json; warning: no new losses.png: RuntimeError: Image size of 1200x90000" in text
    assert len(read_losses(tmp_path / "gone").training) == 4
    with RunFolder(tmp_path / "file", 0) as report:
        write_steps(report, 1, 3)
        shutil.rmtree(tmp_path / "file")
        (tmp_path / "file").touch()
        assert "file: nothing; warning: no new losses.csv: FileExistsError" in finish(report)


def test_a_folder_belongs_to_one_run_at_a_time_and_keeps_the_losses_of_the_run_before(tmp_path):
    with RunFolder(tmp_path, 0) as report:
        write_steps(report, 1, 2)
        for make in (lambda: RunFolder(tmp_path, 0), lambda: check_report(tmp_path)):
            with pytest.raises(ArgumentError, match="another run writes its report to"):
                make()
    kept = (tmp_path / "losses.csv").read_bytes()
    check_report(tmp_path)
    RunFolder(tmp_path, 0).close()
    assert (tmp_path / "losses.previous.csv").read_bytes() == kept


@pytest.mark.parametrize("line", ["1,x,", "\0\0\0", "", "1,2", "1.5,2,3"])
def test_a_damaged_line_is_named(tmp_path, line):
    (tmp_path / "losses.csv").write_text(f"step,loss,held_out\n1,2.0,\n{line}\n")
    with pytest.raises(ArgumentError, match=r"line 3 of .*losses.csv is '.*', not a step and its losses: move the"):
        RunFolder(tmp_path, 3)


@pytest.mark.integration
def test_a_killed_run_draws_the_pictures_of_a_whole_one(tmp_path):
    pytest.importorskip("matplotlib")
    whole, killed = RunFolder(tmp_path / "whole", 0), kill_and_continue(tmp_path / "killed")
    write_steps(whole, 1, 12)
    for report in (whole, killed):
        assert finish(report).endswith("losses.csv, trace.json, losses.png, schedule.png")
    for name in ("losses.png", "schedule.png"):
        picture = (tmp_path / "whole" / name).read_bytes()
        assert picture.startswith(b"\x89PNG") and picture == (tmp_path / "killed" / name).read_bytes()
