"""Pipelines: stages, the edges between them, and the cost of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from reshard.arguments import check_arguments
from reshard.codecs import parse_codec
from reshard.errors import ArgumentError
from reshard.formatting import brief, format_ranks
from reshard.sharding import Mesh, TensorSpec

#: ``((link, seconds), ...)``: for each link, how long one transfer keeps it busy.
Loads = tuple[tuple[str, float], ...]
#: Largest cost in seconds or bytes. Sums of larger costs would be too inexact to compare.
MAX_COST = 1e15
#: Limit on numbers of microbatches and of samples.
MAX_COUNT = 2**40
#: Prefixes of the dtypes that can have gradients.
_DIFFERENTIABLE: tuple[str, ...] = ("float", "bfloat", "complex")


@dataclass(frozen=True)
class Stage:
    """A part of the model that one set of devices computes.

    Args:
        forward_seconds: duration of the forward of one microbatch.
        input_grad_seconds: duration of the input-gradient pass of one microbatch. Earlier stages wait for its result.
        weight_grad_seconds: duration of the weight-gradient pass of one microbatch.
        activation_bytes: bytes that a device keeps for one microbatch, from its forward to the end of its backward.
        name: label used in error messages.
        mesh: devices of the stage; needed only to run it.
        whole_backward_seconds: duration of a backward that is not split; default: the sum of both passes.

    Raises:
        ArgumentError: a cost is not a number from 0 to 1e15, or ``mesh`` is not a Mesh.
    """

    forward_seconds: float
    input_grad_seconds: float
    weight_grad_seconds: float
    activation_bytes: int = 1
    name: str = ""
    mesh: Mesh | None = None
    whole_backward_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise ArgumentError(f"the mesh of a stage must be a Mesh, not {type(self.mesh).__name__}")
        if not isinstance(self.name, str):
            raise ArgumentError(f"the name of a stage must be a string, not {brief(self.name)}")
        for cost in ("forward_seconds", "input_grad_seconds", "weight_grad_seconds", "activation_bytes"):
            _check_cost(f"{cost} of stage {self.name!r}" if self.name else cost, getattr(self, cost))
        if self.whole_backward_seconds is not None:
            _check_cost("whole_backward_seconds", self.whole_backward_seconds)

    @property
    def backward_seconds(self) -> float:
        """Duration of a backward that is not split into two passes."""
        if self.whole_backward_seconds is not None:
            return self.whole_backward_seconds
        return self.input_grad_seconds + self.weight_grad_seconds


@dataclass(frozen=True)
class Edge:
    """Tensors that stage ``src`` sends to stage ``dst`` in a forward. Their gradients return in the backward.

    Args:
        src, dst: numbers of the stages.
        forward_seconds, backward_seconds: duration of one transfer while no other transfer uses its links.
        forward_loads, backward_loads: for each shared link, how long one transfer keeps it busy, as
            ``((link, seconds), ...)`` or a dict. Default: the transfer shares no link.
        tensors: named tensors of one microbatch, with their layouts on both stages; the simulation does not need them.
        without_gradient: names of tensors that need no gradient. Integer and boolean tensors never have one.
        passed_on: names of tensors that stage ``src`` forwards unchanged from an earlier stage. Its module does not
            return them.
        forward_codec, backward_codec: block codecs of the tensors and of their gradients on the wire; None: raw.

    Raises:
        ArgumentError: a cost is not a number from 0 to 1e15, a link is busy for longer than the transfer takes, a
            tensor has no name or a name that is taken or reserved, ``without_gradient`` or ``passed_on`` names an
            unknown tensor, there is no such codec, or an argument has a wrong type.
    """

    src: int
    dst: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_loads: Loads = ()
    backward_loads: Loads = ()
    tensors: tuple[TensorSpec, ...] = field(default=())
    without_gradient: frozenset[str] = frozenset()
    passed_on: frozenset[str] = frozenset()
    forward_codec: str | None = None
    backward_codec: str | None = None

    def __post_init__(self) -> None:
        for end in (self.src, self.dst):
            if not isinstance(end, int) or abs(end) >= 2**31:
                raise ArgumentError(f"an end of an edge is {brief(end)}; it must be the number of a stage")
        for codec in (self.forward_codec, self.backward_codec):
            if codec is not None:
                parse_codec(codec)
        for name in ("without_gradient", "passed_on"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ArgumentError(f"{name} must be a set of names, such as {{{brief(value)}}}, not a string")
        for name in ("without_gradient", "passed_on", "tensors"):
            if not _is_iterable(getattr(self, name)):
                raise ArgumentError(
                    f"{name} of edge {self.src} -> {self.dst} must be a list, not {brief(getattr(self, name))}"
                )
        for spec in self.tensors:
            if not isinstance(spec, TensorSpec):
                raise ArgumentError(
                    f"tensors of edge {self.src} -> {self.dst} must be TensorSpecs, not {type(spec).__name__}"
                )
            if spec.name == "self":
                raise ArgumentError(
                    f"edge {self.src} -> {self.dst}: no tensor can be called {spec.name!r}: the name is reserved"
                )
        object.__setattr__(self, "tensors", tuple(self.tensors))
        for what in ("without_gradient", "passed_on"):
            if not all(isinstance(name, str) for name in getattr(self, what)):
                raise ArgumentError(f"{what} of edge {self.src} -> {self.dst} must be a set of names")
            object.__setattr__(self, what, frozenset(getattr(self, what)))
        where = f"edge {self.src} -> {self.dst}"
        for direction in ("forward", "backward"):
            loads = getattr(self, f"{direction}_loads")
            if isinstance(loads, Mapping):
                loads = tuple(loads.items())
                object.__setattr__(self, f"{direction}_loads", loads)
            seconds = getattr(self, f"{direction}_seconds")
            _check_cost(f"{direction}_seconds of {where}", seconds)
            _check_loads(f"{direction}_loads of {where}", loads, seconds)
        names = [spec.name for spec in self.tensors]
        if None in names or len(set(names)) < len(names) or not self.without_gradient <= set(names):
            raise ArgumentError(
                f"edge {self.src} -> {self.dst}: each tensor needs a unique name, and without_gradient must name "
                f"some of them; tensors are {names}, without_gradient is {sorted(self.without_gradient)}"
            )
        if not self.passed_on <= set(names):
            raise ArgumentError(
                f"edge {self.src} -> {self.dst}: passed_on must name some of its tensors {names}; it names "
                f"{sorted(self.passed_on)}"
            )

    @cached_property
    def gradients(self) -> tuple[TensorSpec, ...]:
        """Gradients that a backward transfer sends, for the tensors that need one; ``src`` and ``dst`` are swapped."""
        return tuple(
            replace(spec, src=spec.dst, dst=spec.src)
            for spec in self.tensors
            if spec.name not in self.without_gradient and spec.dtype.startswith(_DIFFERENTIABLE)
        )


@dataclass(frozen=True)
class Pipeline:
    """Stages and the edges between them.

    An edge leads from a stage to any later stage. At most one edge joins the same two stages.

    Raises:
        ArgumentError: there is no stage, an edge names an unknown stage or leads backwards, two edges join the same
            stages, a tensor's ranks differ from its stage's mesh, or a stage receives two tensors of the same name.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        for what, values, kind in (("stages", self.stages, Stage), ("edges", self.edges, Edge)):
            if not _is_iterable(values):
                raise ArgumentError(f"{what} of a pipeline must be a list of {kind.__name__}s, not {brief(values)}")
            for value in values:
                if not isinstance(value, kind):
                    raise ArgumentError(f"{what} of a pipeline must be {kind.__name__}s, not {type(value).__name__}")
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages:
            raise ArgumentError("a pipeline needs at least one stage")
        for edge in self.edges:
            ends = (edge.src, edge.dst)
            if any(type(end) is not int for end in ends) or not 0 <= edge.src < edge.dst < len(self.stages):
                raise ArgumentError(
                    f"edge {edge.src} -> {edge.dst} must lead forward between stages 0 to {len(self.stages) - 1}"
                )
        object.__setattr__(self, "edges", tuple(sorted(self.edges, key=lambda edge: (edge.src, edge.dst))))
        if len(self.edge_between) < len(self.edges):
            raise ArgumentError("two edges join the same two stages; put their tensors on one edge")
        for edge in self.edges:
            for spec in edge.tensors:
                for stage, layout in ((edge.src, spec.src), (edge.dst, spec.dst)):
                    mesh = self.stages[stage].mesh
                    if mesh is not None and set(layout.ranks) != set(mesh.ranks):
                        raise ArgumentError(
                            f"tensor {spec.name!r} of edge {edge.src} -> {edge.dst} is on ranks "
                            f"{format_ranks(layout.ranks)}, but stage {stage} is on ranks {format_ranks(mesh.ranks)}"
                        )
        for stage in range(len(self.stages)):
            names = [spec.name for edge in self.edges if edge.dst == stage for spec in edge.tensors]
            if len(set(names)) < len(names):
                raise ArgumentError(f"stage {stage} receives two tensors of the same name: {sorted(map(str, names))}")
            for edge in self.edges:
                if edge.src == stage and not edge.passed_on <= set(names):
                    raise ArgumentError(
                        f"stage {stage} passes on {sorted(edge.passed_on)} to stage {edge.dst}, but receives only "
                        f"{sorted(map(str, names))}"
                    )

    @classmethod
    def of_costs(
        cls,
        forward: Sequence[float],
        backward: Sequence[float],
        communication: Sequence[float],
        *,
        weight_grad_part: float = 0.5,
    ) -> Pipeline:
        """A chain of stages, made from durations in seconds only.

        Args:
            forward, backward: durations of the forward and the backward of one microbatch, for each stage.
            communication: duration of one transfer in either direction, between each stage and the next.
            weight_grad_part: fraction of the backward that the weight-gradient pass takes, from 0 to 1.
        """
        _check_cost("weight_grad_part", weight_grad_part, high=1)
        for what, costs in (("forward", forward), ("backward", backward), ("communication", communication)):
            if not isinstance(costs, Sequence) or isinstance(costs, str):
                raise ArgumentError(f"{what} must be a list of seconds, not {type(costs).__name__}")
            for cost in costs:
                _check_cost(what, cost)
        if not len(forward) == len(backward) == len(communication) + 1:
            raise ArgumentError(
                f"{len(forward)} stages need {len(forward)} backward and {len(forward) - 1} communication times, "
                f"but {len(backward)} and {len(communication)} are given"
            )
        stages = [
            Stage(f, b * (1 - weight_grad_part), b * weight_grad_part) for f, b in zip(forward, backward, strict=True)
        ]
        return cls(tuple(stages), tuple(Edge(i, i + 1, c, c) for i, c in enumerate(communication)))

    @cached_property
    def edge_between(self) -> dict[tuple[int, int], Edge]:
        """Edges by ``(src, dst)``."""
        return {(edge.src, edge.dst): edge for edge in self.edges}

    @cached_property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages from which it receives tensors in a forward."""
        return tuple(tuple(e.src for e in self.edges if e.dst == s) for s in range(len(self.stages)))

    @cached_property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages to which it sends tensors in a forward."""
        return tuple(tuple(e.dst for e in self.edges if e.src == s) for s in range(len(self.stages)))

    @check_arguments(num_microbatches=(1, MAX_COUNT))
    def ideal_seconds(self, num_microbatches: int) -> float:
        """Makespan of 1F1B if communication took no time and every stage took as long as the slowest one."""
        slowest = max(stage.forward_seconds + stage.backward_seconds for stage in self.stages)
        return (num_microbatches + len(self.stages) - 1) * slowest


