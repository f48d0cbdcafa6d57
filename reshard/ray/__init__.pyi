from .actor_mesh import ActorMesh as ActorMesh, ShardedArray as ShardedArray
from .transfer import reshard as reshard, run as run
