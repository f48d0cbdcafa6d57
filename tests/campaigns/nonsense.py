"""Write nonsense to the store of a group, or pass it on one rank: ``python -m tests.campaigns.nonsense --runs 300``.

A trial of ``store`` makes a group of three ranks, and four calls. Before the first one or after it, another program
writes a value under a key of the group. A trial of ``arguments`` passes a value of a wrong type or size on one of two
ranks. All ranks must end with right data or an error of this package. In ``arguments``, either all ranks raise or none
does.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter

import numpy as np
import torch
import torch.distributed as dist

import reshard
from reshard import Layout, Mesh
from reshard.compression import GradientSum
from reshard.formatting import brief
from reshard.scheduler import Pipe, one_f_one_b
from reshard.testing.processes import run_processes
from tests.campaigns import interrupts

#: ``timeout_seconds`` of each call. A call that takes as long has not been ended by the error of another rank.
TIMEOUT_SECONDS = 15.0
#: Trials in the same processes.
BATCH = 30

NUM_RANKS, NUM_CALLS = 3, 4
ROWS, COLUMNS = Layout(Mesh.of(str(NUM_RANKS)), "S0 R"), Layout(Mesh.of(str(NUM_RANKS)), "R S0")
_CHANNEL = "u/" + hashlib.sha256(repr(tuple(range(NUM_RANKS))).encode()).hexdigest()[:20]
KEYS = (
    *(f"{_CHANNEL}/{key}" for key in ("hub", "error/0", "error/1", "broken/0/1")),
    *("duplicate", "lost/1", "lost/2"),
    *(f"{kind}/{rank}" for kind in ("status", "beat", "claim", "presence") for rank in range(NUM_RANKS)),
    *(f"error/{rank}/{attempt}" for rank in range(NUM_RANKS) for attempt in (1, 2, 3, 4)),
)
VALUES = (
    *("", "nonsense", "null", "[]", "{}", "0", "true", '"text"', "[1, 2]", "[" * 3000, "\x00\x01", "9" * 5000),
    '["127.0.0.1", "port", "x", "y"]',
    '["127.0.0.1", 99999999, "x", "y"]',
    '["127.0.0.1", 1, "\\ud800", "\\ud800"]',
    '{"by": 1, "lost": [99], "attempt": 1, "decision": null}',
    '{"by": 1, "lost": [0], "attempt": "x", "decision": {}}',
    json.dumps(
        {"waiting": {"members": 5}, "skipped": {"a": 1}, "errors": 0, "given": {"0": "x"}, "error": None}
        | {"are_members_unknown": False, "out_of_sync": {}}
    ),
)


class _Unprintable:
    def __repr__(self):
        raise ValueError("no text")


ARGUMENTS = (
    *(None, 0, -1, 2**70, 10**5000, 1.5, float("nan"), True, "", "nonsense", b"x", [], [None], {}, {"w": 5}, object()),
    *(_Unprintable(), torch.zeros(0), np.zeros(2), torch.float32, int, (4, 8), torch.zeros((), device="meta")),
)


def _outcome(call):
    """``"right"``, ``"wrong"``, or the class and text of an error, and the seconds of a call that returns a bool."""
    begun = time.monotonic()
    try:
        outcome = "right" if call() else "wrong"
    except reshard.ReshardError as error:
        outcome = f"{type(error).__name__}: {error}"
    except BaseException as error:
        outcome = f"raw {type(error).__name__}: {error}"
    return outcome, time.monotonic() - begun


def meet_foreign_values(rank, port, seeds):
    """Outcomes of the calls of each trial on this rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    found = []
    for seed in seeds:
        chance = random.Random(seed)
        key, value, is_early = chance.choice(KEYS), chance.choice(VALUES), chance.random() < 0.3
        on_loss, pause = chance.choice(("raise", "recover")), chance.choice((0.0, 0.6))
        foreign = dist.PrefixStore(f"{seed}/reshard/join", store)
        if rank == 0 and is_early:
            foreign.set(key, value)
        _wait_for_all(store, f"begin {seed}", rank, NUM_RANKS)
        outcomes = []
        with reshard.join(dist.PrefixStore(str(seed), store), rank, NUM_RANKS) as group:
            for step in range(NUM_CALLS):
                if step == 1 and rank == 1 and not is_early:
                    foreign.set(key, value)
                if step == 1 - is_early and rank == 0:
                    time.sleep(pause)
                outcomes.append(
                    _outcome(lambda step=step, group=group, on_loss=on_loss: _moves(rank, step, group, on_loss))
                )
        _wait_for_all(store, f"end {seed}", rank, NUM_RANKS)
        found.append((f"{key}: {brief(value)}", outcomes))
    return found


