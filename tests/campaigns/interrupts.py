"""Interrupt a call on one rank at every line that it runs, and check what all ranks do then.

``python -m tests.campaigns.interrupts mover --every 10``. A trial makes a group of two ranks, calls once, calls again
with an exception at one line on one rank, and calls a third time. The second and third calls must return the data of
their step, or raise an error of this package; the second may raise the exception itself on the interrupted rank, and must
name that rank on the other one if it raises. Then everything is closed, and no thread or descriptor may be left.

``--opening`` makes the first call on another group, so that the exception comes in the first call of the group, which
opens its connections. ``--signals 300`` sends SIGINT to the process of the rank at random times in the second call instead. ``--once`` tries each
line of the source once, though a call may run it many times.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import reshard
from reshard import Layout, Mesh, weights
from reshard.coordination import all_gather_json
from reshard.runtime.torch_compat import store_of
from reshard.scheduler import Edge, Pipe, Pipeline, Stage, StageOutput, one_f_one_b
from reshard.scheduler.model_stages.profile import StageProfile, StageTimes
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.testing.processes import LaunchError, run_processes

PACKAGES = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in ("reshard", "scheduler"))
ROWS, COLUMNS = Layout(Mesh.of("2"), "S0 R"), Layout(Mesh.of("2"), "R S0")
SHAPE = (4, 6)
#: Outcome of a call before which a signal came. Nobody can tell that from a call that the program skips.
NOT_BEGUN = "not begun"
PROFILE = StageProfile(1, (StageTimes(1.0, 1.0, 1.0, 1.0, 1),) * 2)
#: ``timeout_seconds`` of each call; a longer call is reported; after the third, an alarm ends the call.
TIMEOUT_SECONDS, SLOW_SECONDS, HANG_SECONDS = 8.0, 4.0, 15
#: A trial whose first call fails is repeated.
NUM_TRIES = 3
#: How long threads and descriptors may take to go after everything is closed.
RELEASE_SECONDS = 5.0


class HangError(Exception):
    """Raised in a call that does not return."""


class Interrupt(KeyboardInterrupt):
    """Raised at one line of a call."""


class Tracer:
    """Counts the lines of this package that run from start to stop, and raises an exception at one of them.

    The first line of an ``__exit__`` that such a line calls counts too: a signal can keep Python code from releasing a
    lock.

    Args:
        at: number of the line, from 0; None: count only.
    """

    def __init__(self, at=None):
        self.at, self.num_lines, self.where = at, 0, ""
        self.first_visits = {}  # place -> number of the line when it ran first

    def start(self):
        """Trace the functions that are called from now on."""
        sys.settrace(self._enter_frame)

    def stop(self):
        """Stop tracing."""
        sys.settrace(None)

    def _enter_frame(self, frame, event, argument):
        if frame.f_code.co_filename.startswith(PACKAGES):
            return self._trace
        if frame.f_code.co_name == "__exit__" and frame.f_back.f_code.co_filename.startswith(PACKAGES):
            self._visit(frame.f_back, " at __exit__")
        return None

    def _trace(self, frame, event, argument):
        if event == "line":
            self._visit(frame)
        return self._trace

    def _visit(self, frame, suffix=""):
        if self.at is None:
            self.first_visits.setdefault((frame.f_code.co_filename, frame.f_lineno, suffix), self.num_lines)
        self.num_lines += 1
        if self.num_lines - 1 == self.at:
            sys.settrace(None)
            name = frame.f_code.co_filename.removeprefix(os.path.commonpath(PACKAGES) + os.sep)
            self.where = f"{name}:{frame.f_lineno}{suffix}"
            raise Interrupt(self.where)


class Calls:
    """Calls of :func:`reshard.reshard`."""

    def __init__(self, group, folder):
        self.group = group

    def prepare(self, step):
        """What comes before the call of a step."""

    def run(self, source):
        """Move one tensor, whose rows this rank holds."""
        return reshard.reshard(source, ROWS, COLUMNS, group=self.group, timeout_seconds=TIMEOUT_SECONDS)

    def close(self):
        """Nothing is open."""


class Movers(Calls):
    """Transfers of one Mover."""

    def __init__(self, group, folder):
        plan = reshard.make_plan(ROWS, COLUMNS, SHAPE, "float32")
        self.mover = reshard.Mover(plan, group, timeout_seconds=TIMEOUT_SECONDS)

    def run(self, source):
        """See :class:`Calls`."""
        return self.mover(source)

    def close(self):
        """Close the Mover."""
        self.mover.close()


class Openings(Calls):
    """Lives of a Mover: each call makes one, moves a tensor, and closes it."""

    def prepare(self, step):
        """Make the plan, which is no call of the group."""
        self.plan = reshard.make_plan(ROWS, COLUMNS, SHAPE, "float32")

    def run(self, source):
        """See :class:`Calls`."""
        with reshard.Mover(self.plan, self.group, timeout_seconds=TIMEOUT_SECONDS) as mover:
            return mover(source)


class Steps(Calls):
    """Steps of an engine with one stage on each rank. The data of a step is the gradient of the other stage's input."""

    def __init__(self, group, folder):
        meshes = [Mesh([stage]) for stage in range(2)]
        x = reshard.TensorSpec((2, 6), "float32", *map(Layout, meshes), "x")
        pipeline = Pipeline(tuple(Stage(1.0, 1.0, 1.0, mesh=mesh) for mesh in meshes), (Edge(0, 1, tensors=(x,)),))
        self.rank = dist.get_rank()
        self.stage = _Times(self.rank == 1)
        schedule = one_f_one_b(pipeline, 2)
        self.engine = ScheduleEngine(
            schedule, pipeline, {self.rank: self.stage}, group=group, timeout_seconds=TIMEOUT_SECONDS
        )

    def run(self, source):
        """Run a step on two halves of the values of both ranks. Returns this rank's columns of the values."""
        step = _step_of(source, self.rank)
        values, self.stage.weight.grad = _values(step), None
        self.engine.step({0: [{"x": values[:2]}, {"x": values[2:]}]})
        # The loss of a half is the sum of its values times both weights, which are 1.
        is_right = float(self.stage.weight.grad) == float(values.sum()) / 2
        return values[:, 3 * self.rank : 3 * self.rank + 3] + (not is_right)

    def close(self):
        """Close the engine."""
        self.engine.close()


