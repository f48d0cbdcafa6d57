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

from ...model_stages.partition.blocks import BlockStage
from ...model_stages.profile import count_saved_bytes
from ..inputs.layer_graph import Layer
from ..inputs.layer_profile import ClassTimes, LayerProfile, LayerTimes
from .layer_tracing import TracedModel, layer_inputs, run_layer
from .zero_times import ShapesAndDtypes, measure_zero_times

#: Samples that are measured, unless others are given.
SAMPLE_COUNTS = (1, 2, 4)
#: Largest number of repetitions of an all-gather and a reduce-scatter, which copy all parameters of a layer.
MAX_ZERO_REPEATS = 3
#: If a forward and a backward of a number of samples take longer than this, larger numbers are not measured: work of
#: this length grows with the samples.
MAX_SECONDS = 1.0
#: After :data:`MIN_REPEATS` repetitions, measuring stops once all of them together took this long.
ENOUGH_SECONDS, MIN_REPEATS = 2.0, 2


@check_arguments(sample_counts=(1, 2**40), repeats=(1, 10_000))
def profile_layers(
    traced: TracedModel,
    device: str = "cpu",
    *,
    sample_counts: Sequence[int] = SAMPLE_COUNTS,
    repeats: int = 5,
    message_seconds: float = 0.0,
    slowdown: float = 1.0,
    progress: Callable[[float, str], None] | None = None,
) -> LayerProfile:
    """Measure one layer of each class: forward, input gradients alone, a whole backward, and the cost of ZeRO 3.

    If a number of samples does not fit the device, the profile records it, and larger numbers are not measured for this
    class. The model keeps its values. If it is on the meta device, all its values are equal during the measurement.

    Args:
        traced: the model, from :func:`trace_module`.
        device: what to measure on.
        sample_counts: numbers of samples of one forward.
        repeats: number of measurements; the median counts. Layers that take longer than a second are measured twice.
        message_seconds, slowdown: see :class:`LayerProfile`. One process cannot measure them.
        progress: called before each number of samples with the part of the work that is done, about, from 0 to 1, and
            the layer that is measured next.

    Raises:
        ArgumentError: no size of some class fits, or an argument is out of range.
    """
    try:
        torch.zeros((), device=device)
    except RuntimeError as error:
        raise ArgumentError(f"device is {brief(device)}, which torch does not have here: {error}") from None
    if not sample_counts:
        raise ArgumentError("sample_counts is empty; it must have at least one number of samples")
    progress = _ignore if progress is None else progress
    stages = traced.pipe.cut(traced.outline.names).build(traced.pipe.model)
    counts, num_classes = sorted(sample_counts), len({layer.key for layer in traced.graph.layers})
    classes: dict[str, ClassTimes] = {}
    parameters: list[ShapesAndDtypes] = []
    for number, (layer, module) in enumerate(zip(traced.graph.layers, stages, strict=True)):
        if layer.key in classes:
            continue
        if isinstance(module, BlockStage):
            module.outputs = tuple(value.name for value in traced.stage_graph.values if value.writer == number)
        parameters.append(tuple((tuple(value.shape), value.dtype) for value in module.parameters()))

        def report(done: float, layer: Layer = layer, begun: int = len(classes)) -> None:
            progress((begun + done) / num_classes, layer.name)

        classes[layer.key] = _measure_class(traced, number, module, device, counts, repeats, report)
    progress(1.0, "collectives of ZeRO 3")
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
    traced: TracedModel,
    number: int,
    module: Any,
    device: str,
    sample_counts: Sequence[int],
    repeats: int,
    report: Callable[[float], None],
) -> ClassTimes:
    """The times of a layer. ``report`` is called with the part of the work that is done: it grows with the samples."""
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
    for place, size in enumerate(sample_counts):
        report(sum(sample_counts[:place]) / sum(sample_counts))
        if measured and measured[-1].forward_seconds + measured[-1].backward_seconds > MAX_SECONDS:
            break
        if failed:
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
    saved, begun = 0, time.perf_counter()
    for turn in range(repeats + 1):
        if turn == 1:  # the first turn warms up
            begun = time.perf_counter()
        if turn > MIN_REPEATS and time.perf_counter() - begun > ENOUGH_SECONDS:
            break
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
            if turn:
                times["forward"].append(middle - start)
                times[kind].append(time.perf_counter() - middle)
    median = {kind: statistics.median(values) for kind, values in times.items()}
    whole = median["whole"]
    given = min(median["input"], whole)
    both = sorted(f + b for f, b in zip(times["forward"][1::2], times["whole"], strict=True))
    spread = (both[(3 * len(both)) // 4] - both[len(both) // 4]) / statistics.median(both) if both[0] else 0.0
    return LayerTimes(num_samples, median["forward"], given, whole - given, whole, float(saved), spread)


def _ignore(_done: float, _step: str) -> None:
    pass


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
