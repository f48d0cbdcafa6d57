"""The calls of a driver: move arrays between meshes of actors, and run a function on their actors."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError
from reshard.formatting import compare_names
from reshard.plan.model import DEFAULT_STAGING_BYTES
from reshard.planner.strategies.problem import Strategy
from reshard.ray.actor_mesh import ActorMesh, ShardedArray, join_meshes
from reshard.ray.driver import GRACE_SECONDS, Answers, Asked, check_open, keeper_place, order_lock
from reshard.ray.worker import Held, replace_each
from reshard.sharding.layout import Layout
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout
from reshard.topology.model import Topology


def reshard(
    array: ShardedArray | Mapping[str, ShardedArray],
    src_mesh: ActorMesh,
    dst_mesh: ActorMesh,
    *,
    dst_spec: Any = None,
    dst_dtype: Any = None,
    strategy: str | Strategy | None = None,
    topology: Topology | None = None,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    verify: bool = False,
    on_loss: str = "raise",
) -> Any:
    """Move a sharded array from one mesh of actors to another, or to another layout of the same.

    Args:
        array: what the actors of ``src_mesh`` hold, or ``{name: array}`` for several in one plan.
        dst_mesh: the actors that shall hold it; ``src_mesh`` itself for a new layout in place.
        dst_spec: how they shard it, in any notation of :class:`~reshard.Layout`, or ``{name: ...}``; omitted, each
            holds all of it.
        dst_dtype: of the result, see :func:`reshard.reshard`; omitted, that of the source. Or ``{name: ...}``.
        strategy, staging_bytes, verify: as for :func:`reshard.reshard`. timeout_seconds: for ranks to meet, and to
            finish.
        on_loss: ``"raise"``, or ``"recover"``: when actors die, the others move what is missing among themselves; what
            is returned then says in ``lost`` which ranks it lacks. An actor that is silent until the time-out is lost
            too.
        topology: of ranks; those of ``src_mesh`` come first, those of ``dst_mesh`` behind them. Omitted, by nodes.

    Returns:
        A new :class:`ShardedArray`, or ``{name: ...}``; the source is unchanged.

    Raises:
        ReshardError: what the ranks raise; RemoteError with the name of an actor that died; with ``"recover"``
            RankLostError where nobody holds what it held.
    """
    timeout_seconds = check_timeout(timeout_seconds)
    if on_loss not in ("raise", "recover"):
        raise ArgumentError(f"on_loss is {on_loss!r}; a driver can ask for 'raise' or 'recover'")
    fault_tolerant = on_loss == "recover"
    arrays: dict[Any, ShardedArray] = {**array} if isinstance(array, Mapping) else {None: array}
    for name, one in arrays.items():
        what = f"{name!r}" if name is not None else "the array"
        if not isinstance(one, ShardedArray):
            raise ArgumentError(f"{what} is {type(one).__name__}, not a ShardedArray; mesh.put(...) makes one")
        if one.mesh is not src_mesh:
            raise ArgumentError(f"{what} is on {one.mesh}, not on {src_mesh}")
    if not isinstance(dst_mesh, ActorMesh) or not arrays:
        raise ArgumentError(f"reshard needs arrays and an ActorMesh to move them to, not {type(dst_mesh).__name__}")
    specs, dtypes = _by_name(dst_spec, arrays, "dst_spec"), _by_name(dst_dtype, arrays, "dst_dtype")
    dtypes = {name: None if dtype is None else dtype_name(dtype) for name, dtype in dtypes.items()}
    first = 0 if dst_mesh is src_mesh else src_mesh.mesh.size
    moved = {
        name: ShardedArray(dst_mesh, Layout(dst_mesh.mesh, specs[name]), one.shape, dtypes[name] or one.dtype)
        for name, one in arrays.items()
    }
    there = {rank: rank + first for rank in dst_mesh.mesh.ranks}
    told = {
        name: (one.layout, moved[name].layout.with_ranks(there), one.shape, one.dtype, dtypes[name])
        for name, one in arrays.items()
    }
    options = {
        "strategy": strategy,
        "topology": topology,
        "staging_bytes": staging_bytes,
        "timeout_seconds": timeout_seconds,
        "verify": verify,
        "on_loss": on_loss,
    }
    meshes = [src_mesh] if first == 0 else [src_mesh, dst_mesh]
    with order_lock:
        key = join_meshes(meshes)
        asked = []
        for mesh in meshes:
            names = {
                name: (
                    one.key if mesh is src_mesh else None,
                    moved[name].key if mesh is dst_mesh else None,
                )
                for name, one in arrays.items()
            }
            asked += [(mesh, rank, "move", (key, names, told, options)) for rank in mesh.mesh.ranks]
        answers = Answers(asked, meshes, key, fault_tolerant)
    answers.take((6 if fault_tolerant else 2) * timeout_seconds + GRACE_SECONDS)
    for one in moved.values():
        one.lost = frozenset(dst_mesh.dead)
    return moved if isinstance(array, Mapping) else moved[None]


def _by_name(given: Any, arrays: Mapping[Any, ShardedArray], what: str) -> dict[Any, Any]:
    """One for all arrays, or one each."""
    named = {**given} if isinstance(given, Mapping) else dict.fromkeys(arrays, given)
    if set(named) != set(arrays):
        raise ArgumentError(f"{what} {compare_names(named, arrays)}; there are {len(arrays)} arrays")
    return named


def run(
    meshes: Sequence[ActorMesh], function: Callable[..., Any], *args: Any, timeout_seconds: float = 3600.0
) -> list[Any]:
    """Call ``function(rank, *args)`` on every actor, with a world group (Gloo) of all of them up.

    How the pipeline engine starts on Ray: a mesh per stage, and the function makes an :class:`Engine`.

    Args:
        meshes: ranks of the first come first. function: what it returns must pickle. timeout_seconds: for all.
        args: a :class:`ShardedArray`, also in a dict or a list, becomes each actor's own shard, not a copy; None where
            an actor has none.

    Returns:
        The results in rank order.

    Raises:
        ReshardError: what a rank raised; RemoteError with the name of an actor that died.
    """
    check_timeout(timeout_seconds)
    if isinstance(meshes, ActorMesh) or not all(isinstance(mesh, ActorMesh) for mesh in meshes) or not meshes:
        raise ArgumentError("run needs a list of ActorMeshes")
    if len({id(mesh) for mesh in meshes}) < len(meshes):
        raise ArgumentError("run needs each mesh once: an actor is one rank")
    if not callable(function):
        raise ArgumentError(f"run needs a function, not {type(function).__name__}")
    check_open(meshes)
    address, port = keeper_place()
    args = replace_each(args, ShardedArray, lambda array: Held(array.key))
    world, size = uuid.uuid4().hex, sum(mesh.mesh.size for mesh in meshes)
    asked: list[Asked] = []
    with order_lock:
        for mesh in meshes:
            for rank in mesh.mesh.ranks:
                place = (world, address, port, len(asked), size)
                asked.append((mesh, rank, "run", (place, function, args, timeout_seconds)))
        answers = Answers(asked, meshes, None)
    return answers.take(timeout_seconds + GRACE_SECONDS)
