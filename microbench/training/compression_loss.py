"""Loss and speed of training with compression, on emulated hosts: ``python -m microbench.training.compression_loss``.

The GPT of ``reshard train`` trains on the text that Python ships, with two pipeline stages, the second of two replicas,
and one rank per host. All contenders train from the same seeds and on the same batches. A row prints the mean held-out
loss over the seeds, its difference to training without codecs with the standard deviation over seeds, and the rows per
second from the median step. A 2024 study (arXiv 2409.02423) found that ZFP everywhere trains faster and to a worse
loss, and that milder codecs where errors hurt keep the loss. "ZFP everywhere" is its naive choice: ZFP at 8 bits a
value (the zfpy package) in the messages of int8x128. "ZFP hybrid" codes only sums of gradients with it. The study codes
the other messages without loss (MPC), which changes no value. Here they are raw, so only the loss compares. zfpy codes
0.2 GB/s on a CPU, and the study's ZFP ran on GPUs, so the speeds of both rows are not those of the study.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from microbench.emulation.cluster import Cluster, ClusterError
from microbench.harness.suite import describe_machine, stderr
from microbench.kernels.zfp import zfp_as_int8
from reshard.cli.progress import print_line, track
from reshard.errors import ReshardError
from reshard.scheduler.pipe.engine import PipelineEngine
from reshard.scheduler.training.command import add_arguments, make_job
from reshard.scheduler.training.loop import Job, train
from reshard.scheduler.training.presets import find_preset
from reshard.topology import topology_from_json

STAGES, NUM_RANKS = "1x1,2x1", 3
#: Name and policy of each contender; edges are coded whatever the simulation says, so that only the codecs differ.
CONTENDERS = {
    "no codec": None,
    "ZFP everywhere": "dp=int8x128,pp=int8x128,force-pp",
    "ZFP hybrid": "dp=int8x128",
    "int8 everywhere": "dp=int8x128,pp=int8x128,force-pp",
    "int4 everywhere": "dp=int4x128,pp=int4x128,force-pp",
    "hybrid": "dp=int4x128-bf16,pp=int8x128,force-pp",
}


def run_job(rank: int, report: Callable[[Any], None], job: Job, is_zfp: bool) -> tuple[float, float]:
    """Train, with ZFP in place of int8x128 if asked for; the held-out loss, and the seconds of the median step."""
    torch.set_num_threads(1)
    seconds: list[float] = []
    step = PipelineEngine.step

    def timed(*arguments: Any, **options: Any) -> Any:
        begun = time.monotonic()
        result = step(*arguments, **options)
        seconds.append(time.monotonic() - begun)
        return result

    PipelineEngine.step = timed  # type: ignore[method-assign]
    try:
        with zfp_as_int8() if is_zfp else contextlib.nullcontext():
            held_out = train(rank, job, shows=False).held_out
    finally:
        PipelineEngine.step = step  # type: ignore[method-assign]
    return held_out, statistics.median(seconds)


def _make_job(steps: int, seed: int, shrink: int, compression: str | None) -> Job:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["gpt3-125m", "--shrink", str(shrink), "--steps", str(steps), "--seed", str(seed), "--batch", "16"]
    words += ["--microbatches", "4", "--sequence", "64", "--autocast", "none", "--eval-batches", "16"]
    words += [] if compression is None else ["--compression", compression]
    return make_job(parser.parse_args(words), find_preset("gpt3-125m"), STAGES)


def main() -> int:
    """Print a row per contender."""
    parser = argparse.ArgumentParser(
        prog="python -m microbench.training.compression_loss",
        description=__doc__,
        epilog="example: python -m microbench.training.compression_loss --seeds 3 --steps 400",
    )
    parser.add_argument("--rate", default="0.2 Gbit/s", help="rate of each host's link (0.2 Gbit/s)")
    parser.add_argument("--steps", type=int, default=200, help="steps of a run (200)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each contender (3)")
    parser.add_argument("--shrink", type=int, default=8, help="divide width and depth of gpt3-125m by this (8)")
    options = parser.parse_args()
    if options.steps < 1 or options.seeds < 1 or options.shrink < 1:
        parser.error("--steps, --seeds and --shrink must be positive")
    contenders = dict(CONTENDERS)
    if importlib.util.find_spec("zfpy") is None:
        stderr("compression_loss: zfpy is not installed, so the rows of ZFP are missing")
        contenders = {name: policy for name, policy in CONTENDERS.items() if not name.startswith("ZFP")}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    try:
        topology = topology_from_json({"hosts": [{"count": NUM_RANKS, "devices": 1, "nics": [options.rate]}]})
        with Cluster(topology) as cluster:
            for seed in track(range(options.seeds), "seeds"):
                for name, policy in contenders.items():
                    job = _make_job(options.steps, seed, options.shrink, policy)
                    results = cluster.run(run_job, job, name.startswith("ZFP"), timeout_seconds=3600.0)
                    found[name].append((results[0][0], max(seconds for _, seconds in results)))
    except (ClusterError, ReshardError) as error:
        stderr(f"compression_loss: {error}")
        return 2
    run = describe_machine([])
    print_line(f"{STAGES}, {options.rate}, {options.steps} steps, {run['machine']}, {run['date']}")
    raw = found["no codec"]
    base = statistics.fmean(seconds for _, seconds in raw)
    for name, runs in found.items():
        differences = [loss - other for (loss, _), (other, _) in zip(runs, raw, strict=True)]
        spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
        seconds = statistics.fmean(each for _, each in runs)
        print_line(
            f"{name:16} held-out {statistics.fmean(loss for loss, _ in runs):.4f} "
            f"({statistics.fmean(differences):+.4f} +- {spread:.4f})  {16 / seconds:6.1f} rows/s  {base / seconds:.2f}x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
