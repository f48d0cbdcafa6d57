"""Native code compared with its reference implementations in the tests folder, and the computation of unit tasks."""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np

from reshard import _native
from reshard.cli.progress_bars import print_line, track
from reshard.cost import flow, network_of
from reshard.cost.serial_ports import serial_seconds
from reshard.plan import tabulate_messages
from reshard.planner import NO_RANK, PlanProblem, make_plan, plan_tensors
from reshard.planner.multicast.classes import Classes, group_rows
from reshard.planner.strategies.chunk_limits import INSIDE_WINDOW, WINDOW
from reshard.runtime.byte_runs import copy_runs
from reshard.scheduler import Pipeline, auto_schedule, simulate_schedule
from reshard.scheduler.ir.communication import add_transfers
from reshard.scheduler.schedules.list_scheduling import DispatchRule
from reshard.scheduler.schedules.orders import OrderModel
from reshard.sharding import Layout, Mesh, TensorSpec
from reshard.topology import Topology
from tests.reference.byte_runs import copy_runs_python
from tests.reference.exchange import direct_loads_python, number_rows_python, rotate_python
from tests.reference.fluid import flow_python
from tests.reference.list_scheduling import order_greedily
from tests.reference.serial_ports import serial_seconds_python


def _median_seconds(function: Callable[[], object], repeats: int = 15) -> float:
    """The median CPU time of calls after the first one."""
    times = []
    for _ in range(repeats + 1):
        begun = time.process_time()
        function()
        times.append(time.process_time() - begun)
    return statistics.median(times[1:])


def copies() -> None:
    """Time ``copy_runs`` on 1 MiB in runs of 16 bytes to 64 KiB."""
    print("copy_runs, 1 MiB          native    python speed-up")
    src, dst = np.ones(2**22, dtype=np.uint8), np.zeros(2**20, dtype=np.uint8)
    for run in track((16, 64, 256, 1024, 4096, 65536), "sizes"):
        count = 2**20 // run
        src_offsets = np.arange(count, dtype=np.int64) * run * 4
        dst_offsets = np.arange(count, dtype=np.int64) * run
        length = np.full(count, run, dtype=np.int64)
        python = _median_seconds(lambda a=src_offsets, b=dst_offsets, n=length: copy_runs_python(src, dst, a, b, n))  # type: ignore[misc]
        native = _median_seconds(lambda a=src_offsets, b=dst_offsets, n=length: copy_runs(src, dst, a, b, n))  # type: ignore[misc]
        print_line(f"{run:6} bytes/run    {1e3 * native:8.3f} ms {1e3 * python:8.3f} ms {python / native:6.1f}")


