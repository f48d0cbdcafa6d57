"""Output of a training run: a progress bar on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from reshard.formatting import format_seconds

from ..model_stages.totals import StepResult
from .models.model_presets import GPTConfig, Preset


class Progress:
    """Shows the loss, the norm of the gradients, the throughput and the exposed communication.

    Exposed communication is the share of a step in which a pp rank of the schedule only waits for transfers of tensors
    that are already computed. The largest share of all pp ranks is shown.

    Args:
        name: name of the run.
        start: number of steps that an earlier run has done.
        steps: number of steps at the end of the run, those before ``start`` included.
        preset: gives the samples or tokens of a step.
        log_every: number of steps between printed lines, and between measured steps.
        shows: whether to print at all.
    """

    def __init__(self, name: str, start: int, steps: int, preset: Preset, log_every: int, shows: bool) -> None:
        self._unit = "tokens/s" if isinstance(preset.config, GPTConfig) else "images/s"
        self._per_step = preset.num_samples * (preset.config.sequence if isinstance(preset.config, GPTConfig) else 1)
        self._start, self._steps, self._log_every, self._shows = start, steps, log_every, shows
        self._exposed = ""
        self._since, self._last = time.monotonic(), start
        self._begun = self._since
        self._bar: Any = None
        if shows and sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                bar_format = "{desc}: {n}/{total} |{bar:16}| {elapsed}<{remaining}{postfix}"
                self._bar = tqdm(total=steps, initial=start, desc=name, dynamic_ncols=True, bar_format=bar_format)
        elif shows and start:
            self.note(f"{name}: continuing at step {start}")

    def wants_times(self, step: int) -> bool:
        """Whether to measure the times of a step, counted from 0, and print a line after it."""
        return step == self._start or (step + 1) % self._log_every == 0 or step + 1 == self._steps

    def advance(self, step: int, result: StepResult, norm: float) -> None:
        """Count a step, and print its line if it has one.

        Args:
            step: number of the step, from 0.
            result: its result.
            norm: norm of the gradients.
        """
        if self._bar is not None:
            self._bar.update()
        if result.timeline is not None:
            timeline = result.timeline
            pp_ranks = {span.pp_rank for span in timeline.spans}
            share = max(timeline.exposed_seconds(pp_rank) for pp_rank in pp_ranks) / timeline.makespan_seconds
            self._exposed = f", {share:.1%} exposed communication"
        if not self.wants_times(step):
            return
        now = time.monotonic()
        throughput = self._per_step * (step + 1 - self._last) / (now - self._since)
        self._since, self._last = now, step + 1
        left = (now - self._begun) / (step + 1 - self._start) * (self._steps - step - 1)
        skipped = "" if result.finite else ", not finite: skipped"
        speed = f"{_format_rate(throughput)} {self._unit}"
        text = f"loss {result.loss:.4f}, norm {norm:.3g}, {speed}{self._exposed}{skipped}"
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        else:
            self.note(f"step {step + 1}: {text}{f', about {format_seconds(round(left))} left' if left >= 1 else ''}")

    def note(self, text: str) -> None:
        """Print a line."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif self._shows:
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _format_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
