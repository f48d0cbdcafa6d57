"""Progress bars on a terminal. In a pipe, or without tqdm, only :func:`show_elapsed` shows something: lines."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, TypeVar

from reshard.formatting import format_seconds

T = TypeVar("T")
#: An estimate of the time that is left is shown once this part of the work is done.
MIN_DONE = 0.01
#: Where no bar is shown, the first line on progress comes after this many seconds, and further lines at this interval.
FIRST_LINE_SECONDS, LINE_SECONDS = 1.0, 10.0


@contextlib.contextmanager
def show_progress(total: float, unit: str, *, show: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr during the block, unless ``show`` is false. It disappears at the end.

    Yields:
        ``advance(count=1, text="")``, which counts more units as done and shows ``text`` after the bar.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count=1, text="": None
        return
    tqdm.monitor_interval = 0  # no thread: callers fork
    done = "{n:.0f}/{total:.0f}"
    bar_format = f"{{l_bar}}{{bar}}| {done} {unit} [{{elapsed}}<{{remaining}}]{{postfix}}"
    disable = None if show else True  # None: a bar on a terminal only
    with tqdm(total=total, unit=unit, leave=False, disable=disable, dynamic_ncols=True, bar_format=bar_format) as bar:

        def advance(count: float = 1, text: str = "") -> None:
            if text:
                bar.set_postfix_str(text, refresh=False)
            bar.update(count)

        yield advance


@contextlib.contextmanager
def show_time(seconds: float, *, show: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar of the time since the start of the block, which is expected to take ``seconds``.

    Yields:
        ``tick(text="")``, which updates the bar and shows ``text`` after it.
    """
    begun, shown = time.monotonic(), 0.0
    with show_progress(seconds, "s", show=show) as advance:

        def tick(text: str = "") -> None:
            nonlocal shown
            elapsed = min(seconds, time.monotonic() - begun)
            advance(elapsed - shown, text)
            shown = elapsed

        yield tick


@contextlib.contextmanager
def show_elapsed(text: str, *, show: bool = True) -> Iterator[Callable[[float, str], None]]:
    """Show ``text`` and the time since the start of the block, whose length is unknown.

    On a terminal, a line is refreshed, and disappears at the end. Elsewhere, a line is printed to stderr after a
    second, and every ten seconds. The block must not fork, because a thread does this. Nothing is shown if ``show`` is
    false.

    Yields:
        ``report(done, step)``: the part of the work that is done, from 0 to 1, and the next step. From then on, the
        line shows the step, and about how much time is left.
    """
    ended, begun = threading.Event(), time.monotonic()
    total, step = math.inf, ""

    def report(done: float, next_step: str) -> None:
        nonlocal total, step
        total, step = ((time.monotonic() - begun) / done if done > MIN_DONE else math.inf), next_step

    def describe() -> str:
        left = total - (time.monotonic() - begun)
        return f"; {step}" * bool(step) + (
            f"; about {format_seconds(round(left))} left" if 1 <= left < math.inf else ""
        )

    bar: Any = None
    if show and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            tqdm.monitor_interval = 0
            bar = tqdm(desc=text, leave=False, bar_format="{desc}: {elapsed}{unit}", unit="")

    def refresh() -> None:
        while not ended.wait(0.5):
            bar.unit = describe()
            bar.refresh()

    def print_lines() -> None:
        seconds = FIRST_LINE_SECONDS
        while not ended.wait(seconds):
            print(f"{text}: {time.monotonic() - begun:.0f} s{describe()}", file=sys.stderr, flush=True)
            seconds = LINE_SECONDS

    with contextlib.ExitStack() as stack:
        if show:
            if bar is not None:
                stack.enter_context(bar)
            target = print_lines if bar is None else refresh
            thread = threading.Thread(target=target, name="reshard-progress-bar", daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(ended.set)
        yield report


def track(items: Iterable[T], unit: str, total: int | None = None, *, show: bool = True) -> Iterator[T]:
    """Yield items and show how many are done. ``total`` is their number; pass it if ``items`` has no length."""
    count = len(items) if total is None else total  # type: ignore[arg-type]
    with show_progress(count, unit, show=show) as advance:
        for item in items:
            yield item
            advance()


def print_line(text: str = "", file: TextIO | None = None) -> None:
    """Print a line to ``file`` (default: stdout), above the progress bar if there is one, and flush it."""
    file = sys.stdout if file is None else file
    try:
        from tqdm import tqdm
    except ImportError:
        print(text, file=file, flush=True)
        return
    tqdm.write(text, file=file)
    file.flush()
