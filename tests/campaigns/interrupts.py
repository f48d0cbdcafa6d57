"""Interrupt a call on one rank at every line that it runs, and check what all ranks do then.

``python -m tests.campaigns.interrupts mover --every 10``. A trial makes a group of two ranks, calls once, calls again
with an exception at one line on rank 1, and calls a third time. The second and third calls must return the data of their
step, or raise an error of this package; the second may raise the exception itself on rank 1, and must name rank 1 on
rank 0 if it raises. Then everything is closed, and no thread or descriptor may be left.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh
from reshard.compression import WeightSync
from reshard.scheduler import Edge, Pipeline, Stage, StageOutput, one_f_one_b
from reshard.scheduler.runtime.engine import Engine
from reshard.testing.processes import LaunchError, run_processes

PACKAGES = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in ("reshard", "scheduler"))
ROWS, COLUMNS = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2"), "R S0")
SHAPE = (4, 6)
#: ``timeout_seconds`` of each call; a longer call is reported; after the third, an alarm ends the call.
TIMEOUT_SECONDS, SLOW_SECONDS, HANG_SECONDS = 8.0, 4.0, 15
#: How long threads and descriptors may take to go after everything is closed.
RELEASE_SECONDS = 5.0


class HangError(Exception):
    """Raised in a call that does not return."""


class Interrupt(KeyboardInterrupt):
    """Raised at one line of a call."""


class Tracer:
    """Counts the lines of this package that run in a ``with`` block, and raises an exception at one of them.

    Args:
        at: number of the line, from 0; None: count only.
    """

    def __init__(self, at=None):
        self.at, self.num_lines, self.where = at, 0, ""

    def __enter__(self):
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter_frame(self, frame, event, argument):
        return self._trace if frame.f_code.co_filename.startswith(PACKAGES) else None

    def _trace(self, frame, event, argument):
        if event == "line":
            self.num_lines += 1
            if self.num_lines - 1 == self.at:
                sys.settrace(None)
                name = frame.f_code.co_filename.removeprefix(os.path.commonpath(PACKAGES) + os.sep)
                self.where = f"{name}:{frame.f_lineno}"
                raise Interrupt(self.where)
        return self._trace


class Calls:
    """Calls of :func:`reshard.reshard`."""

    def __init__(self, group):
        self.group = group

    def run(self, source):
        """Move one tensor, whose rows this rank holds."""
        return reshard.reshard(source, ROWS, COLUMNS, group=self.group, timeout_seconds=TIMEOUT_SECONDS)

    def close(self):
        """Nothing is open."""


class Movers(Calls):
    """Transfers of one Mover."""

    def __init__(self, group):
        plan = reshard.make_plan(ROWS, COLUMNS, SHAPE, "float32")
        self.mover = reshard.Mover(plan, group, timeout_seconds=TIMEOUT_SECONDS)

    def run(self, source):
        """See :class:`Calls`."""
        return self.mover(source)

    def close(self):
        """Close the Mover."""
        self.mover.close()


class Syncs(Calls):
    """Versions of a WeightSync."""

    def __init__(self, group):
        self.sync = WeightSync(ROWS, COLUMNS, {"w": SHAPE}, "float32", group=group, timeout_seconds=TIMEOUT_SECONDS)
        self.out, self.version = torch.zeros(SHAPE[0], SHAPE[1] // 2), 0

    def run(self, source):
        """Send the next version."""
        self.version += 1
        self.sync({"w": source}, {"w": self.out}, version=self.version)
        return self.out.clone()


class Steps(Calls):
    """Steps of an engine with one stage on each rank. The data of a step is the gradient of the other stage's input."""

    def __init__(self, group):
        meshes = [Mesh([stage]) for stage in range(2)]
        x = reshard.TensorSpec((2, 6), "float32", *map(Layout, meshes), "x")
        pipeline = Pipeline(tuple(Stage(1.0, 1.0, 1.0, mesh=mesh) for mesh in meshes), (Edge(0, 1, tensors=(x,)),))
        self.rank = dist.get_rank()
        self.stage = _Times(self.rank == 1)
        schedule = one_f_one_b(pipeline, 2)
        self.engine = Engine(schedule, pipeline, {self.rank: self.stage}, group=group, timeout_seconds=TIMEOUT_SECONDS)

    def run(self, source):
        """Run a step on two halves of the values of both ranks. Returns this rank's columns of the values."""
        step = round(float(source[0, 0]) / 100) if self.rank == 0 else round((float(source[0, 0]) - 12) / 100)
        values, self.stage.weight.grad = _values(step), None
        self.engine.step({0: [{"x": values[:2]}, {"x": values[2:]}]})
        # The loss of a half is the sum of its values times both weights, which are 1.
        is_right = float(self.stage.weight.grad) == float(values.sum()) / 2
        return values[:, 3 * self.rank : 3 * self.rank + 3] + (not is_right)

    def close(self):
        """Close the engine."""
        self.engine.close()


class _Times(torch.nn.Module):
    def __init__(self, is_last):
        super().__init__()
        self.weight, self.is_last = torch.nn.Parameter(torch.ones(())), is_last

    def forward(self, x):
        x = x * self.weight
        return StageOutput(loss=x.sum()) if self.is_last else {"x": x}


KINDS = {"reshard": Calls, "mover": Movers, "weight_sync": Syncs, "engine": Steps}
#: Statements where only a tracer can raise: Python looks for signals after calls and at jumps, but a lock has been
#: released after the call that ends its ``with`` block, and nothing is called before the ``try`` of a wrapper.
OUT_OF_REACH = ("with self._lock:", "with _lock:", "with group.lock:", "try:")


def _values(step):
    return torch.arange(24.0).view(SHAPE) + 100 * step


