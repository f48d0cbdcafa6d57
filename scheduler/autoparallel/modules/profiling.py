"""Measure the layers of a model, one of each class."""

from __future__ import annotations

import functools
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from reshard.arguments import check_arguments
from reshard.errors import ArgumentError
from reshard.formatting import brief

from ...pipe.partition.blocks import BlockStage
from ...pipe.profile import count_saved_bytes
from ..inputs.layer_profile import ClassTimes, LayerProfile, LayerTimes
from .layer_tracing import TracedModel, layer_inputs, run_layer
from .zero_times import ShapesAndDtypes, measure_zero_times

#: Samples that are measured, unless others are given.
SAMPLE_COUNTS = (1, 2, 4)
#: Largest number of repetitions of an all-gather and a reduce-scatter, which copy all parameters of a layer.
MAX_ZERO_REPEATS = 3
#: If a number of samples took longer than this, larger numbers are not measured.
MAX_SECONDS = 5.0


@check_arguments(sample_counts=(1, 2**40), repeats=(1, 10_000))
def profile_layers(
    traced: TracedModel,
    device: str = "cpu",
    *,
    sample_counts: Sequence[int] = SAMPLE_COUNTS,
    repeats: int = 5,
    message_seconds: float = 0.0,
    slowdown: float = 1.0,
) -> LayerProfile:
    """Measure one layer of each class: forward, input gradients alone, a whole backward, and the cost of ZeRO 3.

    If a number of samples does not fit the device, the profile records it, and larger numbers are not measured for this
    class. The model keeps its values. If it is on the meta device, all its values are equal during the measurement.

    Args:
        traced: the model, from :func:`trace_module`.
        device: what to measure on.
        sample_counts: numbers of samples of one forward.
        repeats: number of measurements; the median counts.
        message_seconds, slowdown: see :class:`LayerProfile`. One process cannot measure them.

    Raises:
        ArgumentError: no size of some class fits, or an argument is out of range.
    """
    try:
        torch.zeros((), device=device)
    except RuntimeError as error:
        raise ArgumentError(f"device is {brief(device)}, which torch does not have here: {error}") from None
    if not sample_counts:
        raise ArgumentError("sample_counts is empty; it must have at least one number of samples")
    stages = traced.pipe.cut(traced.outline.names).build(traced.pipe.model)
    classes: dict[str, ClassTimes] = {}
    parameters: list[ShapesAndDtypes] = []
    for number, (layer, module) in enumerate(zip(traced.graph.layers, stages, strict=True)):
        if layer.key in classes:
            continue
        if isinstance(module, BlockStage):
            module.outputs = tuple(value.name for value in traced.stage_graph.values if value.writer == number)
        parameters.append(tuple((tuple(value.shape), value.dtype) for value in module.parameters()))
        classes[layer.key] = _measure_class(traced, number, module, device, sorted(sample_counts), repeats)
    zero = measure_zero_times(parameters, device, min(repeats, MAX_ZERO_REPEATS))
    software = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    return LayerProfile(
        traced.graph.key,
        torch.device(device).type,
        traced.graph.dtype,
        {
            key: {1: replace(classes[key], **layer_times._asdict())}
            for key, layer_times in zip(classes, zero, strict=True)
        },
        message_seconds=message_seconds,
        slowdown=slowdown,
        software=software,
    )


def _measure_class(
    traced: TracedModel, number: int, module: Any, device: str, sample_counts: Sequence[int], repeats: int
) -> ClassTimes:
    values = [(item, item.grad) for item in module.parameters()]
    if any(value.is_meta for value, _ in values):
        module = module.to_empty(device=device)
        with torch.no_grad():  # uninitialized memory may hold denormals, which are slow to compute with
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.fill_(0.01 if tensor.is_floating_point() else 0)
    else:
        module = module.to(device)
    measured: list[LayerTimes] = []
    failed: list[int] = []
    for size in sample_counts:
        if failed or (measured and measured[-1].forward_seconds + measured[-1].backward_seconds > MAX_SECONDS):
            failed.append(size)
            continue
        try:
            make_inputs = functools.partial(layer_inputs, traced.outline, traced.stage_graph, number, size, device)
            measured.append(measure_layer(module, make_inputs, size, repeats, device, traced.autocast))
        except (MemoryError, torch.OutOfMemoryError):
            failed.append(size)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            failed.append(size)
    for parameter, gradient in values:
        parameter.grad = gradient
    return ClassTimes(tuple(measured), tuple(failed))


def measure_layer(
    module: Any,
    make_inputs: Callable[[], dict[str, Any]],
    num_samples: int,
    repeats: int,
    device: str,
    autocast: torch.dtype | None = None,
) -> LayerTimes:
    """Medians of the seconds of a layer.

    The weight-gradient pass is what a whole backward takes beyond one of input gradients alone.
    """
    times: dict[str, list[float]] = {"forward": [], "input": [], "whole": []}
    saved = 0
    for turn in range(repeats + 1):
        for kind in ("input", "whole"):
            inputs = make_inputs()
            wanted = [item for item in inputs.values() if isinstance(item, torch.Tensor) and item.requires_grad]
            _wait(device)
            start = time.perf_counter()
            if turn == 0:
                with count_saved_bytes(ignored=module.parameters()) as counted:
                    outputs = run_layer(module, inputs, autocast)
                saved = counted.nbytes
            else:
                outputs = run_layer(module, inputs, autocast)
            _wait(device)
            middle = time.perf_counter()
            gradients = [torch.ones_like(output) for output in outputs]
            if kind == "whole" and outputs:
                torch.autograd.backward(outputs, gradients)
            elif wanted and outputs:
                torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
            _wait(device)
            if turn:  # the first turn warms up
                times["forward"].append(middle - start)
                times[kind].append(time.perf_counter() - middle)
    median = {kind: statistics.median(values) for kind, values in times.items()}
    whole = median["whole"]
    given = min(median["input"], whole)
    both = sorted(f + b for f, b in zip(times["forward"][1::2], times["whole"], strict=True))
    spread = (both[(3 * len(both)) // 4] - both[len(both) // 4]) / statistics.median(both) if both[0] else 0.0
    return LayerTimes(num_samples, median["forward"], given, whole - given, whole, float(saved), spread)


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
