"""Predictions of a search for the stages and edges of a training plan, and for other candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from reshard.errors import ArgumentError
from reshard.formatting import brief

#: By annotation: the text of the rule for a value, and the types that it may have.
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "float": ("a finite number", (int, float)),
    "int": ("an integer", (int,)),
    "str": ("a string", (str,)),
    "str | None": ("a string or null", (str, type(None))),
    "bool": ("true or false", (bool,)),
}


@dataclass(frozen=True)
class StageReport:
    """Predicted seconds of a stage for one microbatch, and bytes of a device at the peak.

    ``gradient_sync_seconds`` are those after the last computation of a device. ``ending_bytes`` are those at the end
    of a step, while a device adds gradients of parameters that stages share.
    """

    compute_seconds: float
    tp_collective_seconds: float
    all_gather_seconds: float
    gradient_sync_seconds: float
    busy_seconds: float
    exposed_seconds: float
    in_flight: int
    state_bytes: float
    activation_bytes: float
    working_bytes: float
    buffer_bytes: float
    limit_bytes: float
    ending_bytes: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """Bytes of a device at the peak."""
        kept = self.state_bytes + self.activation_bytes + self.working_bytes + self.buffer_bytes
        return max(kept, self.ending_bytes)


@dataclass(frozen=True)
class EdgeReport:
    """Cost of an edge for one microbatch: bytes and seconds forward, and seconds backward and its busiest port.

    ``nbytes`` are those of the tensors; a codec sends fewer.
    """

    src: int
    dst: int
    nbytes: int
    forward_seconds: float
    backward_seconds: float
    busiest_port: str = ""
    port_seconds: float = 0.0
    forward_codec: str | None = None
    backward_codec: str | None = None


@dataclass(frozen=True)
class TieReport:
    """Sum over stages of the gradients of parameters that some layers share, once in a step.

    ``nbytes`` are those of the gradients of one stage, and ``seconds`` count from when all of these stages are ready.
    """

    layer_names: tuple[str, ...]
    stages: tuple[int, ...]
    nbytes: float
    seconds: float
    codec: str | None = None

    def __post_init__(self) -> None:
        for name in ("layer_names", "stages"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True)
class Alternative:
    """A candidate that was not chosen: its predicted seconds, and the seconds of its slowest stage by kind.

    ``short_bytes``: memory by which its worst device is too small, 0 if it fits.
    """

    method: str
    text: str
    seconds: float
    busy_seconds: float
    exposed_seconds: float
    bubble_seconds: float
    sync_seconds: float
    short_bytes: float = 0.0


def balance_degrees(times: Sequence[float], memories: Sequence[float]) -> tuple[float, float]:
    """Balance of time and of memory: ``1 - max / sum``. At most ``1 - 1 / stages``, if all stages are equal."""
    time, memory = (1 - max(values) / (sum(values) or 1.0) for values in (times, memories))
    return time, memory


def check_values(record: Any, where: str) -> None:
    """Raise ArgumentError unless the numbers and texts of a dataclass that was read have the types that it declares.

    Args:
        where: the name of the record, for the error.
    """
    for field in fields(record):
        value = getattr(record, field.name)
        wanted, kinds = _KINDS.get(str(field.type), ("", (object,)))
        is_wrong = not isinstance(value, kinds) or (isinstance(value, bool) and wanted != "true or false")
        if wanted and (is_wrong or (isinstance(value, float) and not math.isfinite(value))):
            raise ArgumentError(f"{field.name} of {where} is {brief(value)}; it must be {wanted}")
