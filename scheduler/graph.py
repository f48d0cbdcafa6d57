"""What a schedule is made for: stages, what passes between them, and what each costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from reshard.errors import ArgumentError
from reshard.formatting import format_ranks
from reshard.sharding.mesh import Mesh
from reshard.sharding.tensor_spec import TensorSpec

#: Seconds for which one transfer keeps each link busy, by the link's name.
Loads = tuple[tuple[str, float], ...]
#: No cost is above this, in seconds or bytes: sums of them stay exact enough to be compared.
MOST_COST = 1e15
#: How the names of dtypes begin whose tensors may have gradients.
_DIFFERENTIABLE: tuple[str, ...] = ("float", "bfloat", "complex")


@dataclass(frozen=True)
class Stage:
    """A part of the model that one set of devices computes.

    Args:
        forward_seconds: of one microbatch. input_grad_seconds, weight_grad_seconds: the two halves of its backward:
            the gradient of what came in, which earlier stages wait for, and that of the weights.
        activation_bytes: what a device keeps of one microbatch from its forward to the end of its backward.
        name: for people. mesh: its devices; needed only to run it.
        whole_backward_seconds: of a backward done at once, where that is not as long as both halves.

    Raises:
        ArgumentError: a cost is negative or no number.
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
        for cost in ("forward_seconds", "input_grad_seconds", "weight_grad_seconds", "activation_bytes"):
            _check_cost(f"{cost} of stage {self.name!r}" if self.name else cost, getattr(self, cost))
        if self.whole_backward_seconds is not None:
            _check_cost("whole_backward_seconds", self.whole_backward_seconds)

    @property
    def backward_seconds(self) -> float:
        """Of a backward done at once."""
        if self.whole_backward_seconds is not None:
            return self.whole_backward_seconds
        return self.input_grad_seconds + self.weight_grad_seconds


@dataclass(frozen=True)
class Edge:
    """What stage ``src`` passes to stage ``dst`` in the forward of a microbatch; its gradient goes the other way.

    Args:
        src, dst: stages. forward_seconds, backward_seconds: of one transfer with its links to itself.
        forward_loads, backward_loads: what a transfer takes of links that others use too, ``((link, seconds), ...)`` or
            a dict; omitted, it has its own.
        tensors: what moves, each by a name, with its layouts on both sides; empty where only the costs are known.
        without_gradient: names of those that need none, besides tensors of integers or booleans, which never do.

    Raises:
        ArgumentError: a cost is negative or no number; a link would be busy for longer than the transfer lasts; a
            tensor without a name, or a name given twice or for nothing.
    """

    src: int
    dst: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_loads: Loads = ()
    backward_loads: Loads = ()
    tensors: tuple[TensorSpec, ...] = field(default=())
    without_gradient: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if isinstance(self.without_gradient, str):
            raise ArgumentError(
                f"without_gradient is a set of names, such as {{{self.without_gradient!r}}}, not a string"
            )
        for name in ("without_gradient", "tensors"):
            if not isinstance(getattr(self, name), Iterable):
                raise ArgumentError(f"{name} of edge {self.src} -> {self.dst} is {getattr(self, name)!r}, not a list")
        for spec in self.tensors:
            if not isinstance(spec, TensorSpec):
                raise ArgumentError(
                    f"tensors of edge {self.src} -> {self.dst} are TensorSpecs, not {type(spec).__name__}"
                )
            if spec.name in ("loss", "self"):
                raise ArgumentError(
                    f"edge {self.src} -> {self.dst}: no tensor can be called {spec.name!r}, which means something else"
                )
        object.__setattr__(self, "tensors", tuple(self.tensors))
        if not all(isinstance(name, str) for name in self.without_gradient):
            raise ArgumentError(f"without_gradient of edge {self.src} -> {self.dst} is a set of names")
        object.__setattr__(self, "without_gradient", frozenset(self.without_gradient))
        for direction in ("forward", "backward"):
            seconds = getattr(self, f"{direction}_seconds")
            _check_cost(f"{direction}_seconds of edge {self.src} -> {self.dst}", seconds)
            loads = getattr(self, f"{direction}_loads")
            if isinstance(loads, Mapping):
                loads = tuple(loads.items())
                object.__setattr__(self, f"{direction}_loads", loads)
            if not isinstance(loads, Iterable) or not all(
                isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) for entry in loads
            ):
                raise ArgumentError(
                    f"{direction}_loads of edge {self.src} -> {self.dst} are ((link, seconds), ...), not {loads!r}"
                )
            links = [link for link, _ in loads]
            if len(set(links)) < len(links):
                raise ArgumentError(f"{direction}_loads of edge {self.src} -> {self.dst} name a link twice: {links}")
            for link, busy in loads:
                _check_cost(f"the load of link {link}", busy)
                if busy > seconds * (1 + 1e-9):
                    raise ArgumentError(
                        f"edge {self.src} -> {self.dst}: link {link} is busy for {busy:g} s "
                        f"of a transfer of {seconds:g} s"
                    )
        names = [spec.name for spec in self.tensors]
        if None in names or len(set(names)) < len(names) or not self.without_gradient <= set(names):
            raise ArgumentError(
                f"edge {self.src} -> {self.dst}: tensors {names} must have a name each, and those without_gradient "
                f"{sorted(self.without_gradient)} be among them"
            )

    @property
    def gradients(self) -> tuple[TensorSpec, ...]:
        """What moves backward: the gradients of the tensors that need one, with their layouts exchanged."""
        return tuple(
            replace(spec, src=spec.dst, dst=spec.src)
            for spec in self.tensors
            if spec.name not in self.without_gradient and spec.dtype.startswith(_DIFFERENTIABLE)
        )


