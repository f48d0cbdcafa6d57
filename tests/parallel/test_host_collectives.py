"""Collectives through the memory that the ranks of a host share: their bits, faults, and what they leave behind."""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.emulation.namespaces import why_unsupported
from microbench.parallel.grid_links import measure_shared_memory
from reshard import _native
from reshard.coordination.device_mesh import new_group
from reshard.errors import DisagreementError, RemoteError, ReshardError
from reshard.parallel import Grid
from reshard.parallel.grid import host_collectives
from reshard.parallel.grid.grid_axis import Axis
from reshard.runtime.torch_compat import timeout_of
from reshard.testing import LaunchError, run_processes
from reshard.topology import Topology

pytestmark = pytest.mark.skipif(not hasattr(_native, "create_memory"), reason="shared memory needs Linux")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64)


def make_axis(rank, hosts, order=None, seconds=60.0):
    ranks = list(order or range(len(hosts)))
    axis = Axis("row", new_group(sorted(ranks), timedelta(seconds=seconds), "gloo"), ranks, ranks.index(rank))
    axis.split_by_host(hosts)
    return axis


def start_collectives(axis, seed, count):
    """Start gathers, sums and exchanges of random sizes and dtypes, the same on two axes of the same ranks."""
    shared, own = random.Random(seed), torch.Generator().manual_seed(100 * seed + axis.index)
    pending = []
    for _ in range(count):
        sizes = [shared.choice([0, 1, 3, 50, 4000]) for _ in range(axis.size)]
        dtype, kind = shared.choice(DTYPES), shared.randrange(3)
        table = [[shared.choice([0, 2, 77]) for _ in range(axis.size)] for _ in range(axis.size)]
        if kind == 2:
            sent = torch.randn(sum(table[axis.index]), generator=own).mul(100).to(dtype)
            received = [row[axis.index] for row in table]
            pending.append(axis.start_exchange(sent, table[axis.index], received))
            continue
        array = torch.randn(sum(sizes), 3, generator=own).mul(100).to(dtype)
        if kind == 0:
            pending.append(axis.all_gather(array.split(sizes)[axis.index], sizes))
        else:
            pending.append(axis.reduce_scatter(array, sizes))
    return pending


def check_bits(rank):
    torch.set_num_threads(1)
    slow, fast = make_axis(rank, [0, 1, 2, 3], [2, 0, 3, 1]), make_axis(rank, [5] * 4, [2, 0, 3, 1])
    assert not slow.shares_memory
    assert fast.shares_memory
    with torch.inference_mode():
        fast.sum(torch.ones(3))
    for seed in range(3):
        expected = [start_collective.wait() for start_collective in start_collectives(slow, seed, 100)]
        pending = list(enumerate(start_collectives(fast, seed, 100)))
        random.Random(rank).shuffle(pending)  # every rank waits in an order of its own
        for number, item in pending:
            found = item.wait()
            assert found.dtype == expected[number].dtype
            assert torch.equal(found, expected[number])
            assert item.wait() is found


@pytest.mark.integration
def test_many_collectives_under_way_have_the_bits_of_gloo():
    run_processes(check_bits, 4)


def check_reuse(rank):
    axis = make_axis(rank, [0, 0])
    ends = []
    for _ in range(10):
        start_collectives(axis, 7, 100)  # nobody waits for them
        for _ in range(10):
            axis.sum(torch.ones(1000))
        gc.collect()
        ends.append(axis._memory._end)
    assert ends[-1] < 3 * ends[0], ends  # a rank may be one round behind
    waiting = [axis.all_gather(torch.ones(1), [1, 1]) for _ in range(10)]
    with pytest.raises(ReshardError, match="started 1024 collectives before ranks 0-1 all waited"):
        waiting += [axis.all_gather(torch.ones(1), [1, 1]) for _ in range(2000)]
    return len(waiting)


@pytest.mark.nightly
def test_buffers_are_reused_also_those_of_results_that_nobody_waits_for():
    run_processes(check_reuse, 2)


def check_mismatch(rank):
    axis = make_axis(rank, [0, 0, 0])
    size = 2 if rank == 1 else 3
    with pytest.raises(
        DisagreementError, match=r"called all_gather with \d+ bytes for rank \d, which called all_gather and"
    ):
        axis.all_gather(torch.ones(size), [size] * 3).wait()
        axis.all_gather(torch.ones(size), [size] * 3).wait()
    with pytest.raises(RemoteError, match="make a new grid"):
        axis.all_gather(torch.ones(1), [1] * 3)


@pytest.mark.integration
def test_sizes_that_differ_are_an_error_that_names_both_ranks():
    run_processes(check_mismatch, 3)


def check_spread(rank):
    """Ranks 0 and 1 fail. Ranks 2 and 3 wait for them in collectives of another axis."""
    grid = Grid.make(2, 2, timeout_seconds=100)
    begun = time.monotonic()
    with pytest.raises(DisagreementError, match=r"rank \d called all_gather with \d+ bytes for rank \d"):
        if rank < 2:
            grid.along("col").all_gather(torch.ones(1 + rank), [1 + rank] * 2).wait()
        else:
            grid.along("row").sum(torch.ones(1))
    assert time.monotonic() - begun < 30
    dist.barrier()  # ranks 0 and 1 stay, so that nobody notices an end of them


@pytest.mark.integration
def test_ranks_that_wait_for_a_failed_one_raise_its_error_at_once():
    run_processes(check_spread, 4)


