"""Sharded arrays on actors of a Ray cluster, moved between meshes of actors by one driver.

::

    trainer = reshard.ray.ActorMesh("2x4", num_hosts=2, name="trainer")
    server = reshard.ray.ActorMesh("3x2", num_hosts=3, name="server")
    weights = trainer.put(array, "S0 R")
    served = reshard.ray.reshard(weights, trainer, server, dst_spec="R S0")

Bytes go between actors over Gloo, never through the driver or the object store, except what ``put`` and ``gather`` are
asked to carry. The driver may be anywhere that ``ray.init`` connects from.
"""

from reshard.ray.actor_mesh import ActorMesh, ShardedArray
from reshard.ray.transfer import reshard, run

__all__ = ["ActorMesh", "ShardedArray", "reshard", "run"]
