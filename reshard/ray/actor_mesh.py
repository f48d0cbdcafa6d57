"""Meshes of actors, and the arrays that they hold."""

from __future__ import annotations

import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from reshard.api.tensor_checks import check_movable
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, MeshError, RemoteError, TransferTimeoutError
from reshard.ray.driver import ask, check_open, keeper_place, session
from reshard.ray.worker import Device, pack_array, shard_of, unpack_array, whole_of
from reshard.sharding.dim_cuts import check_shape
from reshard.sharding.layout import Layout
from reshard.sharding.mesh import Mesh
from reshard.sharding.tiles import cut_shards
from reshard.timeouts import DEFAULT_TIMEOUT_SECONDS, check_timeout

#: After so long without room on the cluster, the caller hears what there is.
IMPATIENT_SECONDS = 5.0


class ActorMesh:
    """Actors as a mesh: one per device, on hosts of their own; a context manager.

    Args:
        shape: ``"2x4"``, ``(2, 4)`` or ``8``; ranks are dealt to hosts in blocks, in order.
        num_hosts: on so many nodes, each different (a placement group with STRICT_SPREAD and a bundle per host).
        axes: names of the mesh's axes; ``0, 1, ...`` if omitted. name: of the mesh in errors.
        num_cpus, num_gpus: what Ray reserves for each device.
        timeout_seconds: how long the actors may take to start.

    Raises:
        MeshError: the shape cannot be, or its ranks cannot be dealt to so many hosts.
        TransferTimeoutError: the cluster has no room for it, or actors did not start in time.
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
        self.mesh, self.name = Mesh.of(shape, axes=axes), name
        size = self.mesh.size
        if isinstance(num_hosts, bool) or not isinstance(num_hosts, int) or num_hosts < 1 or size % num_hosts:
            raise MeshError(f"{size} ranks of {name!r} cannot be dealt to {num_hosts!r} hosts")
        if not ray.is_initialized():
            raise ArgumentError("Ray is not connected: call ray.init() first")
        for what, number in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < float("inf"):
                raise ArgumentError(f"{what} of {name!r} is {number!r}; it must be a number from 0 on")
        if not num_cpus and not num_gpus:
            raise ArgumentError(f"num_cpus and num_gpus of {name!r} are both 0; Ray places actors by what they reserve")
        check_timeout(timeout_seconds)
        per_host = size // num_hosts
        self._id = uuid.uuid4().hex[:12]
        self._dead: dict[int, str] = {}
        self._joined: dict[str, weakref.WeakSet[ActorMesh]] = {}  # groups, with the meshes that they are made of
        self._closed = False
        self._session = session()
        bundle = {"CPU": num_cpus * per_host} | ({"GPU": num_gpus * per_host} if num_gpus else {})
        self._group: PlacementGroup = placement_group([bundle] * num_hosts, strategy="STRICT_SPREAD")
        begun = time.monotonic()
        try:
            needs = f"{name!r} needs {num_hosts} node{'s' * (num_hosts > 1)} with {bundle} free on each"
            if not self._group.wait(min(IMPATIENT_SECONDS, timeout_seconds)):
                if timeout_seconds > IMPATIENT_SECONDS:
                    warnings.warn(
                        f"{needs}; waiting up to {timeout_seconds:g} s for room (in all, free or not: {_nodes()})",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                if not self._group.wait(max(0.0, timeout_seconds - IMPATIENT_SECONDS)):
                    raise TransferTimeoutError(
                        f"{needs}; the cluster has no such room after {timeout_seconds:g} s "
                        f"(in all, free or not: {_nodes()})"
                    )
            remote = ray.remote(Device)
            self.actors = [
                remote.options(
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank // per_host),
                ).remote()
                for rank in range(size)
            ]
            self.addresses: list[str] = []
            left = max(1.0, timeout_seconds - (time.monotonic() - begun))
            try:
                self.addresses = [where[0] for where in ray.get([a.where.remote() for a in self.actors], timeout=left)]
            except GetTimeoutError:
                raise TransferTimeoutError(f"actors of {name!r} did not start within {timeout_seconds:g} s") from None
            except RayError as error:
                raise RemoteError(f"an actor of {name!r} did not start: {error}") from None
        except BaseException:
            remove_placement_group(self._group)
            raise

    def put(self, array: Any, spec: Any = None, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> ShardedArray:
        """Shard an array of the driver over the mesh; replicas travel once per host.

        Args:
            array: NumPy or a CPU tensor of torch. spec: how the mesh shards it; omitted, every actor holds all of it.
            timeout_seconds: for all shards to be there.

        Raises:
            ArgumentError: it is no array of numbers. LayoutError: the spec does not fit it.
        """
        try:
            whole = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array, order="C"))
            check_movable(whole, "the array", 0)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"put needs an array of numbers, on the CPU: {error}") from None
        check_open([self])
        made = ShardedArray(self, Layout(self.mesh, spec), tuple(whole.shape), dtype_name(whole.dtype))
        shards = cut_shards(made.layout, made.shape)
        parts: dict[Any, Any] = {}
        asked = {}
        for rank in self.mesh.ranks:
            key = tuple(shards.boxes_of(rank))
            if key not in parts:
                parts[key] = ray.put(pack_array(shard_of(whole, made.layout, rank)))
            asked[rank] = (made.key, parts[key])
        self._ask("put", asked, timeout_seconds)
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
        """An array whose parts the actors make: ``function(index)`` gives what stands at ``whole[index]``.

        Args:
            shape, dtype: of the whole. spec: how the mesh shards it. function: NumPy or torch; must pickle.
        """
        made = ShardedArray(self, Layout(self.mesh, spec), check_shape(shape), dtype_name(dtype))
        asked = {rank: (made.key, made.layout, rank, made.shape, made.dtype, function) for rank in self.mesh.ranks}
        self._ask("make", asked, timeout_seconds)
        return made

    def close(self) -> None:
        """End the actors, with what they hold."""
        if not self._closed:
            self._closed = True
            if self._session != session():
                return  # they ended with it
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
        """An actor for people: ``server[2,1] at 10.0.0.3``."""
        place = np.argwhere(self.mesh.array == rank)[0]
        return f"{self.name}[{','.join(map(str, place))}] at {self.addresses[rank]}"

    @property
    def dead(self) -> frozenset[int]:
        """Ranks whose actors died, as far as the driver knows."""
        return frozenset(self._dead)

    def _ask(self, method: str, asked: Mapping[int, Sequence[Any]], timeout_seconds: float) -> list[Any]:
        return ask([(self, rank, method, args) for rank, args in asked.items()], timeout_seconds)


class ShardedArray:
    """An array whose shards the actors of a mesh hold; dropped there when the driver drops this.

    Attributes:
        mesh: the actors. layout: how its ranks shard the array. shape, dtype: of the whole.
        lost: ranks whose actors died while it was made, where that was borne; it lacks their shards.
    """

    lost: frozenset[int] = frozenset()

    def __init__(self, mesh: ActorMesh, layout: Layout, shape: tuple[int, ...], dtype: str) -> None:
        cut_shards(layout, shape)  # raises if it does not fit
        self.mesh, self.layout, self.shape, self.dtype = mesh, layout, shape, dtype
        self.key = uuid.uuid4().hex
        weakref.finalize(self, _drop, mesh._session, mesh.actors, self.key).atexit = False

    def shards(self, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> dict[int, torch.Tensor]:
        """The shards of all ranks that are not ``lost``, brought to the driver."""
        ranks = [rank for rank in self.mesh.mesh.ranks if rank not in self.lost]
        packed = self.mesh._ask("get", dict.fromkeys(ranks, (self.key,)), timeout_seconds)
        return {rank: unpack_array(one) for rank, one in zip(ranks, packed, strict=True)}

    def gather(self, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> torch.Tensor:
        """The whole array, brought to the driver; of replicas one.

        Raises:
            RemoteError: an actor died, and no other one has its shard.
        """
        shards = cut_shards(self.layout, self.shape)
        seen: dict[Any, int] = {}
        for rank in sorted(self.layout.ranks, key=lambda rank: rank in self.mesh.dead):
            seen.setdefault(tuple(shards.boxes_of(rank)), rank)
        ranks = sorted(seen.values())
        packed = self.mesh._ask("get", dict.fromkeys(ranks, (self.key,)), timeout_seconds)
        found = {rank: unpack_array(one) for rank, one in zip(ranks, packed, strict=True)}
        return whole_of(found, self.layout, self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} {self.layout} of {self.mesh.name}"

    def __repr__(self) -> str:
        return f"ShardedArray({self})"

    def __reduce__(self) -> Any:
        """Not pickled: its actors would drop it with each copy."""
        raise TypeError("a ShardedArray stays on the driver; reshard.ray.run gives each actor its own shard of it")


def join_meshes(meshes: Sequence[ActorMesh]) -> str:
    """The key of the group of the meshes' actors, in that order; made on first use."""
    key = "+".join(mesh._id for mesh in meshes)
    if key not in meshes[0]._joined:
        check_open(meshes)
        address, port = keeper_place()
        members = [(mesh, rank) for mesh in meshes for rank in mesh.mesh.ranks]
        places = [(key, address, port, i, len(members)) for i in range(len(members))]
        ask(
            [(mesh, rank, "join", place) for (mesh, rank), place in zip(members, places, strict=True)],
            DEFAULT_TIMEOUT_SECONDS,
            fault_tolerant=True,  # what becomes of the dead is for the call to say
        )
        for mesh in meshes:
            mesh._joined[key] = weakref.WeakSet(meshes)
    return key


def _drop(made_in: Any, actors: Sequence[Any], key: str) -> None:
    if made_in == session():
        for actor in actors:
            actor.drop.remote(key)


def _nodes() -> str:
    return "; ".join(
        f"{node['NodeManagerAddress']}: {node['Resources'].get('CPU', 0):g} CPU"
        for node in ray.nodes()
        if node["Alive"]
    )
