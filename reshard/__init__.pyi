from . import errors as errors
from .api.arguments.options import TransferOptions as TransferOptions
from .api.call import reshard as reshard, reshard_async as reshard_async
from .api.mover import Mover as Mover
from .api.one_process import reshard_local as reshard_local
from .api.transfers.handle import Handle as Handle
from .codecs.codec import Codec as Codec
from .coordination.groups.joining import join as join
from .coordination.groups.process_group import Group as Group, close_group as close_group
from .coordination.topology_discovery import find_topology as find_topology
from .cost.cost_report import CostReport as CostReport
from .cost.lower_bound import find_bound as find_bound
from .cost.simulator import simulate as simulate
from .errors import ReshardError as ReshardError
from .plan import (
    Plan as Plan,
    check_plan as check_plan,
    parse_plan as parse_plan,
    plan_from_json as plan_from_json,
    plan_to_json as plan_to_json,
)
from .planner.planning import make_plan as make_plan
from .sharding.layout import Layout as Layout, RegionLayout as RegionLayout
from .sharding.mesh import Mesh as Mesh
from .sharding.tensor_spec import TensorSpec as TensorSpec
from .topology.machine_presets import load_preset as load_preset
from .topology.topology import CodecRate as CodecRate, Topology as Topology
from .topology.topology_files import read_topology as read_topology, topology_from_json as topology_from_json

__version__: str
