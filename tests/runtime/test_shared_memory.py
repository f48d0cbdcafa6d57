"""Ranks of one host move large messages through shared memory, and over sockets where they cannot share any."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import reshard
from microbench.emulation.emulated_cluster import EmulatedCluster
from microbench.emulation.namespaces import why_unsupported
from reshard import Layout, Mesh, Topology
from reshard.cli.demo_transfers import count_unlike, shard_of_positions
from reshard.errors import TransferTimeoutError
from reshard.planner import plan_tensors
from reshard.runtime import build_program
from reshard.runtime.transport import GlooTransport, shared_memory
from reshard.sharding import TensorSpec
from reshard.testing.processes import LaunchError, run_processes
from reshard.topology.topology_files import topology_from_json

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux"),
    pytest.mark.integration,
]
SHAPE = (1024, 1536)
SRC, DST = Layout(Mesh.of(2), "S0 R"), Layout(Mesh.of(2, first_rank=2), "R S0")
ONE_HOST = Topology((0,) * 4)


def count_large_sends(nbytes=shared_memory.MIN_SHARED_BYTES):
    """The receivers of messages of at least so many bytes that this rank sends over sockets, as they are sent."""
    receivers, send = [], GlooTransport.send

    def count(self, buffer, rank, tag):
        receivers.extend([rank] * (buffer.numel() >= nbytes))
        return send(self, buffer, rank, tag)

    GlooTransport.send = count
    return receivers


def move(rank, src, dst, *, topology=ONE_HOST, **options):
    """Number of wrong elements after a transfer of positions."""
    source = shard_of_positions(src, rank, SHAPE, "float32")
    out = reshard.reshard(source, src, dst, shape=SHAPE, topology=topology, **options)
    return 0 if rank not in dst.ranks else count_unlike(out, shard_of_positions(dst, rank, SHAPE, "float32"))


def check_layouts(rank):
    sent = count_large_sends()
    cases = [
        (SRC, DST, ONE_HOST, {}),
        (Layout(Mesh.of(2), "R S0"), Layout(Mesh.of("2x2"), "S1 S0"), ONE_HOST, {"strategy": "send_recv"}),
        (SRC, Layout(Mesh.of(4), "R R"), ONE_HOST, {"strategy": "multicast"}),
    ]
    for verify in (False, True):
        for src, dst, topology, options in cases:
            assert move(rank, src, dst, topology=topology, verify=verify, **options) == 0, (src, dst, verify)
    assert sent == []  # nothing large went over a socket
    source = shard_of_positions(SRC, rank, SHAPE, "float32")
    cast = reshard.reshard(source, SRC, DST, shape=SHAPE, topology=ONE_HOST, dst_dtype="float64")
    whole = torch.zeros(2048, 2048)
    out = whole[: SHAPE[0], 7 : 7 + SHAPE[1] // 2] if rank in DST.ranks else None  # its rows are not contiguous
    reshard.reshard(source, SRC, DST, shape=SHAPE, topology=ONE_HOST, out=out)
    if rank in DST.ranks:
        expected = shard_of_positions(DST, rank, SHAPE, "float32")
        assert torch.equal(cast, expected.double())
        assert torch.equal(out, expected)
        assert whole.count_nonzero() == expected.count_nonzero()
    assert sent == []


def test_every_kind_of_message_arrives_through_shared_memory():
    run_processes(check_layouts, 4)


def check_relays(rank):
    sent = count_large_sends(2**14)
    src, dst = Layout(Mesh.of("2x2"), "R S01"), Layout(Mesh.of("2x2", first_rank=4), "S01 R")
    wide = topology_from_json({"hosts": [{"count": 4, "devices": 2, "nics": ["500 Mbit/s", "500 Mbit/s"]}]})
    options = {"strategy": "multicast", "topology": wide.without_latency()}
    plan = reshard.make_plan(src, dst, SHAPE, "float32", **options)
    relays = [recv for member in plan.ranks for recv in build_program(plan, member).recvs if recv.is_relay]
    assert relays
    shared_memory.MIN_SHARED_BYTES = 1  # these messages are small
    for verify in (False, True):
        assert move(rank, src, dst, verify=verify, **options) == 0
    assert sent == []


def test_relays_pass_messages_on_through_shared_memory():
    run_processes(check_relays, 8)


def refuse(*_, **__):
    raise PermissionError("another pid namespace")


def check_fallback(rank, reason):
    sent = count_large_sends()
    if rank == 2:
        if reason == "switch":
            os.environ[shared_memory.SHARED_MEMORY_VARIABLE] = "0"
        elif reason == "another machine":
            shared_memory.name_machine = lambda hostname: bytes(range(16))
        else:
            setattr(shared_memory, reason, refuse)
    assert move(rank, SRC, DST) == 0
    return set(sent)


@pytest.mark.parametrize("reason", ["switch", "another machine", "open_memory_file", "create_memory_file"])
def test_only_pairs_that_cannot_share_use_sockets(reason):
    """Rank 2 shares no memory, so that ranks 0 and 1 send to it over sockets, and to rank 3 as before."""
    assert run_processes(check_fallback, 4, reason) == [{2}, {2}, set(), set()]


def check_cut(rank):
    """Another process of the user opens the files as the ranks do, and tries to cut them."""
    sent, opened = count_large_sends(), shared_memory.open_memory_file

    def cut(*file, **options):
        descriptor = opened(*file, **options)
        with contextlib.suppress(PermissionError):
            os.ftruncate(descriptor, 0)
        return descriptor

    shared_memory.open_memory_file = cut
    assert move(rank, SRC, DST) == 0
    return sent


def test_cut_file_kills_no_rank():
    assert run_processes(check_cut, 4) == [[]] * 4


def find_sharing_ranks(rank, report):
    assert move(rank, SRC, Layout(Mesh.of(4), "R S0"), topology=Topology((0, 0, 1, 1))) == 0
    (call_group,) = [
        call_group for group in reshard.coordination.known_groups(None) for call_group in group.call_groups.values()
    ]
    shared = call_group._connections[1]._shared_memory
    return [other for other in range(4) if shared is not None and shared.carries(other, 2**20)]


@pytest.mark.cluster
@pytest.mark.skipif(why_unsupported() is not None, reason=str(why_unsupported()))
def test_ranks_share_memory_inside_emulated_hosts_only():
    with EmulatedCluster(Topology.uniform([0, 0, 1, 1], 50e6)) as cluster:
        assert cluster.run(find_sharing_ranks) == [[1], [0], [3], [2]]


def shared_files():
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    files = [link for link in links if link.is_symlink() and "memfd:reshard" in str(link.readlink())]
    ended = [link for link in links if link.is_symlink() and "pidfd" in str(link.readlink())]
    return len(files), len(ended), Path("/proc/self/maps").read_text().count("memfd:reshard")


def check_leftovers(rank):
    assert move(rank, SRC, DST) == 0
    assert shared_files() == (0, 3, 4)  # nobody can open a segment any more
    dist.barrier()
    reshard.close_group()
    gc.collect()
    return shared_files()


def test_closed_group_leaves_no_descriptors_and_mappings():
    assert run_processes(check_leftovers, 4) == [(0, 0, 0)] * 4


def _lose(rank, lost):
    """Rank ``lost`` ends during transfers of other ranks, who note the error and its time."""
    width = 2**20
    source = torch.ones(4, width) if rank < 2 else None
    with reshard.Mover(
        reshard.make_plan(SRC, DST, (8, width), "float32", topology=ONE_HOST), timeout_seconds=60
    ) as mover:
        mover(source)
        dist.barrier()
        if rank == lost:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        try:
            for _ in range(1000):
                mover(source)
        except reshard.ReshardError as error:
            return str(error), time.monotonic() - begun
    return "no error", 0.0


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_killed_rank_is_named(lost):
    with pytest.raises(LaunchError) as caught:
        run_processes(_lose, 4, lost, grace_seconds=30.0)
    results = caught.value.results
    assert sorted(results) == sorted({0, 1, 2, 3} - {lost})
    for text, seconds in results.values():
        assert f"rank {lost} is gone" in text, results
        assert seconds < 20.0, results  # a silent rank counts as lost after 30 s


def check_timeout(rank):
    plan = plan_tensors([TensorSpec(SHAPE, "float32", SRC, DST)], topology=ONE_HOST)
    source = shard_of_positions(SRC, rank, SHAPE, "float32")
    out = torch.full((SHAPE[0], SHAPE[1] // 2), -1.0) if rank in DST.ranks else None
    mover = reshard.Mover(plan, timeout_seconds=1.5)
    mover(source, out=out)
    if out is not None:
        out.fill_(-1.0)
    if rank == 1:
        time.sleep(3.0)  # longer than the others wait
    try:
        mover(source, out=out)
    except TransferTimeoutError:
        pass
    else:
        assert rank == 0  # its messages have left
    kept = None if out is None else out.clone()
    mover.close()
    dist.barrier()
    assert move(rank, SRC, DST) == 0  # over new connections
    assert kept is None or torch.equal(out, kept)  # nothing of the failed transfer arrives later


def test_timeout_ends_a_transfer_and_the_next_one_works():
    run_processes(check_timeout, 4)
