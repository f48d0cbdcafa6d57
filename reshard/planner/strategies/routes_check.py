"""Check the routes of a strategy that a caller wrote."""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard.errors import PlanError
from reshard.formatting import brief, format_ranks
from reshard.ragged import NO_RANK

from .plan_problem import PlanProblem
from .routes import Routes


def _array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # such as a tensor without data
        raise PlanError(f"{name} is {brief(values)}; it must be an array of integers: {error}") from None


def check_routes(problem: PlanProblem, routes: Routes) -> Routes:
    """The routes as int64 arrays.

    Raises:
        PlanError: an array has another shape than :class:`Routes` says, or an index or a rank that the problem lacks.
    """
    arrays = {name: _array(name, getattr(routes, name)) for name in Routes.__dataclass_fields__}
    count, edges, ndim = arrays["task"].size, arrays["sender"].size, problem.start.shape[1]
    shapes = {"task": (count,), "start": (count, ndim), "stop": (count, ndim), "edge_offsets": (count + 1,)}
    shapes |= {"sender": (edges,), "receiver": (edges,)}
    for name, array in arrays.items():
        if array.shape != shapes[name] or (array.size and array.dtype.kind not in "iu"):
            raise PlanError(
                f"{name} must have shape {list(shapes[name])} and hold integers, for {count} routes with {edges} edges "
                f"of tensors with {ndim} dims, but it has shape {list(array.shape)} and dtype {array.dtype}"
            )
    tasks = np.arange(len(problem))
    ranks = np.unique(np.concatenate([problem.holders.ravel(), problem.destinations.ravel()]))
    ranks = ranks[ranks != NO_RANK]
    for name, known, what in (("task", tasks, "tasks"), ("sender", ranks, "ranks"), ("receiver", ranks, "ranks")):
        wrong = np.flatnonzero(~np.isin(arrays[name], known))
        if wrong.size:
            spans = f"0 to {len(known) - 1}" if what == "tasks" else format_ranks(known.tolist())
            raise PlanError(f"{name}[{wrong[0]}] is {arrays[name][wrong[0]]}, but the {what} are {spans}")
    edge_offsets = arrays["edge_offsets"]
    if edge_offsets[0] != 0 or edge_offsets[-1] != edges or (np.diff(edge_offsets.astype(np.int64)) < 1).any():
        raise PlanError(f"edge_offsets must rise from 0 to {edges} in {count} steps of at least 1")
    return Routes(**{name: array.astype(np.int64) for name, array in arrays.items()})
