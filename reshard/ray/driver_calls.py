"""Calls for the driver: move arrays between meshes of actors, and run a function on actors."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from reshard.api.arguments.options import TransferOptions, is_fault_tolerant, read_options, shows_options
from reshard.codecs import Codec, TransferPolicy, has_base
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError
from reshard.formatting import brief, compare_names
from reshard.ray.actor_mesh import ActorMesh, ShardedArray, join_meshes
from reshard.ray.driver import ACTOR_GRACE_SECONDS, ActorCall, PendingCalls, check_open, order_lock, store_address
from reshard.ray.rank_actor import ShardRef, replace_each
from reshard.sharding import Layout
from reshard.timeouts import check_timeout


@shows_options(TransferOptions)
def reshard(
    array: ShardedArray | Mapping[str, ShardedArray],
    src_mesh: ActorMesh,
    dst_mesh: ActorMesh,
    *,
    dst_spec: Any = None,
    dst_dtype: Any = None,
    base: Any = None,
    out: Any = None,
    **options: Unpack[TransferOptions],
) -> Any:
    """Move a sharded array from one mesh of actors to another, or to another layout on the same mesh.

    Args:
        array: an array on ``src_mesh``, or ``{name: array}`` for several arrays in one plan.
        src_mesh: the mesh that holds the arrays.
        dst_mesh: the mesh of the result; may be ``src_mesh``.
        dst_spec: how ``dst_mesh`` shards the result, in any notation of :class:`~reshard.Layout`, or ``{name: ...}``;
            replicated if omitted.
        dst_dtype: dtype of the result, as for :func:`reshard.reshard`, or ``{name: ...}``; the source dtype if omitted.
        base, out: with ``compression="delta"``: an earlier version of the array on ``src_mesh``, and the same version
            on ``dst_mesh``, which becomes the new version and is returned; or ``{name: array}``. If actors hold other
            versions, they send the array in full, and warn.
        options: see :class:`reshard.TransferOptions`. The ranks of ``topology`` are those of ``src_mesh``, then those
            of ``dst_mesh`` if that is another mesh; by default each Ray node is a host. ``on_loss`` is ``"raise"`` or
            ``"recover"``. With ``"recover"``, if actors die, the others complete the transfer among themselves.
            ``lost`` of the result then contains the ranks whose shards are missing. An actor that does not respond
            within the timeout counts as dead.

    Returns:
        A new :class:`ShardedArray` or ``out``, or ``{name: ...}``; the source is unchanged.

    Raises:
        ReshardError: a rank raised it.
        RemoteError: an actor died; the text names it.
        RankLostError: with ``"recover"``, some data of a dead actor is on no other actor.
    """
    given = read_options(TransferOptions, options, reshard, "reshard.ray.reshard")
    given["timeout_seconds"] = timeout_seconds = check_timeout(given["timeout_seconds"])
    if not isinstance(given["on_loss"], str) or given["on_loss"] not in ("raise", "recover"):
        raise ArgumentError(f"on_loss is {brief(given['on_loss'])}; it must be 'raise' or 'recover'")
    arrays: dict[Any, ShardedArray] = {**array} if isinstance(array, Mapping) else {None: array}
    _check_arrays(arrays, src_mesh, dst_mesh)
    specs, dtypes = _by_name(dst_spec, arrays, "dst_spec"), _by_name(dst_dtype, arrays, "dst_dtype")
    dtypes = {name: None if dtype is None else dtype_name(dtype) for name, dtype in dtypes.items()}
    first = 0 if dst_mesh is src_mesh else src_mesh.mesh.size
    results = {
        name: ShardedArray(dst_mesh, Layout(dst_mesh.mesh, specs[name]), item.shape, dtypes[name] or item.dtype)
        for name, item in arrays.items()
    }
    bases, outs = _by_name(base, arrays, "base"), _by_name(out, arrays, "out")
    _check_versions(bases, outs, given["compression"], arrays, results)
    results = {name: result if outs[name] is None else outs[name] for name, result in results.items()}
    rank_in_group = {rank: rank + first for rank in dst_mesh.mesh.ranks}
    specs_by_name = {
        name: (item.layout, results[name].layout.with_ranks(rank_in_group), item.shape, item.dtype, dtypes[name])
        for name, item in arrays.items()
    }
    with order_lock:
        pending = _start_moves(arrays, results, src_mesh, dst_mesh, (specs_by_name, given, bases, outs))
    pending.take((6 if is_fault_tolerant(given) else 2) * timeout_seconds + ACTOR_GRACE_SECONDS)
    for result in results.values():
        result.lost = frozenset(dst_mesh.dead)
    return results if isinstance(array, Mapping) else results[None]


def _start_moves(
    arrays: Mapping[Any, ShardedArray],
    results: Mapping[Any, ShardedArray],
    src_mesh: ActorMesh,
    dst_mesh: ActorMesh,
    arguments: tuple[Mapping[Any, Any], TransferOptions, Mapping[Any, Any], Mapping[Any, Any]],
) -> PendingCalls:
    """Tell all actors to move their shards.

    Args:
        arguments: the layouts by name, the options of the transfer, and earlier versions of the arrays on both sides.
    """
    specs, options, bases, outs = arguments
    meshes = [src_mesh] if dst_mesh is src_mesh else [src_mesh, dst_mesh]
    key = join_meshes(meshes)
    calls: list[ActorCall] = []
    for mesh in meshes:
        keys = {
            name: (array.key if mesh is src_mesh else None, results[name].key if mesh is dst_mesh else None)
            for name, array in arrays.items()
        }
        version_keys = {
            name: tuple(
                None if item is None or mesh is not side else item.key
                for item, side in ((bases[name], src_mesh), (outs[name], dst_mesh))
            )
            for name in arrays
        }
        calls += [(mesh, rank, "move", (key, keys, specs, options, version_keys)) for rank in mesh.mesh.ranks]
    return PendingCalls(calls, meshes, key, is_fault_tolerant(options))


def _check_versions(
    bases: Mapping[Any, Any],
    outs: Mapping[Any, Any],
    compression: str | Codec | TransferPolicy | None,
    arrays: Mapping[Any, ShardedArray],
    results: Mapping[Any, ShardedArray],
) -> None:
    """Raise ArgumentError unless the earlier versions of ``arrays`` and ``results`` can be used."""
    if not has_base(compression) and any(item is not None for item in (*bases.values(), *outs.values())):
        raise ArgumentError(f"base= and out= are for compression='delta', not {brief(compression)}")
    for name, array in arrays.items():
        _check_version(bases[name], "base", name, array, array.mesh)
        _check_version(outs[name], "out", name, results[name], results[name].mesh)
        if outs[name] is not None and outs[name].key in (array.key, getattr(bases[name], "key", None)):
            raise ArgumentError(f"out{f' of {name!r}' if name else ''} is the source or its base; it would change them")


def _check_version(given: Any, what: str, name: Any, like: ShardedArray, mesh: ActorMesh) -> None:
    """Raise ArgumentError unless an earlier version has the layout, shape and dtype of an array."""
    what = f"{what} of {name!r}" if name is not None else what
    if given is None:
        return
    if not isinstance(given, ShardedArray):
        raise ArgumentError(f"{what} is {type(given).__name__}, not a ShardedArray")
    if given.mesh is not mesh:
        raise ArgumentError(f"{what} is on {given.mesh}, not on {mesh}")
    has, needed = ((str(item.layout), list(item.shape), item.dtype) for item in (given, like))
    if has != needed:
        raise ArgumentError(
            f"{what} is {has[2]} {has[1]} in layout {has[0]}; it must be {needed[2]} {needed[1]} in {needed[0]}"
        )


def _check_arrays(arrays: Mapping[Any, Any], src_mesh: Any, dst_mesh: Any) -> None:
    """Raise ArgumentError unless all arrays are on ``src_mesh``, and ``dst_mesh`` is an ActorMesh."""
    for name, array in arrays.items():
        what = f"{name!r}" if name is not None else "the array"
        if not isinstance(array, ShardedArray):
            raise ArgumentError(f"{what} is {type(array).__name__}, not a ShardedArray; mesh.put(...) makes one")
        if array.mesh is not src_mesh:
            raise ArgumentError(f"{what} is on {array.mesh}, not on {src_mesh}")
    if not isinstance(dst_mesh, ActorMesh):
        raise ArgumentError(f"reshard needs an ActorMesh to move arrays to, not {type(dst_mesh).__name__}")
    if not arrays:
        raise ArgumentError("reshard needs at least one array, but the dict is empty")


def _by_name(given: Any, arrays: Mapping[Any, ShardedArray], what: str) -> dict[Any, Any]:
    """Return ``{name: value}`` for all arrays. ``given`` is such a dict, or one value for all arrays."""
    named = {**given} if isinstance(given, Mapping) else dict.fromkeys(arrays, given)
    if set(named) != set(arrays):
        raise ArgumentError(f"{what} {compare_names(named, arrays)}; there are {len(arrays)} arrays")
    return named


def run(
    meshes: Sequence[ActorMesh],
    function: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 3600.0,
    backend: str = "gloo",
) -> list[Any]:
    """Call ``function(rank, *args)`` on every actor, inside a ``torch.distributed`` world of all actors.

    To run a pipeline on Ray, pass one mesh per stage and create an :class:`Engine` in the function.

    Args:
        meshes: the meshes. Ranks are numbered in this order.
        function: must return a picklable value.
        args: further arguments of the function. In place of a :class:`ShardedArray`, also inside a dict, list or tuple,
            each actor gets its own shard (not a copy), or None if it has no shard.
        timeout_seconds: time within which all actors must return.
        backend: backend of the world, as for ``init_process_group``. It must include Gloo for the CPU.

    Returns:
        The results in rank order.

    Raises:
        ReshardError: a rank raised it.
        RemoteError: the function raised another exception, or an actor died; the text names the actor.
    """
    check_timeout(timeout_seconds)
    if not isinstance(meshes, (list, tuple)) or not all(isinstance(mesh, ActorMesh) for mesh in meshes) or not meshes:
        raise ArgumentError("run needs a list of ActorMeshes")
    if len({id(mesh) for mesh in meshes}) < len(meshes):
        raise ArgumentError("run needs different meshes: each actor is one rank")
    if not callable(function):
        raise ArgumentError(f"run needs a function, not {type(function).__name__}")
    check_open(meshes)
    address, port = store_address()
    args = replace_each(args, ShardedArray, lambda array: ShardRef(array.key))
    world, size = uuid.uuid4().hex, sum(mesh.mesh.size for mesh in meshes)
    calls: list[ActorCall] = []
    with order_lock:
        for mesh in meshes:
            for rank in mesh.mesh.ranks:
                membership = (world, address, port, len(calls), size)
                calls.append((mesh, rank, "run", (membership, function, args, timeout_seconds, backend)))
        pending = PendingCalls(calls, meshes, None)
    return pending.take(timeout_seconds + ACTOR_GRACE_SECONDS)
