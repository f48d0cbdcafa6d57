"""Small contiguous messages are posted by the thread that starts a transfer, in order with those of other threads."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

from reshard import Layout, Mesh, Mover
from reshard.api.mover import start_checked
from reshard.api.transfers.queued_transfers import QueuedTransfers
from reshard.planner import plan_tensors
from reshard.runtime import build_program
from reshard.runtime.cpu import posted_program
from reshard.runtime.cpu.posted_program import MAX_POSTED_BYTES, make_posted_program
from reshard.runtime.transport import MIN_SHARED_BYTES
from reshard.sharding import TensorSpec
from reshard.testing import run_processes


def make_plan(shape, src="R R", dst="R R", src_ranks=(0,), dst_ranks=(1,)):
    return plan_tensors([TensorSpec(shape, "float32", Layout(Mesh(src_ranks), src), Layout(Mesh(dst_ranks), dst), "x")])


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        (make_plan((4, 8)), {0, 1}),
        (make_plan((4, 8), dst="S0 R", dst_ranks=(1, 2)), {0, 1, 2}),  # parts of the source, each one run
        (make_plan((4, 8), dst="R S0", dst_ranks=(1, 2)), {1, 2}),  # columns: the sender packs them
        (make_plan((MAX_POSTED_BYTES // 16, 8)), set()),  # too large
        (make_plan((4, 8), dst_ranks=(0, 1)), {1}),  # rank 0 also copies inside
    ],
)
def test_only_small_programs_of_contiguous_messages_are_direct(plan, ranks):
    assert {rank for rank in plan.ranks if make_posted_program(plan, build_program(plan, rank)) is not None} == ranks


def test_no_message_of_a_direct_program_is_large_enough_for_shared_memory():
    """One end may post it here and the other in the executor, and both must take the same way."""
    assert MAX_POSTED_BYTES < MIN_SHARED_BYTES


def move_in_turns(rank):
    """Send 0, 1, 2, ... by starts that post at once, and by starts whose source is not contiguous, in turns."""
    plan = make_plan((4, 8))
    with Mover(plan, timeout_seconds=30) as mover:
        handles = []
        for number in range(9):
            if rank:
                handles.append(start_checked(mover))
                continue
            source = torch.full((4, 8), float(number)) + torch.arange(8.0)
            if number % 3 == 1:
                source = source.t().contiguous().t()
            handles.append(start_checked(mover, {"x": source}) if number % 2 else mover.start({"x": source}))
        return [handle.wait()["x"] for handle in handles]


def test_transfers_keep_their_order_whoever_posts_them():
    sent, received = run_processes(move_in_turns, 2)
    assert sent == [None] * 9
    for number, array in enumerate(received):
        assert torch.equal(array, torch.full((4, 8), float(number)) + torch.arange(8.0))


def start_behind(rank):
    """Start a transfer that the thread posts, one that waits behind it, and one more when the first has ended."""
    run = QueuedTransfers.run

    def run_late(*args):
        time.sleep(0.1)
        return run(*args)

    QueuedTransfers.run = run_late
    with Mover(make_plan((4, 8)), timeout_seconds=30) as mover:
        sources = [None if rank else {"x": torch.full((4, 8), float(number))} for number in range(3)]
        if rank == 0:
            sources[0]["x"] = sources[0]["x"].t().contiguous().t()
        handles = [start_checked(mover, sources[0]), start_checked(mover, sources[1])]
        handles[0].wait()
        handles.append(start_checked(mover, sources[2]))
        received = [handle.wait()["x"] for handle in handles]
    return [float(array.max()) for array in received] if rank else None


def test_a_start_does_not_overtake_one_that_waits_for_the_thread():
    assert run_processes(start_behind, 2) == [None, [0.0, 1.0, 2.0]]


def receive_after_arrival(rank):
    """Receive messages that have arrived, and one that ends as a buffer does whose message has not."""
    plan = make_plan((4, 8))
    marked = torch.arange(32.0).reshape(4, 8)
    marked.view(torch.int64)[-1, -1] = ctypes.c_int64(posted_program._MARK).value
    with Mover(plan, timeout_seconds=30) as mover:
        sources = [torch.full((4, 8), 5.0), marked]
        handles = [start_checked(mover, None if rank else {"x": source}) for source in sources]
        used_thread, arrays = [], []
        for handle in handles:
            deadline = time.monotonic() + (10 if not arrays else 1)
            while rank and not handle.posted.has_arrived() and time.monotonic() < deadline:
                time.sleep(0.01)
            arrays.append(handle.wait())
            used_thread.append(mover._transfers._thread is not None)
        return used_thread, arrays, marked


def test_a_message_that_has_arrived_wakes_no_thread():
    used_thread, (first, second), marked = run_processes(receive_after_arrival, 2)[1]
    assert used_thread == [False, True]
    assert torch.equal(first["x"], torch.full((4, 8), 5.0)) and torch.equal(second["x"], marked)


def keep_sends(rank):
    """Start many sends before the receiver posts. Returns how many were kept, at most."""
    plan = make_plan((4, 8))
    with Mover(plan, timeout_seconds=30) as mover:
        if rank:
            time.sleep(0.5)
            return [start_checked(mover).wait()["x"][0, 0].item() for _ in range(100)]
        handles, kept = [], 0
        for number in range(100):
            handles.append(start_checked(mover, {"x": torch.full((4, 8), float(number))}))
            kept = max(kept, len(mover._transfers._unqueued))
        for handle in handles:
            handle.wait()
        return kept


def test_the_thread_waits_for_old_sends_so_that_their_arrays_are_freed():
    kept, received = run_processes(keep_sends, 2)
    assert kept < 32 and received == list(range(100))


def start_wrong(rank):
    plan = make_plan((4, 8))
    with Mover(plan, timeout_seconds=30) as mover:
        with pytest.raises(Exception) as caught:
            start_checked(mover, None if rank else {"x": torch.zeros(4, 7)}).wait()
        return str(caught.value)


def test_a_checked_start_refuses_a_wrong_shape_on_all_ranks():
    assert all(
        "float32 [4, 7], but its shard in the source is float32 [4, 8]" in text
        for text in run_processes(start_wrong, 2)
    )
