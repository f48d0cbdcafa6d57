"""The actor of one rank: it holds shards, and takes part in transfers and runs.

Methods return one of these to the driver, which raises the error again:

- ``("result", value)``,
- ``("error", class name, text)`` for an error of this package; RankLostError adds ranks and regions,
- ``("exception", class name, text, traceback)`` for any other exception,
- ``("possible_consequence", class name, text, traceback)`` for an exception that the death of another actor may have
  caused.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist

from reshard.api.arguments.options import TransferOptions
from reshard.api.call import reshard
from reshard.coordination import Group, describe_error, family_of, join, report_dead, serve_store
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, RankLostError, ReshardError, TransferTimeoutError
from reshard.sharding import AnyLayout, cut_tiles
from reshard.testing.processes import join_world

Packed = tuple[str, tuple[int, ...], np.ndarray]
RAY_CONNECT_TIMEOUT_SECONDS = 60.0


def pack_array(array: torch.Tensor) -> Packed:
    """``(dtype, shape, bytes)`` of a tensor. Ray passes NumPy arrays without a copy, but NumPy has no bfloat16."""
    plain = array.detach().resolve_conj().resolve_neg().contiguous()
    return dtype_name(plain.dtype), tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy()


def check_unmasked(array: Any, what: str) -> None:
    """Raise ArgumentError for a masked array of NumPy, whose mask would be lost."""
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(f"{what} a MaskedArray, whose mask would be lost; pass array.filled(value)")


def unpack_array(packed: Packed) -> torch.Tensor:
    """The inverse of :func:`pack_array`; copies, because Ray's memory is read-only."""
    dtype, shape, data = packed
    if not data.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(data.copy()).view(getattr(torch, dtype)).reshape(shape)


