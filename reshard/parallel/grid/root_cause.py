"""Find the root cause of a failed collective of a grid, such as the rank that is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from reshard.coordination import Monitor, Request, explain_lost_store, find_channel, find_group, resolve
from reshard.coordination.liveness.status import SILENT_SECONDS, HeartbeatReader
from reshard.errors import RemoteError, ReshardError
from reshard.formatting import describe_ranks
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS

#: How long to search for the root cause: a lost connection, an error that another rank reports, or a rank without a
#: heartbeat.
ROOT_CAUSE_SECONDS = SILENT_SECONDS + 2.0
#: Seconds between two checks for it.
CHECK_INTERVAL_SECONDS = 0.1


class RootCauseFinder:
    """Finds root causes over control connections among the ranks of a grid. All ranks create it together.

    Args:
        ranks: global ranks of the grid, the same on all ranks.
        shape: of the grid, the same on all ranks.
        timeout_seconds: how long to wait for the other ranks.

    Raises:
        DisagreementError: ranks make different grids.
        TransferTimeoutError: another rank does not make one.
    """

    def __init__(
        self, ranks: Sequence[int], shape: Sequence[int], timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> None:
        self._group = group = find_group(None)
        Monitor.of(group)  # sends the heartbeats of this rank
        self._channel = find_channel(group, tuple(sorted(ranks)))
        arguments = [("the ranks of a grid", str(list(ranks))), ("the shape of a grid", str(list(shape)))]
        request = Request(dist.get_rank(), arguments, hostname=group.hostname)
        _, decision = self._channel.agree(request, lambda requests: resolve(requests, {}), timeout_seconds)
        self._generation = decision.generation

    def meet(self, called: str, timeout_seconds: float) -> None:
        """Wait until all ranks of the grid call the function of this name.

        Raises:
            DisagreementError: a rank calls another function.
            TransferTimeoutError: a rank calls none.
        """
        request = Request(dist.get_rank(), [("the function", called)], hostname=self._group.hostname)
        _, decision = self._channel.agree(request, lambda requests: resolve(requests, {}), timeout_seconds)
        self._generation = decision.generation

    def report(self, error: ReshardError) -> ReshardError:
        """Publish an error of this rank, for :meth:`explain` on the others; returns the first one of any rank."""
        return self._channel.fail(self._generation, error)

    def explain(self, error: RuntimeError) -> ReshardError:
        """The error to raise after a failed collective: the error of another rank, or one that names the lost ranks.

        A killed rank loses its connection to the first rank of the grid, and sends no more heartbeats. A rank that has
        ended after its own error, or that has stopped, sends no more heartbeats.
        """
        deadline = time.monotonic() + ROOT_CAUSE_SECONDS
        heartbeats = HeartbeatReader(self._group.store)
        while time.monotonic() < deadline:
            try:
                reported = self._channel.reported_error(self._generation)
                silent = [rank for rank in self._channel.members if heartbeats.is_silent(rank)]
            except RuntimeError as lost:
                return explain_lost_store(self._group, lost)
            if reported is not None:
                return reported
            if silent:
                verb = "is" if len(silent) == 1 else "are"
                text = f"{describe_ranks(silent)} {verb} gone or stopped: no heartbeat for {SILENT_SECONDS:g} s"
                return self._channel.fail(self._generation, RemoteError(f"{text}; a collective of a grid failed"))
            time.sleep(CHECK_INTERVAL_SECONDS)
        members = describe_ranks(self._channel.members)
        return self._channel.fail(
            self._generation,
            RemoteError(f"a collective of {members} of a grid failed, and all ranks send heartbeats: {error}"),
        )
