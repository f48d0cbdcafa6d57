"""The road from layouts to a checked plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import ArgumentError
from reshard.formatting import compare_names
from reshard.plan.model import DEFAULT_STAGING_BYTES, Plan, vouch_for
from reshard.plan.transfers import Transfers
from reshard.planner.auto import choose_fastest
from reshard.planner.registry import STRATEGIES, find_strategy
from reshard.planner.strategies.problem import Problem, Routes, Strategy, complete
from reshard.sharding.dim_cuts import check_shape
from reshard.sharding.layout import AnyLayout
from reshard.sharding.tensor_spec import TensorSpec, check_tensors
from reshard.topology.model import Topology

#: Regions, each with all ranks that hold or all that need it: with more, a plan would take more than four gigabytes.
MOST_HOLDINGS = 10_000_000


def make_plan(
    src: AnyLayout | Mapping[str, AnyLayout],
    dst: AnyLayout | Mapping[str, AnyLayout],
    shape: Sequence[int] | Mapping[str, Sequence[int]],
    dtype: Any,
    *,
    strategy: str | Strategy | None = None,
    topology: Topology | None = None,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
) -> Plan:
    """Plan how one tensor, or several, move from source to destination layouts.

    Args:
        src, dst: the layouts; for several tensors ``{name: layout}``, or one layout for all of them.
        shape: the global shape; for several tensors ``{name: shape}``.
        dtype: the dtype (string, torch or NumPy); for several tensors one for all, or ``{name: dtype}``.
        strategy: a name in :data:`reshard.planner.registry.STRATEGIES` or a function of that form. Omitted, or
            "auto": the one that is predicted to be fastest, as a rule "multicast"; the plan says which.
        topology: where ranks are; omitted, all ranks are on one host.
        staging_bytes: what a rank may hold beyond its shards, 64 MiB by default.

    Returns:
        The same plan on every rank that asks with the same arguments.

    Raises:
        LayoutError, ArgumentError, TopologyError: the arguments do not fit together, or are too many to plan at once.
    """
    if isinstance(shape, Mapping):
        names = list(shape)
        tensors = [
            TensorSpec(
                check_shape(shape[name]),
                _of(dtype, name, names, "dtype"),
                _of(src, name, names, "src"),
                _of(dst, name, names, "dst"),
                name,
            )
            for name in names
        ]
    else:
        if isinstance(src, Mapping) or isinstance(dst, Mapping):
            raise ArgumentError("layouts are given by name, so shape must be too: {name: shape}")
        tensors = [TensorSpec(check_shape(shape), dtype, src, dst)]
    return plan_tensors(tensors, strategy=strategy, topology=topology, staging_bytes=staging_bytes)


def plan_tensors(
    tensors: Sequence[TensorSpec],
    *,
    strategy: str | Strategy | None = None,
    topology: Topology | None = None,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
) -> Plan:
    """As :func:`make_plan`, for tensors that are described already."""
    check_tensors(tensors)
    if topology is not None and not isinstance(topology, Topology):
        raise ArgumentError(f"topology must be a Topology, not {type(topology).__name__}")
    if isinstance(staging_bytes, bool) or not isinstance(staging_bytes, int):
        raise ArgumentError(f"staging_bytes must be an integer, not {staging_bytes!r}")
    name, function = find_strategy(strategy)
    count = 1 + max(max(spec.src.ranks + spec.dst.ranks) for spec in tensors)
    if topology is None:
        topology = Topology((0,) * count)
    topology = topology.first(count)
    holdings = sum(spec.num_holdings for spec in tensors)
    if holdings > MOST_HOLDINGS:
        num_src, num_dst = (max(len(getattr(spec, side).ranks) for spec in tensors) for side in ("src", "dst"))
        raise ArgumentError(
            f"{len(tensors)} tensor{'s' * (len(tensors) > 1)} from up to {num_src:,} to {num_dst:,} ranks: their parts "
            f"are held or needed {holdings:,} times; at most {MOST_HOLDINGS:,} are planned at once, so move them in "
            "several calls"
        )
    taking_part = sorted({rank for spec in tensors for rank in (*spec.src.ranks, *spec.dst.ranks)})
    topology.check_covers(taking_part)
    problem = Problem.of(tensors, topology.only(taking_part), staging_bytes)
    if function is None:
        name, transfers = choose_fastest(problem)
    else:
        chosen = function(problem)
        if not isinstance(chosen, (Routes, Transfers)):
            raise ArgumentError(f"strategy {name} must return Routes, not {type(chosen).__name__}")
        transfers = complete(problem, chosen)
    plan = Plan(tuple(tensors), topology, name, transfers, staging_bytes)
    is_ours = function is None or function in STRATEGIES.values()
    return vouch_for(plan) if is_ours else plan  # what a caller's function chose is checked before it runs


def _of(value: Any, name: str, names: list[str], what: str) -> Any:
    """The entry of one tensor in an argument that is given by name, or once for all."""
    if not isinstance(value, Mapping):
        return value
    if set(value) != set(names):
        raise ArgumentError(
            f"{what}, given by name, {compare_names(value, names)}; the shape names {len(names)} tensors"
        )
    return value[name]
