"""Topologies of common machines, by name. Rates are those of data sheets, in one direction."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.errors import TopologyError
from reshard.sharding.mesh import MAX_RANK
from reshard.topology.model import MESSAGE_SECONDS, Host, Port, Topology

_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Machine:
    """A kind of host.

    Attributes:
        devices, nics: numbers of devices and NICs. nic_gbit: rate of each NIC, Gbit/s.
        inside_bytes_per_second: rate of each device to other devices of the host.
        latency_seconds, inside_latency_seconds: per message, including software, between hosts and inside a host.
        about: a description for users.
    """

    devices: int
    nics: int
    nic_gbit: float
    inside_bytes_per_second: float
    latency_seconds: float
    inside_latency_seconds: float
    about: str


_RDMA_SECONDS, _INSIDE_SECONDS = 1.5e-5, 5e-6

MACHINES: dict[str, Machine] = {
    "p3.8xlarge": Machine(
        4, 1, 10, 1.5e11, MESSAGE_SECONDS, _INSIDE_SECONDS, "4 V100 with NVLink, one NIC of 10 Gbit/s"
    ),
    "dgx_a100": Machine(
        8, 8, 200, 3e11, _RDMA_SECONDS, _INSIDE_SECONDS, "8 A100 behind NVSwitch, 8 NICs of 200 Gbit/s"
    ),
    "dgx_h100": Machine(
        8, 8, 400, 4.5e11, _RDMA_SECONDS, _INSIDE_SECONDS, "8 H100 behind NVSwitch, 8 NICs of 400 Gbit/s"
    ),
    "pcie": Machine(8, 2, 100, 2.5e10, _RDMA_SECONDS, 1e-5, "8 devices on PCIe 4.0, 2 NICs of 100 Gbit/s"),
    "nvl72": Machine(
        72,
        72,
        400,
        9e11,
        _RDMA_SECONDS,
        _INSIDE_SECONDS,
        "a rack of 72 devices on one NVLink, a NIC of 400 Gbit/s each",
    ),
    "tcp": Machine(4, 1, 25, 1e10, MESSAGE_SECONDS, 3e-5, "4 devices, one NIC of 25 Gbit/s, plain TCP"),
}


def load_preset(name: str, num_ranks: int) -> Topology:
    """A topology of equal machines for ``num_ranks`` consecutive ranks, one rank per device.

    Raises:
        TopologyError: an unknown machine, or ``num_ranks`` is not a positive integer.
    """
    if name not in MACHINES:
        raise TopologyError(f"no preset {name!r}; choose one of {', '.join(MACHINES)}")
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or not 0 < num_ranks <= MAX_RANK:
        raise TopologyError(f"num_ranks is {num_ranks!r:.40}; it must be a number of ranks from 1 to {MAX_RANK:,}")
    machine = MACHINES[name]
    return Topology(
        tuple(rank // machine.devices for rank in range(num_ranks)),
        (Host((Port.of(machine.nic_gbit * _GBIT),) * machine.nics),),
        tuple(rank % machine.devices * machine.nics // machine.devices for rank in range(num_ranks)),
        inside_bytes_per_second=machine.inside_bytes_per_second,
        latency_seconds=machine.latency_seconds,
        inside_latency_seconds=machine.inside_latency_seconds,
    )
