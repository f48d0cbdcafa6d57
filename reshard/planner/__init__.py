"""Planning: strategies, the choice among them, and recovery plans.

May import :mod:`reshard.cost` and the layers below it.
"""

from reshard.planner.auto_strategy import CANDIDATES
from reshard.planner.estimates import StrategyBounds, bound_of_transfers
from reshard.planner.planning import estimate_planning_seconds, make_plan, plan_tensors, restore_plan
from reshard.planner.strategies.chunk_limits import MIN_STAGING_BYTES
from reshard.planner.strategies.plan_problem import PlanProblem
from reshard.planner.strategies.routes import Routes, Strategy
from reshard.planner.strategy_registry import ALIASES, AUTO, STRATEGIES, find_strategy
from reshard.planner.tensor_codecs import AUTO_CODEC, compress_tensors, predict
from reshard.ragged import NO_RANK

__all__ = [
    "ALIASES",
    "AUTO",
    "AUTO_CODEC",
    "CANDIDATES",
    "MIN_STAGING_BYTES",
    "NO_RANK",
    "STRATEGIES",
    "PlanProblem",
    "Routes",
    "Strategy",
    "StrategyBounds",
    "bound_of_transfers",
    "compress_tensors",
    "estimate_planning_seconds",
    "find_strategy",
    "make_plan",
    "plan_tensors",
    "predict",
    "restore_plan",
]
