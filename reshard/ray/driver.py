"""How a driver asks actors, what it makes of their answers, and where they meet."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from reshard.coordination.decide import rebuild_error
from reshard.errors import ArgumentError, RankLostError, RemoteError, ReshardError, TransferTimeoutError
from reshard.ray.worker import StoreKeeper
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout

#: Once a rank has failed, how long the others may take to say so.
GRACE_SECONDS = 10.0

order_lock = threading.RLock()  # calls reach all actors in one order

#: An ``ActorMesh``, one of its ranks, a method of its actor, and what that is given.
Asked = tuple[Any, int, str, Sequence[Any]]


def check_open(meshes: Sequence[Any]) -> None:
    """Raise ArgumentError if a mesh is closed, or ended with its connection; before Ray would connect by itself."""
    for mesh in meshes:
        if mesh._closed:
            raise ArgumentError(f"{mesh.name!r} is closed")
        if mesh._session != session():
            raise ArgumentError(
                f"{mesh.name!r} and its arrays ended with the connection to Ray that they were made in "
                "(ray.shutdown ends all actors of a driver); make them again"
            )


class Answers:
    """Calls of actors under way.

    Args:
        asked: whom, and for what. meshes: of them. group: the key of the group that they move data in, if they do.
        fault_tolerant: actors that die, or are dead already, are passed over.
    """

    def __init__(
        self, asked: Sequence[Asked], meshes: Sequence[Any], group: str | None, fault_tolerant: bool = False
    ) -> None:
        check_open(meshes)
        for mesh, rank, *_ in asked:
            if rank in mesh._dead and not fault_tolerant:
                raise RemoteError(f"rank {rank} of {mesh.name!r}, {mesh.called(rank)}, died: {mesh._dead[rank]}")
        self._asked, self._group, self._fault_tolerant = list(asked), group, fault_tolerant
        try:
            self._refs = [getattr(mesh.actors[rank], method).remote(*args) for mesh, rank, method, args in asked]
        except (TypeError, ValueError, AttributeError) as error:  # of the pickler
            raise ArgumentError(f"what the actors are given must pickle: {str(error).splitlines()[0]}") from error

    def take(self, timeout_seconds: float) -> list[Any]:
        """What all return; raises the first error, of an actor that died before all others."""
        deadline = time.monotonic() + timeout_seconds
        answers: dict[int, tuple[Any, ...]] = {}
        position = {ref: i for i, ref in enumerate(self._refs)}
        waiting = list(self._refs)
        deaths: list[str] = []
        lost: set[int] = set()  # silent ones, without which the others go on
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            i = position[ready[0]]
            mesh, rank, *_ = self._asked[i]
            try:
                answers[i] = ray.get(ready[0])
            except RayActorError as error:
                mesh._dead[rank] = str(error).strip().splitlines()[-1].strip()
                deaths.append(f"rank {rank} of {mesh.name!r}, {mesh.called(rank)}, died: {mesh._dead[rank]}")
                answers[i] = ("dead",)
                if self._group is not None:
                    ray.get(_keeper().blame.remote(self._group, i, f"rank {i} is gone: {mesh.called(rank)} died"))
            except RayError as error:
                answers[i] = ("error", "RemoteError", f"{mesh.called(rank)}: {error}")
            if answers[i][0] == "result" and self._fault_tolerant:
                lost.update(answers[i][1] or ())
                waiting = [ref for ref in waiting if position[ref] not in lost]
            if answers[i][0] == "fault":
                break
            if answers[i][0] in ("error", "doubt") or (answers[i][0] == "dead" and not self._fault_tolerant):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for mesh, rank, *_ in (self._asked[i] for i in lost):
            mesh._dead.setdefault(rank, "it was silent, and the others go on without it")
        if deaths and not (self._fault_tolerant and len(deaths) < len(self._asked)):
            raise RemoteError("; ".join(deaths))
        for kind in ("fault", "error", "doubt"):  # later ones may follow from earlier ones
            for i in sorted(answers.keys() - lost):
                if answers[i][0] == kind:
                    raise self._rebuild(i, answers[i])
        missing = [self._asked[i] for i in range(len(self._asked)) if i not in answers and i not in lost]
        silent = [mesh.called(rank) for mesh, rank, *_ in missing]
        if silent:
            raise TransferTimeoutError(f"no answer within {timeout_seconds:g} s from {', '.join(silent)}")
        return [answers[i][1] for i in sorted(answers) if answers[i][0] == "result"]

    def _rebuild(self, i: int, answer: tuple[Any, ...]) -> ReshardError:
        """What a rank raised; of lost ranks also who they are to the driver, of its own fault who it is, and where."""
        error = rebuild_error(*answer[1:3])
        if answer[0] != "error":
            mesh, rank, *_ = self._asked[i]
            error = type(error)(f"{mesh.called(rank)}: {error}")
            error.add_note(answer[3])
        if isinstance(error, RankLostError):
            lost = [(i, *self._asked[i][:2]) for i in answer[3]]
            names = ", ".join(f"rank {i} is {mesh.called(rank)}" for i, mesh, rank in lost)
            error = RankLostError(f"{error} ({names})", *answer[3:])
        return error


def ask(asked: Sequence[Asked], timeout_seconds: float, fault_tolerant: bool = False) -> list[Any]:
    """Call actors and wait for what all return."""
    with order_lock:
        answers = Answers(asked, list(dict.fromkeys(mesh for mesh, *_ in asked)), None, fault_tolerant)
    return answers.take(check_timeout(timeout_seconds))


def session() -> tuple[str, str] | None:
    """The connection to a cluster that this driver has; None without one."""
    if not ray.is_initialized():
        return None
    here = ray.get_runtime_context()
    return here.get_node_id(), here.get_job_id()  # clusters number their jobs alike


_keepers: dict[Any, Any] = {}  # by session


def _keeper() -> Any:
    """The actor at whose store this driver's actors meet."""
    job = session()
    with order_lock:
        if job not in _keepers:
            _keepers.clear()
            _keepers[job] = ray.remote(StoreKeeper).options(num_cpus=0).remote()
        return _keepers[job]


def keeper_place() -> tuple[str, int]:
    """Address and port of the store at which this driver's actors meet.

    Raises:
        RemoteError: its actor is lost.
    """
    try:
        place: tuple[str, int] = ray.get(_keeper().where.remote(), timeout=DEFAULT_TIMEOUT_SECONDS)
    except RayError as error:
        raise RemoteError(f"the actor that keeps the store is lost: {error}") from None
    return place
