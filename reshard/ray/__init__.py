"""Sharded arrays on Ray actors. One driver moves them between meshes of actors.

::

    trainer = reshard.ray.ActorMesh("2x4", num_hosts=2, name="trainer")
    server = reshard.ray.ActorMesh("3x2", num_hosts=3, name="server")
    weights = trainer.put(array, "S0 R")
    served = reshard.ray.reshard(weights, trainer, server, dst_spec="R S0")

Actors exchange data over Gloo. Only ``put``, ``shards`` and ``gather`` send arrays through the driver and the object
store. The driver may run on any machine from which ``ray.init`` can connect.

May import :mod:`reshard.testing`, :mod:`reshard.api` and the packages below it.
"""

from reshard.public_api import public_names as _public_names

__all__, __getattr__ = _public_names(__name__, __file__)
