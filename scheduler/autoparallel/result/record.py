"""The values of a training plan, saved as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from reshard.arguments import check_fields
from reshard.errors import ArgumentError
from reshard.formatting import count_of

from ...ir.schedule import Schedule
from ...ir.text import parse_schedule
from ..inputs.layer_choices import LayerChoice
from ..inputs.stages import StagePlan, check_stages, describe_stages, pp_ranks_of
from ..inputs.text_files import explain_refusal, read_object
from .reports import Alternative, EdgeReport, StageReport, TieReport, balance_degrees, check_values

if TYPE_CHECKING:
    from reshard.compression import Policy

VERSION = 1


@dataclass(frozen=True)
class TrainingPlanRecord:
    """The values of a :class:`TrainingPlan`, which documents them, and their JSON."""

    method: str
    stages: tuple[StagePlan, ...]
    layer_names: tuple[tuple[str, ...], ...]
    num_microbatches: int
    num_samples: int
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
    hosts: tuple[tuple[int, int, int], ...] = ()
    grid_refusals: tuple[tuple[str, str], ...] = ()
    compression_text: str = ""
    ties: tuple[TieReport, ...] = ()
    ranks: tuple[int, ...] = ()
    num_cluster_ranks: int = 0
    on_all_seconds: float = 0.0
    is_on_all_bound: bool = False
    is_bound_of_parts: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule."""
        return parse_schedule(self.schedule_text)

    @property
    def compression(self) -> Policy | None:
        """Codecs of edges and of sums of gradients; None: nothing is encoded."""
        from reshard.compression import parse_policy  # imports torch

        return parse_policy(self.compression_text) if self.compression_text else None

    @cached_property
    def hash(self) -> str:
        """Hash of the contents."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def cut_before(self) -> tuple[str, ...]:
        """Names of the layers that begin the second and each further stage."""
        return tuple(names[0] for names in self.layer_names[1:])

    @cached_property
    def pp_ranks(self) -> tuple[int, ...]:
        """The pp rank of each stage: stages on the same ranks share one."""
        return pp_ranks_of(self.stages)

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return max(stage.end_rank for stage in self.stages)

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """Ranks of the cluster that the training plan leaves idle."""
        return tuple(rank for rank in range(self.num_cluster_ranks) if rank not in set(self.ranks))

    @property
    def memory_bytes(self) -> float:
        """Bytes of the fullest device at the peak."""
        return max(report.memory_bytes for report in self.reports)

    @property
    def balance(self) -> tuple[float, float]:
        """Balance degrees of time and of memory over the pp ranks, as :func:`balance_degrees` defines them."""
        busy, memory = [0.0] * len(set(self.pp_ranks)), [0.0] * len(set(self.pp_ranks))
        for pp_rank, report in zip(self.pp_ranks, self.reports, strict=True):
            busy[pp_rank] += report.busy_seconds
            memory[pp_rank] = report.memory_bytes
        return balance_degrees(busy, memory)

    def __str__(self) -> str:
        stages = describe_stages(self.stages)
        name = self.schedule_text.partition(":")[0]
        guess = " (a guess)" if self.is_guess else ""
        num_microbatches = count_of(self.num_microbatches, "microbatch")
        return f"{self.method}: {self.seconds:.4g} s{guess}, {num_microbatches}, {name}: {stages}"

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

    def _check(self) -> None:
        """Raise ArgumentError unless the parts of a training plan that was read fit each other."""
        check_values(self, "the training plan")
        for name in ("seconds", "bound_seconds", "wider_links_seconds"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"{name} of the training plan is {getattr(self, name)}; it must not be negative")
        if self.num_microbatches < 1 or self.num_samples < 1 or self.num_samples % self.num_microbatches:
            raise ArgumentError(
                f"{self.num_microbatches} microbatches of the training plan do not divide {self.num_samples} samples"
            )
        check_stages(self.stages)
        if self.ranks and (
            len(self.ranks) != self.num_ranks
            or len(set(self.ranks)) < len(self.ranks)
            or not all(type(rank) is int and 0 <= rank < self.num_cluster_ranks for rank in self.ranks)
        ):
            raise ArgumentError(
                f"ranks of the training plan must name {self.num_ranks} different ranks of the cluster, which has "
                f"{self.num_cluster_ranks}, not {list(self.ranks)}"
            )
        for what, items in (("layer_names", self.layer_names), ("reports", self.reports)):
            if len(items) != len(self.stages):
                raise ArgumentError(
                    f"{what} of the training plan has {len(items)} entries for {len(self.stages)} stages"
                )
        for number, (stage, layers) in enumerate(zip(self.stages, self.layer_names, strict=True)):
            if len(layers) != stage.num_layers or not all(isinstance(name, str) for name in layers):
                raise ArgumentError(f"stage {number} has {stage.num_layers} layers, but layer_names {list(layers)}")
        self._check_reports()

    def _check_reports(self) -> None:
        """Raise ArgumentError unless :meth:`explain` and :meth:`to_svg` can show the predictions."""
        for name in ("reports", "edges", "alternatives", "ties"):
            for number, item in enumerate(getattr(self, name)):
                check_values(item, f"{name}[{number}]")
        numbers = range(len(self.stages))
        for what, ends in [("an edge", (edge.src, edge.dst)) for edge in self.edges] + [
            ("a tie", tie.stages) for tie in self.ties
        ]:
            if not all(isinstance(stage, int) and stage in numbers for stage in ends):
                raise ArgumentError(
                    f"{what} of the training plan is between stages {list(ends)}; there are {len(numbers)}"
                )
        names = [name for tie in self.ties for name in tie.layer_names]
        if not all(isinstance(name, str) for name in names):
            raise ArgumentError("ties of the training plan must name layers by strings")

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ArgumentError: the text is not a training plan of this version.
        """
        try:
            data = read_object(text)
            version = data.pop("version")
            data.setdefault("ties", [])
            if version != VERSION:
                raise ArgumentError(f"the training plan has version {version!r}; this release reads version {VERSION}")
            stages = tuple(_read_stage(stage) for stage in data.pop("stages"))
            kinds: Mapping[str, Any] = {
                "reports": StageReport,
                "edges": EdgeReport,
                "alternatives": Alternative,
                "ties": TieReport,
            }
            lists: dict[str, Any] = {
                name: tuple(kind(**item) for item in data.pop(name)) for name, kind in kinds.items()
            }
            pairs = {name: tuple(map(tuple, data[name])) for name in ("layer_names", "hosts", "grid_refusals")}
            pairs["ranks"] = tuple(data.get("ranks", ()))
            made = cls(stages=stages, **lists, **{**data, **pairs})
            made._check()
            return made
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"this is not a training plan: {explain_refusal(error)}") from error


def _read_stage(data: dict[str, Any]) -> StagePlan:
    choices = [LayerChoice(**choice) for count, choice in data.pop("choices") for _ in range(count)]
    return StagePlan(**data, choices=tuple(choices))
