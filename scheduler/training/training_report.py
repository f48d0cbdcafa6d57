"""The report of a training run: its losses, and the last measured step compared with the predicted one.

A report is a folder. ``losses.csv`` has a line for each step. A resumed run first drops the lines of the steps that it
repeats. So a killed and resumed run leaves the same file as an uninterrupted run. The pictures need matplotlib.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

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
        training: number of each step, from 1, and its loss.
        held_out: the same of each evaluation.
    """

    training: tuple[tuple[int, float], ...]
    held_out: tuple[tuple[int, float], ...]


class RunFolder:
    """The folder of a run. Only one rank makes a report. It is a context manager, which closes it.

    After it is made, a fault of the disk or of the drawing ends no run.

    Args:
        folder: where to write. It is created.
        start: number of steps that an earlier run has done. Lines of later steps are dropped. If it is 0, an earlier
            ``losses.csv`` becomes ``losses.previous.csv``.
        warn: function that is called with the text of a warning.

    Raises:
        ArgumentError: the folder cannot be written, another run writes it now, or ``losses.csv`` there is not one of
            this module.
    """

    def __init__(self, folder: str | Path, start: int, warn: Callable[[str], None] = warnings.warn) -> None:
        self.folder, self._warn = Path(folder), warn
        self._path = self.folder / "losses.csv"
        self._file: TextIO | None = None
        self._is_whole = True  # whether the file has all lines
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.folder)
            earlier = _read_lines(self._path)
            if earlier and not start:  # the losses of another run
                self._path.replace(self.folder / "losses.previous.csv")
            self._lines: list[Sequence[str]] = [_HEADER, *(line for line in earlier if int(line[0]) <= start)]
            self._write_all()
            self._file = self._path.open("a", encoding="utf-8", newline="")

    def add(self, step: int, loss: float | None = None, held_out: float | None = None) -> None:
        """Write a line, of the training loss or of an evaluation after the step, counted from 1.

        The first line that cannot be written gives a warning. :meth:`finish` then tries to write all lines.
        """
        line = [str(step), *("" if value is None else repr(value) for value in (loss, held_out))]
        if line == self._lines[-1]:  # as when a finished run is evaluated again
            return
        self._lines.append(line)
        if self._is_whole and self._file is not None:
            try:
                self._file.write(_format([line]))
                self._file.flush()  # before the checkpoint of this step
            except OSError as error:
                self._is_whole = False
                self._warn(
                    f"warning: cannot write {self._path}: {error}; the run continues, and tries again at its end"
                )

    def close(self) -> None:
        """Close the file of the losses. Write it again if lines are missing."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what is still in its buffer
                self._file.close()
            self._file = None
            if not self._is_whole:
                with contextlib.suppress(OSError):
                    self._write_all()
            if self._lock is not None:
                os.close(self._lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_all(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        made = self._path.with_suffix(".new")  # so that the lines outlive a kill at this moment
        made.write_text(_format(self._lines), encoding="utf-8")
        made.replace(self._path)

    def finish(
        self, name: str, schedule: Schedule, measured: PipelineTimeline | None, predicted: PipelineTimeline
    ) -> str:
        """Write ``trace.json`` of the measured step, and the pictures ``losses.png`` and ``schedule.png``.

        Args:
            name: name of the run.
            schedule: schedule of a step.
            measured: its last measured step; None if there was none.
            predicted: the simulated step.

        Returns:
            What was written, and what was not and why, as text.
        """
        losses, folder = _losses_of(self._lines[1:]), self.folder
        parts: dict[str, Callable[[], Any]] = {"losses.csv": self._write_all}
        if measured is not None:
            trace = to_chrome_trace(measured)
            parts["trace.json"] = lambda: (folder / "trace.json").write_text(trace, encoding="utf-8")
        has_matplotlib = _has_matplotlib()
        if has_matplotlib and losses.training:
            parts["losses.png"] = lambda: draw_losses(losses, name, folder / "losses.png")
        if has_matplotlib and measured is not None:
            parts["schedule.png"] = lambda: draw_schedules(schedule, measured, predicted, folder / "schedule.png")
        written, faults = [], []
        for part, write in parts.items():
            try:
                write()
                written.append(part)
            except Exception as error:  # as of a full disk, or of a broken matplotlib: the run itself is whole
                faults.append(f"; warning: no new {part}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        self._is_whole = "losses.csv" in written
        self.close()
        if not has_matplotlib:
            faults.append("; no pictures, which need matplotlib: pip install 'reshard[train]'")
        return f"report in {folder}: {', '.join(written) or 'nothing'}{''.join(faults)}"


def check_report(folder: str | Path) -> None:
    """Raise ArgumentError if a run cannot write its report to a folder. Makes nothing."""
    folder = Path(folder).absolute()
    with _writing(folder):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"1")
        if existing == folder:
            lock = _lock(folder)
            if lock is not None:
                os.close(lock)
            _read_lines(folder / "losses.csv")


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise ArgumentError in place of errors of the file system."""
    try:
        yield
    except OSError as error:
        raise ArgumentError(
            f"cannot write the report {str(folder)!r}: {error}; pass another folder, or --report none"
        ) from None


def _lock(folder: Path) -> int | None:
    """A descriptor that keeps a folder for one run until it is closed; None where the file system has no such locks.

    Raises:
        ArgumentError: another run has the folder.
    """
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ArgumentError(f"another run writes its report to {str(folder)!r} now; pass another --report") from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _has_matplotlib() -> bool:
    try:
        return importlib.util.find_spec("matplotlib") is not None
    except (ImportError, ValueError):  # as if an import hook refuses it
        return False


def _format(lines: Iterable[Sequence[str]]) -> str:
    return "".join(",".join(line) + "\n" for line in lines)


def _read_lines(path: Path) -> list[list[str]]:
    """The complete lines of a file of losses, without its header; none if there is no file.

    Raises:
        ArgumentError: it has another header, or a line that is no step with numbers.
    """
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        lines = list(csv.reader(line for line in file if line.endswith("\n")))  # a killed run may end inside a line
    if lines and tuple(lines[0]) != _HEADER:
        raise ArgumentError(f"{path} has the columns {', '.join(lines[0])}, not {', '.join(_HEADER)}: move it away")
    for number, line in enumerate(lines[1:], 2):
        if not _is_line(line):
            raise ArgumentError(
                f"line {number} of {path} is {','.join(line)!r:.80}, not a step and its losses: move the file away"
            )
    return lines[1:]


def _is_line(line: Sequence[str]) -> bool:
    try:
        step, *values = line
        _ = int(step), [float(value) for value in values if value]
    except ValueError:
        return False
    return len(line) == len(_HEADER)


def read_losses(folder: str | Path) -> Losses:
    """The losses in a report. Of an evaluation or a step that was repeated, the last one counts.

    Raises:
        ArgumentError: ``losses.csv`` is not one of this module.
    """
    return _losses_of(_read_lines(Path(folder) / "losses.csv"))


def _losses_of(lines: Iterable[Sequence[str]]) -> Losses:
    columns: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for step, *values in lines:
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
