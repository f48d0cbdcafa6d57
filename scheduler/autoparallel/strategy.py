"""The result of a search: which layers run where, and how. A value that is saved as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.errors import ArgumentError

from ..ir.text import parse_schedule
from .choices import Choice

if TYPE_CHECKING:
    from ..ir.schedule import Schedule

VERSION = 1


@dataclass(frozen=True, order=True)
class StagePlan:
    """Layers ``first_layer`` to ``end_layer - 1`` on ranks ``first_rank`` to ``end_rank - 1``.

    ``choices`` has one entry for each of the layers.
    """

    first_layer: int
    end_layer: int
    first_rank: int
    end_rank: int
    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", tuple(self.choices))
        if len(self.choices) != self.end_layer - self.first_layer or not self.choices:
            raise ArgumentError(
                f"a stage of layers {self.first_layer} to {self.end_layer - 1} has {len(self.choices)} choices; it "
                "needs one for each layer"
            )
        for choice in self.choices:
            if self.num_ranks % choice.tp:
                raise ArgumentError(f"{choice} does not divide the {self.num_ranks} ranks of a stage")

    @property
    def num_ranks(self) -> int:
        """Ranks of the stage."""
        return self.end_rank - self.first_rank

    @property
    def num_layers(self) -> int:
        """Layers of the stage."""
        return self.end_layer - self.first_layer

    def replicas(self, layer: int) -> int:
        """Data-parallel replicas of a layer, counted over the whole model."""
        return self.num_ranks // self.choices[layer - self.first_layer].tp

    def __str__(self) -> str:
        counts: dict[Choice, int] = {}
        for choice in self.choices:
            counts[choice] = counts.get(choice, 0) + 1
        parts = [f"dp={self.num_ranks // c.tp} {c}" + (f" x{n}" if len(counts) > 1 else "") for c, n in counts.items()]
        last = f"-{self.end_layer - 1}" if self.num_layers > 1 else ""
        return f"layers {self.first_layer}{last} on {self.num_ranks} ranks ({'; '.join(parts)})"


@dataclass(frozen=True)
class StageReport:
    """Predicted seconds of a stage for one microbatch, and bytes of a device at the peak."""

    compute_seconds: float
    sum_seconds: float
    gather_seconds: float
    gradient_sync_seconds: float
    busy_seconds: float
    exposed_seconds: float
    in_flight: int
    state_bytes: float
    activation_bytes: float
    working_bytes: float
    buffer_bytes: float
    limit_bytes: float

    @property
    def memory_bytes(self) -> float:
        """Bytes of a device at the peak."""
        return self.state_bytes + self.activation_bytes + self.working_bytes + self.buffer_bytes


@dataclass(frozen=True)
class EdgeReport:
    """Price of an edge for one microbatch: bytes and seconds forward, and seconds backward and its busiest port."""

    src: int
    dst: int
    nbytes: int
    forward_seconds: float
    backward_seconds: float
    busiest_port: str = ""
    port_seconds: float = 0.0


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


@dataclass(frozen=True)
class Strategy:
    """Stages, schedule and microbatches of a training, and what they are predicted to take.

    ``Pipe(model, strategy=strategy)`` trains it. It is the same on every rank and from run to run.

    Attributes:
        method: the method that found it. stages: the stages, in order.
        layer_names: for each stage, the names of its layers.
        microbatches, rows: of a step. schedule_text: the schedule, as :func:`reshard.scheduler.parse_schedule` reads.
        seconds: predicted seconds of a step, with the sums of gradients.
        bound_seconds: no plan of this model and profile is faster.
        is_guess: whether the profile is an estimate.
        graph_hash, profile_hash, cluster_hash: what it was made for.
        reports, edges: details of each stage and edge. alternatives: other candidates, fastest first.
        wider_links_seconds: predicted seconds with the same schedule if links were 10 % faster.
    """

    method: str
    stages: tuple[StagePlan, ...]
    layer_names: tuple[tuple[str, ...], ...]
    microbatches: int
    rows: int
    schedule_text: str
    seconds: float
    bound_seconds: float
    is_guess: bool
    graph_hash: str
    profile_hash: str
    cluster_hash: str
    reports: tuple[StageReport, ...]
    edges: tuple[EdgeReport, ...]
    alternatives: tuple[Alternative, ...] = ()
    wider_links_seconds: float = 0.0

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule."""
        return parse_schedule(self.schedule_text)

    @cached_property
    def hash(self) -> str:
        """Hash of the contents."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def cut_before(self) -> tuple[str, ...]:
        """Names of the layers that begin the second and each further stage."""
        return tuple(names[0] for names in self.layer_names[1:])

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return self.stages[-1].end_rank

    @property
    def memory_bytes(self) -> float:
        """Bytes of the fullest device at the peak."""
        return max(report.memory_bytes for report in self.reports)

    def __str__(self) -> str:
        stages = ", ".join(map(str, self.stages))
        name = self.schedule_text.partition(":")[0]
        guess = " (a guess)" if self.is_guess else ""
        return f"{self.method}: {self.seconds:.4g} s{guess}, {self.microbatches} microbatches, {name}: {stages}"

    def explain(self) -> str:
        """Where time and memory go, what the edges cost, how far the bound is, and what other candidates lack."""
        from .explain import explain_strategy

        return explain_strategy(self)

    def placements(self) -> list[Any]:
        """A :class:`reshard.scheduler.Placement` for each stage. Imports torch.

        Raises:
            ArgumentError: ``Pipe`` cannot run the strategy.
        """
        from .modules.apply import make_placements

        return make_placements(self)

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads. Runs of equal choices are written once."""
        data = asdict(self)
        for stage in data["stages"]:
            runs: list[list[Any]] = []
            for choice in stage["choices"]:
                if runs and runs[-1][1] == choice:
                    runs[-1][0] += 1
                else:
                    runs.append([1, choice])
            stage["choices"] = runs
        return json.dumps({"version": VERSION, **data}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Strategy:
        """The inverse of :meth:`to_json`.

        Raises:
            ArgumentError: the text is not a strategy of this version.
        """
        try:
            data = json.loads(text)
            version = data.pop("version")
            if version != VERSION:
                raise ArgumentError(f"the strategy has version {version!r}; this release reads version {VERSION}")
            stages = tuple(_read_stage(stage) for stage in data.pop("stages"))
            kinds: Mapping[str, Any] = {"reports": StageReport, "edges": EdgeReport, "alternatives": Alternative}
            lists: dict[str, Any] = {
                name: tuple(kind(**each) for each in data.pop(name)) for name, kind in kinds.items()
            }
            return cls(stages=stages, **lists, **{**data, "layer_names": tuple(map(tuple, data["layer_names"]))})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"this is not a strategy: {type(error).__name__}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the strategy as JSON."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Strategy:
        """Read what :meth:`save` wrote."""
        return cls.from_json(Path(path).read_text())


def _read_stage(data: dict[str, Any]) -> StagePlan:
    choices = [Choice(**choice) for count, choice in data.pop("choices") for _ in range(count)]
    return StagePlan(**data, choices=tuple(choices))
