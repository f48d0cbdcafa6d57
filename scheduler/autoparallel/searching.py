"""``search``: from a model, its devices and its profile to a training plan."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.errors import ArgumentError
from reshard.formatting import did_you_mean

from .costs.layer_costs import StateBytes
from .costs.search_problem import SearchProblem
from .device_subsets import choose_part
from .inputs.cluster import Cluster
from .inputs.layer_choices import ChoiceRules, GridShape, LayerChoice
from .inputs.layer_graph import LayerGraph
from .inputs.layer_profile import LayerProfile
from .methods.auto_method import Method
from .methods.bounds import step_bound_of_any
from .plan_choice import choose
from .plan_making import make_training_plan
from .result.training_plan import TrainingPlan

if TYPE_CHECKING:
    from reshard.compression import Policy

#: Spread of measured layer times (see :meth:`LayerProfile.spread`) above which a search warns. At this spread, the
#: median of five measurements has a standard error of about 10 %. A prediction may have this error.
MAX_SPREAD = 0.25
#: Parts of a training plan that ``fixed=`` fixes.
FIXABLE = ("num_microbatches", "tp", "zero", "recompute", "grid", "idle")


def search(
    graph: LayerGraph,
    cluster: Cluster,
    profile: LayerProfile | Mapping[str, LayerProfile],
    *,
    num_samples: int,
    fixed: Mapping[str, Any] | None = None,
    method: str | Method = "auto",
    states: StateBytes | None = None,
    rules: ChoiceRules | None = None,
    compression: Policy | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> TrainingPlan:
    """Find the fastest training plan that fits the memory, as the simulator of whole steps predicts it.

    Args:
        graph, cluster: the model and its devices.
        profile: the times of its layers, or ``{type of device: times}`` for a cluster with ``device_types``.
        num_samples: samples of a step.
        fixed: parts that are fixed by hand: ``num_microbatches``, ``tp`` and ``zero`` of all stages, ``recompute``, and
            ``grid``: ``(rows, cols, depth)`` of all stages of more than one rank, or None for no grids. ``idle=False``:
            use all devices, with the hosts in their order.
        method: ``auto``, which also tries parts of the cluster and other orders of its hosts; ``joint``, ``bmw``,
            ``alpa``, ``pure``, or a function from a :class:`SearchProblem` to candidates. All but ``auto`` are taken as
            they are, without moves.
        states: bytes of states of a parameter; default: float32 with Adam.
        rules: choices that are allowed; default: all that ``Pipe`` runs.
        compression: codecs that edges (``pp``), sums of gradients over replicas under DDP (``dp``), collectives of
            ZeRO 3 (``zero``) and products on grids (``tp``) may use; default: none. The topology must have their rates.
        progress: called before each step of ``auto`` with the part of the work that is done, about, from 0 to 1, and
            the next step, such as ``"joint on 16 ranks"``.

    Returns:
        The training plan, the same on every rank and from run to run. The result has codecs only if they make the step
        shorter than that of the best training plan without codecs.

    Raises:
        ArgumentError: the profile is of another model, an argument is out of range, or nothing fits the memory.

    Warns:
        UserWarning: the measured times of layers vary so much that the choice may be wrong.
    """
    for what, value, kind in (
        ("graph", graph, LayerGraph),
        ("cluster", cluster, Cluster),
        ("profile", profile, LayerProfile | Mapping),
    ):
        if not isinstance(value, kind):
            name = getattr(kind, "__name__", "LayerProfile, or a mapping from type of device to LayerProfile")
            raise ArgumentError(f"{what} must be a {name}, not {type(value).__name__}")
    if progress is not None and not callable(progress):
        raise ArgumentError(f"progress must be a function of a number and a text, not {type(progress).__name__}")
    fixed = {} if fixed is None else fixed
    states, rules = StateBytes() if states is None else states, ChoiceRules() if rules is None else rules
    problem = make_problem(graph, cluster, profile, num_samples, fixed, states, rules)
    warn_if_noisy(problem)
    if compression is not None:
        from reshard.compression import Policy  # imports torch

        if not isinstance(compression, Policy):
            raise ArgumentError(f"compression must be a Policy, not {type(compression).__name__}")
        problem = problem.changed(compression=compression)
    if isinstance(method, str) and method == "auto" and fixed.get("idle", True):
        return choose_part(problem, progress)
    return choose_training_plan(problem, method)


def warn_if_noisy(problem: SearchProblem) -> None:
    """Warn if the times of the profile vary by more than :data:`MAX_SPREAD`, as on a machine with other jobs."""
    noise = describe_noise(problem.graph.name, problem.spread())
    if noise:
        warnings.warn(noise, stacklevel=3)


def describe_noise(name: str, spread: tuple[float, str, float]) -> str:
    """A sentence on the noise of the profile of a model, from :meth:`LayerProfile.spread`; empty if it is low."""
    mean, key, of_class = spread
    if mean <= MAX_SPREAD:
        return ""
    return (
        f"the profile of {name!r} is noisy: the middle half of the measured times of its layers spreads over "
        f"{mean:.0%} of their median, and that of layer class {key!r} over {of_class:.0%}; above {MAX_SPREAD:.0%}, the "
        "choice may be wrong: measure again while no other jobs run, or use tune()"
    )


def choose_training_plan(problem: SearchProblem, method: str | Method = "auto") -> TrainingPlan:
    """The fastest training plan of a problem that fits the memory. Arguments and errors: :func:`search`."""
    return make_training_plan(*choose(problem, method), step_bound_of_any(problem))


def make_problem(
    graph: LayerGraph,
    cluster: Cluster,
    profile: LayerProfile | Mapping[str, LayerProfile],
    num_samples: int,
    fixed: Mapping[str, Any],
    states: StateBytes,
    rules: ChoiceRules,
) -> SearchProblem:
    """The problem of a search.

    Raises:
        ArgumentError: ``fixed`` names an unknown part, or the parts do not fit.
    """
    for what, value, kind in (("fixed", fixed, Mapping), ("states", states, StateBytes), ("rules", rules, ChoiceRules)):
        if not isinstance(value, kind):
            raise ArgumentError(f"{what} must be a {kind.__name__}, not {value!r:.100}")
    unknown = [name for name in fixed if name not in FIXABLE]
    if unknown:
        meant = did_you_mean(unknown[0], FIXABLE)
        if unknown[0] in ("pp", "dp"):
            meant = f"; {'stages' if unknown[0] == 'pp' else 'replicas'} are what the search finds"
        raise ArgumentError(f"fixed= names {unknown[0]!r}; it can fix {', '.join(FIXABLE)}{meant}")
    if "zero" in fixed:
        rules = replace(rules, zero=(fixed["zero"],))
    if "recompute" in fixed:
        if fixed["recompute"] not in (False, True):
            raise ArgumentError(f"fixed= sets recompute to {fixed['recompute']!r}; it must be True or False")
        rules = replace(rules, recompute=(bool(fixed["recompute"]),))
    if fixed.get("idle", True) not in (False, True):
        raise ArgumentError(f"fixed= sets idle to {fixed['idle']!r}; it must be True or False")
    if "tp" in fixed:
        tp = fixed["tp"]
        if type(tp) is not int or tp < 1 or tp & (tp - 1):
            raise ArgumentError(f"fixed= sets tp to {tp!r}; it must be a power of two")
        rules = replace(rules, min_tp=tp, max_tp=tp)
    if "grid" in fixed:
        shape = _fixed_grid(fixed["grid"], fixed, cluster)
        rules = replace(rules, grids=bool(shape), only_grid=shape)
    counts = (fixed["num_microbatches"],) if "num_microbatches" in fixed else ()
    return SearchProblem(graph, cluster, profile, num_samples, states, rules, counts)


def _fixed_grid(grid: Any, fixed: Mapping[str, Any], cluster: Cluster) -> GridShape:
    """The shape of the grid that ``fixed`` fixes; empty: no grids."""
    if grid is None:
        return ()
    if not isinstance(grid, Sequence) or isinstance(grid, str):
        raise ArgumentError(f"fixed= sets grid to {grid!r}; it must be (rows, cols, depth), or None for no grids")
    choice = LayerChoice(grid=tuple(grid), tp=math.prod(grid[:2])) if grid else LayerChoice()
    if fixed.get("tp", choice.tp) != choice.tp:
        raise ArgumentError(
            f"fixed= sets tp to {fixed['tp']}, and {choice}, which divides each layer over rows * cols = {choice.tp} "
            "ranks; keep only one of them"
        )
    if fixed.get("zero", 0) and choice.grid and choice.grid[2] == 1:
        raise ArgumentError(
            f"fixed= sets zero to {fixed['zero']}, and {choice}, whose depth of 1 has no replicas to share "
            "states; keep only one of them, or a grid with a depth of at least 2"
        )
    size = math.prod(choice.grid)
    if size < 2 or size not in cluster.mesh_sizes:
        raise ArgumentError(
            f"fixed= sets {choice}, which has {size} ranks; a stage on a grid has one of "
            f"{', '.join(str(mesh_size) for mesh_size in cluster.mesh_sizes if mesh_size > 1)} ranks on this cluster"
        )
    return choice.grid
