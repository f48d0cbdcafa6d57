"""The network topology: hosts, NICs, pods and link rates; topology files; presets of common machines.

Imports the root and :mod:`reshard.sharding`.
"""

from reshard.topology.files import parse_rate, read_topology, topology_from_json, topology_to_json
from reshard.topology.model import INSIDE_MESSAGE_SECONDS, MAX_NICS, MESSAGE_SECONDS, CodecRate, Host, Link, Topology
from reshard.topology.presets import MACHINES, load_preset

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
