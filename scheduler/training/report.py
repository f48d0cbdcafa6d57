"""What a training run leaves behind: its losses, and the last measured step beside the predicted one.

A report is a folder. ``losses.csv`` has a line for each step. A run that continues drops the lines of the steps that it
repeats, so a run that was killed leaves the same file as one that was not. The pictures need matplotlib.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.errors import ArgumentError

from ..ir.actions import Kind
from ..ir.schedule import Schedule
from ..simulation.replay import PipelineTimeline
from ..simulation.visualize import COLOURS, WAIT, to_chrome_trace

_HEADER = ("step", "loss", "held_out")
#: Inches of a picture, and the height of one line of a schedule.
_WIDTH, _LINE_HEIGHT = 10.0, 0.35


@dataclass(frozen=True)
class Losses:
    """Losses of a run.

    Attributes:
        training: number of each step, from 1, and its loss. held_out: the same of each evaluation.
    """

    training: tuple[tuple[int, float], ...]
    held_out: tuple[tuple[int, float], ...]


class Report:
    """The folder of a run. Only one rank makes a report. It is a context manager, which closes it.

    Args:
        folder: where to write. It is created.
        start: number of steps that an earlier run has done. Lines of later steps are dropped.

    Raises:
        ArgumentError: the folder cannot be made, or ``losses.csv`` there is not one of this module.
    """

    def __init__(self, folder: str | Path, start: int) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / "losses.csv"
            lines = _read_lines(path) if start else []
            kept = [_HEADER, *(line for line in lines if int(line[0]) <= start)]
            made = path.with_suffix(".new")  # so that the lines outlive a kill at this moment
            made.write_text("".join(",".join(line) + "\n" for line in kept), encoding="utf-8")
            made.replace(path)
            self._file = path.open("a", encoding="utf-8", newline="")
        except OSError as error:
            raise ArgumentError(f"cannot write the report {str(self.folder)!r}: {error}") from None
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._last = list(kept[-1])

    def add(self, step: int, loss: float | None = None, held_out: float | None = None) -> None:
        """Write a line, of the training loss or of an evaluation after the step, counted from 1."""
        line = [str(step), *("" if value is None else repr(value) for value in (loss, held_out))]
        if line != self._last:  # as when a finished run is evaluated again
            self._writer.writerow(line)
            self._file.flush()  # before the checkpoint of this step
        self._last = line

    def close(self) -> None:
        """Close the file of the losses."""
        self._file.close()

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def finish(
        self, name: str, schedule: Schedule, measured: PipelineTimeline | None, predicted: PipelineTimeline
    ) -> str:
        """Write ``trace.json`` of the measured step, and the pictures ``losses.png`` and ``schedule.png``.

        Args:
            name: of the run. schedule: of a step. measured: its last measured step; None if there was none.
            predicted: the simulated step.

        Returns:
            What was written, and what was not, as text.
        """
        self.close()
        losses = read_losses(self.folder)
        written = ["losses.csv"]
        if measured is not None:
            (self.folder / "trace.json").write_text(to_chrome_trace(measured), encoding="utf-8")
            written.append("trace.json")
        if importlib.util.find_spec("matplotlib") is None:
            return f"{_list(self.folder, written)}; no pictures, which need matplotlib: pip install 'reshard[train]'"
        if losses.training:
            draw_losses(losses, name, self.folder / "losses.png")
            written.append("losses.png")
        if measured is not None:
            draw_schedules(schedule, measured, predicted, self.folder / "schedule.png")
            written.append("schedule.png")
        return _list(self.folder, written)


def _list(folder: Path, names: Sequence[str]) -> str:
    return f"report in {folder}: {', '.join(names)}"


def _read_lines(path: Path) -> list[list[str]]:
    """The complete lines of a file of losses, without its header; none if there is no file.

    Raises:
        ArgumentError: it has another header.
    """
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(line for line in file if line.endswith("\n")))  # a killed run may end inside a line
    if lines and tuple(lines[0]) != _HEADER:
        raise ArgumentError(f"{path} has the columns {', '.join(lines[0])}, not {', '.join(_HEADER)}: move it away")
    return lines[1:]


def read_losses(folder: str | Path) -> Losses:
    """The losses in a report. Of an evaluation or a step that was repeated, the last one counts.

    Raises:
        ArgumentError: ``losses.csv`` has other columns.
    """
    columns: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for step, *values in _read_lines(Path(folder) / "losses.csv"):
        for column, value in zip(columns, values, strict=True):
            if value:
                column[int(step)] = float(value)
    training, held_out = (tuple(sorted(column.items())) for column in columns)
    return Losses(training, held_out)


def draw_losses(losses: Losses, title: str, path: Path) -> None:
    """Draw the training loss of each step and the held-out losses as a PNG."""
    figure = _new_figure(4.0)
    axes = figure.add_subplot()
    axes.plot(*zip(*losses.training, strict=True), color="C0", linewidth=1, label="training")
    if losses.held_out:
        axes.plot(*zip(*losses.held_out, strict=True), "o-", color="C1", markersize=4, label="held out")
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def draw_schedules(schedule: Schedule, measured: PipelineTimeline, predicted: PipelineTimeline, path: Path) -> None:
    """Draw a step as it ran above the predicted one, on one axis of time, as a PNG. Grey: exposed communication."""
    num = len(schedule.rank_actions)
    figure = _new_figure(1.6 + 2 * _LINE_HEIGHT * num)
    end = max(measured.makespan_seconds, predicted.makespan_seconds)
    scale = 1e3 if end < 1 else 1.0
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, timeline, what in ((upper, measured, "measured"), (lower, predicted, "predicted")):
        _draw_timeline(axes, timeline, num, scale)
        seconds = timeline.makespan_seconds
        axes.set_title(f"{schedule.name}, {what}: {seconds * scale:.4g} {'ms' if scale > 1 else 's'}", fontsize=9)
    lower.set_xlabel("milliseconds" if scale > 1 else "seconds")
    lower.set_xlim(0, end * scale or 1.0)
    names = {"forward": Kind.F, "backward": Kind.B, "weight gradients": Kind.W}
    used = {COLOURS[span.action.kind] for span in predicted.spans if not span.action.kind.is_transfer}
    handles = [_patch(COLOURS[kind], name) for name, kind in names.items() if COLOURS[kind] in used]
    figure.legend(handles=[*handles, _patch(WAIT, "waits for transfers")], loc="outside lower center", ncols=4)
    figure.savefig(path)


def _draw_timeline(axes: Any, timeline: PipelineTimeline, num_pp_ranks: int, scale: float) -> None:
    """One line per pp rank of the schedule, the first on top."""
    min_seconds = 0.012 * timeline.makespan_seconds  # a shorter box has no room for a number
    for span in timeline.spans:
        if span.exposed_seconds:
            start = span.start - span.exposed_seconds
            axes.barh(span.pp_rank, span.exposed_seconds * scale, left=start * scale, height=0.4, color=WAIT)
        if span.action.kind.is_transfer:
            continue
        width = span.end - span.start
        colour = COLOURS[span.action.kind]
        axes.barh(span.pp_rank, width * scale, left=span.start * scale, color=colour, edgecolor="white", linewidth=0.4)
        if width > min_seconds:
            middle = (span.start + span.end) / 2 * scale
            text = str(span.action.microbatch)
            axes.text(middle, span.pp_rank, text, ha="center", va="center", fontsize=6, clip_on=True)
    axes.set_yticks(range(num_pp_ranks), [f"pp rank {number}" for number in range(num_pp_ranks)])
    axes.set_ylim(num_pp_ranks - 0.4, -0.6)


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _new_figure(height: float) -> Any:
    """A figure of this height in inches that is drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
