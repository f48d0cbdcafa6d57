"""What one actor of a Ray cluster does: it holds shards, and takes part in transfers and runs as one rank.

Answers go to the driver as ``("result", value)`` or ``("error", class, text)``, so that it raises what ranks raise.
What is no error of ours comes with its traceback: as a ``"fault"``, or as a ``"doubt"`` where another actor's death may
explain it.
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

from reshard.api.call import reshard
from reshard.coordination.decide import describe_error
from reshard.coordination.liveness.status import blame
from reshard.coordination.process_group import Group, join, serve_store
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, RankLostError, ReshardError, TransferTimeoutError
from reshard.sharding.layout import AnyLayout
from reshard.sharding.tiles import cut_shards
from reshard.testing.processes import join_world

Packed = tuple[str, tuple[int, ...], np.ndarray]
CONNECT_SECONDS = 60.0


def pack_array(array: torch.Tensor) -> Packed:
    """Dtype, shape and bytes; Ray hands NumPy arrays over without a copy, and NumPy has no bfloat16."""
    plain = array.detach().contiguous()
    return dtype_name(plain.dtype), tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy()


def unpack_array(packed: Packed) -> torch.Tensor:
    """A tensor of its own memory from what :func:`pack_array` made."""
    dtype, shape, data = packed
    if not data.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(data.copy()).view(getattr(torch, dtype)).reshape(shape)


def answered(method: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Errors as values: the driver shall see the class that a rank raised."""

    @functools.wraps(method)
    def answer(*args: Any, **keywords: Any) -> tuple[Any, ...]:
        try:
            return ("result", method(*args, **keywords))
        except RankLostError as error:
            return ("error", *describe_error(error), error.ranks, error.regions)
        except ReshardError as error:
            return ("error", *describe_error(error))
        except (Exception, SystemExit) as error:
            kind = "doubt" if isinstance(error, (RuntimeError, OSError)) else "fault"
            return (kind, *describe_error(error), "".join(traceback.format_exception(error)))

    return answer


@dataclass(frozen=True)
class Held:
    """Stands for an actor's shard of a sharded array among what a function is given."""

    key: str


class StoreKeeper:
    """The actor at whose store ranks meet; it serves as long as the driver lives."""

    def __init__(self) -> None:
        self.address = ray.util.get_node_ip_address()
        self._store = serve_store(socket.create_server((self.address, 0), backlog=1024))

    def where(self) -> tuple[str, int]:
        """Address and port of the store."""
        return self.address, self._store.port

    @answered
    def blame(self, key: str, rank: int, text: str) -> None:
        """Let ranks of a group that wait for one of them know why it does not come."""
        blame(dist.PrefixStore("reshard/join", dist.PrefixStore(key, self._store)), rank, text)