def returns_errors(method: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Decorator: return errors as values, so that the driver sees the class that a rank raised."""

    @functools.wraps(method)
    def answer(*args: Any, **keywords: Any) -> tuple[Any, ...]:
        try:
            return ("result", method(*args, **keywords))
        except RankLostError as error:
            return ("error", *describe_error(error), error.ranks, error.regions)
        except ReshardError as error:
            return ("error", *describe_error(error))
        except (Exception, SystemExit) as error:
            kind = "possible_consequence" if isinstance(error, (RuntimeError, OSError)) else "exception"
            return (kind, *describe_error(error), "".join(traceback.format_exception(error)))

    return answer


@dataclass(frozen=True)
class ShardRef:
    """A placeholder in the arguments of a function for the actor's own shard of an array."""

    key: str


class StoreServer:
    """The actor that serves the rendezvous store, for the lifetime of the driver."""

    def __init__(self) -> None:
        self.address = ray.util.get_node_ip_address()
        self._store = serve_store(socket.create_server((self.address, 0), family=family_of(self.address), backlog=1024))

    def where(self) -> tuple[str, int]:
        """Address and port of the store."""
        return self.address, self._store.port

    @returns_errors
    def blame(self, key: str, rank: int, text: str) -> None:
        """Publish why a rank of a group failed, for the ranks that wait for it."""
        report_dead(dist.PrefixStore("reshard/join", dist.PrefixStore(key, self._store)), rank, text)


class Device:
    """The actor of one rank."""

    def __init__(self) -> None:
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            name = interface_of(ray.util.get_node_ip_address())
            if name is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = name
        self._groups: dict[str, Group] = {}
        self._shards: dict[str, torch.Tensor] = {}

    def where(self) -> tuple[str, int]:
        """The node's address, and the process id."""
        return ray.util.get_node_ip_address(), os.getpid()

    @returns_errors
    def join(self, key: str, address: str, port: int, rank: int, size: int) -> None:
        """Join a group as a rank."""
        self._groups[key] = join(dist.PrefixStore(key, _connect(address, port)), rank, size)

    @returns_errors
    def leave(self, key: str) -> None:
        """Close a group's connections."""
        if key in self._groups:
            self._groups.pop(key).close()

    @returns_errors
    def put(self, key: str, packed: Packed) -> None:
        """Store a shard."""
        self._shards[key] = unpack_array(packed)

    @returns_errors
    def make(
        self, key: str, layout: AnyLayout, rank: int, shape: Sequence[int], dtype: str, function: Callable[..., Any]
    ) -> None:
        """Store a shard that consists of ``function(index)`` for each of its boxes."""
        shards = cut_tiles(layout, shape)
        array = torch.empty(shards.local_shape(rank), dtype=getattr(torch, dtype))
        for box, local in shards.boxes_of(rank):
            wanted = tuple(hi - lo for lo, hi in box)
            made = function(tuple(slice(lo, hi) for lo, hi in box))
            check_unmasked(made, "the function returned")
            block = torch.as_tensor(np.require(made, requirements=["C", "W"]) if isinstance(made, np.ndarray) else made)
            if tuple(block.shape) != wanted or block.dtype != array.dtype:
                raise ArgumentError(
                    f"the function returned {dtype_name(block.dtype)} {list(block.shape)} for {list(map(list, box))}; "
                    f"it must return {dtype} {list(wanted)}"
                )
            array[(..., *(slice(index, index + size) for index, size in zip(local, wanted, strict=True)))] = block
        self._shards[key] = array

    @returns_errors
    def get(self, key: str) -> Packed:
        """A shard, packed for the driver."""
        return pack_array(self._shards[key])

    def drop(self, key: str) -> None:
        """Free a shard."""
        self._shards.pop(key, None)

    @returns_errors
    def move(
        self,
        group: str,
        keys: Mapping[str | None, tuple[str | None, str | None]],
        specs: Mapping[str | None, tuple[AnyLayout, AnyLayout, Sequence[int], str, str | None]],
        options: TransferOptions,
        version_keys: Mapping[str | None, tuple[str | None, str | None]],
    ) -> list[int]:
        """Take part in a transfer.

        Args:
            group: its key.
            keys: by tensor name, the keys of the source shard and of the new shard; None if this actor has none.
            specs: by tensor name, source layout, destination layout, shape, dtype and result dtype.
            options: options of :func:`reshard.reshard`.
            version_keys: by tensor name, the keys of the shards of an earlier version, of the source and of the
                destination.

        Returns:
            The ranks that this rank has excluded.
        """
        tensors = {name: None if src is None else self._shards[src] for name, (src, _) in keys.items()}
        columns: list[dict[Any, Any]] = [{name: spec[i] for name, spec in specs.items()} for i in range(5)]
        columns += [
            {name: None if pair[i] is None else self._shards[pair[i] or ""] for name, pair in version_keys.items()}
            for i in range(2)
        ]
        given: list[Any] = [tensors, *columns] if None not in keys else [column[None] for column in (tensors, *columns)]
        tensor, src, dst, shape, dtype, dst_dtype, base, out = given
        ranks = self._groups[group]
        moved = reshard(
            tensor, src, dst, shape=shape, dtype=dtype, dst_dtype=dst_dtype, group=ranks, base=base, out=out, **options
        )
        for name, (_, key) in keys.items():
            if key is not None:
                self._shards[key] = moved if name is None else moved[name]
        return sorted(ranks.lost)

    @returns_errors
    def run(
        self,
        world: tuple[str, str, int, int, int],
        function: Callable[..., Any],
        args: Sequence[Any],
        timeout_seconds: float,
        backend: str,
    ) -> Any:
        """Call a function inside a ``torch.distributed`` world, with this actor's shards in place of references.

        Args:
            world: its key, address and port of the store, this rank, and the number of ranks.
        """
        key, address, port, rank, size = world
        store = dist.PrefixStore(f"world/{key}", _connect(address, port))
        try:
            try:
                join_world(store, rank, size, timedelta(seconds=timeout_seconds), backend)
            except dist.DistStoreError as error:
                raise TransferTimeoutError(
                    f"not all {size} actors started within {timeout_seconds:g} s; one may be busy with another run"
                ) from error
            return function(rank, *replace_each(args, ShardRef, lambda ref: self._shards.get(ref.key)))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def replace_each(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A copy of a value in which ``change`` replaces each instance of ``kind``, also inside dicts, lists and tuples."""
    if isinstance(value, kind):
        return change(value)
    if type(value) is dict:
        return {key: replace_each(item, kind, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replace_each(item, kind, change) for item in value)
    return value


def _connect(address: str, port: int) -> dist.Store:
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=RAY_CONNECT_TIMEOUT_SECONDS))


def interface_of(address: str) -> str | None:
    """The name of this host's interface with an address. By default Gloo uses the address of the host name."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def shard_of(whole: torch.Tensor, layout: AnyLayout, rank: int) -> torch.Tensor:
    """A rank's shard of a tensor; a view if the shard is one box."""
    shards = cut_tiles(layout, tuple(whole.shape))
    boxes = list(shards.boxes_of(rank))
    shape = shards.local_shape(rank)
    if len(boxes) == 1 and math.prod(shape) == math.prod(hi - lo for lo, hi in boxes[0][0]):
        return whole[(..., *(slice(lo, hi) for lo, hi in boxes[0][0]))].reshape(shape)
    array = whole.new_empty(shape)
    for box, local in boxes:
        part = whole[(..., *(slice(lo, hi) for lo, hi in box))]
        array[(..., *(slice(index, index + hi - lo) for index, (lo, hi) in zip(local, box, strict=True)))] = part
    return array


def whole_of(shards_by_rank: Mapping[int, torch.Tensor], layout: AnyLayout, shape: Sequence[int]) -> torch.Tensor:
    """The whole tensor, assembled from shards."""
    shards = cut_tiles(layout, shape)
    whole = next(iter(shards_by_rank.values())).new_empty(tuple(shape))
    for rank, array in shards_by_rank.items():
        for box, local in shards.boxes_of(rank):
            part = array[(..., *(slice(index, index + hi - lo) for index, (lo, hi) in zip(local, box, strict=True)))]
            whole[(..., *(slice(lo, hi) for lo, hi in box))] = part
    return whole
