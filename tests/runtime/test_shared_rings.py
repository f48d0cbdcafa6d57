"""Messages through rings in shared memory: boxes of any strides arrive whole, and damaged memory is an error of ours."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from datetime import timedelta

import numpy as np
import pytest
import torch

from reshard import _native
from reshard.errors import ResourceError
from reshard.runtime.cpu.box_tables import split_box, tabulate_boxes, tabulate_buffers
from reshard.runtime.memory_file import create_memory_file
from reshard.runtime.transport import SharedMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")
SLOT_BYTES = 2**18
#: Words of a ring, in 32-bit units from the start of its segment.
PRODUCED, GRANTED, FRAME = ((4096 + offset) // 4 for offset in (0, 128, 320))


class Pair:
    """Ranks 0 and 1 of a host in one process. ``words[i]`` is the segment of rank i from the ring to the other."""

    def __init__(self):
        nbytes = _native.ring_segment_bytes(2)
        files = [create_memory_file(i, nbytes, reserves=False) for i in range(2)]
        maps = [[_native.map_shared(file, 0, nbytes) for file in files] for _ in range(2)]
        for file in files:
            os.close(file)
        rings = [_native.Rings(maps[i][i], i) for i in range(2)]
        for i in range(2):
            assert not rings[1 - i].reaches(i)
            assert rings[i].add(1 - i, maps[i][1 - i], os.getpid())
        assert rings[0].reaches(1) and rings[1].reaches(0)
        self.ranks = [SharedMemory(rings[i], {1 - i: 1 - i}) for i in range(2)]
        ring = (nbytes - 4096) // 2
        self.words = [maps[0][0][ring:].view(np.uint32), maps[1][1].view(np.uint32)]

    def send(self, table, kept, tag=7):
        return self.ranks[0].send(table, kept, 1, tag)

    def recv(self, table, kept, tag=7):
        return self.ranks[1].recv(table, kept, 0, tag)


def wait(work, seconds=20.0):
    work.wait(timedelta(seconds=seconds))


def wait_in_vain(work):
    with pytest.raises(RuntimeError, match="it closed its connections"):
        wait(work)


def move(pair, sent, received):
    """Wait for a send and a receive, each in its thread."""
    thread = threading.Thread(target=wait, args=(sent,))
    thread.start()
    wait(received)
    thread.join()


def table_of(arrays, boxes):
    """The table of boxes, each of its array."""
    parts = []
    for array, box in zip(arrays, boxes, strict=True):
        strides = [array.element_size() * stride for stride in array.stride()]
        parts.append(split_box(strides, array.element_size(), box))
    table = tabulate_boxes(parts)
    table[:, 0] += [array.data_ptr() for array in arrays]
    return table


def test_boxes_of_any_strides_arrive_whole():
    generator = np.random.default_rng(5)
    pair = Pair()
    for _ in range(60):
        arrays, boxes, outs, places = [], [], [], []
        for _ in range(generator.integers(1, 4)):
            shape = generator.integers(1, [9, 40, 700][: generator.integers(1, 4)] + np.array(0), dtype=int).tolist()
            larger = [size + int(generator.integers(0, 5)) for size in shape]
            start = [int(generator.integers(0, big - size + 1)) for big, size in zip(larger, shape, strict=True)]
            order = generator.permutation(len(shape)).tolist()
            array = torch.from_numpy(generator.integers(0, 2**31, larger)).int().permute(order)
            array = array.contiguous() if generator.random() < 0.3 else array
            box = tuple(slice(start[d], start[d] + shape[d]) for d in order)
            arrays.append(array)
            boxes.append(box)
            outs.append(torch.full([shape[d] + 2 for d in order], -1, dtype=torch.int32))
            places.append(tuple(slice(1, 1 + shape[d]) for d in order))
        received = pair.recv(table_of(outs, places), outs)
        move(pair, pair.send(table_of(arrays, boxes), arrays), received)
        for array, box, out, place in zip(arrays, boxes, outs, places, strict=True):
            assert torch.equal(out[place], array[box])
            out[place] = -1
            assert bool((out == -1).all())  # nothing around the box was written


def test_messages_of_a_tag_arrive_in_order_and_tags_do_not_wait_for_each_other():
    pair, size = Pair(), 3 * SLOT_BYTES + 5
    sent = [torch.full((size,), value, dtype=torch.uint8) for value in (1, 2, 3)]
    outs = [torch.zeros(size, dtype=torch.uint8) for _ in sent]
    posted = [pair.send(tabulate_buffers([item]), item, tag) for item, tag in zip(sent, (4, 4, 9), strict=True)]
    last = pair.recv(tabulate_buffers([outs[2]]), outs[2], 9)
    move(pair, posted[2], last)  # although the receiver has not asked for the messages before it
    received = [pair.recv(tabulate_buffers([out]), out, 4) for out in outs[:2]]
    move(pair, posted[0], received[0])
    move(pair, posted[1], received[1])
    assert [out.unique().tolist() for out in outs] == [[1], [2], [3]]


def test_more_receives_than_grants_fit():
    pair = Pair()
    sent, outs = (torch.arange(200, dtype=torch.int32) * factor for factor in (1, 0))
    received = [pair.recv(tabulate_buffers([out.view(torch.uint8)]), out) for out in outs.split(1)]
    posted = [pair.send(tabulate_buffers([item.view(torch.uint8)]), item) for item in sent.split(1)]
    for work, other in zip(posted, received, strict=True):
        move(pair, work, other)
    assert torch.equal(sent, outs)


def test_close_ends_waits_on_both_ranks_and_the_arrays_stay_as_they_are():
    pair, size = Pair(), 100 * SLOT_BYTES
    sent, out = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    received, posted = pair.recv(tabulate_buffers([out]), out), pair.send(tabulate_buffers([sent]), sent)
    errors = []

    def run(work):
        try:
            wait(work)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run, args=(work,)) for work in (posted,)]
    threads[0].start()
    pair.ranks[1].close()  # the receiver gives up with slots that it has not emptied
    kept = out.clone()
    threads[0].join(5)
    run(received)
    assert errors == ["it closed its connections", "the connection was closed"]
    assert torch.equal(out, kept)
    with pytest.raises(RuntimeError, match="the connection was closed"):
        pair.recv(tabulate_buffers([out]), out)


def test_each_close_and_each_error_comes_after_the_last_copy():
    """While one thread copies a slot and a second one closes, a third closes too, and a fourth waits for another rank."""
    stride = 2**10
    out, sent = torch.zeros(SLOT_BYTES * stride, dtype=torch.uint8), torch.ones(SLOT_BYTES, dtype=torch.uint8)

    def wait_and_look(work, seen):
        with pytest.raises(RuntimeError, match="closed"):
            wait(work)
        seen.append(int(out[::stride].sum()))

    for _ in range(3):
        pair = Pair()
        slow = np.array([[out.data_ptr(), 1, SLOT_BYTES, stride]])  # a page for every four bytes
        received, other = pair.recv(slow, out, 7), pair.recv(tabulate_buffers([sent]), sent, 8)
        wait(pair.send(tabulate_buffers([sent]), sent, 7))
        seen: list[int] = []
        threads = [threading.Thread(target=wait, args=(received,))]
        threads[0].start()
        while not out[0]:
            pass
        threads.append(threading.Thread(target=wait_and_look, args=(other, seen)))
        threads.append(threading.Thread(target=pair.ranks[1].close))
        for thread in threads[1:]:
            thread.start()
        pair.ranks[1].close()
        seen.append(int(out[::stride].sum()))
        for thread in threads:
            thread.join()
        assert seen == [SLOT_BYTES] * 2
        out.zero_()


def test_what_a_rank_sent_before_it_closed_arrives_although_another_thread_is_copying_it():
    size = 4 * SLOT_BYTES  # all of it fits the slots, so the sender is done at once
    sent, out = torch.ones(size, dtype=torch.uint8), torch.zeros(2 * size, dtype=torch.uint8)
    for _ in range(20):
        pair = Pair()
        slow = np.array([[out.data_ptr(), 1, size, 2]])  # single bytes
        received, other = pair.recv(slow, out, 7), pair.recv(tabulate_buffers([sent]), sent, 8)
        wait(pair.send(tabulate_buffers([sent]), sent, 7))
        pair.ranks[0].close()
        thread = threading.Thread(target=wait_in_vain, args=(other,))
        thread.start()
        wait(received)
        thread.join()
        assert torch.equal(out[::2], sent)
        out.zero_()


def test_wait_without_the_other_rank_ends_in_time():
    pair, out = Pair(), torch.zeros(SLOT_BYTES + 1, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"it has not ended after 0\.2 s"):
        wait(pair.recv(tabulate_buffers([out]), out), 0.2)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ({PRODUCED: 5}, "too many slots"),
        ({PRODUCED: 1, FRAME: 8, FRAME + 1: 4}, "a message that nothing waits for"),
        ({PRODUCED: 1, FRAME: 7, FRAME + 1: SLOT_BYTES + 1}, "another number of bytes"),
        ({PRODUCED: 1, FRAME: 7, FRAME + 1: 101}, "another number of bytes"),
    ],
)
def test_receiver_checks_what_it_reads(damage, text):
    pair, out = Pair(), torch.zeros(200, dtype=torch.uint8)
    received = pair.recv(tabulate_buffers([out[:100]]), out)
    for word, value in damage.items():
        pair.words[0][word] = value
    with pytest.raises(RuntimeError, match=text):
        wait(received)
    assert not out.any()


def test_sender_checks_what_it_reads():
    for damage, text in ((65, "too many grants"), (0, "expects another number of bytes")):
        pair, sent = Pair(), torch.zeros(200, dtype=torch.uint8)
        pair.recv(tabulate_buffers([sent[:100]]), sent)
        if damage:
            pair.words[0][GRANTED] = damage
        with pytest.raises(RuntimeError, match=text):
            wait(pair.send(tabulate_buffers([sent]), sent))


def test_forked_child_does_not_close_the_connections_of_its_parent():
    pair = Pair()
    child = os.fork()
    if child == 0:
        pair.ranks[0].close()
        os._exit(0)
    os.waitpid(child, 0)
    sent, out = torch.ones(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    received = pair.recv(tabulate_buffers([out]), out)
    move(pair, pair.send(tabulate_buffers([sent]), sent), received)
    assert torch.equal(sent, out)


def end_without_memory(size):
    """The exit status of a child whose segment has memory for ``size`` bytes only."""
    child = os.fork()
    if child == 0:
        nbytes = _native.ring_segment_bytes(2)
        file = os.memfd_create("small")
        os.ftruncate(file, nbytes)
        segments = [np.frombuffer(mmap.mmap(file, nbytes), dtype=np.uint8) for _ in range(2)]
        other = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
        os.ftruncate(file, size)
        status = 1
        try:
            rings = _native.Rings(segments[0], 0)
            rings.add(1, other, os.getpid())
            status = 2
            rings.send(1, 7, tabulate_buffers([torch.zeros(9, dtype=torch.uint8)]))
        except MemoryError:
            status += 10
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_too_little_memory_is_an_error_and_not_a_signal():
    ring = (_native.ring_segment_bytes(2) - 4096) // 2
    assert end_without_memory(4096) == 11  # before ranks connect, so they use sockets
    assert end_without_memory(4096 + ring + 4096) == 12  # a send

    class FullRings:
        def send(self, *_):
            raise MemoryError

    with pytest.raises(ResourceError, match="for 1 MiB that is shared with rank 1; RESHARD_SHARED_MEMORY=0"):
        SharedMemory(FullRings(), {1: 1}).send(None, None, 1, 7)


def test_tables_of_wrong_form_are_refused():
    pair, data = Pair(), torch.zeros(8, dtype=torch.uint8)
    for table, text in (
        ([[data.data_ptr()]], "a row has an address"),
        ([[data.data_ptr(), 8, 1]], "pairs of a count"),
        ([[data.data_ptr(), -8]], "a length is negative"),
    ):
        with pytest.raises(ValueError, match=text):
            pair.send(np.array(table, dtype=np.int64), data)
