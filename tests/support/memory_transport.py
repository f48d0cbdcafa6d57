"""Ranks as threads: a transport whose sends complete only when the receive is posted, as Gloo's and NCCL's do."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import random
import threading
import time
from collections import deque
from datetime import timedelta

import numpy as np
import torch

from reshard.runtime.cpu.executor import run_program
from reshard.runtime.cpu.staging import Staging, TorchMemory, carrier
from reshard.runtime.program import build_program
from reshard.runtime.rounds.executor import RoundRunner
from reshard.runtime.rounds.memory import EXCHANGE, PACK, UNPACK
from reshard.runtime.rounds.schedule import find_rounds
from reshard.runtime.strided_regions import IN_ARRAY, MAX_OUTER, ROW, SIZE, STRIDE, TENSOR, copy_regions_python


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
    """The twin of the kernel that replicas regions, from the same addresses."""

    def place(self, table):
        return table

    def find_addresses(self, known):
        return known

    def warm_up(self, buffer):
        pass

    def copy(self, placed, addresses, buffer, to_buffer):
        flats = [None] * len(addresses)
        for number, nbytes in reach_of(placed).items():
            assert addresses[number] % placed.unit == 0
            flats[number] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(addresses[number]))
        copy_regions_python(placed, flats, buffer.numpy(), to_buffer)


def reach_of(table):
    """How many bytes of each array a table uses."""
    sizes, strides = table.rows[:, SIZE : SIZE + MAX_OUTER], table.rows[:, STRIDE : STRIDE + MAX_OUTER]
    ends = table.rows[:, IN_ARRAY] + ((sizes - 1) * strides).sum(axis=1) + table.rows[:, ROW]
    numbers = table.rows[:, TENSOR]
    return {n: int(ends[numbers == n].max()) * table.word_bytes for n in set(numbers.tolist())}


class ThreadLanes:
    """HostClasses that go on by themselves, as streams do; each waits a little before its work, at random."""

    def __init__(self, seed):
        self.random, self.errors, self.current = random.Random(seed), [], EXCHANGE
        self.queues = {host_class: queue.SimpleQueue() for host_class in (EXCHANGE, PACK, UNPACK)}
        for works in self.queues.values():
            threading.Thread(target=self.serve, args=(works,), daemon=True).start()

    def serve(self, works):
        while True:
            try:
                works.get()()
            except BaseException as error:
                self.errors.append(error)

    def put(self, work):
        seconds = self.random.choice([0, 0, 0.0005, 0.002])
        self.queues[self.current].put(lambda: (time.sleep(seconds), work()))

    @contextlib.contextmanager
    def on(self, host_class):
        before, self.current = self.current, host_class
        yield
        self.current = before

    def mark(self):
        event = threading.Event()
        self.queues[self.current].put(event.set)
        return event

    def wait(self, mark):
        if mark is not None:
            self.queues[self.current].put(mark.wait)

    def synchronize(self, seconds):
        assert self.mark().wait(seconds), "stuck"
        if self.errors:
            raise self.errors[0]


class LaneMemory(TorchMemory):
    """Puts its work on the current host class."""

    def __init__(self, host_classes):
        super().__init__(torch.device("cpu"))
        self.host_classes = host_classes

    def copy(self, target, source):
        self.host_classes.put(lambda: TorchMemory.copy(self, target, source))

    def pack(self, views, buffer):
        self.host_classes.put(lambda: TorchMemory.pack(self, views, buffer))

    def unpack(self, buffer, views):
        self.host_classes.put(lambda: TorchMemory.unpack(self, buffer, views))


class LaneCopier(PythonCopier):
    def __init__(self, host_classes):
        self.host_classes = host_classes

    def copy(self, *args):
        self.host_classes.put(lambda: PythonCopier.copy(self, *args))


def run_on_lanes(plan, rank, arrays, exchange, round_of, seed, seconds, times=2):
    """A rank's part on host classes of its own, several times over the same buffer."""
    host_classes = ThreadLanes(seed)
    itemsizes = [spec.itemsize for spec in plan.tensors]
    copier = LaneCopier(host_classes) if rank % 2 else None
    runner = RoundRunner(
        build_program(plan, rank),
        round_of,
        LaneMemory(host_classes),
        itemsizes,
        copier,
        plan.staging_bytes,
        host_classes,
    )
    for _ in range(times):
        runner.run(*arrays, lambda recvs, sends: host_classes.put(lambda: exchange(recvs, sends)))
    host_classes.synchronize(seconds)
    return runner


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
            if in_rounds == "host classes":
                exchange = MemoryExchange(hub, rank, seconds)
                staging = run_on_lanes(plan, rank, arrays, exchange, round_of, rank, seconds)
            elif in_rounds:
                copier = PythonCopier() if rank % 2 else None
                memory, itemsizes = TorchMemory(torch.device("cpu")), [spec.itemsize for spec in plan.tensors]
                staging = RoundRunner(program, round_of, memory, itemsizes, copier, plan.staging_bytes)
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
