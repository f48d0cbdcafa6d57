"""Messages that share ports like fluids: the loop of the simulator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard import _native


@dataclass(frozen=True, eq=False)
class Network:
    """Messages, the queues they start in, the streams they flow in, and the ports those pass. All int64 or float64.

    A message starts when it is the first of its queue that has not, all messages it comes after have finished (and
    those before them into the same receivers, which take them in order), it is less than ``window`` behind the first
    unfinished one of its queue, and its place among those of its receiver is less than ``ahead`` behind the first
    unfinished one. Messages of one stream flow one after the other; the foremost of each stream share their ports as
    :func:`~tests.reference.proportional_fairness.share_ports` says. A message first
    holds ``hold_port`` of its stream as its ``hold_work`` bytes would, then its own bytes pass all ports of the stream.
    For the window of its queue a message is finished once all that its stream has still to pass, up to and with it,
    fits ``buffer``.

    A port is a token bucket: it saves up to ``burst`` bytes of what it could have passed and did not, full at the
    start, and passes those at once.

    Attributes:
        queue, stream, receiver, window, ahead: ``(messages,)``. nbytes, hold_work: ``(messages,)`` float64.
        after_at, after: message i comes after messages ``after[after_at[i]:after_at[i + 1]]``, all before i.
        port_at, port: stream s passes ports ``port[port_at[s]:port_at[s + 1]]``, at least one.
        hold_port, buffer: ``(streams,)``; the last float64.
        rate, burst: ``(ports,)`` float64, bytes per second and bytes.
    """

    queue: np.ndarray
    stream: np.ndarray
    receiver: np.ndarray
    window: np.ndarray
    ahead: np.ndarray
    nbytes: np.ndarray
    after_at: np.ndarray
    after: np.ndarray
    port_at: np.ndarray
    port: np.ndarray
    hold_port: np.ndarray
    hold_work: np.ndarray
    buffer: np.ndarray
    rate: np.ndarray
    burst: np.ndarray


def flow(network: Network) -> tuple[np.ndarray, np.ndarray]:
    """``(start, finish)`` of each message in seconds; start is when it begins to flow.

    Raises:
        ValueError: some messages can never start.
    """
    start, finish = np.full(len(network.queue), -1.0), np.full(len(network.queue), -1.0)
    arrays = {name: getattr(network, name) for name in Network.__dataclass_fields__}
    _native.flow(**arrays, start=start, finish=finish)
    return start, finish