def simulator() -> None:
    """Time the simulation of default plans: 2 GiB from 2 to 16 hosts of 4 devices to as many others."""
    print("simulate                  native    python speed-up")
    for hosts in track((2, 4, 8, 16), "plans"):
        src = Layout(Mesh.of((hosts, 4)), "R S01 R")
        dst = Layout(Mesh.of((hosts, 4), first_rank=4 * hosts), "S0 R R")
        topology = Topology(tuple(rank // 4 for rank in range(8 * hosts)))
        plan = make_plan(src, dst, (1024, 1024, 512), "float32", topology=topology)
        messages = tabulate_messages(plan)
        network = network_of(plan, messages, np.flatnonzero(messages.sender != messages.receiver), topology)
        python = _median_seconds(lambda network=network: flow_python(network), 3)  # type: ignore[misc]
        title = f"{2 * hosts:3} hosts {len(messages):6} messages"
        native = _median_seconds(lambda network=network: flow(network), 5)  # type: ignore[misc]
        print_line(f"{title} {1e3 * native:6.1f} ms {1e3 * python:6.0f} ms {python / native:6.1f}")


def exchanges() -> None:
    """Time the loops of large exchanges on ``S0 R`` -> ``R S0`` between 32 to 128 ranks of hosts of 8."""
    print("loops of exchanges                      native    python speed-up")
    for ranks in track((32, 64, 128), "exchanges"):
        src, dst = Layout(Mesh.of(ranks), "S0 R"), Layout(Mesh.of(ranks, first_rank=ranks), "R S0")
        topology = Topology(tuple(rank // 8 for rank in range(2 * ranks)))
        spec = TensorSpec((4096, 4096), "float32", src, dst)
        problem = PlanProblem.of([spec], topology)
        plan = plan_tensors([spec], topology=topology, strategy="send_recv")
        rows = np.concatenate([problem.receivers // 8, problem.holders // 8], axis=1)
        for name, native, python in (
            ("rotate", *_rotation(problem)),
            ("add_direct_loads", *_direct_loads(problem)),
            ("number_rows", lambda rows=rows: group_rows(rows), lambda rows=rows: number_rows_python(rows)),
            ("flow_serially", lambda plan=plan: serial_seconds(plan), lambda plan=plan: serial_seconds_python(plan)),
        ):
            fast, slow = _median_seconds(native, 5), _median_seconds(python, 3)
            print_line(
                f"{name:16} {ranks:4} ranks {ranks**2:6} messages {1e3 * fast:8.2f} ms {1e3 * slow:6.0f} ms "
                f"{slow / fast:6.1f}"
            )


def _rotation(problem: PlanProblem) -> tuple[Callable[[], object], Callable[[], object]]:
    """The rotation of a problem by native code and by the reference."""
    classes, topology = Classes.of(problem), problem.topology
    holder, piece_offsets = classes.holders[:, 0].copy(), np.arange(len(classes) + 1)
    count = int((classes.receivers != NO_RANK).sum())
    outputs = [np.empty(count, dtype=np.int64) for _ in range(4)]
    after = [np.empty(size, dtype=np.int64) for size in (count + 1, 2 * count, count)]
    host, total_bytes = topology.host_array, float(classes.nbytes.sum())
    inputs = np.ascontiguousarray(classes.receivers), holder, classes.nbytes, piece_offsets, host, host

    def native() -> object:
        return _native.rotate(*inputs, topology.num_hosts, True, total_bytes, WINDOW, INSIDE_WINDOW, *outputs, *after)

    return native, lambda: rotate_python(classes, holder.tolist(), piece_offsets.tolist(), topology, True, total_bytes)


def _direct_loads(problem: PlanProblem) -> tuple[Callable[[], object], Callable[[], object]]:
    """The loads of direct sends by native code and by the reference."""
    holder, host = np.ascontiguousarray(problem.holders[:, 0]), problem.topology.host_array
    loads = [np.zeros(problem.topology.num_hosts) for _ in range(3)]
    inputs = holder, np.ascontiguousarray(problem.receivers), problem.nbytes, host, host
    return lambda: _native.add_direct_loads(*inputs, *loads), lambda: direct_loads_python(problem)


def pipelines() -> None:
    """Time list scheduling and the makespan of its order, and ``auto_schedule``: CPU seconds."""
    print("schedules                 native    python speed-up, auto_schedule")
    for num_stages, num_microbatches in track(((4, 16), (16, 64), (64, 256)), "pipelines"):
        pipeline = Pipeline.of_costs(
            [1.0 + s / 100 for s in range(num_stages)], [2.0] * num_stages, [0.25] * (num_stages - 1)
        )
        model, rows = OrderModel(pipeline, range(num_stages), num_microbatches), range(num_stages)
        policy = DispatchRule((num_microbatches,) * num_stages, (num_stages,) * num_stages, (True,) * num_stages)
        begun = time.process_time()
        order = order_greedily(pipeline, num_microbatches, rows, policy)
        simulate_schedule(add_transfers("listed", order, pipeline, rows, num_microbatches), pipeline)
        listed = time.process_time()
        native_order = model.order(policy)
        assert native_order is not None
        model.makespan_seconds(native_order)
        native = time.process_time()
        assert model.actions(native_order) == order
        compared = time.process_time()
        auto_schedule(pipeline, num_microbatches)
        done = time.process_time()
        title = f"{num_stages:3} stages {num_microbatches:4} microbatches"
        print_line(
            f"{title} {1e3 * (native - listed):6.1f} ms {1e3 * (listed - begun):6.0f} ms "
            f"{(listed - begun) / (native - listed):6.1f} {done - compared:6.2f} s"
        )


def geometry() -> None:
    """Time the unit tasks of R S01 R -> S01 R R, where every source rank sends to every destination rank."""
    print("unit tasks of R S01 R -> S01 R R")
    for hosts in track((4, 16, 64, 256), "meshes"):
        src = Layout(Mesh.of((hosts, 4)), "R S01 R")
        dst = Layout(Mesh.of((hosts, 4), first_rank=4 * hosts), "S01 R R")

        def cut(src: Layout = src, dst: Layout = dst) -> int:
            return len(TensorSpec((4096, 4096, 512), "float32", src, dst).tasks)

        tasks = cut()
        seconds = _median_seconds(cut, 5)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print_line(
            f"{4 * hosts:5} -> {4 * hosts:4} ranks  {tasks:8} tasks  {1e3 * seconds:8.2f} ms  peak {peak:.0f} MiB"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add none."""


def run(options: argparse.Namespace) -> None:
    """Run all parts."""
    copies()
    simulator()
    exchanges()
    pipelines()
    geometry()