class Saves(Calls):
    """Saves of a model of two stages. Each stage has one parameter: the columns of its rank."""

    def __init__(self, group, folder):
        self.rank, self.folder = dist.get_rank(), folder
        example = {"x": torch.ones(2, 4, 3)}
        pipe = Pipe(TwoStages(), ["layers.1"], stages="1x1,1x1")
        self.engine = pipe.compile(
            example, 2, schedule=one_f_one_b, group=group, profile=PROFILE, timeout_seconds=TIMEOUT_SECONDS
        )
        ((self.name, self.weight),) = self.engine.named_parameters()
        self.optimizer = torch.optim.SGD([self.weight], 0.1, momentum=0.9)

    def save(self, step):
        """Save the values of a step."""
        self._fill(_values(step))
        self.engine.save(self.folder, self.optimizer, step=step, keep=9)

    def _fill(self, values):
        with torch.no_grad():
            self.weight.copy_(values[:, 3 * self.rank : 3 * self.rank + 3])

    def run(self, source):
        """Save the values of the step. Returns what the files then hold."""
        step = _step_of(source, self.rank)
        self.save(step)
        saved = {}
        for file in Path(self.folder, f"step-{step:08d}").glob("*.safetensors"):
            saved.update(load_file(file))
        return saved[f"model.{self.name}"]

    def close(self):
        """Close the engine."""
        self.engine.close()


class Loads(Saves):
    """Loads of the same model."""

    def __init__(self, group, folder):
        super().__init__(group, folder)
        for step in range(3):
            self.save(step)

    def run(self, source):
        """Load the values of the step."""
        step = _step_of(source, self.rank)
        self._fill(torch.zeros(SHAPE))
        loaded = self.engine.load(self.folder, self.optimizer, step=step)
        return self.weight.detach() + (loaded != step)