def _call(calls, rank, step):
    """The outcome of a call: ``"right"``, ``"wrong"``, or the class and text of its error; and its seconds."""
    source, wanted = _values(step)[2 * rank : 2 * rank + 2], _values(step)[:, 3 * rank : 3 * rank + 3]
    begun = time.monotonic()
    signal.signal(signal.SIGALRM, _ring)
    signal.alarm(HANG_SECONDS)
    try:
        outcome = "right" if torch.equal(calls.run(source), wanted) else "wrong"
    except BaseException as error:
        outcome = f"{type(error).__module__}.{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return outcome, time.monotonic() - begun


def _ring(*_):
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGES):
        frame = frame.f_back
    raise HangError("nowhere" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}")


def count_lines(rank, kind):
    """Number of lines of a call on this rank."""
    calls = KINDS[kind](dist.new_group([0, 1]))
    _call(calls, rank, 0)
    with Tracer() as tracer:
        _call(calls, rank, 1)
    dist.barrier()
    return tracer.num_lines


def run_trial(rank, kind, line):
    """Where a line is, the outcomes of the second and third call on this rank, and what closing leaves."""
    before = _resources()
    calls = KINDS[kind](group := dist.new_group([0, 1]))
    assert _call(calls, rank, 0)[0] == "right"
    dist.barrier()
    with Tracer(line if rank == 1 else -1) as tracer:
        outcomes = [_call(calls, rank, 1)]
    outcomes += [_call(calls, rank, 2)]
    try:
        calls.close()
        closed = ""
    except BaseException as error:
        closed = f"close() raises {type(error).__name__}: {error}"
    dist.destroy_process_group(group)
    del group, calls
    left = _left_since(before)
    dist.barrier()
    return tracer.where, outcomes, closed, left


def _resources():
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def _left_since(before):
    begun = since = time.monotonic()
    while True:
        gc.collect()  # the traceback of an error of a thread that has just ended holds its connections in a cycle
        now = _resources()
        if all(a <= b for a, b in zip(now, before, strict=True)):
            return ""
        frames = sys._current_frames()
        stacks = [
            traceback.format_stack(frames[thread.ident])[-1]
            for thread in threading.enumerate()[1:]
            if thread.ident in frames
        ]
        # Gloo does not wake a wait for a message of which a part was sent. So a thread that waits in Gloo may stay until
        # the transfer's timeout.
        if time.monotonic() - begun < TIMEOUT_SECONDS and any("in wait_for\n" in stack for stack in stacks):
            since = time.monotonic()
        if time.monotonic() - since > RELEASE_SECONDS:
            return f"{now[0] - before[0]} threads and {now[1] - before[1]} descriptors are left: {stacks}"
        time.sleep(0.1)


def judge(trial):
    """What is wrong in a trial, as one text; "" if nothing is. ``trial`` has the entries of both ranks."""
    (_, other, closed_other, left_other), (_, own, closed, left) = trial
    for rank, outcomes in ((0, other), (1, own)):
        for number, (outcome, seconds) in enumerate(outcomes):
            is_ours = outcome.startswith("reshard.errors.") or (rank == 1 and "Interrupt:" in outcome and not number)
            if outcome == "wrong":
                return f"wrong data on rank {rank} in call {number + 2}"
            if outcome != "right" and not is_ours:
                return f"rank {rank}, call {number + 2}: raw error {outcome[:150]}"
            if seconds > SLOW_SECONDS:
                return f"rank {rank}, call {number + 2}: {seconds:.1f} s until {outcome[:150]}"
    first = other[0][0]
    if first != "right" and "rank 1" not in first:
        return f"rank 0 does not name rank 1: {first[:150]}"
    return next((text for text in (closed_other, closed, left_other, left) if text), "")


def run_campaign(kind, every, first=0):
    """Run trials at every so many lines. Returns the number of trials, and ``{what is wrong: places}``."""
    num_lines = run_processes(count_lines, 2, kind)[1]
    lines = range(first % every, num_lines, every)
    wrong = {}
    for line in lines:
        text, place = _try_line(kind, line)
        if text and _statement(place) not in OUT_OF_REACH:
            wrong.setdefault(text, []).append(place)
    return len(lines), wrong


def _try_line(kind, line):
    """What is wrong after an interrupt at a line, and where it is."""
    try:
        trial = run_processes(run_trial, 2, kind, line, timeout_seconds=90.0, grace_seconds=20.0)
    except LaunchError as error:
        return f"a rank hangs or fails: {str(error).splitlines()[-1][:150]}", f"line {line}"
    return judge(trial), trial[1][0]


def _statement(place):
    """The source of a place such as ``reshard/errors.py:3``."""
    name, _, number = place.rpartition(":")
    path = Path(__file__).parents[2] / name
    return path.read_text().splitlines()[int(number) - 1].strip() if name and path.is_file() else ""


def main():
    """Print what is wrong, with its places. Returns 0 if nothing is."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.interrupts", description=__doc__)
    parser.add_argument("kind", nargs="*", default=list(KINDS), choices=[*KINDS, []], help="calls; default: all")
    parser.add_argument("--every", type=int, default=1, help="try every so many lines; default: all")
    parser.add_argument("--first", type=int, default=0, help="number of the first line")
    options = parser.parse_args()
    failed = False
    for kind in options.kind:
        begun = time.monotonic()
        num, wrong = run_campaign(kind, options.every, options.first)
        print(f"{kind}: {num} trials in {time.monotonic() - begun:.0f} s, {sum(map(len, wrong.values()))} wrong")
        for text, places in sorted(wrong.items(), key=lambda one: -len(one[1])):
            print(f"  {len(places):4} {text}: {', '.join(f'{a} x{n}' for a, n in Counter(places).most_common(6))}")
        failed = failed or bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
