"""Topologies of common machines, by name. Rates come from data sheets and are per direction."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.errors import TopologyError
from reshard.formatting import brief, did_you_mean
from reshard.sharding import check_integer
from reshard.topology.topology import MAX_RANKS, MESSAGE_SECONDS, Host, Link, Topology

_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Machine:
    """A type of host.

    Attributes:
        devices, nics: number of devices, number of NICs.
        nic_gbit: rate of each NIC in Gbit/s.
        inside_bytes_per_second: rate of each device to the other devices of its host.
        inside_total_bytes_per_second: rate of all devices of a host together; None where links of devices are separate.
        latency_seconds: latency of a message between hosts, including software.
        inside_latency_seconds: the same inside a host.
        about: a description.
    """

    devices: int
    nics: int
    nic_gbit: float
    inside_bytes_per_second: float
    latency_seconds: float
    inside_latency_seconds: float
    about: str
    inside_total_bytes_per_second: float | None = None


#: Latencies of a message over RDMA and over NVLink.
_RDMA_SECONDS, _NVLINK_SECONDS = 1.5e-5, 5e-6

MACHINES: dict[str, Machine] = {
    "p3.8xlarge": Machine(
        devices=4,
        nics=1,
        nic_gbit=10,
        inside_bytes_per_second=1.5e11,
        latency_seconds=MESSAGE_SECONDS,
        inside_latency_seconds=_NVLINK_SECONDS,
        about="4 V100 with NVLink, one NIC of 10 Gbit/s",
    ),
    "dgx_a100": Machine(
        devices=8,
        nics=8,
        nic_gbit=200,
        inside_bytes_per_second=3e11,
        latency_seconds=_RDMA_SECONDS,
        inside_latency_seconds=_NVLINK_SECONDS,
        about="8 A100 behind NVSwitch, 8 NICs of 200 Gbit/s",
    ),
    "dgx_h100": Machine(
        devices=8,
        nics=8,
        nic_gbit=400,
        inside_bytes_per_second=4.5e11,
        latency_seconds=_RDMA_SECONDS,
        inside_latency_seconds=_NVLINK_SECONDS,
        about="8 H100 behind NVSwitch, 8 NICs of 400 Gbit/s",
    ),
    "pcie": Machine(
        devices=8,
        nics=2,
        nic_gbit=100,
        inside_bytes_per_second=2.5e10,
        latency_seconds=_RDMA_SECONDS,
        inside_latency_seconds=1e-5,
        about="8 devices on PCIe 4.0, 2 NICs of 100 Gbit/s",
    ),
    "nvl72": Machine(
        devices=72,
        nics=72,
        nic_gbit=400,
        inside_bytes_per_second=9e11,
        latency_seconds=_RDMA_SECONDS,
        inside_latency_seconds=_NVLINK_SECONDS,
        about="a rack of 72 devices on one NVLink domain, a NIC of 400 Gbit/s each",
    ),
    "tcp": Machine(
        devices=4,
        nics=1,
        nic_gbit=25,
        inside_bytes_per_second=1e10,
        latency_seconds=MESSAGE_SECONDS,
        inside_latency_seconds=3e-5,
        about="4 devices, one NIC of 25 Gbit/s, plain TCP",
        inside_total_bytes_per_second=2e10,
    ),
}


def load_preset(name: str, num_ranks: int) -> Topology:
    """A topology of equal machines for ``num_ranks`` consecutive ranks, one rank per device.

    Raises:
        TopologyError: the name is unknown, or ``num_ranks`` is not an integer from 1 to ``MAX_RANKS``.
    """
    if not isinstance(name, str) or name not in MACHINES:
        raise TopologyError(f"no preset {brief(name)}; presets are {', '.join(MACHINES)}{did_you_mean(name, MACHINES)}")
    num_ranks = check_integer(num_ranks, "num_ranks", 1, MAX_RANKS, TopologyError)
    machine = MACHINES[name]
    return Topology(
        tuple(rank // machine.devices for rank in range(num_ranks)),
        (Host((Link.of(machine.nic_gbit * _GBIT),) * machine.nics),),
        tuple(rank % machine.devices * machine.nics // machine.devices for rank in range(num_ranks)),
        inside_bytes_per_second=machine.inside_bytes_per_second,
        inside_total_bytes_per_second=machine.inside_total_bytes_per_second,
        latency_seconds=machine.latency_seconds,
        inside_latency_seconds=machine.inside_latency_seconds,
    )
