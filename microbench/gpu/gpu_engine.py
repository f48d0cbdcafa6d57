"""A step of the pipeline engine with one stage on one GPU, compared with a plain loop that accumulates gradients.

Both run the same model on the same microbatches, in turns. Bar: the engine takes at most 1.05 times as long.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from microbench.harness.table import Table
from reshard import Mesh
from reshard.scheduler import Pipeline, Stage, StageOutput, one_f_one_b
from reshard.scheduler.runtime.schedule_engine import ScheduleEngine
from reshard.scheduler.training.models.gpt import GPT
from reshard.scheduler.training.models.model_presets import GPTConfig
from reshard.testing import run_processes

TURNS = 9
#: Name -> layers, heads, head size, tokens of a row, rows of a microbatch, microbatches.
MODELS = {"tiny": (4, 4, 16, 64, 1, 8), "GPT-2 small": (12, 12, 64, 512, 4, 4)}
#: Name -> dtype of the parameters, and dtype of autocast.
PRECISIONS = {
    "fp32": (torch.float32, None),
    "bf16 parameters": (torch.bfloat16, None),
    "bf16 autocast": (torch.float32, torch.bfloat16),
}


class _GPTWithLoss(torch.nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> StageOutput:
        return StageOutput(loss=self.model(tokens, targets))


def measure_all(rank: int, device: str, cases: Sequence[tuple[str, str]]) -> list[tuple[list[float], list[float]]]:
    """:func:`measure` of each case, in one process."""
    return [measure(device, *case) for case in cases]


def measure(device: str, model_name: str, precision: str) -> tuple[list[float], list[float]]:
    """Seconds of each step of the engine, and of the loop, after two steps of each that do not count."""
    layers, heads, head_size, tokens, rows, num = MODELS[model_name]
    dtype, autocast = PRECISIONS[precision]
    torch.manual_seed(0)
    config = GPTConfig(layers, heads, head_size, sequence=tokens, vocabulary=8192)
    module = _GPTWithLoss(GPT(config).apply(GPT.initialize)).to(device, dtype)
    batch = torch.randint(8192, (num, rows, tokens + 1), device=device)
    feed = [{"tokens": item[:, :-1], "targets": item[:, 1:]} for item in batch]
    pipeline = Pipeline((Stage(1.0, 1.0, 1.0, mesh=Mesh([0])),))

    def plain() -> float:
        total = torch.zeros((), device=device)
        for fed in feed:
            with torch.autocast(device, autocast, enabled=autocast is not None):
                loss = module(**fed).loss / num
            loss.backward()
            total += loss.detach()
        return float(total)

    with ScheduleEngine(one_f_one_b(pipeline, num), pipeline, {0: module}, autocast=autocast) as engine:

        def with_engine() -> float:
            loss = engine.step({0: feed}).loss
            assert loss is not None
            return loss

        methods: tuple[Callable[[], float], ...] = (with_engine, plain)
        seconds: tuple[list[float], list[float]] = ([], [])
        for turn in range(TURNS + 2):
            losses = []
            for method, into in zip(methods, seconds, strict=True):
                module.zero_grad(set_to_none=False)
                if device == "cuda":
                    torch.cuda.synchronize()
                begun = time.perf_counter()
                losses.append(method())
                if device == "cuda":
                    torch.cuda.synchronize()
                if turn > 1:
                    into.append(time.perf_counter() - begun)
            assert abs(losses[0] - losses[1]) < 0.05, losses
    return seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the script itself")
    parser.add_argument("--model", choices=MODELS, nargs="*", default=list(MODELS))


def run(options: argparse.Namespace) -> None:
    """Print a row per model and precision."""
    cases = [(model, precision) for model in options.model for precision in PRECISIONS]
    (results,) = run_processes(measure_all, 1, options.device, cases, timeout_seconds=600.0)
    table = Table({"model": "<12", "precision": "<16", "engine ms": ">.2f", "loop ms": ">9.2f", "ratio": ">6.3f"})
    for (model, precision), (engine, loop) in zip(cases, results, strict=True):
        ratio = statistics.median(a / b for a, b in zip(engine, loop, strict=True))
        table.add(model, precision, *(1e3 * statistics.median(seconds) for seconds in (engine, loop)), ratio)
