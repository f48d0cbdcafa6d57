"""Log records and profiler ranges of a step. Each names the stage or the edge, the direction and the microbatch.

Set the logger ``reshard`` to ``DEBUG`` to log each action when it begins. If a rank hangs, its last record names the
action that it waits in. Under ``torch.profiler``, the same texts name profiler ranges.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from ..ir.actions import Channel
from . import torch_compat

logger = logging.getLogger(__name__)

#: ``observe(what, where, microbatch)`` returns a context for one action of a rank, at a stage or in a channel.
Observe = Callable[[str, "int | Channel", "int | None"], AbstractContextManager[None]]

_NOTHING = contextlib.nullcontext()


def find_observer(rank: int) -> Observe:
    """The function that records the actions of a rank. It does nothing unless debug messages or a profiler are on."""
    if not (logger.isEnabledFor(logging.DEBUG) or torch_compat.is_profiling()):
        return _ignore
    return functools.partial(_record, rank)


def describe_channel(channel: Channel) -> str:
    """``edge 0 -> 1 forward``: the stages as in the graph, and the direction of the data."""
    first, last = sorted((channel.sender, channel.receiver))
    return f"edge {first} -> {last} {'forward' if channel.is_forward else 'backward'}"


def _ignore(what: str, where: int | Channel, microbatch: int | None) -> AbstractContextManager[None]:
    return _NOTHING


@contextlib.contextmanager
def _record(rank: int, what: str, where: int | Channel, microbatch: int | None) -> Iterator[None]:
    place = describe_channel(where) if isinstance(where, Channel) else f"stage {where}"
    text = f"{what} {place}" if microbatch is None else f"{what} {place}, microbatch {microbatch}"
    logger.debug("rank %d begins: %s", rank, text)
    with torch.profiler.record_function(f"reshard: {text}"):
        yield
    logger.debug("rank %d ended: %s", rank, text)
