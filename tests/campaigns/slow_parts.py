"""Stop the store, the link of a rank to it, or a rank at every step of a call: ``python -m tests.campaigns.slow_parts``.

Four ranks join a group and make four fault-tolerant calls. At one step of the second call, or while they join or close
the group, one part stands still for 0.1 to 40 s. In some trials another rank is killed in the same call. The campaign
checks that no element is wrong and nothing hangs, that a pause below 30 s loses nobody, that a killed process is named
within 5 s, and that all survivors agree on who is lost. Trials with a timeout below the pause check the agreement only.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import reshard
import reshard.api.preparation.prepare
import reshard.api.transfers.recovery
from reshard import Layout, Mesh
from reshard.coordination import agreement_rounds
from reshard.coordination.call_group import CallGroup
from reshard.coordination.hub_and_spokes import Hub, Spoke
from reshard.runtime.transport import Connections, GlooTransport
from reshard.testing.processes import LaunchError, run_processes
from tests.support.pausable_store import PausableStore

NUM_RANKS, NUM_CALLS = 4, 4
SRC, DST = Layout(Mesh.of("2")), Layout(Mesh.of("2", first_rank=2), "S0")
SHAPE = (64, 256)
#: Patched function of each step.
STEPS: dict[str, tuple[Any, str]] = {
    "joining": (dist.TCPStore, "clone"),
    "listening": (Hub, "listen"),
    "connecting to the first rank": (Spoke, "connect"),
    "sending a request": (Spoke, "send_request"),
    "planning": (reshard.api.preparation.prepare, "plan_tensors"),
    "connecting ranks": (Connections, "_make_group"),
    "transfer": (GlooTransport, "recv"),
    "error report": (CallGroup, "fail"),
    "report of outcomes": (reshard.api.transfers.recovery.Recovery, "_exchange_outcomes"),
    "exclusion": (agreement_rounds, "propose_exclusion"),
    "answer": (Hub, "answer"),
    "planning the recovery": (reshard.api.transfers.recovery, "plan_remainder"),
    "recovery": (reshard.api.transfers.recovery.Recovery, "_run_attempt"),
    "closing": (reshard.api.transfers.recovery.Group, "close"),
}
#: Steps that only the first rank, or only other ranks, reach; and steps that need a rank that is killed.
OF_FIRST, OF_OTHERS = ("listening", "answer"), ("connecting to the first rank",)
OF_RECOVERY = ("error report", "exclusion", "planning the recovery", "recovery")
PARTS = ("store", "link", "rank")
#: Limits of the text in docs/reliability.md, and what a loaded machine may take longer.
GONE_SECONDS, SILENT_SECONDS, SLACK_SECONDS = 5.0, 30.0, 6.0


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        step: where a rank is when it stops a part. part: ``"store"``, ``"link"`` of the rank to the store, or the
            ``"rank"`` itself. rank: that rank. seconds: how long. delay_seconds: from the step until the part stops.
        victim: a rank that is killed at its ``moment``-th operation of a transfer in the same call, or None.
        on_loss: of the calls. timeout_seconds: of the calls.
    """

    step: str
    part: str
    rank: int
    seconds: float
    delay_seconds: float = 0.0
    victim: int | None = None
    moment: int = 1
    on_loss: str = "recover"
    timeout_seconds: float = 90.0

    def __str__(self) -> str:
        what = "the store" if self.part == "store" else f"{self.part} {self.rank}"
        killed = "" if self.victim is None else f", rank {self.victim} is killed at operation {self.moment}"
        return (
            f"{what} stops for {self.seconds:.1f} s, {self.delay_seconds:.3f} s after rank {self.rank} is at "
            f"{self.step!r}{killed}, {self.on_loss}, timeout {self.timeout_seconds:g} s"
        )