@dataclass(frozen=True)
class Pipeline:
    """Stages and the edges between any two of them, forward only; no two edges join the same two stages.

    Raises:
        ArgumentError: no stage; an edge that names one that does not exist, leads backwards, or is there twice;
            a tensor whose layouts have other ranks than its stages, or that comes to a stage from two others.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        for what, values, kind in (("stages", self.stages, Stage), ("edges", self.edges, Edge)):
            if not isinstance(values, Iterable):
                raise ArgumentError(f"{what} of a pipeline are a list of {kind.__name__}s, not {values!r}")
            for value in values:
                if not isinstance(value, kind):
                    raise ArgumentError(f"{what} of a pipeline are {kind.__name__}s, not {type(value).__name__}")
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages:
            raise ArgumentError("a pipeline has at least one stage")
        for edge in self.edges:
            ends = (edge.src, edge.dst)
            if any(type(end) is not int for end in ends) or not 0 <= edge.src < edge.dst < len(self.stages):
                raise ArgumentError(
                    f"edge {edge.src} -> {edge.dst} must lead forward between stages 0 to {len(self.stages) - 1}"
                )
        object.__setattr__(self, "edges", tuple(sorted(self.edges, key=lambda edge: (edge.src, edge.dst))))
        if len(self.edge_between) < len(self.edges):
            raise ArgumentError("two edges join the same two stages; put their tensors into one")
        for edge in self.edges:
            for spec in edge.tensors:
                for stage, layout in ((edge.src, spec.src), (edge.dst, spec.dst)):
                    mesh = self.stages[stage].mesh
                    if mesh is not None and set(layout.ranks) != set(mesh.ranks):
                        raise ArgumentError(
                            f"tensor {spec.name!r} of edge {edge.src} -> {edge.dst} is on ranks "
                            f"{format_ranks(layout.ranks)}, stage {stage} on ranks {format_ranks(mesh.ranks)}"
                        )
        for stage in range(len(self.stages)):
            names = [spec.name for edge in self.edges if edge.dst == stage for spec in edge.tensors]
            if len(set(names)) < len(names):
                raise ArgumentError(f"stage {stage} gets two tensors of one name: {sorted(map(str, names))}")

    @classmethod
    def of_costs(
        cls,
        forward: Sequence[float],
        backward: Sequence[float],
        communication: Sequence[float],
        *,
        weight_grad_part: float = 0.5,
    ) -> Pipeline:
        """A chain of stages from seconds alone.

        Args:
            forward, backward: of one microbatch on each stage. communication: of one transfer of each boundary, the
                same in both directions. weight_grad_part: of the backward.
        """
        _check_cost("weight_grad_part", weight_grad_part)
        for what, costs in (("forward", forward), ("backward", backward), ("communication", communication)):
            if not isinstance(costs, Sequence) or isinstance(costs, str):
                raise ArgumentError(f"{what} is a list of seconds, not {type(costs).__name__}")
            for cost in costs:
                _check_cost(what, cost)
        if not len(forward) == len(backward) == len(communication) + 1:
            raise ArgumentError(
                f"{len(forward)} stages have {len(backward)} backwards and {len(communication)} boundaries; "
                "there must be as many backwards and one boundary less"
            )
        stages = [
            Stage(f, b * (1 - weight_grad_part), b * weight_grad_part) for f, b in zip(forward, backward, strict=True)
        ]
        return cls(tuple(stages), tuple(Edge(i, i + 1, c, c) for i, c in enumerate(communication)))

    @cached_property
    def edge_between(self) -> dict[tuple[int, int], Edge]:
        """Edges by their two stages."""
        return {(edge.src, edge.dst): edge for edge in self.edges}

    @cached_property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """Of each stage the stages it gets something from."""
        return tuple(tuple(e.src for e in self.edges if e.dst == s) for s in range(len(self.stages)))

    @cached_property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """Of each stage the stages it gives something to."""
        return tuple(tuple(e.dst for e in self.edges if e.src == s) for s in range(len(self.stages)))

    def ideal_seconds(self, num_microbatches: int) -> float:
        """What 1F1B takes where communication costs nothing and all stages are as slow as the slowest."""
        slowest = max(stage.forward_seconds + stage.backward_seconds for stage in self.stages)
        return (num_microbatches + len(self.stages) - 1) * slowest


def check_pipeline(pipeline: object) -> None:
    """Raise ArgumentError unless it is one."""
    if not isinstance(pipeline, Pipeline):
        raise ArgumentError(f"a Pipeline is needed, not {type(pipeline).__name__}")


def check_limit(memory_limit_bytes: object) -> None:
    """Raise ArgumentError unless it is a number of bytes."""
    is_number = isinstance(memory_limit_bytes, (int, float)) and not isinstance(memory_limit_bytes, bool)
    if not is_number or math.isnan(memory_limit_bytes):  # type: ignore[arg-type]
        raise ArgumentError(f"memory_limit_bytes is {memory_limit_bytes!r}; it must be a number")


def _check_cost(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST_COST:
        raise ArgumentError(f"{what} is {_short(value)}; it must be a number from 0 to {MOST_COST:g}")


def _short(value: object) -> str:
    return "an integer of many digits" if isinstance(value, int) and abs(value) > MOST_COST else repr(value)
