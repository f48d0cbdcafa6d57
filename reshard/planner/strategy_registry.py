"""All strategies by name.

A strategy is a function from a ``PlanProblem`` to ``Routes`` or ``PlanTransfers``. A strategy chooses the sender, the
receivers and the order of all messages. See :mod:`reshard.planner.strategies.routes`. Each docstring gives the steps
and the bytes on the wire. Bytes count what the destination needs and does not hold, once per destination host
("unique") or once per receiving rank ("total").
"""

from __future__ import annotations

from reshard.errors import ArgumentError
from reshard.formatting import did_you_mean
from reshard.planner.multicast.gathering import gathered_multicast
from reshard.planner.multicast.strategy import multicast
from reshard.planner.strategies.branch_and_bound import broadcast_search
from reshard.planner.strategies.broadcast import broadcast_greedy, broadcast_naive, broadcast_size
from reshard.planner.strategies.routes import Strategy
from reshard.planner.strategies.sends_and_all_gathers import global_all_gather, local_all_gather, send_recv

#: Strategies by name. Callers may pass any function with the same signature instead of a name.
STRATEGIES: dict[str, Strategy] = {
    "send_recv": send_recv,
    "local_all_gather": local_all_gather,
    "global_all_gather": global_all_gather,
    "broadcast_naive": broadcast_naive,
    "broadcast_size": broadcast_size,
    "broadcast_greedy": broadcast_greedy,
    "broadcast_search": broadcast_search,
    "multicast": multicast,
    "gathered_multicast": gathered_multicast,
}

#: Other names of strategies: the broadcast with the best order.
ALIASES = {"broadcast": "broadcast_greedy"}

#: The default strategy: :func:`reshard.planner.auto_strategy.choose_fastest`.
AUTO = "auto"


def find_strategy(strategy: str | Strategy | None) -> tuple[str, Strategy | None]:
    """The name and the function of a strategy given as a name or a function.

    None means "auto", whose function is None. "broadcast" means "broadcast_greedy".

    Raises:
        ArgumentError: the name is unknown, or ``strategy`` is neither a name nor a function.
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
    strategy = ALIASES.get(strategy, strategy)
    if strategy not in STRATEGIES:
        names = (AUTO, *STRATEGIES, *ALIASES)
        raise ArgumentError(
            f"no strategy {strategy!r}; strategies are {', '.join(names)}{did_you_mean(strategy, names)}"
        )
    return strategy, STRATEGIES[strategy]