class Transfers(Calls):
    """Transfers of whole models."""

    def run(self, source):
        """Move a model with one tensor."""
        out = _shard(torch.zeros(SHAPE[0], SHAPE[1] // 2), 1)
        weights.transfer_state_dict(
            {"w": _shard(source, 0)}, {"w": out}, group=self.group, timeout_seconds=TIMEOUT_SECONDS
        )
        return out.to_local()


class Publishes(Calls):
    """Versions that a trainer of both ranks publishes for an engine of both ranks."""

    def __init__(self, group, folder):
        self.rank, store = dist.get_rank(), store_of(dist.group.WORLD)
        self.trained, self.served = torch.zeros(2, 6), torch.zeros(4, 3)
        limits = {"join_seconds": TIMEOUT_SECONDS, "timeout_seconds": TIMEOUT_SECONDS, "group": group}
        own = (2 * self.rank, 2 * self.rank + 2), (3 * self.rank, 3 * self.rank + 3)
        held = ({"w": (SHAPE, [(own[0], (0, 6))])}, {"w": (SHAPE, [((0, 4), own[1])])})
        self.subscriber = weights.Subscriber({"w": self.served}, store, shards=held[1], **limits)
        try:
            self.publisher = weights.Publisher({"w": self.trained}, store, shards=held[0], **limits)
        except BaseException:
            self.subscriber.close()
            raise

    def run(self, source):
        """Publish the values of a step, until the engine holds them."""
        step = _step_of(source, self.rank)
        self.trained.copy_(source)
        report = self.publisher.publish(step + 1).wait(TIMEOUT_SECONDS)
        is_right = set(report.engines.values()) == {""}
        return _values(step)[:, 3 * self.rank : 3 * self.rank + 3] + (not is_right)

    def close(self):
        """Close both ends. The engine must hold one version on both ranks before and after another update."""
        try:
            for _ in range(2):
                version = self.subscriber.version
                if version is not None:
                    assert torch.equal(self.served, _values(version - 1)[:, 3 * self.rank : 3 * self.rank + 3])
                assert len(set(all_gather_json(version))) == 1, "ranks of the engine hold different versions"
                with contextlib.suppress(reshard.ReshardError):
                    self.subscriber.update(1.0)
        finally:
            self.publisher.close()
            self.subscriber.close()


class Updates(Publishes):
    """Updates of the engine of such versions."""

    def prepare(self, step):
        """Publish the values of a step."""
        self.trained.copy_(_values(step)[2 * self.rank : 2 * self.rank + 2])
        self.publisher.publish(step + 1).wait(TIMEOUT_SECONDS)

    def run(self, source):
        """Swap in the values of the step."""
        version = self.subscriber.update(TIMEOUT_SECONDS)
        return self.served + (version != _step_of(source, self.rank) + 1)


class TwoStages(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(_Scale() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class _Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 3))

    def forward(self, x):
        return x * self.weight


class _Times(torch.nn.Module):
    def __init__(self, is_last):
        super().__init__()
        self.weight, self.is_last = torch.nn.Parameter(torch.ones(())), is_last

    def forward(self, x):
        x = x * self.weight
        return StageOutput(loss=x.sum()) if self.is_last else {"x": x}


KINDS = {
    "reshard": Calls,
    "mover": Movers,
    "open": Openings,
    "engine": Steps,
    "save": Saves,
    "load": Loads,
    "transfer": Transfers,
    "publish": Publishes,
    "update": Updates,
}
#: Imported here, so that no rank does so in its first call.
IMPORTED = weights.Publisher, weights.Subscriber, weights.transfer_state_dict
#: Statements where only a tracer can raise: Python looks for signals after calls and at jumps, but a lock has been
#: released after the call that ends its ``with`` block, and nothing is called before the ``try`` of a wrapper, or where
#: a group ends a call.
OUT_OF_REACH = (
    "with self._lock:",
    "with _lock:",
    "with group.lock:",
    "try:",
    "self._caller, self._may_nest = before",
)


def _values(step):
    return torch.arange(24.0).view(SHAPE) + 100 * step


def _shard(array, dim):
    """A DTensor on both ranks from the shard of this one."""
    return DTensor.from_local(array, DeviceMesh("cpu", [0, 1]), [Shard(dim)], run_check=False)


def _step_of(source, rank):
    return round((float(source[0, 0]) - 12 * rank) / 100)


def _call(calls, rank, step, interruption=None):
    """The outcome of a call: ``"right"``, ``"wrong"``, or the class and text of its error; and its seconds.

    ``interruption`` is a :class:`Tracer` or :class:`Signal` that starts with the call.
    """
    source, wanted = _values(step)[2 * rank : 2 * rank + 2], _values(step)[:, 3 * rank : 3 * rank + 3]
    begun = time.monotonic()
    signal.signal(signal.SIGALRM, _ring)
    signal.alarm(HANG_SECONDS)
    outcome = ""
    try:
        calls.prepare(step)
        begun = time.monotonic()
        if interruption is not None:
            interruption.start()
        outcome = "right" if torch.equal(calls.run(source), wanted) else "wrong"
        if interruption is not None:
            interruption.stop()
    except BaseException as error:
        sys.settrace(None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        has_begun = any(f.f_code.co_filename.startswith(PACKAGES) for f, _ in traceback.walk_tb(error.__traceback__))
        outcome = outcome or (f"{type(error).__module__}.{type(error).__name__}: {error}" if has_begun else NOT_BEGUN)
    finally:
        signal.alarm(0)
    return outcome, time.monotonic() - begun


def _ring(*_):
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGES):
        frame = frame.f_back
    raise HangError("nowhere" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}")


class Signal:
    """Sends SIGINT to this process after some time, from another thread."""

    def __init__(self, seconds):
        self.where = f"after {1000 * seconds:.2f} ms"
        self._thread = threading.Thread(target=self._send, args=(seconds,))

    def start(self):
        """Begin the time."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._thread.start()

    def _send(self, seconds):
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    def stop(self):
        """Wait until the signal was sent. Raises KeyboardInterrupt if it was not handled before."""
        self._thread.join()


def _begin(rank, kind, folder, opening):
    """A group, calls on it, and the outcome of a first call. With ``opening``, that call was on another group."""
    calls = KINDS[kind](group := dist.new_group([0, 1]), folder)
    first = _call(calls, rank, 0)
    if opening:
        calls.close()
        reshard.close_group(group)
        dist.destroy_process_group(group)
        calls = KINDS[kind](group := dist.new_group([0, 1]), folder)
    return group, calls, first


def count_lines(rank, kind, victim, once, folder, opening=False):
    """Numbers of the lines of a call on this rank, and its seconds."""
    (_, calls, first), tracer = _begin(rank, kind, folder, opening), Tracer()
    outcomes = [first, _call(calls, rank, 1, tracer)]
    dist.barrier()
    outcomes.append(_call(calls, rank, 2))
    if any(outcome != "right" for outcome, _ in outcomes):
        raise AssertionError(f"calls that nothing interrupts end with {outcomes}")
    dist.barrier()
    calls.close()
    seconds = min(first[1], outcomes[1][1]) if opening else outcomes[-1][1]
    return sorted(tracer.first_visits.values()) if once else list(range(tracer.num_lines)), seconds


def run_trial(rank, kind, victim, at, folder, opening=False):
    """Where a call is interrupted, the outcomes of the second and third call on this rank, and what closing leaves.

    None if the first call fails on a rank, as on an overloaded machine.

    Args:
        at: the number of the line, an int; or the seconds until a signal, a float.
        opening: the first call is on another group.
    """
    before = _resources()
    try:
        group, calls, (first, _) = _begin(rank, kind, folder, opening)
    except reshard.ReshardError as error:
        first = str(error)
    if all_gather_json(first) != ["right", "right"]:
        return None
    interruption = (Signal(at) if isinstance(at, float) else Tracer(at)) if rank == victim else None
    outcomes = [_call(calls, rank, 1, interruption), _call(calls, rank, 2)]
    try:
        calls.close()
        if opening:
            reshard.close_group(group)
        closed = ""
    except BaseException as error:
        closed = f"close() raises {type(error).__name__}: {error}"
    dist.destroy_process_group(group)
    del group, calls
    left = _left_since(before)
    dist.barrier()
    return "" if interruption is None else interruption.where, outcomes, closed, left


def _resources():
    """The number of threads, and what each descriptor is open on."""
    descriptors = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of the list itself
            descriptors[number] = os.readlink(f"/proc/self/fd/{number}")
    return threading.active_count(), descriptors


def _left_since(before):
    begun = since = time.monotonic()
    while True:
        gc.collect()  # the traceback of an error of a thread that has just ended holds its connections in a cycle
        now = _resources()
        if now[0] <= before[0] and len(now[1]) <= len(before[1]):
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
            num, more = now[0] - before[0], Counter(now[1].values()) - Counter(before[1].values())
            return f"{num} threads and {len(now[1]) - len(before[1])} descriptors are left: {stacks}, {dict(more)}"
        time.sleep(0.1)


def judge(trial, victim):
    """What is wrong in a trial, as one text; "" if nothing is. ``trial`` has the entries of both ranks."""
    if trial[victim][1][0][0] == NOT_BEGUN:
        return ""
    for rank, (_, outcomes, _, _) in enumerate(trial):
        for number, (outcome, seconds) in enumerate(outcomes):
            is_own = rank == victim and "Interrupt:" in outcome and not number
            if outcome == "wrong":
                return f"wrong data on rank {rank} in call {number + 2}"
            if outcome != "right" and not outcome.startswith("reshard.errors.") and not is_own:
                return f"rank {rank}, call {number + 2}: raw error {outcome[:150]}"
            if seconds > SLOW_SECONDS:
                return f"rank {rank}, call {number + 2}: {seconds:.1f} s until {outcome[:150]}"
    first = trial[1 - victim][1][0][0]
    if first != "right" and f"rank {victim}" not in first:
        return f"rank {1 - victim} does not name rank {victim}: {first[:150]}"
    return next((text for _, _, *texts in trial for text in texts if text), "")


def run_campaign(kind, every=1, first=0, victim=1, once=False, opening=False):
    """Run trials at every so many lines. Returns the number of trials, and ``{what is wrong: places}``."""
    with tempfile.TemporaryDirectory() as folder:
        lines, _ = run_processes(count_lines, 2, kind, victim, once, folder, opening)[victim]
    chosen = lines[first % every :: every]
    wrong = {}
    for line in chosen:
        text, place = _try(kind, victim, line, opening)
        if text and _statement(place) not in OUT_OF_REACH:
            wrong.setdefault(text, []).append(place)
    return len(chosen), wrong


def run_signals(kind, num, seed=0, victim=1, opening=False):
    """The same with SIGINT at ``num`` random times, up to one and a half times that of a call."""
    with tempfile.TemporaryDirectory() as folder:
        _, seconds = run_processes(count_lines, 2, kind, victim, False, folder, opening)[victim]
    chance = random.Random(seed)
    wrong = {}
    for _ in range(num):
        text, place = _try(kind, victim, chance.uniform(0.0, 1.5 * seconds), opening)
        if text:
            wrong.setdefault(text, []).append(place)
    return num, wrong


def _try(kind, victim, at, opening):
    """What is wrong after an interrupt, and where it is."""
    try:
        for _ in range(NUM_TRIES):
            with tempfile.TemporaryDirectory() as folder:
                trial = run_processes(
                    run_trial, 2, kind, victim, at, folder, opening, timeout_seconds=90.0, grace_seconds=20.0
                )
            if None not in trial:
                return judge(trial, victim), trial[victim][0]
    except LaunchError as error:
        return f"a rank hangs or fails: {str(error).splitlines()[-1][:150]}", str(at)
    return "the first call fails", str(at)


def _statement(place):
    """The source of a place such as ``reshard/errors.py:3``."""
    name, _, number = place.rpartition(":")
    if not number.isdigit():  # at __exit__
        return ""
    path = Path(__file__).parents[2] / name
    line = path.read_text().splitlines()[int(number) - 1] if name and path.is_file() else ""
    return line.partition("  #")[0].strip()


def main():
    """Print what is wrong, with its places. Returns 0 if nothing is."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.interrupts", description=__doc__)
    parser.add_argument("kind", nargs="*", default=[], choices=[*KINDS, []], help="calls; default: all")
    parser.add_argument("--every", type=int, default=1, help="try every so many lines; default: all")
    parser.add_argument("--first", type=int, default=0, help="number of the first line, or the seed")
    parser.add_argument("--once", action="store_true", help="try each line of the source once")
    parser.add_argument("--rank", type=int, default=1, choices=(0, 1), help="the rank to interrupt (1)")
    parser.add_argument("--opening", action="store_true", help="interrupt the first call of a group")
    parser.add_argument("--signals", type=int, default=0, help="number of signals to send instead")
    options = parser.parse_args()
    failed = False
    for kind in options.kind or KINDS:
        begun = time.monotonic()
        if options.signals:
            num, wrong = run_signals(kind, options.signals, options.first, options.rank, options.opening)
        else:
            num, wrong = run_campaign(kind, options.every, options.first, options.rank, options.once, options.opening)
        count = sum(map(len, wrong.values()))
        print(f"{kind}: {num} trials in {time.monotonic() - begun:.0f} s, {count} wrong", flush=True)
        for text, places in sorted(wrong.items(), key=lambda one: -len(one[1])):
            print(f"  {len(places):4} {text}: {', '.join(f'{a} x{n}' for a, n in Counter(places).most_common(6))}")
        failed = failed or bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
