"""Move sharded tensors from one device mesh and layout to another.

>>> import reshard
>>> out = reshard.reshard(tensor, src_mesh, dst_mesh, src_spec="S0 R", dst_spec="R S0")  # doctest: +SKIP

``__init__.pyi`` lists the public names; the code below reads it. Each name is imported on first use, so importing this
package imports neither torch nor scipy.
"""

from reshard import errors as errors, forks as _forks  # noqa: F401  # forks registers its handler before any fork
from reshard.public_api import public_names as _public_names

__version__ = "0.1.0"
__all__, __getattr__ = _public_names(__name__, __file__)
__all__ += ["errors"]


def __dir__() -> list[str]:
    return __all__
