"""Ranks as threads: a transport whose sends complete only when the receive is posted, as Gloo's and NCCL's do."""

from __future__ import annotations

import threading
import time
from collections import deque
from datetime import timedelta

import torch

from reshard.program import build_program
from reshard.progress import run_program
from reshard.regions import copy_regions_python
from reshard.round_runner import RoundRunner
from reshard.rounds import find_rounds
from reshard.staging import Staging, TorchMemory, carrier, flat_bytes


class _Work:
    def __init__(self, hub, buffer):
        self.hub, self.buffer, self.done = hub, buffer, False

    def wait(self, timeout):
        with self.hub.condition:
            if not self.hub.condition.wait_for(lambda: self.done, timeout.total_seconds()):
                raise RuntimeError("stuck")


class MemoryHub:
    """All pairs of ranks; counts bytes on the way."""

    def __init__(self):
        self.condition = threading.Condition()
        self.sends, self.recvs = {}, {}

    def post(self, mine, theirs, key, buffer):
        work = _Work(self, buffer)
        with self.condition:
            mine.setdefault(key, deque()).append(work)
            sends, recvs = self.sends.get(key, ()), self.recvs.get(key, ())
            while sends and recvs:
                send, recv = sends.popleft(), recvs.popleft()
                assert send.buffer.numel() == recv.buffer.numel(), "a message and its buffer differ in size"
                recv.buffer.copy_(send.buffer)
                send.done = recv.done = True
            self.condition.notify_all()
        return work


class MemoryTransport:
    def __init__(self, hub, rank):
        self.hub, self.rank = hub, rank

    def send(self, buffer, rank, tag):
        return self.hub.post(self.hub.sends, self.hub.recvs, (self.rank, rank, tag), buffer)

    def recv(self, buffer, rank, tag):
        return self.hub.post(self.hub.recvs, self.hub.sends, (rank, self.rank, tag), buffer)


class MemoryExchange:
    """A group of sends and receives at once, matched by order alone; done on return."""

    def __init__(self, hub, rank, seconds):
        self.transport, self.limit = MemoryTransport(hub, rank), timedelta(seconds=seconds)

    def __call__(self, recvs, sends):
        works = [self.transport.recv(buffer, rank, 0) for buffer, rank in recvs]
        works += [self.transport.send(buffer, rank, 0) for buffer, rank in sends]
        for work in works:
            work.wait(self.limit)


class PythonCopier:
    """The twin of the kernel that copies regions."""

    def __init__(self, table, device):
        self.table = table

    def copy(self, arrays, buffer, to_buffer):
        flats = [None if array is None else flat_bytes(array).numpy() for array in arrays]
        copy_regions_python(self.table, flats, buffer.numpy(), to_buffer)


def run_in_threads(plan, sources, outs, seconds=5.0, in_rounds=False, digests=None):
    """Run every rank's program; ``sources`` and ``outs`` are ``{rank: [tensor or None, ...]}``.

    Returns the staging bytes of each rank; raises the first error of a rank. ``digests`` are ``{rank: Digests}``.
    """
    hub, errors, staged = MemoryHub(), {}, {}
    round_of = find_rounds(plan) if in_rounds else {}

    def one(rank):
        try:
            program = build_program(plan, rank)
            arrays = [[None if x is None else carrier(x) for x in side[rank]] for side in (sources, outs)]
            if in_rounds:
                copier = PythonCopier if rank % 2 else None
                staging = RoundRunner(program, round_of, TorchMemory(torch.device("cpu")), copier)
                staging.run(*arrays, MemoryExchange(hub, rank, seconds))
            else:
                staging = Staging(program, plan.staging_bytes)
                run_program(
                    program, MemoryTransport(hub, rank), *arrays, staging,
                    deadline=time.monotonic() + seconds, digests=digests and digests[rank],
                )  # fmt: skip
            staged[rank] = staging.allocated_bytes
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in plan.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * seconds)
    if errors:
        raise errors[min(errors)]
    return staged
