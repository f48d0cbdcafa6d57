"""Meshes of Ray actors, and arrays that are sharded over them."""

from __future__ import annotations

import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from reshard.api.arrays.tensor_checks import check_movable
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, MeshError, RemoteError, TransferTimeoutError
from reshard.formatting import brief
from reshard.ray.driver import call_actors, check_open, session, store_address
from reshard.ray.rank_actor import Device, check_unmasked, pack_array, shard_of, unpack_array, whole_of
from reshard.sharding import MAX_RANK, Layout, Mesh, check_integer, check_shape, cut_tiles
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout

#: After waiting this long for free resources, warn with what the cluster has.
WARN_SECONDS = 5.0


class ActorMesh:
    """A mesh of actors, one per device. As a context manager, it closes itself at the end.

    Args:
        shape: ``"2x4"``, ``(2, 4)`` or ``8``; each host gets a block of consecutive ranks.
        num_hosts: number of different nodes. The placement group has STRICT_SPREAD and one bundle per host.
        axes: names of the mesh axes; ``0, 1, ...`` if omitted.
        name: the name of the mesh in errors.
        num_cpus, num_gpus: resources that Ray reserves for each actor.
        timeout_seconds: limit for all actors to start.

    Raises:
        MeshError: the shape is invalid, or its ranks cannot be divided evenly over the hosts.
        TransferTimeoutError: the cluster lacks the resources, or actors did not start in time.
    """

    def __init__(
        self,
        shape: str | int | Sequence[int],
        *,
        num_hosts: int = 1,
        axes: Sequence[str] | None = None,
        name: str = "mesh",
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        timeout_seconds: float = 120.0,
    ) -> None:
        if not isinstance(name, str):
            raise MeshError(f"name is {brief(name)}; it must be a text")
        self.mesh, self.name = Mesh.of(shape, axes=axes), name
        size = self.mesh.size
        num_hosts = check_integer(num_hosts, "num_hosts", 1, MAX_RANK, MeshError)
        if size % num_hosts:
            raise MeshError(f"{size} ranks of {name!r} cannot be divided evenly over {num_hosts!r} hosts")
        _check_resources(name, num_cpus, num_gpus)
        check_timeout(timeout_seconds)
        per_host = size // num_hosts
        self._id = uuid.uuid4().hex[:12]
        self._dead: dict[int, str] = {}
        self._joined: dict[str, weakref.WeakSet[ActorMesh]] = {}  # key of a group -> its meshes
        self._closed = False
        self._session = session()
        bundle = {"CPU": num_cpus * per_host} | ({"GPU": num_gpus * per_host} if num_gpus else {})
        self._group: PlacementGroup = placement_group([bundle] * num_hosts, strategy="STRICT_SPREAD")
        begun = time.monotonic()
        try:
            needs = f"{name!r} needs {num_hosts} node{'s' * (num_hosts > 1)} with {bundle} free on each"
            self._wait_for_nodes(needs, timeout_seconds)
            remote = ray.remote(Device)
            self.actors = [
                remote.options(
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank // per_host),
                ).remote()
                for rank in range(size)
            ]
            self.addresses = self._wait_for_actors(timeout_seconds, time.monotonic() - begun)
        except BaseException:
            remove_placement_group(self._group)
            raise

    def _wait_for_nodes(self, needs: str, timeout_seconds: float) -> None:
        """Wait until Ray has reserved the nodes; warn after some seconds. ``needs`` describes them."""
        if self._group.wait(min(WARN_SECONDS, timeout_seconds)):
            return
        if timeout_seconds > WARN_SECONDS:
            warnings.warn(
                f"{needs}; waiting up to {timeout_seconds:g} s (the nodes have, free or not: {_nodes()})",
                RuntimeWarning,
                stacklevel=3,
            )
        if not self._group.wait(max(0.0, timeout_seconds - WARN_SECONDS)):
            raise TransferTimeoutError(
                f"{needs}; these were not free within {timeout_seconds:g} s (the nodes have, free or not: {_nodes()}). "
                "Add nodes, close meshes that hold them, or start Ray with more: its --num-cpus may exceed the cores"
            )

    def _wait_for_actors(self, timeout_seconds: float, elapsed_seconds: float) -> list[str]:
        """The address of each actor, once all have started."""
        remaining = max(1.0, timeout_seconds - elapsed_seconds)
        try:
            return [where[0] for where in ray.get([a.where.remote() for a in self.actors], timeout=remaining)]
        except GetTimeoutError:
            raise TransferTimeoutError(f"actors of {self.name!r} did not start within {timeout_seconds:g} s") from None
        except RayError as error:
            raise RemoteError(f"an actor of {self.name!r} did not start: {error}") from None

    def put(self, array: Any, spec: Any = None, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> ShardedArray:
        """Shard an array of the driver over the mesh. Equal shards are sent once per host.

        Args:
            array: a NumPy array or a torch CPU tensor.
            spec: how the mesh shards it; replicated if omitted.
            timeout_seconds: limit for all actors to store their shards.

        Raises:
            ArgumentError: ``array`` is no array of numbers. LayoutError: the spec does not fit the array.
        """
        check_unmasked(array, "put got")
        try:
            whole = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array, order="C"))
            check_movable(whole, "the array", 0)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"put needs an array of numbers, on the CPU: {error}") from None
        check_open([self])
        made = ShardedArray(self, Layout(self.mesh, spec), tuple(whole.shape), dtype_name(whole.dtype))
        shards = cut_tiles(made.layout, made.shape)
        parts: dict[Any, Any] = {}
        arguments = {}
        for rank in self.mesh.ranks:
            key = tuple(shards.boxes_of(rank)), made.layout.local_shape(made.shape, rank)  # empty shards have no box
            if key not in parts:
                parts[key] = ray.put(pack_array(shard_of(whole, made.layout, rank)))
            arguments[rank] = (made.key, parts[key])
        self._call("put", arguments, timeout_seconds)
        return made

    def make(
        self,
        shape: Sequence[int],
        dtype: Any,
        spec: Any,
        function: Callable[[tuple[slice, ...]], Any],
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> ShardedArray:
        """Create an array whose shards the actors compute: ``function(index)`` returns ``whole[index]``.

        Args:
            shape, dtype: shape and dtype of the whole array.
            spec: how the mesh shards it.
            function: picklable; takes a tuple of slices and returns a NumPy array or torch tensor.
        """
        made = ShardedArray(self, Layout(self.mesh, spec), check_shape(shape), dtype_name(dtype))
        arguments = {rank: (made.key, made.layout, rank, made.shape, made.dtype, function) for rank in self.mesh.ranks}
        self._call("make", arguments, timeout_seconds)
        return made

    def close(self) -> None:
        """End the actors. Their shards are lost."""
        if not self._closed:
            self._closed = True
            if self._session != session():
                return  # the actors ended with their session
            for key, meshes in self._joined.items():
                for mesh in meshes:
                    if mesh is not self and not mesh._closed:
                        mesh._joined.pop(key, None)
                        for actor in mesh.actors:
                            actor.leave.remote(key)
            self._joined.clear()
            for actor in self.actors:
                ray.kill(actor)
            remove_placement_group(self._group)

    def __enter__(self) -> ActorMesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"{self.name} ({self.mesh})"

    def called(self, rank: int) -> str:
        """The name of an actor in errors: ``server[2,1] at 10.0.0.3``."""
        coordinates = np.argwhere(self.mesh.array == rank)[0]
        return f"{self.name}[{','.join(map(str, coordinates))}] at {self.addresses[rank]}"

    @property
    def dead(self) -> frozenset[int]:
        """Ranks whose actors are known to be dead or were excluded because they did not respond."""
        return frozenset(self._dead)

    def _call(self, method: str, arguments: Mapping[int, Sequence[Any]], timeout_seconds: float) -> list[Any]:
        return call_actors([(self, rank, method, args) for rank, args in arguments.items()], timeout_seconds)


class ShardedArray:
    """An array whose shards the actors of a mesh hold. The actors free them when this object is collected.

    Attributes:
        layout: how the ranks of ``mesh`` shard the array.
        shape, dtype: shape and dtype of the whole array.
        lost: ranks whose shards are missing because their actors died. Only calls with ``on_loss="recover"`` leave any.
    """

    lost: frozenset[int] = frozenset()

    def __init__(self, mesh: ActorMesh, layout: Layout, shape: tuple[int, ...], dtype: str) -> None:
        cut_tiles(layout, shape)  # raises LayoutError if the layout does not fit
        self.mesh, self.layout, self.shape, self.dtype = mesh, layout, shape, dtype
        self.key = uuid.uuid4().hex
        weakref.finalize(self, _drop, mesh._session, mesh.actors, self.key).atexit = False

    def shards(self, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> dict[int, torch.Tensor]:
        """Fetch ``{rank: shard}`` of all ranks that are not ``lost``."""
        ranks = [rank for rank in self.mesh.mesh.ranks if rank not in self.lost]
        packed = self.mesh._call("get", dict.fromkeys(ranks, (self.key,)), timeout_seconds)
        return {rank: unpack_array(item) for rank, item in zip(ranks, packed, strict=True)}

    def gather(self, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> torch.Tensor:
        """Fetch the whole array. Only one of several equal shards is fetched.

        Raises:
            RemoteError: an actor died, and no other actor has its shard.
        """
        shards = cut_tiles(self.layout, self.shape)
        holder: dict[Any, int] = {}
        for rank in sorted(self.layout.ranks, key=lambda rank: rank in self.mesh.dead):
            holder.setdefault(tuple(shards.boxes_of(rank)), rank)
        ranks = sorted(holder.values())
        packed = self.mesh._call("get", dict.fromkeys(ranks, (self.key,)), timeout_seconds)
        arrays = {rank: unpack_array(item) for rank, item in zip(ranks, packed, strict=True)}
        return whole_of(arrays, self.layout, self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} {self.layout} of {self.mesh.name}"

    def __repr__(self) -> str:
        return f"ShardedArray({self})"

    def __reduce__(self) -> Any:
        """Refuse to pickle, because each copy would free the shards when it is collected."""
        raise TypeError("a ShardedArray stays on the driver; reshard.ray.run gives each actor its own shard of it")


def join_meshes(meshes: Sequence[ActorMesh]) -> str:
    """The key of the group of all actors of the meshes, ranked in that order. The first call creates the group."""
    key = "+".join(mesh._id for mesh in meshes)
    if key not in meshes[0]._joined:
        check_open(meshes)
        address, port = store_address()
        members = [(mesh, rank) for mesh in meshes for rank in mesh.mesh.ranks]
        arguments = [(key, address, port, i, len(members)) for i in range(len(members))]
        call_actors(
            [(mesh, rank, "join", args) for (mesh, rank), args in zip(members, arguments, strict=True)],
            DEFAULT_TIMEOUT_SECONDS,
            fault_tolerant=True,  # the call that uses the group handles dead actors
        )
        for mesh in meshes:
            mesh._joined[key] = weakref.WeakSet(meshes)
    return key


def _drop(made_in: Any, actors: Sequence[Any], key: str) -> None:
    if made_in == session():
        for actor in actors:
            actor.drop.remote(key)


def _check_resources(name: str, num_cpus: float, num_gpus: float) -> None:
    """Raise ArgumentError unless Ray is connected and the actors of the mesh ``name`` reserve something."""
    if not ray.is_initialized():
        raise ArgumentError("Ray is not connected: call ray.init() first")
    for what, number in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
        if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= number < float("inf"):
            raise ArgumentError(f"{what} of {name!r} is {number!r}; it must be a number of at least 0")
    if not num_cpus and not num_gpus:
        raise ArgumentError(f"num_cpus and num_gpus of {name!r} are both 0; Ray places actors by what they reserve")


def _nodes() -> str:
    return "; ".join(
        f"{node['NodeManagerAddress']}: {node['Resources'].get('CPU', 0):g} CPU"
        for node in ray.nodes()
        if node["Alive"]
    )
