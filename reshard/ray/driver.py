"""Calls of actors by the driver, the errors that they return, and the store that actors use for rendezvous."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from reshard.coordination import rebuild_error
from reshard.errors import ArgumentError, RankLostError, RemoteError, ReshardError, TransferTimeoutError
from reshard.ray.rank_actor import StoreServer
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout

#: After the first error of an actor, how long the driver waits for the results of the others.
ACTOR_GRACE_SECONDS = 10.0

#: Held while calls are submitted, so that all actors receive them in the same order.
order_lock = threading.RLock()

#: ``(ActorMesh, rank, method name, arguments)``.
ActorCall = tuple[Any, int, str, Sequence[Any]]


def check_open(meshes: Sequence[Any]) -> None:
    """Raise ArgumentError if a mesh is closed or its Ray connection ended. Otherwise Ray would reconnect."""
    for mesh in meshes:
        if mesh._closed:
            raise ArgumentError(f"{mesh.name!r} is closed")
        if mesh._session != session():
            raise ArgumentError(
                f"{mesh.name!r} and its arrays ended with the connection to Ray in which they were made "
                "(ray.shutdown ends all actors of a driver); make them again"
            )


class PendingCalls:
    """Calls of actors that are under way.

    Args:
        calls: what to call.
        meshes: those of the actors.
        group: the key of the group in which the actors transfer data; None if they do not.
        fault_tolerant: ignore actors that die or are already dead.

    Raises:
        ArgumentError: an argument cannot be pickled. RemoteError: an actor is already dead.
    """

    def __init__(
        self, calls: Sequence[ActorCall], meshes: Sequence[Any], group: str | None, fault_tolerant: bool = False
    ) -> None:
        check_open(meshes)
        for mesh, rank, *_ in calls:
            if rank in mesh._dead and not fault_tolerant:
                raise RemoteError(f"rank {rank} of {mesh.name!r}, {mesh.called(rank)}, died: {mesh._dead[rank]}")
        self._calls, self._group, self._fault_tolerant = list(calls), group, fault_tolerant
        try:
            self._refs = [getattr(mesh.actors[rank], method).remote(*args) for mesh, rank, method, args in calls]
        except (TypeError, ValueError, AttributeError) as error:  # raised by the pickler
            raise ArgumentError(f"arguments of actors must be picklable: {str(error).splitlines()[0]}") from error

    def take(self, timeout_seconds: float) -> list[Any]:
        """The results of all calls, in order. Raises the first error; the death of an actor precedes all others."""
        deadline = time.monotonic() + timeout_seconds
        answers: dict[int, tuple[Any, ...]] = {}
        position = {ref: i for i, ref in enumerate(self._refs)}
        waiting = list(self._refs)
        deaths: list[str] = []
        lost: set[int] = set()  # silent ranks that the others excluded
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            i = position[ready[0]]
            mesh, rank, *_ = self._calls[i]
            try:
                answers[i] = ray.get(ready[0])
            except RayActorError as error:
                mesh._dead[rank] = str(error).strip().splitlines()[-1].strip()
                deaths.append(f"rank {rank} of {mesh.name!r}, {mesh.called(rank)}, died: {mesh._dead[rank]}")
                answers[i] = ("dead",)
                if self._group is not None:
                    ray.get(_store_actor().blame.remote(self._group, i, f"rank {i} is gone: {mesh.called(rank)} died"))
            except RayError as error:
                answers[i] = ("error", "RemoteError", f"{mesh.called(rank)}: {error}")
            if answers[i][0] == "result" and self._fault_tolerant:
                lost.update(answers[i][1] or ())
                waiting = [ref for ref in waiting if position[ref] not in lost]
            if answers[i][0] == "exception":
                break
            if answers[i][0] in ("error", "possible_consequence") or (
                answers[i][0] == "dead" and not self._fault_tolerant
            ):
                deadline = min(deadline, time.monotonic() + ACTOR_GRACE_SECONDS)
        for mesh, rank, *_ in (self._calls[i] for i in lost):
            mesh._dead.setdefault(rank, "it did not respond, and the other actors excluded it")
        if deaths and not (self._fault_tolerant and len(deaths) < len(self._calls)):
            raise RemoteError("; ".join(deaths))
        for kind in ("exception", "error", "possible_consequence"):  # later kinds may result from earlier ones
            for i in sorted(answers.keys() - lost):
                if answers[i][0] == kind:
                    raise self._rebuild(i, answers[i])
        missing = [self._calls[i] for i in range(len(self._calls)) if i not in answers and i not in lost]
        silent = [mesh.called(rank) for mesh, rank, *_ in missing]
        if silent:
            raise TransferTimeoutError(f"no result within {timeout_seconds:g} s from {', '.join(silent)}")
        return [answers[i][1] for i in sorted(answers) if answers[i][0] == "result"]

    def _rebuild(self, i: int, answer: tuple[Any, ...]) -> ReshardError:
        """The error that a rank raised.

        Errors that are not of this package name the actor and carry its traceback as a note. RankLostError names the
        actors of the lost ranks.
        """
        error = rebuild_error(*answer[1:3])
        if answer[0] != "error":
            mesh, rank, *_ = self._calls[i]
            error = type(error)(f"{mesh.called(rank)}: {error}")
            error.add_note(answer[3])
        if isinstance(error, RankLostError):
            lost = [(i, *self._calls[i][:2]) for i in answer[3]]
            names = ", ".join(f"rank {i} is {mesh.called(rank)}" for i, mesh, rank in lost)
            error = RankLostError(f"{error} ({names})", *answer[3:])
        return error


def call_actors(calls: Sequence[ActorCall], timeout_seconds: float, fault_tolerant: bool = False) -> list[Any]:
    """Call actors and wait for all results."""
    with order_lock:
        pending = PendingCalls(calls, list(dict.fromkeys(mesh for mesh, *_ in calls)), None, fault_tolerant)
    return pending.take(check_timeout(timeout_seconds))


def session() -> tuple[str, str] | None:
    """Identifies this driver's connection to a cluster: ``(node id, job id)``; None without one."""
    if not ray.is_initialized():
        return None
    here = ray.get_runtime_context()
    return here.get_node_id(), here.get_job_id()  # job ids of different clusters may be equal


_store_actors: dict[Any, Any] = {}  # by session


def _store_actor() -> Any:
    """The actor that serves the rendezvous store of this driver's actors; started on first use."""
    job = session()
    with order_lock:
        if job not in _store_actors:
            _store_actors.clear()
            _store_actors[job] = ray.remote(StoreServer).options(num_cpus=0).remote()
        return _store_actors[job]


def store_address() -> tuple[str, int]:
    """Address and port of the rendezvous store of this driver's actors.

    Raises:
        RemoteError: the actor that serves it died.
    """
    try:
        address: tuple[str, int] = ray.get(_store_actor().where.remote(), timeout=DEFAULT_TIMEOUT_SECONDS)
    except RayError as error:
        raise RemoteError(f"the actor that serves the rendezvous store died: {error}") from None
    return address
