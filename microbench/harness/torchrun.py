"""Run the benchmark rows on real machines, in a job with one process per device started by ``torchrun``."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from microbench.cases.rows import Row
from microbench.harness.benchmark_rank import BenchmarkJob, run_jobs
from microbench.harness.calibrate import measure_links, measured_topology
from microbench.harness.suite import Planned, Record, compare_links, make_records, plan_row
from reshard.cli.progress_bars import show_progress
from reshard.errors import TopologyError
from reshard.topology import Host, Link, Topology, parse_rate, read_topology, topology_to_json


def _join_job(topology_file: Path | None, rate: str) -> tuple[int, Topology]:
    """Join the world group; returns this process's rank and the expected topology.

    Raises:
        TopologyError: the file does not have the job's number of ranks.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    rank, size = dist.get_rank(), dist.get_world_size()
    if topology_file is None:
        names: list[Any] = [None] * size
        dist.all_gather_object(names, socket.gethostname())
        hosts = (Host((Link.of(parse_rate(rate)),)),)
        topology = Topology(Topology.from_hostnames(names).host_of_rank, hosts)
    else:
        topology = read_topology(topology_file)
    if len(topology.host_of_rank) != size:
        raise TopologyError(
            f"the topology has {len(topology.host_of_rank)} ranks, but the job has {size}; fix --topology"
        )
    return rank, topology


def _measure(rank: int, topology: Topology) -> Topology:
    return measured_topology(topology, measure_links(rank, lambda value: None, topology))


def write_topology(out: Path, topology_file: Path | None, rate: str, log: Callable[[str], None]) -> None:
    """Measure the links between the job's hosts and write them as a topology file.

    Args:
        out: the file that rank 0 writes.
        topology_file, rate: hosts, NICs and pods, as in :func:`run_on_machines`.

    Raises:
        TopologyError: the file does not have the job's number of ranks, or all ranks are on one host.
    """
    rank, topology = _join_job(topology_file, rate)
    if topology.num_hosts == 1:
        raise TopologyError(
            f"all {len(topology.host_of_rank)} ranks are on one host ({socket.gethostname()}), so there is no link "
            "between hosts to measure; start the job on several hosts"
        )
    links = _measure(rank, topology)
    if rank == 0:
        out.write_text(json.dumps(topology_to_json(links), indent=1) + "\n")
        log(f"{len(links.host_of_rank)} ranks on {links.num_hosts} hosts; wrote the topology to {out}")
    dist.barrier()
    dist.destroy_process_group()


def run_on_machines(
    rows: Sequence[Row],
    contenders: Sequence[str],
    repeats: int,
    write: Callable[[Record], None],
    log: Callable[[str], None],
    topology_file: Path | None,
    rate: str,
) -> None:
    """Run the rows on the job's ranks. Only rank 0 calls ``write`` and ``log``.

    Args:
        rows, contenders, repeats: as on an emulated cluster; rows that need more ranks are skipped.
        topology_file: expected link rates. If None, ranks with equal host names share a host with one NIC of ``rate``.

    Raises:
        TopologyError: the file does not have the job's number of ranks.
    """
    rank, topology = _join_job(topology_file, rate)
    size = len(topology.host_of_rank)
    fitting = [row for row in rows if max(max(spec.src.ranks + spec.dst.ranks) for spec in row.tensors) < size]
    if rank == 0:
        log(
            f"{size} ranks on {topology.num_hosts} hosts; skipping {len(rows) - len(fitting)} rows that need more ranks"
        )
    before = _measure(rank, topology)
    planned = [plan_row(row, str(n), contenders, repeats, before) for n, row in enumerate(fitting)]
    by_key = {item.key: item for item in planned}
    results: list[tuple[Planned, dict[str, Any]]] = []

    with show_progress(len(planned), "rows", show=rank == 0) as advance:

        def on_report(report: tuple[Any, ...]) -> None:
            if report[0] == "row":
                log(by_key[report[1]].row.name)
                advance()
                results.append((by_key[report[1]], report[2]))

        run_jobs(rank, on_report, [BenchmarkJob(item.key, item.row.tensors, item.turns) for item in planned])
    after = _measure(rank, topology)
    if rank == 0:
        links, record = compare_links("this job", before, after, topology, is_given=topology_file is not None)
        write(record)
        for item, result in results:
            for record_of_row in make_records(item, result, {}, links, is_shared=False):
                write(record_of_row | {"valid": record["valid"]})
    dist.barrier()
    dist.destroy_process_group()