def _moves(rank, step, group, on_loss):
    options = {"group": group, "on_loss": on_loss, "timeout_seconds": TIMEOUT_SECONDS}
    source = torch.full((1, NUM_RANKS), float(rank + step))
    moved = reshard.reshard(source, ROWS, COLUMNS, shape=(NUM_RANKS, NUM_RANKS), dtype="float32", **options)
    return moved.flatten().tolist() == [float(each + step) for each in range(NUM_RANKS)]


def _wait_for_all(store, name, rank, num_ranks):
    store.set(f"{name}/{rank}", "")
    store.wait([f"{name}/{each}" for each in range(num_ranks)])


class Change:
    """Puts nonsense in place of one argument of one call, on one of two ranks.

    Args:
        seed: of the choices. rank: this rank.
    """

    def __init__(self, seed, rank):
        self._chance = random.Random(seed)
        self.door, self._value = self._chance.choice([*DOORS]), self._chance.choice(ARGUMENTS)
        self._is_own = self._chance.randrange(2) == rank
        self.name = ""

    def __call__(self, door, arguments, known):
        """The arguments of a call, of which ``known`` are the names of some."""
        if door != self.door:
            return arguments
        self.name = self._chance.choice(known.split())
        return arguments | ({self.name: self._value} if self._is_own else {})

    def __str__(self):
        return f"{self.door}: {self.name}={brief(self._value)}"


def _transfer(group, change):
    arguments = {"array": torch.ones(2, 6), "src": interrupts.ROWS, "dst": interrupts.COLUMNS, **_options(group)}
    known = "array src dst shape dtype timeout_seconds strategy compression verify out"
    return reshard.reshard(**change("transfer", arguments, known))


def _move(group, change):
    plan = reshard.make_plan(interrupts.ROWS, interrupts.COLUMNS, interrupts.SHAPE, "float32")
    known = "plan timeout_seconds device verify both_ways fault_tolerant communicator_index compression"
    mover = reshard.Mover(**change("mover", {"plan": plan, **_options(group)}, known))
    return mover(**change("move", {"tensor": torch.ones(2, 6)}, "tensor out base"))


def _sum(group, change):
    known = "codec host_of_rank average feedback module"
    summed = GradientSum(**change("gradient sum", {"codec": "int8x128", "group": group}, known))
    summed(**change("sum", {"gradients": {"a": torch.ones(300)}}, "gradients"))


def _train(group, change):
    arguments = {"example": {"x": torch.ones(2, 4, 3)}, "num_microbatches": 2, "schedule": one_f_one_b}
    arguments |= {"profile": interrupts.PROFILE, **_options(group)}
    known = "example num_microbatches schedule profile device topology compression timeout_seconds"
    pipe = Pipe(interrupts.TwoStages(), ["layers.1"], stages="1x1,1x1")
    with pipe.compile(**change("compile", arguments, known)) as engine:
        optimizer = torch.optim.SGD(engine.parameters(), 0.1)
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder, group=group)
        saved = {"path": folder[0], "optimizer": optimizer, "step": 1}
        try:
            engine.step(**change("step", {"batch": {"x": torch.ones(2, 4, 3)}}, "batch accumulate"))
            engine.save(**change("save", saved, "path optimizer lr_scheduler loader step keep"))
            engine.load(**change("load", saved, "path optimizer lr_scheduler loader step trust_pickle"))
        finally:
            shutil.rmtree(folder[0], ignore_errors=True)