class Device:
    """One rank."""

    def __init__(self) -> None:
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            name = interface_of(ray.util.get_node_ip_address())
            if name is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = name
        self._groups: dict[str, Group] = {}
        self._shards: dict[str, torch.Tensor] = {}

    def where(self) -> tuple[str, int]:
        """Address of the node, and process id."""
        return ray.util.get_node_ip_address(), os.getpid()

    @answered
    def join(self, key: str, address: str, port: int, rank: int, size: int) -> None:
        """Become a rank of a group."""
        self._groups[key] = join(dist.PrefixStore(key, _connect(address, port)), rank, size)

    @answered
    def leave(self, key: str) -> None:
        """Give a group's connections back."""
        if key in self._groups:
            self._groups.pop(key).close()

    @answered
    def put(self, key: str, packed: Packed) -> None:
        """Keep a shard."""
        self._shards[key] = unpack_array(packed)

    @answered
    def make(
        self, key: str, layout: AnyLayout, rank: int, shape: Sequence[int], dtype: str, function: Callable[..., Any]
    ) -> None:
        """Make a shard of what ``function(index)`` returns for each of its boxes."""
        shards = cut_shards(layout, shape)
        array = torch.empty(shards.local_shape(rank), dtype=getattr(torch, dtype))
        for box, local in shards.boxes_of(rank):
            wanted = tuple(hi - lo for lo, hi in box)
            made = function(tuple(slice(lo, hi) for lo, hi in box))
            block = torch.as_tensor(np.require(made, requirements=["C", "W"]) if isinstance(made, np.ndarray) else made)
            if tuple(block.shape) != wanted or block.dtype != array.dtype:
                raise ArgumentError(
                    f"the function gave {dtype_name(block.dtype)} {list(block.shape)} for {list(map(list, box))}, "
                    f"not {dtype} {list(wanted)}"
                )
            array[(..., *(slice(at, at + size) for at, size in zip(local, wanted, strict=True)))] = block
        self._shards[key] = array

    @answered
    def get(self, key: str) -> Packed:
        """A shard, for the driver."""
        return pack_array(self._shards[key])

    def drop(self, key: str) -> None:
        """Forget a shard."""
        self._shards.pop(key, None)

    @answered
    def move(
        self,
        group: str,
        names: Mapping[str | None, tuple[str | None, str | None]],
        specs: Mapping[str | None, tuple[AnyLayout, AnyLayout, Sequence[int], str, str | None]],
        options: Mapping[str, Any],
    ) -> list[int]:
        """Take part in a transfer: of each tensor the key of the source shard and that of the new one.

        Returns:
            The ranks that are lost to this one, and with which it makes no call any more.
        """
        tensors = {name: None if src is None else self._shards[src] for name, (src, _) in names.items()}
        columns: list[dict[Any, Any]] = [{name: spec[i] for name, spec in specs.items()} for i in range(5)]
        given: list[Any] = (
            [tensors, *columns] if None not in names else [column[None] for column in (tensors, *columns)]
        )
        tensor, src, dst, shape, dtype, dst_dtype = given
        group_of_it = self._groups[group]
        moved = reshard(tensor, src, dst, shape=shape, dtype=dtype, dst_dtype=dst_dtype, group=group_of_it, **options)
        for name, (_, key) in names.items():
            if key is not None:
                self._shards[key] = moved if name is None else moved[name]
        return list(group_of_it.status["lost"])

    @answered
    def run(
        self,
        world: tuple[str, str, int, int, int],
        function: Callable[..., Any],
        args: Sequence[Any],
        timeout_seconds: float,
    ) -> Any:
        """Call a function with the world group up, and with this actor's shards in place of sharded arrays."""
        key, address, port, rank, size = world
        store = dist.PrefixStore(f"world/{key}", _connect(address, port))
        try:
            try:
                join_world(store, rank, size, timedelta(seconds=timeout_seconds))
            except dist.DistStoreError as error:
                raise TransferTimeoutError(
                    f"not all {size} actors began within {timeout_seconds:g} s; is one busy in an earlier run?"
                ) from error
            return function(rank, *replace_each(args, Held, lambda held: self._shards.get(held.key)))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def replace_each(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """What a value is where each instance of a class in it is changed; looks into dicts, lists and tuples."""
    if isinstance(value, kind):
        return change(value)
    if type(value) is dict:
        return {key: replace_each(each, kind, change) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replace_each(each, kind, change) for each in value)
    return value


def _connect(address: str, port: int) -> dist.Store:
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))


def interface_of(address: str) -> str | None:
    """The name of this host's interface with an address; Gloo would take that of the host's name."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def shard_of(whole: torch.Tensor, layout: AnyLayout, rank: int) -> torch.Tensor:
    """What a rank holds of a tensor; a view where it is one box."""
    shards = cut_shards(layout, tuple(whole.shape))
    boxes = list(shards.boxes_of(rank))
    shape = shards.local_shape(rank)
    if len(boxes) == 1 and math.prod(shape) == math.prod(hi - lo for lo, hi in boxes[0][0]):
        return whole[(..., *(slice(lo, hi) for lo, hi in boxes[0][0]))].reshape(shape)
    array = whole.new_empty(shape)
    for box, local in boxes:
        part = whole[(..., *(slice(lo, hi) for lo, hi in box))]
        array[(..., *(slice(at, at + hi - lo) for at, (lo, hi) in zip(local, box, strict=True)))] = part
    return array


def whole_of(shards_by_rank: Mapping[int, torch.Tensor], layout: AnyLayout, shape: Sequence[int]) -> torch.Tensor:
    """A tensor from the shards of all ranks that hold a part of it."""
    shards = cut_shards(layout, shape)
    whole = next(iter(shards_by_rank.values())).new_empty(tuple(shape))
    for rank, array in shards_by_rank.items():
        for box, local in shards.boxes_of(rank):
            part = array[(..., *(slice(at, at + hi - lo) for at, (lo, hi) in zip(local, box, strict=True)))]
            whole[(..., *(slice(lo, hi) for lo, hi in box))] = part
    return whole