def check_killed(rank):
    axis = Grid.make(1, 3, timeout_seconds=100).along("col")
    axis.sum(torch.ones(1))
    begun = time.monotonic()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RemoteError, match="rank 1 is gone"):
        axis.sum(torch.ones(1))
    assert time.monotonic() - begun < 30
    raise ValueError(f"rank {rank} named it")


@pytest.mark.integration
def test_a_killed_rank_is_named_long_before_the_timeout():
    with pytest.raises(LaunchError) as caught:
        run_processes(check_killed, 3, timeout_seconds=60, grace_seconds=30)
    assert all(f"rank {rank} named it" in str(caught.value) for rank in (0, 2))


def check_late(rank):
    axis = make_axis(rank, [0, 0], seconds=2.0)
    if rank == 0:
        with pytest.raises(RemoteError, match="rank 1 did not start it within 2 s"):
            axis.sum(torch.ones(1))
    else:
        time.sleep(4.0)


@pytest.mark.integration
def test_a_rank_that_does_not_come_is_named_after_the_timeout():
    run_processes(check_late, 2)


def shared_descriptors():
    links = [Path(f"/proc/self/fd/{path}") for path in os.listdir("/proc/self/fd")]
    return sum("memfd:reshard" in str(link.readlink()) for link in links if link.is_symlink())


def shared_mappings():
    return Path("/proc/self/maps").read_text().count("memfd:reshard")


def check_leftovers(rank):
    for _ in range(5):
        grid = Grid.make(2, 2)
        grid.along("row").sum(torch.ones(10000))
        assert shared_descriptors() > 0
        assert shared_mappings() > 0
        del grid
        gc.collect()
    return shared_descriptors(), shared_mappings()


@pytest.mark.integration
def test_collected_grids_leave_no_descriptors_and_mappings():
    assert run_processes(check_leftovers, 4) == [(0, 0)] * 4


def check_fallback(rank, name):
    if rank == 1:
        setattr(host_collectives, name, refuse if name == "open_memory_file" else lambda *_, **__: -1)
    axis = make_axis(rank, [0, 0, 0])
    assert not axis.shares_memory
    assert axis.sum(torch.tensor([rank])).item() == 3
    return shared_descriptors()


def refuse(*_, **__):
    raise PermissionError("another pid namespace")


@pytest.mark.integration
@pytest.mark.parametrize("name", ["open_memory_file", "create_memory_file"])
def test_all_ranks_use_gloo_if_one_cannot_share_memory(name):
    assert run_processes(check_fallback, 3, name) == [0] * 3


def refuse_memory(*_):
    raise OSError(errno.ENOSPC, "the system commits no more memory")


def check_limits(rank, kind):
    if rank == 1 and kind == "before":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    store = dist.distributed_c10d._get_default_store()
    axis = make_axis(rank, [0, 0])
    assert axis.sum(torch.ones(2)).tolist() == [2.0, 2.0]
    assert axis.shares_memory == (kind != "before")
    if kind == "before":
        return
    part = torch.ones(10_000_000)
    if rank == 1 and kind == "file":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    elif rank == 1 and kind == "committed":
        host_collectives.os.posix_fallocate = refuse_memory
    elif rank == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000,) * 2)  # enough for the result alone
    expected = r"rank 1 cannot map \d+ bytes" if rank else "a collective of the grid failed on rank 1"
    with pytest.raises(ReshardError, match=expected):
        axis.all_gather(part, [len(part)] * 2).wait()
    with pytest.raises(RemoteError, match="make a new grid"):
        axis.all_gather(torch.ones(1), [1, 1])
    store.set(f"seen by {rank}", "")
    store.wait(["seen by 0"], timedelta(seconds=60))  # rank 0 must not see that rank 1 has ended


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["before", "file", "memory", "committed"])
def test_limits_of_a_process_are_named_and_before_the_grid_they_mean_gloo(kind):
    run_processes(check_limits, 2, kind)


def check_levels(rank):
    layer = Grid.make(2, 2, timeout_seconds=77).along("layer")
    assert layer.shares_memory
    assert timeout_of(layer.make_twin("made a grid").group) == 77  # which has its own process group
    axis = make_axis(rank, [0, 0, 1, 1])
    return [item.shares_memory for item in (axis, axis.levels.inside, axis.levels.between)]


@pytest.mark.integration
def test_ranks_of_different_hosts_share_no_memory():
    assert run_processes(check_levels, 4) == [[False, True, False]] * 4


def find_sharing_axes(rank, report):
    grid = Grid.make(2, 2)
    dist.barrier()  # a rank must not end while others connect to it
    return [axis for axis in ("row", "col", "layer") if grid.along(axis).shares_memory]


@pytest.mark.cluster
@pytest.mark.skipif(why_unsupported() is not None, reason=str(why_unsupported()))
def test_ranks_of_an_emulated_host_share_memory_and_no_others():
    for hosts, expected in (([0, 0, 1, 1], ["col"]), ([0, 1, 2, 3], [])):
        with EmulatedCluster(Topology.uniform(hosts, 50e6)) as cluster:
            assert cluster.run(find_sharing_axes) == [expected] * 4


@pytest.mark.nightly
@pytest.mark.cluster
@pytest.mark.skipif(why_unsupported() is not None, reason=str(why_unsupported()))
def test_the_rate_of_shared_memory_is_measured_where_ranks_have_it():
    for hosts, has_rate in (([0, 1, 1], True), ([0, 1], False)):
        topology = Topology.uniform(hosts, 50e6)
        with EmulatedCluster(topology) as cluster:
            rates = cluster.run(measure_shared_memory, topology)
        assert rates == rates[:1] * len(hosts)
        assert (rates[0] is not None and 5e7 < rates[0] < 1e12) == has_rate
