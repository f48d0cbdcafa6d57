"""Measured times of layer classes, kept as JSON."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from reshard.arguments import check_arguments, check_fields
from reshard.errors import ArgumentError
from reshard.formatting import brief, format_names

from .layer_graph import LayerGraph
from .text_files import explain_refusal, read_object, read_value, write_text

VERSION = 1
#: Fraction of the peak rate of a device that layers are assumed to reach in an estimate.
EFFICIENCY = 0.5


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


@dataclass(frozen=True)
class LayerTimes:
    """Times of one layer for a number of samples, on one rank.

    Attributes:
        num_samples: samples of the forward.
        forward_seconds, input_grad_seconds, weight_grad_seconds, backward_seconds: medians; ``backward_seconds`` is
            that of a backward that is not split.
        saved_bytes: bytes that autograd saves for the backward.
        spread: interquartile range of ``forward_seconds + backward_seconds`` over their median.
    """

    num_samples: int
    forward_seconds: float
    input_grad_seconds: float
    weight_grad_seconds: float
    backward_seconds: float
    saved_bytes: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not _is_number(value, 0, 1e15):
                raise ArgumentError(f"{name} of a measurement is {brief(value)}; it must be a number from 0 to 1e15")
        if type(self.num_samples) is not int or self.num_samples < 1:
            raise ArgumentError(f"a measurement has {self.num_samples!r} samples; it needs an integer of at least 1")


@dataclass(frozen=True)
class ClassTimes:
    """Measurements of one layer class at one tensor-parallel degree, by samples.

    Attributes:
        measured: times, each for a number of samples.
        failed: numbers of samples that did not fit the memory.
        all_gather_seconds: seconds that a device spends on an all-gather of the layer's parameters under ZeRO 3, for
            launches and copies; the time of the bytes on links is not in it.
        reduce_scatter_seconds: the same for a reduce-scatter of the gradients of these parameters.

    Raises:
        ArgumentError: two measurements have the same samples, or a time is not a number of at least 0.
    """

    measured: tuple[LayerTimes, ...]
    failed: tuple[int, ...] = ()
    all_gather_seconds: float = 0.0
    reduce_scatter_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("all_gather_seconds", "reduce_scatter_seconds"):
            if not _is_number(getattr(self, name), 0, 1e15):
                raise ArgumentError(
                    f"{name} of a layer class is {brief(getattr(self, name))}; it must be a number from 0 to 1e15"
                )
        object.__setattr__(
            self, "measured", tuple(sorted(self.measured, key=lambda layer_times: layer_times.num_samples))
        )
        object.__setattr__(self, "failed", tuple(sorted(self.failed)))
        counts = [layer_times.num_samples for layer_times in self.measured]
        if len(set(counts)) < len(counts):
            raise ArgumentError(
                f"measurements of a layer class have {counts} samples; each number of samples needs one measurement"
            )

    def at(self, num_samples: float) -> LayerTimes:
        """Times for a number of samples: linear between measurements.

        Below the smallest measurement, times are in proportion to the samples. Above the largest, they continue the
        line of the last two measurements, but never fall: noise may have made the larger measurement the faster one.
        """
        measured = self.measured
        if len(measured) == 1:
            return _mixed(measured[0], measured[0], 0.0, num_samples / measured[0].num_samples, num_samples)
        index = bisect.bisect_left([layer_times.num_samples for layer_times in measured], num_samples)
        if index == 0:  # below the smallest measurement: in proportion to the samples
            return _mixed(measured[0], measured[0], 0.0, num_samples / measured[0].num_samples, num_samples)
        low, high = measured[-2:] if index == len(measured) else measured[index - 1 : index + 1]
        mixed = _mixed(
            low, high, (num_samples - low.num_samples) / (high.num_samples - low.num_samples), 1.0, num_samples
        )
        return mixed if index < len(measured) else _at_least(mixed, high)


def _at_least(layer_times: LayerTimes, floor: LayerTimes) -> LayerTimes:
    return replace(
        layer_times,
        **{
            name: max(getattr(layer_times, name), getattr(floor, name))
            for name in asdict(floor)
            if name != "num_samples"
        },
    )


def _mixed(low: LayerTimes, high: LayerTimes, share: float, scale: float, num_samples: float) -> LayerTimes:
    values = {
        name: max(0.0, (value + share * (getattr(high, name) - value)) * scale)
        for name, value in asdict(low).items()
        if name not in ("num_samples", "spread")
    }
    return LayerTimes(max(1, round(num_samples)), **values, spread=max(low.spread, high.spread))


@dataclass(frozen=True)
class LayerProfile:
    """Times of the layer classes of a model on one kind of device.

    Args:
        graph_key: :attr:`LayerGraph.key` of the model that was measured.
        device, dtype: kind of the device, and dtype of computations.
        classes: ``{layer class: {tensor-parallel degree: ClassTimes}}``. If a degree is missing, a rank takes its share
            of the time at degree 1.
        message_seconds: time of a message between stages in addition to that of its bytes.
        slowdown: factor, at least 1, by which computation and a transfer slow each other while both run.
        is_guess: whether the times are estimates.
        software: versions of torch and Python, and the machine type, of the measurement.

    Raises:
        ArgumentError: a class has no measurement.
    """

    graph_key: str
    device: str
    dtype: str
    classes: Mapping[str, Mapping[int, ClassTimes]]
    message_seconds: float = 0.0
    slowdown: float = 1.0
    is_guess: bool = False
    software: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.classes, Mapping) or not all(
            isinstance(class_, Mapping) for class_ in self.classes.values()
        ):
            raise ArgumentError(
                f"classes of a profile must be {{class: {{tp: ClassTimes}}}}, not {self.classes!r:.100}"
            )
        for key, degrees in self.classes.items():
            for degree, times in degrees.items():
                if not isinstance(times, ClassTimes):
                    raise ArgumentError(f"the times of layer class {key!r} must be ClassTimes, not {brief(times)}")
                if not times.measured:
                    raise ArgumentError(
                        f"the profile has no time of layer class {key!r} at tp={degree}: "
                        f"{list(times.failed)} samples did not fit the device; measure fewer samples"
                    )
            if 1 not in degrees:
                raise ArgumentError(f"the profile has no times of layer class {key!r} at tp=1")
        if not _is_number(self.slowdown, 1.0, 10.0):
            raise ArgumentError(f"slowdown of a profile is {brief(self.slowdown)}; it must be from 1 to 10")
        if not _is_number(self.message_seconds, 0.0, 1e6):
            raise ArgumentError(
                f"message_seconds of a profile is {brief(self.message_seconds)}; it must be a number of at least 0"
            )
        check_fields(self)

    @classmethod
    @check_arguments()
    def estimate(
        cls,
        graph: LayerGraph,
        *,
        flops_per_second: float,
        efficiency: float = EFFICIENCY,
        device: str = "guess",
        message_seconds: float = 0.0,
        slowdown: float = 1.0,
    ) -> LayerProfile:
        """Estimate times from counts of operations. Each training plan that a search finds with them is marked as a
        guess.

        Args:
            graph: the model.
            flops_per_second: peak rate of a device for the dtype of the graph.
            efficiency: part of the peak that layers reach. A backward has twice the work of a forward.
        """
        if not _is_number(flops_per_second, 1e-9, 1e30) or not _is_number(efficiency, 1e-9, 1.0):
            raise ArgumentError(
                f"flops_per_second is {brief(flops_per_second)} and efficiency {brief(efficiency)}; the first must be "
                "positive, and the second from 0 to 1"
            )
        classes = {}
        for layer in graph.layers:
            seconds = layer.forward_flops / (flops_per_second * efficiency)
            layer_times = LayerTimes(1, seconds, seconds, seconds, 2 * seconds, layer.saved_bytes)
            classes[layer.key] = {1: ClassTimes((layer_times,))}
        return cls(
            graph.key, device, graph.dtype, classes, message_seconds=message_seconds, slowdown=slowdown, is_guess=True
        )

    @check_arguments()
    def check(self, graph: LayerGraph, device: str | None = None) -> None:
        """Raise ArgumentError unless the profile is of this model, dtype and device."""
        missing = sorted({layer.key for layer in graph.layers} - set(self.classes))
        if missing:
            raise ArgumentError(
                f"the profile has no layer class {missing[0]!r} of {graph.name!r}; it was measured for another model "
                f"(its classes: {', '.join(sorted(self.classes))}); measure this one"
            )
        if self.graph_key != graph.key:
            raise ArgumentError(
                f"the profile was measured for a model of key {self.graph_key}, but {graph.name!r} has {graph.key}; "
                "shapes, operations or dtype differ: measure this one"
            )
        if self.dtype != graph.dtype:
            raise ArgumentError(f"the profile is of {self.dtype}, but {graph.name!r} computes in {graph.dtype}")
        if device is not None and device != self.device:
            raise ArgumentError(f"the profile was measured on {self.device!r}, not on {device!r}; measure it there")

    @check_arguments()
    def times(self, key: str, degree: int) -> tuple[ClassTimes, bool]:
        """Times of a layer class, and whether they are of this tensor-parallel degree, not of degree 1."""
        if key not in self.classes:
            raise ArgumentError(f"the profile has no layer class {brief(key)}; it has {format_names(self.classes)}")
        degrees = self.classes[key]
        return (degrees[degree], True) if degree in degrees else (degrees[1], degree == 1)

    @check_arguments()
    def spread(self, graph: LayerGraph) -> tuple[float, str, float]:
        """The spread of the measured times of the layers of a model, relative to their medians.

        Returns:
            Three values. The mean of :attr:`LayerTimes.spread` over all layers and numbers of samples, weighted by
            seconds, so short layers hardly count. The layer class that adds most to the mean. The mean of this class
            alone.
            Times at tensor-parallel degree 1 count.
        """
        added: dict[str, float] = {}
        whole: dict[str, float] = {}
        for layer in graph.layers:
            for layer_times in self.times(layer.key, 1)[0].measured:
                seconds = layer_times.forward_seconds + layer_times.backward_seconds
                added[layer.key] = added.get(layer.key, 0.0) + seconds * layer_times.spread
                whole[layer.key] = whole.get(layer.key, 0.0) + seconds
        key = max(added, key=lambda key_of_class: added[key_of_class])
        return sum(added.values()) / (sum(whole.values()) or 1.0), key, added[key] / (whole[key] or 1.0)

    @cached_property
    def hash(self) -> str:
        """Hash of the contents."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads."""
        data = {"version": VERSION, **asdict(self)}
        return json.dumps(data, indent=1, sort_keys=True)

    @classmethod
    @check_arguments()
    def from_json(cls, text: str) -> LayerProfile:
        """The inverse of :meth:`to_json`.

        Raises:
            ArgumentError: the text is not a profile of this version.
        """
        try:
            data = read_object(text)
            version = data.pop("version")
            if version != VERSION:
                raise ArgumentError(f"the profile has version {version!r}; this release reads version {VERSION}")
            data["classes"] = {
                key: {
                    int(degree): ClassTimes(
                        tuple(LayerTimes(**layer_times) for layer_times in times["measured"]),
                        times["failed"],
                        times.get("all_gather_seconds", 0.0),
                        times.get("reduce_scatter_seconds", 0.0),
                    )
                    for degree, times in degrees.items()
                }
                for key, degrees in data["classes"].items()
            }
            return cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"this is not a profile: {explain_refusal(error)}") from error

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        write_text(path, self.to_json() + "\n")

    @classmethod
    def read(cls, path: str | Path) -> LayerProfile:
        """Read what :meth:`save` wrote.

        Raises:
            ArgumentError: the file cannot be read, or does not hold a profile of this version.
        """
        return read_value(path, cls.from_json)
