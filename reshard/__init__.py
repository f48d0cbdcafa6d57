"""Move sharded tensors from one device mesh and layout to another.

>>> import reshard
>>> out = reshard.reshard(tensor, src_mesh, dst_mesh, src_spec="S0 R", dst_spec="R S0")  # doctest: +SKIP

Importing this package imports neither torch nor scipy; names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from reshard import forks as _forks  # noqa: F401  # which learns of every fork from here on
from reshard.version import __version__

if TYPE_CHECKING:
    from reshard.bound import Bound, find_bound, lower_bound
    from reshard.call import reshard, reshard_async
    from reshard.check import check_plan
    from reshard.errors import (
        ArgumentError,
        DisagreementError,
        LayoutError,
        MeshError,
        PartialError,
        PlanError,
        RankLostError,
        RemoteError,
        ReshardError,
        ResourceError,
        TopologyError,
        TransferTimeoutError,
        VerificationError,
    )
    from reshard.group import Group, close_group, join
    from reshard.handles import Handle
    from reshard.hosts import find_topology
    from reshard.layout import Layout, RegionLayout
    from reshard.local import execute_local, reshard_local
    from reshard.mesh import Mesh
    from reshard.mover import Mover
    from reshard.plan import Plan
    from reshard.planning import make_plan
    from reshard.simulation import Timeline, simulate
    from reshard.topology import Topology

_HOME = {
    "ArgumentError": "errors",
    "Bound": "bound",
    "DisagreementError": "errors",
    "Group": "group",
    "Handle": "handles",
    "Layout": "layout",
    "LayoutError": "errors",
    "Mesh": "mesh",
    "MeshError": "errors",
    "Mover": "mover",
    "PartialError": "errors",
    "Plan": "plan",
    "PlanError": "errors",
    "RankLostError": "errors",
    "RegionLayout": "layout",
    "RemoteError": "errors",
    "ReshardError": "errors",
    "ResourceError": "errors",
    "Timeline": "simulation",
    "Topology": "topology",
    "TopologyError": "errors",
    "TransferTimeoutError": "errors",
    "VerificationError": "errors",
    "check_plan": "check",
    "close_group": "group",
    "execute_local": "local",
    "find_bound": "bound",
    "find_topology": "hosts",
    "join": "group",
    "lower_bound": "bound",
    "make_plan": "planning",
    "reshard": "call",
    "reshard_async": "call",
    "reshard_local": "local",
    "simulate": "simulation",
}

__all__ = [
    "ArgumentError",
    "Bound",
    "DisagreementError",
    "Group",
    "Handle",
    "Layout",
    "LayoutError",
    "Mesh",
    "MeshError",
    "Mover",
    "PartialError",
    "Plan",
    "PlanError",
    "RankLostError",
    "RegionLayout",
    "RemoteError",
    "ReshardError",
    "ResourceError",
    "Timeline",
    "Topology",
    "TopologyError",
    "TransferTimeoutError",
    "VerificationError",
    "__version__",
    "check_plan",
    "close_group",
    "execute_local",
    "find_bound",
    "find_topology",
    "join",
    "lower_bound",
    "make_plan",
    "reshard",
    "reshard_async",
    "reshard_local",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'reshard' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"reshard.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
