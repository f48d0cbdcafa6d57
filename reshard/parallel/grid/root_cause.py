"""Find the root cause of a failed collective of a grid, such as the rank that is gone."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence

import torch.distributed as dist

from reshard.coordination import Monitor, RoundRequest, explain_lost_store, find_call_group, find_group, resolve
from reshard.coordination.liveness.lost_ranks import grid_ranks_stopped_error
from reshard.coordination.liveness.presence import has_ended
from reshard.coordination.liveness.status import HeartbeatReader
from reshard.errors import RemoteError, ReshardError
from reshard.formatting import describe_ranks
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS

#: After a collective has failed, a rank that sends no heartbeat for this long counts as stopped.
COLLECTIVE_SILENCE_SECONDS = 4.0
#: Time to search for the root cause: a lost connection, an error that another rank reports, or a rank without a
#: heartbeat.
COLLECTIVE_ROOT_CAUSE_TIMEOUT_SECONDS = COLLECTIVE_SILENCE_SECONDS + 2.0
#: Interval of the checks for a root cause.
CHECK_INTERVAL_SECONDS = 0.1


class RootCauseFinder:
    """Finds root causes over control connections among the ranks of a grid. All ranks create it together.

    Args:
        ranks: global ranks of the grid, the same on all ranks.
        shape: shape of the grid, the same on all ranks.
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
        self._call_group = find_call_group(group, tuple(sorted(ranks)))
        arguments = [("the ranks of a grid", str(list(ranks))), ("the shape of a grid", str(list(shape)))]
        request = RoundRequest(dist.get_rank(), arguments, hostname=group.hostname)
        _, decision = self._call_group.agree(request, lambda requests: resolve(requests, {}), timeout_seconds)
        self._generation = decision.generation
        self._waits = group.store.under(f"u/{self._call_group.key}/waits/{self._generation}")

    def await_all_ranks(self, called: str, timeout_seconds: float) -> None:
        """Wait until all ranks of the grid call the function of this name.

        Raises:
            DisagreementError: a rank calls another function.
            TransferTimeoutError: a rank calls none.
        """
        request = RoundRequest(dist.get_rank(), [("the function", called)], hostname=self._group.hostname)
        _, decision = self._call_group.agree(request, lambda requests: resolve(requests, {}), timeout_seconds)
        self._generation = decision.generation

    def report(self, error: ReshardError) -> ReshardError:
        """Publish an error of this rank, for :meth:`explain` on the others; returns the first one of any rank."""
        return self._call_group.fail(self._generation, error)

    def explain(self, error: RuntimeError, awaited: Sequence[int], is_backward: bool) -> ReshardError:
        """The error to raise after a failed collective: another rank's error, or one that names the ranks at fault.

        The port of a rank that has ended, killed or after its own error, refuses connections. A rank that is stopped
        sends no more heartbeats. Otherwise, the ranks say whom they wait for. If others wait for a rank in a backward,
        and that rank waits outside of a backward, then it has skipped the backward.

        Args:
            error: the failure.
            awaited: ranks that this rank waits for.
            is_backward: whether it waits in a backward.
        """
        deadline = time.monotonic() + COLLECTIVE_ROOT_CAUSE_TIMEOUT_SECONDS
        heartbeats = HeartbeatReader(self._group.store)
        others = [rank for rank in self._call_group.members if rank != self._group.rank]
        with contextlib.suppress(RuntimeError):  # the store may be lost
            self._waits.set(str(self._group.rank), json.dumps([list(awaited), is_backward]))
        while time.monotonic() < deadline:
            try:
                reported = self._call_group.reported_error(self._generation)
                ended = [] if reported else [rank for rank in others if has_ended(self._group.store, rank)]
                silent = [rank for rank in others if heartbeats.read(rank)[1] > COLLECTIVE_SILENCE_SECONDS]
            except RuntimeError as lost:
                return explain_lost_store(self._group, lost)
            if reported is not None:
                return reported
            if ended or silent:
                stopped = grid_ranks_stopped_error(ended or silent, None if ended else COLLECTIVE_SILENCE_SECONDS)
                return self._call_group.fail(self._generation, stopped)
            time.sleep(CHECK_INTERVAL_SECONDS)
        text = f"a collective of {describe_ranks(self._call_group.members)} of a grid failed"
        culprits = self._find_culprits()
        text = f"{culprits}: {text}" if culprits else f"{text}, and all ranks send heartbeats: {error}"
        return self._call_group.fail(self._generation, RemoteError(text))

    def _find_culprits(self) -> str:
        """The awaited ranks that do not wait themselves, and the collective that they have missed; "" if unknown."""
        waits: dict[int, tuple[list[int], bool]] = {}
        with contextlib.suppress(RuntimeError):  # the store may be lost
            for rank in self._call_group.members:
                if self._waits.check([str(rank)]):
                    waits[rank] = json.loads(self._waits.get(str(rank)))
        for is_backward, what in ((True, "skipped a backward"), (False, "did not start a collective")):
            culprits: dict[int, list[int]] = {}
            for rank, (awaited, is_in_backward) in waits.items():
                for item in awaited if is_in_backward == is_backward else ():
                    if item not in waits or (is_backward and not waits[item][1]):
                        culprits.setdefault(item, []).append(rank)
            if culprits:
                waiting = sorted({rank for ranks in culprits.values() for rank in ranks})
                return f"{describe_ranks(sorted(culprits))} {what} that {describe_ranks(waiting)} waited for"
        return ""
