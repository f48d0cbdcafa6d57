"""The methods that ``compare_schedules`` compares: strategies of plans, and builders of schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reshard.scheduler import Pipeline, Schedule, auto_schedule, one_f_one_b
from reshard.scheduler.passes.transfer_overlap import block_transfers, defer_recvs
from reshard.scheduler.schedules.classic import eager_1f1b

#: Names of three methods. ``BASELINE`` moves tensors by local all-gather, and receives each one just before its
#: consumer, under 1F1B. ``SIGNAL`` is our schedule with messages of one element.
OURS, SIGNAL, BASELINE = "ours", "signal only", "baseline"

Build = Callable[[Pipeline, int], Schedule]


@dataclass(frozen=True)
class MethodSpec:
    """A method to compare: its plan strategy and its schedule builder.

    Attributes:
        strategy: None for the default strategy.
        is_blocking: whether both ends of a transfer wait for it.
    """

    name: str
    strategy: str | None
    build: Build
    is_blocking: bool = False


def _blocking(pipeline: Pipeline, num: int) -> Schedule:
    return block_transfers(one_f_one_b(pipeline, num), pipeline)


def _receiving_at_consumer(pipeline: Pipeline, num: int) -> Schedule:
    return defer_recvs(one_f_one_b(pipeline, num), pipeline)


def _with_memory_of(other: Build) -> Build:
    """A builder of our schedule. Its memory limit is the peak memory of the other builder's schedule."""

    def build(pipeline: Pipeline, num: int) -> Schedule:
        return auto_schedule(pipeline, num, activation_limit_bytes=max(other(pipeline, num).peak_bytes(pipeline)))

    return build


METHODS = (
    MethodSpec("send/recv, blocking 1F1B", "send_recv", _blocking, is_blocking=True),
    MethodSpec(BASELINE, "local_all_gather", _receiving_at_consumer),
    MethodSpec("broadcast, blocking 1F1B", "broadcast_greedy", _blocking, is_blocking=True),
    MethodSpec("broadcast, overlapped 1F1B", "broadcast_greedy", one_f_one_b),
    MethodSpec("eager-1F1B", "broadcast_greedy", eager_1f1b),
    MethodSpec("ours, memory of 1F1B", None, _with_memory_of(one_f_one_b)),
    MethodSpec(OURS, None, _with_memory_of(eager_1f1b)),
)
