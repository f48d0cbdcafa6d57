"""The fluid model of the simulator: messages flow at rates that share ports."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from reshard import _native

#: No limit on operations.
UNLIMITED = 2**62
#: The result of the native simulation if it takes too many operations.
_UNKNOWN = 2


@dataclass(frozen=True, eq=False)
class Network:
    """Messages, their queues, streams and receivers, and the ports that streams pass. Arrays are int64 or float64.

    A queue holds messages of one sender, which start in order. A stream is a pair of sender and receiver. A message
    starts when all of these hold:

    * It is the first message of its queue that has not started.
    * Each message in its ``after`` has finished, and so have all earlier messages to that message's receiver, because
      a receiver completes messages in order.
    * It is fewer than ``window`` messages after the first unfinished message of its queue.
    * It is fewer than ``ahead`` messages after the first unfinished message to its receiver.

    Messages of one stream flow one at a time. The flowing messages of all streams share their ports by proportional
    fairness (see ``native/fluid/proportional_fairness.h``). A message first occupies the ``overhead_port`` of its
    stream, for the time that ``overhead_bytes`` bytes take there. Then its own bytes pass all ports of the stream. For
    the window of its queue, a message is already finished once its unsent bytes, and those before it in its stream, fit
    in ``buffer``.

    A port is a token bucket, full at the start: it saves up to ``burst`` bytes of unused capacity, which later pass at
    once.

    Attributes:
        queue, stream, receiver, window, ahead: ``(messages,)``.
        nbytes, overhead_bytes: ``(messages,)`` float64.
        after_offsets, after: message i starts after messages ``after[after_offsets[i]:after_offsets[i + 1]]``, all
        smaller than i. port_offsets, port: stream s passes ports ``port[port_offsets[s]:port_offsets[s + 1]]``, one or
        more. overhead_port, buffer: ``(streams,)``; buffer is float64, in bytes.
        rate, burst: ``(ports,)`` float64, in bytes per second and in bytes.
    """

    queue: np.ndarray
    stream: np.ndarray
    receiver: np.ndarray
    window: np.ndarray
    ahead: np.ndarray
    nbytes: np.ndarray
    after_offsets: np.ndarray
    after: np.ndarray
    port_offsets: np.ndarray
    port: np.ndarray
    overhead_port: np.ndarray
    overhead_bytes: np.ndarray
    buffer: np.ndarray
    rate: np.ndarray
    burst: np.ndarray


class TooMuchWork(Exception):
    """The simulation takes more operations than it may."""


def flow(network: Network) -> tuple[np.ndarray, np.ndarray]:
    """``(start, finish)`` of each message in seconds; a message starts when it begins to flow.

    Raises:
        ValueError: some messages can never start.
    """
    times = flow_until(network, math.inf)
    assert times is not None
    return times


def flow_until(
    network: Network, cutoff: float, most_operations: int = UNLIMITED
) -> tuple[np.ndarray, np.ndarray] | None:
    """The times that :func:`flow` gives, or None if the last message finishes after ``cutoff`` seconds.

    It stops at the cutoff, and before it as soon as some port can no longer pass the rest of its bytes in time.

    Args:
        network: the messages and ports.
        cutoff: limit on the simulated time, in seconds.
        most_operations: limit on the work. An operation takes a few nanoseconds. The count is the same everywhere.

    Raises:
        ValueError: some messages can never start.
        TooMuchWork: the limit is reached.
    """
    start, finish = np.full(len(network.queue), -1.0), np.full(len(network.queue), -1.0)
    arrays = {name: getattr(network, name) for name in Network.__dataclass_fields__}
    outcome = _native.flow(**arrays, start=start, finish=finish, cutoff=cutoff, most_operations=most_operations)
    if outcome == _UNKNOWN:
        raise TooMuchWork
    return None if outcome else (start, finish)