def check_pipeline(pipeline: object) -> None:
    """Raise ArgumentError unless the argument is a Pipeline."""
    if not isinstance(pipeline, Pipeline):
        raise ArgumentError(f"a Pipeline is needed, not {type(pipeline).__name__}")


def check_limit(activation_limit_bytes: object) -> None:
    """Raise ArgumentError unless the limit is a number of at least 0, which may be infinite. NaN is refused."""
    is_number = isinstance(activation_limit_bytes, (int, float)) and not isinstance(activation_limit_bytes, bool)
    if not is_number or not activation_limit_bytes >= 0:  # type: ignore[operator]
        raise ArgumentError(
            f"activation_limit_bytes is {brief(activation_limit_bytes)}; it must be a number of at least 0; "
            "omit it for the default"
        )


def check_limits(activation_limit_bytes: object, num_pp_ranks: int) -> tuple[float, ...]:
    """The limit of each pp rank, from one number for all or a list. Raises ArgumentError if a limit is invalid."""
    if not isinstance(activation_limit_bytes, Sequence) or isinstance(activation_limit_bytes, str):
        check_limit(activation_limit_bytes)
        return (activation_limit_bytes,) * num_pp_ranks  # type: ignore[return-value]  # check_limit accepts numbers only
    if len(activation_limit_bytes) != num_pp_ranks:
        raise ArgumentError(
            f"activation_limit_bytes has {len(activation_limit_bytes)} limits; each of {num_pp_ranks} pp ranks needs "
            "one"
        )
    for limit in activation_limit_bytes:
        check_limit(limit)
    return tuple(activation_limit_bytes)


