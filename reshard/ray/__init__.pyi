from .actor_mesh import ActorMesh as ActorMesh, ShardedArray as ShardedArray
from .driver_calls import reshard as reshard, run as run