def _options(group):
    return {"group": group, "timeout_seconds": TIMEOUT_SECONDS}


#: Name of a call with changed arguments -> a function that makes it, and the calls that it needs.
DOORS = {
    "transfer": _transfer,
    **dict.fromkeys(("mover", "move"), _move),
    **dict.fromkeys(("gradient sum", "sum"), _sum),
    **dict.fromkeys(("compile", "step", "save", "load"), _train),
}


def pass_nonsense(rank, _, seeds):
    """Outcome of the calls of each trial on this rank."""
    torch.set_num_threads(1)
    found = []
    for seed in seeds:
        change, group = Change(seed, rank), dist.new_group([0, 1])
        dist.barrier()
        outcome = _outcome(lambda change=change, group=group: (DOORS[change.door](group, change), True)[1])
        dist.barrier()
        found.append((str(change), [outcome]))
        with contextlib.suppress(reshard.ReshardError):
            reshard.close_group(group)
        dist.destroy_process_group(group)
    return found


def judge(kind, rows):
    """What is wrong in a trial, as one text; "" if nothing is. ``rows`` has the outcomes of each rank."""
    for rank, outcomes in enumerate(rows):
        for number, (outcome, seconds) in enumerate(outcomes):
            if outcome == "wrong" or outcome.startswith("raw "):
                return f"rank {rank}, call {number}: {outcome[:200]}"
            if seconds > 3 * TIMEOUT_SECONDS:
                return f"rank {rank}, call {number} takes {seconds:.1f} s: {outcome[:200]}"
    texts = [outcome for outcomes in rows for outcome, _ in outcomes]
    if kind == "arguments" and (
        len({text == "right" for text in texts}) > 1 or any("did not call" in text for text in texts)
    ):
        return f"only one rank raises at once: {texts}"
    return ""


KINDS = {"store": (meet_foreign_values, NUM_RANKS, False), "arguments": (pass_nonsense, 2, True)}


def run_campaign(kind, num_runs, seed=0):
    """Run trials. Returns how they ended, and ``[(trial, what is wrong)]``."""
    function, num_ranks, init_group = KINDS[kind]
    ends, wrong = Counter(), []
    for first in range(seed, seed + num_runs, BATCH):
        seeds = range(first, min(first + BATCH, seed + num_runs))
        arguments = (0, seeds) if init_group else (seeds,)
        results = run_processes(function, num_ranks, *arguments, init_group=init_group, timeout_seconds=3600.0)
        for trial in zip(*results, strict=True):
            rows = [outcomes for _, outcomes in trial]
            ends.update(outcome.partition(":")[0] for outcomes in rows for outcome, _ in outcomes)
            text = judge(kind, rows)
            wrong += [(trial[0][0], text)] if text else []
    return ends, wrong


def main():
    """Print what is wrong. Returns 0 if nothing is."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.nonsense", description=__doc__)
    parser.add_argument("kind", nargs="*", default=[], choices=[*KINDS, []], help="default: all")
    parser.add_argument("--runs", type=int, default=300, help="number of trials of each kind (300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first trial (0)")
    options = parser.parse_args()
    failed = False
    for kind in options.kind or KINDS:
        begun = time.monotonic()
        ends, wrong = run_campaign(kind, options.runs, options.seed)
        print(
            f"{kind}: {options.runs} trials in {time.monotonic() - begun:.0f} s, {len(wrong)} wrong; {dict(ends)}",
            flush=True,
        )
        for trial, text in wrong:
            print(f"  {trial}: {text}", flush=True)
        failed = failed or bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