def make_trial(seed: int, longest_seconds: float = 40.0) -> Trial:
    """A random trial."""
    chance = random.Random(seed)
    seconds = min(longest_seconds, chance.choice((0.1, 0.5, 1.0, 2.0, 4.0, 8.5, 14.0, 20.0, 28.0, 36.0, 40.0)))
    is_killed = chance.random() < 0.6
    step = chance.choice([item for item in STEPS if is_killed or item not in OF_RECOVERY])
    rank = 0 if step in OF_FIRST else chance.randrange(step in OF_OTHERS, NUM_RANKS)
    victim = chance.choice([number for number in range(NUM_RANKS) if number != rank]) if is_killed else None
    is_short = chance.random() < 0.35
    return Trial(
        step,
        chance.choice(PARTS),
        rank,
        seconds,
        chance.choice((0.0, 0.0, chance.uniform(0.0, 0.05), chance.uniform(0.0, 1.0))),
        victim,
        chance.randint(1, 2),
        chance.choice(("recover", "recover", "recover", "raise")),
        chance.uniform(1.0, 6.0) if is_short else 90.0,
    )


def _call_at(place: tuple[Any, str], act: Callable[[], None], moment: int = 1) -> None:
    """Call ``act`` before the ``moment``-th call of a function, from now on."""
    owner, name = place
    plain, count = getattr(owner, name), [0]
    is_class_method = isinstance(owner, type) and isinstance(owner.__dict__.get(name), classmethod)

    def call(*args: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == moment:
            act()
        return plain(*(args[1:] if is_class_method else args), **options)

    setattr(owner, name, classmethod(call) if is_class_method else call)


def take_part(rank: int, port: int, trial: Trial, store: PausableStore) -> dict[str, Any]:
    """Make the calls on one rank, and close the group. Returns what happened."""
    pids = {"store": store.pid, "link": store.links[trial.rank], "rank": os.getpid()}

    def stop() -> None:
        times.set("stopped at", str(time.monotonic()))
        store.pause(pids[trial.part], trial.seconds, trial.delay_seconds)

    def die() -> None:
        times.set("killed at", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def read_time(name: str) -> float | None:
        return float(times.get(name)) if times.check([name]) else None

    times = dist.TCPStore("127.0.0.1", port, is_master=False)
    raw = dist.TCPStore("127.0.0.1", store.ports[rank], is_master=False)
    is_early = trial.step in ("joining", "listening", "connecting to the first rank", "connecting ranks")
    if rank == trial.rank and is_early:
        _call_at(STEPS[trial.step], stop)
    group = reshard.join(raw, rank, NUM_RANKS)
    outcomes = []
    for number in range(NUM_CALLS):
        if number == 1:
            if rank == trial.rank and not is_early:
                _call_at(STEPS[trial.step], stop)
            if rank == trial.victim:
                for name in ("send", "recv"):
                    _call_at((GlooTransport, name), die, trial.moment)
        begun = time.monotonic()
        source = torch.full(SHAPE, float(number)) if rank < 2 else None
        try:
            out = reshard.reshard(
                source,
                SRC,
                DST,
                shape=SHAPE,
                group=group,
                on_loss=trial.on_loss,
                timeout_seconds=trial.timeout_seconds,
                staging_bytes=2**25 + (number > 0),  # so that the second call plans, too
            )
            outcome = "right" if out is None or bool((out == number).all()) else f"wrong: {out.unique().tolist()}"
        except reshard.ReshardError as error:
            outcome = f"{type(error).__name__}: {error}"
        outcomes.append((outcome, begun, time.monotonic()))
    lost, begun = sorted(group.lost), time.monotonic()
    group.close()
    return {
        "outcomes": outcomes,
        "lost": lost,
        "closing": time.monotonic() - begun,
        "killed_at": read_time("killed at"),
        "stopped_at": read_time("stopped at"),
    }


def play(trial: Trial) -> tuple[list[str], bool]:
    """Run a trial. Returns what is wrong, and whether the step was reached."""
    limit = NUM_CALLS * trial.timeout_seconds + trial.seconds + 60.0
    with PausableStore(NUM_RANKS) as store:
        try:
            found = run_processes(
                take_part, NUM_RANKS, trial, store, timeout_seconds=limit, grace_seconds=limit, init_group=False
            )
            results = dict(enumerate(found))
        except LaunchError as error:
            results = dict(error.results)
            wrong = [
                f"rank {failure.rank}: {failure.text.strip().splitlines()[-1]}"
                for failure in error.failures
                if failure.rank != trial.victim
            ]
            if wrong:
                return wrong, True
    return check(trial, results), any(result["stopped_at"] for result in results.values())


def check(trial: Trial, results: dict[int, dict[str, Any]]) -> list[str]:
    """What is wrong with the results of the ranks that were not killed."""
    wrong = []
    texts = {rank: [outcome for outcome, *_ in result["outcomes"]] for rank, result in results.items()}
    for rank, row in texts.items():
        wrong += [f"rank {rank}, call {number}: {text}" for number, text in enumerate(row) if text.startswith("wrong")]
    # Ranks whose last call succeeded go on together. They must agree, and none of them may be lost.
    going_on = {rank: tuple(results[rank]["lost"]) for rank, row in texts.items() if row[-1] == "right"}
    if len(set(going_on.values())) > 1:
        wrong.append(f"ranks that go on disagree on who is lost: {going_on}")
    lost = {each for row in going_on.values() for each in row}
    if lost & going_on.keys():
        wrong.append(f"ranks {sorted(lost & going_on.keys())} are lost and go on: {going_on}")
    everyone = set().union(*(result["lost"] for result in results.values())) if results else set()
    was_killed = trial.victim is not None and trial.victim not in results
    is_short = trial.timeout_seconds < trial.seconds + SLACK_SECONDS
    for rank, result in results.items():
        for number, (text, begun, ended) in enumerate(result["outcomes"]):
            # A recovery agrees, moves, and reports; each has its own timeout.
            allowed = 4 * min(trial.timeout_seconds, 35.0) + trial.seconds + SLACK_SECONDS
            if ended - begun > allowed:
                wrong.append(f"rank {rank}, call {number} took {ended - begun:.1f} s: {text[:200]}")
        if result["closing"] > trial.seconds + SLACK_SECONDS:
            wrong.append(f"rank {rank} took {result['closing']:.1f} s to close")
    if is_short or trial.seconds >= SILENT_SECONDS:
        return wrong
    healthy = everyone - ({trial.victim} if was_killed else set())
    if healthy:
        wrong.append(
            f"healthy ranks {sorted(healthy)} are lost: { {rank: result['lost'] for rank, result in results.items()} }"
        )
    for rank, result in results.items():
        bad = [(number, *item) for number, item in enumerate(result["outcomes"]) if item[0] != "right"]
        if not was_killed or (trial.on_loss == "recover" and trial.victim in (0, 1, 2, 3)):
            allowed_texts = ("still need",) if was_killed else ()
            wrong += [
                f"rank {rank}, call {number}: {text[:300]}"
                for number, text, *_ in bad
                if not any(allowed_text in text for allowed_text in allowed_texts)
            ]
            continue
        # The first error names the rank that was killed, in time.
        if bad and f"rank {trial.victim}" not in bad[0][1]:
            wrong.append(f"rank {rank} does not name rank {trial.victim}: {bad[0][1][:300]}")
        if bad and result["killed_at"] and bad[0][3] - result["killed_at"] > GONE_SECONDS + trial.seconds + 1.0:
            wrong.append(
                f"rank {rank} raised {bad[0][3] - result['killed_at']:.1f} s after the kill: {bad[0][1][:200]}"
            )
    if was_killed and trial.on_loss == "recover" and not wrong:
        for rank, result in results.items():
            late = [ended - result["killed_at"] for _, begun, ended in result["outcomes"][1:2]]
            if late and late[0] > GONE_SECONDS + trial.seconds + 1.0:
                wrong.append(f"rank {rank} recovered {late[0]:.1f} s after the kill")
    return wrong


def main() -> int:
    """Print what is wrong, and a table of trials by part; returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.slow_parts", description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="number of trials (100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first trial (0)")
    parser.add_argument("--longest", type=float, default=40.0, help="longest pause in seconds (40)")
    options = parser.parse_args()
    tries: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.runs):
        trial = make_trial(seed, options.longest)
        begun = time.monotonic()
        found, was_reached = play(trial)
        if not was_reached:
            tries["step not reached"] += 1
            continue
        kind = f"{trial.part}, {'killed' if trial.victim is not None else 'none killed'}"
        tries[kind] += 1
        failures[kind] += bool(found)
        print(f"{seed}: {'WRONG' if found else 'ok'} after {time.monotonic() - begun:.1f} s: {trial}", flush=True)
        for text in found:
            print(f"    {text}", flush=True)
    for kind, number in sorted(tries.items()):
        print(f"{kind}: {number} trials, {failures[kind]} wrong")
    return int(any(failures.values()))


if __name__ == "__main__":
    sys.exit(main())
