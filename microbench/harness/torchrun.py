"""The same rows on real machines, one process per device started by ``torchrun``; no cluster is made."""

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
from microbench.harness.calibrate import deviations, mean_topology, measure_links, measured_topology
from microbench.harness.suite import MOST_DEVIATION, Planned, Request, make_records, plan_row
from microbench.harness.worker import Job, run_jobs
from reshard.errors import TopologyError
from reshard.topology.files import parse_rate, read_topology, topology_to_json
from reshard.topology.model import Host, Port, Topology


def _join_job(topology_file: Path | None, rate: str) -> tuple[int, Topology]:
    """Join the job's group; the own rank, and what the links should carry.

    Raises:
        TopologyError: the file does not cover the job's ranks.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    rank, size = dist.get_rank(), dist.get_world_size()
    if topology_file is None:
        names: list[Any] = [None] * size
        dist.all_gather_object(names, socket.gethostname())
        hosts = (Host((Port.of(parse_rate(rate)),)),)
        topology = Topology(Topology.from_hostnames(names).host_of_rank, hosts)
    else:
        topology = read_topology(topology_file)
    if len(topology.host_of_rank) != size:
        raise TopologyError(f"the topology has {len(topology.host_of_rank)} ranks, the job {size}")
    return rank, topology


def _measure(rank: int, topology: Topology) -> Topology:
    return measured_topology(topology, measure_links(rank, lambda value: None, topology))


def write_topology(out: Path, topology_file: Path | None, rate: str, say: Callable[[str], None]) -> None:
    """Measure what the links between the job's ranks carry, and write it as a file that ``read_topology`` reads.

    Args:
        out: where rank 0 writes it.
        topology_file, rate: as for :func:`run_on_machines`; hosts, NICs and pods are taken from there.

    Raises:
        TopologyError: the file does not cover the job's ranks, or all of them are on one host.
    """
    rank, topology = _join_job(topology_file, rate)
    if topology.num_hosts == 1:
        raise TopologyError(
            f"all {len(topology.host_of_rank)} ranks are on one host ({socket.gethostname()}): there is no link "
            "between hosts to measure"
        )
    found = _measure(rank, topology)
    if rank == 0:
        out.write_text(json.dumps(topology_to_json(found), indent=1) + "\n")
        say(f"{len(found.host_of_rank)} ranks on {found.num_hosts} hosts; the topology is in {out}")
    dist.barrier()
    dist.destroy_process_group()


def run_on_machines(
    rows: Sequence[Row],
    contenders: Sequence[str],
    repeats: int,
    write: Callable[[Request], None],
    say: Callable[[str], None],
    topology_file: Path | None,
    rate: str,
) -> None:
    """Run the rows that fit this job on its ranks; only rank 0 writes and says anything.

    Args:
        rows, contenders, repeats: as on a cluster; rows that need more ranks are left out.
        topology_file: what the links should carry; omitted, hosts are told apart by name and have one NIC of ``rate``.

    Raises:
        TopologyError: the file does not cover the job's ranks.
    """
    rank, topology = _join_job(topology_file, rate)
    size = len(topology.host_of_rank)
    fitting = [row for row in rows if max(max(spec.src.ranks + spec.dst.ranks) for spec in row.tensors) < size]
    if rank == 0:
        say(f"{size} ranks on {topology.num_hosts} hosts; {len(rows) - len(fitting)} rows need more ranks")
    before = _measure(rank, topology)
    planned = [plan_row(row, str(n), contenders, repeats, before) for n, row in enumerate(fitting)]
    by_key = {one.key: one for one in planned}
    results: list[tuple[Planned, dict[str, Any]]] = []

    def on_report(said: tuple[Any, ...]) -> None:
        if said[0] == "row":
            say(by_key[said[1]].row.name)
            results.append((by_key[said[1]], said[2]))

    run_jobs(rank, on_report, [Job(one.key, one.row.tensors, one.turns) for one in planned])
    after = _measure(rank, topology)
    if rank == 0:
        moved = max(map(abs, deviations(after, before).values()), default=0.0)
        off = max(max(map(abs, deviations(side, topology).values()), default=0.0) for side in (before, after))
        links = mean_topology(before, after)
        is_valid = moved <= MOST_DEVIATION and (topology_file is None or off <= MOST_DEVIATION)
        write(
            {
                "kind": "cluster",
                "cluster": "this job",
                "topology": topology_to_json(links),
                "set_up_seconds": 0.0,
                "latency_seconds": links.latency_seconds,
                "moved": round(moved, 4),
                "off": round(off, 4),
                "valid": is_valid,
            }
        )
        for one, result in results:
            for record in make_records(one, result, {}, links, is_shared=False):
                write(record | {"valid": is_valid})
    dist.barrier()
    dist.destroy_process_group()
