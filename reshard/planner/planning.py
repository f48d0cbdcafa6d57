"""Make a checked plan from layouts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.codecs import Codec, TransferPolicy, codec_name, has_variable_size
from reshard.errors import ArgumentError, PlanError
from reshard.formatting import brief, compare_names
from reshard.plan import DEFAULT_STAGING_BYTES, Plan, PlanTransfers, RotationPlan, mark_sound, ranks_of
from reshard.planner.auto_strategy import choose_fastest
from reshard.planner.stacking import Stacks, stack_problem, unstack
from reshard.planner.strategies.chunk_limits import STAGING_PARTS, UNPACKED_CHUNK_BYTES
from reshard.planner.strategies.chunking import routes_to_transfers
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.routes import Routes, Strategy
from reshard.planner.strategies.routes_check import check_routes
from reshard.planner.strategy_registry import STRATEGIES, find_strategy
from reshard.planner.tensor_codecs import AUTO_CODEC, compress_tensors
from reshard.public_api import not_compiled, shows_call
from reshard.sharding import AnyLayout, TensorSpec, check_integer, check_shape, check_tensors
from reshard.topology import Topology
from reshard.topology.topology import check_topology

#: Limit on pairs of a region and a rank that holds or needs the region. Tensors with equal layouts count once. Also
#: the limit on regions, where each tensor counts. A larger plan takes more than 4 GB.
MAX_HOLDINGS = 20_000_000


@not_compiled
@shows_call
def make_plan(
    src: AnyLayout | Mapping[str, AnyLayout],
    dst: AnyLayout | Mapping[str, AnyLayout],
    shape: Sequence[int] | Mapping[str, Sequence[int]],
    dtype: Any,
    *,
    strategy: str | Strategy | None = None,
    topology: Topology | None = None,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    compression: str | Codec | TransferPolicy | None = None,
    max_error: float | None = None,
) -> Plan:
    """Plan how one or more tensors move from source to destination layouts.

    Args:
        src, dst: the layouts; for several tensors ``{name: layout}``, or one layout for all of them.
        shape: the global shape; for several tensors ``{name: shape}``.
        dtype: the dtype (string, torch or NumPy); for several tensors one for all, or ``{name: dtype}``.
        strategy: a name in :data:`reshard.planner.strategy_registry.STRATEGIES` or a strategy function. None or "auto"
            picks the one predicted to be fastest, usually "multicast"; ``plan.strategy`` names it.
        topology: the hosts, links and pods of the ranks; None puts all ranks on one host.
        staging_bytes: staging memory of each rank in bytes, beyond its shards; 64 MiB by default.
        compression: the name of a block codec, such as ``"int8x128"`` (see :mod:`reshard.codecs.block`), or a
            :class:`~reshard.Codec` that you implement. The plan then moves its elements, and a Mover encodes and
            decodes them. Tensors that the codec cannot encode, or would not make smaller, travel as they are;
            ``print(plan)`` says why. ``"auto"`` chooses among the codecs of ``topology.codec_rates`` the one with the
            lowest predicted time, or none; tensors with other layouts or dtypes than the rest may get another choice. A
            :class:`~reshard.compression.Policy` with nothing but ``pp`` stands for its codec.
        max_error: only with ``"auto"``: the largest relative L2 error that a codec may usually have. Without it no
            lossy codec is chosen. What a named codec changes depends on the values, which a plan does not know.

    Returns:
        The plan. Equal arguments give equal plans on every rank.

    Raises:
        LayoutError, ArgumentError, TopologyError: the arguments contradict each other, or the plan is too large.
        PlanError: ``staging_bytes`` is too small, or a strategy function returns a task or a rank that does not exist.
    """
    if has_variable_size(compression):
        raise ArgumentError(
            f"{compression} makes output whose size depends on the values, which a plan does not know: make the plan "
            f"without compression=, and pass compression={compression!r} to the Mover"
        )
    is_auto = isinstance(compression, str) and compression == AUTO_CODEC
    if max_error is not None and not is_auto:
        codec = "no codec" if compression is None else codec_name(compression)
        raise ArgumentError(
            f"max_error is {brief(max_error)}, but a plan cannot limit what {codec} changes: pass max_error to "
            'reshard, or choose compression="auto"'
        )
    if isinstance(shape, Mapping):
        names = list(shape)
        tensors = [
            TensorSpec(
                check_shape(shape[name]),
                _value_for(dtype, name, names, "dtype"),
                _value_for(src, name, names, "src"),
                _value_for(dst, name, names, "dst"),
                name,
            )
            for name in names
        ]
    else:
        if isinstance(src, Mapping) or isinstance(dst, Mapping):
            raise ArgumentError("layouts are given by name, so shape must also be given by name: {name: shape}")
        tensors = [TensorSpec(check_shape(shape), dtype, src, dst)]
    plan = functools.partial(plan_tensors, strategy=strategy, topology=topology, staging_bytes=staging_bytes)
    return plan(compress_tensors(tensors, compression, max_error, topology, plan))


def plan_tensors(
    tensors: Sequence[TensorSpec],
    *,
    strategy: str | Strategy | None = None,
    topology: Topology | None = None,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
) -> Plan:
    """Like :func:`make_plan`, but takes :class:`TensorSpec` objects."""
    check_tensors(tensors)
    if topology is not None:
        check_topology(topology)
    staging_bytes = check_integer(staging_bytes, "staging_bytes", 0, 2**62)
    name, function = find_strategy(strategy)
    is_builtin = function is None or function in STRATEGIES.values()
    stacks = Stacks.of(tensors if is_builtin else ())
    participants = ranks_of(tensors)
    topology = _topology_of(tensors, topology)
    leads = [tensors[index] for index in stacks.first.tolist()] if is_builtin else tensors
    heights = stacks.heights.tolist() if is_builtin else [1] * len(leads)
    regions = sum(spec.num_tasks * height for spec, height in zip(leads, heights, strict=True))
    holdings = max(sum(spec.num_holdings for spec in leads), regions)
    if holdings > MAX_HOLDINGS:
        largest = min(UNPACKED_CHUNK_BYTES, staging_bytes // STAGING_PARTS)
        topology.check_covers(participants)
        rotation = RotationPlan.find(tensors, topology, staging_bytes, largest) if function is None else None
        if rotation is not None:
            return mark_sound(rotation)
        num_src, num_dst = (max(len(getattr(spec, side).ranks) for spec in tensors) for side in ("src", "dst"))
        raise ArgumentError(
            f"{len(tensors)} tensor{'s' * (len(tensors) > 1)} from up to {num_src:,} to {num_dst:,} ranks: their "
            f"regions are held or needed {holdings:,} times; at most {MAX_HOLDINGS:,} fit in one plan; move the "
            "tensors in several calls"
        )
    topology.check_covers(participants)
    if is_builtin:
        problem = stack_problem(tensors, stacks, topology.only(participants), staging_bytes)
    else:  # a strategy of a caller sees each tensor
        problem = PlanProblem.of(tensors, topology.only(participants), staging_bytes)
    if function is None:
        name, transfers = choose_fastest(problem)
    else:
        chosen = _run_strategy(problem, name, function, is_builtin)
        transfers = routes_to_transfers(problem, chosen, is_builtin=is_builtin)
    transfers = unstack(transfers, stacks) if is_builtin else transfers
    plan = Plan(tuple(tensors), topology, name, transfers, staging_bytes)
    return mark_sound(plan) if is_builtin else plan  # a plan from a custom strategy is checked before it runs


def restore_plan(
    tensors: Sequence[TensorSpec],
    strategy: str,
    transfers: PlanTransfers,
    *,
    topology: Topology | None,
    staging_bytes: int,
) -> Plan:
    """The plan that :func:`plan_tensors` made in another process, from the name of its strategy and its transfers."""
    return mark_sound(Plan(tuple(tensors), _topology_of(tensors, topology), strategy, transfers, staging_bytes))


def estimate_planning_seconds(tensors: Sequence[TensorSpec]) -> float:
    """CPU seconds of :func:`plan_tensors` with the default strategy, within a factor of 5, on a core of 2020."""
    stacks = Stacks.of(tensors)
    return 2e-4 * len(ranks_of(tensors)) * len(stacks.heights) + 1.5e-5 * len(tensors)


def _topology_of(tensors: Sequence[TensorSpec], topology: Topology | None) -> Topology:
    """The topology of a plan, cut to the ranks up to the last one of the tensors."""
    count = 1 + ranks_of(tensors)[-1]
    return (Topology((0,) * count) if topology is None else topology).first(count)


def _run_strategy(problem: PlanProblem, name: str, function: Strategy, is_builtin: bool) -> Routes | PlanTransfers:
    """The routes or transfers that a strategy chooses. Those of a caller's function are checked."""
    try:
        chosen = function(problem)
        if not isinstance(chosen, (Routes, PlanTransfers)):
            raise ArgumentError(f"strategy {name} must return Routes, not {type(chosen).__name__}")
        return chosen if is_builtin or isinstance(chosen, PlanTransfers) else check_routes(problem, chosen)
    except PlanError as error:
        raise PlanError(f"strategy {name}: {error}") from error


def _value_for(value: Any, name: str, names: list[str], argument: str) -> Any:
    """One tensor's value of an argument that is either a dict by name or one value for all tensors."""
    if not isinstance(value, Mapping):
        return value
    if set(value) != set(names):
        raise ArgumentError(
            f"{argument}, given by name, {compare_names(value, names)}; the shape names {len(names)} tensors"
        )
    return value[name]
