"""Kill ranks that train: ``python -m tests.campaigns.kills --runs 20``. Every survivor must name the rank that is gone.

Four ranks train a model under plain ``env://``, over two stages of two ranks, replicas or grids, or over one stage of
tensor-parallel ranks. One of them is killed at a random moment of training, saving, loading or evaluating; every fourth
time it is rank 0, which serves the store. Each survivor must raise an error of this package that names the rank, within
five seconds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

import reshard.scheduler as rs
from reshard.cli.progress_bars import print_line, track
from reshard.errors import ReshardError
from reshard.testing.processes import LaunchError, run_processes
from tests.parallel.models import make_gpt
from tests.scheduler.model_stages.test_grid_stages import make_batch as make_gpt_batch
from tests.scheduler.model_stages.test_pipe import make_batch as make_chain_batch, make_chain
from tests.support.interpreters import find_free_port

LIMIT_SECONDS = 5.0
NUM_RANKS = 4
DOING = ("train", "save", "load", "evaluate")


@dataclass(frozen=True)
class Kill:
    """One run.

    Attributes:
        wrap: wrapper of the replicas, "tp" for one stage of tensor parallel ranks, or "grid".
        victim: rank to kill.
        delay_seconds: time of the kill after the third step.
        doing: activity of the ranks at that time.
    """

    wrap: str
    victim: int
    delay_seconds: float
    doing: str = "train"

    def __str__(self) -> str:
        return f"rank {self.victim} under {self.wrap}, killed {self.delay_seconds:.3f} s after step 3 to {self.doing}"


def train_until_killed(rank: int, _: int, port: int, kill: Kill, folder: Path) -> tuple[str, float]:
    """Train on one rank. Returns the text of the error of a survivor, and its delay."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(NUM_RANKS), "RANK": str(rank)}
    dist.init_process_group("gloo")  # rank 0 serves the store
    if kill.wrap == "grid":
        model, cuts, stages = make_gpt(), ["blocks.1"], [rs.Placement(grid=(2, 1, 1)), rs.Placement(grid=(1, 2, 1))]
    elif kill.wrap == "tp":
        plan = {"layers.*": ColwiseParallel(output_layouts=Replicate())}
        model, cuts, stages = make_chain(), [], [rs.Placement(tp=NUM_RANKS, tp_plan=plan)]
    else:
        model, cuts, stages = make_chain(), ["layers.2"], [rs.Placement(dp=2, wrap=getattr(rs, kill.wrap))] * 2
    make_batch = make_gpt_batch if kill.wrap == "grid" else make_chain_batch
    engine = rs.Pipe(model, cuts, stages=stages).compile(make_batch(0), 4, schedule=rs.one_f_one_b)

    def die() -> None:
        time.sleep(kill.delay_seconds)
        (folder / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    optimizer = torch.optim.AdamW(engine.parameters())
    number = 0
    try:
        while True:
            if number < 3 or kill.doing == "train":
                engine.step(make_batch(number))
                engine.clip_grad_norm_(1.0)
                optimizer.step()
            elif kill.doing == "evaluate":
                engine.evaluate(make_batch(number))
            elif kill.doing == "save" or number == 3:
                engine.save(folder, optimizer, step=number)
            else:
                engine.load(folder, optimizer)
            number += 1
            if number == 3 and rank == kill.victim:
                threading.Thread(target=die, daemon=True).start()
    except ReshardError as error:
        return str(error), time.monotonic() - float((folder / "killed").read_text())


def play(kill: Kill) -> tuple[list[str], float]:
    """Run a kill. Returns descriptions of all violations, and the longest delay of an error."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = find_free_port(), kill, Path(folder)
        try:
            run_processes(train_until_killed, NUM_RANKS, *arguments, grace_seconds=30, init_group=False)
        except LaunchError as error:
            failures, results = error.failures, error.results
        else:
            return ["no rank died"], 0.0
    wrong = [f"rank {failure.rank}: {failure.text}" for failure in failures if failure.rank != kill.victim]
    for rank, (text, seconds) in results.items():
        if f"rank {kill.victim} is gone" not in text:
            wrong.append(f"rank {rank} does not name rank {kill.victim}: {text}")
        if seconds > LIMIT_SECONDS:
            wrong.append(f"rank {rank} raised after {seconds:.1f} s, more than {LIMIT_SECONDS:g} s: {text}")
    return wrong, max((seconds for _, seconds in results.values()), default=0.0)


def main() -> int:
    """Print the number of runs as required; returns 1 if one was not."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.kills", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="runs with each wrapper, and with grids (20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills (0)")
    parser.add_argument("--doing", default=",".join(DOING), help=f"what ranks do ({','.join(DOING)})")
    options = parser.parse_args()
    num_wrong = 0
    for wrap, doing in itertools.product(("ddp", "fsdp", "tp", "grid"), options.doing.split(",")):
        good, slowest, chance = 0, 0.0, random.Random(options.seed)
        for number in track(range(options.runs), f"runs under {wrap} that {doing}"):
            kill = Kill(wrap, number % NUM_RANKS, chance.uniform(0.0, 0.5), doing)
            wrong, seconds = play(kill)
            good, slowest = good + (not wrong), max(slowest, seconds)
            if wrong:
                print_line("\n    ".join([str(kill), *wrong]), sys.stderr)
        print(f"{wrap}, {doing}: {good} of {options.runs} as required, slowest error after {slowest:.2f} s", flush=True)
        num_wrong += options.runs - good
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
