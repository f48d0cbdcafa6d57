"""An engine's side: receive versions of a model and swap them in."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.coordination import describe_error, mark_published, publish_exceptions, rebuild_error
from reshard.coordination.groups.store import StoreSilentError
from reshard.errors import ArgumentError, ReshardError, TransferTimeoutError
from reshard.sharding import MAX_RANK, check_integer
from reshard.timeouts import DEFAULT_JOIN_SECONDS, DEFAULT_TIMEOUT_SECONDS, check_timeout
from reshard.topology import Topology
from reshard.weights.install import CopyAsRecorded, CopyIntoModel, Installer, LoadThroughEngine, ReceiveInPlace
from reshard.weights.mapping.rules import Rule, check_rules
from reshard.weights.membership.attempts import AttemptLeftError, Attempts
from reshard.weights.membership.team import AGREE_SECONDS, Team, leave_opening, lost_store_error, run_collectively
from reshard.weights.model.holdings import ShardRegions, read_state
from reshard.weights.model.manifest import Manifest, merge_states, state_of_rank
from reshard.weights.receiver import Receiver
from reshard.weights.recorded_loader import LoadWeights, RecordedLoader, Recording
from reshard.weights.routes.route import RouteOptions

#: Interval at which to look whether a trainer is there.
_LOOK_SECONDS = 0.05


class Subscriber:
    """Receives versions of a model into separate memory, and swaps them into the engine's model on request.

    Every rank of the engine makes one, with the same arguments. A thread receives while the engine serves.

    Args:
        model: a module, or a mapping of tensors. Each rank holds its own shards: DTensors of any placements, or plain
            tensors, which count as whole.
        store: a ``torch.distributed`` store that the trainer and all engines reach.
        name: what the trainer publishes.
        group: the process group of the engine. Default: the world, or this process alone if there is none.
        mode: ``"shadow"``: a version arrives in separate memory, and ``update`` copies it. ``"in_place"``, for
            engines without that memory: it arrives in the model while ``update`` waits, and a failure leaves the model
            without a version until a later update succeeds.
        shards: ``{name: (global shape, [region, ...])}`` for plain tensors that are shards, such as the fused tensors
            of an engine; a region is a ``(start, stop)`` pair per dim, and the regions are joined along one dim in this
            order.
        memory_bytes: memory for data in transit on each rank, beyond the received version; at least 192 KiB.
        rules: from the trainer's tensors to those of the model, see :mod:`reshard.weights.mapping.rules`. Default:
            the rules of the families of models that fit. ``record(load_weights)``: rules from the loader of the engine;
            a trainer must then publish the name within ``join_seconds``, unless ``record`` has ``metas``.
        load_weights: the loader of an engine that cuts, fuses or packs its weights by itself, with ``model=None``. It
            is called with ``(name, whole tensor)`` pairs, tied tensors under each name, in the thread that calls
            ``update``. Each rank then receives every tensor whole, in host memory, and keeps the version before, which
            it loads again if loading fails on some rank.
        join_seconds: how long others may take to connect.
        timeout_seconds: limit of each transfer.
        topology: as for :class:`reshard.weights.Publisher`; it suffices that one side states it.
        first_rank: number of this engine's first rank in the topology. Default: ranks of engines follow those of the
            trainer in the order in which the engines came.

    Raises:
        ArgumentError: an argument does not fit; on all ranks alike.
    """

    @publish_exceptions(leave_opening)
    def __init__(
        self,
        model: Any,
        store: Any,
        name: str = "default",
        group: Any = None,
        *,
        mode: str = "shadow",
        shards: Mapping[str, ShardRegions] | None = None,
        memory_bytes: int = 1 << 30,
        rules: Sequence[Rule] | RecordedLoader | None = None,
        load_weights: LoadWeights | None = None,
        join_seconds: float = DEFAULT_JOIN_SECONDS,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        topology: Topology | None = None,
        first_rank: int | None = None,
    ) -> None:
        self._team = Team(store, name, "engine", group, AGREE_SECONDS)
        self._attempts = Attempts(self._team)

        recordings: list[Recording] = []

        def describe() -> dict[str, Any]:
            number = (
                None if first_rank is None else check_integer(first_rank, "first_rank", 0, MAX_RANK) + self._team.rank
            )
            self._options = RouteOptions(join_seconds, timeout_seconds, memory_bytes, topology, number)
            if not isinstance(rules, RecordedLoader):
                check_rules(rules)
            if (model is None) == (load_weights is None):
                raise ArgumentError("a Subscriber takes a model, or load_weights in its place")
            if mode not in ("shadow", "in_place") or (mode == "in_place" and load_weights is not None):
                raise ArgumentError(f'mode is {mode!r:.40}; it must be "shadow", or "in_place" with a model')
            if isinstance(rules, RecordedLoader):
                if model is None or mode != "shadow" or shards is not None:
                    raise ArgumentError('rules=record(...) needs a model and mode="shadow", and takes no shards')
                recordings.append(Recording(rules, model, rules.source or self._find_source(join_seconds)))
                return {"state": recordings[0].state()}
            return {"state": None if model is None else state_of_rank(read_state(model, shards))}

        with self._team.closing_on_error():
            waits = isinstance(rules, RecordedLoader) and isinstance(join_seconds, (int, float))
            seconds = AGREE_SECONDS + (join_seconds if waits else 0)
            states = run_collectively(self._team.group, describe, "describes the engine", seconds)
            if load_weights is None:
                manifest = merge_states({rank: state["state"] for rank, state in states.items()}, "the engine")
            else:
                manifest = Manifest(self._team.size, {}, {}, {}, "cpu", takes_all=True)
            if recordings:
                manifest = recordings[0].without_unused(manifest)
                installer: Installer = CopyAsRecorded(recordings[0])
            else:
                manifest = replace(manifest, rules=check_rules(rules))
                installer = _make_installer(model, shards, mode, load_weights)
            self._receiver = Receiver(self._team, manifest, installer, self._options)
            self._team.start(self._receiver.handle_message, self._receiver.fail, self._receiver.close)
            if self._team.is_leader:
                self._team.roster.write_manifest("engine", self._team.id, manifest)
                self._team.roster.enlist(self._team.id)  # versions that are published from now on are for this engine
                self._team.outbox.post(self._team.address(0), {"kind": "fetch"})

    def _find_source(self, seconds: float) -> Manifest:
        """The manifest of the trainer, as soon as one publishes the name."""
        deadline = time.monotonic() + seconds
        while (trainer := self._team.roster.publisher()) is None:
            if time.monotonic() > deadline:
                raise TransferTimeoutError(
                    f"no trainer publishes this name within {seconds:g} s, and a loader is recorded with its tensors"
                )
            time.sleep(_LOOK_SECONDS)
        return trainer.manifest

    @property
    def version(self) -> int | None:
        """The version that the model holds; None before the first update, and if a swap has failed."""
        return self._receiver.installed_version

    @publish_exceptions(
        lambda error, args, _: args[0]._leave(
            args[0]._team.left_error(error), args[0]._receiver.last_swap, _name_call()
        )
    )
    def update(self, timeout_seconds: float = 60.0) -> int:
        """Wait for a version that is newer than that of the model, and swap it in. Every rank of the engine calls it.

        With ``mode="shadow"``, versions arrive in the thread of the team, also before this call. The call then only
        copies the last one. With ``mode="in_place"``, a version arrives in the model during the call. With
        ``"shadow"``, the version is whole and verified on all ranks before any rank changes its model.

        Returns:
            The version that the model holds now, the same on all ranks.

        Raises:
            TransferTimeoutError: no newer version came in time, or a rank of the engine did not call; the model is
                unchanged on all ranks. The first rank whose time is up ends the call on all. If the store does not
                answer, the call raises this at most 30 s later.
            RemoteError, DisagreementError: a rank stood still in a swap for more than 30 s. Ranks may raise different
                errors, and the model may be invalid; the next call swaps the version in.
            RemoteError: an interrupt has ended the call on another rank; the model is unchanged on all ranks.
            VerificationError: the model differs from the version after the swap, so it is invalid; on all ranks.
            ReshardError: ``load_weights`` has failed. ``version`` is the one that was loaded again, or None.
            ArgumentError: the model does not fit that of the trainer.
        """
        receiver, last_swap, call = self._receiver, self._receiver.last_swap, _name_call()
        try:
            seconds = check_timeout(timeout_seconds)
            if self._team.is_closed:
                raise ArgumentError("this Subscriber is closed")
            self._wait_for_swap(seconds, last_swap, call)
            if receiver.swap_error is not None:
                raise rebuild_error(*describe_error(receiver.swap_error))
            assert receiver.installed_version is not None
            return receiver.installed_version
        except ReshardError:
            raise
        except BaseException as error:
            mark_published(error)
            if receiver.last_swap == last_swap:  # after a swap, the other ranks wait for nothing
                left = self._team.left_error(error)
                try:
                    self._leave(left, last_swap, call)
                except BaseException as again:  # a second interrupt
                    mark_published(again)
                    self._leave(left, last_swap, call)
                    raise
            raise

    def _wait_for_swap(self, seconds: float, last_swap: int, call: str) -> None:
        """Wait until the next attempt ends in a swap. If it ends otherwise, all ranks raise the same error.

        Args:
            last_swap: number of the attempt that ended in the last swap before this call.
            call: as for :meth:`Attempts.give_up`.
        """
        receiver, attempts, deadline = self._receiver, self._attempts, time.monotonic() + seconds
        receiver.check_usable()
        error: ReshardError
        try:
            attempts.begin(seconds)
            if receiver.wait_for_swap(attempts.number, max(0.0, deadline - time.monotonic())):
                return
            error = TransferTimeoutError(
                f"rank {self._team.rank} of the engine: no newer version was complete on all ranks, or not all ranks "
                f"called update, in {seconds:g} s; the model {self._describe_version()}{receiver.describe_failure()}"
                f"{self._describe_ended()}"
            )
        except AttemptLeftError as left:
            raise left.error from None
        except ReshardError as failed:  # on all ranks alike, or the thread has failed
            error = failed
        except StoreSilentError:  # a message to the others may still leave, so this rank must end the attempt
            error = self._silent_store_error(seconds)
            self._leave(error, last_swap, call)
            if receiver.last_swap > last_swap:
                return
            raise error from None
        except RuntimeError as lost:
            raise lost_store_error(lost) from lost
        decided, swap_seconds = None, AGREE_SECONDS
        try:
            decided = attempts.give_up(error, call)
        except RuntimeError:  # the store is lost; a swap that this rank does not know of yet fails without this call
            error = self._silent_store_error(seconds)
            swap_seconds = AGREE_SECONDS if receiver.is_swapping else 0.0
        if decided is None and receiver.wait_for_swap(attempts.number, swap_seconds):
            return
        raise decided or error

    def _silent_store_error(self, seconds: float) -> TransferTimeoutError:
        return TransferTimeoutError(
            f"rank {self._team.rank} of the engine: the store that trainer and engines share did not answer in "
            f"{seconds:g} s; the model is unchanged"
        )

    def _describe_ended(self) -> str:
        """The rank of the engine that has ended, as the end of a sentence; empty if there is none."""
        with contextlib.suppress(RuntimeError):  # the store is lost
            rank = self._team.find_ended()
            return "" if rank is None else f"; rank {rank} of the engine has ended or has closed its Subscriber"
        return ""

    def _describe_version(self) -> str:
        """The version that the model keeps; without any, also whether no trainer has come."""
        version = self._receiver.installed_version
        if version is not None:
            return f"keeps version {version}"
        with contextlib.suppress(RuntimeError):  # the store is lost
            if self._team.roster.publisher() is None:
                return f"has no version, and no Publisher of the name {self._team.name!r} has come to this store"
        return "has no whole version"

    def _leave(self, error: ReshardError, last_swap: int, call: str) -> None:
        """End the call on all ranks with an error, unless they swap. Nothing arrives in the model afterwards.

        Args:
            error, call: as for :meth:`Attempts.leave`.
            last_swap: number of the attempt that ended in the last swap before this call.
        """
        with contextlib.suppress(RuntimeError, ReshardError):  # the store is lost, and so are the calls of all ranks
            if not self._attempts.leave(error, last_swap, call):
                self._receiver.wait_for_swap(self._attempts.number, AGREE_SECONDS)
        self._receiver.wait_until_arrived()

    def close(self) -> None:
        """Stop receiving. The model keeps its version."""
        self._team.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _name_call() -> str:
    """A text that no other call of ``update`` uses."""
    return secrets.token_hex(4)


def _make_installer(
    model: Any, shards: Mapping[str, ShardRegions] | None, mode: str, load_weights: LoadWeights | None
) -> Installer:
    if load_weights is not None:
        return LoadThroughEngine(load_weights)
    return CopyIntoModel(model, shards) if mode == "shadow" else ReceiveInPlace(model, shards)
