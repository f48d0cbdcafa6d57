"""Strategies: who sends what to whom, and in which order.

Each is a function from a ``Problem`` to ``Routes``, see :mod:`reshard.planner.strategies.problem`. Steps and bytes on
the wire of each are in its docstring; B bytes are what the destination needs and does not hold, counted once per
destination host (unique) or once per receiving rank (total).
"""

from __future__ import annotations

from reshard.errors import ArgumentError
from reshard.planner.multicast.strategy import multicast
from reshard.planner.strategies.branch_and_bound import broadcast_search
from reshard.planner.strategies.broadcast import broadcast_greedy, broadcast_naive, broadcast_size
from reshard.planner.strategies.direct import global_all_gather, local_all_gather, send_recv
from reshard.planner.strategies.problem import Strategy

#: Strategies by name. A caller may pass any function of the same form instead of a name.
STRATEGIES: dict[str, Strategy] = {
    "send_recv": send_recv,
    "local_all_gather": local_all_gather,
    "global_all_gather": global_all_gather,
    "broadcast_naive": broadcast_naive,
    "broadcast_size": broadcast_size,
    "broadcast_greedy": broadcast_greedy,
    "broadcast_search": broadcast_search,
    "multicast": multicast,
}

#: The name of what is used where no strategy is given: :func:`reshard.planner.auto.choose_fastest`.
AUTO = "auto"


def find_strategy(strategy: str | Strategy | None) -> tuple[str, Strategy | None]:
    """The name and the function of a strategy given as either.

    None is "auto", which has no function of its own; "broadcast" is "broadcast_greedy".

    Raises:
        ArgumentError: no strategy of that name.
    """
    if strategy is None:
        strategy = AUTO
    if callable(strategy):
        name = getattr(strategy, "__name__", type(strategy).__name__)
        return "".join(name.split()) or "strategy", strategy
    if not isinstance(strategy, str):
        raise ArgumentError(f"strategy must be a name or a function, not {type(strategy).__name__}")
    if strategy == AUTO:
        return AUTO, None
    if strategy == "broadcast":  # in its best order
        strategy = "broadcast_greedy"
    if strategy not in STRATEGIES:
        raise ArgumentError(f"no strategy {strategy!r}; there are {AUTO}, {', '.join(STRATEGIES)}")
    return strategy, STRATEGIES[strategy]