def check_placement(pipeline: Pipeline, pp_rank_of_stage: object) -> tuple[int, ...]:
    """The pp rank of each stage; None: one stage per pp rank. Raises ArgumentError if a pp rank is invalid."""
    if pp_rank_of_stage is None:
        return tuple(range(len(pipeline.stages)))
    if not isinstance(pp_rank_of_stage, Sequence):
        raise ArgumentError(
            f"pp_rank_of_stage must be a list with the pp rank of each stage, not {brief(pp_rank_of_stage)}"
        )
    pp_ranks = tuple(pp_rank_of_stage)
    if any(isinstance(pp_rank, bool) or not isinstance(pp_rank, int) for pp_rank in pp_ranks):
        raise ArgumentError(f"pp ranks {brief(pp_ranks)} must be integers")
    if (
        len(pp_ranks) != len(pipeline.stages)
        or max(pp_ranks) >= len(pp_ranks)
        or set(pp_ranks) != set(range(max(pp_ranks) + 1))
    ):
        raise ArgumentError(
            f"pp ranks {brief(list(pp_ranks))}: each of {len(pipeline.stages)} stages needs one, and pp ranks are "
            "numbered from 0"
        )
    return pp_ranks


def _check_cost(what: str, value: object, high: float = MAX_COST) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= high:
        raise ArgumentError(f"{what} is {brief(value)}; it must be a number from 0 to {high:g}")


def _is_iterable(value: object) -> bool:
    """Whether a value has items. A tensor without dims has the methods for it, but no items."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def _check_loads(what: str, loads: Any, transfer_seconds: float) -> None:
    """Raise ArgumentError unless the loads of links fit a transfer of this duration."""
    if not _is_iterable(loads) or not all(
        isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) for entry in loads
    ):
        raise ArgumentError(f"{what} must be ((link, seconds), ...), not {brief(loads)}")
    links = [link for link, _ in loads]
    if len(set(links)) < len(links):
        raise ArgumentError(f"{what} name a link twice: {links}")
    for link, busy in loads:
        _check_cost(f"the load of link {link}", busy)
        if busy > transfer_seconds * (1 + 1e-9):
            raise ArgumentError(
                f"{what}: link {link} is busy for {busy:g} s, longer than the transfer takes ({transfer_seconds:g} s)"
            )
