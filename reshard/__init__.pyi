from .api.call import (
    reshard as reshard,
    reshard_async as reshard_async,
)
from .api.handle import (
    Handle as Handle,
)
from .api.local import (
    execute_local as execute_local,
    reshard_local as reshard_local,
)
from .api.mover import (
    Mover as Mover,
)
from .api.options import TransferOptions as TransferOptions
from .cli.html_report import plan_to_html as plan_to_html
from .codecs.codec import Codec as Codec
from .coordination.liveness.claims import join as join
from .coordination.process_group import Group as Group, close_group as close_group
from .coordination.topology_discovery import (
    find_topology as find_topology,
)
from .cost.lower_bound import Bound as Bound, find_bound as find_bound
from .cost.report import CostReport as CostReport
from .cost.simulator import (
    Timeline as Timeline,
    simulate as simulate,
)
from .errors import (
    ArgumentError as ArgumentError,
    CompressionError as CompressionError,
    DisagreementError as DisagreementError,
    LayoutError as LayoutError,
    MeshError as MeshError,
    PartialError as PartialError,
    PlanError as PlanError,
    RankLostError as RankLostError,
    RemoteError as RemoteError,
    ReshardError as ReshardError,
    ResourceError as ResourceError,
    TopologyError as TopologyError,
    TransferTimeoutError as TransferTimeoutError,
    VerificationError as VerificationError,
)
from .plan.check import (
    check_plan as check_plan,
)
from .plan.json import plan_from_json as plan_from_json, plan_to_json as plan_to_json
from .plan.model import (
    Plan as Plan,
)
from .plan.text_parser import parse_plan as parse_plan
from .planner.planning import (
    make_plan as make_plan,
)
from .planner.strategies.problem import PlanProblem as PlanProblem, Routes as Routes
from .ragged import NO_RANK as NO_RANK
from .sharding.layout import (
    Layout as Layout,
    RegionLayout as RegionLayout,
)
from .sharding.mesh import (
    Mesh as Mesh,
)
from .sharding.tensor_spec import TensorSpec as TensorSpec
from .topology.files import (
    read_topology as read_topology,
    topology_from_json as topology_from_json,
    topology_to_json as topology_to_json,
)
from .topology.model import (
    CodecRate as CodecRate,
    Host as Host,
    Port as Port,
    Topology as Topology,
)
from .topology.presets import load_preset as load_preset

__version__: str
