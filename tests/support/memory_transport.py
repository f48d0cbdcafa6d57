"""An in-memory transport between threads. As in Gloo and NCCL, a send completes only after its receive is posted."""

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

from reshard.runtime import build_program
from reshard.runtime.cpu.program_executor import RunOptions, run_program
from reshard.runtime.cpu.staging import Staging, TorchMemory, view_as_bits
from reshard.runtime.rounds.device_interfaces import EXCHANGE, PACK, UNPACK
from reshard.runtime.rounds.round_assignment import find_rounds
from reshard.runtime.rounds.runner import RoundRunner
from reshard.runtime.strided_regions import IN_ARRAY, MAX_OUTER, ROW, SIZE, STRIDE, TENSOR, copy_regions_python


class _Work:
    def __init__(self, hub, buffer):
        self.hub, self.buffer, self.done = hub, buffer, False

    def wait(self, timeout):
        with self.hub.condition:
            if not self.hub.condition.wait_for(lambda: self.done, timeout.total_seconds()):
                raise RuntimeError("timed out waiting for a message")


class MemoryHub:
    """Matches sends and receives between all pairs of ranks, by sender, receiver and tag."""

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
                assert send.buffer.numel() == recv.buffer.numel(), "send and receive buffers differ in size"
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

    def abort(self):
        with self.hub.condition:
            for works in (*self.hub.sends.values(), *self.hub.recvs.values()):
                works.clear()


class MemoryExchange:
    """Exchanges a group of messages, matched by order only; complete on return."""

    def __init__(self, hub, rank, seconds, ranks=()):
        self.transport, self.limit = MemoryTransport(hub, rank), timedelta(seconds=seconds)
        self.rank, self.others = rank, [other for other in ranks if other != rank]

    def __call__(self, recvs, sends, broadcasts=()):
        works = [self.transport.recv(buffer, rank, 0) for buffer, rank in recvs]
        for buffer, root in broadcasts:
            if root == self.rank:
                sends = [*sends, *((buffer, other) for other in self.others)]
            else:
                works.append(self.transport.recv(buffer, root, 0))
        works += [self.transport.send(buffer, rank, 0) for buffer, rank in sends]
        for work in works:
            work.wait(self.limit)


class PythonCopier:
    """The reference implementation of the pack kernel: copies regions from raw addresses as the kernel does."""

    def upload(self, table):
        return table

    def find_addresses(self, known):
        return known

    def warm_up(self, buffer):
        pass

    def copy(self, placed, addresses, buffer, to_buffer):
        flats = [None] * len(addresses)
        for number, nbytes in used_bytes_of(placed).items():
            assert addresses[number] % placed.unit == 0
            flats[number] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(addresses[number]))
        copy_regions_python(placed, flats, buffer.numpy(), to_buffer)


def used_bytes_of(table):
    """For each array of a table, the bytes from its start to the end of the last region."""
    sizes, strides = table.rows[:, SIZE : SIZE + MAX_OUTER], table.rows[:, STRIDE : STRIDE + MAX_OUTER]
    ends = table.rows[:, IN_ARRAY] + ((sizes - 1) * strides).sum(axis=1) + table.rows[:, ROW]
    numbers = table.rows[:, TENSOR]
    return {n: int(ends[numbers == n].max()) * table.word_bytes for n in set(numbers.tolist())}


class ThreadStreams:
    """CPU streams: one thread per stream, with a random delay before each operation to expose missing waits."""

    def __init__(self, seed):
        self.random, self.errors, self.current = random.Random(seed), [], EXCHANGE
        self.queues = {stream: queue.SimpleQueue() for stream in (EXCHANGE, PACK, UNPACK)}
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
    def on(self, stream):
        before, self.current = self.current, stream
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
        assert self.mark().wait(seconds), f"streams did not finish within {seconds} s"
        if self.errors:
            raise self.errors[0]


class StreamMemory(TorchMemory):
    """Enqueues its copies on the current stream."""

    def __init__(self, streams):
        super().__init__(torch.device("cpu"))
        self.streams = streams

    def copy(self, target, source):
        self.streams.put(lambda: TorchMemory.copy(self, target, source))

    def pack(self, views, buffer):
        self.streams.put(lambda: TorchMemory.pack(self, views, buffer))

    def unpack(self, buffer, views):
        self.streams.put(lambda: TorchMemory.unpack(self, buffer, views))


class StreamCopier(PythonCopier):
    def __init__(self, streams):
        self.streams = streams

    def copy(self, *args):
        self.streams.put(lambda: PythonCopier.copy(self, *args))


def run_on_streams(plan, rank, arrays, exchange, round_of, seed, seconds, times=2):
    """Run one rank's program ``times`` times on its own streams, with the same staging buffer."""
    streams = ThreadStreams(seed)
    itemsizes = [spec.itemsize for spec in plan.tensors]
    copier = StreamCopier(streams) if rank % 2 else None
    runner = RoundRunner(
        build_program(plan, rank),
        round_of,
        StreamMemory(streams),
        itemsizes,
        copier,
        plan.staging_bytes,
    )
    for _ in range(times):
        runner.run(*arrays, lambda *posted: streams.put(lambda: exchange(*posted)), streams)
    streams.synchronize(seconds)
    return runner


def run_in_threads(plan, sources, outs, seconds=5.0, in_rounds=False, digests=None, round_of=None):
    """Run every rank's program in a thread; returns ``{rank: staging bytes}`` or raises the error of the lowest rank.

    Args:
        sources, outs: ``{rank: [tensor or None, ...]}``. digests: ``{rank: TransferDigests}``.
        in_rounds: False for the CPU executor, True for the group executor, "streams" for it on asynchronous streams.
        round_of: of the group executor. Default: the rounds for a transport without broadcasts.
    """
    hub, errors, staged = MemoryHub(), {}, {}
    round_of = find_rounds(plan) if in_rounds and round_of is None else round_of

    def one(rank):
        try:
            program = build_program(plan, rank)
            arrays = [[None if x is None else view_as_bits(x) for x in side[rank]] for side in (sources, outs)]
            if in_rounds == "streams":
                exchange = MemoryExchange(hub, rank, seconds, plan.ranks)
                staging = run_on_streams(plan, rank, arrays, exchange, round_of, rank, seconds)
            elif in_rounds:
                copier = PythonCopier() if rank % 2 else None
                memory, itemsizes = TorchMemory(torch.device("cpu")), [spec.itemsize for spec in plan.tensors]
                staging = RoundRunner(program, round_of, memory, itemsizes, copier, plan.staging_bytes)
                staging.run(*arrays, MemoryExchange(hub, rank, seconds, plan.ranks))
            else:
                staging = Staging(program, plan.staging_bytes)
                run_program(
                    program, MemoryTransport(hub, rank), *arrays, staging,
                    RunOptions(deadline=time.monotonic() + seconds, digests=digests and digests[rank]),
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
