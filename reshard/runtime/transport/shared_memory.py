"""Large messages between ranks on one host, through shared memory. Linux only.

Each rank has a segment of shared memory with a ring of slots for each other rank of its host. The sender copies boxes
of its arrays into slots, and the receiver copies the slots into boxes of its arrays. So each byte is copied twice,
whatever the strides of the arrays are, and stays in the cache between both copies. See decision 30.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reshard import _native
from reshard.errors import ResourceError
from reshard.forks import keep_in_child
from reshard.runtime.memory_file import create_memory_file, name_machine, open_memory_file
from reshard.runtime.transport.descriptors import has_descriptors

#: Smallest message that goes through shared memory. Smaller ones go over sockets, which their sender need not wait for.
MIN_SHARED_BYTES = 2**18 + 1
#: An environment variable. If it is "0" on a rank, this rank sends and receives nothing through shared memory.
SHARED_MEMORY_VARIABLE = "RESHARD_SHARED_MEMORY"
#: Limit on the ranks of a host that share memory. Each maps the segments of all others.
MAX_RANKS_OF_HOST = 128
#: The announcement of a rank to the others: two words with the name of its machine, its process, a descriptor, a token.
_NO_SEGMENT = (0, 0, 0, -1, 0)


class SharedMemory:
    """The connections of a rank to other ranks of its host through shared memory.

    Args:
        rings: the native rings.
        numbers: ``{rank: number}`` of the ranks that they reach.
    """

    def __init__(self, rings: Any, numbers: dict[int, int]) -> None:
        self._rings, self._numbers = rings, numbers
        self._kept: dict[int, _Work] = {}  # refers to arrays until their operation is done or the rings are closed

    def carries(self, rank: int, nbytes: int) -> bool:
        """Whether a message of so many bytes, to or from a rank, goes this way. Both ends get the same answer."""
        return nbytes >= MIN_SHARED_BYTES and rank in self._numbers

    def send(self, boxes: np.ndarray, arrays: Any, rank: int, tag: int) -> _Work:
        """Start sending boxes, which must not change until the work is finished.

        Args:
            boxes: see :mod:`reshard.runtime.cpu.box_tables`.
            arrays: what holds them.
        """
        return self._post(self._rings.send, boxes, arrays, rank, tag)

    def recv(self, boxes: np.ndarray, arrays: Any, rank: int, tag: int) -> _Work:
        """Start receiving into boxes; as :meth:`send`. Messages of one pair of ranks and one tag arrive in order."""
        return self._post(self._rings.recv, boxes, arrays, rank, tag)

    def _post(self, post: Any, boxes: np.ndarray, arrays: Any, rank: int, tag: int) -> _Work:
        try:
            work = _Work(self, post(self._numbers[rank], tag, boxes), arrays)
        except MemoryError:
            raise ResourceError(
                f"there is too little memory on this host for 1 MiB that is shared with rank {rank}; "
                f"{SHARED_MEMORY_VARIABLE}=0 in the environment sends all messages over sockets"
            ) from None
        self._kept[id(work)] = work
        return work

    def wait(self, work: _Work, seconds: float) -> bool:
        """Move data until a work is finished. Returns whether it is."""
        if not self._rings.wait(work.operation, seconds):
            return False
        self._kept.pop(id(work), None)
        return True

    def close(self) -> None:
        """End all waits, here and on the other ranks. Afterwards nothing reads or writes the arrays of a work."""
        self._rings.close()
        self._kept.clear()


class _Work:
    def __init__(self, memory: SharedMemory, operation: Any, arrays: Any) -> None:
        self._memory, self.operation, self._arrays = memory, operation, arrays

    def wait(self, timeout: timedelta) -> None:
        """See :class:`~reshard.runtime.transport.Work`."""
        if not self._memory.wait(self, timeout.total_seconds()):
            raise RuntimeError(f"it has not ended after {timeout.total_seconds():g} s")


def share_memory(group: Any, own: int, ranks: Sequence[int], limit: timedelta) -> SharedMemory | None:
    """Share memory with the other ranks of this host. All ranks of a group call it.

    Two ranks share memory if each can map the segment of the other: they run on one machine, in one process table and
    as one user.

    Args:
        group: Gloo's process group.
        own: number of this rank in it.
        ranks: all ranks.
        limit: limit of each round.

    Returns:
        The connections; None if there are none.

    Raises:
        RuntimeError: not all ranks answered in time.
    """
    descriptor, token = -1, secrets.randbits(62)
    statement = torch.tensor(_NO_SEGMENT, dtype=torch.int64, device="cpu")
    name = (
        None
        if os.environ.get(SHARED_MEMORY_VARIABLE) == "0" or not hasattr(_native, "Rings")
        else name_machine(socket.gethostname())
    )
    try:
        if name is not None and has_descriptors(len(ranks) + 1):
            with contextlib.suppress(OSError):  # the others learn that this rank has none
                descriptor = create_memory_file(token, _native.ring_segment_bytes(MAX_RANKS_OF_HOST), reserves=False)
                statement[:2] = torch.from_numpy(np.frombuffer(name, dtype=np.int64).copy())
                statement[2:] = torch.tensor([os.getpid(), descriptor, token])
        table = [torch.empty_like(statement) for _ in ranks]
        group.allgather([table], [statement]).wait(limit)
        rings: Any = None
        numbers: dict[int, int] = {}
        neighbours = [i for i, other in enumerate(table) if other[3] >= 0 and torch.equal(other[:2], statement[:2])]
        if own in neighbours and 1 < len(neighbours) <= MAX_RANKS_OF_HOST:
            rings, numbers = _map_segments(descriptor, neighbours, own, table)
        options = dist.BarrierOptions()
        options.timeout = limit
        group.barrier(options).wait(limit)  # all have mapped what they can
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    reached = {ranks[i]: number for i, number in numbers.items() if rings.reaches(number)}
    return SharedMemory(rings, reached) if reached else None


def _map_segments(
    descriptor: int, neighbours: Sequence[int], own: int, table: Sequence[torch.Tensor]
) -> tuple[Any, dict[int, int]]:
    """The rings with the segments that this rank can map, and ``{number in the group: number in the rings}``."""
    nbytes = _native.ring_segment_bytes(len(neighbours))
    rings: Any = None
    numbers: dict[int, int] = {}
    with contextlib.suppress(OSError, MemoryError):
        rings = keep_in_child(_native.Rings(_native.map_shared(descriptor, 0, nbytes), neighbours.index(own)))
    for number, member in enumerate(neighbours if rings is not None else ()):
        if member == own:
            continue
        with contextlib.suppress(OSError):  # a process that hides, or a limit of memory
            process, *file = table[member][2:].tolist()
            opened = open_memory_file(process, *file, writes=True)
            try:
                if rings.add(number, _native.map_shared(opened, 0, nbytes), process):
                    numbers[member] = number
            finally:
                os.close(opened)
    return rings, numbers
