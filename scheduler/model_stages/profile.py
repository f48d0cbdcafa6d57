"""Profiles: median times of each stage in measured steps, which can be saved as JSON."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reshard.arguments import check_arguments, check_fields
from reshard.errors import ArgumentError
from reshard.formatting import brief

from .. import torch_compat
from ..gradients.compression_policy import StageSums
from ..ir.actions import Kind
from ..ir.schedule import Schedule
from ..pipeline import MAX_COST, MAX_COUNT, Pipeline, Stage
from ..runtime.warm_up import keep_buffers
from ..simulation.replay import PipelineTimeline

#: A function of a pipeline and a number of microbatches that returns a schedule.
ScheduleBuilder = Callable[..., Schedule]


@dataclass(frozen=True)
class StageTimes:
    """Median seconds of one stage for one microbatch, and bytes kept per device from its forward to its backward.

    Raises:
        ArgumentError: a number is negative, NaN or not finite.
    """

    forward_seconds: float
    input_grad_seconds: float
    weight_grad_seconds: float
    whole_backward_seconds: float
    activation_bytes: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) not in (int, float) or not 0 <= value < MAX_COST:
                raise ArgumentError(f"{name} of a stage is {brief(value)}; it must be a number from 0 to {MAX_COST:g}")


@dataclass(frozen=True)
class StageProfile:
    """Times of all stages, for microbatches of ``num_samples`` samples.

    Raises:
        ArgumentError: ``num_samples`` is not a positive integer, or ``stages`` holds no StageTimes.
    """

    num_samples: int
    stages: tuple[StageTimes, ...]

    def __post_init__(self) -> None:
        check_fields(self, num_samples=(1, MAX_COUNT))

    @check_arguments(num_samples=(1, MAX_COUNT))
    def apply(self, pipeline: Pipeline, num_samples: int) -> Pipeline:
        """The pipeline with these times, scaled to microbatches of ``num_samples`` samples."""
        if len(self.stages) != len(pipeline.stages):
            raise ArgumentError(
                f"the profile has {len(self.stages)} stages, but the pipeline has {len(pipeline.stages)}"
            )
        scale = num_samples / self.num_samples
        stages = [
            Stage(
                times.forward_seconds * scale,
                times.input_grad_seconds * scale,
                times.weight_grad_seconds * scale,
                max(1, round(times.activation_bytes * scale)),
                stage.name,
                stage.mesh,
                times.whole_backward_seconds * scale,
            )
            for times, stage in zip(self.stages, pipeline.stages, strict=True)
        ]
        return replace(pipeline, stages=tuple(stages))

    @check_arguments()
    def save(self, path: str | Path) -> None:
        """Write the profile as JSON. Raises ArgumentError if the file cannot be written."""
        try:
            Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")
        except (OSError, ValueError) as error:
            raise ArgumentError(f"the profile {path} cannot be written: {error}") from error

    @classmethod
    @check_arguments()
    def load(cls, path: str | Path) -> StageProfile:
        """Read what :meth:`save` wrote.

        Raises:
            ArgumentError: the file cannot be read, is not a profile, or has a number that is out of range.
        """
        try:
            data = json.loads(Path(path).read_text())
            return cls(data["num_samples"], tuple(StageTimes(**stage) for stage in data["stages"]))
        except OSError as error:
            raise ArgumentError(f"the profile {path} cannot be read: {error.strerror}") from error
        except ArgumentError as error:
            raise ArgumentError(f"the profile {path}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(f"{path} is not a profile: {type(error).__name__}: {error}") from error


def profile_timelines(
    timelines: Iterable[PipelineTimeline], num_stages: int, num_samples: int, activation_bytes: Sequence[int]
) -> StageProfile:
    """Medians over all microbatches of measured timelines.

    If no timeline has split backwards, half of a whole backward counts as its weight-gradient pass.
    """
    seconds: dict[tuple[int, Kind], list[float]] = {}
    for timeline in timelines:
        for span in timeline.spans:
            if not span.action.kind.is_transfer:
                seconds.setdefault((span.action.stage, span.action.kind), []).append(span.end - span.start)
    stages = []
    for stage in range(num_stages):
        median = {kind: statistics.median(seconds[stage, kind]) for kind in Kind if (stage, kind) in seconds}
        whole = median.get(Kind.B, median.get(Kind.I, 0.0) + median.get(Kind.W, 0.0))
        stages.append(
            StageTimes(
                median.get(Kind.F, 0.0),
                median.get(Kind.I, whole / 2),
                median.get(Kind.W, whole / 2),
                whole,
                activation_bytes[stage],
            )
        )
    return StageProfile(num_samples, tuple(stages))


@dataclass
class SavedBytes:
    """Bytes that autograd saved for backwards. ``marked_bytes`` counts those saved while ``is_marked`` is set."""

    nbytes: int = 0
    marked_bytes: int = 0
    is_marked: bool = False


@contextlib.contextmanager
def count_saved_bytes(
    key: Callable[[Any], int] = lambda storage: storage.data_ptr(), ignored: Iterable[torch.Tensor] = ()
) -> Iterator[SavedBytes]:
    """Count the bytes of the tensors that autograd saves in this context: each storage once, and no parameters.

    Args:
        key: function that identifies a storage; default: its address. Storages without data need another one.
        ignored: tensors whose storages do not count, such as parameters, of which autograd also saves views.
    """
    counted, seen = SavedBytes(), {key(torch_compat.inner_tensor(item).untyped_storage()) for item in ignored}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
            storage = torch_compat.inner_tensor(tensor).untyped_storage()
            number = key(storage)
            if number not in seen:
                seen.add(number)
                counted.nbytes += storage.nbytes()
                counted.marked_bytes += storage.nbytes() * counted.is_marked
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield counted


@contextlib.contextmanager
def restore_training_state(
    parameters: Sequence[torch.Tensor], modules: Mapping[int, torch.nn.Module], sums: StageSums, device_type: str
) -> Iterator[None]:
    """Restore gradients, buffers, errors of encoded sums and random number generators when the context ends."""
    gradients = [parameter.grad for parameter in parameters]
    kept = sums.state_dict()
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch_compat.keep_rng(device_type), keep_buffers(modules.values()):
            yield
    finally:
        sums.load_state_dict(kept)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
