"""The network topology: hosts, NICs, pods and link rates; topology files; presets of common machines.

Imports the root and :mod:`reshard.sharding`.
"""

from reshard.topology.machine_presets import MACHINES, load_preset
from reshard.topology.topology import (
    INSIDE_MESSAGE_SECONDS,
    MAX_NICS,
    MESSAGE_SECONDS,
    CodecRate,
    Host,
    Link,
    Topology,
)
from reshard.topology.topology_files import parse_rate, read_topology, topology_from_json, topology_to_json

__all__ = [
    "INSIDE_MESSAGE_SECONDS",
    "MACHINES",
    "MAX_NICS",
    "MESSAGE_SECONDS",
    "CodecRate",
    "Host",
    "Link",
    "Topology",
    "load_preset",
    "parse_rate",
    "read_topology",
    "topology_from_json",
    "topology_to_json",
]
